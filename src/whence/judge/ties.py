"""Is another choice among scores a coin flip? An index is no number: it counts by how far apart the
scores are that it chose between.

Of two candidates whose scores are equal, or closer than rounding moves them, a correct run may
choose either. Source: if no score is off by more than d, the score at a rank moves by at most d,
and what the other run took at that rank is worth at most 2 d less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from whence.judge.limits import LIMITS, TIE_COMPETING, TIE_ROWS, U32, Limits

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Noise = TypeVar("Noise", float, F64)


@dataclass(frozen=True, slots=True)
class Gap:
    """Two candidates of one choice. row, rank: where; reference, target: which each side took; gap:
    of their scores; explained: by how much rounding may close it.
    """

    row: int
    rank: int
    reference: int
    target: int
    gap: float
    explained: float


@dataclass(frozen=True, slots=True)
class Followed:
    """A choice, with another run's in every row in which the two differ by ties alone.

    indices: [rows, k]. tied: rows in which the other's was taken and is another. widest: of these,
    the pair furthest apart in units of what rounding explains; wrong: rows in which rounding does
    not explain the other choice; worst: of these, the pair furthest apart.
    """

    indices: I64
    tied: Mask
    wrong: Mask
    widest: Gap | None = None
    worst: Gap | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One operator that chooses, in sentences. tied: rows that chose otherwise among ties, of
    `rows`; first: the first few of them.
    """

    operator: str
    rows: int
    tied: int = 0
    first: tuple[tuple[int, ...], ...] = ()
    widest: Gap | None = None
    worst: Gap | None = None
    where: tuple[int, ...] = field(default=())

    @property
    def of_ties(self) -> str:
        """What is said of the rows that chose otherwise among ties, "" when there are none."""
        if not self.tied or self.widest is None:
            return ""
        rows = ", ".join(str(list(row)) for row in self.first) + (
            ", ..." if self.tied > len(self.first) else ""
        )
        apart = (
            f"at most {self.widest.gap:.3g} apart, rounding explains {self.widest.explained:.3g}"
            if self.widest.gap
            else "equal"
        )
        return (
            f"{self.operator} chooses otherwise in {self.tied} of {self.rows} rows ({rows}), "
            f"among scores that tie: {apart}"
        )

    @property
    def of_the_wrong(self) -> str:
        """What is said of a choice that rounding does not explain, "" when there is none."""
        if self.worst is None:
            return ""
        worst = self.worst
        at = f"{self.operator} in row {list(self.where)}" if self.where else self.operator
        if math.isinf(worst.gap):
            return (
                f"{at} takes {worst.target} where the reference's operators take "
                f"{worst.reference}, which no scores explain"
            )
        return (
            f"{at} takes {worst.target} where the reference's operators take {worst.reference}: "
            f"their scores are {worst.gap:.3g} apart, rounding explains {worst.explained:.3g}"
        )


def noise_of(wide: F64, working: F64, chosen: I64, terms: int) -> F64:
    """By how much rounding moves each row's scores (one standard deviation), [rows, n].

    wide, working: the scores, [rows, n], in wide arithmetic and in the dtype that the target works
    in. chosen: [rows, k], which are taken. terms: the length of the longest sum behind a score.
    """
    size = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    middle = np.median(size, axis=1, keepdims=True)
    taken = np.take_along_axis(size, np.clip(chosen, 0, wide.shape[1] - 1), 1).max(
        axis=1, keepdims=True, initial=0.0
    )
    competes = (
        np.isfinite(wide)
        & np.isfinite(working)
        & (size <= TIE_COMPETING * np.maximum(taken, middle))
    )
    with np.errstate(invalid="ignore"):
        off = np.where(competes, working - wide, 0.0) ** 2
    by_row = np.sqrt(off.sum(1, keepdims=True) / np.maximum(competes.sum(1, keepdims=True), 1))
    by_column = np.sqrt(off.sum(0, keepdims=True) / np.maximum(competes.sum(0, keepdims=True), 1))
    floor = 0.3 * math.sqrt(max(terms, 1)) * U32 * middle
    # Behind a step (a score that is itself rounded) one element alone moves, by all of the step.
    itself = np.sqrt(off) * 2 / LIMITS.flip
    return np.asarray(np.maximum(np.maximum(by_row, by_column), np.maximum(itself, floor)))


def closed_by(noise: Noise, limits: Limits = LIMITS) -> Noise:
    """The widest gap between two scores that noise of this standard deviation in each of them
    closes.
    """
    return noise * limits.flip


def explained_by(a: F64, b: F64, noise: F64, u: float, limits: Limits = LIMITS) -> F64:
    """The widest gap between scores a and b that rounding closes: both rounded once, or moved by
    their noise.
    """
    with np.errstate(invalid="ignore"):
        once = u * (np.abs(a) + np.abs(b))
    return np.asarray(np.maximum(np.where(np.isfinite(once), once, 0.0), closed_by(noise, limits)))


def distance(a: F64, b: F64) -> F64:
    """|a - b|; 0 for equal infinities and for two NaN, inf for what cannot be subtracted."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap)))


def follow(
    own: I64,
    other: I64,
    scores: F64,
    noise: F64,
    u: float,
    *,
    ordered: bool = True,
    distinct: bool = True,
    limits: Limits = LIMITS,
) -> Followed:
    """`own`, with the rows of `other` that differ from it by ties alone.

    own, other: [rows, k], what is chosen from scores [rows, n], by rank. noise: of `noise_of`. u:
    unit roundoff of the scores' dtype, 0 for exact kinds. ordered: do ranks count, or only which
    are chosen? distinct: is no candidate chosen twice in a row?
    """
    n = scores.shape[1]
    differs = (own != other).any(axis=1)
    rows = np.flatnonzero(differs)
    tied, wrong = np.zeros(len(own), bool), np.zeros(len(own), bool)
    if not rows.size:
        return Followed(own, tied, wrong)
    mine, theirs = own[rows], other[rows]
    inside = (theirs >= 0) & (theirs < n)
    held = np.where(inside, theirs, 0)
    if not ordered:
        mine, held = (
            np.take_along_axis(x, np.argsort(np.take_along_axis(scores[rows], x, 1), axis=1), 1)
            for x in (mine, held)
        )
    a, b = (np.take_along_axis(scores[rows], x, 1) for x in (mine, held))
    moved = np.maximum(*(np.take_along_axis(noise[rows], x, 1) for x in (mine, held)))
    gap = np.where(inside if ordered else inside.all(axis=1, keepdims=True), distance(a, b), np.inf)
    gap = np.where(mine == held, np.where(inside, 0.0, np.inf), gap) if ordered else gap
    if distinct:
        again = np.sort(theirs, axis=1)
        gap[(again[:, 1:] == again[:, :-1]).any(axis=1)] = np.inf
    explained = explained_by(a, b, moved, u, limits)
    beyond = gap > explained
    bad = beyond.any(axis=1)
    tied[rows[~bad]], wrong[rows[bad]] = True, True
    indices = own.copy()
    indices[rows[~bad]] = theirs[~bad]

    def at(mask: Mask, size: F64) -> Gap | None:
        if not mask.any():
            return None
        i, j = np.unravel_index(int(np.argmax(np.where(mask, size, -1.0))), size.shape)
        return Gap(
            int(rows[i]),
            int(j),
            int(mine[i, j]),
            int(held[i, j] if inside[i, j] else theirs[i, j]),
            float(gap[i, j]),
            float(explained[i, j]),
        )

    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(gap > 0, gap / explained, 0.0)
    swapped = (mine - held != 0) & ~bad.reshape(-1, 1)
    return Followed(
        indices,
        tied,
        wrong,
        at(swapped, share),
        at(beyond & (mine != held), gap) or at(beyond, gap),
    )


def alternatives(
    own: I64, scores: F64, noise: F64, u: float, most: int, limits: Limits = LIMITS
) -> list[I64]:
    """Other choices that are as good as `own`, each for all rows at once: in the n-th, every row
    with n of them has its n-th.

    own, scores, noise, u: as for `follow`. most: how many. In each, one candidate that was taken is
    exchanged for one that was not, or changes places with the next that was taken; nearest first.
    """
    rows, k = own.shape
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, own, True, 1)
    swaps: list[list[tuple[float, int, int]]] = [[] for _ in range(rows)]
    for rank in range(k):
        chosen = own[:, rank : rank + 1]
        a = np.take_along_axis(scores, chosen, 1)
        gap = distance(np.broadcast_to(a, scores.shape), scores)
        moved = np.maximum(np.take_along_axis(noise, chosen, 1), noise)
        within = gap <= explained_by(np.broadcast_to(a, scores.shape), scores, moved, u, limits)
        fits = within & ~taken
        if rank + 1 < k:
            after = own[:, rank + 1 : rank + 2]
            np.put_along_axis(fits, after, np.take_along_axis(within, after, 1), 1)
        for row, candidate in np.argwhere(fits):
            swaps[row].append((float(gap[row, candidate]), rank, int(candidate)))
    out: list[I64] = []
    for number in range(most):
        there = [row for row in range(rows) if len(swaps[row]) > number]
        if not there:
            break
        made = own.copy()
        for row in there:
            _, rank, candidate = sorted(swaps[row])[number]
            made[row, made[row] == candidate] = made[row, rank]
            made[row, rank] = candidate
        out.append(made)
    return out


@dataclass(frozen=True, slots=True)
class RankedScores:
    """Indices of two runs, each judged by its own scores. tied: rows in which the target's are
    others, and hold what the ranks ask for; wrong: rows in which they do not; worst: of these, the
    pair furthest apart.
    """

    tied: Mask
    wrong: Mask
    worst: Gap | None = None


def by_rank(own: I64, other: I64, scores: F64, others_scores: F64, u: float) -> RankedScores | None:
    """Does what the target chose have the ranks among its own scores that the reference's has among
    the reference's?

    Without the operator, what the reference chose tells the ranks: those of a top-k, a sort, an
    argmax, or the same ranks in all of several rows. None where these are no ranks of such a
    choice, or the extents do not fit. own, other: [rows, k]; scores, others_scores: [rows, n]; u:
    unit roundoff of the coarser of both.
    """
    n = scores.shape[1]
    if (
        scores.shape != others_scores.shape
        or own.min(initial=0) < 0
        or own.max(initial=0) >= n
        or np.isnan(scores).any()
    ):
        return None
    lowest, highest = _ranks(scores, own)
    at, last = lowest.max(axis=0), highest.min(axis=0)
    ranks = np.arange(own.shape[1])
    ends = [np.asarray(r) for r in (n - 1 - ranks, ranks) if ((at <= r) & (r <= last)).all()]
    if not ends and (len(own) < TIE_ROWS or (at > last).any()):
        return None
    asked = np.broadcast_to(ends[0] if ends else at, own.shape)
    wanted = np.take_along_axis(np.sort(others_scores, axis=1), asked, 1)
    inside = (other >= 0) & (other < n)
    taken = np.take_along_axis(others_scores, np.where(inside, other, 0), 1)
    gap = np.where(inside, distance(wanted, taken), np.inf)
    if own.shape[1] > 1:
        again = np.sort(other, axis=1)
        gap[(again[:, 1:] == again[:, :-1]).any(axis=1)] = np.inf
    explained = explained_by(wanted, taken, np.zeros_like(gap), u)
    differs = np.asarray((own != other).any(axis=1))
    bad = np.asarray((gap > explained).any(axis=1))
    worst = None
    if bad.any():
        i, j = np.unravel_index(int(np.argmax(np.where(gap > explained, gap, -1.0))), gap.shape)
        rank = np.argsort(others_scores[i], kind="stable")[asked[i, j]]
        worst = Gap(
            int(i), int(j), int(rank), int(other[i, j]), float(gap[i, j]), float(explained[i, j])
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
    taken = np.take_along_axis(rank, chosen, 1)
    return np.take_along_axis(first, taken, 1), np.take_along_axis(last, taken, 1)
