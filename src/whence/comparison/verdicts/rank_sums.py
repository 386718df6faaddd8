"""Says in words how a sum over ranks is wrong: missing, partial, doubled, or a mean."""

from __future__ import annotations

from collections.abc import Sequence

# a factor this close to a whole number, or to a fraction of the number of ranks, is meant to be it
_NICE = 0.02


def sum_in_words(factors: Sequence[float], bias: float | None, *, of_mean: bool = False) -> str:
    """What an output is that should be the sum of the ranks' parts. factors: of each part; bias: of
    what no rank holds, or None. of_mean: the parts are shares of a mean.
    """
    n = len(factors)
    if of_mean and (words := _mean_in_words(factors)):
        return words
    missing = [r for r, f in enumerate(factors) if f == 0]
    present = [r for r, f in enumerate(factors) if f != 0]
    parts = []
    if missing and len(present) <= 1:
        parts.append(f"the sum over ranks is missing: {listed(missing, possessive=True)} not in it")
        if present and factors[present[0]] != 1:
            parts.append(f"output equals {factors[present[0]]:g} x the part of rank {present[0]}")
    elif missing:
        parts.append(
            f"the sum over ranks is not whole: {listed(missing, possessive=True)} not in it"
        )
    elif len(set(factors)) == 1 and factors[0] != 1:
        by = factors[0]
        parts.append(
            f"summed over ranks twice: output equals {by:g} x the sum"
            if by == n
            else "the mean over ranks in the place of the sum"
            if abs(by * n - 1) < 1e-9
            else f"output equals {by:g} x the sum over ranks"
        )
    if not missing or len(present) > 1:
        parts += [
            f"{f:g} x the part of rank {r}"
            for r, f in enumerate(factors)
            if f not in (0, 1) and len(set(factors)) > 1
        ]
    if bias is not None and bias == n != factors[0]:
        parts.append(f"the bias is added on every rank ({n} times)")
    elif bias is not None and bias not in (1, factors[0]):
        parts.append("the bias is missing" if bias == 0 else f"the bias is added {bias:g} times")
    return "; ".join(parts)


def nice(factor: float, n: int) -> float | None:
    """The whole number, or the fraction of n, that a factor is meant to be; None when it is
    neither.
    """
    for meant in (round(factor), round(factor * n) / n):
        if abs(factor - meant) <= _NICE * max(abs(meant), 1 / n):
            return float(meant)
    return None


def _mean_in_words(factors: Sequence[float]) -> str:
    """What a gradient is that should be the mean of the ranks' own; "" where it is no sum or mean
    of some of them.
    """
    n = len(factors)
    present = [rank for rank, factor in enumerate(factors) if factor != 0]
    by = {factors[rank] for rank in present}
    if len(by) != 1 or by == {1}:
        return ""
    factor = by.pop()
    if len(present) == n:
        return (
            "the sum over ranks in the place of the mean, or added up twice"
            if factor == n
            else "the mean over ranks is taken twice, or of a loss that is a share already"
            if abs(factor * n - 1) < 1e-9
            else f"{factor:g} x the mean over ranks"
        )
    if len(present) == 1 and factor == n:
        return f"not reduced over the ranks: it is that of {listed(present)} alone"
    if abs(factor * len(present) - n) < 1e-9:
        return f"reduced over another group: it is the mean of {listed(present)} alone"
    return ""


def listed(ranks: Sequence[int], *, possessive: bool = False) -> str:
    names = ", ".join(map(str, ranks))
    if possessive:
        return f"rank {names}'s part is" if len(ranks) == 1 else f"the parts of ranks {names} are"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
