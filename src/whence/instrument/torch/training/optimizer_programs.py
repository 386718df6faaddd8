"""The steps of torch's own optimisers as programs: one operation, which torch's code replays."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.torch.program_recorder import Recording
from whence.instrument.torch.training.gradient_arithmetic import Operand, unless_infinite
from whence.instrument.torch.training.optimizer_code import Tensors
from whence.instrument.torch.training.parameter_names import ParameterName
from whence.records import Operation, Placement, Program, Ref
from whence.records.program import OPTIMIZER_STEP, identified
from whence.records.slots import split_slot

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


def own_step(updated: Updated, step: Step) -> tuple[Program | None, str]:
    """A step of one of torch's own optimisers as a program, or why there is none."""
    kind, read = step.kind, step.read
    left = [split_slot(slot)[1] for slot, _ in step.made[1:]]
    if kind in _LOOKS_AGAIN:
        return None, f"{kind.__name__} computes the loss several times in a step"
    taken = inspect.signature(kind).parameters
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
        {key: value for key, value in step.hyper_parameters.items() if key in taken},
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
    updated: Updated,
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
