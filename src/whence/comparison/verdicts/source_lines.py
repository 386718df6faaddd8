"""Where the user's code calls what a verdict is about: the lines that a capture keeps with its
programs.
"""

from __future__ import annotations

from collections.abc import Mapping

from whence.comparison.paired_runs import PairedRuns
from whence.records import Call, Run
from whence.results import GUILTY, Verdict


def of_call(run: Run, below: Mapping[int, list[int]], call: Call) -> str:
    """Where the code of the call above calls this one, "" where that is not known."""
    if call.parent < 0:
        return ""
    program = run.programs.get(run.calls[call.parent].program)
    if program is None or not program.call_lines:
        return ""
    place = below[call.parent].index(call.id)
    return next(
        (
            line
            for (k, _), line in zip(program.calls, program.call_lines, strict=True)
            if k == place
        ),
        "",
    )


def placed(
    verdicts: Mapping[tuple[int, int], Verdict], paired: PairedRuns
) -> dict[tuple[int, int], Verdict]:
    """The verdicts, with the line that calls what is at fault, where no operator inside it has
    one.
    """
    out = dict(verdicts)
    for key, verdict in verdicts.items():
        if (
            verdict.verdict not in GUILTY
            or verdict.source
            or key[1] >= 0
            or verdict.where
            or verdict.named >= 0
        ):
            continue
        pair = paired.plan.pairs[verdict.pair]
        broken = verdict.side == "reference"
        run: Run = paired.reference if broken else paired.target
        below = paired.kids if broken else paired.target_kids
        call = run.calls[pair.reference if broken else pair.target]
        if call.kind == "module" and (line := of_call(run, below, call)):
            out[key] = verdict.replace(source=line)
    return out
