"""Writes the script of a finding and runs it both ways.

A written script run in an interpreter of its own, which may load what it needs before the script
is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from whence import disk, extras
from whence.errors import (
    ElementsMissing,
    OutputExists,
    ReplayRefused,
    UsageError,
)
from whence.records.marks import was_compiled
from whence.regular_files import is_regular
from whence.results import Comparison, Finding, Reproduction
from whence.workflows.repro.case import choose_case, describe, executed_piece
from whence.workflows.repro.subject import NothingToRun, open_subject
from whence.workflows.saved import AnyComparison, AnyPath, as_comparison, storing

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.replay.export.script import Case

_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")


def reproduce(
    comparison: AnyComparison,
    output: AnyPath,
    number: int,
    force: bool,
    run: bool,
    model: str | Module | Callable[[], Module] | None,
    tell: Callable[[str], None],
) -> Reproduction:
    """As `whence.repro`. number: of the finding."""

    began = time.monotonic()
    compared = as_comparison(comparison)
    named = f"{compared.reference} against {compared.target}"
    if not isinstance(comparison, Comparison):
        named = os.fspath(comparison)
    finding = _finding(compared, number, named)
    folder = Path(output)
    _check(folder, force)
    extras.needed("torch", "a repro, which runs operators of torch,")
    both_ways: _BothWays | None = None
    try:
        tell("reading the runs")
        subject = open_subject(compared, finding, model)
        if run:
            both_ways = _BothWays(_COMPILER if was_compiled(subject.target_call) else ())
        case, how, notes = choose_case(subject, tell)
        describe(case, subject, number, named, how)
        path = _written(case, folder)
        printed: dict[str, str] = {}
        holds, sentence = None, "not run"
        if both_ways is not None:
            tell("running the script both ways")
            printed, holds, sentence = both_ways.outcome(path, case.default, case.missing)
    except (ReplayRefused, ElementsMissing) as error:
        if isinstance(error, NothingToRun):
            raise ReplayRefused(
                f"finding {number} ({finding.name}) cannot be run again: {error}"
            ) from error
        model_hint = ";\n  or the reference's model: whence repro --model MODULE:FACTORY"
        raise ReplayRefused(
            f"finding {number} ({finding.name}) cannot be run again: {error}\n"
            "  what it takes: a reference captured with its programs and elements (whence run, "
            f"--keep full, not --no-programs){'' if model is not None else model_hint}"
        ) from error
    finally:
        if both_ways is not None:
            both_ways.leave()
    return Reproduction(
        str(path),
        finding.name,
        tuple(s.title for s in executed_piece(case).steps),
        how,
        case.default,
        holds,
        sentence,
        printed,
        tuple(notes),
        time.monotonic() - began,
    )


def _finding(compared: Comparison, number: int, named: str) -> Finding:
    """The finding of this number. Raises UsageError."""
    if not compared.findings:
        raise UsageError(
            f"{named} names no operator at fault (status {compared.status}): there is nothing to "
            "reproduce"
        )
    if not 1 <= number <= len(compared.findings):
        raise UsageError(
            f"{named} has findings 1 to {len(compared.findings)}; there is no finding {number}"
        )
    return compared.findings[number - 1]


def _written(case: Case, folder: Path) -> Path:
    """Write the script and its tensors; returns its path."""
    from whence.replay.export.script import FILES, script
    from whence.replay.export.script_data import save

    text, tensors = script(case)
    with storing(f"write the script to {folder}"):
        disk.make_folders(folder)
        # the script last: it reads the tensors
        disk.write_together(folder, {FILES[1]: save(tensors), FILES[0]: text})
    return folder / FILES[0]


def _check(folder: Path, force: bool) -> None:
    """Raise OutputExists where the script cannot go: what is replaced is an earlier one alone."""
    if folder.is_file():
        raise OutputExists(f"cannot write a script into {folder}: it is a file; choose another -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputExists(
            f"{folder} already holds files; --force writes into it, or choose another -o"
        )
    strange = next((file for file in _of_others(folder)), None)
    if strange is not None:
        raise OutputExists(
            f"{strange} is not of a script that whence wrote, and --force replaces nothing else; "
            "choose another -o"
        )


def _of_others(folder: Path) -> Iterator[Path]:
    """Files of somebody else where the script and its tensors would go."""
    from whence.replay.export.script import FILES, LIMITS

    script, tensors = (folder / name for name in FILES)
    is_ours = is_regular(script) and LIMITS.encode() in script.read_bytes()
    if os.path.lexists(script) and not is_ours:
        yield script
    if os.path.lexists(tensors) and not (is_ours and is_regular(tensors)):
        yield tensors


_LIMIT_S = 300.0  # one run of the script
_LAST_LINES = 5
# Reads the script and its arguments as lines, once the modules are loaded: what follows is as
# `python SCRIPT ARGUMENTS`.
_WAIT = """
import importlib, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
path, *arguments = sys.stdin.readline().rstrip("\\n").split("\\t")
sys.argv = [path, *arguments]
runpy.run_path(path, run_name="__main__")
"""


class _Waiting:
    """An interpreter that loads `modules` now and runs a script later. To be ended by `run` or
    `leave`.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def run(self, path: Path, side: str) -> tuple[bool | None, str]:
        """(did `path --side SIDE` pass, what it said); None where it neither passed nor failed."""
        try:
            printed, errors = self._process.communicate(
                f"{path.absolute()}\t--side\t{side}\n", timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            self.leave()
            return None, f"still running after {_LIMIT_S:.0f} s"
        lines = [line for line in printed.splitlines() if line.strip()]
        if (
            self._process.returncode in (0, 1)
            and lines
            and re.fullmatch(r"(PASS|FAIL) \(\w+\)", lines[-1])
        ):
            return lines[-1].startswith("PASS"), "\n".join(lines[:-1])
        return None, "\n".join(errors.splitlines()[-_LAST_LINES:])

    def leave(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class _BothWays:
    """Runs a script as either side does. heavy: modules that the target's side will load; they are
    loaded while the script is made.
    """

    def __init__(self, heavy: Sequence[str]) -> None:
        self._waiting = {"reference": _Waiting("torch"), "target": _Waiting("torch", *heavy)}

    def leave(self) -> None:
        """End the interpreters, whatever they do."""
        for interpreter in self._waiting.values():
            interpreter.leave()

    def outcome(self, path: Path, default: str, missing: str) -> tuple[dict[str, str], bool, str]:
        """(what each side printed, does the reproduction hold, that in words)."""
        if default == "recorded":
            self._waiting["recorded"] = _Waiting("torch")
            if missing:
                self._waiting.pop("target").leave()
        with ThreadPoolExecutor(len(self._waiting)) as pool:
            results = pool.map(lambda item: item[1].run(path, item[0]), self._waiting.items())
            ended = dict(zip(self._waiting, results))
        words = {
            side: "fails" if passes is False else "passes" if passes else "could not be run"
            for side, (passes, _) in ended.items()
        }
        if default == "recorded":
            rerun = missing or f"run on this machine as the target was it {words['target']}"
            sentence = f"what was recorded {words['recorded']}; {rerun}"
        else:
            sentence = f"{words['target']} as the target runs it"
        holds = ended[default][0] is False and ended["reference"][0] is True
        printed = {side: text for side, (_, text) in ended.items()}
        return printed, holds, f"{sentence}; {words['reference']} as the reference does"
