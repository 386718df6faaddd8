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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from whence import _kernels, dtypes
from whence.dtypes import Array, DType
from whence.errors import UsageError
from whence.metrics import agreement, extremes, permuted
from whence.metrics.accumulators import Accumulators, I
from whence.metrics.batch_runner import BatchRunner
from whence.metrics.custom import Custom, apply
from whence.metrics.metric import Metric
from whence.metrics.passes import Job, Options, copy_row, is_out_of_range, numpy_row, set_context
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

JOINT_FROM = 1 << 16
"""Elements from which the 65536-cell histogram of an 8-bit pair pays."""

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
    """Pairs that need a look at their elements; the others are answered here."""
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
            try:  # a foreign byte order, or no dtype of ours
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
            shape[-1]
            if len(shape) >= 2 and shape[-1] <= extremes.MAX_CHANNELS and tier == "full"
            else 0
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
    equal = next(m for m in agreement.METRICS if m.name == "values_equal").formula(rows)[k]
    return Measured("same", False, {"values_equal": float(equal)})


def _measured(jobs: Sequence[Job], rows: Accumulators, options: Options) -> Iterator[Measured]:
    """Rows -> measurements. Formulas run over all rows at once."""
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
        place, index_on_axis = divmod(place, extent)
        index.append(index_on_axis)
    return tuple(reversed(index))
