"""Writes the script of a finding and runs it both ways."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whence import disk, extras
from whence.errors import (
    ElementsMissing,
    OutputExists,
    ReplayRefused,
    StoreFailed,
    UsageError,
)
from whence.records.marks import was_compiled
from whence.regular_files import is_regular
from whence.results import Comparison, Finding, Reproduction
from whence.workflows.repro.case import choose_case, describe, executed_piece
from whence.workflows.repro.subject import NothingToRun, open_subject
from whence.workflows.repro.warm_interpreter import BothWays

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.replay.export.script import Case

_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")


def reproduce(
    comparison: str | os.PathLike[str] | Comparison,
    output: str | os.PathLike[str],
    number: int,
    force: bool,
    run: bool,
    model: str | Module | Callable[[], Module] | None,
    tell: Callable[[str], None],
) -> Reproduction:
    """As `whence.repro`. number: of the finding."""
    from whence.workflows.saved import load_comparison

    began = time.monotonic()
    compared = comparison if isinstance(comparison, Comparison) else load_comparison(comparison)
    named = f"{compared.reference} against {compared.target}"
    if not isinstance(comparison, Comparison):
        named = os.fspath(comparison)
    finding = _finding(compared, number, named)
    folder = Path(output)
    _check(folder, force)
    extras.needed("torch", "a repro, which runs operators of torch,")
    both_ways: BothWays | None = None
    try:
        tell("reading the runs")
        subject = open_subject(compared, finding, model)
        if run:
            both_ways = BothWays(_COMPILER if was_compiled(subject.target_call) else ())
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
    try:
        disk.make_folders(folder)
        # the script last: it reads the tensors
        disk.write_together(folder, {FILES[1]: save(tensors), FILES[0]: text})
    except OSError as error:
        raise StoreFailed(
            f"cannot write the script to {folder}: {error.strerror or error}"
        ) from error
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
