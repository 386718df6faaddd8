"""How far two runs are apart, tensor by tensor and step by step, from their figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whence.workflows.diverge.figures import FIGURES, SLOTS, Column, Names, RunFigures, roundoff
from whence.workflows.diverge.places import PlaceBuilder, Places, first_sights

COUNT, LOW, HIGH, MEAN, NORM, NAN, INF, ZERO, ABS, CUBE, FOURTH = range(len(FIGURES))


@dataclass(frozen=True, slots=True)
class Tested:
    """What is looked at of a reference. rows: for each tensor and step its place, the position of
    the step among `steps`, its record, and the moment when it was first seen. number: of each
    place.
    """

    figures: RunFigures
    places: Places
    place: Column
    step: Column
    record: Column
    moment: Column
    steps: Column
    number: Column

    def row(self, step: int, place: int) -> int:
        """The record of a place in a step, -1 for none."""
        found = np.flatnonzero((self.step == step) & (self.place == place))
        return int(self.record[found[0]]) if found.size else -1


@dataclass(frozen=True, slots=True)
class Distances:
    """Of two runs: steps in rows, places in columns. error: estimate of the root mean square of the
    difference, 0 where both are equal, inf where one alone is not finite, NaN where nothing is
    compared. scale: root mean square of the tensor. is_permuted: the same elements in another
    order. is_other_form: of another dtype or shape. record: of the other run, -1 for none.
    roundoff: by place, the coarsest of its call in both runs; roundoff_of_place: of the tensor
    itself, 0 for integers.
    """

    error: Column
    scale: Column
    is_permuted: Column
    is_other_form: Column
    record: Column
    roundoff: Column
    roundoff_of_place: Column


def tested(figures: RunFigures, names: Names) -> Tested:
    """What is looked at of a reference."""
    sights, moments = first_sights(figures, names)
    builder = PlaceBuilder(figures, names)
    places = builder.places(sights, moments)
    place = builder.index(figures.place[sights])
    steps = figures.steps
    step = np.searchsorted(steps, figures.step[figures.call[sights]])
    number = np.array([p.number for p in places.place], np.int64)
    return Tested(figures, places, place, step, figures.record[sights], moments, steps, number)


def distances(reference: Tested, target: RunFigures, names: Names) -> Distances:
    """How far a run is from the reference."""
    shape = len(reference.steps), len(reference.places.place)
    other = _same_sights(reference, target)
    here = other >= 0
    at = reference.step[here], reference.place[here]
    a, b = reference.record[here], other[here]
    figures = reference.figures
    is_equal, is_permuted = _equal(figures, a, target, b)
    is_other_form = (figures.shape[a] != target.shape[b]) | (figures.dtype[a] != target.dtype[b])
    same_shape = figures.values[a, COUNT] == target.values[b, COUNT]
    error, scale = _error(figures.values[a], target.values[b])
    error = np.where(is_equal | is_permuted, 0.0, np.where(same_shape, error, np.nan))
    out = Distances(
        np.full(shape, np.nan),
        np.full(shape, np.nan),
        np.zeros(shape, bool),
        np.zeros(shape, bool),
        np.full(shape, -1, np.int64),
        *_roundoff(reference, target, names),
    )
    for matrix, values in (
        *((out.error, error), (out.scale, scale), (out.is_permuted, is_permuted & ~is_equal)),
        *((out.is_other_form, is_other_form), (out.record, b)),
    ):
        matrix[at] = values
    return out


def _same_sights(reference: Tested, target: RunFigures) -> Column:
    """The record of the other run for each row of the reference, -1 for none."""
    places = len(reference.number)
    order = np.argsort(reference.number)
    known = reference.number[order]
    if not known.size or not target.place.size:
        return np.full(reference.place.shape, -1)
    at = np.minimum(np.searchsorted(known, target.place), places - 1)
    steps = target.step[target.call]
    step = np.minimum(np.searchsorted(reference.steps, steps), len(reference.steps) - 1)
    use = (known[at] == target.place) & (reference.steps[step] == steps)
    codes, first = np.unique(step[use] * places + order[at[use]], return_index=True)
    records = target.record[use][first]
    wanted = reference.step * places + reference.place
    found = np.minimum(np.searchsorted(codes, wanted), max(len(codes) - 1, 0))
    if not codes.size:
        return np.full(reference.place.shape, -1)
    return np.where(codes[found] == wanted, records[found], -1)


def _equal(one: RunFigures, a: Column, other: RunFigures, b: Column) -> tuple[Column, Column]:
    """(the same bits, the same elements in some order) of pairs of records."""
    alike = (one.dtype[a] == other.dtype[b]) & (one.shape[a] == other.shape[b])
    digests = one.digest[a], other.digest[b]
    hashed = (digests[0] != 0) & (digests[1] != 0)
    same = hashed & (digests[0] == digests[1])
    va, vb = one.values[a], other.values[b]
    figures = ((va == vb) | (np.isnan(va) & np.isnan(vb))).all(axis=1) & ~np.isnan(va[:, COUNT])
    checksum = (one.checksum[a] != 0) & (one.checksum[a] == other.checksum[b])
    is_same = alike & np.where(hashed, same, figures & (one.checksum[a] == other.checksum[b]))
    return is_same, alike & checksum & ~is_same


def _error(a: Column, b: Column) -> tuple[Column, Column]:
    """(root mean square of the difference, that of the tensor): from each figure an estimate of it,
    as if elements differ independently; what is a common factor is taken apart.
    """
    with np.errstate(all="ignore"):
        n = np.maximum(a[:, COUNT], 1)
        root = np.sqrt(n)
        scale = np.fmax(a[:, NORM], b[:, NORM]) / root
        factor = np.where(a[:, NORM] > 0, (b[:, NORM] - a[:, NORM]) / a[:, NORM], 0.0)
        factor = np.where(np.abs(factor) < 0.5, factor, 0.0)
        left = b - a * (1 + factor[:, None])
        cube = (b[:, CUBE] - a[:, CUBE] * (1 + factor) ** 3) / (3 * np.sqrt(a[:, FOURTH]))
        parts = np.stack(
            [
                left[:, MEAN] * root,
                left[:, ABS] / root,
                left[:, LOW],
                left[:, HIGH],
                np.where(a[:, FOURTH] > 0, cube, np.nan),
            ]
        )
        parts = np.where(np.isfinite(parts), parts, np.nan)
        used = np.maximum((~np.isnan(parts)).sum(axis=0), 1)
        spread = np.sqrt(np.nansum(parts**2, axis=0) / used)
        common = np.abs(b[:, NORM] - a[:, NORM]) / root
        error = np.hypot(spread, common)
    broken = (a[:, [NAN, INF]] > 0) != (b[:, [NAN, INF]] > 0)
    unknown = np.isnan(a[:, COUNT]) | np.isnan(b[:, COUNT])
    error = np.where(broken.any(axis=1), np.inf, error)
    return np.where(unknown, np.nan, error), scale


def _roundoff(reference: Tested, target: RunFigures, names: Names) -> tuple[Column, Column]:
    """(the coarsest rounding of the calls of each place in both runs, that of its own tensor)."""
    units = np.array([roundoff(w) if isinstance(w, str) else 0.0 for w in names.words])
    key_of = reference.number // SLOTS
    by_key = np.zeros(len(names.keys))
    for run in (reference.figures, target):
        np.maximum.at(by_key, run.key[run.call], units[run.dtype[run.record]])
    own = np.zeros(len(reference.number))
    np.maximum.at(own, reference.place, units[reference.figures.dtype[reference.record]])
    return by_key[key_of], own
