"""Flattens a tree of calls into one program: the operators of a call with those of its hidden
children in their places.

The program of a container has gaps where it calls its children. Where the other run recorded
nothing for a child, the child's own program fills the gap, so that the result is one list of
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from whence.errors import ReplayRefused
from whence.records import Program
from whence.records.slots import is_mutated, is_of_child, is_param, split_child
from whence.replay.program_parts import ProgramBuilder, ProgramPart


@dataclass
class Flat:
    """A program and the origin of its tensors.

    origins: slot of the program -> (call, slot of that call). places: for each operation, the call
    that ran it.
    """

    program: Program
    origins: dict[str, tuple[int, str]]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One call with its program.

    children: ids of all its children. hidden: numbers (from 0) of the children that are inlined.
    shapes: by slot.
    """

    call: int
    program: Program
    children: Sequence[int]
    hidden: frozenset[int]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class _Whole:
    """The program of a tree of calls while it is assembled."""

    node_of: Callable[[int], Node]
    builder: ProgramBuilder = field(default_factory=ProgramBuilder)
    origins: dict[str, tuple[int, str]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    grad: list[str] = field(default_factory=list)

    def flat(self, name: str, outputs: Mapping[str, Any], first: Program) -> Flat:
        """Returns the assembled program, with the settings of `first`."""
        program = msgspec.structs.replace(
            self.builder.program([*outputs.items()]),
            id=name,
            base=first.base,
            default_dtype=first.default_dtype,
            inference=first.inference,
            grad=tuple(self.grad),
            notes=(),
            lines=(),
            under_grad=first.under_grad,
        )
        return Flat(program, self.origins, tuple(self.places))


class _Inlining:
    """One call inlined into the whole.

    arguments: operands of its inputs, None for the outermost call.
    """

    def __init__(self, whole: _Whole, node: Node, arguments: Mapping[str, Any] | None) -> None:
        self._whole, self._node, self._arguments = whole, node, arguments
        self._part = ProgramPart(node.program, self._settled, self._shape)
        self._child_results: dict[str, Any] = {}  # of its hidden children, by slot of its program

    def outputs(self) -> dict[str, Any]:
        """Appends the operators of the call and returns the operands of its outputs."""
        whole, program = self._whole, self._node.program
        entering: dict[int, list[int]] = {}
        for child, place in program.calls:
            entering.setdefault(place, []).append(child)
        for place in range(len(program.operations) + 1):
            for child in entering.get(place, ()):
                self._enter(child)
            if place < len(program.operations):
                whole.builder.add(self._part, place)
                whole.places.append(self._node.call)
        top = self._arguments is None  # what it hands to children that are seen is an output too
        outputs = [(s, o) for s, o in program.outputs if not is_of_child(s)]
        handed = [(s, o) for s, o in program.outputs if is_of_child(s) and not self._is_hidden(s)]
        return self._values([*outputs, *(handed if top else ())])

    def _values(self, outputs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        operands = self._whole.builder.mapped(self._part, [operand for _, operand in outputs])
        return dict(zip((slot for slot, _ in outputs), operands, strict=True))

    def _is_hidden(self, slot: str) -> bool:
        """Whether the slot belongs to a child that is inlined."""
        return is_of_child(slot) and split_child(slot)[0] in self._node.hidden

    def _enter(self, child: int) -> None:
        """Inlines a child, if it is hidden."""
        node, prefix = self._node, f"{child}:"
        if child not in node.hidden:
            return
        inner = self._whole.node_of(node.children[child])
        handed = self._values(
            [(s.removeprefix(prefix), o) for s, o in node.program.outputs if s.startswith(prefix)]
        )
        results = handed | _Inlining(self._whole, inner, handed).outputs()
        self._child_results |= {f"{prefix}{slot}": operand for slot, operand in results.items()}

    def _shape(self, slot: str) -> Sequence[int]:
        if slot not in self._node.shapes:
            raise ReplayRefused(f"the shape of {slot} is not known")
        return self._node.shapes[slot]

    def _settled(self, slot: str) -> Any:
        """Returns the operand of an input or param: the output of a hidden child, an argument of
        the call, or a new input or param of the whole. Resolved when it is first read.
        """
        if slot in self._child_results:
            return self._child_results[slot]
        if self._is_hidden(slot):
            raise ReplayRefused(f"{slot} is made inside, where it could not be followed")
        if self._arguments is not None and slot in self._arguments:
            return self._arguments[slot]
        whole, node = self._whole, self._node
        name = slot if self._arguments is None else f"{slot}@{node.call}"
        whole.origins.setdefault(name, _origin(node, slot))
        if slot in node.program.grad:
            whole.grad.append(name)
        if is_param(slot):
            return whole.builder.param(name)
        dtypes = dict(zip(node.program.inputs, node.program.input_dtypes))
        return whole.builder.input(name, dtypes.get(slot, ""))


def _origin(node: Node, slot: str) -> tuple[int, str]:
    """Returns (the call that has this input or param, its slot there); a slot of a child is
    resolved to the child.
    """
    if not is_of_child(slot):
        return node.call, slot
    child, inner = split_child(slot)
    return node.children[child], inner


def flatten(call: int, node_of: Callable[[int], Node]) -> Flat:
    """Returns the program of `call` with those of its hidden children inlined.

    node_of: call -> its node; raises ReplayRefused when the call has no program.
    """
    root = node_of(call)
    if not root.hidden:
        origins = {s: _origin(root, s) for s in (*root.program.inputs, *root.program.params)}
        return Flat(root.program, origins, (call,) * len(root.program.operations))
    whole = _Whole(node_of)
    outputs = _Inlining(whole, root, None).outputs()
    return whole.flat(f"flat {root.program.id}", outputs, root.program)


def gather(
    operators: Sequence[Node],
    records: Callable[[int], Mapping[str, int]],
    origins: Mapping[int, tuple[int, str]],
    outputs: Mapping[str, int],
) -> Flat:
    """Returns one program composed of operators that were recorded as calls of their own, connected
    by the records that they share.

    operators: in execution order, without children. records: call -> {slot: record}. origins:
    record that came from outside -> (call, slot) under which it is reported. outputs: slot of the
    whole -> record.
    """

    def no_child(call: int) -> Node:
        raise ReplayRefused(f"call {call} is not a child of an operator")

    whole, operand_of = _Whole(no_child), dict[int, Any]()
    for node in operators:
        by_slot = records(node.call)
        inputs: dict[str, Any] = {}
        for slot, dtype in zip(node.program.inputs, node.program.input_dtypes, strict=True):
            if slot not in by_slot:
                raise ReplayRefused(f"{slot} of {node.program.operations[0].name} was not captured")
            if by_slot[slot] not in operand_of:
                call, origin_slot = origins.get(by_slot[slot], (node.call, slot))
                name = f"{origin_slot}@{call}"
                whole.origins.setdefault(name, (call, origin_slot))
                operand_of[by_slot[slot]] = whole.builder.input(name, dtype)
            inputs[slot] = operand_of[by_slot[slot]]
        results = _Inlining(whole, node, inputs).outputs()
        mutated = {
            slot: inputs["input" + slot[7:]]
            for slot in by_slot
            if is_mutated(slot) and "input" + slot[7:] in inputs
        }
        operand_of |= {
            by_slot[slot]: operand
            for slot, operand in (*mutated.items(), *results.items())
            if slot in by_slot
        }
    ends = {slot: operand_of[record] for slot, record in outputs.items() if record in operand_of}
    return whole.flat("gathered", ends, operators[0].program)
