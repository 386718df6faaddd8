"""What is known of a site's tensors without reading elements: statistics that survive renaming,
transposing and rounding.

Parameters identify modules that share no name: equal checksum and count mean the same elements in
some order, close moments the same numbers in another dtype. Constant parameters (norms of ones,
zero biases) do not distinguish calls and are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.align.call_sites import Sites
from whence.align.module_names import family
from whence.records import Call, Record
from whence.records.slots import is_output, is_param

_LEAST_COUNT = 4  # smaller parameters may coincide by chance


class Feature(NamedTuple):
    """One site as numbers that can be compared with those of another run. Ids come from one
    vocabulary for both runs; 0 means none.

    kind: operator type. family: its family. shapes: of its parameters, extents above 1 sorted.
    weight: the largest of these. content: elements of its parameters, in any order. layout: shapes,
    families and layouts of all sites below. out: shapes of its outputs. out_hash: their elements,
    bit by bit. elements: contents of its parameters and of those below. moments: (count, norm,
    abs_sum) of these. out_moments: the same of its largest output, with the mean in units of the
    root mean square appended.
    """

    kind: int
    family: int
    word: int
    shapes: int
    weight: int
    content: int
    layout: int
    out: int
    out_hash: int
    container: bool
    elements: frozenset[int]
    moments: tuple[float, float, float]
    out_moments: tuple[float, float, float, float]


class Vocabulary:
    """Assigns ids to values, from 1; None has the id 0."""

    def __init__(self) -> None:
        self._table: dict[Hashable, int] = {}
        self._words: dict[int, str] = {}

    def __call__(self, value: Hashable) -> int:
        return 0 if value is None else self._table.setdefault(value, len(self._table) + 1)

    def word(self, text: str) -> int:
        """The id of a word; `spelt` returns the word."""
        number = self(("word", text))
        self._words[number] = text
        return number

    def spelt(self, number: int) -> str:
        """The word with this id; "" for 0."""
        return self._words.get(number, "")


class Features:
    """Features of the sites of one run, each computed when first asked for."""

    def __init__(self, sites: Sites, vocabulary: Vocabulary) -> None:
        self.sites, self._id = sites, vocabulary
        self._features: dict[int, Feature] = {}
        self._record = functools.lru_cache(maxsize=1 << 17)(sites.run.records.__getitem__)

    def __getitem__(self, site: int) -> Feature:
        feature = self._features.get(site)
        if feature is None:
            todo = [site]
            while todo:  # children first, without recursion: a run may nest deeply
                current = todo[-1]
                missing = [k for k in self.sites.kids.get(current, ()) if k not in self._features]
                if missing:
                    todo += missing
                else:
                    todo.pop()
                    self._features[current] = self._of_site(current)
            feature = self._features[site]
        return feature

    def many(self, sites: Iterable[int]) -> list[Feature]:
        return [self[s] for s in sites]

    def of_call(self, call: Call) -> Feature:
        """Features of one call alone, without the calls below it."""
        return self._feature(call, (), 0)

    def inputs(self, site: int) -> tuple[int, ...]:
        """Records that the first call of a site read."""
        return tuple(r.record for r in self.sites.first[site].slots("input"))

    def _of_site(self, site: int) -> Feature:
        below = [self._features[k] for k in self.sites.kids.get(site, ())]
        return self._feature(self.sites.first[site], below, self._id.word(self.sites.word(site)))

    def _feature(self, call: Call, below: Sequence[Feature], word: int) -> Feature:
        params, records = [], set()
        outputs: list[Record] = []
        for ref in call.refs:
            if is_param(ref.slot):
                if ref.record not in records:
                    records.add(ref.record)
                    params.append(self._record(ref.record))
            elif is_output(ref.slot):
                outputs.append(self._record(ref.record))
        shapes = tuple(sorted(tuple(sorted(n for n in r.shape if n > 1)) for r in params)) or None
        telling = sorted(c for c in (_content(r) for r in params) if c is not None)
        elements = frozenset(self._id(c) for c in telling).union(
            *(child.elements for child in below)
        )
        kind = call.op_type or call.op
        family_id = self._id(("family", family(kind))) if family(kind) else 0
        count, norm, total = _moments(params)
        for child in below:
            count, norm, total = (
                count + child.moments[0],
                float(np.hypot(norm, child.moments[1])),
                total + child.moments[2],
            )
        hashes = tuple(r.hash for r in outputs)
        return Feature(
            self._id(("kind", kind)) if kind else 0,
            family_id,
            word,
            self._id(shapes),
            self._id(("weight", max(shapes, key=math.prod)) if shapes else None),
            self._id(tuple(telling) or None),
            self._id(("layout", shapes, family_id, tuple(k.layout for k in below))),
            self._id(("out", tuple(r.shape for r in outputs)) if outputs else None),
            self._id(("hash", hashes) if hashes and all(hashes) else None),
            bool(below),
            elements,
            (count, norm, total),
            _output(outputs),
        )


def _content(record: Record) -> tuple[Any, ...] | None:
    """Identifies the elements of a parameter in any order; None for small or constant parameters,
    which identify nothing.
    """
    statistics = record.statistics
    if record.count < _LEAST_COUNT or (statistics is not None and not statistics.std):
        return None
    if record.sketch is not None:
        return ("sketch", record.dtype, record.count, f"{record.sketch.checksum:016x}")
    return ("hash", record.dtype, record.count, record.hash) if record.hash else None


def _moments(records: Sequence[Record]) -> tuple[float, float, float]:
    count = square = total = 0.0
    for r in records:
        if r.statistics is not None and r.statistics.std and r.statistics.norm is not None:
            count += r.count
            square += r.statistics.norm**2
            total += (r.sketch.abs_sum or 0.0) if r.sketch is not None else 0.0
    return count, float(np.sqrt(square)), total


def _output(outputs: Sequence[Record]) -> tuple[float, float, float, float]:
    largest = max(outputs, key=lambda r: r.count, default=None)
    if (
        largest is None
        or largest.statistics is None
        or not largest.statistics.norm
        or largest.statistics.mean is None
    ):
        return 0.0, 0.0, 0.0, 0.0
    s = largest.statistics
    assert s.norm is not None
    assert s.mean is not None
    total = (largest.sketch.abs_sum or 0.0) if largest.sketch is not None else 0.0
    return float(largest.count), s.norm, total, s.mean * float(np.sqrt(largest.count)) / s.norm


def distance(
    moments: Sequence[Sequence[float]], target_moments: Sequence[Sequence[float]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Distances (n, m) between moments: the largest relative difference of norm and sum of
    magnitudes, and the absolute difference of a fourth column. inf where counts differ or are 0.
    """
    a, b = (
        np.asarray(moments, np.float64).reshape(len(moments), -1),
        np.asarray(target_moments, np.float64).reshape(len(target_moments), -1),
    )
    out = np.where((a[:, None, 0] == b[None, :, 0]) & (a[:, None, 0] > 0), 0.0, np.inf)
    for column in (1, 2):
        x, y = a[:, None, column], b[None, :, column]
        size = np.maximum(np.abs(x), np.abs(y))
        out = np.maximum(
            out,
            np.divide(
                np.abs(x - y), size, out=np.zeros_like(out), where=(size > 0) & (x != 0) & (y != 0)
            ),
        )
    if a.shape[1] > 3:
        out = np.maximum(out, np.abs(a[:, None, 3] - b[None, :, 3]))
    return out


def nearest_by_far(
    distances: np.ndarray[Any, np.dtype[np.float64]], limit: float, times: float
) -> list[tuple[int, int]]:
    """(row, column) of the entries below `limit` that are `times` times smaller than every other
    entry of their row and column.
    """
    out = []
    for i in range(distances.shape[0]):
        j = int(distances[i].argmin())
        best = distances[i, j]
        rivals = (distances[i] <= best * times + 1e-9).sum() + (
            distances[:, j] <= best * times + 1e-9
        ).sum()
        if best < limit and rivals == 2:
            out.append((i, j))
    return out
