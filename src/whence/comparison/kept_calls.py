"""Which calls the stages of a comparison have to see of two runs that differ in some tensors: told
from columns, of all calls at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whence.comparison.call_columns import CallColumns
from whence.comparison.own_tensors import Column
from whence.records.slots import (
    is_input,
    is_own_input,
    is_param,
    is_read_beside,
    is_written,
    slot_family,
    slot_kind,
)


@dataclass(frozen=True)
class Kept:
    """Which calls are looked at, by call, and of which all children are too. Of a container whose
    children are not, all tensors are equal.
    """

    is_kept: Column
    is_open: Column


def kept_calls(columns: CallColumns, differ: Column, *, makers: bool) -> Kept | None:
    """The calls of roots, and all children of a call in or below which a tensor differs: what is
    between them is numbered by them.

    A container is opened too where calls that are kept and calls inside it share a tensor that it
    does not hand on itself. differ: by record. makers: keep the calls that made what such a call
    reads, which a replay asks for. None where parameters or integers differ, or where slots or
    places of calls are none of a forward pass.
    """
    refs = _Refs(columns)
    is_differing = differ[refs.record]
    dtypes = columns.columns["dtype"][differ]
    if columns.is_exact()[dtypes].any() or not refs.are_plain() or not _are_in_place(columns):
        return None
    if refs.holds_parameters(is_differing):
        return None
    parent = columns.columns["parent"]
    is_open = np.zeros(parent.size, bool)
    fresh = np.unique(refs.call[is_differing])
    while fresh.size:
        is_open[fresh] = True
        above = parent[fresh]
        above = np.unique(above[above >= 0])
        fresh = above[~is_open[above]]
    differing = is_open.copy()
    has_children = columns.times.children > 0
    while True:
        is_kept = (parent < 0) | is_open[parent]
        is_closed = is_kept & ~is_open & has_children
        opened = refs.lacking(is_kept, is_closed, differing if makers else None)
        if not opened.size:
            return Kept(is_kept, is_open & has_children)
        is_open[opened] = True


def _are_in_place(columns: CallColumns) -> bool:
    """Is every call of the root and step of its parent, and all of one rank?"""
    of = columns.columns
    inside = np.flatnonzero(of["parent"] >= 0)
    above = of["parent"][inside]
    return not np.diff(of["rank"]).any() and all(
        np.array_equal(of[name][inside], of[name][above]) for name in ("root", "step")
    )


class _Refs:
    """References of calls to tensors, one call after the other."""

    def __init__(self, columns: CallColumns) -> None:
        self._parent, self._names = columns.columns["parent"], columns.names
        self.slot, self.record = columns.columns["ref_slot"], columns.columns["ref_record"]
        counts = np.diff(columns.columns["refs_at"])
        self.call = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
        self._number = columns.columns["dtype"].size
        self._is_param, self._is_written = (
            np.array([test(name) for name in self._names])[self.slot]
            for test in (is_param, is_written)
        )

    def are_plain(self) -> bool:
        """Are all tensors read or made by a forward pass, and no parameter changed by one?"""
        if self._marked(self._is_param)[self.record[self._is_written]].any():
            return False
        used = np.flatnonzero(np.bincount(self.slot, minlength=len(self._names)))
        return all(_is_plain_slot(self._names[number]) for number in used.tolist())

    def holds_parameters(self, some: Column) -> bool:
        """Is a parameter among some references?"""
        return bool((some & self._is_param).any())

    def lacking(self, is_kept: Column, is_closed: Column, differing: Column | None) -> Column:
        """Containers, of those that are closed, that hide what calls outside of them share, or made
        nothing. differing: by call; None where the makers of what these read need not be seen.
        """
        of_kept = is_kept[self.call]
        is_shown = self._marked(of_kept & ~self._is_param)
        hidden = np.flatnonzero(~of_kept & is_shown[self.record])
        tops = self._tops(self.call[hidden], is_kept)
        own = np.flatnonzero(is_closed[self.call])
        keys = tops * self._number + self.record[hidden]
        lone = ~np.isin(keys, self.call[own].astype(np.int64) * self._number + self.record[own])
        if differing is not None:
            is_read = self._marked(differing[self.call] & ~self._is_param)
            lone |= is_read[self.record[hidden]] & self._is_written[hidden]
        has_made = np.zeros(is_closed.size, bool)
        has_made[self.call[self._is_written]] = True
        return np.union1d(tops[lone], np.flatnonzero(is_closed & ~has_made))

    def _tops(self, calls: Column, is_kept: Column) -> Column:
        """The innermost kept call around each call."""
        tops = calls.astype(np.int64)
        while (inside := np.flatnonzero(~is_kept[tops])).size:
            tops[inside] = self._parent[tops[inside]]
        return tops

    def _marked(self, some: Column) -> Column:
        """Which records some references are to."""
        is_marked = np.zeros(self._number, bool)
        is_marked[self.record[some]] = True
        return is_marked


def _is_plain_slot(name: str) -> bool:
    if is_own_input(name) or is_read_beside(name) or slot_family(name) != slot_kind(name):
        return False
    return is_input(name) or is_param(name) or is_written(name)
