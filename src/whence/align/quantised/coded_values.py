"""The tensors of a run that are codes: with which scale and zero point they were made, and with
which they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.quantised.operands import (
    DEQUANTIZE,
    KEEPS,
    QUANTIZE,
    Form,
    form_of,
    operands,
    plain_type,
    triples,
)
from whence.records import Call, Ref, Run
from whence.records.quantised import Grid, Reread
from whence.records.slots import is_param

_TO_LAST, _TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_INTEGERS = ("int", "uint")


class CodedOperand(NamedTuple):
    """Codes that a call reads. place: of the operand."""

    place: int
    ref: Ref
    grid: Grid


class CodedValues:
    """What of a run is codes.

    grids: by record of codes. last: records that lie with their channels at the end. numbers: by
    record that a node made of codes alone, those codes. rereads: by call, codes that it reads
    otherwise than they were made.
    """

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self.run = run
        self.grids: dict[int, Grid] = {}
        self.last: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.rereads: dict[int, list[Reread]] = {}
        self._makers = {ref.record: call for call in calls for ref in call.slots("output")}
        self._turned = _turned_for_kernels(calls)
        for call in calls:
            self._look(call)

    def operands(self, call: Call) -> list[CodedOperand]:
        """The codes that a call reads, biases of sums too."""
        form = form_of(call)
        if form is None:
            return []
        reads = operands(call)
        coded = []
        for triple, axis in triples(call, form):
            ref, scale, zero = (reads.get(k) for k in triple[:3])
            if ref is not None and scale is not None and self._are_codes(ref.record):
                grid = self._grid(ref.record, (scale.record,), zero, axis)
                coded.append(CodedOperand(triple.codes, ref, grid))
        bias = reads.get(form.bias)
        if bias is not None and len(coded) == 2 and self._are_codes(bias.record):
            scale_records = tuple(s for operand in coded for s in operand.grid.scale)
            grid = Grid(self.run.records[bias.record].dtype, scale_records)
            coded.append(CodedOperand(form.bias, bias, grid))
        return coded

    def _look(self, call: Call) -> None:
        form = form_of(call)
        made = call.slots("output")
        is_last = _is_channels_last(call)
        if form is not None:
            for operand in self.operands(call):
                self._read(call, operand)
            self._made(call, form)
        elif plain_type(call) in KEEPS and call.slots("input"):
            source = call.slots("input")[0].record
            if source in self.grids:
                for ref in made:
                    if self.run.records[ref.record].dtype == self.grids[source].dtype:
                        self.grids[ref.record] = self.grids[source]
        perm = call.arguments.get("perm")
        sources = [ref.record for ref in call.slots("input")]
        comes_last = any(record in self.last for record in sources)
        if plain_type(call) == "Transpose" and perm in (_TO_LAST, _TO_FIRST):
            comes_last = perm == _TO_LAST and call.id in self._turned
        if is_last or (comes_last and plain_type(call) != "Reshape"):
            self.last.update(r.record for r in made if len(self.run.records[r.record].shape) == 4)

    def _read(self, call: Call, operand: CodedOperand) -> None:
        record, grid = operand.ref.record, operand.grid
        if is_param(operand.ref.slot):
            self.grids.setdefault(record, grid)
        elif record not in self.grids:
            self.grids[record] = grid
        elif not self._are_equal(self.grids[record], grid):
            made = self._makers.get(record)
            name = made.scope if made is not None else operand.ref.slot
            reread = Reread(name, self.grids[record], grid)
            self.rereads.setdefault(call.id, []).append(reread)
        if call.op_type in DEQUANTIZE:
            self.numbers[call.slots("output")[0].record] = record

    def _made(self, call: Call, form: Form) -> None:
        if form.makes is None:
            return
        reads = operands(call)
        scale, zero = (reads.get(k) for k in form.makes)
        if scale is None:
            return
        axis = int(call.arguments.get("axis", 1)) if call.op_type in QUANTIZE else 0
        for ref in call.slots("output"):
            self.grids[ref.record] = self._grid(ref.record, (scale.record,), zero, axis)

    def _grid(self, record: int, scale: tuple[int, ...], zero: Ref | None, axis: int) -> Grid:
        dtype = self.run.records[record].dtype
        return Grid(dtype, scale, zero.record if zero is not None else -1, axis)

    def _are_codes(self, record: int) -> bool:
        dtype = self.run.records[record].dtype
        return dtype in dtypes.DTYPES and dtypes.named(dtype).kind in _INTEGERS

    def _are_equal(self, one: Grid, two: Grid) -> bool:
        if one.dtype != two.dtype:
            return False
        if (one.scale, one.zero) == (two.scale, two.zero):
            return True
        try:
            a, b = (grid.steps(self.run.array, 0) for grid in (one, two))
        except ValueError:  # scales along an axis: of weights, which are read once
            return True
        return bool(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]))

    def placed(self, record: int) -> Grid | None:
        """The grid of a record of codes, or of what was made of codes alone."""
        grid = self.grids.get(self.numbers.get(record, record))
        if grid is None or record not in self.last:
            return grid
        return replace(grid, channels_last=True)


def _is_channels_last(call: Call) -> bool:
    return bool(call.arguments.get("channels_last")) or "nhwc" in call.op_type


def _turned_for_kernels(calls: Sequence[Call]) -> set[int]:
    """Calls that put channels at the end for kernels that want them there, which a pass of the
    runtime added: such a kernel reads what they make, before it is turned back.
    """
    readers: dict[int, list[Call]] = {}
    for call in calls:
        for ref in call.slots("input"):
            readers.setdefault(ref.record, []).append(call)
    turned = set[int]()
    for call in calls:
        if plain_type(call) != "Transpose" or call.arguments.get("perm") != _TO_LAST:
            continue
        waiting, seen = [call], {call.id}
        while waiting:
            for reader in (
                r for ref in waiting.pop().slots("output") for r in readers.get(ref.record, ())
            ):
                if _is_channels_last(reader):
                    turned.add(call.id)
                elif reader.id not in seen and plain_type(reader) != "Transpose":
                    seen.add(reader.id)
                    waiting.append(reader)
            if call.id in turned:
                break
    return turned
