"""One step of a run as a graph of values: which call makes a value, and what it is made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from whence import dtypes
from whence.align.calls.input_order import MOVES
from whence.records import Call, Record, Ref, Run
from whence.records.slots import is_output, is_param

_KINDS = {
    "Gemm": "MatMul",
    "com.microsoft.FusedMatMul": "MatMul",
    "com.microsoft.FusedGemm": "MatMul",
    "com.microsoft.FusedConv": "Conv",
    "com.microsoft.nchwc.Conv": "Conv",
}
"""Operators of several names. The others are known by their own."""


class ValueGraph:
    """The values of one call of a model: tensors that an operator made, not those that it only
    moved.

    root: the model's call. calls: its operators, in order. values: records in the order in which
    they were made. makers: by record, also of those that were moved.
    """

    def __init__(self, run: Run, root: Call, calls: Sequence[Call]) -> None:
        self.run, self.root, self.calls = run, root, calls
        self.makers = {
            ref.record: call for call in calls for ref in call.refs if is_output(ref.slot)
        }
        self._parameters = {
            ref.record for call in run.calls for ref in call.refs if is_param(ref.slot)
        }
        ends = {ref.record for ref in root.slots("output")}
        self.values = [
            ref.record
            for call in calls
            for ref in call.slots("output")
            if ref.record in ends or not _moves(call)
        ]
        self._is_value = set(self.values)

    def record(self, value: int) -> Record:
        return self.run.records[value]

    def is_floating(self, value: int) -> bool:
        return dtypes.is_floating(self.record(value).dtype)

    def source(self, record: int) -> int:
        """The value whose elements a record holds."""
        while record not in self._is_value and record in self.makers:
            inputs = self.makers[record].slots("input")
            if not inputs:
                break
            record = inputs[0].record
        return record

    def inputs(self, call: Call) -> list[Ref]:
        """What a call reads, without parameters."""
        return [ref for ref in call.slots("input") if ref.record not in self._parameters]

    def parameters(self, call: Call) -> list[Record]:
        """The parameters of a call that hold more than one number."""
        read = (r for r in call.refs if r.record in self._parameters and not is_output(r.slot))
        records = (self.record(ref.record) for ref in read)
        return [record for record in records if record.count > 1]

    def behind(self, values: Sequence[int], stops: Collection[int]) -> tuple[list[Call], list[int]]:
        """(the calls that make values of others, in order; these others: `stops`, and what no call
        made).
        """
        found: dict[int, Call] = {}
        ends: dict[int, None] = {}
        waiting = [(value, True) for value in reversed(values)]
        while waiting:
            record, is_first = waiting.pop()
            maker = self.makers.get(record)
            if maker is None or (record in stops and not is_first):
                if record not in self._parameters:
                    ends[record] = None
            elif maker.id not in found:
                found[maker.id] = maker
                waiting += [(ref.record, False) for ref in reversed(maker.slots("input"))]
        return sorted(found.values(), key=lambda call: call.order), list(ends)


def _moves(call: Call) -> bool:
    return call.op_type in MOVES


def kind_of(call: Call) -> str:
    """What an operator computes, apart from what was fused into it."""
    return _KINDS.get(call.op_type, call.op_type)
