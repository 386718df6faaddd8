"""One run, shown: what was run, its calls and records, the tree of modules, or one record in full.
Computes no comparison.

Every function yields lines and reads the run lazily; every name that comes from a run is cleaned
before it is shown.

Its calls are shown with their records: as lines, as a tree, as a table, as CSV and JSON.

One record in full: where it was seen, statistics, corner values, histogram.
"""

from __future__ import annotations

import itertools
import json as json_module
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Ref, Run, Statistics
from whence.records.columns import columns_of, has_elements
from whence.report import tables
from whence.report.run.choice import (
    Choice,
    find,
    name_of,
    none_chosen,
    other_meaning,
    references,
    step_ranges,
)
from whence.report.run.elements import bytes_by_kind, elements_place, kind_of_record, program_counts
from whence.report.tables import HEAD, TAIL

__all__ = [
    "Choice",
    "corners",
    "csv",
    "find",
    "heading",
    "histogram",
    "json",
    "one",
    "one_json",
    "other_meaning",
    "table",
    "text",
    "tree",
]


def text(
    run: Run, choice: Choice, limit: int | None = None, width: int | None = None
) -> Iterator[str]:
    """The whole run: heading, then calls with their records. limit: largest number of records,
    followed by a line that says how many more there are.

    width: of the terminal, for which figures are left out (norm, deviation, mean); None leaves
    nothing out.
    """
    yield from heading(run)
    yield ""
    refs = columns_of(run).refs
    count = omitted = 0
    for place in choice.places(run):
        if limit is not None and count >= limit:
            omitted += int(refs[place])
            continue
        call = run.calls[place]
        yield _call_line(call)
        count += len(call.refs)
        yield from tables.columns(
            [_record_row(run.records[ref.record], ref) for ref in call.refs],
            right=(4, 5, 6, 7, 8, 9, 10),
            width=width,
            give={11: HEAD},
            drop=(8, 7, 6, 11),
        )
    if omitted:
        yield (
            f"... {tables.count(omitted, 'more record')}: show them with --all, or select some "
            "with --name PATTERN, --ids or --step"
        )
    elif not count and run.calls:
        yield none_chosen(run, choice)


def tree(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Every module call with its number, once for steps with the same tree. width: of the
    terminal.
    """
    trees: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in choice.calls(run):
        trees.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    places_of: dict[tuple[int, str, tuple[tuple[str, str, str], ...]], list[tuple[int, int]]] = {}
    for (rank, root, step, micro), calls in trees.items():
        signature = tuple((c.number, name_of(c), c.op_type) for c in calls)
        places_of.setdefault((rank, root, signature), []).append((step, micro))
    if not places_of:
        yield none_chosen(run, choice)
    for (rank, root, _), places in places_of.items():
        calls = trees[(rank, root, *places[0])]
        yield f"{tables.clean(root)}   rank {rank}   {step_ranges([step for step, _ in places])}"
        rows = []
        for call in calls:
            depth = 0 if call.number == "0" else call.number.count("_") + 1
            outputs = ", ".join(
                kind_of_record(run.records[ref.record]) for ref in call.slots("output")
            )
            rows.append(
                (
                    call.number,
                    "  " * depth + name_of(call),
                    call.op_type,
                    outputs,
                )
            )
        yield from tables.columns(rows, width=width, give={1: TAIL, 2: HEAD, 3: HEAD})
        yield ""


def table(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Index, Step, Rank, Module, Min, Max, Mean, Std; one line a tensor. width: of the terminal;
    None leaves names whole.
    """
    rows: list[tuple[str, ...]] = [("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")]
    for index, (call, ref) in enumerate(references(run, choice)):
        s = run.records[ref.record].statistics
        figures = (
            ("-",) * 4
            if s is None
            else tuple(tables.number(v) for v in (s.min, s.max, s.mean, s.std))
        )
        rows.append(
            (
                str(index),
                str(call.step),
                str(call.rank),
                f"{name_of(call)}:{ref.slot}",
                *figures,
            )
        )
    yield from tables.columns(
        rows, right=(0, 1, 2, 4, 5, 6, 7), width=width, give={3: TAIL}, drop=(7, 6)
    )


def _call_line(call: Call) -> str:
    extra = [f"occurrence {call.occurrence}"] if call.occurrence else []
    extra += [f"micro {call.micro}"] if call.micro else []
    extra += [call.phase] if call.phase != "forward" else []
    extra += ["train"] if call.training else []
    extra += [f"RAISED {call.error}"] if call.error else []
    extra += list(call.notes)
    return tables.clean(
        "   ".join(
            [
                call.number,
                name_of(call),
                call.op_type,
                f"step {call.step}, rank {call.rank}",
                *extra,
            ]
        )
    )


def _record_row(record: Record, ref: Ref) -> tuple[str, ...]:
    s = record.statistics
    figures = (
        ("-",) * 5
        if s is None
        else tuple(tables.number(v) for v in (s.min, s.max, s.mean, s.std, s.norm))
    )
    labelled = tuple(
        f"{label} {figure}" for label, figure in zip(("min", "max", "mean", "std", "norm"), figures)
    )
    strange = ("", "") if s is None else (f"nan {s.nan}", f"inf {s.inf}")
    tail = [f"#{record.id}", *([f"({ref.edge})"] if ref.edge else [])]
    tail += [f"{key} {tables.number(value)}" for key, value in record.columns.items()]
    tail += [f"[{record.why}]"] if record.why and not has_elements(record) else []
    return (
        "",
        ref.slot,
        record.dtype,
        tables.shape(record.shape) + (f" of {tables.shape(record.whole)}" if record.whole else ""),
        *labelled,
        *strange,
        " ".join(tail),
    )


_CALL = ("rank", "root", "step", "micro", "phase", "number", "scope", "op", "op_type", "occurrence")
_RECORD = ("slot", "record", "edge", "dtype", "shape", "device", "count")
_FIGURES = ("min", "max", "mean", "std", "norm", "nan", "inf", "zero")


def csv(run: Run, choice: Choice) -> Iterator[str]:
    """One line a tensor with every figure; columns of `on_record` at the end. Names that look like
    formulas are quoted.
    """
    extra = sorted(
        {column for _, ref in references(run, choice) for column in run.records[ref.record].columns}
    )
    names = ("index", *_CALL, *_RECORD, *_FIGURES, "hash", "kept", "why")
    yield tables.csv_text([[*names, *map(tables.cell, extra)]])[:-1]
    for index, (call, ref) in enumerate(references(run, choice)):
        record = run.records[ref.record]
        s = record.statistics
        key = [index, *(getattr(call, name) for name in _CALL)]
        tensor = [ref.slot, record.id, ref.edge, record.dtype]
        shape = "x".join(map(str, record.shape))
        tail = [
            *(record.device, s.count if s else record.count),
            *(getattr(s, name, None) for name in _FIGURES),
            *(record.hash, "yes" if has_elements(record) else "no", record.why),
            *map(record.columns.get, extra),
        ]
        cells = map(_csv_cell, (*key, *tensor)), [shape], map(_csv_cell, tail)
        yield tables.csv_text([itertools.chain(*cells)])[:-1]


def _csv_cell(value: Any) -> Any:
    """A cell of the CSV: names cannot act as formulas, floats keep all digits, unknown values are
    empty.
    """
    if isinstance(value, str):
        return tables.cell(value)
    return "" if value is None else repr(value) if isinstance(value, float) else value


def json(run: Run, choice: Choice) -> Iterator[str]:
    """One JSON object: path, ended, info, bytes, steps, programs, notes, calls with their records;
    one call a line.
    """
    programs = {"recorded": len(run.programs), **program_counts(run)}
    head = {
        "path": run.path,
        "ended": run.ended,
        "info": _builtins(run.info),
        "bytes": {
            kind: {"records": n, "bytes": total, "kept_bytes": kept_bytes}
            for kind, (n, total, kept_bytes) in bytes_by_kind(run).items()
        },
        "steps": [_builtins(step) for step in run.steps],
        "programs": programs,
        "notes": [_builtins(note) for note in run.notes],
    }
    yield _dumps(head)[:-1] + ', "calls": ['
    pending = ""
    for call in choice.calls(run):
        entry = {
            **_builtins(call),
            "refs": [
                {
                    "slot": ref.slot,
                    "edge": ref.edge,
                    "record": _record_json(run.records[ref.record]),
                }
                for ref in call.refs
            ],
        }
        if pending:
            yield pending + ","
        pending = _dumps(entry)
    if pending:
        yield pending
    yield "]}"


def one_json(run: Run, name: str, choice: Choice) -> Iterator[str]:
    """One record as JSON: its call, slot and record. Raises UsageError as `find` does."""
    call, ref = find(run, name, choice)
    entry = {
        "call": _builtins(call),
        "slot": ref.slot,
        "record": _record_json(run.records[ref.record]),
    }
    yield _dumps(entry)


def _record_json(record: Record) -> dict[str, Any]:
    entry = _builtins(record)
    s = record.statistics
    entry["statistics"] = (
        None if s is None else {name: getattr(s, name) for name in s.__struct_fields__}
    )
    return entry


def _builtins(struct: msgspec.Struct) -> dict[str, Any]:
    plain_values: dict[str, Any] = msgspec.to_builtins(struct)
    plain_values.pop("t", None)
    return plain_values


def _dumps(value: Any) -> str:
    # JSON has no NaN and no infinity; a hand-made run may hold them as arguments, where text says
    # what they were.
    def finite(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        if isinstance(item, dict):
            return {str(key): finite(inner) for key, inner in item.items()}
        return [finite(inner) for inner in item] if isinstance(item, (list, tuple)) else item

    try:
        return json_module.dumps(value, ensure_ascii=True, allow_nan=False)
    except ValueError:
        return json_module.dumps(finite(value), ensure_ascii=True, allow_nan=False)


_EDGE = 3
_BINS = 16
_BAR = 40
_CHUNK = 1 << 22


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
    yield from tables.columns([("", title, text) for title, text in rows])
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
        yield from tables.columns(lines, right=range(1, 2 * _EDGE + 3))


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
        edges = (
            np.linspace(low / 2, high / 2, _BINS + 1) * 2 if high > low else np.array([low, low])
        )
        totals = np.zeros(len(edges) - 1, np.int64)
        for part in _parts(array):
            finite = part[np.isfinite(part)]
            places = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, len(totals) - 1)
            totals += np.bincount(places, minlength=len(totals))
        largest = int(totals.max())
        yield "  histogram"
        rows = []
        for start, end, total in zip(edges[:-1], edges[1:], totals):
            bar = "#" * max(int(total > 0), round(_BAR * int(total) / largest))
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
    if extent <= 2 * _EDGE:
        return list(range(extent)), -1
    return [*range(_EDGE), *range(extent - _EDGE, extent)], extent - _EDGE


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
    for start in range(0, flat.size, _CHUNK):
        wide = dtypes.widen(flat[start : start + _CHUNK])
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


# The heading of a run: its command, how it ended, and its contents.

NOTES = 20


def heading(run: Run) -> Iterator[str]:
    """What was run, how it ended, steps, bytes by kind, programs, notes."""
    info = run.info
    code = info.settings.get("exit_code")
    ended = "complete" if not code else f"complete, but the command ended with exit code {code}"
    yield (
        f"{tables.clean(run.path)}   {tables.clean(info.kind)} run   "
        f"{tables.clean(run.ended or ended)}"
    )
    places = (("by", info.user), ("on", info.host), ("in", info.cwd))
    started = [info.started, *(f"{word} {place}" for word, place in places if place)]
    seconds = info.settings.get("duration_s")
    exit_code = str(info.settings.get("exit_code", ""))
    if exit_code and seconds is not None:
        exit_code += f" after {seconds} s"
    seed = "none" if info.seed is None else str(info.seed)
    has_seed = info.seed is not None or info.deterministic
    settings = {k: v for k, v in info.settings.items() if k not in ("exit_code", "duration_s")}
    stated = {
        "command": " ".join(map(_quoted, info.command)),
        "started": " ".join(started) if info.started else "",
        "exit code": exit_code,
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
        "devices": ", ".join(info.devices),
        "git": info.git,
        "seed": seed + (", deterministic" if info.deterministic else "") if has_seed else "",
        "options": assigned(info.options),
        "environment": assigned(info.environment),
        "settings": assigned(settings),
    }
    rows = [(title, value) for title, value in stated.items() if value]
    for title, lines in (
        ("steps", _steps(run)),
        ("calls", [tables.count(len(run.calls), "call")]),
        ("records", _bytes_lines(run)),
        ("programs", _programs(run)),
        ("notes", _notes(run)),
    ):
        rows += titled(title, lines)
    yield from tables.columns([("", title, value) for title, value in rows])


def titled(title: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Rows of which the first one has the title."""
    return ((title if i == 0 else "", line) for i, line in enumerate(lines))


def _steps(run: Run) -> Iterator[str]:
    by_root: dict[tuple[int, str], list[Any]] = {}
    for step in run.steps:
        by_root.setdefault((step.rank, step.root), []).append(step)
    for (rank, root), steps in by_root.items():
        sizes = [s.nbytes for s in steps]
        low, high = tables.size(min(sizes)), tables.size(max(sizes))
        lost = [s.step for s in steps if not s.kept]
        line = f"{root}, rank {rank}: {tables.count(len(steps), 'step')}"
        if any(sizes):
            line += f", {low if low == high else f'{low} to {high}'} of new elements each"
        yield line + (f"; no elements kept of {step_ranges(lost)}" if lost else "")
    if not by_root:
        yield "no step was finished"


def _bytes_lines(run: Run) -> Iterator[str]:
    kinds = bytes_by_kind(run)
    total = [sum(column) for column in zip(*kinds.values())] or [0, 0, 0]
    yield (
        f"{tables.count(total[0], 'tensor')}, {tables.size(total[1])}; elements of "
        f"{tables.size(total[2])} are kept"
    )
    yield from tables.columns(
        [
            (kind, tables.count(n), tables.size(size), f"{tables.size(kept_size)} kept")
            for kind, (n, size, kept_size) in kinds.items()
        ],
        right=(1, 2, 3),
    )


def _programs(run: Run) -> Iterator[str]:
    counts = program_counts(run)
    if not counts["calls"] or run.info.kind != "whence":  # dumps never record an end
        return
    usable, leaves = (
        tables.count(counts["usable_calls"]),
        tables.count(counts["calls"], "leaf call"),
    )
    recorded = tables.count(len(run.programs), "program")
    yield f"{usable} of {leaves} can be replayed ({recorded} recorded)"
    for reason, number in counts["refused"].items():
        yield f"{tables.count(number, 'call')} cannot: {reason}"


def _notes(run: Run) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Any]] = {}
    for note in run.notes:
        groups.setdefault((note.kind, note.text), []).append(note)
    for place, ((kind, words), notes) in enumerate(groups.items()):
        if place == NOTES:
            yield f"... {tables.count(len(groups) - NOTES)} more, in --format json"
            return
        where = f" at {notes[0].scope}" if notes[0].scope else ""
        others = f" and {tables.count(len(notes) - 1)} more" if len(notes) > 1 else ""
        yield f"{kind}{where}{others}: {words}"


def assigned(values: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={_quoted(value if isinstance(value, str) else json_module.dumps(value))}"
        for name, value in values.items()
    )


def _quoted(word: str) -> str:
    if word and re.fullmatch(r"[\w@%+=:,./\[\]*-]+", word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"
