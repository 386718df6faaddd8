"""What lies in a folder: runs, comparisons, and the last comparison that was made there."""

from __future__ import annotations

import msgspec


class FoundRun(msgspec.Struct, frozen=True):
    """A run of whence. command: that made it, () where it was captured in code. age_s: since it was
    written.
    """

    path: str
    command: tuple[str, ...]
    exit_code: int
    age_s: float


class FoundComparison(msgspec.Struct, frozen=True):
    """A comparison that was written with -o. finding: name and class of the first, "" without.
    next: commands that take the answer further.
    """

    path: str
    status: str
    reference: str
    target: str
    finding: str
    next: tuple[str, ...]
    age_s: float


class LastComparison(msgspec.Struct, frozen=True):
    """The comparison that commands take when they are given none. path: where it was written to, ""
    where it was not. status, reference, target: "" where they are not known.
    """

    path: str
    status: str
    reference: str
    target: str
    age_s: float


class Contents(msgspec.Struct, frozen=True):
    """What was found in `folder`, the newest first. more_runs, more_comparisons: found and not
    read. is_cut: the folder holds more than was looked at.
    """

    folder: str
    runs: tuple[FoundRun, ...]
    comparisons: tuple[FoundComparison, ...]
    last: LastComparison | None
    more_runs: int = 0
    more_comparisons: int = 0
    is_cut: bool = False
