"""Rows, pairs and verdicts that are columns, as JSON and CSV. The text of what repeats is made
once; it is the text that each item would have alone.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from whence.report.tables import cell
from whence.results.columns import PairColumns, RowColumns, VerdictColumns

K = TypeVar("K", bound=Hashable)
_MARK = 10**15  # a number that nothing in a row, pair or verdict of columns has


def rows_json(rows: RowColumns) -> str:
    """The items of a JSON array."""
    fields = (
        *("pair", "name", "op_type", "step", "rank", "occurrence"),
        *("reference_slot", "target_slot", "reference_record", "target_record"),
        *("reference_dtype", "target_dtype", "reference_shape", "target_shape"),
    )
    cut = _around(rows.like, fields)
    names = _each(_json, itertools.chain.from_iterable(call[1:3] for call in rows.calls))
    heads = [
        f"{cut[0]}{pair}{cut[1]}{names[name]}{cut[2]}{names[kind]}{cut[3]}{step}{cut[4]}{rank}"
        f"{cut[5]}{occurrence}{cut[6]}"
        for pair, name, kind, step, rank, occurrence in rows.calls
    ]
    slots = _each(lambda slot: f"{_json(slot)}{cut[7]}{_json(slot)}{cut[8]}", rows.slot)
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


def rows_csv(rows: RowColumns, end: str, others: Mapping[int, str]) -> str:
    """The lines of a table. end: what the lines of equal tensors end with, behind `rule`, with its
    end; others: the lines of the rows that are not like them, by place.
    """
    kinds = _each(
        lambda names: _start((rows.like.verdict, cell(names[0]), cell(names[1]))),
        (call[1:3] for call in rows.calls),
    )
    heads = [
        f"{kinds[name, kind]}{step},{rank},{occurrence},"
        for _, name, kind, step, rank, occurrence in rows.calls
    ]
    slots = _each(lambda slot: _start((cell(slot),) * 2), rows.slot)
    ends = [
        _start((dtype, dtype, extents(shape), extents(shape), rows.like.rule)) + end
        for dtype, shape in rows.forms
    ]
    texts = [
        f"{heads[call]}{slots[slot]}{ends[form]}"
        for call, slot, form in zip(rows.call, rows.slot, rows.form, strict=True)
    ]
    for place, text in others.items():
        texts[place] = text
    return "".join(texts)


def pairs_json(pairs: PairColumns) -> str:
    """The items of a JSON array."""
    cut = _around(pairs.like, ("reference", "target", "slots"))
    slots = _each(lambda slot: f"[{_json(slot)},{_json(slot)},", pairs.slot)
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


def verdicts_json(verdicts: VerdictColumns) -> str:
    """The items of a JSON array."""
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


def line(cells: Iterable[object]) -> str:
    """A line of a table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _start(cells: Iterable[object]) -> str:
    """The cells that a line begins with, or some of its middle."""
    return line(cells)[:-1] + ","


def extents(shape: tuple[int, ...]) -> str:
    """A shape as a cell has it."""
    return "x".join(map(str, shape))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _each(make: Callable[[K], str], values: Iterable[K]) -> dict[K, str]:
    return {value: make(value) for value in set(values)}


def _around(like: Any, fields: Sequence[str]) -> list[str]:
    """The JSON of a struct, cut where the values of these fields stand, in their order."""
    marks = {name: _MARK + number for number, name in enumerate(fields)}
    rest, out = _json(msgspec.structs.replace(like, **marks)), []
    for mark in marks.values():
        before, _, rest = rest.partition(str(mark))
        out.append(before)
    return [*out, rest]
