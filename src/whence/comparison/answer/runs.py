"""What an answer says of the two runs themselves, however it was come by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from whence._version import __version__
from whence.align.environment import changed, observer_effects
from whence.comparison.answer.not_there import with_missing
from whence.comparison.options import CompareOptions
from whence.records import Call, Run, marks, missing_of
from whence.results import Comparison, Status

_MAX_ERROR_TEXT = 200  # characters of an exception that are shown


def capture_notes(side: str, run: Run, calls: Sequence[Call]) -> list[str]:
    """What went wrong while a run was captured, beside what it lacks. calls: those that may say
    so.
    """
    out, told = [], {missing.text for missing in missing_of(run)}
    raised = next((c for c in calls if c.error and c.parent == -1), None)
    if raised is not None:
        message = " ".join(raised.error.split())
        out.append(
            f"{raised.module_name} raised in step {raised.step}: "
            f"{message[:_MAX_ERROR_TEXT]}{'...' if message[_MAX_ERROR_TEXT:] else ''}"
        )
    out += changed(run)
    kinds = ("budget", "error", "inside-not-seen")
    out += [n.text for n in run.notes if n.kind in kinds and n.text not in told]
    out += observer_effects(run)
    out += sorted({note for c in calls if (note := marks.hidden_inside(c))})
    return [f"{side}: {sentence}" for sentence in out]


def versions(reference: Run) -> dict[str, str]:
    """Of this package and of the reference's format."""
    return {"whence": __version__, "format": str(reference.info.format)}


def ended(result: Comparison, reference: Run, target: Run, options: CompareOptions) -> Comparison:
    """The end of every route to an answer: what the runs lack, and what to do next."""
    result = with_missing(result, reference, target, options)
    notes = result.notes
    paths = [os.path.realpath(path) for path in (result.reference, result.target) if path]
    if len(paths) == 2 and paths[0] == paths[1] and Path(paths[0]).exists():
        notes = (f"both are one run, compared with itself: {result.reference}", *notes)
    result = msgspec.structs.replace(result, notes=notes)
    if result.status == Status.SAME:
        return result
    from whence.comparison.answer.next_steps import next_steps  # which looks at what the stages say

    return msgspec.structs.replace(result, next=next_steps(result, reference, target))
