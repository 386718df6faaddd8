"""torch_xray's table of a dump: min, max, mean and std of every tensor, in the order of the
dump.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.records import Call, Record, Run
from whence.report.tables import cell, clean, csv_text
from whence.report.views.torch_xray import dataset

COLUMNS = ("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")


def xray_summary(run: Run, form: str) -> Iterator[str]:
    """The table as pieces of text. form: "text" (a frame, seven digits) or "csv". run: with
    statistics where they can be had.
    """
    uses = {ref.record: (call, ref.slot) for call in reversed(run.calls) for ref in call.refs}
    rows = [
        (*_place(run.records[record], call, slot), record)
        for record, (call, slot) in sorted(uses.items())
    ]
    if form == "text":
        table = [
            (
                str(i),
                step,
                str(rank),
                clean(name),
                *("" if v is None else f"{v:.7g}" for v in _figures(run, record)),
            )
            for i, (step, rank, name, record) in enumerate(rows)
        ]
        yield from (line + "\n" for line in _framed([COLUMNS, *table], text_column=3))
        return
    lines: list[tuple[object, ...]] = [COLUMNS]
    for i, (step, rank, name, record) in enumerate(rows):
        figures = ("" if v is None else repr(v) for v in _figures(run, record))
        lines.append((i, step, rank, cell(name), *figures))
    yield csv_text(lines)


def _framed(rows: list[tuple[str, ...]], text_column: int) -> Iterator[str]:
    """Rows in a frame; the first is the head. text_column: aligned left; all other columns are
    numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    yield rule
    for number, row in enumerate(rows):
        cells = (
            text.ljust(width) if k == text_column else text.rjust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "| " + " | ".join(cells) + " |"
        if number == 0:
            yield rule
    yield rule


def _place(record: Record, call: Call, slot: str) -> tuple[str, int, str]:
    """(step, rank, name) as in the file; steps of other runs count from 1."""
    step, name = dataset(record.file)
    if name:
        return step, call.rank, name
    text = ".".join(
        part for part in (call.scope, call.op, call.op_type, str(call.occurrence)) if part
    )
    return str(call.step + 1), call.rank, f"{text}.{call.phase}_{slot}"


def _figures(run: Run, record: int) -> tuple[float | None, ...]:
    statistics = run.records[record].statistics
    return (
        (None,) * 4
        if statistics is None
        else (statistics.min, statistics.max, statistics.mean, statistics.std)
    )
