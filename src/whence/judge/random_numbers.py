"""Are random numbers distributed as the operator that drew them says?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from whence.judge.limits import DRAWN_DEVIATIONS, DRAWN_EFFECT
from whence.records.storage import Statistics


class Distribution(NamedTuple):
    """mean, std: of one number. kurtosis: its fourth central moment over the squared variance."""

    mean: float
    std: float
    kurtosis: float


def distribution(operator: str, settings: Mapping[str, float | bool]) -> Distribution | None:
    """What an operator draws; None where that is not known.

    operator: "aten.bernoulli_.float". settings: its numbers by schema name.
    """
    base = operator.split(".")[1].rstrip("_").removesuffix("_like")
    if base in ("bernoulli", "native_dropout"):
        kept = float(settings["p"]) if base == "bernoulli" else 1 - float(settings["p"])
        spread = kept * (1 - kept)
        return Distribution(kept, math.sqrt(spread), 1 / spread - 3) if spread > 0 else None
    if base in ("uniform", "rand"):
        low, high = float(settings.get("from", 0.0)), float(settings.get("to", 1.0))
        return Distribution((low + high) / 2, (high - low) / math.sqrt(12), 1.8)
    if base in ("normal", "randn"):
        return Distribution(settings.get("mean", 0.0), settings.get("std", 1.0), 3.0)
    if base == "exponential":
        scale = 1 / float(settings.get("lambd", 1.0))
        return Distribution(scale, scale, 9.0)
    return None


def misdrawn(
    figures: Statistics | None, operator: str, settings: Mapping[str, float | bool]
) -> str:
    """How numbers differ from what their operator draws, by more than chance, in words; "" where
    they do not, or too few tell.

    The mean of n numbers spreads by std / sqrt(n), their variance by
    std^2 sqrt((kurtosis - 1) / n).
    """
    expected = distribution(operator, settings)
    if expected is None or figures is None or figures.mean is None or figures.std is None:
        return ""
    if figures.nan or figures.inf or not expected.std > 0:
        return ""
    # The figures of few numbers, and of rare ones among many, are not spread normally.
    if figures.count < 20 * expected.kurtosis:
        return ""
    name = operator.removeprefix("aten.").removesuffix(".default")
    for word, seen, wanted, spread in (
        ("mean", figures.mean, expected.mean, expected.std / math.sqrt(figures.count)),
        (
            "standard deviation",
            figures.std,
            expected.std,
            expected.std / 2 * math.sqrt((expected.kurtosis - 1) / figures.count),
        ),
    ):
        off = abs(seen - wanted)
        if off > DRAWN_DEVIATIONS * spread and off > DRAWN_EFFECT * expected.std:
            return (
                f"the {word} of {figures.count} random numbers is {seen:.4g} where {name} draws "
                f"{wanted:.4g}, {off / spread:.2g} deviations off"
            )
    return ""


def chance_bits(figures: Statistics | None, *, is_floating: bool) -> float:
    """At least how many bits of chance random numbers hold: as many draws again give the same ones
    once in 2 to that power.

    Of zeros among others the places count, log2 of the ways to choose them; of floating-point
    numbers without zeros, 16 bits each.
    """
    if figures is None or figures.min == figures.max:
        return 0.0
    n, k = figures.count, figures.zero
    if k == 0:
        return 16.0 * n if is_floating else 0.0
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways / math.log(2)
