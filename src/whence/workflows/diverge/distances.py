"""How far two runs are apart, tensor by tensor and step by step, computed from their statistics.

The places of a step are the tensors where they first appear in it; each knows the tensors that it
is made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whence.records.slots import SlotKind, is_param, is_written, slot_of_kind
from whence.records.training import GRADIENTS, OPTIMIZER, TAKEN_GRADIENT
from whence.workflows.diverge.figures import (
    FIGURES,
    SLOTS,
    CallKey,
    Column,
    Names,
    RunFigures,
    roundoff,
)

COUNT, LOW, HIGH, MEAN, NORM, NAN, INF, ZERO, ABS, CUBE, FOURTH = range(len(FIGURES))


@dataclass(frozen=True, slots=True)
class Tested:
    """The records of a reference that are compared.

    rows: for each tensor and step its place, the position of the step among `steps`, its record,
    and the moment at which it first appeared. number: of each place.
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
    """Distances between two runs, as arrays (steps, places).

    error: estimated root mean square of the difference; 0 where both are equal, inf where only one
    is finite, NaN where nothing is compared. scale: root mean square of the tensor. is_permuted:
    the same elements in another order. is_other_form: another dtype or shape. record: of the other
    run, -1 for none. roundoff: by place, the coarsest unit roundoff of its call in both runs.
    roundoff_of_place: unit roundoff of the tensor itself, 0 for integers.
    """

    error: Column
    scale: Column
    is_permuted: Column
    is_other_form: Column
    record: Column
    roundoff: Column
    roundoff_of_place: Column


def tested(figures: RunFigures, names: Names) -> Tested:
    """Select the records of a reference that are compared."""
    sights, moments = _first_sights(figures, names)
    builder = _PlaceBuilder(figures, names)
    places = builder.places(sights, moments)
    place = builder.index(figures.place[sights])
    steps = figures.steps
    step = np.searchsorted(steps, figures.step[figures.call[sights]])
    number = np.array([p.number for p in places.place], np.int64)
    return Tested(figures, places, place, step, figures.record[sights], moments, steps, number)


def distances(reference: Tested, target: RunFigures, names: Names) -> Distances:
    """Compute the distances of a run from the reference."""
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
    """For pairs of records: (whether the bits are equal, whether the elements are equal in some
    order).
    """
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
    """(root mean square of the difference, root mean square of the tensor).

    Each statistic gives an estimate as if elements differed independently; a common factor is
    estimated separately.
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
    """(coarsest unit roundoff of the calls of each place in both runs, unit roundoff of the
    tensor).
    """
    units = np.array([roundoff(w) if isinstance(w, str) else 0.0 for w in names.words])
    key_of = reference.number // SLOTS
    by_key = np.zeros(len(names.keys))
    for run in (reference.figures, target):
        np.maximum.at(by_key, run.key[run.call], units[run.dtype[run.record]])
    own = np.zeros(len(reference.number))
    np.maximum.at(own, reference.place, units[reference.figures.dtype[reference.record]])
    return by_key[key_of], own


class Place(NamedTuple):
    """A tensor of a call, whatever the step.

    number: combines a call's number and a slot. moment: when it first appears within its first
    step. given: it comes from outside of all calls (the batch, a parameter, a state).
    """

    number: int
    moment: int
    is_given: bool


@dataclass(frozen=True, slots=True)
class Places:
    """place: all compared tensors, in the order in which they first appear. causes: for each of
    them the numbers of the tensors that it is made from.
    """

    place: list[Place]
    causes: list[list[int]]


def _first_sights(figures: RunFigures, names: Names) -> tuple[Column, Column]:
    """Where each record first appears in each step, in the order of the clock: (reference, moment).

    Gradients that an optimiser takes are included in any case.
    """
    writes = _is_written(names)[figures.slot]
    moment = np.where(writes, figures.end[figures.call], figures.begin[figures.call])
    step = figures.step[figures.call]
    order = np.lexsort((figures.call, moment, step))
    seen = figures.record[order] + (figures.record.max(initial=0) + 1) * step[order]
    _, first = np.unique(seen, return_index=True)
    is_chosen = np.zeros(order.size, bool)
    is_chosen[first] = True
    chosen = order[is_chosen | _is_taken(figures, names)[order]]
    return chosen, moment[chosen]


def _is_taken(figures: RunFigures, names: Names) -> Column:
    """Mask of references to gradients as an optimiser takes them.

    One of the runs may have written to such a gradient after the backward pass, so it is compared
    again.
    """
    slots = np.array([isinstance(w, str) and w == TAKEN_GRADIENT for w in names.words], bool)
    steps = np.array([key.phase == OPTIMIZER for key in names.keys], bool)
    sums = np.array([key.op == GRADIENTS for key in names.keys], bool)
    key = figures.key[figures.call]
    taken: Column = (slots[figures.slot] & steps[key]) | (
        sums[key] & _is_written(names)[figures.slot]
    )
    return taken


def _is_written(names: Names) -> Column:
    return np.array([isinstance(word, str) and is_written(word) for word in names.words], bool)


class _PlaceBuilder:
    """Finds the places of a run and the tensors that each is made from, in the first step that has
    it.
    """

    def __init__(self, figures: RunFigures, names: Names) -> None:
        self._figures, self._names = figures, names
        self._number: dict[int, int] = {}
        self._made = Places([], [])
        self._call_bounds = _bounds(figures.step)

    def places(self, sights: Column, moments: Column) -> Places:
        """The places of all first appearances."""
        figures = self._figures
        step = figures.step[figures.call[sights]]
        for low, high in _runs(step):
            some = sights[low:high]
            if not set(figures.place[some].tolist()) <= self._number.keys():
                self._add(int(step[low]), some, moments[low:high])
        return self._made

    def index(self, places: Column) -> Column:
        """Position of each place among all of them, -1 for none."""
        known = np.array(sorted(self._number), np.int64)
        position = np.array([self._number[p] for p in known.tolist()], np.int64)
        if not known.size:
            return np.full(places.shape, -1)
        at = np.minimum(np.searchsorted(known, places), known.size - 1)
        return np.where(known[at] == places, position[at], -1)

    def _add(self, step: int, sights: Column, moments: Column) -> None:
        """Add the places that appear first in this step."""
        figures = self._figures
        tree = _Tree(figures, self._call_bounds[step], self._names)
        place_of: dict[int, int] = {}
        fresh: list[tuple[int, int]] = []
        for sight, moment in zip(sights.tolist(), moments.tolist(), strict=True):
            number = int(figures.place[sight])
            if number not in self._number:
                self._number[number] = len(self._made.place)
                call = int(figures.call[sight])
                is_given = tree.is_given(call, self._slot(sight))
                self._made.place.append(Place(number, moment, is_given))
                fresh.append((self._number[number], sight))
            place_of.setdefault(int(figures.record[sight]), self._number[number])
        self._made.causes.extend([] for _ in fresh)
        for number, sight in fresh:
            if self._made.place[number].is_given:
                continue
            call, slot = int(figures.call[sight]), self._slot(sight)
            if (origin := place_of[int(figures.record[sight])]) != number:
                self._made.causes[number] = [origin]
                continue
            found = (place_of.get(record, number) for record in tree.sources(call, slot))
            self._made.causes[number] = sorted(set(found) - {number})

    def _slot(self, sight: int) -> str:
        return str(self._names.words[self._figures.place[sight] % SLOTS])


class _Tree:
    """The call tree of one step, and the records that each call read and wrote."""

    def __init__(self, figures: RunFigures, calls: Column, names: Names) -> None:
        self._names, self._figures = names, figures
        self._order = sorted(calls.tolist(), key=lambda c: int(figures.begin[c]))
        self._parent: dict[int, int] = {}
        self._kids: dict[int, list[int]] = {-1: []}
        self._reads: dict[int, dict[str, int]] = {c: {} for c in self._order}
        self._writes: dict[int, list[int]] = {c: [] for c in self._order}
        self._nest()
        low, high = np.searchsorted(figures.call, [calls.min(), calls.max() + 1])
        members = set(self._order)
        for call, slot, record in zip(
            figures.call[low:high].tolist(),
            figures.slot[low:high].tolist(),
            figures.record[low:high].tolist(),
            strict=True,
        ):
            if call in members:
                word = str(names.words[slot])
                if is_written(word):
                    self._writes[call].append(record)
                else:
                    self._reads[call][word] = record

    def _nest(self) -> None:
        for call in self._order:
            parent = int(self._figures.parent[call])
            self._parent[call] = parent
            self._kids.setdefault(parent, []).append(call)

    def _key(self, call: int) -> CallKey:
        key: CallKey = self._names.keys[self._figures.key[call]]
        return key

    def is_given(self, call: int, slot: str) -> bool:
        """Whether a tensor comes from outside of all calls."""
        if is_written(slot):
            return False
        if is_param(slot):
            return True
        key = self._key(call)
        if key.phase == OPTIMIZER:
            return slot != TAKEN_GRADIENT and key.op not in ("", GRADIENTS)
        return key.phase == "forward" and self._parent[call] < 0

    def sources(self, call: int, slot: str) -> list[int]:
        """The records that a tensor is made from."""
        found = []
        if is_written(slot):
            reads = self._reads[call]
            if self._key(call).op == GRADIENTS:  # each gradient from itself; the norm is of all
                reads = {s: r for s, r in reads.items() if s == slot_of_kind(slot, SlotKind.INPUT)}
            found = [*reads.values(), *self._of(self._kids.get(call, []))]
        if not found:
            found = self._before(call)
        return found

    def _before(self, call: int) -> list[int]:
        """The records available to the enclosing code at the moment of this call."""
        parent, begin = self._parent[call], self._figures.begin
        before = [c for c in self._kids[parent] if begin[c] < begin[call]]
        reads = self._reads[parent].values() if parent >= 0 else ()
        found = [*reads, *self._of(before)]
        if parent < 0:
            inner = [kid for c in before for kid in self._kids.get(c, [])]
            found += self._of(inner)
        elif not found:
            found = self._before(parent)
        return found

    def _of(self, calls: list[int]) -> list[int]:
        return [record for call in calls for record in self._writes[call]]


def _runs(values: Column) -> list[tuple[int, int]]:
    """Bounds (start, stop) of stretches of equal values."""
    if not values.size:
        return []
    edges = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), values.size], strict=True))


def _bounds(step: Column) -> dict[int, Column]:
    """Groups the calls of each step."""
    order = np.argsort(step, kind="stable")
    return {int(step[order[low]]): order[low:high] for low, high in _runs(step[order])}
