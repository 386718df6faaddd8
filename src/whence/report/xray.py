"""torch_xray's table of a dump: min, max, mean and std of every tensor, in the order of the dump."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from whence.records import Call, Record, Run
from whence.report.plain import cell, clean, columns, number
from whence.report.views.torch_xray import dataset

COLUMNS = ("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")


def xray_summary(run: Run, form: str) -> Iterator[str]:
    """The table as pieces of text. form: "text" (six digits) or "csv". run: with statistics where they can be had."""
    seen = {ref.record: (call, ref.slot) for call in reversed(run.calls) for ref in call.refs}
    rows = [(*_place(run.records[record], call, slot), record) for record, (call, slot) in sorted(seen.items())]
    if form == "text":
        table = [
            (str(i), step, str(rank), clean(name), *map(number, _figures(run, record))) for i, (step, rank, name, record) in enumerate(rows)
        ]
        yield from (line + "\n" for line in columns([COLUMNS, *table], right=(0, 1, 2, 4, 5, 6, 7)))
        return
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for i, (step, rank, name, record) in enumerate(rows):
        writer.writerow((i, step, rank, cell(name), *("" if v is None else repr(v) for v in _figures(run, record))))
    yield out.getvalue()


def _place(record: Record, call: Call, slot: str) -> tuple[str, int, str]:
    """(step, rank, name) as the file has them; steps of others from 1."""
    step, name = dataset(record.file)
    if name:
        return step, call.rank, name
    shown = ".".join(part for part in (call.scope, call.op, call.op_type, str(call.occurrence)) if part)
    return str(call.step + 1), call.rank, f"{shown}.{call.phase}_{slot}"


def _figures(run: Run, record: int) -> tuple[float | None, ...]:
    found = run.records[record].statistics
    return (None,) * 4 if found is None else (found.min, found.max, found.mean, found.std)
