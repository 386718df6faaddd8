"""Listens to operators: every overload that reaches the dispatcher while a capture is active,
beside the modules that call them.

A dispatch mode of ours lies on the threads that call the model or opened the region. It is put on
top again for every outermost call of a model, so that it sees what the program sees; while compiled
code runs it is off (`torch_compiled.Trap`). Each operator runs exactly once, also when this code
fails, with view tracking and autocast as it would have had them without a mode. An operator of a
backward pass belongs to the forward operator that made its autograd node: torch numbers the nodes
as they are made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_schema import AUTOCAST_KEYS, restored
from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.dtensor_placement import HALF, is_half
from whence.instrument.torch.modes import ModesOff, NoFunctions
from whence.instrument.torch.modules import Listener, _Frame, _Thread
from whence.instrument.torch.operator_call import OperatorCall, Overload, overload_of
from whence.instrument.torch.sampling import Sampling
from whence.instrument.torch.sources import source_here
from whence.instrument.torch.weak_registry import Root, StorageRef, storage_ref
from whence.instrument.wording import raised
from whence.records import OVERWRITTEN, Call, Ref

FORWARDS = 1 << 17
"""Of so many forward operators it is known which autograd node is theirs; older ones are forgotten.
"""
_OVERLOAD, _TENSOR = torch._ops.OpOverload, torch.Tensor
_depth, _backward_task, _backward_node = (
    torch._C._len_torch_dispatch_stack,
    torch._C._current_graph_task_id,
    torch._C._current_autograd_node,
)
_tracing, _inference, _grad = (
    torch._C._get_tracing_state,
    torch.is_inference_mode_enabled,
    torch.is_grad_enabled,
)


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    # Without this a higher-order operator under the mode raises into the user's program.
    supports_higher_order_operators = True

    def __init__(self, listener: OperatorListener) -> None:
        super().__init__()
        self.listener, self._operator = listener, listener._operator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler in torch._dynamo.disable, which imports dynamo (seconds) at
        # the first operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else a compiled function that is called while the mode is somewhere below another one is
        # silently eager.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operator(func, types, args, kwargs or {})


class _Region:
    """Operators outside any module, while they are of one kind and belong to one call of a root."""

    __slots__ = (
        "keep",
        "kind",
        "micro",
        "note",
        "number",
        "occurrence",
        "operators",
        "order",
        "phase",
        "root",
        "state",
        "step",
        "wanted",
    )
    root: Root
    wanted: bool

    def __init__(self, kind: str, order: int) -> None:
        self.kind, self.order, self.operators = kind, order, 0
        self.phase = "forward" if kind == "region" else kind
        self.number, self.note, self.keep = kind, "", False
        self.step = self.micro = self.occurrence = 0
        self.state: dict[str, int] = {}


class _Local(_Thread):
    """running: an operator that is recorded runs now. suspended: the mode that was taken off before
    compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = self.optimizing = False
        self.region: _Region | None = None
        self.root: Root | None = None
        self.autocast: tuple[str, ...] = ()
        self.suspended: _Mode | None = None

    def forgets(self, mode: _Mode) -> bool:
        """Was this mode taken off before compiled code? Then it does not come back."""
        if self.suspended is not mode:
            return False
        self.suspended = None
        return True


class OperatorListener(Listener):
    """A `Listener` that records every operator below the modules, and outside them below a call of
    kind "region".

    lasting: the capture ends with the process, so a mode may stay on any thread that has called a
    model.
    """

    def __init__(
        self, session: Session, model: Any = None, *, lasting: bool = False, **how: Any
    ) -> None:
        self._sampling = Sampling(session)
        self._forward: dict[int, tuple[str, str, int, bool]] = {}
        self._states: dict[str, tuple[int, int, dict[str, int]]] = {}
        self._regions: dict[int, _Region] = {}
        self._unwritten: dict[int, StorageRef] = {}
        self._passed: set[str] = set()
        self._lasting = lasting
        self._takes_inputs, self._takes_outputs = (
            session.selector.slots("input"),
            session.selector.slots("output"),
        )
        self._nowhere = Root("region", self)
        self._opened: _Mode | None = None
        self._engine: tuple[Any, Any] | None = None
        self._autocast_methods: tuple[Any, Any] | None = None
        self._pre_hook: Any = None
        super().__init__(session, model, **how)
        self._trap.on_left(self._left_compiled)
        self._local: _Local = _Local()

    # ---- installing

    def install(self) -> None:
        """Start listening to modules, and on this thread to operators (unless the capture ends with
        the process: then with a model).
        """
        super().install()
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._load_kernels()
        self._pre_hook = register_optimizer_step_pre_hook(lambda *_: self._optimizer_steps())
        self._follow_autocast()
        self._be_above_in_backward()
        if not self._lasting:
            self._opened = self._enter_mode()

    def remove(self) -> None:
        """Stop listening. A mode of ours that lies below one of the program's stays there and does
        nothing.
        """
        if not self._removed:
            self.active = False
            if self._pre_hook is not None:
                self._pre_hook.remove()
            self._leave_autocast()
            if self._engine is not None and torch.autograd._engine_run_backward is self._engine[1]:
                torch.autograd._engine_run_backward = self._engine[0]
            if self._opened is not None:
                self._take_off(self._opened)
            if not self.session.failed:
                with self._lock:
                    for region in list(self._regions.values()):
                        self._end_region(region)
                    self._sights.drain()
                    self._sampling.tell()
        super().remove()

    def _enter_mode(self) -> _Mode:
        mode = _Mode(self)
        mode.__enter__()
        return mode

    @staticmethod
    def _take_off(mode: Any) -> None:
        """Take the mode away where it is on top."""
        depth = torch._C._len_torch_dispatch_stack()
        if depth == 0 or torch._C._get_dispatch_stack_at(depth - 1) is not mode:
            return
        while True:
            mode.__exit__(None, None, None)
            depth = torch._C._len_torch_dispatch_stack()
            mode = torch._C._get_dispatch_stack_at(depth - 1) if depth else None
            # of a capture that ended before the one above it
            if not isinstance(mode, _Mode) or mode.listener.active:
                return

    def _on_top(self) -> bool:
        depth = torch._C._len_torch_dispatch_stack()
        return (
            depth > 0
            and getattr(torch._C._get_dispatch_stack_at(depth - 1), "listener", None) is self
        )

    @contextlib.contextmanager
    def _above(self) -> Iterator[None]:
        """A mode of ours on top of those of the program, as long as this lasts."""
        local = self._local
        if (
            not self.active
            or local.busy
            or local.running
            or local.suspended is not None
            or self._on_top()
        ):
            yield
            return
        mode = self._enter_mode()
        try:
            yield
        finally:
            if not local.forgets(mode):
                self._take_off(mode)

    def _be_above_in_backward(self) -> None:
        run = torch.autograd._engine_run_backward

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not torch._C._len_torch_dispatch_stack():  # a thread that is not listened to
                return run(*args, **kwargs)
            with self._above():
                return run(*args, **kwargs)

        self._engine = run, _engine_run_backward
        torch.autograd._engine_run_backward = _engine_run_backward

    # ---- autocast: inside a mode's handler it is switched off, so it is followed from outside

    def _follow_autocast(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        enter, leave, local = kind.__enter__, kind.__exit__, self._local

        def __enter__(self: Any) -> Any:  # noqa: N807
            out = enter(self)
            local.autocast = _autocast_here()
            return out

        def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
            out = leave(self, *error)
            local.autocast = _autocast_here()
            return out

        self._autocast_methods = ((enter, leave), (__enter__, __exit__))
        kind.__enter__, kind.__exit__ = __enter__, __exit__
        local.autocast = _autocast_here()

    def _leave_autocast(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        if (
            self._autocast_methods is not None
            and (kind.__enter__, kind.__exit__) == self._autocast_methods[1]
        ):
            kind.__enter__, kind.__exit__ = self._autocast_methods[0]
        self._autocast_methods = None

    # ---- compiled code

    def _met_compiled(self, callback: Any) -> None:
        """Compiled code runs next on this thread: no mode of ours may be around it."""
        local = self._local
        depth = torch._C._len_torch_dispatch_stack()
        mode = torch._C._get_dispatch_stack_at(depth - 1) if depth else None
        if not isinstance(mode, _Mode) or mode.listener is not self:
            return
        mode.__exit__(None, None, None)
        local.suspended = mode
        if local.stack and self.active:
            frame = local.stack[-1]
            frame.note = frame.note or "runs compiled code: inside not seen"
            self._tell_compiler(frame, callback)
        elif self.active and "" not in self._passed:
            self._passed.add("")
            self.session.note(
                "inside-not-seen",
                "compiled code ran outside any module: its operators are not recorded",
            )

    def _left_compiled(self) -> None:
        local = self._local
        if local.suspended is not None:
            mode, local.suspended = local.suspended, None
            mode.__enter__()

    # ---- modules

    def _observe(
        self,
        previous: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        local = self._local
        if local.stack or local.busy or (self.model is not None and id(module) not in self._known):
            return super()._observe(previous, module, args, kwargs)
        self._trap.set()
        if local.suspended is not None and not inside() and not self._trap.running():
            self._left_compiled()
        local.autocast = _autocast_here()
        if self._lasting and not torch._C._len_torch_dispatch_stack():
            self._enter_mode()  # and it stays, for what the thread does between two calls
        with self._above():
            return super()._observe(previous, module, args, kwargs)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
        if not self._local.stack and torch._C._current_graph_task_id() == -1:
            self._close_region()
        return super()._enter(module, args, kwargs)

    def _begin_root(self, frame: _Frame, root: Root, scope: str) -> None:
        super()._begin_root(frame, root, scope)
        if frame.phase != "recompute":
            self._local.root = root
            before = self._states.get(root.name)
            # of operators ahead of the first call
            if before is not None and before[:2] == (
                frame.step,
                frame.micro,
            ):
                frame.state.update(
                    {key: n for key, n in before[2].items() if "/" in key or key[:1] == "<"}
                )
            self._states[root.name] = frame.step, frame.micro, frame.state

    def _end_root(self, frame: _Frame) -> None:
        super()._end_root(frame)
        if self._unwritten:
            self._unwritten = {
                k: ref
                for k, ref in self._unwritten.items()
                if not torch.UntypedStorage._expired(ref.cdata)
            }
        self._sampling.step_ended()

    def _expect_program(self, *_: Any) -> None:
        """A module has no program of its own: its operators have theirs."""

    def _program_of(self, frame: _Frame, error: str) -> tuple[str, str]:
        return "", frame.note or "its operators are calls of their own"

    def _optimizer_steps(self) -> None:
        self._local.optimizing = True

    def _optimizer_stepped(self) -> None:
        self._local.optimizing = False
        with self._lock:
            self._close_region()
        super()._optimizer_stepped()

    # ---- what is outside any module

    def _region(self, kind: str) -> _Region:
        local = self._local
        root = local.root or (
            next(iter(self._roots.values())) if len(self._roots) == 1 else self._nowhere
        )
        step, micro, state = self._states.get(root.name) or (0, 0, {})
        region = local.region
        if (
            region is not None
            and region.kind == kind
            and region.root is root
            and (region.step, region.micro) == (step, micro)
        ):
            return region
        self._close_region()
        region = local.region = _Region(kind, self.session.next_order())
        region.root, region.step, region.micro = root, step, micro
        region.state = self._states.setdefault(root.name, (step, micro, state))[2]
        region.occurrence = _counted(region.state, f"<{kind}>")
        session = self.session
        if root is self._nowhere and not session.begin():
            region.wanted = False
        else:
            region.wanted = session.takes_all or session.selector.wants("", "", 0, "0", step)
        self._regions[id(local.__dict__)] = region
        return region

    def _close_region(self) -> None:
        local = self._local
        if local.region is not None:
            self._end_region(local.region)
            local.region = None

    def _end_region(self, region: _Region) -> None:
        for key in [k for k, r in self._regions.items() if r is region]:
            del self._regions[key]
        if not region.wanted or self.session.failed:
            return
        self._sights.call(
            Call(
                id=region.order,
                scope="",
                root=region.root.name,
                step=region.step,
                order=region.order,
                rank=self.session.rank,
                micro=region.micro,
                phase=region.phase,
                op=region.kind,
                occurrence=region.occurrence,
                kind="region",
                op_type=region.kind,
                number=region.number,
            )
        )
        if not self._roots:
            self._sampling.step_ended()

    # ---- one operator

    def _operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        local = self._local
        if (
            local.running
            or local.busy
            or not self.active
            or type(func) is not _OVERLOAD
            or (types and _is_traced(types))
            or _tracing() is not None
        ):
            return self._pass(func, args, kwargs)
        made: OperatorCall | None = None
        local.busy = True
        try:
            with self._lock, ModesOff() if _depth() else NoFunctions():
                made = self._begin(local, func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            self._give_up(error)
        finally:
            local.busy = False
        if made is None:
            return self._pass(func, args, kwargs)
        autocast = local.autocast
        local.running = True
        started = time.perf_counter()
        try:
            if autocast or _inference():
                with restored(func, autocast):
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
        except BaseException as error:
            made.seconds = time.perf_counter() - started
            local.running = False
            self._end(local, made, None, raised(error))
            raise
        made.seconds = time.perf_counter() - started
        local.running = False
        self._end(local, made, out, "")
        return out

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            self.active
            and not isinstance(func, torch._ops.OpOverload)
            and str(func) not in self._passed
        ):
            self._passed.add(str(func))
            scope = self._local.stack[-1].scope if self._local.stack else ""
            self.session.note(
                "inside-not-seen",
                f"{func} is a higher-order operator: what it runs is not recorded",
                scope,
            )
        with restored(func, self._local.autocast):
            return func(*args, **kwargs)

    def _begin(self, local: _Local, func: Any, args: Any, kwargs: Any) -> OperatorCall | None:
        session = self.session
        if session.failed:
            self.active = False
            return None
        self._trap.set()
        overload = overload_of(func)
        if overload.tool:
            return None
        stack = local.stack
        frame = stack[-1] if stack else None
        task = _backward_task() != -1
        forward, source = -1, ""
        above: Any
        if frame is not None and (not task or frame.phase == "recompute"):
            above, scope, phase, wanted = frame, frame.scope, frame.phase, frame.wanted
            if frame.note.startswith("scripted"):
                return None
        elif task:
            node = _backward_node()
            if node is not None and type(node).__name__ == "CompiledFunctionBackward":
                self._note_compiled_backward()
                return None
            above, phase = frame or self._region("backward"), "backward"
            scope, wanted = "", above.wanted
            if node is not None:
                number = node._sequence_nr()
                # A write into a view takes one more number, behind that of the operator.
                known = self._forward.get(number) or self._forward.get(number - 1)
                if known is not None:
                    scope, source, forward, wanted = known
        else:
            above = self._region("optimizer" if local.optimizing else "region")
            scope, phase, wanted = "", above.phase, above.wanted
        order = session.next_order()
        if not source:
            source = source_here()
        if phase != "backward" and _grad() and phase != "optimizer":
            self._remember(torch.autograd._get_sequence_nr() - 1, (scope, source, order, wanted))
        if not wanted:
            return None
        made = OperatorCall(overload, order, scope, phase, above, forward, source, (args, kwargs))
        above.operators += 1
        made.place = above.operators
        counts = above.state
        key = scope + overload.key if phase == "forward" else f"{phase}:{scope}{overload.key}"
        made.occurrence = counts[key] = counts.get(key, -1) + 1
        made.take()
        self._take_inputs_of(made)
        return made

    def _remember(self, number: int, what: tuple[str, str, int, bool]) -> None:
        known = self._forward
        if number >= 0 and number not in known:
            known[number] = what
            if len(known) > FORWARDS:
                for old in list(known)[: FORWARDS // 2]:
                    del known[old]

    def _note_compiled_backward(self) -> None:
        if "backward" not in self._passed:
            self._passed.add("backward")
            self.session.note(
                "inside-not-seen",
                "the backward pass of compiled code: its operators are not recorded",
            )

    def _take_inputs_of(self, made: OperatorCall) -> None:
        session, sampling, overload = self.session, self._sampling, made.overload
        chosen = not sampling.on or sampling.choose(made)
        if chosen and session.elements_on:
            session.over_budget(made.scope, made.above.step, self._sights.waiting_bytes)
            made.keep = session.elements_on
        if sampling.on:
            made.written = sampling.writes(made, chosen)
            if sampling.counts:
                for slot, tensor in made.inputs:
                    self._count(made, slot, tensor)
            if not made.written:
                return
        if self._takes_inputs:
            again, keep, seen, refs = self._sights.again, made.keep, made.seen, made.refs
            doubtful = self._unwritten or overload.overwritten
            for slot, tensor in made.inputs:
                if doubtful and (why := self._unreadable_input(overload, slot, tensor)):
                    made.see(slot, self._sights.unreadable(tensor, why), why)
                    continue
                sight = seen[slot] = again(tensor, keep) or self._sight(
                    tensor, slot, made, tried=True
                )
                refs.append(Ref(slot, sight[0], sight[1]))
        if overload.random:
            for device, state in made.states():
                made.see(f"state.{device}", self._sight(state, f"state.{device}", made), "")

    def _unreadable_input(self, overload: Overload, slot: str, tensor: Any) -> str:
        if slot in overload.overwritten:
            return OVERWRITTEN
        return (
            "memory that was not written yet"
            if self._unwritten and _storage(tensor) in self._unwritten
            else ""
        )

    def _end(self, local: _Local, made: OperatorCall, out: Any, error: str) -> None:
        local.busy = True
        try:
            with self._lock, ModesOff() if _depth() else NoFunctions():
                if not self.session.failed:
                    self._finish_operator(made, out, error)
        except Exception as ours:  # noqa: BLE001 - as above
            self._give_up(ours)
        finally:
            local.busy = False

    def _finish_operator(self, made: OperatorCall, out: Any, error: str) -> None:
        overload, session = made.overload, self.session
        results = [] if error else made.results(out)
        if made.placements and is_half(overload.name):
            for slot, tensor, _ in results if made.written and self._takes_outputs else ():
                made.see(slot, self._sights.unreadable(tensor, HALF), "")
        elif overload.plain and not self._unwritten:
            if made.written and self._takes_outputs:
                self._take_plain(made, results)
        else:
            self._take_results_of(made, results)
        if self._sampling.counts:
            if not overload.uninitialised:
                for slot, tensor, _ in results:
                    self._count(made, slot, tensor)
            self._sampling.tally(made)
        if not made.written:
            return
        program, no_program = (
            ("", "the operator raised") if error else self._one_operation(made, out)
        )
        above = made.above
        self._sights.call(
            Call(
                id=made.order,
                scope=made.scope,
                root=above.root.name,
                step=above.step,
                order=made.order,
                rank=session.rank,
                micro=above.micro,
                phase=made.phase,
                op=overload.name,
                occurrence=made.occurrence,
                kind="operator",
                op_type=overload.base,
                source=made.source,
                parent=above.order,
                number=made.number,
                leaf=True,
                training=getattr(above, "training", False),
                refs=tuple(made.refs),
                arguments=made.arguments,
                program=program,
                no_program=no_program,
                notes=made.notes,
                error=error,
                aliases=made.aliases(results),
                seconds=made.seconds,
                forward=made.forward,
                placements=made.placements,
            )
        )

    def _take_plain(self, made: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        """Results that are new tensors or views of what went in, of which all was written."""
        view, keep = made.overload.view, made.keep
        base = made.inputs[0][1] if view and made.inputs else None
        for slot, tensor, _ in results:
            sight = None
            if base is not None and type(base) in (_TENSOR, torch.nn.Parameter):
                sight = self._sights.again(tensor, keep, base)
            sight = made.seen[slot] = sight or self._sight(
                tensor, slot, made, unsettled=view, tried=True
            )
            made.refs.append(Ref(slot, sight[0], sight[1]))

    def _take_results_of(self, made: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        overload = made.overload
        if made.written and self._takes_outputs:
            for slot, tensor, same in results:
                if overload.uninitialised and tensor.numel():
                    self._unwritten[_storage(tensor)] = storage_ref(tensor)
                    made.see(
                        slot,
                        self._sights.unreadable(tensor, "memory that was not written yet"),
                        "unwritten",
                    )
                elif same and (seen := made.seen.get(same)) is not None:
                    made.see(slot, seen, "")
                elif self._unwritten and self._still_unwritten(made, slot, tensor):
                    made.see(
                        slot,
                        self._sights.unreadable(tensor, "memory that was not written yet"),
                        "unwritten",
                    )
                else:
                    unsettled = overload.view or bool(overload.writes)
                    made.see(
                        slot, self._sight(tensor, slot, made, unsettled=unsettled, tried=True), ""
                    )
        else:
            for slot, tensor, _ in results:
                if overload.uninitialised and tensor.numel():
                    self._unwritten[_storage(tensor)] = storage_ref(tensor)
                elif slot.startswith("mutated"):
                    self._unwritten.pop(_storage(tensor), None)

    def _still_unwritten(self, made: OperatorCall, slot: str, tensor: Any) -> bool:
        """Is this a view of memory that nobody wrote? What was written now is no longer among
        it.
        """
        if slot.startswith("mutated"):
            self._unwritten.pop(_storage(tensor), None)
        return made.overload.view and _storage(tensor) in self._unwritten

    def _count(self, made: OperatorCall, slot: str, tensor: Any) -> None:
        if self.session.options.keep != "none":
            self._sights.figures(tensor, made.range_of(slot))

    def _one_operation(self, made: OperatorCall, out: Any) -> tuple[str, str]:
        options = self.session.options
        if not options.programs or options.keep != "full":
            return "", "programs were not recorded"
        program, reason = made.program(out)
        if program is not None and program.id not in self._programs:
            self._programs.add(program.id)
            new = program
            self._sights.emit(lambda: self.session.program(new))
        return (program.id if program is not None else ""), reason


def _counted(table: dict[str, int], key: str) -> int:
    count = table[key] = table.get(key, -1) + 1
    return count


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
    ):  # a wrapper, or a layout without one
        return 0


def _autocast_here() -> tuple[str, ...]:
    return tuple(key for device, key in AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device))


def _is_traced(types: Any) -> bool:
    """Are these tensors of a compiler that traces the program, not of a run?"""
    return any(kind.__name__ in ("FakeTensor", "FunctionalTensor", "ProxyTensor") for kind in types)
