"""What `whence` alone says: what lies in the folder, and what one could do with it."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator

from whence.report import tables
from whence.results import Contents, FoundComparison, FoundRun
from whence.results.free_names import free_name

_MOST_STEPS = 3


def folder_contents(
    contents: Contents, is_free: Callable[[str], bool], width: int | None = None
) -> str:
    """Runs, comparisons, the last comparison, and lines to type. is_free: may a file or folder of
    this name be made? width: of the terminal.
    """
    lines: list[str] = []
    for title, rows, more, noun in (
        ("Runs", [_run(run) for run in contents.runs], contents.more_runs, "run"),
        (
            "Comparisons",
            [_comparison(each) for each in contents.comparisons],
            contents.more_comparisons,
            "comparison",
        ),
    ):
        if rows:
            lines += [title, *tables.columns([("", *row) for row in rows], width=width)]
            lines += [f"  ... {tables.count(more, f'older {noun}')}"] if more else []
            lines.append("")
    if sentence := _last(contents):
        lines += [sentence, ""]
    if contents.is_cut:
        lines += ["This folder holds more than was looked at.", ""]
    lines.append("What you could do next")
    lines += [f"  {line}" for line in next_lines(contents, is_free)]
    lines += ["  whence --help", ""]
    return "\n".join(map(tables.clean, lines))


def _run(run: FoundRun) -> tuple[str, ...]:
    words = shlex.join(run.command) if run.command else "captured in code"
    failed = f"ended with exit code {run.exit_code}, " if run.exit_code else ""
    return run.path, words, failed + tables.ago(run.age_s)


def _comparison(found: FoundComparison) -> tuple[str, ...]:
    answer = found.status + (f": {found.finding}" if found.finding else "")
    sides = f"{found.reference} against {found.target}"
    return found.path, answer, sides, tables.ago(found.age_s)


def _last(contents: Contents) -> str:
    last = contents.last
    if last is None:
        return ""
    words = last.path.removeprefix(contents.folder.rstrip("/") + "/")
    if not words:
        words = f"{last.reference} against {last.target}" if last.reference else "one without -o"
    answer = f": {last.status}" if last.status else ""
    return f"Last comparison made here: {words}{answer} ({tables.ago(last.age_s)})"


def next_lines(contents: Contents, is_free: Callable[[str], bool]) -> list[str]:
    """Up to three commands: of the newest comparison, of runs that were not compared, of a single
    run.
    """
    lines: list[str] = []
    newest = contents.comparisons[0] if contents.comparisons else None
    last = contents.last
    if newest is not None:
        about = shlex.quote(newest.path)
        lines += [command for command in newest.next if about in command][: _MOST_STEPS - 1]
        lines = lines or [f"whence report {about}"]
    elif last is not None:
        if last.status == "different":
            lines.append(f"whence repro -o {free_name('repro', is_free)}")
        lines.append(f"whence report -o {free_name('report.html', is_free)}")
    lines += _runs_to_compare(contents, is_free)
    if contents.runs and len(lines) < _MOST_STEPS:
        lines.append(f"whence show {shlex.quote(contents.runs[0].path)} --tree")
    return lines[:_MOST_STEPS]


def _runs_to_compare(contents: Contents, is_free: Callable[[str], bool]) -> Iterator[str]:
    compared = {
        (side.removeprefix("./").rstrip("/"))
        for each in (*contents.comparisons, *((contents.last,) if contents.last else ()))
        for side in (each.reference, each.target)
    }
    runs = contents.runs
    for target in (run for run in runs if run.path not in compared):
        oldest = next(run for run in reversed(runs) if _program(run) == _program(target))
        if oldest is not target:
            output = free_name("cmp", is_free)
            sides = f"{shlex.quote(oldest.path)} {shlex.quote(target.path)}"
            yield f"whence compare {sides} -o {output}"
            return
    if len(runs) == 1 and runs[0].command and not contents.comparisons:
        output = shlex.quote(free_name(f"{runs[0].path}-2", is_free))
        yield f"whence run -o {output} -- {shlex.join(runs[0].command)}"


def _program(run: FoundRun) -> tuple[str, ...]:
    """What tells runs of one program from those of others: the words before its options."""
    return tuple(itertools.takewhile(lambda word: not word.startswith("-"), run.command))
