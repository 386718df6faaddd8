"""What became of a kernel under fuzz."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class FaultKind(Word):
    """What is wrong with a call of a kernel."""

    WRONG = "wrong"
    NOT_FINITE = "not finite"
    SHAPE = "another shape"
    RAISES = "raises"
    WRITES_INPUT = "writes its input"
    WRITES_OUTSIDE = "writes outside"
    KEEPS_STATE = "keeps state"
    """Right when it is called first, and wrong when it is called again."""


class KernelFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault, on the smallest input that shows it. case: that input in words; first: the one that
    showed it first. cases: how many failed so. words: how far off; output, index, got, exact: the
    worst element. test: file that fails on it, "" where none was written.
    """

    kind: FaultKind
    case: str
    first: str
    cases: int
    words: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: float | None = None
    exact: float | None = None
    test: str = ""


class Fuzzed(Described, msgspec.Struct, frozen=True):
    """The answer. cases: that were judged; skipped: that the reference does not take; refused: that
    the kernel refuses, with the first reason. not_repeated: cases of which a second call gave other
    bits, within rounding.
    """

    kernel: str
    reference: str
    faults: tuple[KernelFault, ...]
    cases: int
    skipped: int = 0
    refused: int = 0
    refusal: str = ""
    not_repeated: int = 0
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """different: it has a fault; undecided: no case was judged."""
        if self.faults:
            return Status.DIFFERENT
        return Status.SAME if self.cases else Status.UNDECIDED
