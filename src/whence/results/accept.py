"""Whether an expectation may be renewed."""

from __future__ import annotations

from typing import Any

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class AcceptKind(Word):
    """What a moved expectation means, the worst last."""

    UNCHANGED = "unchanged"
    NOISE = "noise"
    """Both values are what rounding makes of the exact result."""
    CLOSER = "closer"
    """The new value is nearer to the exact result, and the old one is explained."""
    CANNOT_TELL = "cannot tell"
    CHANGED = "changed"
    """The change is larger than every way of rounding: the program computes something else."""
    FAULT = "fault"
    """The new value is not what the program computes in float64, whatever the rounding."""
    IGNORES_INPUT = "ignores an input"


ACCEPTED = (AcceptKind.UNCHANGED, AcceptKind.NOISE, AcceptKind.CLOSER)
STATUS = dict.fromkeys(ACCEPTED, Status.SAME) | {AcceptKind.CANNOT_TELL: Status.UNDECIDED}


class JudgedValue(msgspec.Struct, frozen=True, omit_defaults=True):
    """One expectation. name: of the value, "" for the only one. size: elements. index: of the worst
    element (of a curve its step), "" of a scalar; expected, actual, exact: there, None where there
    is none. change: relative 2-norm of the difference. new_times, old_times: distance of both from
    the centre of the band, in standard deviations of rounding, at the worst element; limit: that a
    correct value stays below. tolerance: absolute, which the noise justifies. words: why, in a
    sentence. decides: what would decide it.
    """

    name: str
    verdict: AcceptKind
    size: int = 1
    index: str = ""
    expected: float | None = None
    actual: float | None = None
    exact: float | None = None
    change: float | None = None
    new_times: float | None = None
    old_times: float | None = None
    limit: float | None = None
    tolerance: float | None = None
    relative_tolerance: float | None = None
    words: str = ""
    decides: str = ""


class Acceptance(Described, msgspec.Struct, frozen=True):
    """The answer to "may I renew it?". values: worst first. ways: of rounding that were tried.
    expectation: new values by name, where it may be renewed. sentence: for the pull request.
    written: the file that was renewed, "" for none.
    """

    verdict: AcceptKind
    values: tuple[JudgedValue, ...]
    ways: tuple[str, ...]
    sentence: str
    next: str = ""
    notes: tuple[str, ...] = ()
    written: str = ""
    expectation: dict[str, Any] = {}

    @property
    def status(self) -> Status:
        """same: it may be renewed; different: it may not; undecided."""
        return STATUS.get(self.verdict, Status.DIFFERENT)
