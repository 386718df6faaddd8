"""Compares the tensors of two runs of one program bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import OVERWRITTEN, Call, Run
from whence.records.marks import NOT_WRITTEN
from whence.records.run import Key


class EqualRecords:
    """Compares records of two runs, each pair of records at most once.

    compared: results by pair of records. unknown: pairs for which nothing tells whether they are
    equal.
    """

    def __init__(self, first: Run, second: Run) -> None:
        self.first, self.second = first, second
        self.compared: dict[tuple[int, int], bool | None] = {}

    @property
    def unknown(self) -> list[tuple[int, int]]:
        """Pairs of records for which nothing tells whether they are equal."""
        return [pair for pair, equal in self.compared.items() if equal is None]

    def equal(self, first: int, second: int) -> bool | None:
        """Whether two records are equal bit for bit; None without hashes or elements of both."""
        pair = first, second
        if pair not in self.compared:
            self.compared[pair] = self._compare(first, second)
        return self.compared[pair]

    def _compare(self, first: int, second: int) -> bool | None:
        a, b = self.first.records[first], self.second.records[second]
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if {OVERWRITTEN, NOT_WRITTEN}.intersection((a.why, b.why)):
            return True
        if a.hash and b.hash:
            return a.hash == b.hash
        if a.sketch is not None and b.sketch is not None and a.sketch != b.sketch:
            return False
        try:
            return _bytes(self.first.array(first)) == _bytes(self.second.array(second))
        except ElementsMissing:
            return True if not a.count else None

    def elements(self, first: int, second: int) -> tuple[Array, Array] | None:
        """The elements of both records in float64 or complex128; None when elements are missing or
        the shapes differ.
        """
        try:
            a, b = self.first.array(first), self.second.array(second)
        except ElementsMissing:
            return None
        return (_wide(a), _wide(b)) if a.shape == b.shape else None


def _bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _wide(array: Array) -> Array:
    wide: Array = array.reshape(-1).astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return wide


def rel_l2(pairs: Iterable[tuple[Array, Array] | None]) -> float | None:
    """2-norm of the difference over all pairs together, relative to that of the first arrays.

    None when a pair is missing or not finite, or the first arrays are zero.
    """
    difference = norm = 0.0
    for pair in pairs:
        if pair is None:
            return None
        a, b = pair
        with np.errstate(over="ignore", invalid="ignore"):
            difference += float(np.sum(np.abs(np.subtract(a, b)) ** 2))
            norm += float(np.sum(np.abs(a) ** 2))
    if not norm or not np.isfinite(difference) or not np.isfinite(norm):
        return None
    return float(np.sqrt(difference / norm))


def partners(first: Sequence[Call], second: Sequence[Call]) -> dict[int, int]:
    """Calls of the first run -> the same call of the second: the k-th call of a key is matched with
    the k-th.
    """
    by_key: dict[Key, list[int]] = defaultdict(list)
    for call in second:
        by_key[call.key()].append(call.id)
    used: dict[Key, int] = defaultdict(int)
    out: dict[int, int] = {}
    for call in first:
        key = call.key()
        if used[key] < len(by_key.get(key, ())):
            out[call.id] = by_key[key][used[key]]
            used[key] += 1
    return out
