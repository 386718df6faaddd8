"""What a difference means, and the operator at fault."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

import msgspec

from whence.display import Described, Displayed
from whence.records.training import GRADIENTS, LOSS


class Word(StrEnum):
    """A word of a closed list, which equals, prints and is written as its text.

    A word that the list lacks, as a newer version may write it, is taken as it stands.
    """

    @classmethod
    def _missing_(cls, value: object) -> Word | None:
        if not isinstance(value, str):
            return None
        word = str.__new__(cls, value)
        word._name_, word._value_ = value, value
        return word

    def __reduce_ex__(self, protocol: object) -> tuple[type[Word], tuple[str]]:
        # Python before 3.11.4 looks an unknown word up by its name.
        return type(self), (str.__str__(self),)

    __repr__ = str.__repr__  # a struct shows its fields as it did when they were plain text


class VerdictKind(Word):
    """What the difference of a region means, in the order in which reports list them."""

    IDENTICAL = "identical"
    NOISE = "noise"
    DECLARED = "declared"
    OTHER_FORM = "other-form"
    INHERITED = "inherited"
    AMPLIFIED = "amplified"
    PRECISION = "precision"
    INTRODUCED = "introduced"
    PARAM_DIFF = "param-diff"
    STRUCTURAL = "structural"
    NONDETERMINISTIC = "nondeterministic"
    INCOMPARABLE = "incomparable"
    UNDETERMINED = "undetermined"

    @property
    def severity(self) -> int:
        """How bad it is, as a number to order verdicts by. Raises ValueError for an unknown one."""
        return _BY_SEVERITY.index(self)


_BY_SEVERITY = (
    VerdictKind.IDENTICAL,
    VerdictKind.NOISE,
    VerdictKind.DECLARED,
    VerdictKind.OTHER_FORM,
    VerdictKind.INHERITED,
    VerdictKind.AMPLIFIED,
    VerdictKind.PRECISION,
    VerdictKind.NONDETERMINISTIC,
    VerdictKind.UNDETERMINED,
    VerdictKind.INCOMPARABLE,
    VerdictKind.STRUCTURAL,
    VerdictKind.PARAM_DIFF,
    VerdictKind.INTRODUCED,
)
VERDICTS = tuple(VerdictKind)
GUILTY = (VerdictKind.INTRODUCED, VerdictKind.PARAM_DIFF, VerdictKind.STRUCTURAL)
"""Verdicts that can make a finding."""


class Evidence(Word):
    """What a verdict, or a whole comparison, is based on."""

    NONE = ""
    REPLAY = "replay"
    TWO_DUMPS = "two dumps"
    THREE_WAY = "three-way"
    STATISTICS = "statistics"
    TEXT = "text"
    PROGRAM = "program"


class Confidence(Word):
    """How sure a verdict is."""

    NONE = ""
    SUSPECT = "suspect"
    LIKELY = "likely"
    CERTAIN = "certain"


class CauseKind(Word):
    """Why an operator is at fault."""

    UNKNOWN = ""
    KERNEL = "kernel"
    SEMANTIC = "semantic"
    PARAMETER = "parameter"
    STRUCTURAL = "structural"
    INPUT = "input"


class Status(Word):
    """The answer of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


def severity(verdict: str) -> int:
    """How bad a verdict is, as a number to order them by."""
    return VerdictKind(verdict).severity


def _as_words(struct: Verdict | Finding) -> None:
    """Turn plain text in the fields of closed lists into their members.

    An omitted field is recognised by identity when it is written, so "" has to be the member.
    """
    for name, kind in _WORDS:
        value = getattr(struct, name)
        if type(value) is not kind:
            msgspec.structs.force_setattr(struct, name, kind(value))


_WORDS: tuple[tuple[str, type[Word]], ...] = (
    ("verdict", VerdictKind),
    ("evidence", Evidence),
    ("confidence", Confidence),
    ("cause", CauseKind),
)


class Verdict(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """What the differences of one region mean, and the noise budget that was applied.

    pair: index into Plan.pairs. stretch: -1 for the call as a whole (a leaf), else the stretch of a
    container. score: error in units of what is allowed (> 1 is flagged); None when it was not
    judged by a number. numbers: what the sentence is based on (e_in, e_out, rho, z, floor, ...).
    where: the module below the call that it is about, "" for the call itself. named: the call of
    that name, -1 where it is none. operator: the operator inside that it is due to
    ("aten.mul.Tensor"), "" where that is not known. side: whose error it is, "target" or
    "reference". source: where the code of that side calls the operator ("file:line"), "" where that
    is not known. reason: what the target's code does otherwise, in words that every call with the
    same change shares ("eps is 1e-05 in the reference, 0.01 in the target"); "" where unknown.
    """

    pair: int
    verdict: VerdictKind
    stretch: int = -1
    evidence: Evidence = Evidence.NONE
    confidence: Confidence = Confidence.NONE
    score: float | None = None
    cause: CauseKind = CauseKind.UNKNOWN
    numbers: dict[str, float | None] = {}
    sentence: str = ""
    slot: str = ""
    where: str = ""
    operator: str = ""
    side: str = "target"
    named: int = -1
    source: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        _as_words(self)

    def replace(self, **changes: Any) -> Self:
        """The same verdict with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def withdrawn(self, verdict: VerdictKind, sentence: str, **changes: Any) -> Self:
        """The verdict of a region that is not a fault after all, or of which that cannot be
        told.
        """
        return self.replace(
            verdict=verdict,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            score=None,
            sentence=sentence,
            **changes,
        )


class Finding(Displayed, msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator at fault. Siblings with one signature are one finding; `also` names the others.

    operator: which operator inside it ("aten.mul.Tensor"), "" where that is not known. side: whose
    error it is. phase: of an operator that is not of the forward pass ("backward", "recompute",
    "optimizer"). printed_at: line of the tensor in the texts of the reference and of the target,
    where both are logs ("ref.log:2354").
    """

    name: str
    op_type: str
    cause: CauseKind
    verdict: VerdictKind
    confidence: Confidence
    step: int
    rank: int
    evidence: Evidence
    numbers: dict[str, float | None] = {}
    sentence: str = ""
    root: str = ""
    occurrence: int = 0
    slot: str = ""
    source: str = ""
    also: tuple[str, ...] = ()
    worst_index: tuple[int, ...] | None = None
    worst_reference: float | None = None
    worst_target: float | None = None
    pair: int = -1
    operator: str = ""
    side: str = "target"
    phase: str = ""
    printed_at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _as_words(self)

    @property
    def is_of_module(self) -> bool:
        """Is it about what a module returns? Else it is about another part of a training step: a
        loss, a gradient, a step of an optimiser.
        """
        return not self.phase and self.op_type not in (LOSS, GRADIENTS)
