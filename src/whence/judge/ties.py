"""Tells whether rounding explains a different choice among scores. The size of an index means
nothing; the distance between the scores of the two candidates does.

Of two candidates whose scores are equal, or closer than rounding moves them, a correct run may
choose either. Source: if no score is off by more than d, the score at a rank moves by at most d,
and the score of the other run's candidate at that rank is at most 2 d lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from whence.judge.limits import LIMITS, TIE_COMPETING, TIE_ROWS, U32

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Noise = TypeVar("Noise", float, F64)


@dataclass(frozen=True, slots=True)
class Gap:
    """Two candidates of one choice, at a row and rank. reference, target: the candidate that each
    side chose; gap: distance of their scores; explained: the largest gap that rounding may close.
    """

    row: int
    rank: int
    reference: int
    target: int
    gap: float
    explained: float


@dataclass(frozen=True, slots=True)
class Followed:
    """A choice that follows the other run's in every row in which the two differ by ties alone.

    indices: [rows, k]. tied: rows in which the other run's choice differs and was followed; widest:
    the largest gap among them, relative to what rounding explains. wrong: rows in which rounding
    does not explain the other run's choice; worst: the largest gap among those.
    """

    indices: I64
    tied: Mask
    wrong: Mask
    widest: Gap | None = None
    worst: Gap | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An operator that chooses, for sentences. tied: number of rows, of `rows`, with a different
    choice among ties; first: the first few of them. widest, worst: see `Followed`; where: row of
    `worst`. jumps: whether the operator's result jumps; a gap is then the distance from the jump.
    """

    operator: str
    rows: int
    tied: int = 0
    first: tuple[tuple[int, ...], ...] = ()
    widest: Gap | None = None
    worst: Gap | None = None
    where: tuple[int, ...] = field(default=())
    jumps: bool = False

    @property
    def of_ties(self) -> str:
        """A clause about rows with a different choice among ties, "" if there are none."""
        if not self.tied or self.widest is None:
            return ""
        rows = ", ".join(str(list(row)) for row in self.first) + (
            ", ..." if self.tied > len(self.first) else ""
        )
        words = (
            f"at most {self.widest.gap:.3g} apart, rounding explains {self.widest.explained:.3g}"
            if self.widest.gap
            else "equal"
        )
        if self.jumps:
            return (
                f"{self.operator} falls on the other side of a jump in {self.tied} of {self.rows} "
                f"rows ({rows}): {words.replace('apart', 'from it')}"
            )
        return (
            f"{self.operator} chooses differently in {self.tied} of {self.rows} rows ({rows}), "
            f"among scores that tie: {words}"
        )

    @property
    def of_the_wrong(self) -> str:
        """A clause about a choice that rounding does not explain, "" if there is none."""
        if self.worst is None:
            return ""
        worst = self.worst
        place = f"{self.operator} in row {list(self.where)}" if self.where else self.operator
        if math.isinf(worst.gap):
            return (
                f"{place} takes {worst.target} where the reference's operators take "
                f"{worst.reference}, which no scores explain"
            )
        return (
            f"{place} takes {worst.target} where the reference's operators take {worst.reference}: "
            f"their scores are {worst.gap:.3g} apart, rounding explains {worst.explained:.3g}"
        )


def noise_of(wide: F64, working: F64, chosen: I64, terms: int) -> F64:
    """How far rounding moves each score (one standard deviation), [rows, n].

    wide, working: the scores, [rows, n], in wide arithmetic and in the target's working dtype.
    chosen: indices of the chosen candidates, [rows, k]. terms: length of the longest sum behind a
    score.
    """
    size = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    middle = np.median(size, axis=1, keepdims=True)
    largest = np.take_along_axis(size, np.clip(chosen, 0, wide.shape[1] - 1), 1).max(
        axis=1, keepdims=True, initial=0.0
    )
    competes = (
        np.isfinite(wide)
        & np.isfinite(working)
        & (size <= TIE_COMPETING * np.maximum(largest, middle))
    )
    with np.errstate(invalid="ignore"):
        off = np.where(competes, working - wide, 0.0) ** 2
    by_row = np.sqrt(off.sum(1, keepdims=True) / np.maximum(competes.sum(1, keepdims=True), 1))
    by_column = np.sqrt(off.sum(0, keepdims=True) / np.maximum(competes.sum(0, keepdims=True), 1))
    floor = 0.3 * math.sqrt(max(terms, 1)) * U32 * middle
    # Behind a step (a score that is itself rounded) one element alone moves, by all of the step.
    itself = np.sqrt(off) * 2 / LIMITS.flip
    return np.asarray(np.maximum(np.maximum(by_row, by_column), np.maximum(itself, floor)))


def closed_by(noise: Noise) -> Noise:
    """The widest gap between two scores that noise of this standard deviation in each of them
    closes.
    """
    return noise * LIMITS.flip


def explained_by(a: F64, b: F64, noise: F64, u: float) -> F64:
    """The widest gap between scores a and b that rounding closes: both rounded once, or moved by
    their noise.
    """
    with np.errstate(invalid="ignore"):
        rounding = u * (np.abs(a) + np.abs(b))
    return np.asarray(np.maximum(np.where(np.isfinite(rounding), rounding, 0.0), closed_by(noise)))


def distance(a: F64, b: F64) -> F64:
    """|a - b|; 0 for equal infinities and for two NaN, inf for what cannot be subtracted."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(a - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(np.where(equal, 0.0, np.where(np.isnan(gap), np.inf, gap)))


def follow(
    reference: I64,
    target: I64,
    scores: F64,
    noise: F64,
    u: float,
    *,
    ordered: bool = True,
    distinct: bool = True,
) -> Followed:
    """`reference`, with the rows of `target` that differ from it by ties alone.

    reference, target: [rows, k], what is chosen from scores [rows, n], by rank. noise: of
    `noise_of`. u: unit roundoff of the scores' dtype, 0 for exact kinds. ordered: do ranks count,
    or only which are chosen? distinct: is not a candidate chosen twice in a row?
    """
    rows = np.flatnonzero((reference != target).any(axis=1))
    tied, wrong = np.zeros(len(reference), bool), np.zeros(len(reference), bool)
    if not rows.size:
        return Followed(reference, tied, wrong)
    reference_rows, target_rows = reference[rows], target[rows]
    inside = (target_rows >= 0) & (target_rows < scores.shape[1])
    valid = np.where(inside, target_rows, 0)
    if not ordered:
        reference_rows, valid = (
            np.take_along_axis(x, np.argsort(np.take_along_axis(scores[rows], x, 1), axis=1), 1)
            for x in (reference_rows, valid)
        )
    a, b = (np.take_along_axis(scores[rows], x, 1) for x in (reference_rows, valid))
    moved = np.maximum(*(np.take_along_axis(noise[rows], x, 1) for x in (reference_rows, valid)))
    gap = np.where(inside if ordered else inside.all(axis=1, keepdims=True), distance(a, b), np.inf)
    gap = np.where(reference_rows == valid, np.where(inside, 0.0, np.inf), gap) if ordered else gap
    if distinct:
        gap[_has_repeats(target_rows)] = np.inf
    explained = explained_by(a, b, moved, u)
    beyond = gap > explained
    bad = beyond.any(axis=1)
    tied[rows[~bad]], wrong[rows[bad]] = True, True
    indices = np.where(tied.reshape(-1, 1), target, reference)
    chosen = np.where(inside, valid, target_rows)

    def at(mask: Mask, size: F64) -> Gap | None:
        if not mask.any():
            return None
        i, j = np.unravel_index(int(np.argmax(np.where(mask, size, -1.0))), size.shape)
        pair = int(reference_rows[i, j]), int(chosen[i, j])
        return Gap(int(rows[i]), int(j), *pair, float(gap[i, j]), float(explained[i, j]))

    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(gap > 0, gap / explained, 0.0)
    swapped = (reference_rows - valid != 0) & ~bad.reshape(-1, 1)
    return Followed(
        indices,
        tied,
        wrong,
        at(swapped, share),
        at(beyond & (reference_rows != valid), gap) or at(beyond, gap),
    )


def _has_repeats(chosen: I64) -> Mask:
    """Rows in which a candidate is chosen twice."""
    ordered = np.sort(chosen, axis=1)
    return np.asarray((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))


def alternatives(current: I64, scores: F64, noise: F64, u: float, limit: int) -> list[I64]:
    """Other choices that are as good as `current`, each for all rows at once: in the n-th, every
    row with n of them has its n-th.

    scores, noise, u: as for `follow`. limit: how many. In each, one candidate that was taken is
    exchanged for one that was not, or changes places with the next that was taken; nearest first.
    """
    rows, k = current.shape
    is_chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(is_chosen, current, True, 1)
    swaps: list[list[tuple[float, int, int]]] = [[] for _ in range(rows)]
    for rank in range(k):
        chosen = current[:, rank : rank + 1]
        a = np.take_along_axis(scores, chosen, 1)
        gap = distance(np.broadcast_to(a, scores.shape), scores)
        moved = np.maximum(np.take_along_axis(noise, chosen, 1), noise)
        within = gap <= explained_by(np.broadcast_to(a, scores.shape), scores, moved, u)
        fits = within & ~is_chosen
        if rank + 1 < k:
            next_rank = current[:, rank + 1 : rank + 2]
            np.put_along_axis(fits, next_rank, np.take_along_axis(within, next_rank, 1), 1)
        for row, candidate in np.argwhere(fits):
            swaps[row].append((float(gap[row, candidate]), rank, int(candidate)))
    out: list[I64] = []
    for number in range(limit):
        open_rows = [row for row in range(rows) if len(swaps[row]) > number]
        if not open_rows:
            break
        choice = current.copy()
        for row in open_rows:
            _, rank, candidate = sorted(swaps[row])[number]
            choice[row, choice[row] == candidate] = choice[row, rank]
            choice[row, rank] = candidate
        out.append(choice)
    return out


def by_place(current: I64, scores: F64) -> I64:
    """`current`, [rows, k], with candidates of equal scores, [rows, n], that stand side by side in
    the order of their indices.
    """
    ranked = np.take_along_axis(scores, current, axis=1)
    groups = np.zeros(current.shape, np.int64)
    np.cumsum(ranked[:, 1:] != ranked[:, :-1], axis=1, out=groups[:, 1:])
    order = np.argsort(groups * scores.shape[1] + current, axis=1, kind="stable")
    return np.asarray(np.take_along_axis(current, order, axis=1), np.int64)


def rearranged(
    current: I64, scores: F64, noise: F64, u: float, wanted: F64, given: F64
) -> I64 | None:
    """`current`, with candidates that tie in the order in which what was computed of them in rank
    `given` comes nearest to `wanted`; None where that is their order.

    wanted, given: [rows, k, m], m numbers for each rank, of another run and of the one that chose
    `current`. A sort that is not stable leaves equal keys (tokens of one expert) in any order.
    """
    out = current.copy()
    for row in range(len(current)):
        chosen = current[row]
        a, b = (scores[row, part] for part in (chosen[:-1], chosen[1:]))
        moved = np.maximum(noise[row, chosen[:-1]], noise[row, chosen[1:]])
        is_new = np.concatenate([[True], distance(a, b) > explained_by(a, b, moved, u)])
        starts = np.append(np.flatnonzero(is_new), len(chosen))
        for start, end in pairwise(starts.tolist()):
            if end - start > 1:
                nearest = _nearest(wanted[row, start:end], given[row, start:end])
                out[row, start:end] = chosen[start:end][nearest]
    return None if np.array_equal(out, current) else out


def _nearest(wanted: F64, given: F64) -> I64:
    """Of each row of `wanted`, [n, m], which row of `given` is nearest to it; each is taken once,
    where several are as near the one at the same place.
    """
    squares = (wanted * wanted).sum(1)[:, None] + (given * given).sum(1)[None, :]
    cost = np.nan_to_num(squares - 2 * (wanted @ given.T), nan=np.inf)
    stays = np.diag(cost) <= cost.min(axis=1)
    nearest = np.where(stays, np.arange(len(cost)), cost.argmin(axis=1))
    if len(np.unique(nearest)) == len(nearest):
        return np.asarray(nearest, np.int64)
    is_free = np.ones(len(cost), bool)
    for row in np.argsort(cost.min(axis=1), kind="stable"):
        nearest[row] = np.argmin(np.where(is_free, cost[row], np.inf))
        is_free[nearest[row]] = False
    return np.asarray(nearest, np.int64)


@dataclass(frozen=True, slots=True)
class RankedScores:
    """Indices of two runs, each judged by its own scores. tied: rows in which the target's are
    others, and hold what the ranks ask for; wrong: rows in which they do not; worst: of these, the
    pair furthest apart.
    """

    tied: Mask
    wrong: Mask
    worst: Gap | None = None


def by_rank(
    reference: I64, target: I64, scores: F64, others_scores: F64, u: float
) -> RankedScores | None:
    """Does what the target chose have the ranks among its own scores that the reference's has among
    the reference's?

    Without the operator, what the reference chose tells the ranks: those of a top-k, a sort, an
    argmax, or the same ranks in all of several rows. None where these are no ranks of such a
    choice, or the extents do not fit. reference, target: [rows, k]; scores, others_scores: [rows,
    n]; u: unit roundoff of the coarser of both.
    """
    n = scores.shape[1]
    if (
        scores.shape != others_scores.shape
        or reference.min(initial=0) < 0
        or reference.max(initial=0) >= n
        or np.isnan(scores).any()
    ):
        return None
    lowest, highest = _ranks(scores, reference)
    first, last = lowest.max(axis=0), highest.min(axis=0)
    ranks = np.arange(reference.shape[1])
    ends = [np.asarray(r) for r in (n - 1 - ranks, ranks) if ((first <= r) & (r <= last)).all()]
    if not ends and (len(reference) < TIE_ROWS or (first > last).any()):
        return None
    required = np.broadcast_to(ends[0] if ends else first, reference.shape)
    expected = np.take_along_axis(np.sort(others_scores, axis=1), required, 1)
    inside = (target >= 0) & (target < n)
    actual = np.take_along_axis(others_scores, np.where(inside, target, 0), 1)
    gap = np.where(inside, distance(expected, actual), np.inf)
    if reference.shape[1] > 1:
        gap[_has_repeats(target)] = np.inf
    explained = explained_by(expected, actual, np.zeros_like(gap), u)
    differs = np.asarray((reference != target).any(axis=1))
    bad = np.asarray((gap > explained).any(axis=1))
    worst = None
    if bad.any():
        i, j = np.unravel_index(int(np.argmax(np.where(gap > explained, gap, -1.0))), gap.shape)
        rank = np.argsort(others_scores[i], kind="stable")[required[i, j]]
        worst = Gap(
            int(i), int(j), int(rank), int(target[i, j]), float(gap[i, j]), float(explained[i, j])
        )
    return RankedScores(differs & ~bad, bad, worst)


def _ranks(scores: F64, chosen: I64) -> tuple[I64, I64]:
    """The lowest and the highest rank, counted from the smallest, that each chosen candidate can
    have among equals.
    """
    order = np.argsort(scores, axis=1, kind="stable")
    values = np.take_along_axis(scores, order, 1)
    place = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    new = np.ones(scores.shape, bool)
    new[:, 1:] = values[:, 1:] != values[:, :-1]
    first = np.maximum.accumulate(np.where(new, place, 0), axis=1)
    ends = np.ones(scores.shape, bool)
    ends[:, :-1] = new[:, 1:]
    last = np.minimum.accumulate(np.where(ends, place, scores.shape[1])[:, ::-1], axis=1)[:, ::-1]
    rank = np.argsort(order, axis=1)
    chosen_rank = np.take_along_axis(rank, chosen, 1)
    return np.take_along_axis(first, chosen_rank, 1), np.take_along_axis(last, chosen_rank, 1)
