"""Tells from the columns of their indexes whether two runs on disk have equal content."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whence.store.process_reader import ProcessReader
from whence.store.reader import StoredRun


def say_the_same(reference: StoredRun, target: StoredRun) -> bool:
    """Whether both runs hold the same calls, programs, notes and steps, line by line, and tensors
    of equal dtype, shape and hash.

    Durations of calls and of program recording may differ, as may the times of collectives and
    where and how elements are stored. A tensor whose hash was not taken equals no other, and
    neither does a damaged journal.
    """
    sides = reference.readers, target.readers
    return len(sides[0]) == len(sides[1]) and all(
        _say_the_same(a, b) for a, b in zip(*sides, strict=True)
    )


def differing_tensors(reference: StoredRun, target: StoredRun) -> npt.NDArray[np.bool_] | None:
    """Returns which tensors differ in their hash, of two runs of one process each that are
    otherwise equal as in `say_the_same`; None where they are not.
    """
    if not len(reference.readers) == len(target.readers) == 1:
        return None
    (a,), (b,) = reference.readers, target.readers
    if not _are_sound(a, b) or not _have_equal_lines(a, b) or not _have_equal_forms(a, b):
        return None
    differ: npt.NDArray[np.bool_] = (a.index.columns["hash"] != b.index.columns["hash"]).any(axis=1)
    return differ


def _say_the_same(a: ProcessReader, b: ProcessReader) -> bool:
    return (
        _are_sound(a, b)
        and np.array_equal(a.index.columns["hash"], b.index.columns["hash"])
        and _have_equal_forms(a, b)
        and _have_equal_lines(a, b)
    )


def _are_sound(*readers: ProcessReader) -> bool:
    """Whether no journal is damaged and the hash of every tensor was taken."""
    digests = [reader.index.columns["hash"] for reader in readers]
    return all(reader.index.damage is None for reader in readers) and all(
        np.logical_or(hashes[:, 0], hashes[:, 1]).all() for hashes in digests
    )


def _have_equal_lines(a: ProcessReader, b: ProcessReader) -> bool:
    return np.array_equal(
        a.index.columns["line_kind"], b.index.columns["line_kind"]
    ) and np.array_equal(a.said["line_digest"], b.said["line_digest"])


def _have_equal_forms(a: ProcessReader, b: ProcessReader) -> bool:
    """Whether all tensors have equal dtype and shape."""
    columns, others = a.index.columns, b.index.columns
    if not all(np.array_equal(columns[name], others[name]) for name in ("shape", "shape_at")):
        return False
    numbers = {name: number for number, name in enumerate(a.index.names)}
    as_in_a = np.array([numbers.get(name, -1) for name in b.index.names], np.int32)
    return np.array_equal(columns["dtype"], as_in_a[others["dtype"]])
