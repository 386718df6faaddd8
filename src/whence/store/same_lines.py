"""Do two runs on disk say the same? Told from the columns of their indexes."""

from __future__ import annotations

import numpy as np

from whence.store.process_reader import ProcessReader
from whence.store.reader import StoredRun


def say_the_same(reference: StoredRun, target: StoredRun) -> bool:
    """Do both runs hold the same calls, programs, notes and steps, line by line, and tensors of
    equal dtype, shape and hash?

    How long calls and the recording of programs took may differ, when collectives were issued, and
    where and how elements are kept. A tensor whose hash was not taken equals none, and a damaged
    journal no other.
    """
    sides = reference.readers, target.readers
    return len(sides[0]) == len(sides[1]) and all(
        _say_the_same(a, b) for a, b in zip(*sides, strict=True)
    )


def _say_the_same(a: ProcessReader, b: ProcessReader) -> bool:
    if a.index.damage is not None or b.index.damage is not None:
        return False
    digests = a.index.columns["hash"]
    if not np.logical_or(digests[:, 0], digests[:, 1]).all():
        return False
    return (
        np.array_equal(a.index.columns["line_kind"], b.index.columns["line_kind"])
        and _have_equal_tensors(a, b)
        and np.array_equal(a.said["line_digest"], b.said["line_digest"])
    )


def _have_equal_tensors(a: ProcessReader, b: ProcessReader) -> bool:
    columns, others = a.index.columns, b.index.columns
    if not all(
        np.array_equal(columns[name], others[name]) for name in ("hash", "shape", "shape_at")
    ):
        return False
    numbers = {name: number for number, name in enumerate(a.index.names)}
    as_in_a = np.array([numbers.get(name, -1) for name in b.index.names], np.int32)
    return np.array_equal(columns["dtype"], as_in_a[others["dtype"]])
