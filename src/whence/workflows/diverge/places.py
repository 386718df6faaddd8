"""The places of a step: tensors where they are first seen in it, and what each is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whence.records.slots import SlotKind, is_param, is_written, slot_of_kind
from whence.records.training import GRADIENTS, OPTIMIZER, TAKEN_GRADIENT
from whence.workflows.diverge.figures import SLOTS, CallKey, Column, Names, RunFigures


class Place(NamedTuple):
    """A tensor of a call, whatever the step. number: a call's number and a slot. moment: when it
    was first seen in the step that it was first seen in. given: it comes from outside of all calls
    (the batch, a parameter, a state).
    """

    number: int
    moment: int
    is_given: bool


@dataclass(frozen=True, slots=True)
class Places:
    """place: of all tested tensors, in the order in which they were first seen. causes: for each
    the numbers of those that it is made from.
    """

    place: list[Place]
    causes: list[list[int]]


def first_sights(figures: RunFigures, names: Names) -> tuple[Column, Column]:
    """(reference, its moment) of the first sight of each record in each step, and of gradients that
    an optimiser takes, in the order of the clock.
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
    """References of gradients as an optimiser takes them: something may have written to them after
    the backward pass in the other run alone.
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


class PlaceBuilder:
    """Finds the places of a run, and what each is made from, in the first step that has it."""

    def __init__(self, figures: RunFigures, names: Names) -> None:
        self._figures, self._names = figures, names
        self._number: dict[int, int] = {}
        self._made = Places([], [])
        self._call_bounds = _bounds(figures.step)

    def places(self, sights: Column, moments: Column) -> Places:
        """All places of these first sights."""
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
        """The new places of one step."""
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
    """The calls of one step, which holds which, and the records that they read and wrote."""

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
        """Does it come from outside of all calls?"""
        if is_written(slot):
            return False
        if is_param(slot):
            return True
        key = self._key(call)
        if key.phase == OPTIMIZER:
            return slot != TAKEN_GRADIENT and key.op not in ("", GRADIENTS)
        return key.phase == "forward" and self._parent[call] < 0

    def sources(self, call: int, slot: str) -> list[int]:
        """Records that a tensor is made from."""
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
        """What the code around a call had when it called it."""
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
    """Bounds of stretches of one value."""
    if not values.size:
        return []
    edges = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), values.size], strict=True))


def _bounds(step: Column) -> dict[int, Column]:
    """The calls of each step."""
    order = np.argsort(step, kind="stable")
    return {int(step[order[low]]): order[low:high] for low, high in _runs(step[order])}
