"""Is whence silent about a training spread over ranks, and does it name what ranks do wrong?

    python benchmarks/training_ranks.py [--clean | --faults] [--only REGEX] [--json FILE] [-v]

A small decoder trains three steps, on one rank and over ranks of gloo on the CPU: data parallel
(DDP, FSDP2, FSDP1, by hand), tensor and sequence parallel (DTensors, by hand), expert parallel
(gathered, all to all), pipeline (by hand, GPipe, 1F1B), data by tensor parallel, and FSDP2 with TP.
A clean run on 2 and 4 ranks against one rank must be `same` (FSDP1, which is not followed, is
`undecided`), and its parameters after the training must be bitwise those without a capture. A
planted fault must be the first finding, at its place and with its cause: "named"; "placed" is at
its place without the cause, "wrong" elsewhere, "missed" where the answer is `same`. Faults marked *
were planted after the rules were written.

Exit code 1 where a clean run is not `same`, is changed by its capture, or something crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cases import CLEAN, FAULT, HELD_OUT, Case, main
from _training_ranks import layouts
from _training_ranks.faults import Fault, faults
from _training_ranks.launch import captured, parameters
from _training_ranks.layouts import LAYOUTS, ON_FOUR, Training
from _training_ranks.more_faults import more_faults
from _training_ranks.more_layouts import MORE_LAYOUTS

import whence

Make = Callable[[], Training]
_ALL = {**LAYOUTS, **MORE_LAYOUTS}


class References:
    """Runs of one rank, each captured once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, make: Make) -> Path:
        """The run of this training."""
        path = self._folder / make.__name__
        return path if path.exists() else captured(make, path, 1)


def clean(name: str, ranks: int, references: References, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    make = _ALL[name]
    bare, seen = parameters(make, ranks, None), parameters(make, ranks, folder)
    result = whence.compare(references.of(getattr(make, "reference", layouts.one)), folder)
    answer = str(result.status) if bare == seen else "changed by the capture"
    return {"answer": answer, **_told(result)}


def planted(fault: Fault, references: References, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    captured(fault.make, folder, fault.ranks)
    result = whence.compare(references.of(fault.reference), folder)
    return {"answer": fault.answer(result), **_told(result)}


def _told(result: Any) -> dict[str, Any]:
    return {
        "status": str(result.status),
        "headline": result.headline,
        "findings": [f"{f.name} ({f.phase or 'forward'}, step {f.step})" for f in result.findings],
        "sentences": [f.sentence for f in result.findings],
    }


def cases(folder: Path) -> Iterator[Case]:
    """Clean runs, then planted faults."""
    references = References(folder)
    for name in _ALL:
        for ranks in (4,) if name in ON_FOUR else (2, 4):
            run = partial(clean, name, ranks, references)
            yield Case(CLEAN, f"{name} on {ranks} ranks", run)
    for fault in (*faults(), *more_faults()):
        run = partial(planted, fault, references)
        if fault.held_out:
            yield Case(HELD_OUT, f"{fault.title} *", run)
        else:
            yield Case(FAULT, fault.title, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(__doc__, cases)
