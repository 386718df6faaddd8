"""The heading of a run: its command, how it ended, and its contents."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterable, Iterator
from typing import Any

from whence.records import Run
from whence.report import tables
from whence.report.run.choice import step_ranges
from whence.report.run.elements import bytes_by_kind, program_counts

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
