"""Measures pairs of arrays: chooses the pass, the batch and the thread for each pair.

Small tensors are collected into batches of 8 MB and compared by one compiled call without the GIL;
a tensor larger than 16 MB is cut at row boundaries and its results are merged. Memory: a few
batches in addition to the caller's arrays; an array that is not contiguous is copied a chunk at a
time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from whence import _kernels, dtypes
from whence.dtypes import Array, DType
from whence.errors import UsageError
from whence.metrics import numpy_pass, permuted
from whence.metrics.accumulators import Accumulators, F, I, empty, join, worst_channel
from whence.metrics.custom import Custom, apply
from whence.metrics.metric import Metric
from whence.metrics.table import MAX_CHANNELS, METRICS, OVER_FINITE_PAIRS
from whence.results import Measured

TIERS = ("same", "core", "full")

JOINT_FROM = 1 << 16
"""Number of elements from which on the 65536-cell histogram of an 8-bit pair is faster."""

_BY_TIER = {tier: [m for m in METRICS if tier == "full" or m.tier == tier] for tier in TIERS}
_NAMES = {tier: [m.name for m in metrics] for tier, metrics in _BY_TIER.items()}
_NARROW = frozenset((0, 1, 2, 3, 4, 5, 6, 10, 11))
_WIDE = _NARROW | {7, 12, 13}
_DTYPES: dict[np.dtype[np.generic], DType] = {d.numpy: d for d in dtypes.DTYPES.values()}


def measure(
    reference: Array,
    target: Array,
    *,
    tier: str = "full",
    rtol: float = 1e-3,
    atol: float = 1e-5,
    kernels: bool | None = None,
    custom: Sequence[Custom] = (),
) -> Measured:
    """All measurements of one pair; see `measure_many`, which it calls."""
    return measure_many(
        [(reference, target)],
        tier=tier,
        rtol=rtol,
        atol=atol,
        threads=1,
        kernels=kernels,
        custom=custom,
    )[0]


def measure_many(
    pairs: Iterable[tuple[Array, Array]],
    *,
    tier: str = "full",
    rtol: float = 1e-3,
    atol: float = 1e-5,
    threads: int | None = None,
    kernels: bool | None = None,
    custom: Sequence[Custom] = (),
) -> list[Measured]:
    """Measurements of many pairs, in their order. The reference comes first in every pair; nothing
    is written to an array.

    pairs: numpy arrays (ml_dtypes included) of any shape and any mixture of the dtypes whence
    knows; may be a generator, whose arrays are let go as soon as they are measured. tier: "same"
    says whether both are bit-identical (and `values_equal` when the dtypes differ), "core" and
    "full" fill `values` with the metrics of METRICS up to that tier. rtol, atol: for `close_share`.
    threads: default one a core. kernels: None takes the compiled pass where it is here; True
    demands it; False is numpy. custom: (name, function(reference, target)) pairs.

    Never raises for what the data holds. Shapes differ, or a dtype has no name: tier "none", not
    identical, `why` says so. No elements: every value None, "empty". NaN and Inf: error figures are
    over places finite on both sides, equal infinities match, everything else is counted in
    nan_mismatch and inf_mismatch; the key `first_nonfinite_mismatch` (a flat index) is there when
    there is one. max_abs_index: the largest finite error, or the first non-finite mismatch when
    there is no finite error, or None when nothing differs. Raises UsageError for an unknown tier,
    ImportError when kernels is True and the compiled ones are not here.
    """
    if tier not in TIERS:
        raise UsageError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")
    answer: list[Measured | None] = []
    jobs = _jobs(pairs, answer, tier)
    compiled = _kernels.chosen(kernels) is not None
    options = Options(tier, float(rtol), float(atol), compiled, tuple(custom))

    def finish(done: Sequence[Job], rows: Accumulators) -> None:
        _finish(done, rows, options, answer)

    BatchRunner(options, threads or os.cpu_count() or 1, finish).run(jobs)
    return answer  # type: ignore[return-value]


def _jobs(
    pairs: Iterable[tuple[Array, Array]], answer: list[Measured | None], tier: str
) -> Iterator[Job]:
    """Yields the pairs whose elements must be read; the others are answered here."""
    dtype_of = _DTYPES
    for reference, target in pairs:
        reference, target = np.asanyarray(reference), np.asanyarray(target)
        place = len(answer)
        shape = reference.shape
        if shape != target.shape:
            answer.append(
                Measured("none", False, why=f"shape {_show(shape)} against {_show(target.shape)}")
            )
            continue
        r_type, t_type = dtype_of.get(reference.dtype), dtype_of.get(target.dtype)
        if r_type is None or t_type is None:
            try:  # a foreign byte order, or a dtype that whence does not know
                r_type, t_type = dtypes.of(reference), dtypes.of(target)
            except KeyError as error:
                answer.append(Measured("none", False, why=str(error.args[0])))
                continue
        if reference.size == 0:
            names = _NAMES[tier] if tier != "same" else ["values_equal"]
            whys = dict.fromkeys(names, "empty")
            answer.append(Measured(tier, r_type is t_type, dict.fromkeys(names), whys))
            continue
        channels = (
            shape[-1] if len(shape) >= 2 and shape[-1] <= MAX_CHANNELS and tier == "full" else 0
        )
        answer.append(None)
        yield Job(
            place,
            reference,
            target,
            r_type,
            t_type,
            channels,
            _path(r_type, t_type, reference.size, tier),
            reference.nbytes + target.nbytes,
        )


def _show(shape: tuple[int, ...]) -> str:
    return f"({','.join(map(str, shape))})"


def _path(r_type: DType, t_type: DType, size: int, tier: str) -> int:
    if tier == "same" and r_type is t_type:
        return _kernels.PATH_SAME
    r, t = r_type.code, t_type.code
    if r in _NARROW and t in _NARROW:
        return (
            _kernels.PATH_8
            if size >= JOINT_FROM and r_type.bits == t_type.bits == 8
            else _kernels.PATH_32
        )
    return _kernels.PATH_64 if r in _WIDE and t in _WIDE else -1


def _finish(
    jobs: Sequence[Job], rows: Accumulators, options: Options, answer: list[Measured | None]
) -> None:
    if options.tier == "same":
        for k, job in enumerate(jobs):
            answer[job.place] = _same(job, rows, k)
        return
    for k, job in enumerate(jobs):
        if job.path == _kernels.PATH_64 and is_out_of_range(rows, k):
            copy_row(numpy_row(job, options), rows, k)
    set_context(jobs, rows)
    if options.tier == "full":
        for k in permuted.candidates(rows):
            rows.permuted[k] = float(permuted.is_permutation(jobs[k].reference, jobs[k].target))
    for job, measured in zip(jobs, _measured(jobs, rows, options)):
        answer[job.place] = measured


def _same(job: Job, rows: Accumulators, k: int) -> Measured:
    if job.r_type is job.t_type:
        identical = not rows.ints[k, I["bytes_differ"]]
        return Measured("same", identical, {"values_equal": 1.0} if identical else {})
    equal = next(m for m in METRICS if m.name == "values_equal").formula(rows)[k]
    return Measured("same", False, {"values_equal": float(equal)})


def _measured(jobs: Sequence[Job], rows: Accumulators, options: Options) -> Iterator[Measured]:
    """Measurements from rows. Formulas run over all rows at once."""
    metrics, names = _BY_TIER[options.tier], _NAMES[options.tier]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        table = np.stack([m.formula(rows) for m in metrics], axis=1)
    gaps: Any = np.isnan(table)
    gap_in = gaps.any(axis=1).tolist()
    lists = table.tolist()
    ad_index, bad_index = (
        rows.ints[:, I["ad_index"]].tolist(),
        rows.ints[:, I["bad_index"]].tolist(),
    )
    differ, none_finite = (
        rows.ints[:, I["bytes_differ"]].tolist(),
        (rows.ints[:, I["pairs"]] == 0).tolist(),
    )
    histograms = rows.histogram.tolist() if options.tier == "full" else None
    sentences: dict[tuple[bytes, bool], tuple[dict[str, str], list[int]]] = {}
    for k, job in enumerate(jobs):
        values: dict[str, float | None] = dict(zip(names, lists[k]))
        whys: dict[str, str] = {}
        if gap_in[k]:
            key = (gaps[k].tobytes(), none_finite[k])
            if key not in sentences:
                missing = [int(j) for j in np.flatnonzero(gaps[k])]
                sentences[key] = (
                    {names[j]: _why(metrics[j], none_finite[k]) for j in missing},
                    missing,
                )
            reasons, missing = sentences[key]
            whys = dict(reasons)
            values.update(dict.fromkeys(reasons))
        place: tuple[int, ...] | None = None
        if ad_index[k] >= 0:
            place = _unravel(ad_index[k], job.reference.shape)
        if bad_index[k] >= 0:
            values["first_nonfinite_mismatch"] = float(bad_index[k])
            place = place if place is not None else _unravel(bad_index[k], job.reference.shape)
        if options.custom:
            apply(options.custom, job.reference, job.target, values, whys)
        yield Measured(
            options.tier,
            not differ[k] and job.r_type is job.t_type,
            values,
            whys,
            place,
            tuple(histograms[k]) if histograms is not None else (),
        )


def _why(metric: Metric, none_finite: bool) -> str:
    if metric.why and not (none_finite and metric.name in OVER_FINITE_PAIRS):
        return metric.why
    return (
        "no place is finite on both sides"
        if none_finite
        else "not a number: sums left the range of float64"
    )


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 1:
        return (place,)
    index = []
    for extent in reversed(shape):
        place, index_on_axis = divmod(place, extent)
        index.append(index_on_axis)
    return tuple(reversed(index))


# Runs jobs in batches of a few megabytes, on threads. A large tensor is cut at row boundaries and
# its rows are merged.

BATCH_BYTES = 8 << 20
BATCH_PAIRS = 4096
SPLIT_BYTES = 16 << 20

T = TypeVar("T")
U = TypeVar("U")


class BatchRunner:
    """Passes the rows of jobs to `finish`, batch by batch; threads start with the second batch."""

    def __init__(
        self, options: Options, threads: int, finish: Callable[[Sequence[Job], Accumulators], None]
    ) -> None:
        self.options, self.threads, self._finish = options, threads, finish
        self.pool: ThreadPoolExecutor | None = None
        self.flying: deque[Future[None]] = deque()

    def run(self, jobs: Iterator[Job]) -> None:
        batch: list[Job] = []
        nbytes = 0
        try:
            for job in jobs:
                if self.options.compiled and job.nbytes > SPLIT_BYTES:
                    self._large(job)
                else:
                    batch.append(job)
                    nbytes += job.nbytes
                    if nbytes >= BATCH_BYTES or len(batch) >= BATCH_PAIRS:
                        self._submit(self._batch, batch)
                        batch, nbytes = [], 0
                del job
            if batch:
                if self.flying:
                    self._submit(self._batch, batch)
                else:
                    self._batch(batch)
            while self.flying:
                self.flying.popleft().result()
        finally:
            if self.pool is not None:
                self.pool.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[Any], None], argument: Any) -> None:
        if self.threads == 1:
            work(argument)
            return
        while len(self.flying) >= 2 * self.threads:
            self.flying.popleft().result()
        self.flying.append(self._pool().submit(work, argument))

    def _pool(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="whence-measure")
        return self.pool

    def _ordered(self, work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """Yields work(item) in order, computed on the pool with at most two items per thread in
        advance.
        """
        if self.threads == 1:
            yield from map(work, items)
            return
        ahead: deque[Future[U]] = deque()
        for item in items:
            ahead.append(self._pool().submit(work, item))
            if len(ahead) >= 2 * self.threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _batch(self, jobs: list[Job]) -> None:
        self._finish(jobs, rows_of(jobs, self.options))

    def _large(self, job: Job) -> None:
        """Measures one tensor, cut at row boundaries. A numpy pass cuts it into chunks by
        itself.
        """
        if job.path < 0:
            self._submit(self._batch, [job])
            return
        unit = job.channels or _kernels.BLOCK
        step = max(1, BATCH_BYTES // (unit * (job.r_type.itemsize + job.t_type.itemsize))) * unit
        whole = empty(1)
        dd, rr = np.zeros(job.channels), np.zeros(job.channels)

        def work(start: int) -> tuple[int, Accumulators, Any, Any]:
            stop = min(start + step, job.reference.size)
            r, t = (
                numpy_pass.flat(job.reference, start, stop),
                numpy_pass.flat(job.target, start, stop),
            )
            part = Job(0, r, t, job.r_type, job.t_type, job.channels, job.path, r.nbytes + t.nbytes)
            part_dd, part_rr = np.zeros(job.channels), np.zeros(job.channels)
            return start, compiled_rows([part], self.options, (part_dd, part_rr)), part_dd, part_rr

        for start, part, part_dd, part_rr in self._ordered(
            work, range(0, job.reference.size, step)
        ):
            join(whole, part, start, start // job.channels if job.channels else 0)
            whole.ints[0, I["bytes_differ"]] = min(1, whole.ints[0, I["bytes_differ"]])
            dd += part_dd
            rr += part_rr
        if job.channels:
            worst_channel(whole, np.sqrt(dd), np.sqrt(rr))
        self._finish([job], whole)


# Fills rows of sums, counts and extremes for pairs of arrays, by the compiled pass or by numpy.


@dataclass(slots=True)
class Job:
    """A pair to be measured. place: its position in the answer. path: its compiled pass, -1 for
    numpy.
    """

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
    """The row of one pair by numpy; for tier "same" only the comparison of bytes."""
    if job.path == _kernels.PATH_SAME:
        rows = empty(1)
        rows.ints[0, I["bytes_differ"]] = int(not numpy_pass.same_bytes(job.reference, job.target))
        return rows
    return numpy_pass.accumulate(
        job.reference, job.target, job.channels, options.tier == "full", options.rtol, options.atol
    )


def rows_of(jobs: list[Job], options: Options) -> Accumulators:
    """The rows of a batch: the compiled pass handles the dtypes that it can decode, numpy the
    rest.
    """
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
    """The rows of a batch by one compiled call. split: sums by channel, filled for a part of a
    tensor.
    """
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
    """Whether a kernel can read the array in place: C order, aligned, native byte order."""
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def is_out_of_range(rows: Accumulators, k: int) -> bool:
    """Whether squares of these float64 values leave the range of float64."""
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
    """(whether ULPs are defined, whether signs have a meaning, magnitudes of both sides that mean
    saturation) for two dtypes.
    """
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
