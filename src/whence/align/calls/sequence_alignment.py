"""Aligns two sequences: corresponding items are in order on both sides, and inserted or removed
items stay without a partner.

`align` and `best_in_order` maximise a sum of scores (Needleman and Wunsch, J. Mol. Biol. 48, 1970,
with free gaps). `common_subsequence` is for long sequences whose items are equal or not (Myers, An
O(ND) Difference Algorithm, 1986).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.errors import UsageError

_MAX_WORK = 40_000_000  # steps of the search for a common subsequence, at most
_EQUAL = 0.3  # scores that differ by less count as equal

Scores = np.ndarray[Any, np.dtype[np.float64]]


class Aligned(NamedTuple):
    """Pairs of positions with their scores, and positions that several others fit equally well."""

    pairs: list[tuple[int, int, float]]
    doubtful: list[tuple[int, list[int]]]


def align(table: Scores, least: float) -> Aligned:
    """The best alignment for a table of scores (n, m); scores below `least` never pair.

    A pair counts only if every best alignment contains it; positions that pair differently are
    doubtful.
    """
    n, m = table.shape
    scores = np.where(table >= least, table, -np.inf)
    if not np.isfinite(scores).any():
        return Aligned([], [])
    until, beyond = _best(scores), _best(scores[::-1, ::-1])[::-1, ::-1]
    best = float(until[n, m])
    through = until[:n, :m] + scores + beyond[1:, 1:]
    possible = through >= best - _EQUAL
    per_row, per_column = possible.sum(axis=1), possible.sum(axis=0)
    pairs: list[tuple[int, int, float]] = []
    doubtful: list[tuple[int, list[int]]] = []
    for i in np.flatnonzero(per_row):
        candidates = [int(j) for j in np.flatnonzero(possible[i])]
        if len(candidates) == 1 and per_column[candidates[0]] == 1:
            pairs.append((int(i), candidates[0], float(table[i, candidates[0]])))
        else:
            doubtful.append((int(i), candidates))
    return Aligned(pairs, doubtful)


def _best(scores: Scores) -> Scores:
    """best[i, j]: the largest sum of scores of any alignment of the first i with the first j
    items.
    """
    n, m = scores.shape
    best = np.zeros((n + 1, m + 1))
    for i in range(n):
        step = np.maximum(best[i, 1:], best[i, :-1] + scores[i])
        best[i + 1, 1:] = np.maximum.accumulate(step)
    return best


def best_in_order(
    count: int, count_across: int, score: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """The order-preserving pairs with the largest sum of scores, none with score 0; of equal
    solutions the earliest.
    """
    best = [[0.0] * (count_across + 1) for _ in range(count + 1)]
    for i in range(count - 1, -1, -1):
        for j in range(count_across - 1, -1, -1):
            value = score(i, j)
            paired = value + best[i + 1][j + 1] if value else 0.0
            best[i][j] = max(best[i + 1][j], best[i][j + 1], paired)
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < count and j < count_across:
        value = score(i, j)
        if value and best[i][j] == value + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def common_subsequence(
    a: Sequence[Any], b: Sequence[Any], max_work: int
) -> list[tuple[int, int]] | None:
    """Pairs of positions of a longest common subsequence; None where `max_work` steps do not find
    one.
    """
    furthest = {1: 0}
    trail: list[dict[int, int]] = []
    work = 0
    for edits in range(len(a) + len(b) + 1):
        trail.append(dict(furthest))
        work += len(furthest)
        if work > max_work:
            return None
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _walked_back(trail, len(a), len(b))
    return []


def _walked_back(trail: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """The equal positions on the way from (x, y) back to the start, in ascending order."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trail) - 1, -1, -1):
        furthest, k = trail[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        last = k + 1 if down else k - 1
        px = furthest[last] if edits else 0
        py = px - last if edits else 0
        while x > px and y > py and (edits == 0 or x > (px if down else px + 1)):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = px, py
    return pairs[::-1]


def blocks(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[int, int, int, int, bool]]:
    """(start, stop, start, stop, equal) for each run of paired operators and for each stretch
    between them, in order.

    Based on a longest common subsequence. Raises UsageError when the two have too little in common
    to be searched.
    """
    start, least = 0, min(len(first), len(second))
    while start < least and first[start] == second[start]:
        start += 1
    end = 0
    while end < least - start and first[-1 - end] == second[-1 - end]:
        end += 1
    middle = first[start : len(first) - end], second[start : len(second) - end]
    common = common_subsequence(*middle, _MAX_WORK)
    if common is None:
        raise UsageError(
            f"the programs share {start + end} operators at their ends; between them are "
            f"{len(middle[0])} and {len(middle[1])} operators, too many to compare"
        )
    matched = (
        [(i, i) for i in range(start)]
        + [(start + i, start + j) for i, j in common]
        + [(len(first) - end + i, len(second) - end + i) for i in range(end)]
    )
    out: list[tuple[int, int, int, int, bool]] = []
    a = b = 0
    for i, j in [*matched, (len(first), len(second))]:
        if i > a or j > b:
            out.append((a, i, b, j, False))
        if i < len(first) and j < len(second):
            if out and out[-1][4] and out[-1][1] == i and out[-1][3] == j:
                out[-1] = (out[-1][0], i + 1, out[-1][2], j + 1, True)
            else:
                out.append((i, i + 1, j, j + 1, True))
        a, b = i + 1, j + 1
    return out


def longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subset of pairs, sorted by first number, whose second numbers increase too."""
    ends: list[int] = []
    end_pairs: list[int] = []
    previous = [-1] * len(pairs)
    for k, (_, j) in enumerate(pairs):
        place = bisect.bisect_left(ends, j)
        previous[k] = end_pairs[place - 1] if place else -1
        if place == len(ends):
            ends.append(j)
            end_pairs.append(k)
        else:
            ends[place], end_pairs[place] = j, k
    out: list[tuple[int, int]] = []
    k = end_pairs[-1] if end_pairs else -1
    while k >= 0:
        out.append(pairs[k])
        k = previous[k]
    return out[::-1]
