"""Which containers made tensors of their own between their children, of all calls of a run at once:
what `records.regions` and the collector of segments find call by call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whence.records.slots import is_input, is_read, is_written

Column = np.ndarray[Any, np.dtype[Any]]

_DEEPEST = 200  # calls inside each other
_NEVER = np.iinfo(np.int64).max
_STEP = 4  # of time between two events, so that others fit between


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
        by_parent = self.order[np.argsort(self.parent[self.order], kind="stable")]
        parents = self.parent[by_parent]
        starts = np.flatnonzero(np.diff(parents, prepend=-2))
        counts = np.diff(np.append(starts, parents.size))
        stretch = np.empty_like(self.order)
        stretch[by_parent] = np.arange(parents.size) - np.repeat(starts, counts)
        return stretch

    @cached_property
    def children(self) -> Column:
        """How many children each call has."""
        return np.bincount(self.parent[self.parent >= 0], minlength=self.parent.size)


def own_stretches(
    times: CallTimes, columns: Mapping[str, Any], names: Sequence[str], given: Column
) -> tuple[Column, Column]:
    """(container, stretch) of every stretch that made a tensor, in the order of execution. given:
    records that a caller chose and no operator made.

    A stretch made what the next child reads, or the container returns, and nobody had before: that
    was not visible, or not seen at a boundary, when the stretch ended.
    """
    calls = np.repeat(np.arange(times.order.size), np.diff(columns["refs_at"]))
    records = columns["ref_record"]
    inputs, read, written = (
        np.array([test(name) for name in names])[columns["ref_slot"]]
        for test in (is_input, is_read, is_written)
    )
    begin, end = times.begin[calls], times.end[calls]
    is_leaf = times.children[calls] == 0
    to_child = inputs & (times.parent[calls] >= 0)
    returned = written & ~is_leaf
    ends = np.where(to_child, begin, end) - 2  # of the stretch that a tensor was made in
    number = int(records.max(initial=-1)) + 1
    visible, seen = np.full(number, _NEVER), np.full(number, _NEVER)
    for first, which, when in (
        (visible, read, begin),
        (visible, written, end),
        (seen, inputs, begin),
        (seen, written & is_leaf, begin),
        (seen, to_child | returned, ends),
    ):
        np.minimum.at(first, records[which], when[which])
    is_given = np.zeros(number, bool)
    is_given[given] = True
    is_candidate = to_child | returned
    had = (visible[records] < ends) & (seen[records] < ends)
    own = np.flatnonzero(is_candidate & ~had & ~is_given[records])
    own = own[np.unique(ends[own], return_index=True)[1]]
    made_by = calls[own]
    of_child = to_child[own]
    containers = np.where(of_child, times.parent[made_by], made_by)
    stretches = np.where(of_child, times.stretch[made_by], times.children[made_by])
    return containers, stretches
