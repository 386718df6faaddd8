"""Code whose results could not be measured (experts that were given other rows): where its call was
given the same and leaves what no rounding does, and so does all around, the call is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from whence import dtypes
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.stretch_replay import Stretch
from whence.frameworks.operator_names import CHOOSES, base_name
from whence.judge.limits import LIMITS
from whence.records import inwards
from whence.records.slots import is_input, is_param
from whence.results import Confidence, Evidence, SlotPair, Verdict, VerdictKind


def unless_far(errors: PairErrors, around: Sequence[Stretch], verdict: Verdict) -> Verdict:
    """The verdict of unmeasured code, or `introduced` if its call is wrong on equal inputs and all
    stretches around it are wrong too. around: these stretches, the call's own first; none is clean.
    """
    if verdict.slot or not around:
        return verdict
    paired, call = errors.paired, around[0].pair.call
    inside = list(inwards(paired.kids, call.id))
    if any(_chooses(paired, number) for number in inside):
        return verdict
    given = [
        pair
        for number in inside
        for slot, pair in paired.slots_of(number).items()
        if is_param(slot) or (number == call.id and is_input(slot))
    ]
    came_in, _ = _largest(errors, given)
    (error, u), *above = (_largest(errors, stretch.left.values()) for stretch in around)
    far = LIMITS.far_16 if dtypes.is_half_roundoff(u) else LIMITS.far
    is_same = came_in <= LIMITS.within(u)
    is_far = far < error < math.inf  # infinite: of another shape, which proves nothing
    if not is_same or not is_far or any(e <= LIMITS.within(u) for e, u in above):
        return verdict
    return verdict.replace(
        verdict=VerdictKind.INTRODUCED,
        confidence=Confidence.LIKELY,
        evidence=Evidence.TWO_DUMPS,
        numbers={"e_in": came_in, "e_out": error},
        sentence=f"given the same, the call leaves other results (relative error {error:.2g}), "
        f"which nothing behind it takes back; of its code {verdict.sentence}",
    )


def _largest(errors: PairErrors, pairs: Iterable[SlotPair]) -> tuple[float, float]:
    """(largest relative error, largest unit roundoff) of these tensors; the error is infinite if
    integers differ. (0, 0) for no tensors.
    """
    known = [errors.of(pair) for pair in pairs]
    sizes = [0.0 if e.exact else (e.value or 0.0) if e.u else math.inf for e in known]
    return max(sizes, default=0.0), max((e.u for e in known), default=0.0)


def _chooses(paired: PairedRuns, number: int) -> bool:
    """Whether the code of a call chooses among scores, so that rounding may decide ties."""
    program = paired.reference.programs.get(paired.calls[number].program)
    names = (base_name(operation.name) for operation in program.operations) if program else ()
    return not CHOOSES.keys().isdisjoint(names)
