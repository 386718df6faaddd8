"""Public function that writes a script for a finding; `finding.py`, which loads much, does the
work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whence.workflows.saved import AnyComparison, AnyPath

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.results import Reproduction


def repro(
    comparison: AnyComparison,
    output: AnyPath,
    *,
    finding: int = 1,
    force: bool = False,
    run: bool = True,
    model: str | Module | Callable[[], Module] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Write `repro.py` and `repro.safetensors` into `output`: one script that shows a finding of a
    comparison, and a pytest test.

    comparison: a folder that `compare` wrote, or what it returned; the runs must still be
    where they were. finding: its number, from 1. run: run the script both ways afterwards. model:
    as `compare` takes it, where no program of the reference is usable. tell: called with what is
    done next. Raises UsageError when there is no such finding, ReplayRefused with the reason when
    it cannot be run again, OutputExists, UnreadableRun, StoreFailed.
    """
    from whence.workflows.repro.finding import reproduce

    return reproduce(comparison, output, finding, force, run, model, tell)
