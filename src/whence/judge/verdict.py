"""One verdict per region, from whatever evidence there is: exact level, then replay, then two
dumps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.dtypes import is_half_roundoff
from whence.judge.error_growth import ErrorGrowth, PairError, grow
from whence.judge.limits import LIMITS, U32
from whence.judge.parameters import ParameterDifference
from whence.judge.power import visible
from whence.judge.replay_error import ReplayError
from whence.records.slots import param_name
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind


@dataclass(frozen=True)
class LeafEvidence:
    """All evidence about one leaf call.

    inputs, outputs: errors of its tensors. u: unit roundoff of the coarser side. parameters: (slot,
    difference) of compared parameters. local: (slot, figures) of each output's replay on the
    target's inputs, or None with the reason in `no_replay`. structural: a sentence if shapes of
    outputs differ although those of inputs agree. cause: of a flagged replay, once known. broken:
    not 0 if the target agrees with the reference's program and the reference's own recording does
    not; then the recording's error as a multiple of the limit. repeats: number of calls of the same
    operator on tensors of the same form that are bitwise equal in both runs (`judge.repeated`).
    terms: number of products summed in an output element, 0 if not known.
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
    terms: float = 0.0

    @functools.cached_property
    def growth(self) -> ErrorGrowth:
        """The growth of the error from inputs to outputs."""
        return grow(self.inputs, self.outputs, self.u, self.terms)

    def replace(self, **changes: Any) -> LeafEvidence:
        """The evidence with some fields replaced. The cached growth is kept if it does not depend
        on them.
        """
        changed = dataclasses.replace(self, **changes)
        if not changes.keys() & {"inputs", "outputs", "u"}:
            changed.__dict__["growth"] = self.growth
        return changed

    @property
    def is_settled(self) -> bool:
        """Whether a replay could add nothing: shapes differ, or everything is equal."""
        if self.structural:
            return True
        if not self.outputs or not all(e.exact for e in self.outputs):
            return False
        return all(p.equal or not p.comparable for _, p in self.parameters)


def judge_leaf(evidence: LeafEvidence) -> Verdict:
    """The verdict of a leaf call."""
    growth = repeated(evidence.growth, evidence)
    verdict = Verdict(
        evidence.pair, growth.verdict, evidence=Evidence.TWO_DUMPS, numbers=_of_growth(growth)
    )
    if evidence.structural:
        return verdict.replace(
            verdict=VerdictKind.STRUCTURAL,
            confidence=Confidence.LIKELY,
            cause=CauseKind.STRUCTURAL,
            sentence=evidence.structural,
        )
    wrong = [(slot, p) for slot, p in evidence.parameters if p.differs and not p.is_rounding]
    if wrong:
        slot, difference = wrong[0]
        return verdict.replace(
            verdict=VerdictKind.PARAM_DIFF,
            confidence=Confidence.CERTAIN,
            cause=CauseKind.PARAMETER,
            numbers=verdict.numbers | (difference.numbers or {}),
            sentence=f"{param_name(slot)}: {difference.sentence}{_and_more(wrong)}",
            slot=slot,
        )
    if evidence.outputs and all(e.exact for e in evidence.outputs):
        return verdict.replace(verdict=VerdictKind.IDENTICAL, sentence="bitwise equal")
    if evidence.parameters and not evidence.outputs:
        return _of_parameters(evidence)
    if evidence.local:
        return _from_replay(verdict, evidence, evidence.local, growth)
    verdict = judge_region(evidence.pair, -1, growth, note=evidence.no_replay)
    if not growth.repeats:
        return verdict
    several = growth.repeats > 1
    times = f"{growth.repeats} other calls of it give" if several else "another call of it gives"
    return verdict.replace(sentence=f"{verdict.sentence}; {times} the same bits on both sides")


def repeated(growth: ErrorGrowth, evidence: LeafEvidence) -> ErrorGrowth:
    """The growth of a call, `introduced` if it would pass only because it computes in 16 bits and
    other calls like it are bitwise equal.

    At 16 bits, an operator that is computed differently may be off by ten roundings. If other calls
    of the same operator on tensors of the same form are bitwise equal in both runs, it is not
    computed differently: on equal inputs its growth may then be at most `limits.amplified`.
    """
    enough = evidence.repeats >= LIMITS.repeats and growth.e_in == 0 and evidence.u > U32
    if not (
        enough and growth.verdict == VerdictKind.AMPLIFIED and growth.evidence == Evidence.TWO_DUMPS
    ):
        return growth
    return dataclasses.replace(growth, verdict=VerdictKind.INTRODUCED, repeats=evidence.repeats)


def _of_parameters(evidence: LeafEvidence) -> Verdict:
    """The verdict of a call with parameters only (a checkpoint), none known to differ."""
    unknown = [(slot, p) for slot, p in evidence.parameters if not p.comparable]
    if not unknown:
        return Verdict(
            evidence.pair,
            VerdictKind.NOISE,
            evidence=Evidence.TWO_DUMPS,
            sentence="its parameters differ by rounding"
            if any(p.differs for _, p in evidence.parameters)
            else "its parameters are equal in the coarser dtype",
        )
    slot, difference = unknown[0]
    # Nothing of it is known to agree.
    return Verdict(
        evidence.pair,
        VerdictKind.UNDETERMINED,
        evidence=Evidence.TWO_DUMPS,
        numbers={"e_out": 1.0},
        slot=slot,
        sentence=f"{param_name(slot)}: {difference.sentence}{_and_more(unknown)}",
    )


def _and_more(differences: Sequence[tuple[str, ParameterDifference]]) -> str:
    return f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""


def _visible(local: Sequence[tuple[str, ReplayError]]) -> dict[str, float | None]:
    """By kind of fault, the smallest that would have been named at every one of these outputs."""
    sizes: dict[str, float | None] = {}
    for _, error in local:
        for kind, size in visible(error).items():
            sizes[f"visible_{kind}"] = max(size, sizes.get(f"visible_{kind}") or 0.0)
    return sizes


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
    verdict: Verdict,
    evidence: LeafEvidence,
    local: Sequence[tuple[str, ReplayError]],
    growth: ErrorGrowth,
) -> Verdict:
    """The verdict of figures of a replay. verdict: with the numbers of two dumps."""
    slot, worst = max(local, key=lambda item: item[1].score)
    verdict = verdict.replace(
        evidence=Evidence.REPLAY,
        slot=slot,
        score=_finite(worst.score),
        numbers=verdict.numbers | _replay_numbers(worst),
    )
    if evidence.broken:
        return verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            confidence=Confidence.LIKELY,
            score=_finite(evidence.broken),
            cause=CauseKind.KERNEL,
            side="reference",
            sentence=f"introduced by the reference: what it recorded is {evidence.broken:.3g} "
            "times beyond the rounding of its own operators, run again on its own inputs; the "
            "target agrees with them",
        )
    words = of_local(worst)
    numbers = verdict.numbers | ({"whole": 1.0} if worst.whole else {})
    if tied := sum(choice.tied for choice in worst.choices):
        numbers["tied_rows"] = tied
    numbers |= {f"share_{name}": share for name, share in worst.shares.items()}
    verdict = verdict.replace(numbers=numbers | _visible(local))
    if worst.score > 1:
        if because := _low_precision(worst, evidence.cause):
            return verdict.replace(verdict=VerdictKind.PRECISION, sentence=f"{words}; {because}")
        is_certain = worst.score >= LIMITS.certain
        code = f"{evidence.cause_words}; " if evidence.cause_words else ""
        return verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
            cause=evidence.cause,
            sentence=f"{code}introduced here: {words}",
        )
    if worst.score > LIMITS.suspect:
        verdict = verdict.replace(confidence=Confidence.SUSPECT)
    inherited = worst.inherited_rel or 0.0
    if inherited <= max(worst.error_rel, worst.floor_rel):
        return verdict.replace(verdict=VerdictKind.NOISE, sentence=f"rounding: {words}")
    if inherited > 5 * growth.e_in > 0:
        times = f"{inherited / growth.e_in:.3g} times, as the operator does"
        return verdict.replace(
            verdict=VerdictKind.AMPLIFIED, sentence=f"amplified {times}: {words}"
        )
    return verdict.replace(verdict=VerdictKind.INHERITED, sentence=f"inherited: {words}")


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


def judge_region(pair: int, stretch: int, growth: ErrorGrowth, *, note: str = "") -> Verdict:
    """The verdict of a region that could not be replayed: growth between two dumps, at most
    `likely`. note: why there is no replay.
    """
    why = f"; no replay: {note}" if note else ""
    is_equal = growth.verdict == VerdictKind.IDENTICAL
    is_fault = growth.verdict == VerdictKind.INTRODUCED
    numbers = _of_growth(growth)
    if growth.verdict in (VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED):
        numbers |= {f"visible_{kind}": size for kind, size in growth.visible.items()}
    return Verdict(
        pair,
        growth.verdict,
        stretch,
        growth.evidence,
        Confidence.LIKELY if is_fault else Confidence.NONE,
        _finite(growth.score()) if is_fault else None,
        numbers=numbers,
        sentence="bitwise equal" if is_equal else of_growth(growth) + why,
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


# Verdicts in words: one sentence with the numbers it is based on.


def of_local(local: ReplayError) -> str:
    """What the replay says about one output."""
    chosen = [
        words
        for choice in local.choices
        for words in (choice.of_the_wrong, choice.of_ties)
        if words
    ]
    return "; ".join([_of_figures(local), *chosen])


def _of_figures(local: ReplayError) -> str:
    if local.integer_mismatch:
        return (
            f"{_elements(local.integer_mismatch, 'differs', 'differ')} from what the reference's "
            "operators give on the same inputs"
        )
    if local.mismatch:
        return (
            f"{_elements(local.mismatch, 'is', 'are')} NaN, Inf or finite where the reference's "
            "operators on the same inputs are not"
        )
    named = (
        "run-to-run spread"
        if local.spread_rel and local.spread_rel >= local.floor_rel
        else "own rounding"
    )
    named = (
        "what rounding in all the calls inside makes" if local.whole else f"this operator's {named}"
    )
    parts = [f"{local.rho:.3g} times {named}"]
    if local.parts()["z"] > 1 and local.z_index is not None:
        parts.append(
            f"worst element {list(local.z_index)} at {local.z:.3g} times its row's rounding"
        )
    over = {name for name, value in local.parts().items() if value > 1}
    s = local.structure
    if over & {"slope", "row"} and abs(s.slope) >= 0.8 * s.row_effect:
        parts.append(f"coherent {100 * s.slope:+.2g} % scale")
    elif "row" in over:
        parts.append(f"every row has a scale of its own, {100 * s.row_effect:.2g} % off")
    if "channel" in over:
        parts.append(f"channel {s.channel_at} shifted by {100 * s.channel_effect:.2g} %")
    if "value" in over and not over & {"slope", "row", "channel"}:
        parts.append("the error follows the value")
    return "; ".join(parts)


def _elements(number: int, one: str, several: str) -> str:
    return f"1 element {one}" if number == 1 else f"{number} elements {several}"


def of_growth(growth: ErrorGrowth) -> str:
    """What two dumps say about one region."""
    if growth.verdict == VerdictKind.UNDETERMINED:
        return "nothing at its outputs could be measured"
    size = "inf" if math.isinf(growth.growth) else f"{growth.growth:.3g}"
    spread = f", run-to-run spread {growth.spread:.2g}" if growth.spread else ""
    text = (
        f"error grows {size} times: {growth.e_in:.2g} at its inputs, {growth.e_out:.2g} at "
        f"its outputs{spread} ({growth.evidence})"
    )
    if growth.by > 1 and (growth.evidence == Evidence.STATISTICS or growth.growth <= LIMITS.growth):
        text = (
            f"{_MOVED[growth.moved]} {growth.by:.3g} times further off than rounding and its "
            f"inputs explain; {text}"
        )
    return text


_MOVED = {
    "mean": "mean",
    "moment": "norm",
    "higher": "sums of cubes and fourth powers",
    "lone": "one element",
}
