"""Judges tensors with an unknown number of operators between them: recorded inputs and outputs, or
a call whose inside is not visible.

How much rounding grows in a network of unknown depth is not known, so error growth is no evidence
there. Evidence is what rounding cannot cause at any depth: a NaN, a pattern
(`judge.error_patterns`), or an error larger than in any network that still works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from whence.dtypes import is_half_roundoff
from whence.judge.error_growth import ErrorGrowth, PairError
from whence.judge.error_patterns import Sight
from whence.judge.limits import (
    BFLOAT16_AND_COARSER,
    COHERENT_EFFECT,
    COHERENT_REST,
    ENOUGH_EQUAL,
    ENOUGH_IN_FLOAT32,
    LIMITS,
)
from whence.judge.power import ELEMENT, NOISE, SCALE, without_visible
from whence.results import Confidence, Evidence, Verdict, VerdictKind

_PASSED = (VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED)

RECORD_MORE = (
    "nothing in between was recorded, so whence cannot localise it: to decide it, capture both "
    "runs with their modules (`whence run`), which can be replayed, or record more tensors in "
    "between (`whence.label`)"
)
SEE_INSIDE = (
    "nothing inside was recorded, so whence cannot localise it: to decide it, capture the engine "
    "without `--level io`; where it shows no inside, record tensors of it (`whence.label`, or its "
    "own debug outputs) and the same ones of the program that it was made from"
)
NO_OPERATOR = "nothing inside was recorded, so which operator it is cannot be told"
KEEP_ELEMENTS = "to decide it, record the elements of the outputs too"
_OF_STATISTICS = "statistics differ by {:.2g} and say nothing of the order of elements"
RECORD_SCORES = "to decide it, record the scores that they were chosen by"
RECORD_INPUTS = (
    "with outputs alone whence cannot localise it: to decide it, record the inputs and tensors in "
    "between too"
)


class OtherSteps(NamedTuple):
    """The errors of one module's outputs in the steps before and after the judged one.

    They show how much error rounding causes in the operators that are not visible.
    """

    before: Sequence[float] = ()
    after: Sequence[float] = ()

    def quiet(self, error: float, factor: float) -> Sequence[float]:
        """The errors of other steps that are `factor` times smaller than `error`, () where these
        are not most of them.

        At least one later step must be among them: after different inputs (another token, a spoilt
        cache), no later step would agree again.
        """
        limit = error / factor
        after = [e for e in self.after if e <= limit]
        quiet = [*(e for e in self.before if e <= limit), *after]
        every = len(self.before) + len(self.after)
        return quiet if after and len(quiet) >= max(3, every / 2) else ()


class Elsewhere(NamedTuple):
    """The errors of the tensor of one name elsewhere: they show what rounding makes in as many
    operators. steps: in other steps; layer_before: one layer earlier. None where not known.
    equal_before: number of earlier float32 tensors, where all of them are equal.
    """

    steps: OtherSteps | None = None
    layer_before: float | None = None
    equal_before: int = 0


NOWHERE = Elsewhere()

_OTHER_INPUTS = 0.5
"""Largest relative error of a tensor before which nothing was recorded that counts as a fault: a
larger one may come from other inputs. Measured: of 28 pairs with other inputs, 27 have a larger
one; 55 of 130 faults in a first tensor are named by this rule alone.
"""


def judge_stated(
    verdict: Verdict,
    growth: ErrorGrowth,
    u: float,
    look: Callable[[], Sight | None],
    *,
    first: bool,
    in_other_steps: OtherSteps,
) -> Verdict:
    """The verdict of a pair that the program itself states, from the verdict of its error growth,
    with room for rounding in operators that are not visible.

    first: whether no tensor before it is visible. The room is `Limits.otherwise`; at 16 bits it is
    granted to the first pair only, since the limit of growth then leaves enough room. look: what
    the elements show, None if they were not kept. in_other_steps: errors of the same pair in other
    tasks, which show what the operators between make by rounding.
    """
    verdict = without_visible(verdict)
    if growth.evidence not in (Evidence.TWO_DUMPS, Evidence.STATISTICS):
        return verdict
    room = LIMITS.root_output_room(u) if first or not is_half_roundoff(u) else 0.0
    if verdict.verdict == VerdictKind.INTRODUCED and growth.e_out > room:
        if not first:
            return verdict
        sentence = (
            f"differs by rel_l2 {growth.e_out:.2g}, "
            f"{'' if room == 0 else f'more than {room:.2g}, '}and nothing before it is seen"
        )
        return verdict.replace(sentence=sentence, numbers={**verdict.numbers, "e_in": None})
    if u and (stands_out := _beside(verdict, growth, in_other_steps, LIMITS.whole)):
        return stands_out
    if verdict.verdict == VerdictKind.INTRODUCED:
        sentence = (
            f"differs by rel_l2 {growth.e_out:.2g}, within {room:.2g}, which rounding in "
            "operators that nobody labelled may make"
        )
        verdict = verdict.withdrawn(VerdictKind.NOISE, sentence)
    room = max(room, LIMITS.growth * (growth.e_in + 2 * u))
    return unless_coherent(verdict, growth, u, look, room)


def judge_unseen(
    verdict: Verdict,
    growth: ErrorGrowth,
    u: float,
    errors_before: Sequence[PairError] | None,
    look: Callable[[], Sight | None],
    *,
    is_whole: bool = False,
    elsewhere: Elsewhere = NOWHERE,
) -> Verdict:
    """The verdict of a tensor behind an unknown number of operators, from that of its growth.

    u: unit roundoff of the pair, 0 for an exact kind. errors_before: errors of visible tensors
    before it, None if there are none. look: what the elements show, None if they were not kept;
    called only if needed. is_whole: whether this is a whole model with recorded inputs and outputs.
    """
    by_growth = growth.evidence in (Evidence.TWO_DUMPS, Evidence.STATISTICS)
    if growth.verdict == VerdictKind.IDENTICAL or not by_growth:
        return verdict
    verdict = without_visible(verdict)
    if u == 0.0:
        return _of_integers(verdict, growth)
    room = LIMITS.within(u)
    # The statistics bound an error from below: where they moved before, elements may have as much.
    has_moved = any((e.value or 0.0) > room for e in errors_before or ())
    if growth.evidence == Evidence.STATISTICS and (
        growth.e_out <= room or (has_moved and math.isfinite(growth.e_out))
    ):
        unknown = verdict.replace(numbers={**verdict.numbers, "e_out": growth.e_out or None})
        return _open(
            unknown,
            _OF_STATISTICS.format(growth.e_out),
            KEEP_ELEMENTS,
        )
    if growth.e_out <= room:
        return unless_coherent(_within(verdict, growth, u, room), growth, u, look, room)
    coherence = look() if is_half_roundoff(u) else None
    if coherence is not None and coherence.effect > LIMITS.growth * growth.e_in:
        return _introduced(verdict, growth, _not_rounding(coherence), is_whole=is_whole)
    if elsewhere.steps is not None and (
        stands_out := _beside(verdict, growth, elsewhere.steps, LIMITS.beside_other_steps)
    ):
        return stands_out
    if errors_before is None:
        return _without_inputs(verdict, growth, coherence or look(), _far(u, ()))
    if math.isinf(growth.e_out):
        return verdict
    if growth.e_in > room and growth.growth <= LIMITS.growth:
        return verdict.withdrawn(VerdictKind.INHERITED, verdict.sentence)
    sight = coherence or look()
    far = _far(u, errors_before, elsewhere.equal_before)
    if why := _no_rounding(growth, sight, far, room, elsewhere.layer_before):
        return _introduced(verdict, growth, why, is_whole=is_whole)
    if growth.evidence == Evidence.STATISTICS:
        return _open(verdict, _OF_STATISTICS.format(growth.e_out), KEEP_ELEMENTS)
    words = (
        f"differs by rel_l2 {growth.e_out:.2g}, the tensors before it by {growth.e_in:.2g}: more "
        f"than the {room:.2g} that rounding usually grows to, "
        "but how many operators lie between is not known"
    )
    return _open(verdict, words, SEE_INSIDE if is_whole else RECORD_MORE)


def _without_inputs(
    verdict: Verdict, growth: ErrorGrowth, sight: Sight | None, far: float
) -> Verdict:
    """The verdict of a tensor beyond rounding before which nothing was recorded."""
    size = f"differs by rel_l2 {growth.e_out:.2g}"
    typical = growth.e_out if sight is None else min(growth.e_out, sight.typical)
    is_pattern = sight is not None and bool(sight.pattern)
    if is_pattern or far < typical <= _OTHER_INPUTS:
        why = _not_rounding(sight) if sight is not None and is_pattern else _is_far(far)
        words = f"{why}; here, or in what it was computed from, which was not recorded"
        return _introduced(verdict, growth, "").replace(sentence=f"{size}: {words}")
    words = "what it was computed from was not recorded, so the error may start here or before"
    return _open(verdict, f"{size}; {words}", RECORD_INPUTS)


def _no_rounding(
    growth: ErrorGrowth, sight: Sight | None, far: float, room: float, layer_before: float | None
) -> str:
    """Why a pattern, or the size of most errors, is no rounding, "" where it may be."""
    if sight is not None and sight.pattern and not sight.effect:
        return _not_rounding(sight)
    typical = growth.e_out if sight is None else min(growth.e_out, sight.typical)
    grown = LIMITS.growth * growth.e_in
    if typical > max(far, grown):
        return _is_far(far)
    if layer_before is None or typical <= max(
        room, grown, LIMITS.beside_other_steps * layer_before
    ):
        return ""
    return f"the same of the layer before differs by {layer_before:.2g}"


def _is_far(far: float) -> str:
    return f"more than {far:.2g}, which rounding leaves of no network that works"


def unless_coherent(
    verdict: Verdict,
    growth: ErrorGrowth,
    u: float,
    look: Callable[[], Sight | None],
    room: float,
) -> Verdict:
    """The verdict of a pair that passes by its size, unless one number explains how it differs in
    16 bits, and by more than what came in; with how large a fault would have been named.

    room: the relative error that passes.
    """
    if verdict.verdict not in _PASSED or growth.evidence != Evidence.TWO_DUMPS:
        return verdict
    sizes = {SCALE: room, ELEMENT: room * math.sqrt(growth.count or math.inf), NOISE: room}
    if is_half_roundoff(u):
        sight = look()
        if sight is not None and sight.effect > LIMITS.growth * growth.e_in:
            return _introduced(verdict, growth, _not_rounding(sight))
        if sight is not None:
            largest = max(LIMITS.growth * growth.e_in, growth.e_out / COHERENT_REST)
            sizes[SCALE] = min(room, max(COHERENT_EFFECT, largest))
    known = verdict.numbers
    numbers = {
        name: min(size, known.get(name) or math.inf)
        for kind, size in sizes.items()
        if math.isfinite(size) and (name := f"visible_{kind}")
    }
    return verdict.replace(numbers={**known, **numbers})


def _beside(
    verdict: Verdict, growth: ErrorGrowth, others: OtherSteps, factor: float
) -> Verdict | None:
    """The verdict of a tensor whose error is `factor` times that of most other steps, which came
    in with none of its inputs; else None.
    """
    quiet = others.quiet(growth.e_out, factor)
    if not quiet or growth.growth <= LIMITS.growth:
        return None
    where = "other steps, later ones among them," if others.before else "labels of other tasks"
    why = (
        f"differs by rel_l2 {growth.e_out:.2g}, where {len(quiet)} {where} "
        f"differ by {max(quiet):.2g} at most"
    )
    return _introduced(verdict, growth, "").replace(sentence=why)


def _not_rounding(sight: Sight) -> str:
    return f"{sight.pattern}, which rounding at no depth makes"


def _of_integers(verdict: Verdict, growth: ErrorGrowth) -> Verdict:
    if verdict.verdict != VerdictKind.INTRODUCED:
        return verdict
    return _open(
        verdict, "integers differ, and may be chosen by scores that are nearly equal", RECORD_SCORES
    )


def _within(verdict: Verdict, growth: ErrorGrowth, u: float, room: float) -> Verdict:
    if verdict.verdict in (VerdictKind.NOISE, VerdictKind.INHERITED):
        return verdict
    name = VerdictKind.INHERITED if growth.e_in > 2 * u else VerdictKind.NOISE
    sentence = (
        f"differs by rel_l2 {growth.e_out:.2g}, within {room:.2g}, which rounding in "
        "operators that nobody sees may make"
    )
    return verdict.withdrawn(name, sentence)


def _far(u: float, errors_before: Sequence[PairError], equal_before: int = 0) -> float:
    """The error that no rounding makes. What is stored in float32 may have been computed in 16
    bits, unless what came before did not; less is left to rounding where all of that is equal to
    the bit, for then both runs have the same kernels.
    """
    if u > BFLOAT16_AND_COARSER or any(e.codes for e in errors_before):
        return LIMITS.far_16
    exact = [
        e.value
        for e in errors_before
        if e.u > 0
        and not is_half_roundoff(e.u)
        and not is_half_roundoff(u)
        and e.inherited is not None
        and e.inherited <= LIMITS.within(e.u)
    ]
    is_float32 = not is_half_roundoff(u)
    if max(len(exact), equal_before * is_float32) >= ENOUGH_EQUAL and not any(
        e.value for e in errors_before
    ):
        return LIMITS.far_equal
    return LIMITS.far_seen if len(exact) >= ENOUGH_IN_FLOAT32 else LIMITS.far


def _introduced(
    verdict: Verdict, growth: ErrorGrowth, why: str, *, is_whole: bool = False
) -> Verdict:
    size = f"differs by rel_l2 {growth.e_out:.2g}, where {growth.e_in:.2g} came in"
    if why and growth.evidence == Evidence.STATISTICS:
        why = f"{why}; here, or by another order of elements before, which statistics hide"
    score = verdict.score if verdict.score is not None else growth.score()
    return verdict.replace(
        verdict=VerdictKind.INTRODUCED,
        confidence=Confidence.LIKELY,
        score=score if math.isfinite(score) else None,
        sentence=f"{size}: {why}{f'; {NO_OPERATOR}' if is_whole else ''}",
    )


def _open(verdict: Verdict, words: str, next_step: str) -> Verdict:
    return verdict.withdrawn(VerdictKind.UNDETERMINED, f"{words}; {next_step}")
