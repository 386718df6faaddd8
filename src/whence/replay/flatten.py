"""One program out of a tree of calls: what a call ran with all that its hidden children ran inside.

A container's program has holes where it calls others. Where the other run shows nothing of a child,
the child's own program is put into the hole, so that the whole reads as one list of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.records.program import map_operands
from whence.records.slots import is_mutated, is_of_child, split_child


@dataclass
class Flat:
    """A program and where its tensors come from. origins: slot of the program -> (call, slot of
    that call). scopes: of every operation, the call that ran it.
    """

    program: Program
    origins: dict[str, tuple[int, str]]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One call with its program. children: ids of all its children; hidden: which of them (from 0)
    are put in. shapes: by slot.
    """

    call: int
    program: Program
    children: Sequence[int]
    hidden: frozenset[int]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class _Builder:
    node_of: Callable[[int], Node]
    operations: list[Operation] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    input_dtypes: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    grad: list[str] = field(default_factory=list)
    fixed: list[tuple[int, int, int]] = field(default_factory=list)
    origins: dict[str, tuple[int, str]] = field(default_factory=dict)

    def external(self, slot: str, origin: tuple[int, str], dtype: str) -> dict[str, Any]:
        if slot not in self.inputs:
            self.inputs.append(slot)
            self.input_dtypes.append(dtype)
            self.origins[slot] = origin
        return {"in": self.inputs.index(slot)}

    def param(self, name: str, origin: tuple[int, str], needs_grad: bool) -> dict[str, Any]:
        """An operand for a parameter of a call."""
        if name not in self.params:
            self.params.append(name)
            self.origins[name] = origin
            if needs_grad:
                self.grad.append(name)
        return {"param": name}

    def constant(self, record: int) -> dict[str, Any]:
        """An operand for a constant of a call."""
        if record not in self.constants:
            self.constants.append(record)
        return {"const": self.constants.index(record)}

    def put(self, node: Node, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Append a call's operators; inputs: operands of its inputs, None for the outermost call.
        Returns the operands of its outputs.
        """
        return _Inlining(self, node, inputs).outputs()

    def flat(self, name: str, outputs: tuple[tuple[str, Any], ...], first: Program) -> Flat:
        """All of it as one program, with the settings of `first`."""
        program = Program(
            name,
            tuple(self.operations),
            tuple(self.inputs),
            outputs,
            tuple(self.params),
            tuple(self.constants),
            first.base,
            tuple(self.input_dtypes),
            first.default_dtype,
            tuple(self.fixed),
            (),
            first.inference,
            tuple(self.grad),
            under_grad=first.under_grad,
        )
        return Flat(program, self.origins, tuple(self.places))


class _Inlining:
    """One call put into the whole. places: by operation of its program, that operation's place in
    the whole. child_results: operand of each output of its hidden children ("k:output.0").
    """

    def __init__(
        self, builder: _Builder, node: Node, given_operands: Mapping[str, Any] | None
    ) -> None:
        self._builder, self._node, self._arguments = builder, node, given_operands
        self._places: list[int] = []
        self._child_results: dict[str, Any] = {}
        self._inputs: dict[int, dict[str, Any]] = {}

    def outputs(self) -> dict[str, Any]:
        """Append the operators of the call; the operands of its outputs."""
        builder, program = self._builder, self._node.program
        entering: dict[int, list[int]] = {}
        for child, place in program.calls:
            entering.setdefault(place, []).append(child)
        for place, operation in enumerate(program.operations):
            for child in entering.get(place, ()):
                self._enter(child)
            whole = operation.with_operands(self._operand)
            self._places.append(len(builder.operations))
            builder.operations.append(whole)
            builder.places.append(self._node.call)
        for child in entering.get(len(program.operations), ()):
            self._enter(child)
        top = self._arguments is None  # what it hands to children that are seen is an output too
        outputs = [(s, o) for s, o in program.outputs if not is_of_child(s)]
        handed = [(s, o) for s, o in program.outputs if is_of_child(s) and not self._is_hidden(s)]
        return {slot: self._value(o) for slot, o in (*outputs, *(handed if top else ()))}

    def _is_hidden(self, slot: str) -> bool:
        """Does the slot belong to a child that is put in?"""
        return is_of_child(slot) and split_child(slot)[0] in self._node.hidden

    def _enter(self, child: int) -> None:
        """Put in a child, if it is hidden."""
        node, prefix = self._node, f"{child}:"
        if child not in node.hidden:
            return
        inner = self._builder.node_of(node.children[child])
        handed = {
            slot.removeprefix(prefix): self._value(operand)
            for slot, operand in node.program.outputs
            if slot.startswith(prefix)
        }
        results = {**handed, **self._builder.put(inner, handed)}
        self._child_results.update(
            (f"{prefix}{slot}", operand) for slot, operand in results.items()
        )

    def _value(self, value: Any) -> Any:
        return map_operands(self._operand, value)

    def _operand(self, kind: str, value: Any) -> Any:
        """What an operand of the call's program is in the whole."""
        node, builder = self._node, self._builder
        if kind == "in":
            return self._input(value)
        if kind == "op":
            return {"op": [self._places[value[0]], value[1]]}
        if kind == "param":
            return builder.param(self._name(value), (node.call, value), value in node.program.grad)
        if kind == "const":
            return builder.constant(node.program.constants[value])
        if kind == "dim":
            return self._extent(*value)
        if kind == "mul":
            factors = self._value(value)
            is_constant = all(isinstance(factor, int) for factor in factors)
            return math.prod(factors) if is_constant else {"mul": factors}
        return {kind: value}

    def _name(self, slot: str) -> str:
        """The slot of the whole that a slot of the call becomes."""
        return slot if self._arguments is None else f"{slot}@{self._node.call}"

    def _extent(self, number: int, axis: int) -> Any:
        """The extent of an input on an axis; an operand where that is an input of the whole."""
        place = self._input(number)
        if "in" in place:
            return {"dim": [place["in"], axis]}
        slot = self._node.program.inputs[number]
        shape = self._node.shapes.get(slot)
        if shape is None or axis >= len(shape):
            raise ReplayRefused(f"the shape of {slot} is not known")
        return shape[axis]

    def _input(self, number: int) -> dict[str, Any]:
        """The operand of an input: what a hidden child left, what the call was given, or an input
        of the whole. Settled when it is first read.
        """
        if number not in self._inputs:
            slot = self._node.program.inputs[number]
            if slot in self._child_results:
                operand = self._child_results[slot]
            elif self._is_hidden(slot):
                raise ReplayRefused(f"{slot} is made inside, where it could not be followed")
            elif self._arguments is not None and slot in self._arguments:
                operand = self._arguments[slot]
            else:
                operand = self._external(number, slot)
            self._inputs[number] = operand
        return self._inputs[number]

    def _external(self, number: int, slot: str) -> dict[str, Any]:
        """An input of the call that comes from outside of the whole."""
        node, builder, name = self._node, self._builder, self._name(slot)
        origin = (node.call, slot)
        if is_of_child(slot):
            child, inner = split_child(slot)
            origin = (node.children[child], inner)
        dtypes = node.program.input_dtypes
        operand = builder.external(name, origin, dtypes[number] if number < len(dtypes) else "")
        fixed = (f for f in node.program.fixed if f[0] == number)
        builder.fixed += [(operand["in"], axis, extent) for _, axis, extent in fixed]
        if slot in node.program.grad:
            builder.grad.append(name)
        return operand


def flatten(call: int, node_of: Callable[[int], Node]) -> Flat:
    """The program of `call` with those of its hidden children inside. node_of: of a call, raises
    ReplayRefused when it has no program.
    """
    root = node_of(call)
    if not root.hidden:
        names = (*root.program.inputs, *root.program.params)
        origins = {}
        for slot in names:
            origins[slot] = (call, slot)
            if is_of_child(slot):
                child, inner = split_child(slot)
                origins[slot] = (root.children[child], inner)
        return Flat(root.program, origins, (call,) * len(root.program.operations))
    builder = _Builder(node_of)
    outputs = builder.put(root, None)
    return builder.flat(f"flat {root.program.id}", tuple(outputs.items()), root.program)


def gather(
    operators: Sequence[Node],
    records: Callable[[int], Mapping[str, int]],
    origins: Mapping[int, tuple[int, str]],
    outputs: Mapping[str, int],
) -> Flat:
    """One program out of operators that were recorded as calls of their own, wired by the records
    that they share.

    operators: in the order of execution, without children. records: slot -> record, of a call.
    origins: of records that came from outside, whose slot they are better known by. outputs: slot
    of the whole -> record.
    """

    def no_child(call: int) -> Node:
        raise ReplayRefused(f"call {call} is no child of an operator")

    builder, operand_of = _Builder(no_child), dict[int, Any]()
    for node in operators:
        by_slot = records(node.call)
        inputs: dict[str, Any] = {}
        for slot, dtype in zip(node.program.inputs, node.program.input_dtypes, strict=True):
            if slot not in by_slot:
                raise ReplayRefused(f"{slot} of {node.program.operations[0].name} was not captured")
            if by_slot[slot] not in operand_of:
                call, origin_slot = origins.get(by_slot[slot], (node.call, slot))
                operand_of[by_slot[slot]] = builder.external(
                    f"{origin_slot}@{call}", (call, origin_slot), dtype
                )
            inputs[slot] = operand_of[by_slot[slot]]
        results = builder.put(node, inputs)
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
    gathered_outputs = tuple(
        (slot, operand_of[record]) for slot, record in outputs.items() if record in operand_of
    )
    return builder.flat("gathered", gathered_outputs, operators[0].program)
