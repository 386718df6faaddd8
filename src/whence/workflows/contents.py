"""What lies in the working folder and one folder below: the runs, the comparisons, and the last
comparison made here.

It has to answer at once, wherever it is called: it looks at a bounded number of names, opens no run
and reads one small file of each that it tells of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from whence.results import Contents, FoundComparison, FoundRun, NextStep
from whence.workflows.latest import last_known

_MOST_NAMES = 4000
_MOST_READ = 8
_MOST_BYTES = 4 << 20
_DEPTH = 2
_STATES = ("same", "different", "undecided")


def contents(folder: str | os.PathLike[str] = ".") -> Contents:
    """What lies in `folder`; paths are relative to it. Never raises for what lies there. The last
    comparison is that of the working folder.
    """
    top = Path(folder)
    budget = [_MOST_NAMES]
    runs: list[tuple[float, str]] = []
    comparisons: list[tuple[float, str]] = []
    for kind, path in _found(top, "", _DEPTH, budget):
        with contextlib.suppress(OSError):
            file = top / path / ("run.json" if kind == "run" else "summary.json")
            (runs if kind == "run" else comparisons).append((file.stat().st_mtime, path))
    read_runs = [_run(top, path, at) for at, path in sorted(runs, reverse=True)[:_MOST_READ]]
    read = [
        _comparison(top, path, at) for at, path in sorted(comparisons, reverse=True)[:_MOST_READ]
    ]
    return Contents(
        str(top.absolute()),
        tuple(run for run in read_runs if run is not None),
        tuple(comparison for comparison in read if comparison is not None),
        last_known(),
        max(0, len(runs) - _MOST_READ),
        max(0, len(comparisons) - _MOST_READ),
        is_cut=budget[0] <= 0,
    )


def _found(top: Path, below: str, depth: int, budget: list[int]) -> Iterator[tuple[str, str]]:
    """("run" or "comparison", path) of the folders in `top / below`; what lies in them is not
    looked at.
    """
    inner = []
    try:
        with os.scandir(top / below) as entries:
            for entry in entries:
                budget[0] -= 1
                if budget[0] <= 0:
                    break
                if not entry.name.startswith(".") and entry.is_dir():
                    inner.append(f"{below}/{entry.name}" if below else entry.name)
    except OSError:
        return
    for path in sorted(inner):
        place = top / path
        if (place / "run.json").is_file():
            yield "run", path
        elif (place / "summary.json").is_file():
            yield "comparison", path
        elif depth > 1 and budget[0] > 0 and not (place / "pyvenv.cfg").exists():
            yield from _found(top, path, depth - 1, budget)


def _run(top: Path, path: str, at: float) -> FoundRun | None:
    fields = _read(top / path / "run.json")
    if fields.get("kind") != "whence":
        return None
    command, settings = fields.get("command"), fields.get("settings")
    words = command if isinstance(command, list) else []
    code = settings.get("exit_code", 0) if isinstance(settings, dict) else 0
    return FoundRun(path, tuple(map(str, words)), code if isinstance(code, int) else 0, _age(at))


def _comparison(top: Path, path: str, at: float) -> FoundComparison | None:
    fields = _read(top / path / "summary.json")
    if fields.get("status") not in _STATES:
        return None
    findings = fields.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else {}
    steps: tuple[NextStep, ...] = ()
    with contextlib.suppress(msgspec.ValidationError):
        steps = msgspec.convert(fields.get("next", ()), tuple[NextStep, ...])
    return FoundComparison(
        path,
        fields["status"],
        str(fields.get("reference", "")),
        str(fields.get("target", "")),
        _named(first) if isinstance(first, dict) else "",
        tuple(step.about(path).command for step in steps if not step.fill_in),
        _age(at),
    )


def _named(finding: dict[str, Any]) -> str:
    kind = finding.get("op_type")
    return f"{finding.get('name', '')}{f' ({kind})' if kind else ''}"


def _read(file: Path) -> dict[str, Any]:
    """The object in a small JSON file; {} where there is none."""
    with contextlib.suppress(OSError, ValueError):
        if file.stat().st_size <= _MOST_BYTES:
            fields = orjson.loads(file.read_bytes())
            return fields if isinstance(fields, dict) else {}
    return {}


def _age(at: float) -> float:
    return max(0.0, time.time() - at)
