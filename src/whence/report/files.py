"""A Comparison as JSON and CSV. Everything is written from the Comparison; nothing is computed."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence.report import column_text
from whence.report.column_text import extents, line
from whence.report.tables import cell
from whence.results import Comparison, Measured, Row
from whence.results.columns import PairColumns, RowColumns, VerdictColumns
from whence.results.sequence import MadeOnDemand

T = TypeVar("T")
_FIXED = (
    "verdict",
    "name",
    "op_type",
    "step",
    "rank",
    "occurrence",
    "reference_slot",
    "target_slot",
    "reference_dtype",
    "target_dtype",
    "reference_shape",
    "target_shape",
    "rule",
    "identical",
    "tier",
    "why",
)


def everything_json(result: Comparison) -> Iterator[bytes]:
    """`report.json` in parts: the whole Comparison; `load_comparison` reads it back. Infinite
    figures become null.
    """
    for place, name in enumerate(Comparison.__struct_fields__):
        yield f'{"," if place else "{"}"{name}":'.encode()
        value = getattr(result, name)
        if name in ("rows", "verdicts"):
            yield from _array_json(value)
        elif name == "plan":
            yield b'{"pairs":'
            yield from _array_json(value.pairs)
            yield msgspec.json.encode(msgspec.structs.replace(value, pairs=()))[_NO_PAIRS:]
        else:
            yield msgspec.json.encode(value)
    yield b"}\n"


_NO_PAIRS = len('{"pairs":[]')
_BATCH = 4096  # items that are written at once


def _array_json(items: Sequence[Any]) -> Iterator[bytes]:
    for place, part in enumerate(_parts(items)):
        yield (b"," if place else b"[") + _items_json(part)
    yield b"]" if items else b"[]"


def _items_json(part: Iterable[Any]) -> bytes:
    if isinstance(part, RowColumns):
        return column_text.rows_json(part).encode()
    if isinstance(part, PairColumns):
        return column_text.pairs_json(part).encode()
    if isinstance(part, VerdictColumns):
        return column_text.verdicts_json(part).encode()
    return msgspec.json.encode(list(part))[1:-1]


def _parts(items: Sequence[T]) -> Iterator[Iterable[T]]:
    """The items, some at a time, as columns where they are made as these."""
    if isinstance(items, MadeOnDemand):
        yield from items.parts()
        return
    left = iter(items)
    while batch := list(islice(left, _BATCH)):
        yield batch


def table_csv(result: Comparison) -> Iterator[str]:
    """`report.csv` in parts: one line per pair of records; a cell holds a number, or is empty where
    there is none (`why` says why).
    """
    examples = result.rows.examples if isinstance(result.rows, MadeOnDemand) else None
    rows = result.rows if examples is None else examples
    metrics: dict[str, object] = {}
    for row in rows:
        if not row.measured.values.keys() <= metrics.keys():
            metrics |= row.measured.values
    yield line((*_FIXED, *metrics, "max_abs_index"))
    figures = tuple(metrics)
    for part in _parts(result.rows):
        if isinstance(part, RowColumns):
            (end,) = _ends([part.like.measured], figures)
            others = map(line, _cells(list(part.others.values()), figures))
            of_others = dict(zip(part.others, others, strict=True))
            yield column_text.rows_csv(part, line(end), of_others)
        else:
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows(_cells(list(part), figures))
            yield out.getvalue()


def _cells(rows: Sequence[Row], metrics: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The cells of each row."""
    # what was measured of equal pairs is one object
    measured = {id(row.measured): row.measured for row in rows}
    ends = dict(zip(measured, _ends(list(measured.values()), metrics), strict=True))
    starts = zip(*_names(rows), strict=True)
    return (start + ends[id(row.measured)] for start, row in zip(starts, rows, strict=True))


def _names(rows: Sequence[Row]) -> Iterator[list[Any]]:
    """The columns before what was measured."""
    yield [row.verdict for row in rows]
    yield _each(cell, [row.name for row in rows])
    yield _each(cell, [row.op_type for row in rows])
    yield [row.step for row in rows]
    yield [row.rank for row in rows]
    yield [row.occurrence for row in rows]
    yield _each(cell, [row.reference_slot for row in rows])
    yield _each(cell, [row.target_slot for row in rows])
    yield [row.reference_dtype for row in rows]
    yield [row.target_dtype for row in rows]
    yield _each(extents, [row.reference_shape for row in rows])
    yield _each(extents, [row.target_shape for row in rows])
    yield [row.rule for row in rows]


def _ends(measured: Sequence[Measured], metrics: Sequence[str]) -> list[tuple[str, ...]]:
    """The columns of what was measured, row by row."""
    columns = (
        ["yes" if m.identical else "no" for m in measured],
        [m.tier for m in measured],
        [cell(m.why or "; ".join(f"{k}: {v}" for k, v in m.whys.items())) for m in measured],
        *(_figures([m.values.get(metric) for m in measured]) for metric in metrics),
        [extents(m.max_abs_index or ()) for m in measured],
    )
    return list(zip(*columns, strict=True))


def _each(make: Callable[[Any], str], values: Sequence[Hashable]) -> list[str]:
    """A column of texts. Names and shapes repeat from step to step; each is made once."""
    known = {value: make(value) for value in set(values)}
    return [known[value] for value in values]


def _figures(values: Sequence[float | None]) -> list[str]:
    """A column of figures: whole numbers without a point, nothing where there is none."""
    cells = ["" if value is None else repr(value) for value in values]
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    is_whole = (numbers == np.trunc(numbers)) & (np.abs(numbers) < _MOST_WHOLE)
    for place in np.flatnonzero(is_whole).tolist():
        cells[place] = repr(int(numbers[place]))
    return cells


_MOST_WHOLE = 1e15
