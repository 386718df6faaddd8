"""One record in full: where it was seen, statistics, corner values, histogram."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Run, Statistics
from whence.report import tables
from whence.report.run.choice import Choice, find, name_of
from whence.report.run.elements import elements_place, kind_of_record
from whence.report.run.heading import assigned, titled

EDGE = 3
BINS = 16
BAR = 40
CHUNK = 1 << 22


def one(run: Run, name: str, choice: Choice) -> Iterator[str]:
    """One record in full: where it was seen, statistics, corner values, histogram. Raises
    UsageError as `find` does.
    """
    call, ref = find(run, name, choice)
    record = run.records[ref.record]
    where = f"step {call.step}, rank {call.rank}, call {tables.clean(call.number)}"
    yield (
        f"{tables.clean(name_of(call))}:{tables.clean(ref.slot)}   "
        f"{tables.clean(call.op_type)}   {where}"
    )
    layout = f"stride {tables.shape(record.stride)}, offset {record.storage_offset}"
    refused = f"cannot be replayed: {call.no_program}" if call.no_program else ""
    columns = (f"{key} {tables.number(value)}" for key, value in record.columns.items())
    rows = [
        ("record", f"#{record.id}  {kind_of_record(record)}  on {record.device}"),
        ("layout", layout if record.stride else ""),
        ("class", record.subclass),
        ("elements", elements_place(record)),
        ("hash", record.hash),
        *titled("seen as", _occurrences(run, ref.record)),
        ("slots", ", ".join(r.slot for r in call.refs)),
        ("arguments", assigned(call.arguments)),
        ("source", call.source),
        ("program", call.program or refused),
        ("columns", ", ".join(columns)),
        *titled("statistics", _statistics(record.statistics)),
    ]
    rows = [(title, text) for title, text in rows if text]
    yield from tables.columns([("", title, tables.clean(text)) for title, text in rows])
    try:
        array = run.array(record.id)
    except ElementsMissing as err:
        yield f"  no values: {tables.clean(err)}"
        return
    yield ""
    yield from corners(array)
    yield ""
    yield from histogram(array)


def corners(array: Array) -> Iterator[str]:
    """The first and last values along the last two axes, at the first and at the last place of the
    axes before them.
    """
    if array.size == 0:
        yield f"  values: none, shape {tables.shape(array.shape)}"
        return
    places = [(0,) * (array.ndim - 2)] if array.ndim > 2 else [()]
    if array.ndim > 2 and any(extent > 1 for extent in array.shape[:-2]):
        places.append(tuple(extent - 1 for extent in array.shape[:-2]))
    for place in places:
        block = array[place] if place else array
        position = ", ".join([*(str(i) for i in place), *(":" for _ in range(block.ndim))])
        yield f"  values at [{position}]" if array.ndim else "  value"
        rows, gap_row = _ends(block.shape[0]) if block.ndim == 2 else ([0], -1)
        columns, gap_column = _ends(block.shape[-1]) if block.ndim else ([0], -1)
        lines = []
        for row in rows:
            if row == gap_row:
                lines.append(["", "..."])
            line = []
            for column in columns:
                if column == gap_column:
                    line.append("...")
                value = (
                    block[(row, column)]
                    if block.ndim == 2
                    else block[column]
                    if block.ndim
                    else block[()]
                )
                line.append(_value(value))
            lines.append(["", *line])
        yield from tables.columns(lines, right=range(1, 2 * EDGE + 3))


def histogram(array: Array) -> Iterator[str]:
    """How many finite elements (|z| for complex) fall into each of 16 equal intervals; NaN and Inf
    on lines of their own.
    """
    low, high, nan, inf = math.inf, -math.inf, 0, 0
    for part in _parts(array):
        finite = part[np.isfinite(part)]
        nan += int(np.isnan(part).sum())
        inf += int(np.isinf(part).sum())
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        yield "  histogram: no finite element"
    else:
        # numpy refuses a range of zero width, and one whose width overflows; halves keep the latter
        # apart.
        edges = np.linspace(low / 2, high / 2, BINS + 1) * 2 if high > low else np.array([low, low])
        totals = np.zeros(len(edges) - 1, np.int64)
        for part in _parts(array):
            finite = part[np.isfinite(part)]
            places = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, len(totals) - 1)
            totals += np.bincount(places, minlength=len(totals))
        largest = int(totals.max())
        yield "  histogram"
        rows = []
        for start, end, total in zip(edges[:-1], edges[1:], totals):
            bar = "#" * max(int(total > 0), round(BAR * int(total) / largest))
            rows.append(
                (
                    " ",
                    tables.number(float(start)),
                    "..",
                    tables.number(float(end)),
                    tables.count(int(total)),
                    bar,
                )
            )
        yield from tables.columns(rows, right=(1, 3, 4), gap=" ")
    if nan or inf:
        yield f"  NaN {tables.count(nan)}, Inf {tables.count(inf)}"


def _ends(extent: int) -> tuple[list[int], int]:
    # Positions shown along one axis, and the one before which "..." stands (-1: all are shown).
    if extent <= 2 * EDGE:
        return list(range(extent)), -1
    return [*range(EDGE), *range(extent - EDGE, extent)], extent - EDGE


def _value(value: Any) -> str:
    scalar = np.asarray(value)
    if scalar.dtype.kind == "c":
        z = complex(scalar)
        return f"{z.real:.6g}{z.imag:+.6g}j"
    if scalar.dtype.kind in "iub":
        return str(scalar[()])
    return f"{float(scalar):.6g}"


def _parts(array: Array) -> Iterator[Any]:
    # float64 pieces of bounded size, whatever the size and layout of the array.
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        wide = dtypes.widen(flat[start : start + CHUNK])
        yield np.abs(wide) if wide.dtype.kind == "c" else wide.astype(np.float64)


def _occurrences(run: Run, record: int) -> Iterator[str]:
    uses = [(call, ref) for call in run.calls for ref in call.refs if ref.record == record]
    for call, ref in uses[:8]:
        yield f"{ref.slot} of {name_of(call)} (call {call.number}, step {call.step})" + (
            f", the same tensor by {ref.edge}" if ref.edge else ""
        )
    if len(uses) > 8:
        yield f"... {tables.count(len(uses) - 8)} more"


def _statistics(s: Statistics | None) -> Iterator[str]:
    if s is None:
        yield "none"
        return
    pairs = (("min", s.min), ("max", s.max), ("mean", s.mean), ("std", s.std), ("norm", s.norm))
    yield "  ".join(f"{label} {tables.number(value)}" for label, value in pairs)
    yield (
        f"{tables.count(s.count, 'element')}: NaN {tables.count(s.nan)}, Inf "
        f"{tables.count(s.inf)}, zero {tables.count(s.zero)}"
    )
