"""Builds the program of a backward pass from the program of the forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from whence.records.program import (
    GRADIENTS,
    TENSOR_OPERANDS,
    Operation,
    Program,
    identified,
    map_operands,
)
from whence.records.slots import is_of_child

DIFFERENTIATES = "differentiates"
"""A note of a program: it runs a backward pass itself, also through tensors computed
outside of it.
"""
_IN_PLACE = "in-place"
_HALVES = ("bfloat16", "float16")


class GivenGradient(NamedTuple):
    """A gradient that a backward pass starts from: the output of the forward program that it
    belongs to, its input slot in the backward program, and its dtype.
    """

    output: str
    slot: str
    dtype: str


class WantedGradient(NamedTuple):
    """A gradient that a backward pass computes: the input or param of the forward program that it
    belongs to, and its output slot in the backward program.
    """

    read: str
    slot: str


def as_input(slot: str) -> str:
    """Returns the slot under which a backward pass reads a tensor of the forward pass: "input.0"
    keeps its slot, "3:output.0" of a child becomes "input.3:output.0".
    """
    return f"input.{slot}" if is_of_child(slot) else slot


def backward_program(
    forward: Program,
    given: Sequence[GivenGradient],
    wanted: Sequence[WantedGradient],
    *,
    passed_on: bool,
    aliases: Mapping[str, str],
) -> Program | None:
    """Returns the program that takes the inputs of `forward` and the given gradients, and computes
    the wanted ones. None where `forward` lacks the output of a given gradient or all wanted
    tensors, where no given gradient leads to a wanted one, or where it runs a backward pass itself.

    Given gradients that lead to no wanted one are left out, with the operations that only they
    need. Wanted tensors that `forward` lacks are left out. passed_on: whether an output that is an
    input, passed on unchanged, takes part. aliases: slots of inputs that are the same tensor as
    another slot, an input or an argument that `forward` passed to a child.
    """
    if DIFFERENTIATES in forward.notes:
        return None
    forward = _joined(_merged(forward, aliases))
    results = dict(forward.outputs)
    reads: dict[str, Any] = {slot: {"in": k} for k, slot in enumerate(forward.inputs)}
    reads |= {slot: {"param": slot} for slot in forward.params}
    wanted = [gradient for gradient in wanted if gradient.read in reads]
    if any(gradient.output not in results for gradient in given):
        return None
    goals = [reads[gradient.read] for gradient in wanted]
    reach = _Reach(forward)
    given = [
        gradient
        for gradient in given
        if (passed_on or "op" in results[gradient.output])
        and any(reach.leads(results[gradient.output], goal) for goal in goals)
    ]
    if not given or not wanted:
        return None
    starts = [results[gradient.output] for gradient in given]
    copied = _Copied(forward, sorted(reach.operations(starts)))
    sums, starts, gradients = _added(given, starts, len(forward.inputs), len(copied.operations))
    derived = Operation(GRADIENTS, (starts, goals)).with_operands(copied.renumbered)
    derivatives = Operation(GRADIENTS, (derived.args[0], gradients, derived.args[1]))
    last = len(copied.operations) + len(sums)
    program = msgspec.structs.replace(
        forward,
        id="",
        operations=(*copied.operations, *sums, derivatives),
        inputs=(*map(as_input, forward.inputs), *(gradient.slot for gradient in given)),
        input_dtypes=(*forward.input_dtypes, *(gradient.dtype for gradient in given)),
        outputs=tuple((g.slot, {"op": [last, k]}) for k, g in enumerate(wanted)),
        lines=(*copied.lines, *[""] * (last + 1 - len(copied.operations))) if forward.lines else (),
        calls=(),
        call_lines=(),
        same=(),
        lost=(),
        names=(),
        scopes=(),
        picks=(),
        inference=False,
        grad=(),
        under_grad=True,
        detached=(),
    )
    return identified(program)


def _added(
    given: Sequence[GivenGradient], starts: Sequence[Any], first: int, before: int
) -> tuple[list[Operation], list[Any], list[Any]]:
    """Returns operations that sum 16-bit gradients of one tensor, the tensors that gradients are
    given for, and these gradients. Autocast casts a leaf once for all its readers, so their
    gradients are summed in the dtype of the cast.

    starts: tensors of the forward program. first: number of the input that holds the first
    gradient. before: number of operations before these.
    """
    operations: list[Operation] = []
    tensors: list[Any] = []
    gradients: list[Any] = []
    places: dict[tuple[str, str], int] = {}
    for k, (gradient, start) in enumerate(zip(given, starts, strict=True)):
        key = repr(start), gradient.dtype
        if gradient.dtype in _HALVES and key in places:
            place = places[key]
            sum_of = (gradients[place], {"in": first + k})
            gradients[place] = {"op": [before + len(operations), 0]}
            operations.append(Operation("aten.add.Tensor", sum_of))
        else:
            places[key] = len(gradients)
            tensors.append(start)
            gradients.append({"in": first + k})
    return operations, tensors, gradients


def read_by(program: Program) -> frozenset[str]:
    """Returns the slots of the inputs and params that the operations of a program read."""
    slots: set[str] = set()
    for operation in program.operations:
        for kind, value in operation.operands():
            if kind in ("in", "dim"):
                slots.add(program.inputs[value if kind == "in" else value[0]])
            elif kind == "param":
                slots.add(value)
    return frozenset(slots)


def _merged(program: Program, aliases: Mapping[str, str]) -> Program:
    """Returns the program with one tensor in place of all inputs that are that tensor: another
    input, or an argument of a child that returned it.
    """
    places = {slot: k for k, slot in enumerate(program.inputs)}
    tensors = dict(program.outputs) | {slot: {"in": k} for slot, k in places.items()}
    merged = {
        places[slot]: tensors[first]
        for slot, first in aliases.items()
        if slot in places and first in tensors
    }
    return _with_inputs(program, merged)


def _with_inputs(program: Program, operands: Mapping[int, Any]) -> Program:
    """Returns the program with other operands in place of some inputs."""

    def renamed(kind: str, value: Any) -> Any:
        return operands.get(value, {kind: value}) if kind == "in" else {kind: value}

    return msgspec.structs.replace(
        program,
        operations=tuple(operation.with_operands(renamed) for operation in program.operations),
        outputs=tuple((slot, map_operands(renamed, operand)) for slot, operand in program.outputs),
    )


def _joined(program: Program) -> Program:
    """Returns the program of a call with its stretches joined: an argument of a child, which is an
    input of the next stretch, becomes the result of the stretch before.
    """
    results = dict(program.outputs)
    made = {k: results[slot] for k, slot in enumerate(program.inputs) if slot in results}
    return _with_inputs(program, made)


class _Copied:
    """Copies some operations of a program in their order, renumbered, and records what
    it detached.
    """

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        self.operations: list[Operation] = []
        self.lines: list[str] = []
        self._places: dict[int, int] = {}
        for place in order:
            line = program.lines[place] if program.lines else ""
            cut = {argument for user, argument in program.detached if user == place}
            operation = program.operations[place].with_operands(self._with_cuts(cut, line))
            self._places[place] = len(self.operations)
            self._add(operation, line)

    def _with_cuts(self, cut: set[int], line: str) -> Callable[[str, Any], dict[str, Any]]:
        """Renumbers the operands of one operation; those whose place is in `cut` are detached
        before it.
        """
        places = itertools.count()

        def renumbered(kind: str, value: Any) -> dict[str, Any]:
            operand = self.renumbered(kind, value)
            if kind not in TENSOR_OPERANDS or next(places) not in cut:
                return operand
            self._add(Operation("aten.detach.default", (operand,)), line)
            return {"op": [len(self.operations) - 1, 0]}

        return renumbered

    def _add(self, operation: Operation, line: str) -> None:
        self.operations.append(operation)
        self.lines.append(line)

    def renumbered(self, kind: str, place: Any) -> dict[str, Any]:
        """Returns an operand of the program as one of the copy."""
        return {"op": [self._places[place[0]], place[1]]} if kind == "op" else {kind: place}


class _Reach:
    """The dependencies of the results of a program's operations."""

    def __init__(self, program: Program) -> None:
        self._operations = program.operations
        # An in-place write may affect every tensor that shares the memory.
        self._all = _IN_PLACE in program.notes or any(
            operation.guard is not None for operation in program.operations
        )

    def operations(self, starts: Iterable[Any]) -> set[int]:
        """Returns the numbers of the operations that these results need."""
        if self._all:
            return set(range(len(self._operations)))
        needed: set[int] = set()
        todo = [start["op"][0] for start in starts if "op" in start]
        while todo:
            place = todo.pop()
            if place not in needed:
                needed.add(place)
                used = self._operations[place].operands()
                todo += [value[0] for kind, value in used if kind == "op"]
        return needed

    def leads(self, start: Any, goal: Any) -> bool:
        """Whether a result depends on this input or param."""
        if start == goal or self._all:
            return True
        return any(
            {kind: value} == goal
            for place in self.operations([start])
            for kind, value in self._operations[place].operands()
        )
