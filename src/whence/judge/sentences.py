"""Verdicts in words: one sentence with the numbers it is based on."""

from __future__ import annotations

import math

from whence.judge.error_growth import ErrorGrowth
from whence.judge.limits import LIMITS
from whence.judge.replay_error import ReplayError
from whence.results import Evidence, VerdictKind


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
