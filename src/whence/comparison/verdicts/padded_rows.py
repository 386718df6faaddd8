"""Ignores attention rows of fully masked queries: their value is undefined and no other row reads
them.

Fused attention gives zeros there, written-out attention the mean of all values, another nothing
finite. All are right, since no output at a real position depends on them. They are left out only
where both runs have the same mask, and only of outputs that everywhere else are what rounding
explains.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from whence import align, judge, metrics
from whence.comparison.paired_runs import PairedCall, PairedRuns
from whence.comparison.prepare.masks import Bits, visible
from whence.comparison.replays.semantics import Semantics
from whence.comparison.verdicts.declared.masked_rows import Keep, along_rows, error_where
from whence.errors import ElementsMissing
from whence.records import Call, Run
from whence.records.slots import input_name
from whence.results import SlotPair


class PaddedRows:
    """The rows of a comparison's tensors that are read, (batch, position), and the calls that
    differ in the others alone.
    """

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._read: dict[int, Bits | None] = {}
        self._excused: dict[int, Bits] = {}

    def semantics(self, pair: PairedCall) -> Semantics | None:
        """The reference's semantics at the rows that are read; None where all are."""
        read = self._rows(pair)
        if read is None:
            return None

        def keep(_slot: str, shape: tuple[int, ...]) -> np.ndarray | None:
            return along_rows(read, shape)

        return Semantics(keep=keep)

    def error(self, pair: PairedCall, slot: SlotPair) -> judge.PairError | None:
        """The error of a pair of tensors of a call over the rows that are read; None where all are,
        or it cannot be told.
        """
        read = self._rows(pair)
        arrays = self._paired.arrays(slot) if read is not None else None
        if read is None or arrays is None or arrays[0].shape != arrays[1].shape:
            return None
        keep = along_rows(read, arrays[0].shape)
        if keep is None:
            return None
        records = self._paired.records(slot)
        return error_where(keep, arrays, records, metrics.measure, judge.roundoff(*records))

    def excuse(self, pair: PairedCall) -> None:
        """Take note of a call that differs in no row that is read."""
        read = self._rows(pair)
        if read is not None:
            self._excused[pair.call.id] = read

    def keep(self, pair: PairedCall) -> Keep | None:
        """Which elements count of a call that was excused; None for all."""
        excused = pair.call.id in self._excused
        semantics = self.semantics(pair) if excused else None
        return semantics.keep if semantics is not None else None

    def notes(self) -> list[str]:
        """A sentence for each kind of module that differs in padding."""
        places: dict[str, list[int]] = defaultdict(list)
        for call in self._excused:
            reference = self._paired.calls[call]
            places[align.starred(reference.scope or reference.root)].append(call)
        out = []
        for name, calls in places.items():
            read = self._excused[calls[0]]
            share = f"{np.count_nonzero(~read)} of {read.size} positions"
            out.append(f"{name}: padding ({share}) differs and is left out: the mask hides it")
        return out

    def _rows(self, pair: PairedCall) -> Bits | None:
        call = pair.call
        if call.id not in self._read:
            ours = _read_rows(self._paired.reference, call)
            theirs = _read_rows(self._paired.target, pair.partner) if ours is not None else None
            same = ours is not None and theirs is not None and np.array_equal(ours, theirs)
            self._read[call.id] = ours if same else None
        return self._read[call.id]


def _read_rows(run: Run, call: Call) -> Bits | None:
    """(batch, position) -> is it read?, from the masks that the call and those around it were
    given; None where all are, or nothing tells.
    """
    around: Call | None = call
    while around is not None:
        for ref in around.slots("input"):
            if "mask" in input_name(ref.slot) and len(run.records[ref.record].shape) == 4:
                try:
                    seen = visible(run.array(ref.record))
                except ElementsMissing:
                    continue
                if seen is not None:
                    return _by_query(seen)
        if around.parent < 0:
            return align.real_positions(run, around)
        around = run.calls[around.parent]
    return None


def _by_query(seen: Bits) -> Bits | None:
    """(batch, query) -> is it read?, from (batch, heads, query, key); None where all are.

    A query that sees nothing is padding where no query sees its key either. Else True may mean
    "look away", and a query that sees nothing is one that sees everything.
    """
    rows, columns = np.array(seen.any(axis=(1, 3))), np.array(seen.any(axis=(1, 2)))
    queries, keys = rows.shape[1], columns.shape[1]
    if queries < 2 or queries > keys or rows.all() or not rows.any():
        return None
    # Keys that no query of the batch sees at the end are room in a cache.
    has_room = not columns[:, -1].any()
    first = 0 if has_room else keys - queries
    own_keys = columns[:, first : first + queries]
    return None if bool((~rows & own_keys).any()) else rows
