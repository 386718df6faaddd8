"""Pairs of arrays -> measurements: decides who is measured by which pass, in which batch, on which
thread.

Small tensors are gathered into batches of 8 MB and compared by one compiled call without the GIL; a
tensor larger than 16 MB is cut at row boundaries and joined again. Memory: a few batches beyond
what the caller's arrays are themselves; an array that is not contiguous is copied a chunk at a
time.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from whence import _kernels, dtypes
from whence.dtypes import Array, DType
from whence.errors import UsageError
from whence.metrics import agreement, extremes, numpy_pass, permuted
from whence.metrics.accumulators import Accumulators, F, I, empty, join, worst_channel
from whence.metrics.custom import Custom, apply
from whence.metrics.metric import Metric
from whence.results import Measured


def _families() -> list[ModuleType]:
    """The files of this folder that hold METRICS, by their ORDER."""
    folder = Path(__file__).parent
    names = sorted(path.stem for path in folder.glob("[!_]*.py") if path != Path(__file__))
    modules = [importlib.import_module(f"whence.metrics.{name}") for name in names]
    return sorted((m for m in modules if hasattr(m, "METRICS")), key=lambda m: m.ORDER)


_FAMILIES = _families()
METRICS: tuple[Metric, ...] = tuple(m for family in _FAMILIES for m in family.METRICS)
TIERS = ("same", "core", "full")

KERNELS_FROM_BYTES = 50_000_000
"""Below this much data numpy is done before the kernels are loaded (PERF.md section 2)."""
BATCH_BYTES = 8 << 20
BATCH_PAIRS = 4096
SPLIT_BYTES = 16 << 20
JOINT_FROM = 1 << 16
"""Elements from which the 65536-cell histogram of an 8-bit pair pays."""

_BY_TIER = {tier: [m for m in METRICS if tier == "full" or m.tier == tier] for tier in TIERS}
_NAMES = {tier: [m.name for m in metrics] for tier, metrics in _BY_TIER.items()}
_NARROW = frozenset((0, 1, 2, 3, 4, 5, 6, 10, 11))
_WIDE = _NARROW | {7, 12, 13}
_PASS = {"same": 0, "core": 1, "full": 2}
_KNOWN: dict[np.dtype[np.generic], DType] = {d.numpy: d for d in dtypes.DTYPES.values()}

T = TypeVar("T")
U = TypeVar("U")


@dataclass(slots=True)
class _Job:
    """One pair to be measured. place: its position in the answer. path: which compiled pass, -1 for
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
class _Options:
    tier: str
    rtol: float
    atol: float
    compiled: bool
    custom: tuple[Custom, ...]


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
    threads: default one a core. kernels: None loads the compiled passes when there are more than 50
    MB (or they are loaded already), True always, False never. custom: (name, function(reference,
    target)) pairs.

    Never raises for what the data holds. Shapes differ, or a dtype has no name: tier "none", not
    identical, `why` says so. No elements: every value None, "empty". NaN and Inf: error figures are
    over places finite on both sides, equal infinities match, everything else is counted in
    nan_mismatch and inf_mismatch; the key `first_nonfinite_mismatch` (a flat index) is there when
    there is one. max_abs_index: the largest finite error, or the first non-finite mismatch when
    there is no finite error, or None when nothing differs. Raises UsageError for an unknown tier,
    ImportError when kernels is True and numba is missing.
    """
    if tier not in TIERS:
        raise UsageError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")
    answer: list[Measured | None] = []
    jobs = _jobs(pairs, answer, tier)
    waiting: list[_Job] = []
    demanded = kernels is True
    if kernels is None:
        kernels = _kernels.loaded()
        total = 0
        while not kernels:
            job = next(jobs, None)
            if job is None:
                break
            waiting.append(job)
            total += job.nbytes
            kernels = total > KERNELS_FROM_BYTES
    if kernels:
        try:
            _kernels.load()
        except ImportError:  # no numba here: slower, not impossible
            if demanded:
                raise
            kernels = False
    options = _Options(tier, float(rtol), float(atol), bool(kernels), tuple(custom))

    def everything() -> Iterator[_Job]:
        waiting.reverse()
        while waiting:
            yield waiting.pop()
        yield from jobs

    _Worker(options, answer, threads or os.cpu_count() or 1).run(everything())
    return answer  # type: ignore[return-value]


def _jobs(
    pairs: Iterable[tuple[Array, Array]], answer: list[Measured | None], tier: str
) -> Iterator[_Job]:
    """Pairs that need a look at their elements; the others are answered here."""
    known = _KNOWN
    for reference, target in pairs:
        reference, target = np.asanyarray(reference), np.asanyarray(target)
        place = len(answer)
        shape = reference.shape
        if shape != target.shape:
            answer.append(
                Measured("none", False, why=f"shape {_show(shape)} against {_show(target.shape)}")
            )
            continue
        r_type, t_type = known.get(reference.dtype), known.get(target.dtype)
        if r_type is None or t_type is None:
            try:  # a foreign byte order, or no dtype of ours
                r_type, t_type = dtypes.of(reference), dtypes.of(target)
            except KeyError as error:
                answer.append(Measured("none", False, why=str(error.args[0])))
                continue
        if reference.size == 0:
            answer.append(_empty(tier, r_type is t_type))
            continue
        channels = (
            shape[-1]
            if len(shape) >= 2 and shape[-1] <= extremes.MAX_CHANNELS and tier == "full"
            else 0
        )
        answer.append(None)
        yield _Job(
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


def _empty(tier: str, identical: bool) -> Measured:
    names = _NAMES[tier] if tier != "same" else ["values_equal"]
    return Measured(tier, identical, dict.fromkeys(names), dict.fromkeys(names, "empty"))


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


class _Worker:
    """Carries out one `measure_many`. Threads are started with the second batch: most calls need
    none.
    """

    def __init__(self, options: _Options, answer: list[Measured | None], threads: int) -> None:
        self.options, self.answer, self.threads = options, answer, threads
        self.pool: ThreadPoolExecutor | None = None
        self.flying: deque[Future[None]] = deque()

    def run(self, jobs: Iterator[_Job]) -> None:
        batch: list[_Job] = []
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

    def _submit(self, work: Callable[[Any], None], what: Any) -> None:
        if self.threads == 1:
            work(what)
            return
        while len(self.flying) >= 2 * self.threads:
            self.flying.popleft().result()
        self.flying.append(self._pool().submit(work, what))

    def _pool(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="whence-measure")
        return self.pool

    def _ordered(self, work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """work(item) for every item, in order, on the pool, never more than twice as many at once
        as there are threads.
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

    def _batch(self, jobs: list[_Job]) -> None:
        self._finish(jobs, _rows(jobs, self.options))

    def _large(self, job: _Job) -> None:
        """One tensor, cut at row boundaries. numpy walks it in chunks by itself."""
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
            part = _Job(
                0, r, t, job.r_type, job.t_type, job.channels, job.path, r.nbytes + t.nbytes
            )
            part_dd, part_rr = np.zeros(job.channels), np.zeros(job.channels)
            return start, _compiled([part], self.options, (part_dd, part_rr)), part_dd, part_rr

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

    def _finish(self, jobs: Sequence[_Job], rows: Accumulators) -> None:
        options = self.options
        if options.tier == "same":
            for k, job in enumerate(jobs):
                self.answer[job.place] = _same(job, rows, k)
            return
        for k, job in enumerate(jobs):
            if job.path == _kernels.PATH_64 and _out_of_range(rows, k):
                _copy_row(_numpy(job, options), rows, k)
        _context(jobs, rows)
        if options.tier == "full":
            for k in permuted.candidates(rows):
                rows.permuted[k] = float(
                    permuted.is_permutation(jobs[k].reference, jobs[k].target, options.compiled)
                )
        for job, measured in zip(jobs, _measured(jobs, rows, options)):
            self.answer[job.place] = measured


def _numpy(job: _Job, options: _Options) -> Accumulators:
    """The row of one pair by numpy; for tier "same" only what that needs."""
    if job.path == _kernels.PATH_SAME:
        rows = empty(1)
        rows.ints[0, I["bytes_differ"]] = int(not numpy_pass.same_bytes(job.reference, job.target))
        return rows
    return numpy_pass.accumulate(
        job.reference, job.target, job.channels, options.tier == "full", options.rtol, options.atol
    )


def _rows(jobs: list[_Job], options: _Options) -> Accumulators:
    """The rows of a batch: the compiled pass takes what it can decode, numpy the rest."""
    by_numpy = [k for k, job in enumerate(jobs) if job.path < 0 or not options.compiled]
    if not by_numpy:
        return _compiled(jobs, options)
    rows = empty(len(jobs))
    by_kernel = [k for k, job in enumerate(jobs) if job.path >= 0 and options.compiled]
    if by_kernel:
        some = _compiled([jobs[k] for k in by_kernel], options)
        rows.floats[by_kernel], rows.ints[by_kernel], rows.histogram[by_kernel] = (
            some.floats,
            some.ints,
            some.histogram,
        )
    for k in by_numpy:
        _copy_row(_numpy(jobs[k], options), rows, k)
    return rows


def _compiled(
    jobs: Sequence[_Job], options: _Options, split: tuple[Any, Any] | None = None
) -> Accumulators:
    """The rows of a batch by one compiled call. split: where the sums by channel go when this is a
    chunk of a larger tensor.
    """
    rows = empty(len(jobs))
    widest = max(job.channels for job in jobs)
    scratch = np.empty(_kernels.SCRATCH_BYTES // 8 + 2 * widest, np.float64)
    base = scratch.__array_interface__["data"][0]
    dd, rr = base + _kernels.SCRATCH_BYTES, base + _kernels.SCRATCH_BYTES + 8 * widest
    if split is not None:
        dd, rr = (side.__array_interface__["data"][0] for side in split)
    alive: list[Array] = []  # copies of arrays that were not contiguous
    table = []
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
                split is not None,
                dd,
                rr,
                path,
            )
        )
    meta = np.array(table, dtype=np.int64)
    _kernels.compare(
        meta.__array_interface__["data"][0],
        len(jobs),
        _PASS[options.tier] or 1,
        options.rtol,
        options.atol,
        _kernels.THRESHOLDS.__array_interface__["data"][0],
        base,
        rows.floats.__array_interface__["data"][0],
        rows.ints.__array_interface__["data"][0],
        rows.histogram.__array_interface__["data"][0],
    )
    return rows


def _plain_memory(array: Array) -> bool:
    """Can a kernel read it where it is: C order, aligned, native byte order?"""
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def _out_of_range(rows: Accumulators, k: int) -> bool:
    """Do squares of these float64 values leave the range of float64?"""
    f = rows.floats[k]
    sides = [
        abs(f[F[name]])
        for name in ("r_min", "r_max", "t_min", "t_max")
        if abs(f[F[name]]) != np.inf
    ]
    top = max(sides, default=0.0)
    return bool(top > 1e150 or 0.0 < top < 1e-140)


def _copy_row(one: Accumulators, rows: Accumulators, k: int) -> None:
    rows.floats[k], rows.ints[k], rows.histogram[k] = one.floats[0], one.ints[0], one.histogram[0]


def _context(jobs: Sequence[_Job], rows: Accumulators) -> None:
    about = [
        _DTYPE_PAIRS.get((job.r_type.name, job.t_type.name)) or _dtype_pair(job) for job in jobs
    ]
    rows.channels[:] = [job.channels for job in jobs]
    rows.ulp[:] = [one[0] for one in about]
    rows.signed[:] = [one[1] for one in about]
    rows.r_top[:] = [one[2] for one in about]
    rows.t_top[:] = [one[3] for one in about]


_DTYPE_PAIRS: dict[tuple[str, str], tuple[bool, bool, float, float]] = {}


def _dtype_pair(job: _Job) -> tuple[bool, bool, float, float]:
    """What `Accumulators` keeps of two dtypes: ULP defined, signed, largest finite magnitude of
    either where that matters.
    """
    r, t = job.r_type, job.t_type
    tops = [
        float(d.max_finite) if d.kind == "float" and d.max_finite is not None else np.inf
        for d in (r, t)
    ]
    found = (
        r is t and r.kind == "float",
        r.kind != "complex" and t.kind != "complex",
        tops[0],
        tops[1],
    )
    return _DTYPE_PAIRS.setdefault((r.name, t.name), found)


def _identical(job: _Job, rows: Accumulators, k: int) -> bool:
    return job.r_type is job.t_type and not rows.ints[k, I["bytes_differ"]]


def _same(job: _Job, rows: Accumulators, k: int) -> Measured:
    if job.r_type is job.t_type:
        identical = _identical(job, rows, k)
        return Measured("same", identical, {"values_equal": 1.0} if identical else {})
    equal = next(m for m in agreement.METRICS if m.name == "values_equal").formula(rows)[k]
    return Measured("same", False, {"values_equal": float(equal)})


def _measured(jobs: Sequence[_Job], rows: Accumulators, options: _Options) -> Iterator[Measured]:
    """Rows -> what the reader gets. Formulas run over all rows at once; a row without gaps costs
    one dict.
    """
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
    if metric.why and not (none_finite and metric.name in _ERROR_NAMES):
        return metric.why
    return (
        "no place is finite on both sides"
        if none_finite
        else "not a number: sums left the range of float64"
    )


_ERROR_NAMES = frozenset(
    metric.name
    for family in _FAMILIES
    if getattr(family, "OVER_FINITE_PAIRS", False)
    for metric in family.METRICS
)


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 1:
        return (place,)
    index = []
    for extent in reversed(shape):
        place, rest = divmod(place, extent)
        index.append(rest)
    return tuple(reversed(index))
