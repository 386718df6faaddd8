"""What `whence repro` answers: what was written, and what it said when it was run."""

from __future__ import annotations

from whence.report.tables import clean
from whence.results import Reproduction

_SHOWN = 4


def reproduction(made: Reproduction) -> str:
    """A few lines: the operators, how both sides ended, the file."""
    names = ", ".join(made.operators[:_SHOWN]) + (
        f" and {len(made.operators) - _SHOWN} more" if len(made.operators) > _SHOWN else ""
    )
    head = {True: "REPRODUCED", False: "NOT REPRODUCED", None: "WRITTEN"}[made.holds]
    lines = [
        f"{head:<18} {made.finding}   {names or 'no operator'}",
        f"  {'outcome':<16} {made.sentence}",
    ]
    lines += [f"  {'' if k else 'note':<16} {note}" for k, note in enumerate(made.notes)]
    for side, said in made.seen.items():
        lines += [
            f"  {side if not k else '':<16} {line}" for k, line in enumerate(said.splitlines())
        ]
    lines.append(f"written to {made.path} in {made.seconds:.1f} s")
    return "\n".join(clean(line) for line in lines) + "\n"
