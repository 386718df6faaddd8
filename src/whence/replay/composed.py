"""Composes one program for a module call from its operators, where each was recorded as a call of
its own.

Two operators are connected when they share a record. A tensor that was written through a view has a
record that no operator returned; it is looked up among the tensors that share that memory. Wrong
connections show when the program is checked against its own recording, as every program is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from whence import dtypes
from whence.errors import ReplayRefused
from whence.frameworks.operator_names import VIEWS, base_name
from whence.records import Call, Operation, Program, Record
from whence.records.marks import NOT_WRITTEN, OVERWRITTEN, READS_UNWRITTEN, Mark, mark
from whence.records.program import identified, map_operands
from whence.records.slots import is_mutated, is_param, is_read, is_written
from whence.replay.program_parts import ProgramBuilder

COMPOSED = mark(Mark.COMPOSED)
"""The note of a program composed here: the recording does not tell which numbers the Python code
around the operators read.
"""

INNER = "output.inner."
"""Prefix of the slots of tensors that inner operators computed, in addition to the module's own
outputs.
"""

_UNWRITTEN = ("aten.empty", "aten.new_empty")
_STRIDED = "aten.empty_strided.default"


def compose(
    call: Call,
    kids: Sequence[Call],
    programs: Mapping[str, Program],
    records: Sequence[Record],
    unnamed: Collection[int] = (),
) -> Program:
    """Returns the program of a module call.

    kids: the calls directly below it, in execution order. Operators become operations; all others
    remain child calls, numbered from 0. unnamed: records of activations that were not passed to the
    call. Raises ReplayRefused where an operator cannot be run again.
    """
    composer = _Composer(call, records, unnamed)
    number = 0
    for kid in kids:
        if kid.kind == "operator":
            composer.operator(kid, programs.get(kid.program))
        else:
            composer.child(number, kid)
            number += 1
    return composer.program()


class _Composer:
    """The operations connected so far. Operands that share memory belong to one group."""

    def __init__(
        self, call: Call, records: Sequence[Record], unnamed: Collection[int] = ()
    ) -> None:
        self._call, self._records, self._unnamed = call, records, unnamed
        self._builder = ProgramBuilder()
        self._input_records: dict[str, int] = {}
        self._outputs: list[tuple[str, Any]] = []
        self._calls: list[tuple[int, int]] = []
        self._lost: list[tuple[str, str]] = []
        self._base, self._default = "", "float32"
        self._inference = self._under_grad = self._in_place = False
        self._holder_of: dict[int, Any] = {}
        self._group: dict[str, int] = {}
        self._members: dict[int, list[tuple[Any, int]]] = {}
        self._write_time: dict[int, int] = {}  # group -> operations before its last write
        self._learned: dict[int, int] = {}  # record -> operations before it
        for ref in call.refs:
            if is_read(ref.slot):
                self._learn(ref.record, {"slot": ref.slot})

    # ---- which operand holds a record

    def _learn(self, record: int, operand: Any, group: int | None = None) -> None:
        self._holder_of[record] = operand
        self._learned[record] = self._builder.length
        key = repr(operand)
        group = self._group.setdefault(key, len(self._group) if group is None else group)
        self._members.setdefault(group, []).append((operand, record))

    def _find(self, record: int) -> Any:
        """Returns the operand that holds a record; None where no operator of the call
        computed it.
        """
        if (holder := self._holder_of.get(record)) is not None:
            return holder
        sought = self._records[record]
        form = (sought.dtype, sought.shape, sought.stride)
        for group in sorted(self._write_time, key=lambda g: -self._write_time[g]):
            for operand, older in reversed(self._members.get(group, ())):
                candidate = self._records[older]
                if (candidate.dtype, candidate.shape, candidate.stride) == form:
                    self._holder_of[record] = operand
                    return operand
        if sought.why in (OVERWRITTEN, NOT_WRITTEN):
            for older, operand in reversed(self._holder_of.items()):
                candidate = self._records[older]
                if (candidate.dtype, candidate.shape, candidate.stride) == form:
                    return operand
        return None

    def _operand(self, record: int, dtype: str = "") -> Any:
        """Returns the operand of a record in the program. A tensor that no operator of the call
        computed becomes a constant.
        """
        holder = self._find(record)
        if holder is None:
            if record in self._unnamed:
                raise ReplayRefused(
                    "it reads a tensor that an earlier call computed and that it was not given, "
                    "so the target's is not known"
                )
            if self._records[record].elements is None and self._records[record].count:
                raise ReplayRefused(
                    f"it reads a {dtype or self._records[record].dtype} tensor from elsewhere, "
                    "which was not kept"
                )
            return self._builder.constant(record)
        return self._resolved(holder, record)

    def _resolved(self, operand: Any, record: int) -> Any:
        slot = operand.get("slot")
        if slot is None:
            return operand
        if is_param(slot):
            return self._builder.param(slot)
        first = self._input_records.setdefault(slot, record)
        return self._builder.input(slot, self._records[first].dtype)

    # ---- calls

    def operator(self, call: Call, program: Program | None) -> None:
        """Appends an operator. An operator without tensor results (it only returned a number to the
        code) adds nothing.
        """
        refs = call.by_slot
        if not any(is_written(slot) for slot in refs):
            return
        if program is None:
            self._unwritten(call, refs)
            return
        inputs = {slot: self._find_or_constant(refs, slot, call) for slot in program.inputs}
        # What an operator overwrites need not be known to repeat it alone; here it is memory that
        # others look at.
        instead = {
            place["op"][0]: self._operand(refs[f"input.{slot[8:]}"])
            for slot, place in program.outputs
            if is_mutated(slot)
            and "op" in place
            and f"input.{slot[8:]}" in refs
            and program.operations[place["op"][0]].name == _STRIDED
        }
        places: dict[int, int] = {}

        def replaced(kind: str, value: Any) -> Any:
            if kind == "in":
                return inputs[program.inputs[value]]
            if kind == "op":
                return (
                    instead[value[0]]
                    if value[0] in instead
                    else {"op": [places[value[0]], value[1]]}
                )
            if kind in ("dim", "mul", "param", "const"):
                raise ReplayRefused(f"{call.op} has an argument of the kind {kind}")
            return {kind: value}

        for place, operation in enumerate(program.operations):
            if place in instead:
                continue
            places[place] = self._builder.length
            self._builder.append(operation.with_operands(replaced), call.source)
        self._base = self._base or program.base
        self._default, self._inference = program.default_dtype, self._inference or program.inference
        self._under_grad = self._under_grad or program.under_grad
        first = next(iter(inputs.values()), None)
        shared = self._group_of(first) if base_name(call.op) in VIEWS else None
        for slot, place in program.outputs:
            if slot not in refs:
                continue
            operand = map_operands(replaced, place)
            if is_mutated(slot):
                self._in_place = True
                group = self._group.setdefault(repr(self._held(operand)), len(self._group))
                self._write_time[group] = self._builder.length
                self._learn(refs[slot], self._held(operand))
            elif not any(is_mutated(s) and refs.get(s) == refs[slot] for s, _ in program.outputs):
                self._learn(refs[slot], operand, shared)

    def _held(self, operand: Any) -> Any:
        """Returns an operand in the form `_holder_of` stores: inputs and params by slot, which is
        resolved when it is read.
        """
        if "in" in operand:
            return {"slot": self._builder.inputs[operand["in"]]}
        return {"slot": operand["param"]} if "param" in operand else operand

    def _group_of(self, operand: Any) -> int | None:
        return self._group.get(repr(self._held(operand))) if operand is not None else None

    def _find_or_constant(self, refs: Mapping[str, int], slot: str, call: Call) -> Any:
        if slot not in refs:
            raise ReplayRefused(f"{slot} of {call.op} was not captured")
        return self._operand(refs[slot])

    def _unwritten(self, call: Call, refs: Mapping[str, int]) -> None:
        """Adds memory that a later operator fills (such as `aten.empty`), or a view of
        such memory.
        """
        output = refs.get("output.0")
        if base_name(call.op) in VIEWS and call.no_program == READS_UNWRITTEN:
            self._view_of_unwritten(call, self._operand(refs["input.self"]))
            return
        if not call.op.startswith(_UNWRITTEN) or output is None:
            raise ReplayRefused(f"{call.op}: {call.no_program or 'its program was not written'}")
        record = self._records[output]
        self._learn(output, {"op": [self._builder.length, 0]})
        # A replay reads no memory that nothing wrote; what is left of the zeros shows when the
        # program is checked.
        self._builder.append(
            Operation("aten.zeros.default", ([*record.shape],), {"dtype": {"dtype": record.dtype}}),
            call.source,
        )

    def _view_of_unwritten(self, call: Call, operand: Any) -> None:
        group = self._group_of(operand)
        for number, ref in enumerate(call.slots("output")):
            self._learn(ref.record, {"op": [self._builder.length, number]}, group)
        operation = Operation(call.op, (operand,), dict(call.arguments))
        self._builder.append(operation, call.source)

    def child(self, number: int, call: Call) -> None:
        """Adds a child call: its inputs become outputs of this program, and later operators read
        its outputs.
        """
        for ref in call.slots("input"):
            self._hand(f"{number}:{ref.slot}", ref.record)
        self._calls.append((number, self._builder.length))
        for kind in ("output", "mutated"):
            for ref in call.slots(kind):
                self._learn(ref.record, {"slot": f"{number}:{ref.slot}"})

    def _hand(self, slot: str, record: int) -> None:
        holder = self._find(record)
        if holder is None:
            self._lost.append((slot, "made where no operator was recorded"))
        elif slot.startswith(INNER) and self._is_written_since(holder, record):
            self._lost.append((slot, "written over before its module returned"))
        else:
            self._outputs.append((slot, self._operand(record)))

    def _is_written_since(self, operand: Any, record: int) -> bool:
        group = self._group.get(repr(self._held(operand)), -1)
        return self._write_time.get(group, 0) > self._learned.get(record, 0)

    def program(self) -> Program:
        """Returns the finished program."""
        for kind in ("output", "mutated"):
            for ref in self._call.slots(kind):
                self._hand(ref.slot, ref.record)
        if not self._outputs:
            raise ReplayRefused(
                self._lost[0][1] if self._lost else "its operators make nothing that it returns"
            )
        read = [self._records[record] for record in self._input_records.values()]
        floating = (
            r.dtype for r in read if r.dtype in dtypes.DTYPES and dtypes.is_floating(r.dtype)
        )
        program = identified(
            msgspec.structs.replace(
                self._builder.program(self._outputs, self._calls),
                base=next(floating, self._base),
                default_dtype=self._default,
                fixed=tuple(
                    (k, axis, n)
                    for k, record in enumerate(read)
                    for axis, n in enumerate(record.shape)
                ),
                inference=self._inference,
                notes=(COMPOSED, *(("in-place",) if self._in_place else ())),
                lost=tuple(self._lost),
                under_grad=self._under_grad,
            )
        )
        return msgspec.structs.replace(program, id=f"composed {program.id}")
