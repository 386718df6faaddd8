"""Compares two runs of statistics step by step and finds where two trainings diverge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whence.errors import UsageError
from whence.results import Diverged
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.workflows.diverge.figures import RunFigures


def diverge(
    reference: AnyPath,
    target: AnyPath,
    *,
    repeat: Sequence[AnyPath] = (),
) -> Diverged:
    """Find the first step, and the place in it, where two trainings differ by more than noise.

    reference, target: runs of the same program; statistics (`keep="stats"`) are enough. repeat:
    further runs of the reference that differ from it in a way known to be harmless (other threads,
    other kernels); what they differ by is noise. Raises UnreadableRun, and UsageError where the
    runs have no step in common.
    """
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run
    from whence.workflows.diverge.answer import Answer, extent
    from whence.workflows.diverge.distances import distances, tested
    from whence.workflows.diverge.figures import Names, read_figures
    from whence.workflows.diverge.pair import Pair
    from whence.workflows.diverge.sizes import drift_of

    paths = [os.fspath(p) for p in (reference, target, *repeat)]
    names = Names()

    def figures(path: str) -> RunFigures:
        return read_figures(with_figures(open_run(path)), names)

    looked_at = tested(figures(paths[0]), names)
    repetitions = [
        drift_of(distances(looked_at, figures(p), names), looked_at, names) for p in paths[2:]
    ]
    pair = Pair(looked_at, figures(paths[1]), names, repetitions)
    if not pair.common.any():
        raise UsageError(
            f"{paths[0]} and {paths[1]} have no step in common: they have "
            f"{extent(looked_at.steps)} and {extent(pair.target.steps)}; capture the same steps "
            "(--steps, --every)"
        )
    return Answer(pair, repetitions, paths).result()
