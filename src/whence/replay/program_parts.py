"""Builds programs from parts of recorded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whence.errors import ReplayRefused
from whence.frameworks.operator_names import VIEWS, base_name
from whence.records import Operation, Program
from whence.records.program import identified, map_operands

Resolve = Callable[[str], Any]
"""Slot of an input or param of a part -> the operand that replaces it in the new program."""


class ProgramPart:
    """A program whose operations are copied into another.

    resolve: as `Resolve`. shape: slot of an input -> its shape.
    """

    def __init__(
        self, program: Program, resolve: Resolve, shape: Callable[[str], Sequence[int]]
    ) -> None:
        self.program, self.shape = program, shape
        self._resolve, self._resolved = resolve, dict[str, Any]()
        self.places: dict[int, int] = {}  # of its operations, in the new program
        self._writes = [k for k, o in enumerate(program.operations) if _writes(o)]

    @property
    def resolved(self) -> Mapping[str, Any]:
        """The operands of the inputs and params resolved so far, by slot."""
        return self._resolved

    def operand(self, slot: str) -> Any:
        """Returns the operand that replaces an input or param in the new program."""
        if slot not in self._resolved:
            self._resolved[slot] = self._resolve(slot)
        return self._resolved[slot]

    def needed(self, operands: Iterable[Any]) -> list[int]:
        """Returns the places of the operations that these operands need, in order, including those
        that write in place to memory that one of them reads, also through a view.
        """
        operations, needed = self.program.operations, set[int]()
        todo = [operand["op"][0] for operand in operands if "op" in operand]
        while todo:
            place = todo.pop()
            if place not in needed:
                needed.add(place)
                todo += [value[0] for kind, value in operations[place].operands() if kind == "op"]
            if not todo:
                todo += [
                    k
                    for k in self._writes
                    if k not in needed and k < max(needed) and needed & self._written(k)
                ]
        return sorted(needed)

    def leads(self, start: Any, goal: Any) -> bool:
        """Whether the operand `start` depends on the input or param `goal`."""
        return bool(start == goal) or any(
            {kind: value} == goal
            for place in self.needed([start])
            for kind, value in self.program.operations[place].operands()
        )

    def _written(self, place: int) -> set[int]:
        """Returns the places of the operations whose result shares the memory that an operation
        writes.
        """
        memory = set[int]()
        while True:
            operation = self.program.operations[place]
            first = next(operation.operands(), None)
            is_view = base_name(operation.name) in VIEWS or _writes(operation)
            if first is None or first.kind != "op" or not is_view:
                return memory
            place = first.value[0]
            memory.add(place)


def _writes(operation: Operation) -> bool:
    name = base_name(operation.name)
    return name.endswith("_") and name not in VIEWS


class ProgramBuilder:
    """Concatenates operations of several programs."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._lines: list[str] = []
        self._inputs: dict[str, str] = {}  # slot -> dtype
        self._params: list[str] = []
        self._constants: list[int] = []
        self._parts: list[ProgramPart] = []

    @property
    def inputs(self) -> Sequence[str]:
        """The slots of the inputs so far, in order."""
        return list(self._inputs)

    @property
    def length(self) -> int:
        """The number of operations so far."""
        return len(self._operations)

    def input(self, slot: str, dtype: str) -> Any:
        """Returns the operand of an input of the new program."""
        self._inputs.setdefault(slot, dtype)
        return {"in": self.inputs.index(slot)}

    def param(self, slot: str) -> Any:
        """Returns the operand of a param of the new program."""
        if slot not in self._params:
            self._params.append(slot)
        return {"param": slot}

    def constant(self, record: int) -> Any:
        """Returns the operand of a constant of the new program."""
        if record not in self._constants:
            self._constants.append(record)
        return {"const": self._constants.index(record)}

    def as_in(self, program: Program) -> Resolve:
        """Returns a `Resolve` that keeps the names that inputs and params have in `program`."""
        dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
        return lambda slot: (
            self.input(slot, dtype_of[slot]) if slot in dtype_of else self.param(slot)
        )

    def take(self, part: ProgramPart, operands: Sequence[Any]) -> list[Any]:
        """Converts operands of a part to operands of the new program, and first adds the operations
        that they need.
        """
        for place in part.needed(operands):
            if place not in part.places:
                self.add(part, place)
        return self.mapped(part, operands)

    def add(self, part: ProgramPart, place: int) -> None:
        """Appends one operation of a part."""
        operation = part.program.operations[place].with_operands(
            lambda kind, value: self._mapped(part, kind, value)
        )
        part.places[place] = self.length
        self.append(operation, part.program.lines[place] if part.program.lines else "")

    def mapped(self, part: ProgramPart, operands: Sequence[Any]) -> list[Any]:
        """Converts operands of a part to operands of the new program, which already has the
        operations that they need.
        """
        if part not in self._parts:
            self._parts.append(part)
        return [
            map_operands(lambda kind, value: self._mapped(part, kind, value), operand)
            for operand in operands
        ]

    def append(self, operation: Operation, line: str = "") -> None:
        """Adds an operation whose operands are those of the new program."""
        self._operations.append(operation)
        self._lines.append(line)

    def _mapped(self, part: ProgramPart, kind: str, value: Any) -> Any:
        program = part.program
        if kind == "op":
            return {"op": [part.places[value[0]], value[1]]}
        if kind == "in":
            return part.operand(program.inputs[value])
        if kind == "param":
            return part.operand(value)
        if kind == "const":
            return self.constant(program.constants[value])
        if kind == "dim":
            slot, axis = program.inputs[value[0]], value[1]
            operand = part.operand(slot)
            if "in" in operand:
                return {"dim": [operand["in"], axis]}
            # The extent of a tensor that the new program computes itself becomes a constant.
            shape = part.shape(slot)
            if axis >= len(shape):
                raise ReplayRefused(f"{slot} has no axis {axis}: shape {tuple(shape)}")
            return shape[axis]
        if kind == "mul":
            factors = self.mapped(part, value)
            if all(isinstance(factor, int) for factor in factors):
                return math.prod(factors)
            return {"mul": factors}
        return {kind: value}

    def program(
        self, outputs: Sequence[tuple[str, Any]], calls: Sequence[tuple[int, int]] = ()
    ) -> Program:
        """Returns the new program. outputs: (slot, its operand). calls: as `Program.calls`."""
        programs = [part.program for part in self._parts]
        numbers = {slot: k for k, slot in enumerate(self._inputs)}
        fixed, equal = list[tuple[int, int, int]](), list[tuple[int, int, int, int]]()
        for part in self._parts:
            places = [part.resolved.get(slot, {}).get("in", -1) for slot in part.program.inputs]
            fixed += [(places[k], axis, n) for k, axis, n in part.program.fixed]
            equal += [(places[a], x, places[b], y) for a, x, b, y in part.program.equal]
        detached = [
            (part.places[place], tensor)
            for part in self._parts
            for place, tensor in part.program.detached
            if place in part.places
        ]
        return identified(
            Program(
                id="",
                operations=tuple(self._operations),
                inputs=tuple(numbers),
                outputs=tuple(outputs),
                params=tuple(self._params),
                constants=tuple(self._constants),
                base=next((p.base for p in programs if p.base), ""),
                input_dtypes=tuple(self._inputs.values()),
                default_dtype=next((p.default_dtype for p in programs), "float32"),
                fixed=tuple(dict.fromkeys(item for item in fixed if item[0] >= 0)),
                equal=tuple(dict.fromkeys(item for item in equal if min(item[0], item[2]) >= 0)),
                notes=tuple(dict.fromkeys(note for p in programs for note in p.notes)),
                calls=tuple(calls),
                lines=tuple(self._lines) if any(self._lines) else (),
                under_grad=any(p.under_grad for p in programs),
                detached=tuple(sorted(detached)),
            )
        )
