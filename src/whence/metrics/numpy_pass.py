"""The pass over a pair in numpy alone: any pair of dtypes, a chunk at a time. It is the standard
against which the compiled pass is tested, and its replacement.

Used where there are no compiled kernels, for dtypes that they do not decode (complex, 64-bit
integers, rare 8-bit floats), and for values whose squares leave the range of float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import dtypes
from whence._kernels import BINS, THRESHOLDS
from whence.dtypes import Array, DType
from whence.metrics.accumulators import (
    SCALES,
    Accumulators,
    F,
    Floats,
    I,
    empty,
    join,
    worst_channel,
)

CHUNK = 1 << 16
"""Elements processed at once: their float64 temporaries fit in the second-level cache."""


def flat(array: Array, start: int, stop: int) -> Array:
    """Elements start..stop in C order: 1-D, contiguous, aligned, native; a view where possible."""
    part = array.reshape(-1)[start:stop] if array.flags.c_contiguous else array.flat[start:stop]
    if not part.dtype.isnative:
        part = part.astype(part.dtype.newbyteorder("="))
    return part if part.flags.aligned else part.copy()


def same_bytes(reference: Array, target: Array) -> bool:
    """Whether two arrays of one dtype and shape are equal bit by bit. Stops at the first
    difference.
    """
    for start in range(0, reference.size, CHUNK * 4):
        stop = start + CHUNK * 4
        r, t = (
            np.ascontiguousarray(flat(side, start, stop)).view(np.uint8)
            for side in (reference, target)
        )
        if not np.array_equal(r, t):
            return False
    return True


def accumulate(
    reference: Array, target: Array, channels: int, full: bool, rtol: float, atol: float
) -> Accumulators:
    """One row for a pair of arrays of equal shape with at least one element, of any dtypes that
    whence knows.

    channels: length of the last axis, or 0 to leave rows and channels out. If the largest magnitude
    of a side, or of the difference, is above 1e150 or below 1e-140, it is scaled by a power of two
    before summing.
    """
    r_type, t_type = dtypes.of(reference), dtypes.of(target)
    whole = empty(1)
    scales = _scales(reference, target, r_type, t_type)
    whole.floats[0, SCALES] = scales
    dd, rr = np.zeros(channels), np.zeros(channels)
    step = CHUNK if not channels else max(1, CHUNK // channels) * channels
    for start in range(0, reference.size, step):
        r, t = flat(reference, start, start + step), flat(target, start, start + step)
        part = empty(1)
        with np.errstate(all="ignore"):
            values = _chunk(r, t, (r_type, t_type), scales, part)
            close = values.size <= atol + rtol * np.abs(values.reference)
            part.ints[0, I["close"]] = (values.fine & close).sum()
            if full:
                _relative_and_ulp(values, r, t, r_type if r_type is t_type else None, part)
            if full and channels:
                _channels(values, scales == UNSCALED, dd, rr, part)
        join(whole, part, start, start // channels if channels else 0)
    whole.ints[0, I["bytes_differ"]] = int(r_type != t_type or not same_bytes(reference, target))
    if channels and full:
        plain = scales == UNSCALED
        worst_channel(whole, np.sqrt(dd) if plain else dd, np.sqrt(rr) if plain else rr)
    return whole


UNSCALED = (1.0,) * 5


def _scales(reference: Array, target: Array, r_type: DType, t_type: DType) -> tuple[float, ...]:
    """For each column of `SCALES`: 1, or the power of two that brings the largest magnitude near 1,
    when its square would leave the range of float64.
    """
    if not any(d.name in ("float64", "complex128") for d in (r_type, t_type)):
        return UNSCALED
    tops = [0.0] * 5
    for start in range(0, reference.size, CHUNK):
        with np.errstate(all="ignore"):
            r, t = (wide(flat(side, start, start + CHUNK)) for side in (reference, target))
            fine = np.isfinite(r) & np.isfinite(t)
            pr, pt = r[fine], t[fine]
            for k, values in enumerate((r[np.isfinite(r)], t[np.isfinite(t)], pr, pt, pt - pr)):
                size = (
                    np.maximum(np.abs(values.real), np.abs(values.imag))
                    if values.dtype.kind == "c"
                    else np.abs(values)
                )
                tops[k] = max(tops[k], float(size.max(initial=0.0)))
    return tuple(_power(top) for top in tops)


def _power(top: float) -> float:
    if 1e-140 <= top <= 1e150 or top == 0.0:
        return 1.0
    return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(min(top, 1.7e308))[1])))


def wide(array: Array) -> Any:
    return array.astype(np.complex128) if array.dtype.kind == "c" else array.astype(np.float64)


def _is_int(d: DType) -> bool:
    return d.kind in ("int", "uint", "bool")


def _exact(r: Array, t: Array, r_type: DType, t_type: DType) -> Floats | None:
    """target - reference where float64 would lose it (64-bit integers), else None."""
    if not any(_is_int(d) and d.bits == 64 for d in (r_type, t_type)):
        return None
    if _is_int(r_type) and _is_int(t_type):
        return _int_difference(r, t)
    if r_type.kind == "complex" or t_type.kind == "complex":
        return None
    # Integer against float: equality in float64 is not yet equality, so the float is compared as an
    # integer there.
    whole, floating, sign = (r, t, 1.0) if _is_int(r_type) else (t, r, -1.0)
    value = floating.astype(np.float64)
    difference: Floats = value - whole.astype(np.float64)
    fits = (difference == 0.0) & (value < (2.0**64 if whole.dtype == np.uint64 else 2.0**63))
    difference[fits] = _int_difference(whole[fits], value[fits].astype(whole.dtype))
    return difference * sign


def _int_difference(r: Array, t: Array) -> Floats:
    """t - r of integers of any width, taken in integers and rounded once. A bool is 0 or 1."""
    negative: list[Any] = []
    low: list[Any] = []
    for side in (r, t):
        wide: Any = side if side.dtype in (np.int64, np.uint64) else side.astype(np.int64)
        negative.append(wide < 0)
        low.append(wide.view(np.uint64))  # two's complement: differences modulo 2^64 are exact
    is_greater = (negative[0] & ~negative[1]) | ((negative[0] == negative[1]) & (low[1] > low[0]))
    gap = np.where(is_greater, low[1] - low[0], low[0] - low[1])
    size = gap.astype(np.float64)
    # a negative int64 and a large uint64 differ by more than 2^64: the one case that wraps
    r_value, t_value = r.astype(np.float64), t.astype(np.float64)
    rough = t_value - r_value
    far = np.abs(rough) >= 2.0**63
    signed = np.where(is_greater, size, -size)
    result: Floats = np.where(far & (np.abs(rough - signed) > 2.0**63), rough, signed)
    return result


@dataclass(slots=True)
class _Values:
    """A chunk of both sides as float64 or complex128, 0 where one is not finite. fine: mask of
    elements finite on both sides. size: magnitude of the difference. squares: of the scaled
    difference and reference.
    """

    fine: Any
    reference: Any
    target: Any
    size: Any
    squares: tuple[Any, Any]


def _chunk(
    r: Array, t: Array, kinds: tuple[DType, DType], scales: tuple[float, ...], part: Accumulators
) -> _Values:
    """Fill in the figures of tier "core", except `close`."""
    f, i = part.floats[0], part.ints[0]
    r_own, t_own, r_scale, t_scale, d_scale = scales
    rv, tv = wide(r), wide(t)
    i[I["n"]] = rv.size
    r_nan, t_nan = np.isnan(rv), np.isnan(tv)
    r_inf, t_inf = np.isinf(rv) & ~r_nan, np.isinf(tv) & ~t_nan
    for side, values, nan, inf, scale in (
        ("r", rv, r_nan, r_inf, r_own),
        ("t", tv, t_nan, t_inf, t_own),
    ):
        _figures(side, values[~(nan | inf)], scale, f, i)
        i[I[side + "_nan"]], i[I[side + "_inf"]] = nan.sum(), inf.sum()
    odd = r_nan | t_nan | r_inf | t_inf
    if odd.any():
        _not_finite(i, (r_nan, t_nan), (r_inf, t_inf), rv == tv)
    fine = ~odd
    i[I["pairs"]] = fine.sum()
    exact = _exact(r, t, *kinds)
    rv, tv = np.where(fine, rv, 0.0), np.where(fine, tv, 0.0)
    difference = tv - rv if exact is None else np.where(fine, exact, 0.0)
    size = np.abs(difference)
    rs, ts = rv * r_scale, tv * t_scale
    ds = difference if d_scale == 1.0 else tv * d_scale - rv * d_scale
    squares_d, squares_r = np.square(np.abs(ds)), np.square(np.abs(rs))
    f[F["rr"]], f[F["dd"]] = squares_r.sum(), squares_d.sum()
    f[F["tt"]] = np.square(np.abs(ts)).sum()
    is_complex = rs.dtype.kind == "c" or ts.dtype.kind == "c"
    f[F["rt"]] = ((rs.real * ts.real + rs.imag * ts.imag) if is_complex else rs * ts).sum()
    f[F["d_sum"]] = ds.sum() if ds.dtype.kind != "c" else math.nan
    f[F["ad_sum"]] = np.abs(ds).sum()
    if i[I["pairs"]]:
        f[F["ad_max"]] = size.max()
        if size.max() > 0.0:
            i[I["ad_index"]] = int(size.argmax())
    if not is_complex:
        i[I["sign"]] = (((rv < 0) & (tv > 0)) | ((rv > 0) & (tv < 0))).sum()
    i[I["values_differ"]] = np.count_nonzero(size)
    return _Values(fine, rv, tv, size, (squares_d, squares_r))


def _relative_and_ulp(
    values: _Values, r: Array, t: Array, kind: DType | None, part: Accumulators
) -> None:
    """Fill in relative errors, histogram and ULP distances. kind: the dtype of both sides, None if
    they have different ones.
    """
    f, i, fine, size = part.floats[0], part.ints[0], values.fine, values.size
    r_size = np.abs(values.reference)
    zero = fine & (r_size == 0.0)
    i[I["rel_skipped"]] = zero.sum()
    nonzero = fine & ~zero
    relative = size[nonzero] / r_size[nonzero]
    if not np.isfinite(size).all():  # |t - r| is beyond float64: halve first
        half = values.target[nonzero] / 2 - values.reference[nonzero] / 2
        relative = np.abs(half) / (r_size[nonzero] / 2)
    f[F["rel_sum"]], f[F["rel_max"]] = relative.sum(), relative.max(initial=0.0)
    for k, threshold in enumerate(THRESHOLDS):
        i[I[f"over_{k}"]] = (size > threshold).sum()
    bits = size.view(np.int64)
    places = np.where(bits == 0, 0, np.clip((bits >> 52) - (1023 - 48), 1, BINS - 1))
    part.histogram[0][:] = np.bincount(places[fine], minlength=BINS)
    if kind is not None and kind.kind == "float":
        distance = _ulp(r, t, kind)[fine]
        f[F["ulp_sum"]], f[F["ulp_max"]] = distance.sum(), distance.max(initial=0.0)


def _channels(
    values: _Values, is_unscaled: bool, dd: Floats, rr: Floats, part: Accumulators
) -> None:
    """Fill in the worst row, and add the sums by channel of the difference and the reference."""
    if is_unscaled:
        d2, r2 = (squares.reshape(-1, len(dd)) for squares in values.squares)
        dd += d2.sum(0)
        rr += r2.sum(0)
        row_d, row_r = np.sqrt(d2.sum(1)), np.sqrt(r2.sum(1))
    else:  # one scale does not fit every row and channel: norms instead of squares
        d2 = values.size.reshape(-1, len(dd))
        r2 = np.abs(values.reference).reshape(-1, len(dd))
        dd[:] = np.hypot(dd, _norms(d2, 0))
        rr[:] = np.hypot(rr, _norms(r2, 0))
        row_d, row_r = _norms(d2, 1), _norms(r2, 1)
    ratio = np.where(row_d == 0.0, 0.0, row_d / row_r)
    part.ints[0, I["row_index"]] = int(ratio.argmax())
    part.floats[0, F["row_worst"]] = np.square(ratio.max())


def _not_finite(i: Any, nans: tuple[Any, Any], infs: tuple[Any, Any], equal: Any) -> None:
    """Count NaN and Inf that agree and those that do not. nans, infs: masks of both sides."""
    one_nan = nans[0] ^ nans[1]
    inf_only = (infs[0] | infs[1]) & ~(nans[0] | nans[1])
    matched, mismatched = inf_only & equal, inf_only & ~equal
    i[I["nan_both"]], i[I["nan_mismatch"]] = (nans[0] & nans[1]).sum(), one_nan.sum()
    i[I["inf_match"]], i[I["inf_mismatch"]] = matched.sum(), mismatched.sum()
    bad = one_nan | mismatched
    if bad.any():
        i[I["bad_index"]] = int(bad.argmax())


def _norms(sizes: Floats, axis: int) -> Floats:
    """2-norms along an axis whose intermediate results stay in the range of float64."""
    top = sizes.max(axis, keepdims=True)
    scaled = np.sqrt(np.square(sizes / np.where(top == 0.0, 1.0, top)).sum(axis))
    norms: Floats = np.squeeze(top, axis) * scaled
    return norms


def _figures(side: str, values: Any, scale: float, f: Floats, i: Any) -> None:
    i[I[side + "_finite"]] = values.size
    if not values.size:
        return
    values = np.abs(values) if values.dtype.kind == "c" else values
    f[F[side + "_min"]], f[F[side + "_max"]] = values.min(), values.max()
    values = values * scale if scale != 1.0 else values
    total = values.sum()
    f[F[side + "_sum"]], f[F[side + "_sq"]] = total, np.square(values).sum()
    f[F[side + "_m2"]] = np.square(values - total / values.size).sum()


def _ulp(r: Array, t: Array, kind: DType) -> Floats:
    """Distances in units in the last place: the number of steps between neighbouring numbers of the
    dtype. 0 and -0 are the same number.

    Codes are mapped to integers that increase with the value. Float64 distances may need 64 bits,
    so they are computed unsigned.
    """
    bits = kind.bits
    if bits == 64:
        low = np.int64(0x7FFFFFFFFFFFFFFF)
        u, v = (np.where(c >= 0, c, -(c & low)) for c in (r.view(np.int64), t.view(np.int64)))
        gap = np.where(
            u > v, u.view(np.uint64) - v.view(np.uint64), v.view(np.uint64) - u.view(np.uint64)
        )
        wide: Floats = gap.astype(np.float64)
        return wide
    top = 1 << (bits if kind.name == "float8_e8m0fnu" else bits - 1)  # e8m0 has no sign
    codes = [c.view(f"u{bits // 8}").astype(np.int64) for c in (r, t)]
    u, v = (np.where(c < top, c, -(c & (top - 1))) for c in codes)
    near: Floats = np.abs(u - v).astype(np.float64)
    return near
