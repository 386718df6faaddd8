"""What a run lacks: files that no reader read, truncated files, absent ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from whence.records.marks import STOPPED
from whence.records.observed import observed
from whence.records.run import Run


class Lack(StrEnum):
    """Kinds of missing parts of a run."""

    UNREAD = "unread"
    """A file that may hold tensors, and that no reader read."""
    DAMAGED = "damaged"
    """What is there and cannot be read."""
    CUT = "cut"
    """A journal, an index or a process that ended before its end."""
    RANK = "rank"
    """A process of the recorded world size that left nothing."""
    RUNNING = "running"
    """A run that is still being written."""
    ABSENT = "absent"
    """A file that the other run has, whose other files both have."""
    FOREIGN = "foreign"
    """Elements that are not those that the journal names."""
    WATCHED = "watched"
    """The program as it runs without a capture: this one changed it, or may have."""


class Missing(msgspec.Struct, frozen=True):
    """One missing part of a run.

    where: the file, rank or step, as a path relative to the run. text: one sentence that says what
    is missing, and what to do.
    """

    kind: Lack
    where: str
    text: str


def missing_of(run: Run) -> Sequence[Missing]:
    """Returns what a run lacks, () for a complete one. For a run without `missing` it is derived
    from its end and from notes that its capture stopped.
    """
    missing: Sequence[Missing] | None = getattr(run, "missing", None)
    return missing if missing is not None else ends_of(run)


def files_of(run: Run) -> Mapping[str, bool]:
    """Returns the files of a folder that a dump was read from, or that were left unread, relative
    to it; for each, whether it may hold a tensor.
    """
    files: Mapping[str, bool] = getattr(run, "files", {})
    return files


def ends_of(run: Run) -> tuple[Missing, ...]:
    """Returns how a run ended early: why its capture stopped before its program, or its unclean
    end; and whether its capture changed the program.
    """
    stopped = [
        Missing(
            Lack.CUT,
            "",
            f"the capture stopped before its program ended ({note.text}): what came later was not "
            "recorded; remove the cause, and capture again",
        )
        for note in run.notes
        if note.kind == STOPPED
    ]
    if not stopped and run.ended:
        stopped = [Missing(Lack.CUT, "", run.ended)]
    return (*stopped, *watched(run))


def watched(run: Run) -> tuple[Missing, ...]:
    """Returns the statement that a capture changed the program, or may have."""
    seen = observed(run)
    return (Missing(Lack.WATCHED, "", seen.words),) if seen and seen.is_doubt else ()
