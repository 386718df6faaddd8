"""Check what the ranks of one run must agree in.

\b
    whence run -o runs/ddp -- torchrun --nproc-per-node 2 train.py
    whence ranks runs/ddp

One run is enough, also of a job that hangs or was killed, also with --keep stats. Copies of
parameters, buffers, gradients and states of optimizers are compared bit by bit between ranks; the
order, kinds and sizes of collectives over the ranks of each group; rows and random numbers;
hyper-parameters. The first place where ranks part is named, with its cause where the run shows it.

Exit code: 0 when nothing parts, also with warnings, 1 when something does, 2 when that cannot be
told or the run has one rank alone, 3 when it cannot be read.
"""

from __future__ import annotations

from whence.cli import _answers
from whence.cli._options import TEXT_OR_JSON, argument, verb


@verb(
    argument("run", "RUN"),
    TEXT_OR_JSON,
)
def command(run: str, form: str) -> int:
    """Words -> `api.ranks` -> report -> exit code."""
    from whence import api
    from whence.report.ranks import ranks_text
    from whence.results import RankVerdict

    result = api.ranks(run)
    _answers.told(result, form, ranks_text)
    if result.verdict == RankVerdict.FAULT:
        return 1
    return 2 if result.verdict in (RankVerdict.UNKNOWN, RankVerdict.NOTHING) else 0
