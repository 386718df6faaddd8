"""Checks that the ranks of one run agree where they must."""

from __future__ import annotations

import os

from whence.results import RankReport


def ranks(run: str | os.PathLike[str]) -> RankReport:
    """Check the ranks of one run: copies of parameters, gradients and states, the order of
    collectives, rows and random numbers, hyper-parameters. Statistics are enough.

    run: a run folder, also of a job that hangs or was killed. Raises UnreadableRun when it cannot
    be read.
    """
    from whence.comparison.ranks.report import report
    from whence.readers.opening import open_run

    return report(open_run(os.fspath(run)))
