"""Flattens a tree of calls into one program: the operators of a call with those of its hidden
children in their places.

The program of a container has gaps where it calls its children. Where the other run recorded
nothing for a child, the child's own program fills the gap, so that the result is one list of
operators. Children of a filled gap that are not hidden become gaps of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from whence.errors import ReplayRefused
from whence.records import Program
from whence.records.program import ProgramDraw
from whence.records.slots import is_mutated, is_of_child, is_param, param_name, split_child
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
    shapes: by slot. scope: of its module inside that of the whole, by which its parameters are
    named there; "" if they are named by the call. records: by slot, of tensors that may be left in
    an object (a cache) and are then no result of the program.
    """

    call: int
    program: Program
    children: Sequence[int]
    hidden: frozenset[int]
    shapes: Mapping[str, tuple[int, ...]]
    scope: str = ""
    records: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Whole:
    """The program of a tree of calls while it is assembled.

    numbers: child that is not hidden -> its number among the children of the whole; empty if only
    those of the outermost call are seen, which keep their numbers. gaps: as `Program.calls`.
    handed: what children of inlined calls are given, by slot of the whole. left: what inlined
    calls left, by record.
    """

    node_of: Callable[[int], Node]
    numbers: Mapping[int, int] = field(default_factory=dict)
    builder: ProgramBuilder = field(default_factory=ProgramBuilder)
    origins: dict[str, tuple[int, str]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    grad: list[str] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    handed: dict[str, Any] = field(default_factory=dict)
    left: dict[int, Any] = field(default_factory=dict)
    same: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    draws: list[ProgramDraw] = field(default_factory=list)

    def flat(self, name: str, outputs: Mapping[str, Any], first: Program) -> Flat:
        """Returns the assembled program, with the settings of `first`."""
        program = msgspec.structs.replace(
            self.builder.program([*outputs.items(), *self.handed.items()], self.gaps),
            id=name,
            base=first.base,
            default_dtype=first.default_dtype,
            inference=first.inference,
            grad=tuple(self.grad),
            notes=(),
            under_grad=first.under_grad,
            same=tuple(self.same),
            lost=tuple(self.lost),
            draws=tuple(self.draws),
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
        whole.same += [(self._name(a), self._name(b)) for a, b in program.same]
        whole.lost += [(self._name(slot), why) for slot, why in program.lost]
        whole.draws += [
            msgspec.structs.replace(draw, slot=self._name(draw.slot)) for draw in program.draws
        ]
        # What it hands to children that are seen is an output too.
        if self._arguments is None or whole.numbers:
            seen = (o for o in program.outputs if is_of_child(o[0]) and not self._is_hidden(o[0]))
            whole.handed |= self._values([(self._name(slot), operand) for slot, operand in seen])
        results = self._values([(s, o) for s, o in program.outputs if not is_of_child(s)])
        records = self._node.records
        whole.left |= {records[slot]: o for slot, o in results.items() if slot in records}
        return results

    def _values(self, outputs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Returns the operands in the whole; without those that could not be followed, if the whole
        has other outputs.
        """
        values: dict[str, Any] = {}
        for slot, operand in outputs:
            try:
                values |= {slot: self._whole.builder.mapped(self._part, [operand])[0]}
            except ReplayRefused as refused:
                if not self._whole.numbers:
                    raise
                self._whole.lost.append((slot, str(refused)))
        return values

    def _name(self, slot: str) -> str:
        """The name in the whole of a slot that is not resolved inside it."""
        node, numbers = self._node, self._whole.numbers
        if is_of_child(slot) and numbers:
            child, inner = split_child(slot)
            return f"{numbers[node.children[child]]}:{inner}"
        if self._arguments is None:
            return slot
        if is_param(slot) and node.scope:
            return f"param.{node.scope}.{param_name(slot)}"
        return f"{slot}@{node.call}"

    def _is_hidden(self, slot: str) -> bool:
        """Whether the slot belongs to a child that is inlined."""
        return is_of_child(slot) and split_child(slot)[0] in self._node.hidden

    def _enter(self, child: int) -> None:
        """Inlines a child, if it is hidden."""
        node, whole, prefix = self._node, self._whole, f"{child}:"
        if child not in node.hidden:
            if whole.numbers:
                whole.gaps.append((whole.numbers[node.children[child]], whole.builder.length))
            return
        inner = whole.node_of(node.children[child])
        handed = self._values(
            [(s.removeprefix(prefix), o) for s, o in node.program.outputs if s.startswith(prefix)]
        )
        results = handed | _Inlining(whole, inner, handed).outputs()
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
        if self._is_hidden(slot) and (record := self._node.records.get(slot)) in self._whole.left:
            return self._whole.left[record]
        if self._is_hidden(slot):
            raise ReplayRefused(f"{slot} is made inside, where it could not be followed")
        if self._arguments is not None and slot in self._arguments:
            return self._arguments[slot]
        whole, node = self._whole, self._node
        name = self._name(slot)
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


def flatten(
    call: int, node_of: Callable[[int], Node], numbers: Mapping[int, int] | None = None
) -> Flat:
    """Returns the program of `call` with those of its hidden children inlined.

    node_of: call -> its node; raises ReplayRefused when the call has no program. numbers: of the
    children that are not hidden, also of inlined calls, in the whole; None if inlined calls have
    none.
    """
    root = node_of(call)
    if not root.hidden:
        origins = {s: _origin(root, s) for s in (*root.program.inputs, *root.program.params)}
        return Flat(root.program, origins, (call,) * len(root.program.operations))
    whole = _Whole(node_of, numbers or {})
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
