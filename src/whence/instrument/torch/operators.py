"""Records operators: every overload that reaches the dispatcher while a capture is active, along
with the modules that call them.

A dispatch mode of whence is active on the threads that call the model or opened the region. It is
put on top of the stack for every outermost call of a model, so that it sees what the program sees,
and is off while compiled code runs (`compiled_boundary.CompiledCodeGuard`). Each operator runs
exactly once, even if this code fails, with the view tracking and autocast it would have without a
mode. An operator of a backward pass belongs to the forward operator that made its autograd node:
torch numbers the nodes in order of creation.

Memory that no operator has written yet is recognised, and its content is not recorded.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import NAMES
from whence.frameworks.torch_schema import AUTOCAST_KEYS, restored
from whence.instrument.call_frames import Args, CallFrames, Kwargs, ThreadCalls
from whence.instrument.guard import Replacements
from whence.instrument.session import Session
from whence.instrument.torch.before_steps import call_before_steps
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.dtensor_placement import HALF, is_half
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.operator_call import OperatorCall, widen
from whence.instrument.torch.operator_program import program_of
from whence.instrument.torch.overload import Overload, overload_of
from whence.instrument.torch.program_cache import NoPrograms
from whence.instrument.torch.regions import Region, Regions
from whence.instrument.torch.sources import source_here
from whence.instrument.torch.tensor_content import StorageRef, storage_ref
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.wording import raised
from whence.records import OVERWRITTEN, Call, Ref
from whence.records.marks import NOT_WRITTEN
from whence.records.slots import is_mutated

FORWARDS = 1 << 17
"""Number of forward operators whose autograd node is remembered; older ones are forgotten."""
_OVERLOAD = torch._ops.OpOverload
_backward_task, _backward_node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_tracing, _grad = (
    torch._C._get_tracing_state,
    torch.is_grad_enabled,
)


class _ForwardOperators:
    """Forward operators by the number of their autograd node: (scope, source, order, selected)."""

    def __init__(self) -> None:
        self._table: dict[int, tuple[str, str, int, bool]] = {}

    def add(self, forward: tuple[str, str, int, bool]) -> None:
        """Note an operator that has the next node number, if it makes a node."""
        number, table = torch.autograd._get_sequence_nr() - 1, self._table
        if number >= 0 and number not in table:
            table[number] = forward
            if len(table) > FORWARDS:
                for old in list(table)[: FORWARDS // 2]:
                    del table[old]

    def of(self, node: Any) -> tuple[str, str, int, bool] | None:
        """The operator that made a node, None where it is unknown or forgotten."""
        number = node._sequence_nr()
        # A write into a view takes one more number, behind that of the operator.
        return self._table.get(number) or self._table.get(number - 1)


class OperatorListener(Listener):
    """A `Listener` that also records every operator: those in modules below the module's call,
    others below a call of kind "region".

    lasting: the capture ends with the process, so a mode may stay on any thread that has called a
    model.
    """

    def __init__(
        self, session: Session, model: Any = None, *, lasting: bool = False, **how: Any
    ) -> None:
        self._sampling = Sampling(session)
        self._forward = _ForwardOperators()
        self._counts: dict[str, tuple[int, int, dict[str, int]]] = {}
        self._passed: set[str] = set()
        self._lasting = lasting
        self._opened: Any = None
        self._pre_hook: Any = None
        super().__init__(session, model, thread=_OperatorThread(), **how)
        self._modes = _OperatorModes(self.frames, self._operator)
        self._compiled_code.on_left(self._modes.resume)
        self._regions = Regions(session, self.registry, self.thread, self._region_ended)
        self._operands = _OperatorTensors(session, self.registry, self._sampling)
        self.programs = NoPrograms("its operators are calls of their own")

    # ---- installing

    def install(self) -> None:
        """Start listening to modules, and to operators on this thread. If the capture lasts until
        the process ends, operators are listened to from the first call of a model on.
        """
        super().install()
        self._pre_hook = call_before_steps(self._optimizer_steps)
        self._modes.install()
        if not self._lasting:
            self._opened = self._modes.enter()

    def remove(self) -> None:
        """Stop listening. A mode of whence below one of the program's modes stays on the stack and
        does nothing.
        """
        if not self._removed:
            self.active = False
            if self._pre_hook is not None:
                self._pre_hook.remove()
            self._modes.remove()
            if self._opened is not None:
                self._modes.take_off(self._opened)
            if not self.session.failed:
                with self.frames.lock:
                    self._regions.close_all()
                    self.registry.staging.drain()
                    self._sampling.tell()
        super().remove()

    # ---- compiled code

    def _met_compiled(self, callback: Any) -> None:
        """Called before compiled code runs on this thread: removes the mode and notes that the
        inside is not seen.
        """
        if not self._modes.suspend() or not self.active:
            return
        stack = self.thread.stack
        if stack:
            frame = stack[-1]
            frame.note = frame.note or "runs compiled code: inside not seen"
            self._compilers.note(frame, callback)
        else:
            self._note_unseen(
                "", "compiled code ran outside any module: its operators are not recorded"
            )

    def _note_unseen(self, key: str, text: str, scope: str = "") -> None:
        """Note once for each key that something is not recorded."""
        if key not in self._passed:
            self._passed.add(key)
            self.session.note("inside-not-seen", text, scope)

    # ---- modules

    def _observe(
        self, previous: Callable[..., Any], module: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        thread = self.thread
        if (
            thread.stack
            or thread.busy
            or (self.model is not None and self.modules.get(module) is None)
        ):
            return super()._observe(previous, module, args, kwargs)
        self._compiled_code.set()
        if thread.suspended is not None and not inside() and not self._compiled_code.running():
            self._modes.resume()
        self._modes.note_autocast()
        if self._lasting and not torch._C._len_torch_dispatch_stack():
            self._modes.enter()  # and it stays, for what the thread does between two calls
        with self._modes.above():
            return super()._observe(previous, module, args, kwargs)

    def _enter(self, module: Any, args: Args, kwargs: Kwargs) -> ModuleFrame | None:
        if not self.thread.stack and _backward_task() == -1:
            self._regions.close()
        return super()._enter(module, args, kwargs)

    def _begin_root(self, frame: ModuleFrame, root: ModuleRoot) -> None:
        super()._begin_root(frame, root)
        if frame.phase != "recompute":
            self.thread.root = root
            last_counts = self._counts.get(root.name)
            # keep the counts of operators that ran before the first call
            if last_counts is not None and last_counts[:2] == (frame.step, frame.micro):
                frame.counts.update(
                    {key: n for key, n in last_counts[2].items() if "/" in key or key[:1] == "<"}
                )
            self._counts[root.name] = frame.step, frame.micro, frame.counts

    def _end_root(self, frame: ModuleFrame) -> None:
        super()._end_root(frame)
        self._operands.prune()
        self._sampling.step_ended()

    def _optimizer_steps(self, _: Any) -> None:
        self.thread.optimizing = True

    def _optimizer_stepped(self, optimizer: Any, is_skipped: bool) -> None:
        self.thread.optimizing = False
        with self.frames.lock:
            self._regions.close()
        super()._optimizer_stepped(optimizer, is_skipped)

    def _region(self, kind: str) -> Region:
        """The region for operators that run outside any module now."""
        roots = self.modules.roots
        root = self.thread.root or (
            next(iter(roots.values())) if len(roots) == 1 else self._regions.nowhere
        )
        return self._regions.enter(kind, root, *self._counts.setdefault(root.name, (0, 0, {})))

    def _region_ended(self) -> None:
        if not self.modules.roots:
            self._sampling.step_ended()

    # ---- one operator

    def _operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        thread = self.thread
        if (
            thread.running
            or thread.busy
            or not self.frames.active
            or type(func) is not _OVERLOAD
            or (types and _is_traced(types))
            or _tracing() is not None
        ):
            return self._pass(func, args, kwargs)
        guarded = self.frames.guarded
        call = guarded(self._begin, func, args, kwargs)
        if call is None:
            return self._pass(func, args, kwargs)
        autocast = thread.autocast
        thread.running = True
        started = time.perf_counter()
        try:
            with restored(func, autocast):
                out = func(*args, **kwargs)
        except BaseException as error:
            call.seconds = time.perf_counter() - started
            thread.running = False
            guarded(self._end, call, None, raised(error))
            raise
        call.seconds = time.perf_counter() - started
        thread.running = False
        guarded(self._end, call, out, "")
        return out

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that is not recorded."""
        if self.active and not isinstance(func, _OVERLOAD):
            scope = self.thread.stack[-1].scope if self.thread.stack else ""
            text = f"{func} is a higher-order operator: what it runs is not recorded"
            self._note_unseen(str(func), text, scope)
        with restored(func, self.thread.autocast):
            return func(*args, **kwargs)

    def _begin(self, func: Any, args: Any, kwargs: Any) -> OperatorCall | None:
        session = self.session
        if session.failed:
            self.active = False
            return None
        self._compiled_code.set()
        overload = overload_of(func)
        if overload.tool:
            return None
        origin = self._origin()
        if origin is None:
            return None
        above, scope, phase, selected, forward, source = origin
        order = session.next_order()
        if not source:
            source = source_here()
        if phase != "backward" and phase != "optimizer" and _grad():
            self._forward.add((scope, source, order, selected))
        if not selected:
            return None
        site = above, scope, phase, forward, source
        call = OperatorCall(overload, order, site, (args, kwargs))
        above.operators += 1
        call.place = above.operators
        key = scope + overload.key if phase == "forward" else f"{phase}:{scope}{overload.key}"
        counts = above.counts
        call.occurrence = counts[key] = counts.get(key, -1) + 1
        call.take()
        self._operands.take_inputs(call)
        return call

    def _origin(self) -> tuple[Any, str, str, bool, int, str] | None:
        """(enclosing call, scope, phase, whether it is selected, order of the forward operator or
        -1, source line) of the operator that runs next; None if it is not recorded. The last two
        are known for operators of a backward pass only.
        """
        thread = self.thread
        frame = thread.stack[-1] if thread.stack else None
        task = _backward_task() != -1
        if frame is not None and (not task or frame.phase == "recompute"):
            if frame.note.startswith("scripted"):
                return None
            return frame, frame.scope, frame.phase, frame.selected, -1, ""
        if not task:
            region = self._region("optimizer" if thread.optimizing else "region")
            return region, "", region.phase, region.selected, -1, ""
        node = _backward_node()
        if node is not None and type(node).__name__ == "CompiledFunctionBackward":
            text = "the backward pass of compiled code: its operators are not recorded"
            self._note_unseen("backward", text)
            return None
        above: Any = frame or self._region("backward")
        if node is not None:
            forward = self._forward.of(node)
            if forward is not None:
                scope, source, order, selected = forward
                return above, scope, "backward", selected, order, source
        return above, "", "backward", above.selected, -1, ""

    def _end(self, call: OperatorCall, out: Any, error: str) -> None:
        overload, session = call.overload, self.session
        if session.failed:
            return
        results = [] if error else call.results(out)
        self._operands.take_results(call, results)
        if not call.is_written:
            return
        program, no_program = "", "the operator raised" if error else self.writer.unwanted
        if not no_program:
            program, no_program = self.writer.put(*program_of(call, out))
        above = call.above
        self.registry.call(
            Call(
                id=call.order,
                scope=call.scope,
                root=above.root.name,
                step=above.step,
                order=call.order,
                rank=session.rank,
                micro=above.micro,
                phase=call.phase,
                op=overload.name,
                occurrence=call.occurrence,
                kind="operator",
                op_type=overload.base,
                source=call.source,
                parent=above.order,
                number=call.number,
                leaf=True,
                training=above.training,
                refs=tuple(call.refs),
                arguments=call.arguments,
                program=program,
                no_program=no_program,
                notes=call.notes,
                error=error,
                aliases=call.aliases(results),
                seconds=call.seconds,
                forward=call.forward,
                placements=call.placements,
            )
        )


def _is_traced(types: Any) -> bool:
    """Whether these tensor types belong to a compiler that traces the program instead of running
    it.
    """
    return any(kind.__name__ in ("FakeTensor", "FunctionalTensor", "ProxyTensor") for kind in types)


_TENSOR = torch.Tensor


class _OperatorTensors:
    """Records the tensors of operators."""

    def __init__(self, session: Session, registry: TensorRegistry, sampling: Sampling) -> None:
        self._session, self._registry, self._sampling = session, registry, sampling
        self._unwritten: dict[int, StorageRef] = {}
        self._takes_inputs, self._takes_outputs = (
            session.selector.slots("input"),
            session.selector.slots("output"),
        )

    def prune(self) -> None:
        """Forget memory that is gone."""
        if self._unwritten:
            self._unwritten = {
                k: ref
                for k, ref in self._unwritten.items()
                if not torch.UntypedStorage._expired(ref.cdata)
            }

    def take_inputs(self, call: OperatorCall) -> None:
        """Record the inputs of an operator before it runs."""
        session, sampling, overload = self._session, self._sampling, call.overload
        registry = self._registry
        chosen = not sampling.on or sampling.choose(call)
        if chosen and session.elements_on:
            session.over_budget(call.scope, call.above.step, registry.staging.waiting_bytes)
            call.keep = session.elements_on
        if sampling.on:
            call.is_written = sampling.writes(call, chosen)
            if sampling.counts:
                for slot, tensor in call.inputs:
                    self._count(call, slot, tensor)
            if not call.is_written:
                return
        if self._takes_inputs:
            known_again, keep, sights, refs = registry.again, call.keep, call.sights, call.refs
            doubtful = self._unwritten or overload.overwritten
            for slot, tensor in call.inputs:
                if doubtful and (why := self._unreadable_input(overload, slot, tensor)):
                    call.see(slot, registry.unreadable(tensor, why), why)
                    continue
                sight = sights[slot] = known_again(tensor, keep) or registry.record_of(
                    tensor, slot, call, tried=True
                )
                refs.append(Ref(slot, sight[0], sight[1]))
        if overload.random:
            for device, state in call.states():
                slot = f"state.{device}"
                call.see(slot, registry.record_of(state, slot, call), "")

    def _unreadable_input(self, overload: Overload, slot: str, tensor: Any) -> str:
        if slot in overload.overwritten:
            return OVERWRITTEN
        return NOT_WRITTEN if self._unwritten and _storage(tensor) in self._unwritten else ""

    def take_results(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        """Record what an operator returned and wrote. results: (slot, tensor, slot of the input
        that this tensor is, or "").
        """
        overload, takes = call.overload, call.is_written and self._takes_outputs
        if call.placements and is_half(overload.name):
            for slot, tensor, _ in results if takes else ():
                call.see(slot, self._registry.unreadable(tensor, HALF), "")
        elif overload.plain and not self._unwritten:
            if takes:
                self._take_plain(call, results)
        elif takes:
            for slot, tensor, input_slot in results:
                self._take_result(call, slot, tensor, input_slot)
        else:
            for slot, tensor, _ in results:
                if overload.uninitialised and tensor.numel():
                    self._unwritten[_storage(tensor)] = storage_ref(tensor)
                elif is_mutated(slot):
                    self._unwritten.pop(_storage(tensor), None)
        if self._sampling.counts:
            self._count_results(call, results)

    def _take_plain(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        """Record results that are new tensors or views of inputs, all of written memory."""
        view, keep, registry = call.overload.view, call.keep, self._registry
        base = call.inputs[0][1] if view and call.inputs else None
        for slot, tensor, _ in results:
            sight = None
            if base is not None and type(base) in (_TENSOR, torch.nn.Parameter):
                sight = registry.again(tensor, keep, base)
            sight = call.sights[slot] = sight or registry.record_of(
                tensor, slot, call, unsettled=view, tried=True
            )
            call.refs.append(Ref(slot, sight[0], sight[1]))

    def _take_result(self, call: OperatorCall, slot: str, tensor: Any, input_slot: str) -> None:
        overload, registry = call.overload, self._registry
        if overload.uninitialised and tensor.numel():
            self._unwritten[_storage(tensor)] = storage_ref(tensor)
            call.see(slot, registry.unreadable(tensor, NOT_WRITTEN), "unwritten")
        elif input_slot and (sight := call.sights.get(input_slot)) is not None:
            call.see(slot, sight, "")
        elif self._unwritten and self._still_unwritten(call, slot, tensor):
            call.see(slot, registry.unreadable(tensor, NOT_WRITTEN), "unwritten")
        else:
            unsettled = overload.view or bool(overload.writes)
            sight = registry.record_of(tensor, slot, call, unsettled=unsettled, tried=True)
            call.see(slot, sight, "")

    def _still_unwritten(self, call: OperatorCall, slot: str, tensor: Any) -> bool:
        """Whether this is a view of memory that no operator has written. Memory written by this
        call is removed from the unwritten first.
        """
        if is_mutated(slot):
            self._unwritten.pop(_storage(tensor), None)
        return call.overload.view and _storage(tensor) in self._unwritten

    def _count_results(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        if not call.overload.uninitialised:
            for slot, tensor, _ in results:
                self._count(call, slot, tensor)
        self._sampling.tally(call)

    def _count(self, call: OperatorCall, slot: str, tensor: Any) -> None:
        if self._session.options.keep != "none":
            self._registry.figures(tensor, call.range_of(slot))


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0  # a wrapper, or a layout without one


_depth = torch._C._len_torch_dispatch_stack
_Handler = Callable[[Any, Any, Any, Any], Any]


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    # Without this a higher-order operator under the mode raises into the user's program.
    supports_higher_order_operators = True

    def __init__(self, modes: _OperatorModes, handler: _Handler) -> None:
        super().__init__()
        self.modes, self._handler = modes, handler

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler in torch._dynamo.disable, which imports dynamo (seconds) at
        # the first operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise a compiled function silently runs eagerly when it is called while this mode lies
        # below another one.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, types, args, kwargs or {})


class _OperatorThread(ThreadCalls):
    """Thread-local state of an operator listener.

    running: a recorded operator is running. optimizing: inside a step of an optimiser. region,
    root: the open region, and the root called last. autocast: dispatch keys with autocast on.
    suspended: the mode removed before compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = self.optimizing = False
        self.region: Region | None = None
        self.root: ModuleRoot | None = None
        self.autocast: tuple[str, ...] = ()
        self.suspended: _Mode | None = None

    def forgets(self, mode: _Mode) -> bool:
        """Whether this mode was removed before compiled code. If so, it is not restored."""
        if self.suspended is not mode:
            return False
        self.suspended = None
        return True


class _OperatorModes:
    """The dispatch modes of one listener, on all threads. handler: called with (operator, types,
    args, kwargs) in place of each operator.
    """

    def __init__(self, frames: CallFrames, handler: _Handler) -> None:
        self._frames, self._thread, self._handler = frames, frames.thread, handler
        self._replaced = Replacements()

    @property
    def active(self) -> bool:
        """Whether the listener of these modes is active."""
        return self._frames.active

    def install(self) -> None:
        """Follow autocast and backward passes."""
        self._follow_autocast()
        self._follow_backward()

    def remove(self) -> None:
        """Stop following autocast and backward passes."""
        self._replaced.remove()

    # ---- the stack of modes

    def enter(self) -> _Mode:
        """Put a mode on this thread."""
        mode = _Mode(self, self._handler)
        mode.__enter__()
        return mode

    @staticmethod
    def take_off(mode: Any) -> None:
        """Remove the mode if it is on top."""
        if _top() is not mode:
            return
        while True:
            mode.__exit__(None, None, None)
            mode = _top()
            # else remove also the mode of a capture that ended earlier, but lay below this one
            if not isinstance(mode, _Mode) or mode.modes.active:
                return

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Context with a mode of whence on top of the program's modes."""
        thread, top = self._thread, _top()
        if (
            not self.active
            or thread.busy
            or thread.running
            or thread.suspended is not None
            or (isinstance(top, _Mode) and top.modes is self)
        ):
            yield
            return
        mode = self.enter()
        try:
            yield
        finally:
            if not thread.forgets(mode):
                self.take_off(mode)

    def suspend(self) -> bool:
        """Remove the mode before compiled code; False if it is not on top."""
        mode = _top()
        if not isinstance(mode, _Mode) or mode.modes is not self:
            return False
        mode.__exit__(None, None, None)
        self._thread.suspended = mode
        return True

    def resume(self) -> None:
        """Restore the mode that was removed before compiled code."""
        thread = self._thread
        if thread.suspended is not None:
            mode, thread.suspended = thread.suspended, None
            mode.__enter__()

    def _follow_backward(self) -> None:
        run = torch.autograd._engine_run_backward

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not _depth():  # a thread that is not listened to
                return run(*args, **kwargs)
            with self.above():
                return run(*args, **kwargs)

        self._replaced.put(torch.autograd, "_engine_run_backward", _engine_run_backward)

    # ---- autocast: inside a mode's handler it is switched off, so it is followed from outside

    def note_autocast(self) -> None:
        """Remember for which devices autocast is on, on this thread."""
        self._thread.autocast = tuple(
            key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)
        )

    def _follow_autocast(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        enter, leave, note = kind.__enter__, kind.__exit__, self.note_autocast

        def __enter__(self: Any) -> Any:  # noqa: N807
            out = enter(self)
            note()
            return out

        def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
            out = leave(self, *error)
            note()
            return out

        self._replaced.put(kind, "__enter__", __enter__)
        self._replaced.put(kind, "__exit__", __exit__)
        note()


def _top() -> Any:
    depth = _depth()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


# The choice of operator calls that are written and keep their elements, and counts of all calls.

NOTE = "operators"
TELL_S = 5.0


class _Tally:
    """Calls of one signature since the last note."""

    __slots__ = ("arguments", "count", "op", "phases", "scopes", "seconds", "tables", "tensors")

    def __init__(self, call: OperatorCall) -> None:
        self.op, self.arguments, self.tensors = (
            call.overload.name,
            call.arguments,
            [[s, *_look(t)] for s, t in call.inputs],
        )
        self.clear()

    def clear(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.scopes: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        # Ranges per call. Figures of device tensors arrive later, so they are merged late.
        self.tables: list[dict[str, list[Any]]] = []


class Sampling:
    """Chooses calls by the options `samples` and `dedup`, depending only on the seed, the operator
    and the number of the call:

    for every operator, the calls with the lowest hashes so far keep their elements, so two runs of
    one program keep the same calls. on: whether there is a choice to make. counts: whether every
    call is counted, with the ranges of its tensors, because not every call is written.
    """

    def __init__(self, session: Session) -> None:
        options = session.options
        self._session, self._samples, self.counts = session, options.samples, options.dedup
        self.on = self.counts or self._samples is not None
        self._seed = options.seed or 0
        self._called: dict[str, int] = {}
        self._lowest: dict[str, list[int]] = {}
        self._tallies: dict[Any, _Tally] = {}
        self._last_told = time.monotonic()

    def choose(self, call: OperatorCall) -> bool:
        """Whether this call keeps its elements."""
        if self._samples is None:
            return True
        if self._samples == 0:
            return False
        op = call.overload.name
        number = self._called[op] = self._called.get(op, -1) + 1
        rank = -xxhash.xxh3_64_intdigest(f"{self._seed}|{op}|{number}".encode())
        lowest = self._lowest.setdefault(op, [])
        if len(lowest) < self._samples:
            heapq.heappush(lowest, rank)
            return True
        return heapq.heappushpop(lowest, rank) != rank

    def writes(self, call: OperatorCall, chosen: bool) -> bool:
        """Whether this call is written. With dedup, these are the first call of each signature and
        the calls chosen by `samples`.
        """
        if not self.counts:
            return True
        key = (
            call.overload.name,
            tuple((s, _look(t)) for s, t in call.inputs),
            repr(call.arguments),
        )
        first = key not in self._tallies
        if first:
            self._tallies[key] = _Tally(call)
        call.tally = self._tallies[key]
        return first or (chosen and self._samples is not None)

    def tally(self, call: OperatorCall) -> None:
        """Count a call that has ended."""
        tally = call.tally
        assert tally is not None
        tally.count += 1
        tally.seconds += call.seconds
        tally.scopes[call.scope] = tally.scopes.get(call.scope, 0) + 1
        tally.phases[call.phase] = tally.phases.get(call.phase, 0) + 1
        tally.tables.append(call.ranges or {})
        if len(tally.tables) > 64:
            tally.tables = [_merged(tally.tables)]

    def step_ended(self) -> None:
        """Write the counts every few seconds, so that a killed program leaves them too."""
        if self.counts and time.monotonic() - self._last_told > TELL_S:
            self.tell()

    def tell(self) -> None:
        """Write a note of what was counted since the last one."""
        if not self.counts:
            return
        self._last_told = time.monotonic()
        entries = [
            {
                "op": t.op,
                "tensors": t.tensors,
                "arguments": t.arguments,
                "count": t.count,
                "seconds": t.seconds,
                "scopes": t.scopes,
                "phases": t.phases,
                "ranges": _merged(t.tables),
            }
            for t in self._tallies.values()
            if t.count
        ]
        for tally in self._tallies.values():
            tally.clear()
        if entries:
            self._session.note(NOTE, msgspec.json.encode(entries).decode())


def _look(tensor: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return (
        dtype,
        () if tensor.is_nested else tuple(tensor.shape),
        tensor.stride() if strided and not tensor.is_contiguous() else (),
    )


def _merged(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    merged: dict[str, list[Any]] = {}
    for table in tables:
        for slot, figures in table.items():
            widen(merged.setdefault(slot, [None, None, 0, 0]), *figures)
    return merged
