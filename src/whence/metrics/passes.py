"""Pairs of arrays -> rows of sums, counts and extremes, by the compiled pass or by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import _kernels
from whence.dtypes import Array, DType
from whence.metrics import numpy_pass
from whence.metrics.accumulators import Accumulators, F, I, empty
from whence.metrics.custom import Custom


@dataclass(slots=True)
class Job:
    """A pair to be measured. place: in the answer. path: its compiled pass, -1 for numpy."""

    place: int
    reference: Array
    target: Array
    r_type: DType
    t_type: DType
    channels: int
    path: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Options:
    tier: str
    rtol: float
    atol: float
    compiled: bool
    custom: tuple[Custom, ...]


def numpy_row(job: Job, options: Options) -> Accumulators:
    """The row of one pair by numpy; for tier "same" only what that needs."""
    if job.path == _kernels.PATH_SAME:
        rows = empty(1)
        rows.ints[0, I["bytes_differ"]] = int(not numpy_pass.same_bytes(job.reference, job.target))
        return rows
    return numpy_pass.accumulate(
        job.reference, job.target, job.channels, options.tier == "full", options.rtol, options.atol
    )


def rows_of(jobs: list[Job], options: Options) -> Accumulators:
    """The rows of a batch: the compiled pass takes what it can decode, numpy the rest."""
    by_numpy = [k for k, job in enumerate(jobs) if job.path < 0 or not options.compiled]
    if not by_numpy:
        return compiled_rows(jobs, options)
    rows = empty(len(jobs))
    by_kernel = [k for k, job in enumerate(jobs) if job.path >= 0 and options.compiled]
    if by_kernel:
        some = compiled_rows([jobs[k] for k in by_kernel], options)
        rows.floats[by_kernel], rows.ints[by_kernel], rows.histogram[by_kernel] = (
            some.floats,
            some.ints,
            some.histogram,
        )
    for k in by_numpy:
        copy_row(numpy_row(jobs[k], options), rows, k)
    return rows


def compiled_rows(
    jobs: Sequence[Job], options: Options, split: tuple[Any, Any] | None = None
) -> Accumulators:
    """A batch's rows by one compiled call. split: sums by channel of a part of a tensor."""
    rows = empty(len(jobs))
    dd, rr = (side.__array_interface__["data"][0] for side in split) if split else (0, 0)
    alive: list[Array] = []  # copies of arrays that were not contiguous
    table: list[tuple[int, ...]] = []
    for job in jobs:
        r, t = job.reference, job.target
        if not _plain_memory(r):
            r = numpy_pass.flat(r, 0, r.size)
            alive.append(r)
        if not _plain_memory(t):
            t = numpy_pass.flat(t, 0, t.size)
            alive.append(t)
        path = job.path
        table.append(
            (
                r.__array_interface__["data"][0],
                t.__array_interface__["data"][0],
                r.nbytes if path == _kernels.PATH_SAME else r.size,
                job.r_type.code,
                job.t_type.code,
                job.channels,
                dd,
                rr,
                path,
            )
        )
    pairs = np.array(table, dtype=np.int64)
    _kernels.needed().compare(
        pairs.__array_interface__["data"][0],
        len(table),
        2 if options.tier == "full" else 1,
        options.rtol,
        options.atol,
        _kernels.THRESHOLDS.__array_interface__["data"][0],
        rows.floats.__array_interface__["data"][0],
        rows.ints.__array_interface__["data"][0],
        rows.histogram.__array_interface__["data"][0],
    )
    return rows


def _plain_memory(array: Array) -> bool:
    """Can a kernel read it where it is: C order, aligned, native byte order?"""
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def is_out_of_range(rows: Accumulators, k: int) -> bool:
    """Do squares of these float64 values leave the range of float64?"""
    f = rows.floats[k]
    sides = [
        abs(f[F[name]])
        for name in ("r_min", "r_max", "t_min", "t_max")
        if abs(f[F[name]]) != np.inf
    ]
    top = max(sides, default=0.0)
    return bool(top > 1e150 or 0.0 < top < 1e-140)


def copy_row(source: Accumulators, rows: Accumulators, k: int) -> None:
    rows.floats[k], rows.ints[k], rows.histogram[k] = (
        source.floats[0],
        source.ints[0],
        source.histogram[0],
    )


def set_context(jobs: Sequence[Job], rows: Accumulators) -> None:
    entries = [
        _DTYPE_PAIRS.get((job.r_type.name, job.t_type.name)) or _dtype_pair(job) for job in jobs
    ]
    rows.channels[:] = [job.channels for job in jobs]
    rows.ulp[:] = [entry[0] for entry in entries]
    rows.signed[:] = [entry[1] for entry in entries]
    rows.r_top[:] = [entry[2] for entry in entries]
    rows.t_top[:] = [entry[3] for entry in entries]


_DTYPE_PAIRS: dict[tuple[str, str], tuple[bool, bool, float, float]] = {}


def _dtype_pair(job: Job) -> tuple[bool, bool, float, float]:
    """(ULP defined, signed, largest magnitudes that mean saturation) of two dtypes."""
    r, t = job.r_type, job.t_type
    tops = [
        float(d.max_finite) if d.kind == "float" and d.max_finite is not None else np.inf
        for d in (r, t)
    ]
    entry = (
        r is t and r.kind == "float",
        r.kind != "complex" and t.kind != "complex",
        tops[0],
        tops[1],
    )
    return _DTYPE_PAIRS.setdefault((r.name, t.name), entry)
