"""One run, shown: what was run, its calls and records, the tree of modules, or one record in full.
Computes no comparison.

Every function yields lines and reads the run lazily; every name that comes from a run is cleaned
before it is shown.
"""

from __future__ import annotations

import csv as csv_module
import difflib
import fnmatch
import io
import json as json_module
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Dumped, External, Increment, Kept, Record, Ref, Run, Statistics
from whence.records.slots import is_mutated, is_output, slot_kind
from whence.report import tables
from whence.report.tables import HEAD, TAIL

EDGE = 3
BINS = 16
BAR = 40
CHUNK = 1 << 22
NOTES = 20

# A tensor is counted once, under the first of these that any call uses it as.
_KINDS = ("param", "grad", "mutated", "output", "input")
_UNUSED = "unused"


class Choice(NamedTuple):
    """Which calls are shown. name: shell pattern on the dotted name, or `re:` and a regular
    expression. ids: tree numbers with subtrees.
    """

    name: str = ""
    ids: tuple[str, ...] = ()
    step: int | None = None

    def calls(self, run: Run) -> Iterator[Call]:
        """The chosen calls, in the order in which they began. Raises UsageError when the pattern is
        no pattern.
        """
        try:
            test = re.compile(
                self.name[3:]
                if self.name.startswith("re:")
                else fnmatch.translate(self.name or "*")
            )
        except re.error as err:
            raise UsageError(f"--name {self.name!r} is not a regular expression: {err}") from None
        # Calls are written as they end, so a container stands behind its children; a long run is
        # never held in memory whole.
        begun: list[tuple[int, int, int]] = []
        for call in run.calls:
            if self.step is not None and call.step != self.step:
                continue
            if self.ids and not any(
                i in ("0", call.number) or call.number.startswith(i + "_") for i in self.ids
            ):
                continue
            if not self.name or test.fullmatch(name_of(call)) or test.fullmatch(call.scope):
                begun.append((call.rank, call.order, call.id))
        begun.sort()
        for _, _, place in begun:
            yield run.calls[place]


def name_of(call: Call) -> str:
    """The dotted module path, the root's own name for the root, and the operator behind a slash."""
    name = call.scope or call.root
    return f"{name}/{call.op}" if call.op else name


def text(
    run: Run, choice: Choice, limit: int | None = None, width: int | None = None
) -> Iterator[str]:
    """The whole run: heading, then calls with their records. limit: at most so many records, then a
    line saying how many more.

    width: of the terminal, for which figures are left out (norm, deviation, mean); None leaves
    nothing out.
    """
    yield from heading(run)
    yield ""
    shown = left = 0
    for call in choice.calls(run):
        if limit is not None and shown >= limit:
            left += len(call.refs)
            continue
        yield _call_line(call)
        shown += len(call.refs)
        yield from tables.columns(
            [_record_row(run.records[ref.record], ref) for ref in call.refs],
            right=(4, 5, 6, 7, 8, 9, 10),
            width=width,
            give={11: HEAD},
            drop=(8, 7, 6, 11),
        )
    if left:
        yield (
            f"... {tables.count(left, 'more record')}: --all shows them, --name PATTERN, --ids "
            "and --step choose"
        )
    elif not shown and run.calls:
        yield _none_chosen(run, choice)


def heading(run: Run) -> Iterator[str]:
    """What was run, how it ended, steps, bytes by kind, programs, notes."""
    info = run.info
    code = info.settings.get("exit_code")
    ended = (
        "ended cleanly" if not code else f"complete, but the command ended with exit code {code}"
    )
    yield (
        f"{tables.clean(run.path)}   {tables.clean(info.kind)} run   "
        f"{tables.clean(run.ended or ended)}"
    )
    rows: list[tuple[str, str]] = []
    if info.command:
        rows.append(("command", " ".join(_quoted(word) for word in info.command)))
    place = [
        f"by {info.user}" if info.user else "",
        f"on {info.host}" if info.host else "",
        f"in {info.cwd}" if info.cwd else "",
    ]
    if info.started:
        rows.append(("started", " ".join(w for w in (info.started, *place) if w)))
    if "exit_code" in info.settings:
        took = info.settings.get("duration_s")
        rows.append(
            (
                "exit code",
                f"{info.settings['exit_code']}" + (f" after {took} s" if took is not None else ""),
            )
        )
    if info.versions:
        rows.append(
            ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items()))
        )
    if info.devices:
        rows.append(("devices", ", ".join(info.devices)))
    if info.git:
        rows.append(("git", info.git))
    if info.seed is not None or info.deterministic:
        seed = "none" if info.seed is None else str(info.seed)
        rows.append(("seed", seed + (", deterministic" if info.deterministic else "")))
    if info.options:
        rows.append(("options", _assigned(info.options)))
    if info.environment:
        rows.append(("environment", _assigned(info.environment)))
    if settings := {k: v for k, v in info.settings.items() if k not in ("exit_code", "duration_s")}:
        rows.append(("settings", _assigned(settings)))
    rows.extend(("steps" if i == 0 else "", line) for i, line in enumerate(_steps(run)))
    rows.append(("calls", tables.count(len(run.calls), "call")))
    rows.extend(("records" if i == 0 else "", line) for i, line in enumerate(_bytes_lines(run)))
    rows.extend(("programs" if i == 0 else "", line) for i, line in enumerate(_programs(run)))
    rows.extend(("notes" if i == 0 else "", line) for i, line in enumerate(_notes(run)))
    yield from tables.columns([("", left, tables.clean(right)) for left, right in rows])


def tree(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Every module call with its number, once for steps with the same tree. width: of the
    terminal.
    """
    trees: dict[tuple[int, str, int, int], list[Call]] = {}
    for call in choice.calls(run):
        trees.setdefault((call.rank, call.root, call.step, call.micro), []).append(call)
    same: dict[tuple[int, str, tuple[tuple[str, str, str], ...]], list[tuple[int, int]]] = {}
    for (rank, root, step, micro), calls in trees.items():
        signature = tuple((c.number, name_of(c), c.op_type) for c in calls)
        same.setdefault((rank, root, signature), []).append((step, micro))
    if not same:
        yield _none_chosen(run, choice)
    for (rank, root, _), places in same.items():
        calls = trees[(rank, root, *places[0])]
        yield f"{tables.clean(root)}   rank {rank}   {_ranges([step for step, _ in places])}"
        rows = []
        for call in calls:
            depth = 0 if call.number == "0" else call.number.count("_") + 1
            made = ", ".join(
                _kind_of_record(run.records[ref.record]) for ref in call.slots("output")
            )
            rows.append(
                (
                    tables.clean(call.number),
                    "  " * depth + tables.clean(name_of(call)),
                    tables.clean(call.op_type),
                    made,
                )
            )
        yield from tables.columns(rows, width=width, give={1: TAIL, 2: HEAD, 3: HEAD})
        yield ""


def table(run: Run, choice: Choice, width: int | None = None) -> Iterator[str]:
    """Index, Step, Rank, Module, Min, Max, Mean, Std; one line a tensor. width: of the terminal;
    None leaves names whole.
    """
    rows: list[tuple[str, ...]] = [("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")]
    for index, (call, ref) in enumerate(_references(run, choice)):
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
                tables.clean(f"{name_of(call)}:{ref.slot}"),
                *figures,
            )
        )
    yield from tables.columns(
        rows, right=(0, 1, 2, 4, 5, 6, 7), width=width, give={3: TAIL}, drop=(7, 6)
    )


_CSV = (
    *(
        "index",
        "rank",
        "root",
        "step",
        "micro",
        "phase",
        "number",
        "scope",
        "op",
        "op_type",
        "occurrence",
        "slot",
        "record",
        "edge",
    ),
    *(
        "dtype",
        "shape",
        "device",
        "count",
        "min",
        "max",
        "mean",
        "std",
        "norm",
        "nan",
        "inf",
        "zero",
        "hash",
        "kept",
        "why",
    ),
)


def csv(run: Run, choice: Choice) -> Iterator[str]:
    """One line a tensor with every figure; columns of `on_record` at the end. Names that look like
    formulas are quoted.
    """
    extra = sorted(
        {
            column
            for _, ref in _references(run, choice)
            for column in run.records[ref.record].columns
        }
    )
    yield _csv_line([*_CSV, *(tables.cell(column) for column in extra)])
    for index, (call, ref) in enumerate(_references(run, choice)):
        record = run.records[ref.record]
        s = record.statistics or Statistics(record.count, None, None, None, None, None, 0, 0, 0)
        counts: tuple[Any, ...] = (s.nan, s.inf, s.zero) if record.statistics else ("", "", "")
        yield _csv_line(
            [
                index,
                call.rank,
                tables.cell(call.root),
                call.step,
                call.micro,
                tables.cell(call.phase),
                tables.cell(call.number),
                tables.cell(call.scope),
                tables.cell(call.op),
                tables.cell(call.op_type),
                call.occurrence,
                tables.cell(ref.slot),
                record.id,
                tables.cell(ref.edge),
                tables.cell(record.dtype),
                "x".join(str(e) for e in record.shape),
                tables.cell(record.device),
                s.count,
                *("" if v is None else repr(v) for v in (s.min, s.max, s.mean, s.std, s.norm)),
                *counts,
                tables.cell(record.hash),
                "yes" if _kept(record) else "no",
                tables.cell(record.why),
                *(
                    "" if record.columns.get(column) is None else repr(record.columns[column])
                    for column in extra
                ),
            ]
        )


def json(run: Run, choice: Choice) -> Iterator[str]:
    """One JSON object: path, ended, info, bytes, steps, programs, notes, calls with their records;
    one call a line.
    """
    programs = {"recorded": len(run.programs), **_program_counts(run)}
    head = {
        "path": run.path,
        "ended": run.ended,
        "info": _builtins(run.info),
        "bytes": {
            kind: {"records": n, "bytes": total, "kept_bytes": kept}
            for kind, (n, total, kept) in _bytes_by_kind(run).items()
        },
        "steps": [_builtins(step) for step in run.steps],
        "programs": programs,
        "notes": [_builtins(note) for note in run.notes],
    }
    yield _dumps(head)[:-1] + ', "calls": ['
    before = ""
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
        if before:
            yield before + ","
        before = _dumps(entry)
    if before:
        yield before
    yield "]}"


def find(run: Run, name: str, choice: Choice) -> tuple[Call, Ref]:
    """The call and slot that NAME means: a dotted name, name:slot, or a tree number; the first step
    unless the choice says which.

    A name alone is its first output. Raises UsageError saying what is near, or which slots there
    are.
    """
    before, _, after = name.rpartition(":")
    whole: list[Call] = []
    slot = ""
    for wanted, behind, by_name in (
        (name, "", True),
        (before, after, True),
        (name, "", False),
        (before, after, False),
    ):
        # A Sequential's children are called 0, 1, 2, so a name goes before a tree number.
        chosen = choice.calls(run) if wanted else ()
        whole = [
            c
            for c in chosen
            if (wanted in (c.scope, name_of(c)) if by_name else wanted == c.number)
        ]
        if whole:
            slot = behind
            break
    if not whole:
        names = sorted({name_of(c) for c in run.calls})
        near = (
            difflib.get_close_matches(name.partition(":")[0], names, n=3, cutoff=0.3) or names[:3]
        )
        at = "" if choice.step is None else f" in step {choice.step}"
        hint = (
            f"nearest: {', '.join(tables.clean(n) for n in near)}" if near else "it holds no call"
        )
        raise UsageError(
            f"{tables.clean(run.path)} has no call named {tables.clean(name)}{at}; {hint}"
        )
    call = whole[0]
    refs = (
        [r for r in call.refs if r.slot == slot or r.slot.startswith(slot + ".")]
        if slot
        else list(call.refs)
    )
    refs.sort(key=lambda r: 0 if is_output(r.slot) else 1 if is_mutated(r.slot) else 2)
    if not refs:
        held = ", ".join(tables.clean(r.slot) for r in call.refs) or "none"
        raise UsageError(
            f"{tables.clean(name_of(call))} has no slot "
            f"{tables.clean(slot) or '(it holds no tensor)'}; slots: {held}"
        )
    return call, refs[0]


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
    rows = [("record", f"#{record.id}  {_kind_of_record(record)}  on {record.device}")]
    if record.stride:
        rows.append(
            ("layout", f"stride {tables.shape(record.stride)}, offset {record.storage_offset}")
        )
    if record.subclass:
        rows.append(("class", record.subclass))
    rows.append(("elements", _elements(record)))
    if record.hash:
        rows.append(("hash", record.hash))
    rows.extend(
        ("seen as" if i == 0 else "", seen) for i, seen in enumerate(_seen(run, ref.record))
    )
    rows.append(("slots", ", ".join(r.slot for r in call.refs)))
    if call.arguments:
        rows.append(("arguments", _assigned(call.arguments)))
    if call.source:
        rows.append(("source", call.source))
    if call.program or call.no_program:
        rows.append(("program", call.program or f"not usable: {call.no_program}"))
    if record.columns:
        rows.append(
            (
                "columns",
                ", ".join(f"{key} {tables.number(value)}" for key, value in record.columns.items()),
            )
        )
    rows.extend(
        ("statistics" if i == 0 else "", line)
        for i, line in enumerate(_statistics(record.statistics))
    )
    yield from tables.columns([("", left, tables.clean(right)) for left, right in rows])
    try:
        array = run.array(record.id)
    except ElementsMissing as err:
        yield f"  no values: {tables.clean(err)}"
        return
    yield ""
    yield from corners(array)
    yield ""
    yield from histogram(array)


def one_json(run: Run, name: str, choice: Choice) -> Iterator[str]:
    """One record as JSON: its call, slot and record. Raises UsageError as `find` does."""
    call, ref = find(run, name, choice)
    entry = {
        "call": _builtins(call),
        "slot": ref.slot,
        "record": _record_json(run.records[ref.record]),
    }
    yield _dumps(entry)


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
        at = ", ".join([*(str(i) for i in place), *(":" for _ in range(block.ndim))])
        yield f"  values at [{at}]" if array.ndim else "  value"
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
        most = int(totals.max())
        yield "  histogram"
        rows = []
        for left, right, total in zip(edges[:-1], edges[1:], totals):
            bar = "#" * max(int(total > 0), round(BAR * int(total) / most))
            rows.append(
                (
                    " ",
                    tables.number(float(left)),
                    "..",
                    tables.number(float(right)),
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


def _references(run: Run, choice: Choice) -> Iterator[tuple[Call, Ref]]:
    for call in choice.calls(run):
        for ref in call.refs:
            yield call, ref


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
    tail += [f"[{record.why}]"] if record.why and not _kept(record) else []
    return (
        "",
        tables.clean(ref.slot),
        tables.clean(record.dtype),
        tables.shape(record.shape) + (f" of {tables.shape(record.whole)}" if record.whole else ""),
        *labelled,
        *strange,
        tables.clean(" ".join(tail)),
    )


def _none_chosen(run: Run, choice: Choice) -> str:
    if not run.calls:
        return "no call was captured"
    steps = [call.step for call in run.calls]
    return (
        f"no call matches, of {tables.count(len(run.calls))} in {_ranges(steps)}; `--tree` "
        "lists names and numbers"
    )


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
        yield line + (f"; elements not kept in {_ranges(lost)}" if lost else "")
    if not by_root:
        yield "none was finished"


def _kept(record: Record) -> bool:
    """Can its elements be read, as far as the run knows?"""
    return record.elements is not None and not (isinstance(record.elements, Dumped) and record.why)


def _nbytes(record: Record) -> int:
    known = dtypes.DTYPES.get(record.dtype)
    return (
        record.count * known.itemsize
        if known and all(extent >= 0 for extent in record.shape)
        else 0
    )


def _bytes_by_kind(run: Run) -> dict[str, tuple[int, int, int]]:
    # kind -> records, their bytes, bytes whose elements are in the run or in a checkpoint
    rank = {kind: place for place, kind in enumerate(_KINDS)}
    kinds: dict[int, int] = {}
    for call in run.calls:
        for ref in call.refs:
            place = rank.get(slot_kind(ref.slot), len(_KINDS))
            kinds[ref.record] = min(place, kinds.get(ref.record, place))
    sums: dict[str, list[int]] = {}
    for record in run.records:
        place = kinds.get(record.id, len(_KINDS))
        total = sums.setdefault(_KINDS[place] if place < len(_KINDS) else _UNUSED, [0, 0, 0])
        size = _nbytes(record)
        total[0] += 1
        total[1] += size
        total[2] += size if _kept(record) else 0
    return {
        kind: (sums[kind][0], sums[kind][1], sums[kind][2])
        for kind in (*_KINDS, _UNUSED)
        if kind in sums
    }


def _bytes_lines(run: Run) -> Iterator[str]:
    kinds = _bytes_by_kind(run)
    total = [sum(column) for column in zip(*kinds.values())] or [0, 0, 0]
    yield (
        f"{tables.count(total[0], 'tensor')}, {tables.size(total[1])}, elements of "
        f"{tables.size(total[2])} kept"
    )
    yield from tables.columns(
        [
            (kind, tables.count(n), tables.size(size), f"{tables.size(kept)} kept")
            for kind, (n, size, kept) in kinds.items()
        ],
        right=(1, 2, 3),
    )


def _program_counts(run: Run) -> dict[str, Any]:
    leaves = [call for call in run.calls if call.program or call.no_program or call.leaf]
    reasons = Counter(call.no_program or "none recorded" for call in leaves if not call.program)
    return {
        "calls": len(leaves),
        "usable_calls": len(leaves) - reasons.total(),
        "refused": dict(reasons.most_common()),
    }


def _programs(run: Run) -> Iterator[str]:
    counts = _program_counts(run)
    if not counts["calls"] or run.info.kind != "whence":  # a dump never has one
        return
    usable, leaves = (
        tables.count(counts["usable_calls"]),
        tables.count(counts["calls"], "leaf call"),
    )
    yield f"usable for {usable} of {leaves} ({tables.count(len(run.programs))} recorded)"
    for reason, number in counts["refused"].items():
        yield f"{tables.count(number, 'call')} without: {reason}"


def _notes(run: Run) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Any]] = {}
    for note in run.notes:
        groups.setdefault((note.kind, note.text), []).append(note)
    for place, ((kind, words), notes) in enumerate(groups.items()):
        if place == NOTES:
            yield f"... {tables.count(len(groups) - NOTES)} more, in --format json"
            return
        at = f" at {notes[0].scope}" if notes[0].scope else ""
        more = f" and {tables.count(len(notes) - 1)} more" if len(notes) > 1 else ""
        yield f"{kind}{at}{more}: {words}"


def _elements(record: Record) -> str:
    match record.elements:
        case Kept(shard=shard, offset=offset, nbytes=size):
            return f"kept, {tables.size(size)} (shard {shard}, offset {offset})"
        case Increment(base=base, axis=axis, nbytes=size):
            return f"kept as {tables.size(size)} after record #{base} along axis {axis}"
        case External(file=file, offset=offset, nbytes=size):
            return f"{tables.size(size)} in {file}, offset {offset}"
        case Dumped(file=file):
            return (
                f"{tables.size(_nbytes(record))} in {file or 'the dump'}"
                if not record.why
                else f"not kept: {record.why}"
            )
        case None:
            return f"not kept: {record.why}" if record.why else "no place recorded"


def _seen(run: Run, record: int) -> Iterator[str]:
    seen = [(call, ref) for call in run.calls for ref in call.refs if ref.record == record]
    for call, ref in seen[:8]:
        yield f"{ref.slot} of {name_of(call)} ({call.number}, step {call.step})" + (
            f", same by {ref.edge}" if ref.edge else ""
        )
    if len(seen) > 8:
        yield f"... {tables.count(len(seen) - 8)} more"


def _statistics(s: Statistics | None) -> Iterator[str]:
    if s is None:
        yield "none taken"
        return
    pairs = (("min", s.min), ("max", s.max), ("mean", s.mean), ("std", s.std), ("norm", s.norm))
    yield "  ".join(f"{label} {tables.number(value)}" for label, value in pairs)
    yield (
        f"{tables.count(s.count, 'element')}: NaN {tables.count(s.nan)}, Inf "
        f"{tables.count(s.inf)}, zero {tables.count(s.zero)}"
    )


def _kind_of_record(record: Record) -> str:
    return f"{tables.clean(record.dtype)} {tables.shape(record.shape)}"


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


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv_module.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()


def _assigned(values: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={_quoted(value if isinstance(value, str) else json_module.dumps(value))}"
        for name, value in values.items()
    )


def _quoted(word: str) -> str:
    if word and re.fullmatch(r"[\w@%+=:,./\[\]*-]+", word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


def _ranges(numbers: Sequence[int]) -> str:
    """ "step 0", "steps 0-2, 7"."""
    distinct = sorted(set(numbers))
    runs: list[list[int]] = []
    for n in distinct:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"step{'s' if len(distinct) > 1 else ''} {words}"
