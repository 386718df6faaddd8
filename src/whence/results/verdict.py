"""What a difference means, and the operator at fault."""

from __future__ import annotations

import msgspec

from whence.display import Displayed

VERDICTS = (
    "identical", "noise", "declared", "precision", "inherited", "amplified", "introduced",
    "param-diff", "structural", "nondeterministic", "incomparable", "undetermined",
)  # fmt: skip

_SEVERITY = (
    "identical",
    "noise",
    "declared",
    "inherited",
    "amplified",
    "precision",
    "nondeterministic",
    "undetermined",
    "incomparable",
    "structural",
    "param-diff",
    "introduced",
)


def severity(verdict: str) -> int:
    """How bad a verdict is, as a number to order them by."""
    return _SEVERITY.index(verdict)


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the differences of one region mean, and the noise budget that was applied.

    pair: index into Plan.pairs. stretch: -1 for the call as a whole (a leaf), else the stretch of a
    container. score: error in units of what is allowed (> 1 is flagged); None when it was not
    judged by a number. numbers: what the sentence rests on (e_in, e_out, rho, z, floor, ...).
    where: the module below the call that it is about, "" for the call itself. named: the call of
    that name, -1 where it is none. operator: the operator inside that it is due to
    ("aten.mul.Tensor"), "" where that is not known. side: whose error it is, "target" or
    "reference". source: where the code of that side calls the operator ("file:line"), "" where that
    is not known.
    """

    pair: int
    verdict: str
    stretch: int = -1
    evidence: str = ""
    confidence: str = ""
    score: float | None = None
    cause: str = ""
    numbers: dict[str, float | None] = {}
    sentence: str = ""
    slot: str = ""
    where: str = ""
    operator: str = ""
    side: str = "target"
    named: int = -1
    source: str = ""


class Finding(Displayed, msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator at fault. Siblings with one signature are one finding; `also` names the others.

    operator: which operator inside it ("aten.mul.Tensor"), "" where that is not known. side: whose
    error it is. phase: of an operator that is not of the forward pass ("backward", "recompute",
    "optimizer").
    """

    name: str
    op_type: str
    cause: str
    verdict: str
    confidence: str
    step: int
    rank: int
    evidence: str
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
