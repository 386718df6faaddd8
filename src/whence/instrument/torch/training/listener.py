"""What a listener of modules needs to follow a training run: backward passes, gradients of
parameters, what changes them, and steps of optimisers.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.before_steps import call_before_steps
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard
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
from whence.instrument.torch.training.backward_pass import BackwardPasses
from whence.instrument.torch.training.code_region import CodeRecorder, CodeRegion
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.gradient_sums import GradientSums
from whence.instrument.torch.training.loss_code import LossCode
from whence.instrument.torch.training.open_region import OpenRegion
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
    """What follows the training of the models of a listener, None where that is not wanted."""
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
        """A module is called with these tensors (slot, tensor), with a graph or, as a checkpoint
        calls it at first, without one below a call that has it.
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
        """Record the code outside of modules that runs now no longer."""
        self._region.drop(reason)

    def model_begins(self) -> Training:
        """An outermost call begins; nothing of the listener is on the thread. Returns itself."""
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
        """An optimiser has stepped, or a loss scaler left its step out. Called before its roots go
        on to their next step.
        """
        self._steps.stop_listening()
        if is_skipped:
            self.loss.step_begins()
            self._changes.stop_listening()
        if self._frames.active and not self._frames.thread.busy:
            ended = self._steps.skipped if is_skipped else self._steps.ended
            self._frames.guarded(ended, optimizer)


# Steps of optimisers: a call for each parameter, from its value, gradient and state to what they
# are after the step.
#
# A step of torch's own optimisers is an operation of its program, which torch's code replays.
# What another optimiser runs is recorded while it steps (`optimizer_code`).
#
# The steps of torch's own optimisers as programs: one operation, which torch's code replays.

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""How an optimiser goes about its step; what it computes is the same."""

_GRAD = 1
"""Place of the gradient among the inputs of a step."""

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
        self._regions = Regions(session, registry, OpenRegion())
        self._before: list[Updated] = []
        self._stepped: list[tuple[ParameterName, Any]] = []
        self._is_divided = False
        self._counts: dict[str, int] = {}
        self._code: OptimizerCode | None = None
        # Settings that the steps of an optimiser change themselves, which are none of the user's.
        self._computed = weakref.WeakKeyDictionary[Any, set[str]]()
        self._group_before: list[dict[str, Any]] = []
        # Those whose later steps may depend on numbers that they computed, and why.
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
        """Is the step to be recorded as it runs?"""
        return (
            not is_torchs(type(optimizer))
            and optimizer not in self._measuring
            and not self._writer.unwanted
            and self._session.elements_on
            and self._region.may_begin
            and all(is_plain(tensor) for read in given for _, tensor in read)
        )

    def listen(self) -> None:
        """Listen to the step that has begun, where it is to be recorded. Nothing of the listener is
        on the thread.
        """
        if self._code is not None:
            self._region.begin(self._code)

    def stop_listening(self) -> None:
        """The step has ended."""
        self._region.end(self._code)

    def skipped(self, optimizer: Any) -> None:
        """A loss scaler found a gradient that is not finite, and left the step out."""
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
        """It has stepped."""
        before, self._before = self._before, []
        code, self._code = self._code, None
        if self._is_divided:
            # The step has left in `grad` what it stepped by.
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
        """The hyper-parameters of each group of an optimiser that has stepped, without what its
        steps compute: counts, an estimate of its learning rate.
        """
        now = [_plain(group) for group in optimizer.param_groups]
        computed = self._computed.setdefault(optimizer, set())
        for before, after in zip(self._group_before, now):
            computed.update(key for key in after if before.get(key) != after[key])
        return [{k: v for k, v in group.items() if k not in computed} for group in now]

    def _ran(
        self, optimizer: Any, code: OptimizerCode | None, after: Sequence[Tensors]
    ) -> list[Recording]:
        """What a step that was recorded did to each parameter. after: what each has now."""
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
        """Another tensor for a slot that was taken before."""
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
    """Name and value of what an optimiser keeps of a parameter, as far as it is tensors. In lists
    torch's own keep histories only, which are large and not replayed (LBFGS).
    """
    is_flat = is_torchs(type(optimizer))
    for key, value in kept_tensors(optimizer.state.get(tensor)):
        if not (is_flat and "." in key):
            yield key, value


def _settings(optimizer: Any) -> Tensors:
    """The tensors among the settings of an optimiser's groups, by name."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return list(kept_tensors({"group": groups}))


def _after(optimizer: Any, updated: Updated) -> Tensors:
    """What a parameter has after a step: itself, and what is kept of it."""
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
    """What a loss scaler sets for a fused step, None where it sets nothing."""
    value = getattr(optimizer, name, None)
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


_LOOKS_AGAIN = {torch.optim.LBFGS}
"""Optimisers whose steps depend on losses that are computed in between, of all parameters."""


class Updated:
    """One parameter in a step: as what its tensors are recorded. state: names of what the optimiser
    keeps of it, before the step.
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
    """What an optimiser did to one parameter. read: how many of its tensors are inputs; made: what
    it has after the step. recording: of an optimiser that is not torch's own.
    """

    kind: type
    hyper_parameters: dict[str, Any]
    read: int
    made: Tensors
    recording: Recording


@functools.cache
def _taken_by(kind: type) -> Collection[str]:
    """The names of what a class of optimisers takes."""
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
    """What a step leaves that does nothing where a gradient is not finite; adds the operations.
    State that it makes is zero then.
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


# The code of an optimiser that is not torch's own, as it runs in a step: recorded once for all
# parameters, and divided into what it does to each.

Tensors = list[tuple[str, Any]]
"""(slot, tensor) of one parameter: itself, its gradient, what the optimiser keeps of it."""

_MOST_OPERATORS = 400
"""So many operators are recorded for each parameter."""
_DEEPEST = 4


def is_torchs(kind: type) -> bool:
    """Is this class of optimisers one of torch's own, and no class that is made of one?"""
    return getattr(torch.optim, kind.__name__, None) is kind


class OptimizerCode(CodeRecorder):
    """Records what runs inside its `with` block. parameters: what each has before the step.
    settings: tensors that the optimiser keeps of its groups, by name, which are constants of the
    programs, as settings that are numbers.
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
        """The name of a setting that the step has changed and that is no count: later steps compute
        with a number that rounding changes. "" where there is none.
        """
        changed = (
            name
            for name, tensor in settings
            if (before := self._settings.get(name)) is not None and not torch.equal(before, tensor)
        )
        return next(changed, "")

    def programs(self, outputs: Sequence[Tensors]) -> list[Recording]:
        """What the step did to each parameter. outputs: what each has after it."""
        return self.each(
            [Wanted(read, made) for read, made in zip(self._read, outputs, strict=True)]
        )


def kept_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of what an optimiser keeps, as far as it is tensors: those in lists and
    dictionaries too ("factors.0").
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
