"""The program of a joined call: the programs of its members, chained through the tensors that they
pass on.

A fused call computes what its members compute one after the other, so the members are replayed as
one function of what they read together. Their extents are those of the recording: a joined program
serves only these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from msgspec.structs import replace

from whence import dtypes
from whence.errors import ReplayRefused
from whence.records import Call, Operation, Program, Ref, Run
from whence.records.program import identified, map_operands
from whence.records.slots import is_of_child, is_param, is_written


def _the_record(_: Run, record: int) -> Hashable:
    return record


def with_joined_program(
    run: Run,
    whole: Call,
    members: Sequence[Call],
    refs: Sequence[Ref],
    content: Callable[[Run, int], Hashable] = _the_record,
) -> tuple[Call, Program | None]:
    """(joined call, program chained from its members). The program is None, and the call states the
    reason, if a member cannot be replayed or reads a tensor that is neither an input of the joined
    call nor an output of an earlier member.

    members: in an order in which each follows those whose tensors it reads. refs: inputs and
    outputs of the program. content: (run, record) -> a key that is equal for equal content.
    """
    try:
        chain = _Chain(run, refs, content)
        for member in members:
            chain.append(member)
        program = chain.program()
    except ReplayRefused as refused:
        return replace(whole, program="", no_program=str(refused)), None
    return replace(whole, program=program.id, no_program=""), program


class _Chain:
    """The operations of the members so far. Tensors are known by their content."""

    def __init__(
        self, run: Run, refs: Sequence[Ref], content: Callable[[Run, int], Hashable]
    ) -> None:
        self._run, self._refs = run, refs
        self._content = content
        self._operations: list[Operation] = []
        self._inputs: list[Ref] = []
        self._params: list[str] = []
        self._constants: list[int] = []
        self._operands: dict[Hashable, Any] = {}
        self._programs: list[Program] = []
        self._outer = {self._key(r.record): r for r in reversed(refs) if not is_written(r.slot)}

    def _key(self, record: int) -> Hashable:
        return self._content(self._run, record)

    def append(self, member: Call) -> None:
        """Append a member's operations to the chain. Raises ReplayRefused."""
        program = self._run.programs.get(member.program)
        if program is None:
            reason = member.no_program or "its program was not written"
            raise ReplayRefused(f"{member.scope or member.op_type}: {reason}")
        if program.calls or any(is_of_child(slot) for slot in program.inputs):
            raise ReplayRefused(f"{member.scope}: it calls others between its operators")
        records = member.by_slot
        lost = next((s for s in (*program.inputs, *program.params) if s not in records), "")
        if lost:
            raise ReplayRefused(f"{member.scope}: {lost} was not captured")
        shapes = [self._run.records[records[slot]].shape for slot in program.inputs]
        first = len(self._operations)

        def chained(kind: str, value: Any) -> Any:
            if kind == "in":
                return self._operand(records[program.inputs[value]])
            if kind == "param":
                return self._operand(records[value])
            if kind == "const":
                return self._constant(program.constants[value])
            if kind == "op":
                return {"op": [first + value[0], value[1]]}
            if kind == "dim":
                return shapes[value[0]][value[1]]
            if kind == "mul":
                return math.prod(map_operands(chained, value))
            return {kind: value}

        self._operations += [operation.with_operands(chained) for operation in program.operations]
        for slot, operand in program.outputs:
            if slot in records:
                self._operands.setdefault(self._key(records[slot]), map_operands(chained, operand))
        self._programs.append(program)

    def _operand(self, record: int) -> Any:
        """What holds a record in the chain: a member before this one, else the joined call."""
        key = self._key(record)
        if key in self._operands:
            return self._operands[key]
        ref = self._outer.get(key)
        if ref is None:
            raise ReplayRefused(f"record {record} is neither given nor made inside")
        if is_param(ref.slot):
            if ref.slot not in self._params:
                self._params.append(ref.slot)
            operand: Any = {"param": ref.slot}
        else:
            self._inputs.append(ref)
            operand = {"in": len(self._inputs) - 1}
        self._operands[key] = operand
        return operand

    def _constant(self, record: int) -> Any:
        if record not in self._constants:
            self._constants.append(record)
        return {"const": self._constants.index(record)}

    def program(self) -> Program:
        """The whole chain, with the outputs of the joined call that it makes."""
        outputs = [
            (ref.slot, self._operands[key])
            for ref in self._refs
            if is_written(ref.slot) and (key := self._key(ref.record)) in self._operands
        ]
        if not outputs:
            raise ReplayRefused("none of its outputs is made by a program")
        records = [self._run.records[ref.record] for ref in self._inputs]
        floating = (r.dtype for r in records if dtypes.is_floating(r.dtype))
        base = next(floating, next((p.base for p in self._programs if p.base), ""))
        program = Program(
            id="",
            operations=tuple(self._operations),
            inputs=tuple(ref.slot for ref in self._inputs),
            outputs=tuple(outputs),
            params=tuple(self._params),
            constants=tuple(self._constants),
            base=base,
            input_dtypes=tuple(r.dtype for r in records),
            default_dtype=self._programs[0].default_dtype,
            fixed=tuple(
                (k, axis, extent)
                for k, record in enumerate(records)
                for axis, extent in enumerate(record.shape)
            ),
            inference=any(p.inference for p in self._programs),
            under_grad=any(p.under_grad for p in self._programs),
            notes=tuple(dict.fromkeys(note for p in self._programs for note in p.notes)),
        )
        return identified(program)
