"""What `whence repro` answers: what was written, and what it said when it was run."""

from __future__ import annotations

from whence.report.tables import clean
from whence.results import Reproduction

_SHOWN = 4


def reproduction(result: Reproduction) -> str:
    """A few lines: the operators, how both sides ended, the file."""
    names = ", ".join(result.operators[:_SHOWN]) + (
        f" and {len(result.operators) - _SHOWN} more" if len(result.operators) > _SHOWN else ""
    )
    head = {True: "REPRODUCED", False: "NOT REPRODUCED", None: "WRITTEN"}[result.holds]
    lines = [
        f"{head:<18} {result.finding}   {names or 'no operator'}",
        f"  {'outcome':<16} {result.sentence}",
    ]
    lines += [f"  {'' if k else 'note':<16} {note}" for k, note in enumerate(result.notes)]
    for side, printed in result.seen.items():
        lines += [
            f"  {side if not k else '':<16} {line}" for k, line in enumerate(printed.splitlines())
        ]
    lines.append(f"written to {result.path} in {result.seconds:.1f} s")
    return "\n".join(clean(line) for line in lines) + "\n"
