"""The answer of `whence repro`: the file it wrote, and the file's output when it was run."""

from __future__ import annotations

from whence.report.document import Document, answering
from whence.report.tables import listed
from whence.results import Reproduction

_SHOWN = 4


@answering
def reproduction(result: Reproduction) -> Document:
    """A few lines: the operators, how both sides ended, the file."""
    head = {True: "REPRODUCED", False: "NOT REPRODUCED", None: "WRITTEN"}[result.holds]
    yield head, f"{result.finding}   {listed(result.operators, _SHOWN) or 'no operator'}"
    yield "  outcome", result.sentence
    yield "  note", result.notes
    yield from ((f"  {side}", printed.splitlines()) for side, printed in result.seen.items())
    yield f"written to {result.path} in {result.seconds:.1f} s"
