"""Steps of optimisers: a call for each parameter, from its value, gradient and state to what they
are after the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.session import Session
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Regions, part_of
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.gradient_arithmetic import Operand, unless_infinite
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.open_region import OpenRegion
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Operation, Placement, Program, Ref
from whence.records.program import OPTIMIZER_STEP, identified
from whence.records.slots import FOUND_INF
from whence.records.training import TAKEN_GRADIENT

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""How an optimiser goes about its step; what it computes is the same."""

_GRAD = 1
"""Place of the gradient among the inputs of a step."""

_LOOKS_AGAIN = {torch.optim.LBFGS}
"""Optimisers whose steps depend on losses that are computed in between, of all parameters."""


class _Updated:
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


class OptimizerSteps:
    """Records the steps of all optimisers."""

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        writer: ProgramWriter,
        names: ParameterNames,
        changes: GradientChanges,
    ) -> None:
        self._changes = changes
        self._session, self._registry, self._writer, self._names = session, registry, writer, names
        self._regions = Regions(session, registry, OpenRegion())
        self._before: list[_Updated] = []
        self._stepped: list[tuple[ParameterName, Any]] = []
        self._divided: Callable[[Any], None] | None = None
        self._counts: dict[str, int] = {}

    def begins(self, optimizer: Any) -> None:
        """An optimiser is about to step."""
        self._before, self._divided = [], None
        self._stepped = stepped = []
        scale, found_inf = (_tensor_of(optimizer, name) for name in ("grad_scale", "found_inf"))
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if tensor.grad is None or (name := self._names.of(tensor)) is None:
                    continue
                updated = _Updated(name, tensor, number, keep=self._session.elements_on)
                self._take(updated, "input.param", tensor)
                self._take(updated, TAKEN_GRADIENT, tensor.grad)
                for key, value in _state(optimizer, tensor):
                    updated.state.append(key)
                    self._take(updated, f"input.{key}", value)
                if found_inf is not None:
                    updated.may_skip = True
                    self._take(updated, FOUND_INF, found_inf)
                self._before.append(updated)
                stepped.append((name, tensor))
        if stepped and scale is not None:
            tensors = [tensor for _, tensor in stepped]
            self._divided = self._changes.divided_by_step(tensors, scale, found_inf)
        elif stepped:
            self._write_changes()

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
        region = self._regions.enter("optimizer", root, root.steps.get("", 0), 0, self._counts)
        self._changes.write(self._stepped, region)

    def ended(self, optimizer: Any) -> None:
        """It has stepped."""
        before, self._before = self._before, []
        divided, self._divided = self._divided, None
        if divided is not None:
            # The step has left in `grad` what it stepped by.
            divided(None)
            for updated in before:
                self._take_again(updated, _GRAD, updated.tensor.grad)
            self._write_changes()
        for updated in before:
            root = updated.name.root
            read = len(updated.refs)
            left = [key for key, _ in _state(optimizer, updated.tensor)]
            self._take(updated, "output.param", updated.tensor)
            for key, value in _state(optimizer, updated.tensor):
                self._take(updated, f"output.{key}", value)
            step = root.steps.get("", 0)
            region = self._regions.enter("optimizer", root, step, 0, self._counts)
            if region.selected:
                group = optimizer.param_groups[updated.number]
                self._write(updated, read, left, type(optimizer), _plain(group), region)
        self._regions.close()
        self._counts = {}

    def _take(self, updated: _Updated, slot: str, tensor: Any) -> None:
        parameter = slot.endswith(".param")
        number, edge, form = self._registry.record_of(tensor, slot, updated, parameter=parameter)
        updated.refs.append(Ref(slot, number, edge))
        updated.dtypes.append(form[0])

    def _take_again(self, updated: _Updated, place: int, tensor: Any) -> None:
        """Another tensor for a slot that was taken before."""
        slot = updated.refs[place].slot
        number, edge, form = self._registry.record_of(tensor, slot, updated)
        updated.refs[place] = Ref(slot, number, edge)
        updated.dtypes[place] = form[0]

    def _write(
        self,
        updated: _Updated,
        read: int,
        left: list[str],
        kind: type,
        hyper_parameters: dict[str, Any],
        region: Any,
    ) -> None:
        session, name = self._session, updated.name
        program_or_reason = _program_of(updated, read, left, kind, hyper_parameters)
        unwanted = self._writer.unwanted
        written, no_program = self._writer.put(
            *((None, unwanted) if unwanted else program_or_reason)
        )
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
                arguments=hyper_parameters,
                program=written,
                no_program=no_program,
                placements=updated.placements,
            )
        )


def _state(optimizer: Any, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of what an optimiser keeps of a parameter, as far as it is tensors."""
    state = optimizer.state.get(tensor)
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(key, str) and isinstance(value, torch.Tensor) and value.dtype in NAMES:
            yield key, value


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


def _program_of(
    updated: _Updated, read: int, left: list[str], kind: type, hyper_parameters: dict[str, Any]
) -> tuple[Program | None, str]:
    """The step as a program, or why there is none. read: how many of its tensors are inputs."""
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None, f"{kind.__name__} is not one of torch's own optimisers"
    if kind in _LOOKS_AGAIN:
        return None, f"{kind.__name__} computes the loss several times in a step"
    taken = inspect.signature(kind.__init__).parameters
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
        {key: value for key, value in hyper_parameters.items() if key in taken},
    )
    operations = [operation]
    slots = [f"output.{key}" for key in ("param", *left)]
    outputs: list[Operand] = [{"op": [0, k]} for k in range(len(slots))]
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
    return identified(program), ""


def _unless_skipped(
    updated: _Updated,
    read: int,
    left: list[str],
    after: list[Operand],
    operations: list[Operation],
) -> list[Operand]:
    """What a step leaves that does nothing where a gradient is not finite; adds the operations.
    State that it makes is zero then.
    """

    def run(operation: Operation) -> Operand:
        operations.append(operation)
        return {"op": [len(operations) - 1, 0]}

    held: dict[str, Operand] = {key: {"in": 2 + k} for k, key in enumerate(updated.state)}
    before: list[Operand] = [{"in": 0}]
    for key, new in zip(left, after[1:], strict=True):
        zeros = Operation("aten.zeros_like.default", (new,))
        before.append(held[key] if key in held else run(zeros))
    return unless_infinite(before, after, run, {"in": read - 1})


def _tensor_of(optimizer: Any, name: str) -> Any:
    """What a loss scaler sets for a fused step, None where it sets nothing."""
    value = getattr(optimizer, name, None)
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None
