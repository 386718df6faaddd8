"""One verdict per region, from whatever evidence there is: exact level, then replay, then two
dumps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from whence.dtypes import is_half_roundoff
from whence.judge import sentences
from whence.judge.error_growth import ErrorGrowth, PairError, grow
from whence.judge.limits import LIMITS, U32
from whence.judge.parameters import ParameterDifference
from whence.judge.power import visible
from whence.judge.replay_error import ReplayError
from whence.records.slots import param_name
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind


@dataclass(frozen=True, slots=True)
class LeafEvidence:
    """All that is known of one leaf call.

    inputs, outputs: errors of its tensors. parameters: (slot, difference) of those compared. local:
    per output, figures of the replay on the target's inputs, or None with `no_replay` saying why.
    structural: a sentence when the shapes of outputs differ although those of the inputs agree. u:
    unit roundoff of the coarser side. cause: what a flagged replay is due to, once known. repeats:
    how many calls of the same operator on tensors of the same form gave the same bits on both sides
    (`judge.repeated`).
    """

    pair: int
    inputs: Sequence[PairError]
    outputs: Sequence[PairError]
    u: float
    parameters: Sequence[tuple[str, ParameterDifference]] = ()
    local: Sequence[tuple[str, ReplayError]] | None = None
    no_replay: str = ""
    structural: str = ""
    cause: CauseKind = CauseKind.UNKNOWN
    cause_words: str = ""
    broken: float = 0.0
    repeats: int = 0
    slots: Sequence[str] = field(default_factory=tuple)

    @property
    def is_settled(self) -> bool:
        """Is there nothing that a replay could add: other shapes, or equal parameters and bits?"""
        if self.structural:
            return True
        if not self.outputs or not all(e.exact for e in self.outputs):
            return False
        return all(p.equal or not p.comparable for _, p in self.parameters)


def judge_leaf(evidence: LeafEvidence) -> Verdict:
    """The verdict of a leaf call."""
    growth = repeated(grow(evidence.inputs, evidence.outputs, evidence.u), evidence)
    numbers = _of_growth(growth)
    if evidence.structural:
        return Verdict(
            evidence.pair,
            VerdictKind.STRUCTURAL,
            evidence=Evidence.TWO_DUMPS,
            confidence=Confidence.LIKELY,
            cause=CauseKind.STRUCTURAL,
            numbers=numbers,
            sentence=evidence.structural,
        )
    wrong = [(slot, p) for slot, p in evidence.parameters if p.comparable and not p.equal]
    if wrong:
        slot, difference = wrong[0]
        numbers |= difference.numbers or {}
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Verdict(
            evidence.pair,
            VerdictKind.PARAM_DIFF,
            evidence=Evidence.TWO_DUMPS,
            confidence=Confidence.CERTAIN,
            cause=CauseKind.PARAMETER,
            numbers=numbers,
            sentence=f"{param_name(slot)} {difference.sentence}{others}",
            slot=slot,
        )
    if evidence.outputs and all(e.exact for e in evidence.outputs):
        return Verdict(
            evidence.pair,
            VerdictKind.IDENTICAL,
            evidence=Evidence.TWO_DUMPS,
            numbers=numbers,
            sentence="bitwise equal",
        )
    if evidence.parameters and not evidence.outputs:
        return _of_parameters(evidence)
    if evidence.local:
        return _from_replay(evidence, growth, numbers)
    verdict = judge_region(evidence.pair, -1, growth, numbers, note=evidence.no_replay)
    if growth.repeats:
        times = (
            f"{growth.repeats} other calls of it give"
            if growth.repeats > 1
            else "another call of it gives"
        )
        verdict = verdict.replace(
            sentence=f"{verdict.sentence}; {times} the same bits on both sides"
        )
    return verdict


def repeated(growth: ErrorGrowth, evidence: LeafEvidence) -> ErrorGrowth:
    """The growth of a call that others like it speak against: `introduced` where 16 bits alone
    would let it pass.

    16 bits allow an operator that is computed otherwise ten roundings. Where other calls of the
    same operator on tensors of the same form give the same bits on both sides, it is not computed
    otherwise: equal inputs then leave it `limits.amplified` bands at most.
    """
    enough = evidence.repeats >= LIMITS.repeats and growth.e_in == 0 and evidence.u > U32
    if not (
        enough and growth.verdict == VerdictKind.AMPLIFIED and growth.evidence == Evidence.TWO_DUMPS
    ):
        return growth
    return dataclasses.replace(growth, verdict=VerdictKind.INTRODUCED, repeats=evidence.repeats)


def _of_parameters(evidence: LeafEvidence) -> Verdict:
    """The verdict of a call of which there are parameters only, none of them known to differ: a
    checkpoint.
    """
    unknown = [(slot, p) for slot, p in evidence.parameters if not p.comparable]
    if not unknown:
        return Verdict(
            evidence.pair,
            VerdictKind.NOISE,
            evidence=Evidence.TWO_DUMPS,
            sentence="its parameters are equal in the coarser dtype",
        )
    slot, difference = unknown[0]
    others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    # Nothing of it is known to agree.
    return Verdict(
        evidence.pair,
        VerdictKind.UNDETERMINED,
        evidence=Evidence.TWO_DUMPS,
        numbers={"e_out": 1.0},
        slot=slot,
        sentence=f"{param_name(slot)}: {difference.sentence}{others}",
    )


def _replay_numbers(worst: ReplayError) -> dict[str, float | None]:
    return {
        "rho": _finite(worst.rho),
        "z": _finite(worst.z),
        "slope": worst.structure.slope,
        "slope_z": _finite(worst.structure.slope_z),
        "chance": worst.chance(),
        "error_rel": _finite(worst.error_rel),
        "floor_rel": _finite(worst.floor_rel),
        "inherited_rel": worst.inherited_rel,
        "reference_rel": worst.reference_rel,
    }


def _visible(local: Sequence[tuple[str, ReplayError]]) -> dict[str, float | None]:
    """By kind of fault, the smallest that would have been named at every one of these outputs."""
    sizes: dict[str, float | None] = {}
    for _, error in local:
        for kind, size in visible(error).items():
            sizes[f"visible_{kind}"] = max(size, sizes.get(f"visible_{kind}") or 0.0)
    return sizes


def _broken_reference(
    evidence: LeafEvidence, slot: str, numbers: dict[str, float | None]
) -> Verdict:
    return Verdict(
        evidence.pair,
        VerdictKind.INTRODUCED,
        evidence=Evidence.REPLAY,
        confidence=Confidence.LIKELY,
        score=_finite(evidence.broken),
        cause=CauseKind.KERNEL,
        numbers=numbers,
        slot=slot,
        side="reference",
        sentence=f"introduced by the reference: what it recorded is {evidence.broken:.3g} "
        "times beyond the rounding of its own "
        "operators, run again on its own inputs; the target agrees with them",
    )


def _low_precision(worst: ReplayError, cause: CauseKind) -> str:
    """What makes an error beyond the operator's own rounding a loss of precision, in words; "" for
    a fault.

    A kernel may keep one number of a row (its norm, its largest element) in 16 bits, as the group
    norm of CUDA does: every row then has a scale of its own, within one rounding or so.
    """
    over = {name for name, value in worst.parts().items() if value > 1}
    is_close = (
        is_half_roundoff(worst.u)
        and worst.rho <= LIMITS.precision_rho
        and math.isfinite(worst.score)
    )
    if is_close and over <= {"rho"}:
        return "unstructured, as from a low-precision intermediate"
    by_row = over <= {"rho", "row"} and worst.structure.row_effect <= LIMITS.row_16 * worst.u
    if is_close and by_row and cause == CauseKind.KERNEL:
        return "within one rounding, as from a kernel that keeps a number of each row in 16 bits"
    return ""


def _from_replay(
    evidence: LeafEvidence, growth: ErrorGrowth, numbers: dict[str, float | None]
) -> Verdict:
    assert evidence.local
    slot, worst = max(evidence.local, key=lambda item: item[1].score)
    numbers |= _replay_numbers(worst)
    if evidence.broken:
        return _broken_reference(evidence, slot, numbers)
    words = sentences.of_local(worst)
    if worst.whole:
        numbers["whole"] = 1.0
    if tied := sum(choice.tied for choice in worst.choices):
        numbers["tied_rows"] = tied
    numbers |= {f"share_{name}": share for name, share in worst.shares.items()}
    numbers |= _visible(evidence.local)
    score = worst.score

    def verdict(
        kind: VerdictKind,
        sentence: str,
        confidence: Confidence = Confidence.NONE,
        cause: CauseKind = CauseKind.UNKNOWN,
    ) -> Verdict:
        return Verdict(
            evidence.pair,
            kind,
            evidence=Evidence.REPLAY,
            confidence=confidence,
            score=_finite(score),
            cause=cause,
            numbers=numbers,
            sentence=sentence,
            slot=slot,
        )

    if score > 1:
        if because := _low_precision(worst, evidence.cause):
            return verdict(VerdictKind.PRECISION, f"{words}; {because}")
        because = f"; {evidence.cause_words}" if evidence.cause_words else ""
        confidence = Confidence.CERTAIN if score >= LIMITS.certain else Confidence.LIKELY
        return verdict(
            VerdictKind.INTRODUCED, f"introduced here: {words}{because}", confidence, evidence.cause
        )
    confidence = Confidence.SUSPECT if score > LIMITS.suspect else Confidence.NONE
    inherited = worst.inherited_rel or 0.0
    if inherited <= max(worst.error_rel, worst.floor_rel):
        return verdict(VerdictKind.NOISE, f"rounding: {words}", confidence)
    if inherited > 5 * growth.e_in > 0:
        return verdict(
            VerdictKind.AMPLIFIED,
            f"amplified {inherited / growth.e_in:.3g} times, as the operator does: {words}",
            confidence,
        )
    return verdict(VerdictKind.INHERITED, f"inherited: {words}", confidence)


def judge_region(
    pair: int,
    stretch: int,
    growth: ErrorGrowth,
    numbers: dict[str, float | None] | None = None,
    *,
    note: str = "",
) -> Verdict:
    """The verdict of a region that could not be replayed: growth between two dumps, at most
    `likely`.
    """
    if numbers is None:
        numbers = _of_growth(growth)
    why = f"; no replay: {note}" if note else ""
    sentence = sentences.of_growth(growth) + why
    if growth.verdict == VerdictKind.IDENTICAL:
        return Verdict(
            pair,
            VerdictKind.IDENTICAL,
            stretch,
            growth.evidence,
            numbers=numbers,
            sentence="bitwise equal",
        )
    if growth.verdict == VerdictKind.INTRODUCED:
        return Verdict(
            pair,
            VerdictKind.INTRODUCED,
            stretch,
            growth.evidence,
            Confidence.LIKELY,
            _finite(growth.score()),
            CauseKind.UNKNOWN,
            numbers,
            sentence,
        )
    return Verdict(
        pair,
        growth.verdict,
        stretch,
        growth.evidence,
        Confidence.NONE,
        None,
        CauseKind.UNKNOWN,
        numbers,
        sentence,
    )


def _of_growth(growth: ErrorGrowth) -> dict[str, float | None]:
    numbers = {
        "e_in": _finite(growth.e_in),
        "e_out": _finite(growth.e_out),
        "growth": _finite(growth.growth),
    }
    return numbers | ({"spread": _finite(growth.spread)} if growth.spread else {})


def _finite(value: float) -> float | None:
    """JSON has no infinity: None, and the sentence says it."""
    return value if math.isfinite(value) else None
