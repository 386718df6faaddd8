"""Splits the recording of a loop over parameters into one program for each parameter.

An operation belongs to a program if an output depends on its result, or if it writes memory that
the program reads, also through a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from whence.frameworks.torch_schema import METADATA_ONLY, written
from whence.instrument.torch.operand_table import OperandTable, RecordedOperation, Stop
from whence.instrument.torch.program_writer import numbered_anew
from whence.records import Program
from whence.records.program import TENSOR_OPERANDS, Operand, operands

MEASURED = "takes numbers out of tensors, which rounding changes"
"""Reason for having no program: the code computes with numbers taken out of tensors."""


class Wanted(NamedTuple):
    """What one of the programs reads and makes.

    inputs: name of an input in the recording -> its slot in the program. outputs: (slot, tensor).
    """

    inputs: Mapping[str, str]
    outputs: Sequence[tuple[str, Any]]


class _Number(NamedTuple):
    """A number that the code took out of a tensor: the index of that operation, and the operations
    and inputs that it depends on.
    """

    place: int
    operations: frozenset[int]
    inputs: frozenset[str]


class SplitRecording:
    """Makes programs from a recording, each of the operations that some of its outputs depend on.

    lines: source line of each operation.
    """

    def __init__(self, table: OperandTable, lines: Mapping[int, str]) -> None:
        self._table, self._lines = table, lines
        self._tensors: list[list[Operand]] = []  # that each operation is given
        self._memory: list[Operand] = []  # that the result of each lies in, by where it was made
        self._writers: dict[tuple[str, Any], list[int]] = {}
        for place, operation in enumerate(table.operations):
            self._add(place, operation)
        guards = {k: o.guard for k, o in enumerate(table.operations) if o.guard is not None}
        self._is_measured = any(map(is_measured, guards.values()))
        # Numbers by the first input they depend on; a number that depends on none is constant.
        self._numbers: dict[str, list[_Number]] = {}
        for place in guards:
            operations, inputs = self._needed([*self._tensors[place], _result(place)])
            for name in sorted(inputs)[:1]:
                self._numbers.setdefault(name, []).append(_Number(place, operations, inputs))

    def _add(self, place: int, operation: RecordedOperation) -> None:
        given = list(_tensors([*operation.args, *operation.kwargs.values()]))
        self._tensors.append(given)
        schema = operation.schema
        changed: list[Operand] = []
        if schema is not None and schema.name not in METADATA_ONLY:
            named = dict(zip(schema.positional, operation.args)) | operation.kwargs
            changed = list(_tensors([named.get(name) for name in written(schema, named)]))
        for operand in changed:
            self._writers.setdefault(_key(self._lies_in(operand)), []).append(place)
        looks = schema is None or schema.view or schema.name in METADATA_ONLY
        shown = changed or (given if looks else [])
        self._memory.append(self._lies_in(shown[0]) if shown else Operand("op", [place, 0]))

    def _lies_in(self, operand: Operand) -> Operand:
        return self._memory[operand.value[0]] if operand.kind == "op" else operand

    def _needed(self, ends: Iterable[Operand]) -> tuple[frozenset[int], frozenset[str]]:
        """Indices of the operations, and names of the inputs, that these operands depend on."""
        places, inputs, seen = set[int](), set[str](), set[tuple[str, Any]]()
        todo = list(ends)
        while todo:
            operand = todo.pop()
            if operand.kind == "in":
                inputs.add(self._table.inputs[operand.value])
            further = [operand.value[0]] if operand.kind == "op" else []
            if (memory := _key(self._lies_in(operand))) not in seen:
                seen.add(memory)
                further += self._writers.get(memory, ())
            for place in further:
                if place not in places:
                    places.add(place)
                    todo += self._tensors[place]
        return frozenset(places), frozenset(inputs)

    def program(self, wanted: Wanted) -> tuple[Program, list[Any]]:
        """The program of these outputs, and the tensors of its constants. Raises Stop where there
        is none.
        """
        if self._is_measured:
            raise Stop(MEASURED)  # anything may be computed from it, in later steps too
        table = self._table
        results = []
        for slot, tensor in wanted.outputs:
            operand = table.boundary(tensor)
            if "hole" in operand:
                raise Stop(operand["hole"])
            results.append((slot, operand))
        places, inputs = self._needed(_tensors([operand for _, operand in results]))
        for number in (n for name in wanted.inputs for n in self._numbers.get(name, ())):
            # A number that depends on other parameters decides about those.
            is_own = number.inputs <= wanted.inputs.keys()
            if is_own and number.place < max(places, default=-1):
                places, inputs = places | number.operations, inputs | number.inputs
        if foreign := inputs - wanted.inputs.keys():
            raise Stop(f"reads {len(foreign)} tensors of other parameters")
        return self._written(wanted, results, sorted(places))

    def _written(
        self, wanted: Wanted, results: Sequence[tuple[str, Any]], order: Sequence[int]
    ) -> tuple[Program, list[Any]]:
        table = self._table
        used = [o for place in order for o in self._tensors[place]]
        used += _tensors([operand for _, operand in results])
        inputs = sorted({o.value for o in used if o.kind == "in"})
        constants = sorted({o.value for o in used if o.kind == "const"})
        return numbered_anew(
            table,
            {place: table.operations[place] for place in order},
            inputs,
            constants,
            results,
            self._lines,
            inputs=tuple(wanted.inputs[table.inputs[k]] for k in inputs),
            base=table.input_dtypes[inputs[0]] if inputs else "",
            notes=tuple(sorted(table.notes & {"in-place"})),
        )


def _tensors(value: Any) -> Iterable[Operand]:
    return (operand for operand in operands(value) if operand.kind in TENSOR_OPERANDS)


def _result(place: int) -> Operand:
    return Operand("op", [place, 0])


def is_measured(number: Any) -> bool:
    """Whether an operator returned a number that rounding can change: a float that is not integral.
    Counts and truth values are not.
    """
    return isinstance(number, float) and not number.is_integer()


def _key(operand: Operand) -> tuple[str, Any]:
    return operand.kind, operand.value[0] if operand.kind == "op" else operand.value
