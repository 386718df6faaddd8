"""Follows a training run: backward passes, gradients of parameters, what changes these gradients,
and the steps of optimisers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.call_frames import CallFrames
from whence.instrument.guard import Replacements
from whence.instrument.session import Session
from whence.instrument.torch.before_steps import call_before_steps
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard, inside
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.module_registry import ModuleRegistry
from whence.instrument.torch.operand_table import is_plain, layout
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.program_recorder import Recording
from whence.instrument.torch.regions import Regions, part_of
from whence.instrument.torch.split_recording import MEASURED, Wanted
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.backward_calls import BackwardCalls
from whence.instrument.torch.training.code_region import CodeRecorder, CodeRegion
from whence.instrument.torch.training.forward_calls import (
    Edge,
    EndedCall,
    ForwardCall,
    NodeOwners,
    WaitingCalls,
    edge_of,
    next_node,
)
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.gradient_hooks import (
    Gradient,
    GradientHooks,
    SeenGradients,
    nodes_behind,
    tensors_to_start_from,
)
from whence.instrument.torch.training.gradient_sums import GradientsBefore, GradientSums
from whence.instrument.torch.training.loss_code import LossCode
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.instrument.torch.training.sharded_parameters import ShardedParameters
from whence.records import Operation, Placement, Program, Ref
from whence.records.program import OPTIMIZER_STEP, identified
from whence.records.slots import FOUND_INF, split_slot
from whence.records.training import TAKEN_GRADIENT


def training_of(
    session: Session,
    frames: CallFrames,
    registry: TensorRegistry,
    writer: ProgramWriter,
    modules: ModuleRegistry,
    compiled_code: CompiledCodeGuard,
) -> Training | None:
    """The `Training` for the models of a listener, None where training is not followed."""
    options = session.options
    if options.level != "modules" or options.slots != "both" or not options.gradients:
        return None
    return Training(session, frames, registry, writer, modules.roots, compiled_code)


class Training:
    """Follows the training of the models that a listener listens to. roots: by name."""

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        roots: Mapping[str, ModuleRoot],
        compiled_code: CompiledCodeGuard,
    ) -> None:
        self._frames = frames
        self._region = region = CodeRegion(frames, registry, writer, compiled_code)
        self.loss = LossCode(session, registry, writer, region)
        sharded = ShardedParameters(roots)
        names = ParameterNames(roots, sharded)
        self._changes = GradientChanges(session, frames, registry, writer, region)
        sums = GradientSums(session, registry, writer, names, self._changes)
        calls = BackwardCalls(session, registry, writer)
        self._passes = BackwardPasses(
            session, frames, calls, sums, self.loss, sharded, self._changes
        )
        self._steps = OptimizerSteps(session, registry, writer, names, self._changes, region)
        self._undo: list[Any] = []

    def install(self) -> None:
        """Begin to listen."""
        self._passes.install()
        self._changes.install()
        self._undo.append(call_before_steps(self._step_begins))

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        self._region.drop("the capture has ended")
        self.loss.clear()
        self._passes.remove()
        self._changes.remove()
        while self._undo:
            self._undo.pop().remove()

    def entered(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """Called when a module is entered. inputs: (slot, tensor). There may be no graph: a
        checkpoint first runs its calls without one, below a call that has it.
        """
        self._passes.entered(frame, inputs)

    def left(self, frame: ModuleFrame, program: str, *, failed: bool) -> tuple[str, ...]:
        """A module has returned, and ran this program. failed: it raised. Returns the slots of its
        tensors that have a gradient.
        """
        return self._passes.left(frame, program, failed=failed)

    def run_again(self) -> tuple[int, int] | None:
        """Step and micro-batch of what a backward pass on this thread runs again, if it does."""
        return self._passes.run_again()

    def drop(self, reason: str) -> None:
        """Stop recording the code outside of modules that runs now."""
        self._region.drop(reason)

    def model_begins(self) -> Training:
        """An outermost call begins. Call it while no mode of the listener is on the thread. Returns
        itself.
        """
        self._changes.stop_listening()
        self.loss.model_begins()
        return self

    def _step_begins(self, optimizer: Any) -> None:
        self.loss.step_begins()
        self._changes.stop_listening()
        self._region.drop("steps another optimiser")
        if self._frames.active and not self._frames.thread.busy:
            self._frames.guarded(self._steps.begins, optimizer)
            self._steps.listen()

    def stepped(self, optimizer: Any, is_skipped: bool) -> None:
        """An optimiser has stepped, or a loss scaler skipped the step. Called before the roots of
        the optimiser go on to their next step.
        """
        self._steps.stop_listening()
        if is_skipped:
            self.loss.step_begins()
            self._changes.stop_listening()
        if self._frames.active and not self._frames.thread.busy:
            ended = self._steps.skipped if is_skipped else self._steps.ended
            self._frames.guarded(ended, optimizer)


# Steps of optimisers: one call for each parameter, from its value, gradient and state before the
# step to those after it.
#
# For torch's own optimisers the program is one operation, which is replayed with torch's code. For
# any other optimiser the operators are recorded while it steps (`OptimizerCode`).

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how an optimiser executes its step, not what it computes."""

_GRAD = 1
"""Index of the gradient among the inputs of a step."""

_NOT_FOLLOWED = "is not one of torch's own optimisers, and its step could not be recorded"


class OptimizerSteps:
    """Records the steps of all optimisers."""

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        writer: ProgramWriter,
        names: ParameterNames,
        changes: GradientChanges,
        region: CodeRegion,
    ) -> None:
        self._changes, self._region = changes, region
        self._session, self._registry, self._writer, self._names = session, registry, writer, names
        self._regions = Regions(session, registry)
        self._before: list[Updated] = []
        self._stepped: list[tuple[ParameterName, Any]] = []
        self._is_divided = False
        self._counts: dict[str, int] = {}
        self._code: OptimizerCode | None = None
        # By optimiser, names of settings that its own steps change, which are not the user's.
        self._computed = weakref.WeakKeyDictionary[Any, set[str]]()
        self._group_before: list[dict[str, Any]] = []
        # Optimisers whose later steps may depend on numbers that they computed, with the reason.
        self._measuring = weakref.WeakKeyDictionary[Any, str]()

    def begins(self, optimizer: Any) -> None:
        """An optimiser is about to step."""
        self._before, self._is_divided, self._code = [], False, None
        self._stepped = stepped = []
        groups = [] if is_torchs(type(optimizer)) else optimizer.param_groups
        self._group_before = [_plain(group) for group in groups]
        given: list[Tensors] = []
        scale, found_inf = (_tensor_of(optimizer, name) for name in ("grad_scale", "found_inf"))
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if tensor.grad is None or (name := self._names.of(tensor)) is None:
                    continue
                updated = Updated(name, tensor, number, keep=self._session.elements_on)
                kept = list(_state(optimizer, tensor))
                updated.state = [key for key, _ in kept]
                read = [("input.param", tensor), (TAKEN_GRADIENT, tensor.grad)]
                read += [(f"input.{key}", value) for key, value in kept]
                for slot, value in read:
                    self._take(updated, slot, value)
                given.append(read)
                if found_inf is not None:
                    updated.may_skip = True
                    self._take(updated, FOUND_INF, found_inf)
                self._before.append(updated)
                stepped.append((name, tensor))
        if stepped and scale is not None:
            tensors = [tensor for _, tensor in stepped]
            self._changes.divided_by_step(tensors, scale, found_inf)
            self._is_divided = True
        elif stepped:
            self._write_changes()
            if self._follows(optimizer, given):
                self._code = OptimizerCode(given, _settings(optimizer))

    def _follows(self, optimizer: Any, given: list[Tensors]) -> bool:
        """Whether the operators of this step are to be recorded."""
        return (
            not is_torchs(type(optimizer))
            and optimizer not in self._measuring
            and not self._writer.unwanted
            and self._session.elements_on
            and self._region.may_begin
            and all(is_plain(tensor) for read in given for _, tensor in read)
        )

    def listen(self) -> None:
        """Start recording the step that has begun, if it is to be recorded. Call it while no mode
        of the listener is on the thread.
        """
        if self._code is not None:
            self._region.begin(self._code)

    def stop_listening(self) -> None:
        """The step has ended."""
        self._region.end(self._code)

    def skipped(self, optimizer: Any) -> None:
        """Write the gradients of a step that a loss scaler skipped because one of them is not
        finite.
        """
        self._stepped = [
            (name, tensor)
            for group in optimizer.param_groups
            for tensor in group["params"]
            if tensor.grad is not None and (name := self._names.of(tensor)) is not None
        ]
        if self._stepped:
            self._changes.skipped()
            self._write_changes()
            self._regions.close()
            self._counts = {}

    def _write_changes(self) -> None:
        root = self._stepped[0][0].root
        region = self._regions.enter("optimizer", root, root.trained_step, 0, self._counts)
        self._changes.write_step(self._stepped, region)

    def ended(self, optimizer: Any) -> None:
        """Write one call for each parameter after an optimiser has stepped."""
        before, self._before = self._before, []
        code, self._code = self._code, None
        if self._is_divided:
            # The step has left the divided gradient, which it used, in `grad`.
            for updated in before:
                self._take_again(updated, _GRAD, updated.tensor.grad)
            self._write_changes()
        settings = self._settings_of(optimizer)
        after = [_after(optimizer, updated) for updated in before]
        ran = self._ran(optimizer, code, after)
        for updated, made, recording in zip(before, after, ran, strict=True):
            root = updated.name.root
            read = len(updated.refs)
            for slot, value in made:
                self._take(updated, slot, value)
            region = self._regions.enter("optimizer", root, root.trained_step, 0, self._counts)
            if region.selected:
                of_group = settings[updated.number]
                step_of = Step(type(optimizer), of_group, read, made, recording)
                self._write(updated, step_of, region)
        self._regions.close()
        self._counts = {}

    def _settings_of(self, optimizer: Any) -> list[dict[str, Any]]:
        """The hyper-parameters of each group of an optimiser after a step, without those that the
        step itself computes (counts, an estimated learning rate).
        """
        now = [_plain(group) for group in optimizer.param_groups]
        computed = self._computed.setdefault(optimizer, set())
        for before, after in zip(self._group_before, now):
            computed.update(key for key in after if before.get(key) != after[key])
        return [{k: v for k, v in group.items() if k not in computed} for group in now]

    def _ran(
        self, optimizer: Any, code: OptimizerCode | None, after: Sequence[Tensors]
    ) -> list[Recording]:
        """The recorded program of each parameter, or the reason why there is none. after: (slot,
        tensor) of each parameter after the step.
        """
        if code is None:
            reason = self._measuring.get(optimizer, _NOT_FOLLOWED)
            return [Recording(None, [], reason)] * len(after)
        recordings = code.programs(after)
        if setting := code.measured(_settings(optimizer)):
            reason = f"computes a setting of its own, which rounding changes ({setting})"
        elif any(recording.reason == MEASURED for recording in recordings):
            reason = MEASURED
        else:
            return recordings
        self._measuring[optimizer] = reason
        return [Recording(None, [], reason)] * len(after)

    def _take(self, updated: Updated, slot: str, tensor: Any) -> None:
        parameter = slot.endswith(".param")
        number, edge, form = self._registry.record_of(tensor, slot, updated, parameter=parameter)
        updated.refs.append(Ref(slot, number, edge))
        updated.dtypes.append(form[0])

    def _take_again(self, updated: Updated, place: int, tensor: Any) -> None:
        """Record another tensor for a slot that was recorded before."""
        slot = updated.refs[place].slot
        number, edge, form = self._registry.record_of(tensor, slot, updated)
        updated.refs[place] = Ref(slot, number, edge)
        updated.dtypes[place] = form[0]

    def _write(self, updated: Updated, step: Step, region: Any) -> None:
        session, name, kind = self._session, updated.name, step.kind
        if unwanted := self._writer.unwanted:
            recording = Recording(None, [], unwanted)
        elif is_torchs(kind):
            recording = _own_step(updated, step)
        else:
            recording = step.recording
            if recording.reason:
                recording = recording._replace(reason=f"{kind.__name__} {recording.reason}")
        written, no_program = self._writer.put_recording(recording, updated)
        self._registry.call(
            part_of(
                region,
                session,
                scope=name.scope,
                root=name.root.name,
                op=name.name,
                op_type=kind.__name__,
                source=f"{kind.__module__}.{kind.__qualname__}",
                refs=tuple(updated.refs),
                arguments=step.hyper_parameters,
                program=written,
                no_program=no_program,
                placements=updated.placements,
            )
        )


def _state(optimizer: Any, tensor: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the state that an optimiser keeps of a parameter. torch's own optimisers
    keep only histories in lists (LBFGS), which are large and not replayed; these are left out.
    """
    is_flat = is_torchs(type(optimizer))
    for key, value in kept_tensors(optimizer.state.get(tensor)):
        if not (is_flat and "." in key):
            yield key, value


def _settings(optimizer: Any) -> Tensors:
    """(name, tensor) of the tensors among the settings of an optimiser's parameter groups."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return list(kept_tensors({"group": groups}))


def _after(optimizer: Any, updated: Updated) -> Tensors:
    """(slot, tensor) of a parameter and of its optimiser state after a step."""
    kept = [(f"output.{key}", value) for key, value in _state(optimizer, updated.tensor)]
    return [("output.param", updated.tensor), *kept]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group, as plain values."""
    return {
        key: plain
        for key, value in group.items()
        if key != "params" and key not in _HOW and (plain := _plain_value(value)) is not _ABSENT
    }


_ABSENT = object()


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_plain_value(item) for item in value]
        return _ABSENT if any(item is _ABSENT for item in items) else items
    return _ABSENT


def _tensor_of(optimizer: Any, name: str) -> Any:
    """The scalar tensor that a loss scaler sets on the optimiser for a fused step, None where it
    sets none.
    """
    value = getattr(optimizer, name, None)
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


_LOOKS_AGAIN = {torch.optim.LBFGS}
"""Optimisers that evaluate the loss several times within a step, so that one step depends on all
parameters.
"""


class Updated:
    """One parameter in a step, with the records of its tensors. state: names of the optimiser state
    before the step. number: index of its parameter group.
    """

    def __init__(self, name: ParameterName, tensor: Any, number: int, *, keep: bool) -> None:
        self.name, self.tensor, self.keep = name, tensor, keep
        self.scope, self.op_type = name.scope, name.op_type
        self.placements: dict[str, Placement] = {}
        self.refs: list[Ref] = []
        self.dtypes: list[str] = []
        self.state: list[str] = []
        self.number = number
        self.may_skip = False  # reads FOUND_INF, its last input


class Step(NamedTuple):
    """What an optimiser did to one parameter. read: number of its tensors that are inputs; made:
    (slot, tensor) after the step. recording: the recorded code of an optimiser that is not torch's
    own.
    """

    kind: type
    hyper_parameters: dict[str, Any]
    read: int
    made: Tensors
    recording: Recording


@functools.cache
def _taken_by(kind: type) -> Collection[str]:
    """The parameter names of an optimiser class."""
    return inspect.signature(kind).parameters.keys()


def _own_step(updated: Updated, step: Step) -> Recording:
    """A step of one of torch's own optimisers as a program, or why there is none."""
    kind, read = step.kind, step.read
    left = [split_slot(slot)[1] for slot, _ in step.made[1:]]
    if kind in _LOOKS_AGAIN:
        reason = f"{kind.__name__} computes the loss several times in a step"
        return Recording(None, [], reason)
    operation = Operation(
        OPTIMIZER_STEP,
        (
            kind.__name__,
            {"in": 0},
            {"in": 1},
            updated.state,
            [{"in": 2 + k} for k in range(len(updated.state))],
            left,
        ),
        {key: value for key, value in step.hyper_parameters.items() if key in _taken_by(kind)},
    )
    operations = [operation]
    slots = [f"output.{key}" for key in ("param", *left)]
    outputs = [{"op": [0, k]} for k in range(len(slots))]
    if updated.may_skip:
        outputs = _unless_skipped(updated, read, left, outputs, operations)
    program = Program(
        id="",
        operations=tuple(operations),
        inputs=tuple(ref.slot for ref in updated.refs[:read]),
        outputs=tuple(zip(slots, outputs)),
        base=updated.dtypes[0],
        input_dtypes=tuple(updated.dtypes[:read]),
        default_dtype=NAMES[torch.get_default_dtype()],
        notes=("optimizer",),
    )
    return Recording(identified(program), [], "")


def _unless_skipped(
    updated: Updated,
    read: int,
    left: list[str],
    after: list[dict[str, Any]],
    operations: list[Operation],
) -> list[dict[str, Any]]:
    """Results of a step that is skipped where a gradient is not finite: the values after the step,
    or the values before it. Adds the operations that choose. State that the step creates is zero if
    it is skipped.
    """

    def run(name: str, *args: Any) -> dict[str, Any]:
        operations.append(Operation(name, args))
        return {"op": [len(operations) - 1, 0]}

    held: dict[str, Any] = {key: {"in": 2 + k} for k, key in enumerate(updated.state)}
    before: list[dict[str, Any]] = [{"in": 0}]
    for key, new in zip(left, after[1:], strict=True):
        before.append(held[key] if key in held else run("aten.zeros_like.default", new))
    skips = run("aten.gt.Scalar", {"in": read - 1}, 0)
    pairs = zip(before, after, strict=True)
    return [run("aten.where.self", skips, *pair) for pair in pairs]


# The code of an optimiser that is not torch's own: recorded once per step for all parameters, then
# split into one program for each parameter.

Tensors = list[tuple[str, Any]]
"""(slot, tensor) of one parameter: the parameter, its gradient, and the optimiser's state of it."""

_MOST_OPERATORS = 400
"""Most operators recorded for each parameter."""
_DEEPEST = 4


def is_torchs(kind: type) -> bool:
    """Whether this class is one of torch's own optimisers, not a subclass of one."""
    return getattr(torch.optim, kind.__name__, None) is kind


class OptimizerCode(CodeRecorder):
    """Records the operators inside its `with` block. parameters: for each parameter, its tensors
    before the step. settings: tensors in the optimiser's parameter groups, by name; they become
    constants of the programs, like numeric settings.
    """

    def __init__(self, parameters: Sequence[Tensors], settings: Tensors) -> None:
        names: dict[tuple[Any, ...], str] = {}
        inputs: Tensors = []
        self._read: list[dict[str, str]] = []
        for number, tensors in enumerate(parameters):
            read: dict[str, str] = {}
            for slot, tensor in tensors:
                place = layout(tensor)  # several parameters may share a count of steps
                if place not in names:
                    names[place] = f"{slot} of {number}"
                    inputs.append((names[place], tensor))
                read.setdefault(names[place], slot)
            self._read.append(read)
        most = _MOST_OPERATORS * len(parameters)
        super().__init__(inputs, [], casts=False, most=most, watch_versions=False)
        self._settings: dict[str, Any] = {}
        with self._guarded("reading the settings of groups"):
            for name, tensor in settings:
                self._table.constant(tensor, layout(tensor))
                if tensor.is_floating_point():
                    self._settings[name] = tensor.detach().clone()

    def measured(self, settings: Tensors) -> str:
        """Name of a floating-point setting that the step itself has changed, "" where there is
        none. Later steps would depend on it, and it varies with rounding.
        """
        changed = (
            name
            for name, tensor in settings
            if (before := self._settings.get(name)) is not None and not torch.equal(before, tensor)
        )
        return next(changed, "")

    def programs(self, outputs: Sequence[Tensors]) -> list[Recording]:
        """The program of each parameter. outputs: (slot, tensor) of each parameter after the
        step.
        """
        return self.each(
            [Wanted(read, made) for read, made in zip(self._read, outputs, strict=True)]
        )


def kept_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the tensors in an optimiser's state, including those in lists and
    dictionaries ("factors.0").
    """
    yield from _named("", state, 0) if isinstance(state, dict) else ()


def _named(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in NAMES:
            yield path, value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(key, (str, int)):
                yield from _named(f"{path}.{key}" if path else str(key), item, depth + 1)


# Begin and end of every backward pass.
#
# `torch.autograd.backward` is wrapped, which `Tensor.backward` calls too. Hooks are put on nodes of
# autograd's graph before the pass and removed after it. The graph, its values and the order of
# additions stay unchanged.
#
# Calls that a backward pass runs again (activation checkpoints).
#
# A non-reentrant checkpoint keeps the graph of the first run and takes only values from the second.
# A reentrant checkpoint runs its calls without a graph; one node of its own represents them in the
# graph. When the pass reaches that node, it runs the calls again and then a nested backward pass
# through them. The first run tells whose children the calls are, the second what they computed.


class _Pass(NamedTuple):
    """A backward pass in progress. owners: calls that wait for their backward pass. checkpointed:
    calls below them that are run again. before: the gradients of parameters before the pass.
    within: nested passes through calls that checkpoints ran again.
    """

    hooks: GradientHooks
    seen: SeenGradients
    owners: NodeOwners
    checkpointed: _CheckpointedCalls
    before: GradientsBefore
    within: list[_PassWithin]

    def met(self) -> list[ForwardCall]:
        """The calls at whose outputs a gradient arrived."""
        return [call for call in self.owners.calls if self.seen.met(call)]

    def leaves(self) -> dict[int, weakref.ref[Any]]:
        """The leaves of the graph, by identity."""
        leaves = dict(self.hooks.leaves)
        for part in self.within:
            leaves |= part.hooks.leaves
        return leaves


class _PassWithin(NamedTuple):
    """A backward pass through calls that a checkpoint ran again, nested in another pass."""

    hooks: GradientHooks
    seen: SeenGradients
    owners: NodeOwners
    rerun: Rerun


class BackwardPasses:
    """The backward passes of the modules that a listener listens to.

    calls, sums: write the calls of modules and of parameter gradients. loss: the code that passes
    start from. sharded: FSDP2 parameters. changes: what changes gradients after the passes.
    """

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        calls: BackwardCalls,
        sums: GradientSums,
        loss: LossCode,
        sharded: ShardedParameters,
        changes: GradientChanges,
    ) -> None:
        self._session, self._frames, self._calls, self._sums = session, frames, calls, sums
        self._loss, self._sharded, self._changes = loss, sharded, changes
        self._waiting, self._recomputed = WaitingCalls(), _Recomputed()
        self._replaced = Replacements()
        self._told = False
        self._running: list[_Pass] = []

    # ---- module calls

    def entered(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """Called when a module is entered. inputs: (slot, tensor)."""
        if frame.parent is not None:
            _link_last(frame.parent)
        frame.first_node = next_node()
        frame.input_edges = [
            (slot, edge) for slot, tensor in inputs if (edge := edge_of(tensor)) is not None
        ]

    def left(self, frame: ModuleFrame, program: str, *, failed: bool) -> tuple[str, ...]:
        """A module has returned, and ran this program. failed: it raised. Returns the slots of its
        tensors that have a gradient.
        """
        _link_last(frame)
        call = None
        again = frame.phase == "recompute"
        if frame.first_node >= 0 and not failed:
            call = ForwardCall(frame, next_node(), program)
            if call.outputs and not again:
                self._waiting.add(call, threading.get_ident())
        if again and self._running:
            self._recomputed.add(frame, call)
        if frame.parent is not None:
            frame.parent.called.append(call)
        if call is None or not call.has_graph:
            return ()
        tensors = ((entry.slot, entry.tensor()) for entry in frame.info.entries or ())
        held = [slot for slot, tensor in tensors if tensor is not None and tensor.requires_grad]
        return (*held, *(slot for slot, _ in (*call.inputs, *call.outputs)))

    def run_again(self) -> tuple[int, int] | None:
        """(step, micro-batch) of the call whose node a backward pass on this thread is running,
        None where there is none.
        """
        node = _running_node() if self._running else -1
        if node < 0:
            return None
        around = self._running[-1]
        known = (around.owners, *(part.owners for part in around.within))
        owner = next((call for owners in known if (call := owners.of(node)) is not None), None)
        return (owner.step, owner.micro) if owner is not None else None

    # ---- backward passes

    def install(self) -> None:
        """Start observing backward passes by wrapping `torch.autograd.backward`."""
        previous = torch.autograd.backward

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *further: Any,
            **named: Any,
        ) -> Any:
            begun = self._before(tensors, grad_tensors)
            try:
                return previous(
                    tensors, grad_tensors, retain_graph, create_graph, *further, **named
                )
            finally:
                if begun is not None:
                    self._after(begun, create_graph if retain_graph is None else retain_graph)

        self._replaced.put(torch.autograd, "backward", backward)

    def remove(self) -> None:
        """Stop observing. If another tool has wrapped the wrapper, it stays in place."""
        self._replaced.remove()
        self._waiting.clear()

    def _before(self, tensors: Any, gradients: Any) -> _Pass | _PassWithin | None:
        """Prepare for a backward pass that begins. Returns None if the pass is not observed."""
        if torch._C._current_graph_task_id() != -1:
            if not self._running or not self._recomputed.calls:
                return None
            return self._frames.guarded(self._begin_within, tensors, gradients)
        losses = self._loss.stop()
        if not self._waiting or not self._frames.active or inside():
            return None
        return self._frames.guarded(self._begin, tensors, losses)

    def _after(self, begun: _Pass | _PassWithin, kept: bool) -> None:
        """Write a backward pass that is over. kept: the graph is kept, so another pass may follow
        through it.
        """
        if isinstance(begun, _PassWithin):
            self._frames.guarded(self._end_within, begun)
            return
        self._running.remove(begun)
        self._frames.guarded(self._end, begun, kept)
        self._changes.listen()

    def _begin(self, tensors: Any, losses: Any) -> _Pass | None:
        if self._waiting.several_threads:
            self._tell_threads()
            return None
        roots = tensors_to_start_from(tensors)
        if (call := self._loss.write(losses, roots)) is not None:
            self._waiting.add(call, threading.get_ident())
        checkpointed = _CheckpointedCalls(self._waiting)
        owners = NodeOwners([*self._waiting, *checkpointed.outermost])
        seen = SeenGradients(self._calls.registry, self._sharded.held(), itertools.count(1))
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded)
        before = self._sums.before(hooks.leaves)
        self._running.append(_Pass(hooks, seen, owners, checkpointed, before, []))
        return self._running[-1]

    def _begin_within(self, tensors: Any, gradients: Any) -> _PassWithin:
        """Prepare for the pass through calls that a checkpoint has run again."""
        around = self._running[-1]
        calls, self._recomputed.calls = self._recomputed.calls, []
        roots = tensors_to_start_from(tensors)
        seen = SeenGradients(self._calls.registry, self._sharded.held(), around.seen.turns)
        rerun = around.checkpointed.run_again(calls, _running_node(), around.owners, roots)
        rerun.begin(roots, tensors_to_start_from(gradients), seen)
        owners = NodeOwners(rerun.calls)
        casts = _shared_casts(roots, owners)
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded, casts)
        known = around.leaves()
        new = {identity: leaf for identity, leaf in hooks.leaves.items() if identity not in known}
        around.before.each.update(self._sums.before(new).each)
        around.within.append(_PassWithin(hooks, seen, owners, rerun))
        return around.within[-1]

    def _end_within(self, ended: _PassWithin) -> None:
        ended.hooks.remove()
        ended.rerun.end(ended.hooks.leaves, self._calls.registry)

    def _end(self, ended: _Pass, kept: bool) -> None:
        ended.hooks.remove()
        met = ended.met()
        self._recomputed.replace_in(met)
        for part in ended.within:
            part.rerun.take_places(part.seen, ended.seen)
        own = [call for call in met if not call.is_checkpointed]
        passes = [(own, ended.seen), *((part.rerun.calls, part.seen) for part in ended.within)]
        region = self._calls.write(passes)
        if region is not None and region.selected:
            seen = [seen for _, seen in passes]
            self._sums.write(ended.leaves(), ended.before, seen, region)
        self._calls.close()
        if not kept:
            self._waiting.forget(met)

    def _tell_threads(self) -> None:
        if not self._told:
            self._told = True
            text = "models were called on several threads: their backward passes are not recorded"
            self._session.note("inside-not-seen", text)


def _link_last(frame: ModuleFrame) -> None:
    """Link the last call of a module that goes on after it, with the results of that call."""
    last = frame.called[-1] if frame.called else None
    if last is not None and last.returned:
        last.link()


_ABOVE = 1
"""Difference between the numbers of a checkpoint's node and of the call inside it: the node is
numbered before the calls that it runs, and these make no nodes.
"""
_CAST = "ToCopyBackward0"


class _Recomputed:
    """Records of calls that a backward pass ran again: autograd differentiates the second run, not
    the first. calls: those with a graph, since the last pass through such calls.
    """

    def __init__(self) -> None:
        self._refs: dict[tuple[Any, ...], list[Sequence[Ref]]] = {}
        self.calls: list[ForwardCall] = []

    def add(self, frame: EndedCall, call: ForwardCall | None) -> None:
        """Add a call that has run again, completely or as far as the backward pass needed it."""
        self._refs.setdefault(_place(frame), []).append(frame.refs)
        if call is not None and call.outputs:
            self.calls.append(call)

    def replace_in(self, calls: Iterable[ForwardCall]) -> None:
        """Point calls that ran again to the records of their second run, then forget these records.
        A module that was called several times in a step is left unchanged: which of its calls ran
        again is unknown.
        """
        self.calls.clear()
        if not self._refs:
            return
        by_place: dict[tuple[Any, ...], list[ForwardCall]] = {}
        for call in calls:
            by_place.setdefault(_place(call), []).append(call)
        for place, first in by_place.items():
            again = self._refs.get(place, ())
            if len(first) == len(again) == 1:
                refs = {ref.slot: ref for ref in again[0]}
                first[0].refs = [refs.get(ref.slot, ref) for ref in first[0].refs]
        self._refs.clear()


def _place(call: EndedCall | ForwardCall) -> tuple[Any, ...]:
    return call.root.name, call.scope, call.op, call.step, call.micro


class _CheckpointedCalls:
    """Calls that reentrant checkpoints ran without a graph, below calls that wait for their
    backward pass. outermost: calls that make up the whole of a checkpoint.
    """

    def __init__(self, waiting: Iterable[ForwardCall]) -> None:
        self.outermost: list[ForwardCall] = []
        self._by_node: dict[int, ForwardCall] = {}
        for call in waiting:
            for child in call.children:
                if child is not None and child.linked:
                    self._link(call, child)

    def _link(self, caller: ForwardCall, child: ForwardCall) -> None:
        """Let the node of a checkpoint represent `child`, if that is the only call in the
        checkpoint.
        """
        edges = child.linked
        nodes = {edge.node for _, edge in edges}
        if len(nodes) != 1 or not caller.made(edges[0][1]):
            return
        (node,) = nodes
        if not child.is_checkpointed and node != child.nodes[0] - _ABOVE:
            return
        child.outputs, child.nodes, child.is_checkpointed = edges, (node, node + 1), True
        self.outermost.append(child)
        self._by_node[node] = child

    def run_again(
        self, again: Sequence[ForwardCall], node: int, owners: NodeOwners, roots: Sequence[Any]
    ) -> Rerun:
        """Match calls that ran again for a checkpoint's node with their first runs. again: the
        second runs. roots: tensors from which the pass through them starts.
        """
        owner, only = owners.of(node), self._by_node.get(node)
        first = [only] if only is not None else owner.children if owner is not None else ()
        by_module: dict[tuple[str, str], deque[ForwardCall]] = defaultdict(deque)
        for call in _without_graph(first):
            by_module[call.scope, call.op].append(call)
        second: dict[int, ForwardCall] = {}
        for call in sorted(again, key=lambda call: call.order):
            if same := by_module[call.scope, call.op]:
                second[id(same[0])] = call
                call.take_place_of(same.popleft())
        if owner is None:
            return Rerun(list(again))
        if only is not None:
            pairs = [(only, second[id(only)])] if id(only) in second else []
            return Rerun(list(again), only, pairs)
        code = copy.copy(owner)
        code.nodes, code.placements = (0, next_node()), {}
        code.children = [second.get(id(child), child) for child in owner.children]
        code.outputs = [("", edge) for root in roots if (edge := edge_of(root)) is not None]
        code.inputs = [("", Edge(-1, identity)) for identity in _inputs_behind(roots)]
        return _RerunOfCode([*again, code], owner, code, node)


class Rerun:
    """Calls that a checkpoint ran again, for the backward pass through them.

    pairs: (first run, second run) of the calls that read the checkpoint's inputs. sender: the call
    that the checkpoint's node represents.
    """

    def __init__(
        self,
        calls: list[ForwardCall],
        sender: ForwardCall | None = None,
        pairs: Sequence[tuple[ForwardCall, ForwardCall]] = (),
    ) -> None:
        self.calls, self._sender, self._pairs = calls, sender, pairs
        self._given: dict[Edge, Gradient] = {}
        self._nonzero: dict[Edge, Any] = {}

    def begin(self, roots: Sequence[Any], gradients: Sequence[Any], seen: SeenGradients) -> None:
        """The pass begins at these tensors, with these gradients."""
        if self._sender is None or len(roots) != len(gradients):
            return
        for root, gradient in zip(roots, gradients, strict=True):
            if (edge := edge_of(root)) is not None:
                self._given[edge] = seen.take(gradient, "input.grad.output", self._sender)
                if type(gradient) is torch.Tensor:
                    self._nonzero[edge] = torch.count_nonzero(gradient)

    def end(self, leaves: Mapping[int, weakref.ref[Any]], registry: TensorRegistry) -> None:
        """The pass is over, and autograd goes on with the gradients of these leaves."""

    def take_places(self, seen: SeenGradients, around: SeenGradients) -> None:
        """Replace the sum that the checkpoint's node sent by the gradients of the second run. seen,
        around: gradients of this pass and of the pass around it.
        """
        if self._sender is None:
            return
        for first, second in self._pairs:
            for _, edge in second.outputs:  # code below may use what it returns, too
                if edge in self._given:
                    seen.outside[second.order, edge] = self._given[edge]
            inner = dict(second.inputs)
            for slot, edge in first.inputs:
                if slot in inner and (parts := seen.sent.get(inner[slot])):
                    others = [
                        (call, gradient)
                        for call, gradient in around.sent.get(edge, ())
                        if call is not first and call is not self._sender
                    ]
                    own = [(self._sender, gradient) for _, gradient in parts]
                    around.sent[edge] = [*others, *own]


class _RerunOfCode(Rerun):
    """Calls that a checkpoint ran again together with code of the module around them; that module
    itself was not called again.

    around: the first call of that module. code: the second run of its code, inside the checkpoint.
    The slots of `code` are known when both passes are over, from the gradients that one handed to
    the other.
    """

    def __init__(
        self, calls: list[ForwardCall], around: ForwardCall, code: ForwardCall, node: int
    ) -> None:
        sender = copy.copy(around)
        sender.nodes = (node, node + 1)
        super().__init__(calls, sender, [(around, code)])
        self._around, self._code, self._node = around, code, node
        self._sent: dict[Edge, Any] = {}

    def end(self, leaves: Mapping[int, weakref.ref[Any]], registry: TensorRegistry) -> None:
        """The pass is over, and autograd goes on with the gradients of these leaves."""
        for _, edge in self._code.inputs:
            leaf = leaves[edge.place]() if edge.place in leaves else None
            if leaf is not None and leaf.grad is not None:
                taken = registry.record_of(leaf.grad, "output.grad.input", self._code)
                self._sent[edge] = taken[0]

    def take_places(self, seen: SeenGradients, around: SeenGradients) -> None:
        """Give the recomputed code the slots of its module, then replace the first run by the
        second.
        """
        code, first = self._code, self._around
        came = self._slots_given(around)
        read = {
            sent.record: slot
            for slot, edge in first.inputs
            if (sent := around.sent_by(first, edge)) is not None
        }
        code.outputs = [
            (came[gradient.record], edge)
            for edge, gradient in self._given.items()
            if gradient.record in came
        ]
        known = {edge for _, edge in code.outputs}
        # An output that nobody uses gets a gradient of zeros from autograd.
        others = [self._nonzero.get(edge, True) for edge in self._given if edge not in known]
        code.inputs = [
            (read[record], edge) for edge, record in self._sent.items() if record in read
        ]
        if not known or any(others):
            self.calls.remove(code)  # the call keeps what it has of its own
            return
        if first.nodes == (self._node, self._node + 1):
            first.is_checkpointed = True
        super().take_places(seen, around)

    def _slots_given(self, around: SeenGradients) -> dict[Any, str]:
        """Slots of the gradients that arrived at the checkpoint's node, by record: outputs of the
        module, and inputs of its later child calls.
        """
        given: dict[Any, str] = {}
        for slot, edge in self._around.outputs:
            if edge.node == self._node and (gradient := around.given(self._around, edge)):
                given[gradient.record] = slot
        for place, child in self._around.known_children():
            for slot, edge in child.inputs:
                if edge.node == self._node:
                    sent = around.sent_below(child, edge)
                    given |= {gradient.record: f"{place}:{slot}" for gradient in sent}
        return given


def _running_node() -> int:
    """Number of the node that a backward pass on this thread is running, -1 for none."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def _without_graph(calls: Iterable[ForwardCall | None]) -> Iterator[ForwardCall]:
    """The calls among these that ran without a graph, and all calls below them, in order."""
    for call in calls:
        if call is not None and not call.has_graph:
            yield call
            yield from _without_graph(call.children)


def _inputs_behind(roots: Iterable[Any]) -> Iterator[int]:
    """Identities of the leaves of a graph that are not parameters."""
    for node, _ in nodes_behind(roots):
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            yield id(leaf)


def _shared_casts(roots: Sequence[Any], owners: NodeOwners) -> set[Any]:
    """Cast nodes of inputs that several calls share: autocast caches the casts of leaves, and the
    inputs of recomputed code are leaves. The gradients of these calls are summed at such a node.
    """
    inputs = set(_inputs_behind(roots))
    casts = {
        node: owners.of(node._sequence_nr())
        for node, _ in nodes_behind(roots)
        if type(node).__name__ == _CAST
        and any(id(getattr(leaf, "variable", None)) in inputs for leaf, _ in node.next_functions)
    }
    return {
        follower
        for node, _ in (nodes_behind(roots) if casts else ())
        for follower, _ in node.next_functions
        if follower in casts and owners.of(node._sequence_nr()) is not casts[follower]
    }
