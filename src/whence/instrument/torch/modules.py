"""Records torch modules: every call of every `nn.Module` below a root, with its parameters, inputs,
outputs and mutations.

Compiled and scripted modules are called through the same wrapper: their boundary is recorded, with
a note that the inside was not seen. While the wrapper reads tensors, the program's dispatch and
function modes are off, so that they see nothing of it.

Calls that only infer shapes are not recorded: a pipeline stage of torch calls the program's own
module with autograd on before the first step, to learn the shapes of its outputs.

`Listener` takes two interfaces: one that changes the program, and one that records the tensors of a
call.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from whence.errors import StoreFailed
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_arrays import NAMES, address_of, tensors_in
from whence.frameworks.torch_trees import CLOSED, NESTING, SIMPLE, ObjectSnapshot, is_plain_object
from whence.instrument.call_frames import Args, CallFrames, Kwargs, ThreadCalls, count
from whence.instrument.session import Session
from whence.instrument.step_choice.gate import StepGate
from whence.instrument.torch.caller_code import is_block_cache, tensors_of
from whence.instrument.torch.compiled_boundary import (
    CompiledCodeGuard,
    is_compilers,
)
from whence.instrument.torch.frames import ModuleFrame, call_of
from whence.instrument.torch.gated_steps import GatedSteps, call_after_steps
from whence.instrument.torch.modes import HIDING, is_traced
from whence.instrument.torch.module_calls import ModuleCalls
from whence.instrument.torch.module_info import (
    HeldTensor,
    ModuleInfo,
    ModuleRoot,
    home_of,
    is_boundary,
    is_optimized,
)
from whence.instrument.torch.module_registry import ModuleRegistry
from whence.instrument.torch.program_cache import NoPrograms, ProgramCache, ProgramWriter
from whence.instrument.torch.settings import Compilers
from whence.instrument.torch.sources import source_here
from whence.instrument.torch.tensor_content import Pending
from whence.instrument.torch.tensor_identity import FindExternal, TensorRegistry
from whence.instrument.torch.training.listener import training_of
from whence.instrument.wording import raised
from whence.records import Collective, CollectiveKind, Ref
from whence.records.marks import Mark
from whence.records.slots import is_param

_tracing, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_grad = torch.is_grad_enabled


class Listener:
    """Records module calls into a session while installed.

    model: record only calls of this module and below it; None: of every module (each outermost one
    is a root). find_external: returns where a parameter's bytes already lie in the user's
    checkpoint file. staged: send CPU tensors through the staging ring too, as device tensors always
    are. changes: deliberate changes of the program, None for none. thread: thread-local state, of a
    subclass where a listener needs more than the stack of calls. gate: selects the recorded steps,
    None for all selected by options.
    """

    def __init__(
        self,
        session: Session,
        model: Any = None,
        *,
        find_external: FindExternal | None = None,
        staged: bool = False,
        changes: Interventions | None = None,
        thread: ThreadCalls | None = None,
        gate: StepGate | None = None,
    ) -> None:
        self.session, self.model, self._changes = session, model, changes
        self._removed = False
        self.frames = CallFrames(session, HIDING, thread)
        self.thread: Any = self.frames.thread
        self._compiled_code = CompiledCodeGuard(self._met_compiled)
        self._compilers = _CompilerNotes(session)
        self.modules = ModuleRegistry(session)
        self.registry = TensorRegistry(
            session,
            find_external=find_external,
            staged=staged,
            on_error=self.frames.give_up,
            busy=self.frames.be_busy,
            looks=self.frames.looks,
            remembers=session.options.level == "op",
        )
        self.tensors: _TakesTensors = CallTensors(session, self.registry)
        self.writer = ProgramWriter(session, self.registry)
        self.programs: ProgramCache | NoPrograms = ProgramCache(
            session, self.registry, self.frames, self._compiled_code, self.writer
        )
        self.training = training_of(
            session, self.frames, self.registry, self.writer, self.modules, self._compiled_code
        )
        self._collectives = Collectives(session, self.frames, self.modules.roots)
        self._steps: GatedSteps | None = None
        observe = self._observe
        if gate is not None:
            known = self.frames, self.modules, self.registry
            self._steps = GatedSteps(gate, session, *known, self._met, self.training)
            observe = _unless_dry_run(self._steps.observing(observe), self.frames)
        self._calls = ModuleCalls(self.frames, observe)
        self._optimizer_hook: Any = None
        if model is not None:
            self._new_root(model)

    @property
    def active(self) -> bool:
        """Whether the listener records. Set it to False to stop for a while."""
        return self.frames.active

    @active.setter
    def active(self, active: bool) -> None:
        self.frames.active = active

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        self._calls.wrap()
        if self._steps is not None:
            self._steps.install()
        if self.training is not None:
            self.training.install()
        self._collectives.install()
        if hasattr(os, "register_at_fork"):
            me = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forked(me))

        self._optimizer_hook = call_after_steps(self._optimizer_stepped)
        self.active = True

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        if self._removed:
            return
        self.active, self._removed = False, True
        self.frames.asleep = False
        self._calls.unwrap()
        self._collectives.remove()
        if self.training is not None:
            self.training.remove()
        if self._steps is not None:
            self._steps.remove()
        if self._changes is not None:
            self._changes.finish()
        self._compiled_code.clear()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        self.registry.close()
        self.programs.close()
        self.modules.clear()
        self.tensors.clear()

    def drain(self) -> None:
        """Wait until everything recorded so far is written."""
        with self.frames.lock:
            self.registry.staging.drain()

    def abandon(self) -> None:
        """Stop without writing anything more, in a forked child: the files belong to the parent."""
        self.frames.forked()
        self.registry.staging.abandon()
        self._calls.unwrap()
        if self._changes is not None:
            self._changes.undo()
        _ABANDONED.append(self)

    # ---- one call

    def _observe(
        self, previous: Callable[..., Any], module: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        thread = self.thread
        if thread.busy or _tracing() is not None or (_depth() and is_traced()):
            return previous(module, *args, **kwargs)
        guarded, stack = self.frames.guarded, thread.stack
        if not stack and _PIPELINING in sys.modules and _is_dry_run():
            with self.frames.aside():
                return previous(module, *args, **kwargs)
        training = self.training.model_begins() if self.training and not stack else None
        above = stack[-1].recorder if stack else None
        if above is not None:
            above.pause()
        frame = guarded(self._enter, module, args, kwargs)
        if frame is None:
            if above is not None:
                above.abandon("calls a module that could not be listened to")
            with training.loss.around_uncaptured(module) if training else nullcontext():
                return previous(module, *args, **kwargs)
        try:
            if frame.recorder is None:
                out = previous(module, *args, **kwargs)
            else:
                with frame.recorder:
                    out = previous(module, *args, **kwargs)
        except BaseException as error:
            guarded(self._leave, frame, None, raised(error))
            raise
        if self._changes is not None:
            out = self._changes.left(frame, args, kwargs, out)
        guarded(self._leave, frame, out, "")
        if above is not None:
            above.resume()
        if self._changes is not None:
            out = self._changes.taken(frame, args, kwargs, out)
        if training is not None:
            training.loss.model_ended(frame)
        return out

    def _enter(self, module: Any, args: Args, kwargs: Kwargs) -> ModuleFrame | None:
        session = self.session
        if session.failed:
            self.active = False
            return None
        stack = self.thread.stack
        parent = stack[-1] if stack else None
        info = self.modules.get(module) or self._met(module, parent)
        if info is None:
            return None
        frame = ModuleFrame(module, info, -1, parent)
        if parent is None:
            self._begin_root(frame, info.root)
        frame.order = session.next_order()
        counts, scope = frame.counts, frame.scope
        frame.occurrence = counts[scope] = counts.get(scope, -1) + 1
        frame.selected = session.takes_all or session.selector.wants(
            frame.scope, info.op_type, frame.depth, frame.number, frame.step
        )
        stack.append(frame)
        if not frame.selected:
            frame.note = Mark.NOT_SELECTED.value
            return frame
        elements_on = session.elements_on
        if elements_on:
            session.over_budget(frame.scope, frame.step, self.registry.staging.waiting_bytes)
            frame.keep = session.elements_on and not session.sampled
        if info.closed or module._compiled_call_impl is not None:
            self._note_boundary(frame)
        inputs = self.tensors.take_inputs(frame, args, kwargs)
        self.programs.expect(frame, inputs)
        if self.training is not None and (_grad() or (parent and parent.first_node >= 0)):
            self.training.entered(frame, inputs)
        if parent is not None and parent.recorder is not None:
            parent.recorder.child_enters(frame.place, inputs)
        return frame

    def _met(self, module: Any, parent: ModuleFrame | None) -> ModuleInfo | None:
        """The `ModuleInfo` of a module that is called for the first time; None if its calls are not
        recorded.
        """
        if is_compilers(module):
            return None
        if parent is not None:
            return self.modules.adopt(module, parent.root, parent.scope)
        if self.model is not None:
            return self.modules.known_compiled(module)
        self._new_root(module)
        return self.modules.get(module) if self.session.active else None

    def _new_root(self, module: Any) -> None:
        root = self.modules.new_root(module)
        if root is None or not self.session.begin():
            return
        self.modules.note_settings(module, root)
        if self._changes is not None:
            self._changes.met(root.name, module)

    def _note_boundary(self, frame: ModuleFrame) -> None:
        """Note at a module why its inside is not seen."""
        self._compilers.note_boundary(frame)

    def _leave(self, frame: ModuleFrame, out: Any, error: str) -> None:
        self.frames.leave(frame)
        session = self.session
        if session.failed:
            self.active = False
            return
        parent = frame.parent
        program = no_program = ""
        if frame.selected:
            self.tensors.take_results(frame, out, error)
            program, no_program = self.programs.program_of(frame, error)
            frame.recorder = None  # it refers to the frame
        gradients: tuple[str, ...] = ()
        followed = frame.first_node >= 0 or (parent is not None and parent.first_node >= 0)
        if self.training is not None and followed:
            gradients = self.training.left(frame, program, failed=bool(error))
        above = parent.recorder if parent is not None else None
        if above is not None and error:
            above.abandon("an exception left a module it calls")
        elif above is not None:
            above.child_leaves(frame.place, frame.results)
        if error and error.startswith("_StopRecomputationError"):
            # torch's way to end a recomputation once backward has what it needs.
            error, frame.note = "", frame.note or "recomputed as far as backward needed it"
        call = call_of(frame, session.rank, program, no_program, error)
        if frame.placements or gradients:
            call = msgspec.structs.replace(call, placements=frame.placements, gradients=gradients)
        self.registry.call(call)
        if parent is None:
            self._end_root(frame)

    # ---- roots and their steps

    def _begin_root(self, frame: ModuleFrame, root: ModuleRoot) -> None:
        root.begin(frame, self.training)
        if frame.phase == "recompute":
            return
        self.registry.staging.begin_step(root.name)

    def _end_root(self, frame: ModuleFrame) -> None:
        session, name, step = self.session, frame.root.name, frame.step
        if frame.phase != "recompute":
            self.registry.staging.emit(lambda: session.end_step(name, step))
        self.registry.staging.flush()
        self.registry.prune()
        self.tensors.prune()
        if self._steps is not None:
            self._steps.ended()

    def _optimizer_stepped(self, optimizer: Any, is_skipped: bool) -> None:
        if self.training is not None:
            self.training.stepped(optimizer, is_skipped)
        with self.frames.lock:
            ended = [r for r in self.modules.roots.values() if r.optimizer_stepped()]
        if ended and self._steps is not None:
            self.frames.guarded(self._steps.step_ended)

    def _met_compiled(self, callback: Any) -> None:
        """Called before compiled code runs on this thread: ends recordings, since no mode of whence
        may be active then.
        """
        stack = self.thread.stack
        if self.training is not None:
            self.training.drop("runs compiled code")
        if stack and callback not in (None, False):
            self._compilers.note(stack[-1], callback)
        for frame in stack:
            if frame.recorder is not None and frame.recorder.listening:
                frame.recorder.abandon("runs compiled code")


def _forked(listener: weakref.ref[Listener]) -> None:
    owner = listener()
    if owner is not None:
        owner.abandon()


# Kept so that nothing of them is finalised in the child: their buffers belong to the parent.
_ABANDONED: list[Listener] = []


class _CompilerNotes:
    """Notes how compiled code was compiled, once per place."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._compilers = Compilers()

    def note_boundary(self, frame: ModuleFrame) -> None:
        """Note at a module why its inside is not seen."""
        module = frame.module
        if isinstance(module, torch.jit.ScriptModule):
            frame.note = "scripted: inside not seen"
        elif module._compiled_call_impl is not None or is_optimized(module):
            frame.note = "compiled: inside not seen"
            self.note(frame, module)

    def note(self, frame: ModuleFrame, compiled: Any) -> None:
        """Note how `compiled` (a module, or dynamo's callback) was compiled."""
        facts = self._compilers.met(frame.root.name, frame.scope, compiled)
        if facts is not None:
            self._session.note("compiled", msgspec.json.encode(facts).decode(), frame.scope)


_PIPELINING = "torch.distributed.pipelining.stage"
_FUNCTIONS = {"_forward_metadata_inference", "_shape_inference"}
_FRAMES = 16
"""Most Python frames between one of these functions and the module's call."""


def _unless_dry_run(observe: Callable[..., Any], frames: CallFrames) -> Callable[..., Any]:
    """Wraps `observe` so that calls that only infer shapes run unrecorded."""

    def observed(previous: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if not frames.thread.stack and _is_dry_run():
            with frames.aside():
                return previous(module, *args, **kwargs)
        return observe(previous, module, args, kwargs)

    return observed


def _is_dry_run() -> bool:
    """Whether the call that begins now is made by torch's pipelining to infer shapes."""
    if _PIPELINING not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _PIPELINING:
            return True
        frame = frame.f_back
    return False


class Interventions(Protocol):
    """Deliberate changes of the program in a capture: planted faults, patched tensors, forced
    tokens.
    """

    def met(self, root: str, module: Any) -> None:
        """Called before a root is called for the first time."""

    def left(self, frame: Any, args: Args, kwargs: Kwargs, out: Any) -> Any:
        """The value that a call returns in place of `out`. frame: the call that ends."""

    def taken(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The value that the program gets in place of `out`, after `out` was recorded."""

    def undo(self) -> None:
        """Undo all changes. Idempotent."""

    def finish(self) -> None:
        """Undo all changes, and note what was done."""


class _TakesTensors(Protocol):
    """Records the tensors of module calls."""

    def take_inputs(
        self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """(slot, tensor) of everything a call was handed, recorded where inputs are wanted."""

    def take_results(self, frame: ModuleFrame, out: Any, error: str) -> None:
        """Record mutations and outputs of a call that ends."""

    def prune(self) -> None:
        """Forget objects that are gone."""

    def clear(self) -> None:
        """Forget everything."""


# Collectives and messages of a program: one line for each, written when it is issued, so that the
# line exists even if the job hangs in it.
#
# Everything that uses a process group (functions of `torch.distributed`, functional collectives,
# DTensors, FSDP, the reducer of DDP, pipelines) calls operators of one library of the dispatcher.
# These operators get a kernel under a dispatch key that they leave free and that comes just before
# the device keys. The kernel passes the arguments to the watchers and calls the device's kernel. It
# sends, copies and keeps nothing and does not wait. The GIL is free while the device's kernel runs:
# a worker thread of a group may need it.

_KINDS = {
    "allreduce_": CollectiveKind.ALL_REDUCE,
    "allreduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "reduce_": CollectiveKind.REDUCE,
    "broadcast_": CollectiveKind.BROADCAST,
    "allgather_": CollectiveKind.ALL_GATHER,
    "_allgather_base_": CollectiveKind.ALL_GATHER,
    "allgather_coalesced_": CollectiveKind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": CollectiveKind.ALL_GATHER,
    "reduce_scatter_": CollectiveKind.REDUCE_SCATTER,
    "_reduce_scatter_base_": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": CollectiveKind.REDUCE_SCATTER,
    "alltoall_": CollectiveKind.ALL_TO_ALL,
    "alltoall_base_": CollectiveKind.ALL_TO_ALL,
    "gather_": CollectiveKind.GATHER,
    "scatter_": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
    "monitored_barrier_": CollectiveKind.BARRIER,
    "send": CollectiveKind.SEND,
    "recv_": CollectiveKind.RECEIVE,
    "recv_any_source_": CollectiveKind.RECEIVE,
}
_IN_PLACE = ("tensors", "tensor")
_GIVEN = ("inputs", "input", "input_tensors", "input_tensor", "input_list", *_IN_PLACE)
_TAKEN = ("outputs", "output", "output_tensors", "output_tensor", "output_lists", *_IN_PLACE)
_ROOTED = {
    "broadcast_": "root_rank",
    "reduce_": "root_rank",
    "gather_": "root_rank",
    "scatter_": "root_rank",
    "send": "dst",
    "recv_": "src",
}

_ISSUERS = (
    ("/nn/parallel/distributed.py", "DDP"),
    ("/distributed/fsdp/_fully_shard/", "FSDP2"),
    ("/distributed/fsdp/", "FSDP"),
    ("/distributed/pipelining/", "pipelining"),
    ("/distributed/checkpoint/", "checkpoint"),
    ("/distributed/tensor/", "DTensor"),
    ("/distributed/optim/", "optimizer"),
    ("/distributed/device_mesh.py", "device mesh"),
    ("/nn/modules/_functions.py", "SyncBatchNorm"),
)
"""Files of torch that issue collectives on their own, with the name to report."""


class _Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    purpose: str


class Collectives:
    """Records the collectives and messages of a process while installed. roots: of models, by
    name.
    """

    def __init__(
        self, session: Session, frames: CallFrames, roots: Mapping[str, ModuleRoot]
    ) -> None:
        self._session, self._frames, self._roots = session, frames, roots
        self._numbers: dict[str, int] = {}
        self._installed = False

    def install(self) -> None:
        """Start listening. Does nothing where torch lacks `torch.distributed`."""
        if _can_watch() and not self._installed:
            _start_watching(self._issued)
            self._installed = True

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        if self._installed:
            self._installed = False
            _stop_watching(self._issued)

    def _issued(self, operator: str, arguments: dict[str, Any]) -> None:
        """Record a collective or message before it runs. A failure here ends only the capture."""
        frames, session = self._frames, self._session
        if session.failed or not (frames.active or frames.asleep):
            return
        try:
            kind, group = _KINDS.get(operator), _group(arguments["process_group"])
            if kind is None:
                return
            peer = _peer(operator, arguments, group.ranks)
            counted = f"{group.name} {kind} {peer}" if kind.is_message else group.name
            number = count(self._numbers, counted)
            if frames.active and session.begin():
                self._write(operator, arguments, kind, group, peer, number)
        except StoreFailed as error:
            session.fail(str(error))
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            frames.give_up(error)

    def _write(
        self,
        operator: str,
        arguments: dict[str, Any],
        kind: CollectiveKind,
        group: _Group,
        peer: int,
        number: int,
    ) -> None:
        given = list(_tensors(arguments, _GIVEN)) if kind != CollectiveKind.RECEIVE else []
        taken = list(_tensors(arguments, _TAKEN)) if kind != CollectiveKind.SEND else []
        moved = given or taken
        splits = tuple(
            tuple(arguments.get(name) or ()) for name in ("input_split_sizes", "output_split_sizes")
        )
        root, scope, step, micro, phase = self._place()
        session = self._session
        sink = session.sink()
        sink.collective(
            Collective(
                kind=kind,
                rank=session.rank,
                order=session.next_order(),
                number=number,
                group=group.name,
                ranks=group.ranks,
                purpose=group.purpose,
                op=_op(arguments.get("reduce_op")),
                dtype="" if not moved or kind == "barrier" else NAMES.get(moved[0].dtype, ""),
                given=tuple(tuple(t.shape) for t in given if kind != CollectiveKind.BARRIER),
                taken=tuple(tuple(t.shape) for t in taken if kind != CollectiveKind.BARRIER),
                splits=splits if any(splits) else (),
                nbytes=sum(t.numel() * t.element_size() for t in moved if kind != "barrier"),
                peer=peer,
                root=root,
                scope=scope,
                step=step,
                micro=micro,
                phase=phase,
                source=source_here(),
                by=_issuer(),
                waits=not arguments.get("async_op", True),
                at=time.time(),
            )
        )
        # flush now: a communication library that fails in its own thread ends the process
        sink.flush()

    def _place(self) -> tuple[str, str, int, int, str]:
        """(root, scope, step, micro-batch, phase) that the program is in now."""
        stack = self._frames.thread.stack
        if stack:
            frame = stack[-1]
            return frame.root.name, frame.scope, frame.step, frame.micro, frame.phase
        trained = [root for root in self._roots.values() if root.trained]
        root = next(iter(trained or self._roots.values()), None)
        if root is None:
            return "", "", -1, 0, ""
        phase = "backward" if torch._C._current_graph_task_id() != -1 else ""
        return root.name, "", root.steps.get("", 0), max(root.micro - 1, 0), phase


def _group(boxed: Any) -> _Group:
    from torch.distributed import distributed_c10d

    group = distributed_c10d.ProcessGroup.unbox(boxed)
    world: Any = distributed_c10d._world
    ranks = world.pg_group_ranks.get(group)
    if ranks is None:  # the name stands for the group, where another object does
        ranks = next(
            (world.pg_group_ranks[g] for g, n in world.pg_names.items() if n == group.group_name),
            {},
        )
    return _Group(group.group_name, tuple(sorted(ranks, key=ranks.get)), group.group_desc)


def _peer(operator: str, arguments: dict[str, Any], ranks: tuple[int, ...]) -> int:
    """Global rank of the peer or root that an operator names by its index in the group; -1 where it
    names none.
    """
    place = arguments.get(_ROOTED.get(operator, ""), -1)
    return ranks[place] if 0 <= place < len(ranks) else -1


def _tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        if name in arguments:
            yield from tensors_in(arguments[name])


def _op(boxed: Any) -> str:
    if boxed is None or not boxed._has_method("op"):
        return ""
    from torch.distributed import ReduceOp

    return str(ReduceOp.RedOpType(boxed._get_method("op")()).name).lower()


def _issuer() -> str:
    """The part of torch that issues the current collective, "" where the program itself does."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        for part, name in _ISSUERS:
            if part in file:
                return name
        if file.endswith(("/autograd/graph.py", "/optim/optimizer.py")):
            break
        frame = frame.f_back
    return ""


_Watcher = Callable[[str, dict[str, Any]], None]
"""(name of the operator, its arguments by name). Called before the operator runs."""

_LIBRARY = "c10d"
_KEY = "BackendSelect"
_UNWATCHED = ("check_for_nan",)
_lock = threading.Lock()
_watchers: tuple[_Watcher, ...] = ()
_installed: Any = None


def _can_watch() -> bool:
    """Whether this torch was built with `torch.distributed`."""
    return bool(torch.distributed.is_available())


def _start_watching(watcher: _Watcher) -> None:
    """Call `watcher` for every collective and message from now on, on any thread."""
    global _watchers, _installed
    with _lock:
        if _installed is None:
            _installed = _with_kernels()
        _watchers = (*_watchers, watcher)


def _stop_watching(watcher: _Watcher) -> None:
    """Stop calling `watcher`. The kernels are removed with the last watcher."""
    global _watchers, _installed
    with _lock:
        _watchers = tuple(one for one in _watchers if one != watcher)
        if not _watchers and _installed is not None:
            library, _installed = _installed, None
            library._destroy()


def _with_kernels() -> Any:
    library = torch.library.Library(_LIBRARY, "IMPL")
    for whole in torch._C._dispatch_get_all_op_names():
        space, _, name = whole.partition("::")
        if space != _LIBRARY or name in _UNWATCHED:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(whole, _KEY):
            library.impl(name, _telling(name), _KEY, with_keyset=True)
    return library


def _telling(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = tuple(argument.name for argument in operator._schema.arguments)
    below = torch._C._dispatch_keyset_full_after(torch._C._parse_dispatch_key(_KEY))

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers:
            watcher(name, dict(zip(names, args)) | kwargs)
        return operator.redispatch(keys & below, *args, **kwargs)

    return call


# Tensors of one module call: its inputs, parameters, mutations and outputs, recorded as refs of its
# frame.

_TENSOR = torch.Tensor
_MAX_OBJECTS = 64  # of so many objects it is looked at the end of a step which are gone


class CallTensors:
    """Records the tensors of module calls."""

    def __init__(self, session: Session, registry: TensorRegistry) -> None:
        self._session, self._registry = session, registry
        self._takes_inputs = session.selector.slots("input")
        self._takes_outputs = session.selector.slots("output")
        self._objects: dict[int, ObjectSnapshot] = {}

    def clear(self) -> None:
        """Forget all objects."""
        self._objects.clear()

    def prune(self) -> None:
        """Forget objects that are gone."""
        if len(self._objects) > _MAX_OBJECTS:
            self._objects = {k: w for k, w in self._objects.items() if w.ref() is not None}

    # ---- before the call

    def take_inputs(
        self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """(slot, tensor) of everything this call was handed, recorded where inputs are wanted."""
        self._take_parameters(frame)
        if len(args) == 1 and not kwargs and type(args[0]) is _TENSOR and not args[0].is_nested:
            inputs = [("input.0", args[0])]
        else:
            walk = _ValueWalk(self._objects, frame)
            for i, value in enumerate(args):
                walk.collect(value, f"input.{i}")
            for name, value in kwargs.items():
                walk.collect(value, f"input.{name}")
            inputs, frame.arguments = walk.tensors, walk.arguments
        if self._takes_inputs:
            refs, forms, given = frame.refs, frame.forms, frame.inputs
            record_of = self._registry.record_of
            for slot, tensor in inputs:
                number, edge, form = record_of(tensor, slot, frame)
                refs.append(Ref(slot, number, edge))
                forms.append((slot, form))
                version = None if tensor.is_inference() else tensor._version
                given.append((slot, tensor, version, number))
        return inputs

    # ---- after the call

    def take_results(self, frame: ModuleFrame, out: Any, error: str) -> None:
        """Record mutations and outputs of a call that ends."""
        info, leaf = frame.info, frame.children == 0
        if not error:
            if frame.inputs:
                self._take_mutated_inputs(frame)
            if frame.objects:
                self._take_mutated_objects(frame)
            if info.entries:
                self._take_mutated_parameters(frame, leaf)
            self._take_outputs(frame, out)
        if info.entries is None and not (leaf and info.branches):
            self._take_parameters(frame)  # of a lazy module: the call made them
        if info.deep and not leaf and is_boundary(info, frame.module):
            # It ran uncompiled: the modules below it recorded their own parameters.
            info.deep, info.entries, info.sizes = False, None, (-1, -1, -1)
            frame.refs = [r for r in frame.refs if not is_param(r.slot) or "." not in r.slot[6:]]
        if leaf and info.branches and not info.deep:
            # None of its children was called: from now on their parameters count as its own.
            info.deep, info.entries, info.sizes = True, None, (-1, -1, -1)
            frame.refs = [r for r in frame.refs if not is_param(r.slot)]
            self._take_parameters(frame)

    def _take_mutated_inputs(self, frame: ModuleFrame) -> None:
        for slot, tensor, version, number in frame.inputs:
            # Inference tensors have no version: their bytes are compared.
            if version is not None:
                if tensor._version == version:
                    continue
            elif self._registry.is_as_it_was(tensor, number):
                continue
            mutated = "mutated" + slot[5:]
            record, edge, _ = self._registry.record_of(tensor, mutated, frame)
            if record is not number and record != number:
                frame.refs.append(Ref(mutated, record, edge))
                frame.results.append((mutated, tensor))

    def _take_mutated_objects(self, frame: ModuleFrame) -> None:
        for slot, holder in frame.objects:
            # The bytes of inference tensors in it are compared only in the last call that got it,
            # and in the root's call.
            innermost = frame.parent is None or holder.holder == frame.order
            for path, tensor, certain in holder.changed(unversioned=innermost):
                mutated = "mutated" + slot[5:] + path
                record, edge, _ = self._registry.record_of(
                    tensor, mutated, frame, grows=(holder, path)
                )
                if isinstance(record, Pending):
                    record.certain = certain
                if certain or not edge:
                    frame.refs.append(Ref(mutated, record, edge))
                    frame.results.append((mutated, tensor))

    def _take_mutated_parameters(self, frame: ModuleFrame, leaf: bool) -> None:
        for entry in frame.info.entries or ():
            tensor = entry.tensor()
            if entry.last_ref is None or tensor is None or tensor.is_inference():
                continue
            # Batch norm writes its running statistics without a new version. The buffers of a
            # scripted module are not a dict and have no get.
            name, buffers = entry.slot[6:], frame.module._buffers
            if tensor._version != entry.version or (
                frame.training and leaf and name in buffers and tensor is buffers[name]
            ):
                mutated = "mutated" + entry.slot[5:]
                number, edge, _ = self._registry.record_of(tensor, mutated, frame)
                if number == entry.last_ref.record:
                    continue
                entry.version, entry.last_ref = tensor._version, Ref(entry.slot, number, "identity")
                entry.remember(tensor)
                frame.refs.append(Ref(mutated, number, edge))
                frame.results.append((mutated, tensor))

    def _take_outputs(self, frame: ModuleFrame, out: Any) -> None:
        if not self._takes_outputs:
            return
        if type(out) is _TENSOR and not out.is_nested:
            outputs = [("output.0", out)]
        else:
            walk = _ValueWalk(self._objects, None)
            several = isinstance(out, (list, tuple, dict)) or dataclasses.is_dataclass(out)
            walk.collect(out, "output" if several else "output.0")
            outputs = walk.tensors
        for slot, tensor in outputs:
            number, edge, _ = self._registry.record_of(tensor, slot, frame)
            frame.refs.append(Ref(slot, number, edge))
        frame.results += outputs

    # ---- what a module holds

    def _take_parameters(self, frame: ModuleFrame) -> None:
        """Record parameters, buffers and plain tensor attributes of the module, and those of
        modules below it that are never called themselves.
        """
        info, module = frame.info, frame.module
        if info.entries is None and is_boundary(info, module):
            info.deep = True  # it reads what the modules below it hold, and may change it
        entries = info.entries
        sizes = len(module._parameters), len(module._buffers), len(module._modules)
        if entries is None or info.sizes != sizes:
            entries = self._entries_of(info, module)
            if entries is None:  # they are made by the call itself
                return
            info.sizes, frame.op_type = sizes, info.op_type
        if not entries:
            return
        refs = frame.refs
        calls = info.root.calls
        trains = frame.training or info.root.has_stepped  # a model may be trained as in evaluation
        all_change = trains and torch.is_grad_enabled()
        for entry in entries:
            tensor = entry.tensor()
            if tensor is None:
                continue
            version = None if tensor.is_inference() else tensor._version
            ref = entry.last_ref
            unchanged = (
                ref is not None and entry.version == version and address_of(tensor) == entry.pointer
            )
            if unchanged and entry.looked != calls:
                # `p.data.add_()`, numpy and fused optimizers do not change the version. In training
                # every parameter may have changed; elsewhere a sample of the bytes shows it.
                unchanged = not all_change and entry.looks_the_same()
            entry.looked = calls
            if not unchanged or ref is None:
                number, edge, _ = self._registry.record_of(
                    tensor, entry.slot, frame, parameter=True
                )
                ref = Ref(entry.slot, number, edge)
                entry.last_ref = ref if edge else Ref(entry.slot, number, "identity")
                entry.version, entry.placement = version, frame.placements.get(entry.slot)
                entry.remember(tensor)
            elif entry.placement is not None:
                frame.placements[entry.slot] = entry.placement
            refs.append(ref)

    def _entries_of(self, info: ModuleInfo, module: Any) -> list[HeldTensor] | None:
        """The tensors that the module holds now, None while one of them is lazy."""
        if info.entries is None:
            for name in [n for n, value in module.__dict__.items() if is_block_cache(n, value)]:
                text = f"{name}: a cache that the module keeps, 64 MiB or more, and no parameter"
                self._session.note("not-captured", text, info.scope)
        info.op_type = type(module).__name__
        info.branches = any(child is not None for child in module._modules.values())
        if info.deep or not info.branches:
            named = tensors_of(module)
        else:
            tables = (module._parameters, module._buffers)
            named = [
                (f"param.{n}", t) for table in tables for n, t in table.items() if t is not None
            ]
        if any(torch.nn.parameter.is_lazy(t) for _, t in named):
            info.entries = None
            return None
        info.entries = []
        for slot, tensor in named:
            if not tensors.answers(tensor):
                text = f"{slot}: {type(tensor).__name__}, {CLOSED}"
                self._session.note("not-captured", text, info.scope)
                continue
            parts = tensors.plain(tensor) if hasattr(type(tensor), "__tensor_flatten__") else None
            if parts is None or len(parts) == 1:
                info.entries.append(HeldTensor(slot, tensor, home_of(module, slot[6:])))
            else:
                info.entries += [HeldTensor(f"{slot}.{name}", part, None) for name, part in parts]
        return info.entries


class _ValueWalk:
    """Collects tensors and simple values from nested arguments or results.

    objects: plain objects seen before, by id. frame: the call that has these arguments, None for
    results.
    """

    def __init__(self, objects: dict[int, ObjectSnapshot], frame: ModuleFrame | None) -> None:
        self._objects, self._frame = objects, frame
        self.tensors: list[tuple[str, Any]] = []
        self.arguments: dict[str, Any] = {}

    def collect(self, value: Any, slot: str) -> None:
        """Collect what `value` holds, under slots that begin with `slot`."""
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and not value.is_nested:
                self.tensors.append((slot, value))
            else:
                self._collect_parts(value, slot)
        elif value is None or slot.count(".") > NESTING:
            return
        elif isinstance(value, SIMPLE):
            if not isinstance(value, str) or len(value) <= 200:
                self.arguments[slot] = value
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                name = key if isinstance(key, SIMPLE) else type(key).__name__
                self.collect(item, f"{slot}.{name}")
        elif isinstance(value, torch.dtype):
            self.arguments[slot] = str(value).removeprefix("torch.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self.collect(getattr(value, field.name, None), f"{slot}.{field.name}")
        elif is_plain_object(value):
            self._collect_object(value, slot)

    def _collect_parts(self, value: Any, slot: str) -> None:
        """Collect a tensor of a subclass or a nested tensor: the tensor itself, or the plain
        tensors it consists of.
        """
        if not tensors.answers(value):
            self.arguments[slot] = f"{type(value).__name__}, {CLOSED}"
            return
        parts = tensors.parts_of(value)
        if parts is None:
            self.tensors.append((slot, value))
        else:
            self.tensors += [(f"{slot}.{name}", tensor) for name, tensor in parts]
            self.arguments[slot] = f"{type(value).__name__}({', '.join(name for name, _ in parts)})"

    def _collect_object(self, value: Any, slot: str) -> None:
        """Collect the tensors of an object: all of them in calls of a root and at its first sight,
        else only those that changed.
        """
        frame, holder = self._frame, self._objects.get(id(value))
        first = holder is None or holder.ref() is not value
        if first or holder is None:
            holder = self._new_object(value)
        if frame is None:
            self.tensors.extend((slot + path, tensor) for path, tensor in holder.items())
            return
        if holder.places or holder.sizes:
            frame.objects.append((slot, holder))
        holder.holder = frame.order
        fresh = (
            list(holder.items())
            if first or frame.parent is None
            else [(path, tensor) for path, tensor, _ in holder.changed()]
        )
        if frame.parent is None and not first:
            holder.walk(value)
        self.tensors.extend((slot + path, tensor) for path, tensor in fresh)

    def _new_object(self, value: Any) -> ObjectSnapshot:
        place, objects = id(value), self._objects

        def gone(ref: Any) -> None:
            if place in objects and objects[place].ref is ref:
                del objects[place]

        objects[place] = holder = ObjectSnapshot(value, gone)
        return holder
