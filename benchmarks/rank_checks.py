"""Does `whence ranks` find in one run what its ranks do wrong, and nothing in clean ones?

    python benchmarks/rank_checks.py [--clean | --faults] [--only REGEX] [--json FILE] [-v]

The trainings of benchmarks/training_ranks.py, on 2 and 4 ranks of gloo, and some in which ranks
differ rightly (dropout of their own, biases that begin at zero, accumulation under no_sync,
evaluation on the same rows): none may have a finding, warnings count as findings. A planted fault
must be the first finding, with its cause: "named"; "placed" has the place or the cause alone,
"wrong" neither, "missed" no finding. Faults marked * were planted after the rules were written.

Exit code 1 where a clean run has a finding, or something crashes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cases import CLEAN, FAULT, HELD_OUT, Case, main
from _training_ranks import one_run
from _training_ranks.launch import captured
from _training_ranks.layouts import LAYOUTS, ON_FOUR
from _training_ranks.one_run import Make, OneRunFault, faults_of_one_run

import whence
from whence.results import RankReport

_HANGS_S = 45.0
"""A job that has not ended by then hangs, and is killed."""


def clean(make: Make, ranks: int, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    report = whence.ranks(captured(make, folder, ranks))
    return {"answer": "flagged" if report.findings else "silent", **_told(report)}


def planted(fault: OneRunFault, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    with _quiet() if fault.hangs else contextlib.nullcontext():
        captured(fault.make, folder, fault.ranks, _HANGS_S if fault.hangs else None)
    report = whence.ranks(folder)
    return {"answer": fault.answer(report), **_told(report)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a dying process says of its connections is not shown."""
    with Path(os.devnull).open("w") as nothing:
        before = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _told(report: RankReport) -> dict[str, Any]:
    return {
        "status": str(report.verdict),
        "headline": "; ".join(f"{check.kind}: {check.verdict}" for check in report.checks),
        "findings": [f"{f.cause} (step {f.step})" for f in report.findings],
        "sentences": ["; ".join((f.sentence, *f.evidence)) for f in report.findings],
    }


def cases(folder: Path) -> Iterator[Case]:
    """Clean runs, then planted faults."""
    for name, make in {**LAYOUTS, **one_run.CLEAN}.items():
        for ranks in (4,) if name in ON_FOUR else (2, 4):
            if name == "accumulated_ddp" and ranks == 4:
                continue  # no rank would have two rows
            yield Case(CLEAN, f"{name} on {ranks} ranks", partial(clean, make, ranks))
    for fault in faults_of_one_run():
        run = partial(planted, fault)
        if fault.held_out:
            yield Case(HELD_OUT, f"{fault.title} *", run)
        else:
            yield Case(FAULT, fault.title, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(__doc__, cases, "silent")
