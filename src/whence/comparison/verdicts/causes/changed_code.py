"""The lines in which the code of a module differs between the runs, where both files are on this
machine: two installed releases of a library, two worktrees.

A path comes from a run, which nobody vouches for: only Python files are read, nothing of them is
run, and two lines are shown.
"""

from __future__ import annotations

import ast
import difflib
import re
import socket
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from whence.comparison.paired_runs import PairedRuns
from whence.display import listed
from whence.records import Call, Run
from whence.results import Verdict

_PLACE = re.compile(r"(?P<file>.+\.py):(?P<line>\d{1,7})")
_LARGEST = 4_000_000  # bytes of a file of code
_WIDEST = 100  # characters of a line
_SHOWN = 2
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


class _Function(NamedTuple):
    """A function of a file: its lines, without its docstring, and the number of the first."""

    file: Path
    first: int
    name: str
    lines: tuple[str, ...]


class ChangedCode:
    """Compares the functions that guilty calls of the two runs come from."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        runs = (paired.reference, paired.target)
        self._here = all(r.info.host in ("", socket.gethostname()) for r in runs)

    def words(self, verdict: Verdict) -> str:
        """Which lines differ, in words; "" where the code is one file, or is not here."""
        if not self._here or verdict.side == "reference":
            return ""
        pair = self._paired.plan.pairs[verdict.pair]
        paired = self._paired
        stated = _place(verdict.source, paired.target)
        places = [stated] if stated else _places(paired.target, paired.target.calls[pair.target])
        references = list(_places(paired.reference, paired.calls[pair.reference]))
        for target in places:
            for place in references:
                if place[0] != target[0] and _within(place[0]) == _within(target[0]):
                    own = _function_of(*target)
                    if own is not None and (words := _differing(place, own)):
                        return words
        return ""


def _places(run: Run, call: Call) -> Iterator[tuple[Path, int]]:
    """Where the code of a call, and of the call around it, calls what it calls."""
    parent = run.calls[call.parent] if call.parent >= 0 else None
    for owner in filter(None, (call, parent)):
        program = run.programs.get(owner.program)
        if program is not None:
            for line in dict.fromkeys((*program.lines, *program.call_lines)):
                if (place := _place(line, run)) is not None:
                    yield place
    if (place := _place(call.source, run)) is not None:
        yield place


def _place(source: str, run: Run) -> tuple[Path, int] | None:
    match = _PLACE.fullmatch(source)
    if match is None:
        return None
    return (Path(run.info.cwd) / match["file"]), int(match["line"])


def _within(path: Path) -> str:
    """A path below the folder that packages are installed in; of any other file its name."""
    text = path.as_posix()
    installed = _INSTALLED.match(text)
    return text[installed.end() :] if installed else path.name


def _function_of(file: Path, line: int) -> _Function | None:
    """The function around a line."""
    try:
        status = file.stat()
        if file.suffix != ".py" or status.st_size > _LARGEST:
            return None
    except (OSError, ValueError):
        return None
    tree = _tree(file, status.st_mtime_ns)
    if tree is None:
        return None
    text, parsed = tree
    around = [
        node
        for node in ast.walk(parsed)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return None
    node = max(around, key=lambda node: node.lineno)
    lines = list(text[node.lineno - 1 : node.end_lineno])
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        for at in range(first.lineno, (first.end_lineno or first.lineno) + 1):
            lines[at - node.lineno] = ""
    return _Function(file, node.lineno, node.name, tuple(lines))


@lru_cache(maxsize=16)
def _tree(file: Path, changed: int) -> tuple[tuple[str, ...], ast.Module] | None:
    """The lines of a file and what they are. changed: when it was last written."""
    try:
        text = file.read_text(encoding="utf-8")
        return tuple(text.splitlines()), ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _differing(place: tuple[Path, int], target: _Function) -> str:
    """What differs between the function at a place of the reference and its namesake of the
    target.
    """
    reference = _function_of(*place)
    if reference is None or reference.name != target.name:
        return ""
    left, right = ([line.strip() for line in f.lines] for f in (reference, target))
    changes = [
        opcode
        for opcode in difflib.SequenceMatcher(a=left, b=right, autojunk=False).get_opcodes()
        if opcode[0] != "equal"
    ]
    shown = []
    for _, a0, a1, b0, b1 in changes:
        old, new = (
            [line for line in lines if line and not line.startswith("#")]
            for lines in (left[a0:a1], right[b0:b1])
        )
        if old or new:
            shown.append(f"line {target.first + b0}: {_code(new)}, in the reference {_code(old)}")
    if not shown:
        return ""
    versions = _releases(reference.file, target.file)
    where = f"{_within(target.file)}{versions}"
    return f"the code differs in {where}, {listed(shown, _SHOWN, '; ')}"


def _code(lines: Sequence[str]) -> str:
    if not lines:
        return "nothing"
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ..."
    return f"`{text[:_WIDEST]}`"


def _releases(reference: Path, target: Path) -> str:
    """ " (library 1.2 against 1.3)" for files of an installed package."""
    names = [_release(path) for path in (reference, target)]
    if not all(names) or names[0] == names[1]:
        return ""
    package = _within(target).partition("/")[0]
    return f" ({package} {names[0]} against {names[1]})"


def _release(path: Path) -> str:
    installed = _INSTALLED.match(path.as_posix())
    if installed is None:
        return ""
    package = _within(path).partition("/")[0].removesuffix(".py")
    for info in sorted(Path(installed[0]).glob(f"{package}-*.dist-info")):
        return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""
