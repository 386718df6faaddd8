"""Writes the program of a recording: the operations that its outputs depend on, renumbered, with
sizes expressed by the extents of its inputs where they follow them.

Extents that must stay the same on replay are noted as fixed or equal.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES, canonical
from whence.frameworks.torch_schema import OperatorSchema
from whence.instrument.torch.operand_table import (
    Operand,
    OperandTable,
    RecordedOperation,
    Stop,
    layout,
)
from whence.instrument.torch.sources import source_here
from whence.records import Operation, Program
from whence.records.program import TENSOR_OPERANDS, ProgramDraw, map_operands, operands
from whence.records.slots import is_mutated, is_of_child, split_child


class ChildCalls:
    """Calls of other modules between the operators of a program.

    calls: (child number, number of operations before it). lines: source line of each. handed:
    (slot, operand, operand of a copy) of tensors passed to them, and of those written into pools.
    same_tensors: (slot passed in, slot returned) of one and the same tensor.
    """

    def __init__(self, table: OperandTable) -> None:
        self._table = table
        self._inputs: dict[tuple[Any, ...], str] = {}  # of the child that runs now
        self.calls: list[tuple[int, int]] = []
        self.lines: list[str] = []
        self.handed: list[tuple[str, Operand, Operand]] = []
        self.same_tensors: list[tuple[str, str]] = []

    def enter(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is called with these (slot, tensor). Raises Stop where they cannot be
        followed.
        """
        table = self._table
        self._inputs = {}
        for slot, tensor in tensors:
            self._inputs[layout(tensor)] = f"{k}:{slot}"
            self.hand(f"{k}:{slot}", tensor)
        self.calls.append((k, len(table.operations)))
        self.lines.append(source_here())
        for slot, tensor in tensors:
            key = layout(tensor)
            if table.operands.get(key, {}).keys() & {"op", "const"}:
                # From here on the tensor is visible: later operations read it as an input, not
                # the operations that made it.
                pinned = key in table.pinned
                table.renew(f"{k}:{slot}", tensor, key)
                (table.pinned.add if pinned else table.pinned.discard)(key)

    def hand(self, slot: str, tensor: Any) -> None:
        """Record that a tensor leaves the call's own operators. Raises Stop where it cannot be
        followed.
        """
        table = self._table
        operand = table.boundary(tensor)
        # A later in-place write must not change the tensor that was passed on, hence the copy.
        copy = {"op": [len(table.operations), 0]}
        if "hole" not in operand:
            table.operations.append(RecordedOperation("aten.clone.default", (operand,), {}))
        self.handed.append((slot, operand, copy))

    def leave(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k returned or changed these (slot, tensor). Raises Stop where they cannot be
        followed.
        """
        table = self._table
        for slot, tensor in tensors:
            if not table.is_plain(tensor):
                continue
            key = layout(tensor)
            if is_mutated(slot):
                table.poison(key[0], "a module changed memory that this is a view of")
            elif key in self._inputs:
                self.same_tensors.append((self._inputs[key], f"{k}:{slot}"))
            table.renew(f"{k}:{slot}", tensor, key)


class _Operations(NamedTuple):
    """The operations of a recording that its outputs depend on.

    written: by index, in order. used: operands that they refer to. fixed: extents that a replay
    must share; agreeing: (input, axis, input, axis) of equal extents.
    """

    written: dict[int, RecordedOperation]
    used: UsedOperands
    fixed: Collection[tuple[int, int, int]]
    agreeing: Collection[tuple[int, int, int, int]]


def _needed(
    table: OperandTable,
    children: ChildCalls,
    results: list[tuple[str, Operand]],
    *,
    alone: bool,
) -> _Operations:
    """The operations that `results` depend on, or all where memory is written in place. alone: let
    sizes follow only inputs that these operations read.
    """
    operations, used = table.operations, UsedOperands()
    ends = [operand for _, operand in results]
    live = set(range(len(operations))) if "in-place" in table.notes else _live(table, ends)
    order = sorted(live)
    sizes = _ProgramSizes(table, children.calls)
    read = _read_by(table, order) if alone else set()
    written = {}
    for old in order:
        _, args, kwargs, _, schema = operation = operations[old]
        known = sizes.known_at(old) & read if alone else sizes.known_at(old)
        args, kwargs = sizes.sized(schema, args, kwargs, known)
        written[old] = operation._replace(args=args, kwargs=kwargs)
        used.walk([*args, *kwargs.values()])
    used.walk(ends)
    fixed = sizes.fixed_extents(any(sizes.takes_sizes(operations[old].schema) for old in live))
    agreeing = sizes.agreements(used.inputs if alone or children.calls else None)
    if alone or children.calls:
        fixed = {extent for extent in fixed if extent[0] in used.inputs}
    else:
        used.inputs.update(k for k, _, _ in fixed)
        used.inputs.update(k for i, _, m, _ in agreeing for k in (i, m))
    return _Operations(written, used, fixed, agreeing)


def _read_by(table: OperandTable, order: Sequence[int]) -> set[int]:
    """Indices of the inputs that these operations read."""
    used = UsedOperands()
    for place in order:
        _, args, kwargs, *_ = table.operations[place]
        used.walk([*args, *kwargs.values()])
    return used.inputs


def write_program(
    table: OperandTable,
    children: ChildCalls,
    lines: Mapping[int, str],
    detached: Mapping[int, Sequence[bool]],
    draws: Sequence[ProgramDraw],
    outputs: Sequence[tuple[str, Any]],
    alone: bool = False,
) -> tuple[Program, list[Any]]:
    """The program of a recording, and the tensors of its constants.

    lines: source line of each operation. detached: by operation, for each tensor argument whether
    it requires no gradient. draws: the inputs that are random numbers. outputs: (slot, tensor after
    the call). alone: read only what these outputs depend on. Raises Stop where there is no program.
    """
    # In a call with child calls each output is followed separately.
    results, lost = _outputs(table, children, outputs, not children.calls)
    written, used, fixed, agreeing = _needed(table, children, results, alone=alone)
    inputs = sorted(used.inputs)
    places = {old: new for new, old in enumerate(inputs)}
    numbers = {old: new for new, old in enumerate(written)}
    # Composite operators choose their code path by requires_grad.
    inference, notes = "inference" in table.notes, table.notes - {"inference", "under grad"}
    used_slots = {table.inputs[k] for k in inputs} | used.params
    notes |= {"guard"} if any(o.guard is not None for o in table.operations) else set()
    program, tensors = numbered_anew(
        table,
        written,
        inputs,
        sorted(used.constants),
        results,
        lines,
        inputs=tuple(table.inputs[k] for k in inputs),
        params=tuple(sorted(used.params)),
        base=NAMES[table.base] if table.base is not None else "",
        fixed=tuple(sorted((places[k], axis, n) for k, axis, n in fixed)),
        equal=tuple(
            sorted((places[i], axis, places[k], second) for i, axis, k, second in agreeing)
        ),
        inference=inference,
        grad=tuple(sorted(table.grad & used_slots)) if inference else (),
        notes=tuple(sorted(notes)),
        calls=tuple((k, bisect.bisect_left([*written], place)) for k, place in children.calls),
        same=tuple(pair for pair in children.same_tensors if pair[1] in used_slots),
        lost=lost,
        under_grad="under grad" in table.notes,
        detached=tuple(
            (numbers[place], argument)
            for place, argument in _detached(table, detached)
            if place in numbers
        ),
        draws=tuple(draw for draw in draws if draw.slot in used_slots),
    )
    return msgspec.structs.replace(program, call_lines=tuple(children.lines)), tensors


def numbered_anew(
    table: OperandTable,
    operations: Mapping[int, RecordedOperation],
    places: Sequence[int],
    constants: Sequence[int],
    results: Sequence[tuple[str, Any]],
    lines: Mapping[int, str],
    **fields: Any,
) -> tuple[Program, list[Any]]:
    """The program of some operations of a table, by their number there, and the tensors of its
    constants. places, constants: of the inputs and constants that they read. lines: source line of
    each operation. fields: of the program.
    """
    of_operations, of_places, of_constants = (
        {old: new for new, old in enumerate(indices)} for indices in (operations, places, constants)
    )
    rename = functools.partial(renumbered, of_operations, of_places, of_constants)
    program = Program(
        id="",
        operations=tuple(
            Operation(o.name, tuple(o.args), o.kwargs, o.guard).with_operands(rename)
            for o in operations.values()
        ),
        outputs=tuple((slot, map_operands(rename, operand)) for slot, operand in results),
        input_dtypes=tuple(table.input_dtypes[k] for k in places),
        default_dtype=NAMES[torch.get_default_dtype()],
        **fields,
    )
    tensors = [table.constants[k] for k in constants]
    # The digest excludes source lines: equal code at other lines is the same program.
    named_lines = tuple(lines.get(place, "") for place in operations)
    return msgspec.structs.replace(
        program,
        id=content_digest(program, tensors),
        lines=named_lines if any(named_lines) else (),
    ), tensors


def _outputs(
    table: OperandTable, children: ChildCalls, outputs: Sequence[tuple[str, Any]], whole: bool
) -> tuple[list[tuple[str, Operand]], tuple[tuple[str, str], ...]]:
    """(slot, operand) of the outputs that can be followed; (slot, reason) of the others."""
    in_place = "in-place" in table.notes
    operands = [
        (slot, copy if in_place and "hole" not in operand else operand)
        for slot, operand, copy in children.handed
    ]
    for slot, tensor in outputs:
        if whole:
            table.require_plain(tensor, slot)
        is_operand = layout(tensor) in table.operands
        operand = table.boundary(tensor)
        if whole and "hole" in operand:
            raise Stop(
                operand["hole"] if is_operand else operand["hole"].replace("reads", "returns", 1)
            )
        operands.append((slot, operand))
    lost = tuple((slot, operand["hole"]) for slot, operand in operands if "hole" in operand)
    operands = [(slot, operand) for slot, operand in operands if "hole" not in operand]
    if not operands:
        raise Stop(lost[0][1] if lost else "returns no tensor")
    return operands, lost


def content_digest(program: Program, constants: Sequence[Any]) -> str:
    digest = xxhash.xxh3_128(
        msgspec.json.encode(msgspec.structs.replace(program, lost=()), order="sorted")
    )
    for constant in constants:
        digest.update(f"{constant.dtype}{tuple(constant.shape)}".encode())
        digest.update(canonical(constant).tobytes())
    return digest.hexdigest()


def _detached(table: OperandTable, detached: Mapping[int, Sequence[bool]]) -> list[tuple[int, int]]:
    """(operation, index among its tensor arguments) of each argument that depends on a tensor with
    a gradient but passes none back: it was detached or made without autograd.
    """
    cuts: list[tuple[int, int]] = []
    carry: set[int] = set()
    for place, (_, args, kwargs, *_) in enumerate(table.operations):
        tensors = [o for o in operands([*args, *kwargs.values()]) if o.kind in TENSOR_OPERANDS]
        carries = [_carries(table, carry, *operand) for operand in tensors]
        cut = detached.get(place, ())
        cuts += [(place, k) for k, (c, d) in enumerate(zip(carries, cut)) if c and d]
        if any(c and not (k < len(cut) and cut[k]) for k, c in enumerate(carries)):
            carry.add(place)
    return cuts


def _carries(table: OperandTable, carry: set[int], kind: str, value: Any) -> bool:
    """Whether an operand depends on a tensor with a gradient."""
    if kind == "op":
        return value[0] in carry
    return (
        table.inputs[value] in table.grad
        if kind == "in"
        else kind == "param" and value in table.grad
    )


def _live(table: OperandTable, operands: list[Operand]) -> set[int]:
    """The operations that the outputs depend on, with all guards and what those depend on."""
    keep: set[int] = set()
    todo = [o["op"][0] for o in operands if "op" in o]
    todo += [i for i, op in enumerate(table.operations) if op[3] is not None]
    while todo:
        i = todo.pop()
        if i not in keep:
            keep.add(i)
            used = UsedOperands()
            _, args, kwargs, *_ = table.operations[i]
            used.walk([*args, *kwargs.values()])
            todo += used.operations
    return keep


class UsedOperands:
    """The operations, inputs, parameters and constants that arguments refer to."""

    def __init__(self) -> None:
        self.inputs: set[int] = set()
        self.params: set[str] = set()
        self.constants: set[int] = set()
        self.operations: set[int] = set()

    def walk(self, value: Any) -> None:
        for kind, place in operands(value):
            if kind == "in":
                self.inputs.add(place)
            elif kind == "param":
                self.params.add(place)
            elif kind == "const":
                self.constants.add(place)
            elif kind == "op":
                self.operations.add(place[0])
            elif kind == "dim":
                self.inputs.add(place[0])


def renumbered(
    operations: dict[int, int],
    inputs: dict[int, int],
    constants: dict[int, int],
    kind: str,
    place: Any,
) -> Any:
    """An operand with operations, inputs and constants renumbered as in the program."""
    if kind == "op":
        return {"op": [operations[place[0]], place[1]]}
    if kind == "dim":
        return {"dim": [inputs[place[0]], place[1]]}
    if kind == "in":
        return {"in": inputs[place]}
    if kind == "const":
        return {"const": constants[place]}
    if kind == "mul":
        rename = functools.partial(renumbered, operations, inputs, constants)
        return {"mul": map_operands(rename, place)}
    return {kind: place}


# Arguments that hold sizes: the only places where a number may follow an input's extent.
_SIZE_ARGUMENTS = {
    "size",
    "sizes",
    "shape",
    "start",
    "end",
    "length",
    "split_sizes",
    "split_size",
    "output_size",
    "repeats",
    "self_size",
}


class _ProgramSizes:
    """Expresses sizes by the extents of inputs. calls: (number, operations before it) of the calls
    of other modules.
    """

    def __init__(self, table: OperandTable, calls: Sequence[tuple[int, int]]) -> None:
        self._table, self._calls = table, calls

    @staticmethod
    def takes_sizes(facts: OperatorSchema | None) -> bool:
        return facts is not None and any(n in _SIZE_ARGUMENTS for n in facts.positional)

    def known_at(self, place: int) -> set[int]:
        """Indices of the inputs that exist when the operation at this index runs: not those of
        child calls that come later.
        """
        entered = {k for k, position in self._calls if position <= place}
        return {
            k
            for k, slot in enumerate(self._table.inputs)
            if not is_of_child(slot) or split_child(slot)[0] in entered
        }

    def sized(
        self, facts: OperatorSchema | None, args: Any, kwargs: Any, present: set[int]
    ) -> tuple[Any, Any]:
        if facts is None:
            return args, kwargs

        def one(name: str, value: Any) -> Any:
            return self._follow(value, present) if name in _SIZE_ARGUMENTS else self._scalar(value)

        sized = tuple(one(name, value) for name, value in zip(facts.positional, args))
        return (*sized, *args[len(sized) :]), {
            name: one(name, value) for name, value in kwargs.items()
        }

    def _follow(self, value: Any, present: set[int]) -> Any:
        """A size as the extent of an input known by then, or the product of two extents, where only
        one reading is possible; otherwise the number itself, with those extents fixed.

        Extents that are equal in the recording must be equal on replay (`agreements`), so it does
        not matter which of them is named.
        """
        if isinstance(value, list):
            return [self._follow(item, present) for item in value]
        if type(value) is not int or value < 2 or value >= 1 << 40:
            return value
        places = [
            (k, axis)
            for k, shape in enumerate(self._table.shapes)
            for axis, n in enumerate(shape)
            if n == value
        ]
        pairs = [
            (k, a, b)
            for k, shape in enumerate(self._table.shapes)
            for a, b in itertools.combinations(range(len(shape)), 2)
            if shape[a] * shape[b] == value and shape[a] > 1 < shape[b]
        ]
        if value not in self._table.param_extents:
            early = [(k, axis) for k, axis in places if k in present]
            if early:
                return {"dim": list(early[0])}
            products = [(k, a, b) for k, a, b in pairs if k in present and not places]
            if (
                len(
                    {
                        tuple(sorted((self._table.shapes[k][a], self._table.shapes[k][b])))
                        for k, a, b in products
                    }
                )
                == 1
            ):
                k, a, b = products[0]
                return {"mul": [{"dim": [k, a]}, {"dim": [k, b]}]}
        self._table.fixed.update((k, axis, value) for k, axis in places)
        if not places:
            self._table.fixed.update(
                (k, axis, self._table.shapes[k][axis]) for k, a, b in pairs for axis in (a, b)
            )
        return value

    def agreements(self, among: set[int] | None) -> set[tuple[int, int, int, int]]:
        """(input, axis, input, axis) of extents that are equal in the recording. They must agree on
        replay: code that cuts one input to the length of another runs no operator where the lengths
        already agree.

        among: inputs to consider, None for all.
        """
        first: dict[int, tuple[int, int]] = {}
        equal = set()
        for k, shape in enumerate(self._table.shapes):
            if among is not None and k not in among:
                continue
            for axis, n in enumerate(shape):
                if n > 1 and first.setdefault(n, (k, axis)) != (k, axis):
                    equal.add((*first[n], k, axis))
        return equal

    def _scalar(self, value: Any) -> Any:
        """Returns the number unchanged. An extent equal to it becomes fixed, since the number may
        have been taken from it (`x.sum(1) / x.shape[1]`).
        """
        if type(value) in (int, float) and value >= 3:
            self._table.fixed.update(
                (k, a, n)
                for k, shape in enumerate(self._table.shapes)
                for a, n in enumerate(shape)
                if n == value
            )
        return value

    def fixed_extents(self, sizes: bool) -> set[tuple[int, int, int]]:
        """The extents that a replay must share. sizes: the program contains sizes; an extent of 1
        is then fixed too, since it broadcasts.
        """
        ones = (
            {
                (k, a, 1)
                for k, shape in enumerate(self._table.shapes)
                for a, n in enumerate(shape)
                if n == 1
            }
            if sizes
            else set()
        )
        return self._table.fixed | ones
