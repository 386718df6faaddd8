"""Which containers made tensors of their own between their children, of all calls of a run at once:
what `records.regions` and the collector of segments find call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whence.records.slots import is_input, is_read, is_written

Column = np.ndarray[Any, np.dtype[Any]]

_DEEPEST = 200  # calls inside each other
_NARROW = 1 << 27  # calls whose times are numbers of 32 bits
_CALLS = 1 << 19  # whose tensors are looked at at once
_STEP = 4  # of time between two events, so that others fit between
_BEFORE = 2  # an event, in time


@dataclass(frozen=True)
class CallTimes:
    """When each call began and ended, in steps of a run in which one call works at a time.

    order: of the calls, by when they began. parent: of each, -1 for a root.
    """

    order: Column
    parent: Column
    begin: Column
    end: Column

    @staticmethod
    def of(order: Column, parent: Column) -> CallTimes | None:
        """None where calls are not one inside the other."""
        if order.size < _NARROW:  # half the memory
            order, parent = order.astype(np.int32), parent.astype(np.int32)
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        depth, above = np.zeros_like(order), parent.copy()
        deepest = 0
        while (inside := np.flatnonzero(above >= 0)).size:
            depth[inside] += 1
            above[inside] = parent[above[inside]]
            deepest += 1
            if deepest > _DEEPEST:
                return None
        size, last = np.ones_like(order), rank.copy()
        for level in range(deepest, 0, -1):
            calls = np.flatnonzero(depth == level)
            np.add.at(size, parent[calls], size[calls])
            np.maximum.at(last, parent[calls], last[calls])
        is_behind = (parent < 0) | (rank > rank[parent])
        if not is_behind.all() or not np.array_equal(last, rank + size - 1):
            return None
        begin = _STEP * (2 * rank - depth)
        return CallTimes(order, parent, begin, begin + _STEP * (2 * size - 1))

    @cached_property
    def stretch(self) -> Column:
        """Which child of its parent each call is."""
        by_parent = self._by_parent
        parents = self.parent[by_parent]
        starts = np.flatnonzero(np.diff(parents, prepend=-2))
        counts = np.diff(np.append(starts, parents.size))
        stretch = np.empty_like(self.order)
        stretch[by_parent] = np.arange(parents.size) - np.repeat(starts, counts)
        return stretch

    @cached_property
    def _by_parent(self) -> Column:
        """The calls, children of one call together and in order."""
        by_parent: Column = self.order[np.argsort(self.parent[self.order], kind="stable")]
        return by_parent

    def ends(self, containers: Column, stretches: Column) -> Column:
        """When stretches of containers end: right before a child begins, or the container ends."""
        by_parent = self._by_parent
        starts = np.searchsorted(self.parent[by_parent], containers)
        children = by_parent[np.minimum(starts + stretches, by_parent.size - 1)]
        is_last = stretches >= self.children[containers]
        ends: Column = np.where(is_last, self.end[containers], self.begin[children]) - _BEFORE
        return ends

    @cached_property
    def children(self) -> Column:
        """How many children each call has."""
        return np.bincount(self.parent[self.parent >= 0], minlength=self.parent.size)


def own_stretches(
    times: CallTimes, columns: Mapping[str, Any], names: Sequence[str], given: Column
) -> tuple[Column, Column, Column]:
    """(container, stretch, when it ends) of every stretch that made a tensor, in the order of
    execution. given: records that a caller chose and no operator made.

    A stretch made what the next child reads, or the container returns, and nobody had before: that
    was not visible, or not seen at a boundary, when the stretch ended.
    """
    is_leaf = times.children == 0
    tests = [np.array([test(name) for name in names]) for test in (is_input, is_read, is_written)]

    def parts() -> Iterator[_Tensors]:
        for first in range(0, times.order.size, _CALLS):
            yield _Tensors.of(times, columns, is_leaf, tests, slice(first, first + _CALLS))

    number = int(columns["ref_record"].max(initial=-1)) + 1
    never = np.iinfo(times.end.dtype).max
    visible, seen = (np.full(number, never, times.end.dtype) for _ in range(2))
    for part in parts():
        part.note(visible, seen)
    visible[given] = seen[given] = -1  # before everything
    found: list[tuple[Column, Column, Column]] = [(np.empty(0, np.int64),) * 3]
    for part in parts():
        own = part.own(visible, seen)
        found.append((part.calls[own], part.ends[own], part.to_child[own]))
    made_by, ends, of_child = (np.concatenate(column) for column in zip(*found, strict=True))
    ends, first_at = np.unique(ends, return_index=True)
    made_by, of_child = made_by[first_at].astype(np.int64), of_child[first_at].astype(bool)
    containers = np.where(of_child, times.parent[made_by], made_by)
    stretches = np.where(of_child, times.stretch[made_by], times.children[made_by])
    return containers, stretches, ends


@dataclass(frozen=True)
class _Tensors:
    """The tensors of some calls, one after the other. ends: of the stretch each was made in."""

    records: Column
    calls: Column
    begin: Column
    end: Column
    ends: Column
    read: Column
    written: Column
    is_leaf: Column
    to_child: Column

    @staticmethod
    def of(
        times: CallTimes,
        columns: Mapping[str, Any],
        is_leaf: Column,
        tests: Sequence[Column],
        some: slice,
    ) -> _Tensors:
        refs_at = columns["refs_at"][some.start : some.stop + 1]
        refs = slice(int(refs_at[0]), int(refs_at[-1]))
        calls = np.repeat(np.arange(some.start, some.start + refs_at.size - 1), np.diff(refs_at))
        slots = columns["ref_slot"][refs]
        inputs, read, written = (test[slots] for test in tests)
        begin, end = times.begin[calls], times.end[calls]
        to_child = inputs & (times.parent[calls] >= 0)
        ends = np.where(to_child, begin, end) - _BEFORE
        return _Tensors(
            columns["ref_record"][refs], calls, begin, end, ends,
            read, written, is_leaf[calls], to_child,
        )  # fmt: skip

    @property
    def is_candidate(self) -> Column:
        """What a child reads, or a container returns."""
        return self.to_child | (self.written & ~self.is_leaf)

    def note(self, visible: Column, seen: Column) -> None:
        """When each record is visible, and seen at a boundary, at the earliest."""
        for first, which, when in (
            (visible, self.read, self.begin),
            (visible, self.written, self.end),
            (seen, self.read, self.begin),
            (seen, self.written & self.is_leaf, self.begin),
            (seen, self.is_candidate, self.ends),
        ):
            np.minimum.at(first, self.records[which], when[which])

    def own(self, visible: Column, seen: Column) -> Column:
        """Places of tensors that the stretch before them made."""
        had = (visible[self.records] < self.ends) & (seen[self.records] < self.ends)
        return np.flatnonzero(self.is_candidate & ~had)
