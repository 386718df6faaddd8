"""A Comparison as JSON and CSV. Everything is written from the Comparison; nothing is computed.

Rows, pairs and verdicts that are stored as columns are written column by column. Repeated values
are encoded once; the text is the same as if each item were encoded alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence.report.tables import cell, csv_text
from whence.results import Comparison, LayerCost, Measured, Row
from whence.results.columns import PairColumns, RowColumns, VerdictColumns
from whence.results.sequence import MadeOnDemand

T = TypeVar("T")


def everything_json(result: Comparison) -> Iterator[bytes]:
    """`report.json` in parts: the whole Comparison, which `load_comparison` reads back. Infinite
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
_BATCH = 4096  # items that are written in one go


def _array_json(items: Sequence[Any]) -> Iterator[bytes]:
    for place, part in enumerate(_parts(items)):
        yield (b"," if place else b"[") + _items_json(part)
    yield b"]" if items else b"[]"


def _items_json(part: Iterable[Any]) -> bytes:
    if isinstance(part, RowColumns):
        return _rows_json(part).encode()
    if isinstance(part, PairColumns):
        return _pairs_json(part).encode()
    if isinstance(part, VerdictColumns):
        return _verdicts_json(part).encode()
    return msgspec.json.encode(list(part))[1:-1]


def _parts(items: Sequence[T]) -> Iterator[Iterable[T]]:
    """Yields the items in batches, as columns where they are stored as columns."""
    if isinstance(items, MadeOnDemand):
        yield from items.parts()
        return
    left = iter(items)
    while batch := list(islice(left, _BATCH)):
        yield batch


def layers_csv(result: Comparison) -> str:
    """`layers.csv`: a line for each quantised layer, with the fields of `LayerCost`."""
    fields = LayerCost.__struct_fields__
    rows = ((getattr(cost, name) for name in fields) for cost in result.layer_costs)
    return csv_text([fields, *(["" if v is None else str(v) for v in row] for row in rows)])


def table_csv(result: Comparison) -> Iterator[str]:
    """`report.csv` in parts: one line per pair of records. A cell holds a number, or is empty where
    there is none (`why` gives the reason).
    """
    examples = result.rows.examples if isinstance(result.rows, MadeOnDemand) else None
    rows = result.rows if examples is None else examples
    metrics: dict[str, object] = {}
    for row in rows:
        if not row.measured.values.keys() <= metrics.keys():
            metrics |= row.measured.values
    yield csv_line((*_NAMES, "identical", "tier", "why", *metrics, "max_abs_index"))
    figures = tuple(metrics)
    for part in _parts(result.rows):
        if isinstance(part, RowColumns):
            (end,) = _ends([part.like.measured], figures)
            others = map(csv_line, _cells(list(part.others.values()), figures))
            of_others = dict(zip(part.others, others, strict=True))
            yield _rows_csv(part, csv_line(end), of_others)
        else:
            yield csv_text(_cells(list(part), figures))


def _cells(rows: Sequence[Row], metrics: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields the cells of each row."""
    # equal pairs share one object with their figures
    measured = {id(row.measured): row.measured for row in rows}
    ends = dict(zip(measured, _ends(list(measured.values()), metrics), strict=True))
    columns = ([getattr(row, name) for row in rows] for name in _NAMES)
    starts = zip(
        *(_each(make, cells) for make, cells in zip(_NAMES.values(), columns, strict=True)),
        strict=True,
    )
    return (start + ends[id(row.measured)] for start, row in zip(starts, rows, strict=True))


def _ends(measured: Sequence[Measured], metrics: Sequence[str]) -> list[tuple[str, ...]]:
    """The columns of figures, row by row."""
    columns = (
        ["yes" if m.identical else "no" for m in measured],
        [m.tier for m in measured],
        [cell(m.why or "; ".join(f"{k}: {v}" for k, v in m.whys.items())) for m in measured],
        *(_figures([m.values.get(metric) for m in measured]) for metric in metrics),
        [_extents(m.max_abs_index or ()) for m in measured],
    )
    return list(zip(*columns, strict=True))


def _each(make: Callable[[Any], object], values: Sequence[Hashable]) -> list[object]:
    """A column of cells. Names and shapes repeat from step to step; each distinct value is
    formatted once.
    """
    known = {value: make(value) for value in set(values)}
    return [known[value] for value in values]


def _figures(values: Sequence[float | None]) -> list[str]:
    """A column of figures: whole numbers without a decimal point, empty where there is none."""
    cells = ["" if value is None else repr(value) for value in values]
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    is_whole = (numbers == np.trunc(numbers)) & (np.abs(numbers) < _MOST_WHOLE)
    for place in np.flatnonzero(is_whole).tolist():
        cells[place] = repr(int(numbers[place]))
    return cells


_MOST_WHOLE = 1e15

K = TypeVar("K", bound=Hashable)
_MARK = 10**15  # a number that does not occur in rows, pairs or verdicts stored as columns


def _rows_json(rows: RowColumns) -> str:
    """The rows as items of a JSON array."""
    fields = (
        *("pair", "name", "op_type", "step", "rank", "occurrence"),
        *("reference_slot", "target_slot", "reference_record", "target_record"),
        *("reference_dtype", "target_dtype", "reference_shape", "target_shape"),
    )
    cut = _around(rows.like, fields)
    names = _text_of_each(_json, itertools.chain.from_iterable(call[1:3] for call in rows.calls))
    heads = [
        f"{cut[0]}{pair}{cut[1]}{names[name]}{cut[2]}{names[kind]}{cut[3]}{step}{cut[4]}{rank}"
        f"{cut[5]}{occurrence}{cut[6]}"
        for pair, name, kind, step, rank, occurrence in rows.calls
    ]
    slots = _text_of_each(lambda slot: f"{_json(slot)}{cut[7]}{_json(slot)}{cut[8]}", rows.slot)
    between = cut[9]
    forms = [
        f"{cut[10]}{_json(dtype)}{cut[11]}{_json(dtype)}{cut[12]}{_json(shape)}{cut[13]}"
        f"{_json(shape)}{cut[14]}"
        for dtype, shape in rows.forms
    ]
    texts = [
        f"{heads[call]}{slots[slot]}{record}{between}{record}{forms[form]}"
        for call, slot, record, form in zip(
            rows.call, rows.slot, rows.record, rows.form, strict=True
        )
    ]
    for place, row in rows.others.items():
        texts[place] = _json(row)
    return ",".join(texts)


def _rows_csv(rows: RowColumns, end: str, others: Mapping[int, str]) -> str:
    """The rows as lines of a table. end: the end of the lines of equal tensors, after the column
    `rule`. others: by position, the lines of all other rows.
    """
    kinds = _text_of_each(
        lambda names: _line_start((rows.like.verdict, cell(names[0]), cell(names[1]))),
        (call[1:3] for call in rows.calls),
    )
    heads = [
        f"{kinds[name, kind]}{step},{rank},{occurrence},"
        for _, name, kind, step, rank, occurrence in rows.calls
    ]
    slots = _text_of_each(lambda slot: _line_start((cell(slot),) * 2), rows.slot)
    ends = [
        _line_start((dtype, dtype, _extents(shape), _extents(shape), rows.like.rule)) + end
        for dtype, shape in rows.forms
    ]
    texts = [
        f"{heads[call]}{slots[slot]}{ends[form]}"
        for call, slot, form in zip(rows.call, rows.slot, rows.form, strict=True)
    ]
    for place, text in others.items():
        texts[place] = text
    return "".join(texts)


def _pairs_json(pairs: PairColumns) -> str:
    """The pairs as items of a JSON array."""
    cut = _around(pairs.like, ("reference", "target", "slots"))
    slots = _text_of_each(lambda slot: f"[{_json(slot)},{_json(slot)},", pairs.slot)
    paired = [
        f'{slots[slot]}{record},{record},""]'
        for slot, record in zip(pairs.slot, pairs.record, strict=True)
    ]
    texts, at = [], 0
    for call, count in zip(pairs.calls, pairs.counts, strict=True):
        of_call = ",".join(paired[at : at + count])
        texts.append(f"{cut[0]}{call}{cut[1]}{call}{cut[2]}[{of_call}]{cut[3]}")
        at += count
    return ",".join(texts)


def _verdicts_json(verdicts: VerdictColumns) -> str:
    """The verdicts as items of a JSON array."""
    whole, part = (
        _around(verdicts.whole, ("pair",)),
        _around(verdicts.part, ("pair", "stretch")),
    )
    texts = [
        f"{whole[0]}{pair}{whole[1]}"
        if stretch < 0
        else f"{part[0]}{pair}{part[1]}{stretch}{part[2]}"
        for pair, stretch in zip(verdicts.pair, verdicts.stretch, strict=True)
    ]
    for place, verdict in verdicts.others.items():
        texts[place] = _json(verdict)
    return ",".join(texts)


def csv_line(cells: Iterable[object]) -> str:
    """A line of a table."""
    return csv_text([cells])


def _line_start(cells: Iterable[object]) -> str:
    """Consecutive cells at the start or in the middle of a line, with a comma at the end."""
    return csv_line(cells)[:-1] + ","


def _extents(shape: tuple[int, ...]) -> str:
    """The extents of a shape, in the form of a cell: "2x3"."""
    return "x".join(map(str, shape))


_NAMES: dict[str, Callable[[Any], object]] = {
    "verdict": str, "name": cell, "op_type": cell, "step": int, "rank": int, "occurrence": int,
    "reference_slot": cell, "target_slot": cell, "reference_dtype": str, "target_dtype": str,
    "reference_shape": _extents, "target_shape": _extents, "rule": str,
}  # fmt: skip
"""The columns before the figures, each with the function that formats its cells."""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _text_of_each(make: Callable[[K], str], values: Iterable[K]) -> dict[K, str]:
    return {value: make(value) for value in set(values)}


def _around(like: Any, fields: Sequence[str]) -> list[str]:
    """The JSON of a struct, split at the values of these fields, in the order of the fields."""
    marks = {name: _MARK + number for number, name in enumerate(fields)}
    rest, out = _json(msgspec.structs.replace(like, **marks)), []
    for mark in marks.values():
        before, _, rest = rest.partition(str(mark))
        out.append(before)
    return [*out, rest]
