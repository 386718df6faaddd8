"""Every compiled loop of whence: statistics of one tensor, and the comparison of many pairs in one
call without the GIL.

Importing this module costs nothing and does not import numba: functions are only marked here, and
turned into machine code by `load`, which keeps the result on disk (`cache_dir`), so that it happens
once per machine, version of whence and release of numba.

How a pair is compared. Each tensor is walked in blocks of 2048 elements that stay in the
first-level cache, each block by several simple loops that LLVM vectorises: bytes equal? -> decode
to float scratch -> integer pass over the bits (differences, signs, non-finite) -> figures of each
side -> errors -> relative error, thresholds, histogram, ULP. A block that is bit-identical skips
everything but the figures of one side. In a block with NaN or Inf the pairs that are not finite on
both sides are set to zero first and taken out of the counts, so the fast loops never meet a NaN.
Everything is accumulated in float64. Pairs of 8-bit types go through the joint histogram of their
256 x 256 codes.

Rules learnt the hard way (PERF.md section 7): no `parallel=True`; min and max through LLVM
intrinsics, or they are not vectorised; counters in the width of the element; no negative-index
arithmetic (plain pointers instead of arrays, which also compile faster); `contract` and `arcp` stay
off, or counts differ from numpy at the thresholds.

Arguments that are addresses must stay valid for the call and be aligned to the element size;
nothing is written but the result rows and the scratch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from whence import cache_folders
from whence._version import __version__

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOCK = 2048
THRESHOLDS = np.array([1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
BINS = 64
COMPILE_SECONDS = {
    "compare": 8,
    "compare_wide": 10,
    "describe": 3,
    "describe_many": 2,
    "join_units": 2,
}
ENTRIES = tuple(COMPILE_SECONDS)
_MOST_COMPILE_S = 300.0
ITEMSIZE = (4, 2, 2, 1, 1, 1, 1, 8, 8, 8, 2, 2, 4, 4)
"""Bytes of one element by `DType.code`."""

# Columns of a result row, float64. Sums over the finite elements of one side; "pair" sums over
# places finite on both.
F_NAMES = (
    "r_sum", "t_sum", "r_sq", "t_sq", "r_m2", "t_m2", "r_min", "r_max", "t_min", "t_max", "rr",
    "tt", "rt", "dd", "d_sum", "ad_sum", "ad_max", "rel_sum", "rel_max", "ulp_sum", "ulp_max",
    "row_worst", "channel_worst", "row_dd", "row_rr", "r_scale", "t_scale", "rr_scale",
    "tt_scale", "dd_scale",
)  # fmt: skip
# Columns of a result row, int64. Thresholds: the last eight.
I_NAMES = (
    "n", "r_finite", "t_finite", "pairs", "r_nan", "t_nan", "nan_both", "nan_mismatch", "r_inf",
    "t_inf", "inf_match", "inf_mismatch", "sign", "bytes_differ", "values_differ", "close",
    "rel_skipped", "ad_index", "bad_index", "row_index", "channel_index", "ad_block", "over_0",
    "over_1", "over_2", "over_3", "over_4", "over_5", "over_6", "over_7",
)  # fmt: skip
NF, NI = len(F_NAMES), len(I_NAMES)
# Places of these columns: constants to numba.
(
    R_SUM, T_SUM, R_SQ, T_SQ, R_M2, T_M2, R_MIN, R_MAX, T_MIN, T_MAX, RR, TT, RT, DD, D_SUM,
    AD_SUM, AD_MAX, REL_SUM, REL_MAX, ULP_SUM, ULP_MAX, ROW_WORST, CHANNEL_WORST, ROW_DD,
    ROW_RR, R_SCALE, T_SCALE, RR_SCALE, TT_SCALE, DD_SCALE,
) = range(NF)  # fmt: skip
(
    N, R_FINITE, T_FINITE, PAIRS, R_NAN, T_NAN, NAN_BOTH, NAN_MISMATCH, R_INF, T_INF, INF_MATCH,
    INF_MISMATCH, SIGN, BYTES_DIFFER, VALUES_DIFFER, CLOSE, REL_SKIPPED, AD_INDEX, BAD_INDEX,
    ROW_INDEX, CHANNEL_INDEX, AD_BLOCK, OVER_0, OVER_1, OVER_2, OVER_3, OVER_4, OVER_5, OVER_6,
    OVER_7,
) = range(NI)  # fmt: skip
# Columns of one side, as `_side` takes them.
REFERENCE = R_SUM, R_SQ, R_M2, R_MIN, R_MAX, R_FINITE, R_NAN, R_INF
TARGET = T_SUM, T_SQ, T_M2, T_MIN, T_MAX, T_FINITE, T_NAN, T_INF
# Columns of the table that names the work: one row a tensor (or a chunk of one).
META = (
    "r_address",
    "t_address",
    "n",
    "r_code",
    "t_code",
    "channels",
    "split",
    "dd_address",
    "rr_address",
    "path",
    "row",
)
NM = len(META)
PATH_32, PATH_64, PATH_8, PATH_SAME = 0, 1, 2, 3
SCRATCH_BYTES = 5 * 8 * BLOCK + BLOCK + 8 * BINS * 4 + 65536 * 4 + 4096

# Filled in by `_decorate`: addresses as typed pointers, bit casts, and what numba has no word for.
p_f32 = p_f64 = p_i8 = p_u8 = p_i16 = p_u16 = p_i32 = p_u32 = p_i64 = p_u64 = None
pointer = pointer_of = zero_of = tally = stack = fmin = fmax = half_f32 = bits_f32 = f64_bits = None

_marked = []
_lock = threading.RLock()
_loaded: set[str] = set()
_decorated_for: Path | None = None
"""Where numba looks for the kernels of this process, once any is loaded."""


def _kernel(*, fast=False, entry=False):
    def mark(function):
        _marked.append((function, fast, entry))
        return function

    return mark


# --------------------------------------------------------------------------------------- decode


@_kernel()
def _decode(base, code, o, m, x):
    """Elements o..o+m of a tensor of any type that float32 holds exactly, into the scratch x
    (float32 or float64).
    """
    if code == 0:
        f = p_f32(base + 4 * o)
        for i in range(m):
            x[i] = f[i]
    elif code == 1:
        h = p_u16(base + 2 * o)
        for i in range(m):
            x[i] = bits_f32(np.uint32(h[i]) << np.uint32(16))
    elif code == 2:
        h = p_u16(base + 2 * o)
        for i in range(m):
            x[i] = half_f32(h[i])
    elif code == 3:  # e5m2 is the upper byte of a half
        b = p_u8(base + o)
        for i in range(m):
            x[i] = half_f32(np.uint16(np.uint16(b[i]) << np.uint16(8)))
    elif code == 4:  # e4m3fn: its bits as a half, times 2^8; 0x7f and 0xff are NaN, there is no Inf
        b = p_u8(base + o)
        for i in range(m):
            u = np.uint16(b[i])
            low = np.uint16(u & np.uint16(0x7F))
            v = half_f32(
                np.uint16(((u & np.uint16(0x80)) << np.uint16(8)) | (low << np.uint16(7)))
            ) * np.float32(256.0)
            x[i] = np.float32(np.nan) if low == np.uint16(0x7F) else v
    elif code == 5:
        s8 = p_i8(base + o)
        for i in range(m):
            x[i] = np.float32(s8[i])
    elif code == 6:
        b = p_u8(base + o)
        for i in range(m):
            x[i] = np.float32(b[i])
    elif code == 10:
        s16 = p_i16(base + 2 * o)
        for i in range(m):
            x[i] = np.float32(s16[i])
    else:
        h = p_u16(base + 2 * o)
        for i in range(m):
            x[i] = np.float32(h[i])


@_kernel()
def _decode64(base, code, o, m, x):
    """The same for types that only float64 holds. 64-bit integers are rounded: used for statistics,
    not for differences.
    """
    if code == 12:
        s32 = p_i32(base + 4 * o)
        for i in range(m):
            x[i] = np.float64(s32[i])
    elif code == 13:
        u32 = p_u32(base + 4 * o)
        for i in range(m):
            x[i] = np.float64(u32[i])
    elif code == 8:
        s64 = p_i64(base + 8 * o)
        for i in range(m):
            x[i] = np.float64(s64[i])
    elif code == 9:
        u64 = p_u64(base + 8 * o)
        for i in range(m):
            x[i] = np.float64(u64[i])
    else:
        _decode(base, code, o, m, x)


@_kernel()
def _fetch(base, code, o, m, x, wide):
    """Decode into x. wide: None for a float32 scratch; numba drops the branch that is not taken and
    never compiles it.
    """
    if wide is None:
        _decode(base, code, o, m, x)
    else:
        _decode64(base, code, o, m, x)


# --------------------------------------------------------------------------- loops over a block


@_kernel()
def _equal_bytes(a, b, n):
    """Are n bytes equal? Stops at the first 1 KiB that is not."""
    step = 1024
    o = 0
    while o + step <= n:
        u = p_u64(a + o)
        v = p_u64(b + o)
        x = np.uint64(0)
        for i in range(step // 8):
            x |= u[i] ^ v[i]
        if x != np.uint64(0):
            return False
        o += step
    u8 = p_u8(a + o)
    v8 = p_u8(b + o)
    y = np.uint8(0)
    for i in range(n - o):
        y |= u8[i] ^ v8[i]
    return y == np.uint8(0)


@_kernel()
def _bits(a, b, m, exponent, magnitude):
    """Counts over float bits: differing values (0 == -0), opposite signs of non-zeros, pairs not
    both finite.
    """
    zero = zero_of(exponent)
    ne = zero
    ns = zero
    nf = zero
    for i in range(m):
        u = a[i]
        v = b[i]
        x = u ^ v
        mu = u & magnitude
        mv = v & magnitude
        ne = tally(ne, (u != v) & ((mu | mv) != zero))
        ns = tally(ns, (x > magnitude) & (mu != zero) & (mv != zero))
        nf = tally(nf, (mu >= exponent) | (mv >= exponent))
    return np.int64(ne), np.int64(ns), np.int64(nf)


@_kernel()
def _nonfinite_zero(a, m, exponent, magnitude):
    """Counts over float bits: not finite, exactly zero."""
    zero = zero_of(exponent)
    nf = zero
    nz = zero
    for i in range(m):
        u = a[i] & magnitude
        nf = tally(nf, u >= exponent)
        nz = tally(nz, u == zero)
    return np.int64(nf), np.int64(nz)


@_kernel(fast=True)
def _figures(x, m):
    """Sum, sum of squares, min, max of m >= 1 finite values."""
    s = 0.0
    q = 0.0
    lo = x[0]
    hi = x[0]
    for i in range(m):
        v = x[i]
        w = np.float64(v)
        s += w
        q += w * w
        lo = fmin(lo, v)
        hi = fmax(hi, v)
    return s, q, np.float64(lo), np.float64(hi)


@_kernel(fast=True)
def _spread(x, m, mean):
    q = 0.0
    for i in range(m):
        w = np.float64(x[i]) - mean
        q += w * w
    return q


@_kernel()
def _block_m2(x, m, s, q):
    """Sum of squared deviations from the block's own mean. The short formula loses what it cancels:
    used only while it cancels fewer than 8 bits; else a second look at the block, which is still in
    cache."""
    v = q - s * s / m
    if v * 256.0 < q:
        v = _spread(x, m, s / m)
    return v


@_kernel()
def _join(n0, s0, m20, n1, s1, m21):
    """Squared deviations of two sets taken together (Chan, Golub, LeVeque 1979)."""
    if n0 == 0:
        return m21
    gap = s1 / n1 - s0 / n0
    return m20 + m21 + gap * gap * (np.float64(n0) * np.float64(n1) / np.float64(n0 + n1))


@_kernel()
def _finite_figures(x, y, m):
    """The finite ones of m values, packed into y. Returns how many, how many NaN, how many Inf."""
    j = 0
    nan = 0
    inf = 0
    for i in range(m):
        v = x[i]
        if v != v:
            nan += 1
        elif abs(v) == np.inf:
            inf += 1
        else:
            y[j] = v
            j += 1
    return j, nan, inf


@_kernel()
def _side(x, y, m, clean, F, I, columns):
    """Figures of one side of a block into its result row; returns its sum of squares. y: scratch
    for packing when not clean. columns: REFERENCE or TARGET.
    """
    sum_, sq, m2, min_, max_, finite, nan_, inf_ = columns
    k = m
    z = x
    if not clean:
        k, nan, inf = _finite_figures(x, y, m)
        I[nan_] += nan
        I[inf_] += inf
        z = y
        if k == 0:
            return 0.0
    s, q, lo, hi = _figures(z, k)
    F[m2] = _join(I[finite], F[sum_], F[m2], k, s, _block_m2(z, k, s, q))
    F[sum_] += s
    F[sq] += q
    I[finite] += k
    if lo < F[min_]:
        F[min_] = lo
    if hi > F[max_]:
        F[max_] = hi
    return q


@_kernel()
def _mask(xr, xt, mr, mt, m, base, I):
    """Copies with every place that is not finite on both sides set to zero; counts those places.
    Returns how many there are.
    """
    k = 0
    for i in range(m):
        u = xr[i]
        v = xt[i]
        nu = u != u
        nv = v != v
        iu = abs(u) == np.inf
        iv = abs(v) == np.inf
        if nu | nv | iu | iv:
            k += 1
            mr[i] = 0.0
            mt[i] = 0.0
            wrong = False
            if nu & nv:
                I[NAN_BOTH] += 1
            elif nu | nv:
                I[NAN_MISMATCH] += 1
                wrong = True
            elif iu & iv & (u == v):
                I[INF_MATCH] += 1
            else:
                I[INF_MISMATCH] += 1
                wrong = True
            if wrong and I[BAD_INDEX] < 0:
                I[BAD_INDEX] = base + i
        else:
            mr[i] = u
            mt[i] = v
    return k


@_kernel(fast=True)
def _errors(xr, xt, d, m, atol, rtol):
    """|t - r| into d; sums r*r, t*t, r*t, (t-r)^2, t-r, |t-r|; the largest |t-r|; how many are
    close.
    """
    rt = 0.0
    sd = 0.0
    sad = 0.0
    dd = 0.0
    mx = 0.0
    nc = 0
    for i in range(m):
        u = np.float64(xr[i])
        v = np.float64(xt[i])
        e = v - u
        ae = abs(e)
        d[i] = ae
        rt += u * v
        sd += e
        sad += ae
        dd += e * e
        mx = fmax(mx, ae)
        nc += ae <= atol + rtol * abs(u)
    return rt, sd, sad, dd, mx, nc


@_kernel(fast=True)
def _squares(x, m):
    q = 0.0
    for i in range(m):
        w = np.float64(x[i])
        q += w * w
    return q


@_kernel(fast=True)
def _relative(xr, d, m):
    """Sum and largest |t-r|/|r| over places where r is not zero, and how many places have r ==
    0.
    """
    s = 0.0
    mx = 0.0
    nz = 0
    for i in range(m):
        a = abs(np.float64(xr[i]))
        z = a == 0.0
        q = (0.0 if z else d[i]) / (1.0 if z else a)
        s += q
        mx = fmax(mx, q)
        nz += z
    return s, mx, nz


@_kernel()
def _over(d, m, t):
    c = 0
    for i in range(m):
        c += d[i] > t
    return c


@_kernel()
def _histogram(d, m, lane, words, h):
    """Powers of two: bin 0 exactly zero, bin k in [2^(k-48), 2^(k-47)), bin 1 also everything
    smaller, bin 63 everything larger.
    """
    for i in range(m):
        b = f64_bits(d[i])
        e = (b >> 52) - (1023 - 48)
        e = min(max(e, 1), b)
        lane[i] = np.uint8(min(e, 63))
    K = np.uint64(63)
    # eight tables, so that equal neighbours do not wait for each other's store
    for i in range(m // 8):
        w = words[i]
        h[w & K] += np.uint32(1)
        h[np.uint64(64) + ((w >> np.uint64(8)) & K)] += np.uint32(1)
        h[np.uint64(128) + ((w >> np.uint64(16)) & K)] += np.uint32(1)
        h[np.uint64(192) + ((w >> np.uint64(24)) & K)] += np.uint32(1)
        h[np.uint64(256) + ((w >> np.uint64(32)) & K)] += np.uint32(1)
        h[np.uint64(320) + ((w >> np.uint64(40)) & K)] += np.uint32(1)
        h[np.uint64(384) + ((w >> np.uint64(48)) & K)] += np.uint32(1)
        h[np.uint64(448) + ((w >> np.uint64(56)) & K)] += np.uint32(1)
    for i in range(m // 8 * 8, m):
        h[np.uint64(lane[i])] += np.uint32(1)


@_kernel()
def _ulp32(a, b, m):
    """Distances of float32 bits in units in the last place: sum and largest. At most 2 * 0x7f7fffff
    each.
    """
    s = 0
    mx = 0
    for i in range(m):
        u = np.int64(a[i])
        v = np.int64(b[i])
        u = u if u >= 0 else -(u & 0x7FFFFFFF)
        v = v if v >= 0 else -(v & 0x7FFFFFFF)
        k = abs(u - v)
        s += k
        mx = max(mx, k)
    return np.float64(s), np.float64(mx)


@_kernel(fast=True)
def _ulp64(a, b, m):
    """float64: the distance may need 64 bits, so the larger minus the smaller as unsigned; never
    wraps.
    """
    s = 0.0
    mx = np.uint64(0)
    for i in range(m):
        u = a[i]
        v = b[i]
        u = u if u >= 0 else -(u & 0x7FFFFFFFFFFFFFFF)
        v = v if v >= 0 else -(v & 0x7FFFFFFFFFFFFFFF)
        k = np.uint64(u) - np.uint64(v) if u > v else np.uint64(v) - np.uint64(u)
        s += np.float64(k)
        mx = max(mx, k)
    return s, np.float64(mx)


@_kernel()
def _ulp_codes(a, b, xr, xt, m, top, clean):
    """Types of 8 and 16 bits, from their codes; `top`: the sign bit. Sums fit 32 bits: 2048 *
    131070 < 2^31.
    """
    low = np.int32(top - 1)
    s = np.int32(0)
    mx = np.int32(0)
    if clean:
        for i in range(m):
            u = np.int32(a[i])
            v = np.int32(b[i])
            u = u if u <= low else np.int32(-(u & low))
            v = v if v <= low else np.int32(-(v & low))
            k = np.int32(abs(np.int32(u - v)))
            s = np.int32(s + k)
            mx = max(mx, k)
    else:
        for i in range(m):
            if abs(xr[i]) < np.inf and abs(xt[i]) < np.inf:
                u = np.int32(a[i])
                v = np.int32(b[i])
                u = u if u <= low else np.int32(-(u & low))
                v = v if v <= low else np.int32(-(v & low))
                k = np.int32(abs(np.int32(u - v)))
                s = np.int32(s + k)
                mx = max(mx, k)
    return np.float64(s), np.float64(mx)


@_kernel()
def _ulp_narrow(R, T, o, code, xr, xt, pr, pt, m, clean):
    """A block of one type of up to 32 bits. xr, xt: as decoded; pr, pt: with places that are not
    finite set to zero.
    """
    if code == 0:
        return _ulp32(pointer_of(pr, np.int32(0)), pointer_of(pt, np.int32(0)), m)
    if code == 1:  # bfloat16 is the upper half of a float32
        us, um = _ulp32(pointer_of(pr, np.int32(0)), pointer_of(pt, np.int32(0)), m)
        return us / 65536.0, um / 65536.0
    if code == 2:
        return _ulp_codes(p_u16(R + 2 * o), p_u16(T + 2 * o), xr, xt, m, 0x8000, clean)
    if code == 3 or code == 4:
        return _ulp_codes(p_u8(R + o), p_u8(T + o), xr, xt, m, 0x80, clean)
    return 0.0, 0.0


# ------------------------------------------------------------------------------- rows, channels


@_kernel(fast=True)
def _segment(xr, xt, i, length, cd, cr, c):
    sd = 0.0
    sr = 0.0
    for j in range(length):
        u = np.float64(xr[i + j])
        e = np.float64(xt[i + j]) - u
        e = e * e
        u = u * u
        cd[c + j] += e
        cr[c + j] += u
        sd += e
        sr += u
    return sd, sr


@_kernel()
def _ratio(dd, rr):
    if dd == 0.0:
        return 0.0
    if rr == 0.0:
        return np.inf
    return dd / rr


@_kernel()
def _rows(xr, xt, m, start, C, cd, cr, F, I):
    """Errors by row (a vector of the last axis) and by channel (a place in it). start: flat index
    of the block's first element. The row at hand is carried in ROW_DD and ROW_RR; the worst
    finished one is in ROW_WORST, at ROW_INDEX."""
    i = 0
    c = start % C
    row = start // C
    while i < m:
        length = min(C - c, m - i)
        sd, sr = _segment(xr, xt, i, length, cd, cr, c)
        F[ROW_DD] += sd
        F[ROW_RR] += sr
        i += length
        c += length
        if c == C:
            worst = _ratio(F[ROW_DD], F[ROW_RR])
            if worst > F[ROW_WORST]:
                F[ROW_WORST] = worst
                I[ROW_INDEX] = row
            F[ROW_DD] = 0.0
            F[ROW_RR] = 0.0
            c = 0
            row += 1


@_kernel()
def _rows_equal(base, code, direct, lo, hi, scratch, C, cd, cr, F, I, size, zf, wide):
    """Rows and channels of a stretch that is equal on both sides: only the reference's squares
    count.
    """
    o = lo
    while o < hi:
        m = min(BLOCK, hi - o)
        x = pointer(base + o * size, zf)
        if code != direct:
            x = pointer(scratch, zf)
            _fetch(base, code, o, m, x, wide)
        _rows(x, x, m, o, C, cd, cr, F, I)
        o += m


@_kernel()
def _worst_channel(C, cd, cr, F, I):
    for c in range(C):
        w = _ratio(cd[c], cr[c])
        if w > F[CHANNEL_WORST]:
            F[CHANNEL_WORST] = w
            I[CHANNEL_INDEX] = c


# --------------------------------------------------------------------------------------- a pair


@_kernel()
def _pair(
    R,
    T,
    n,
    kr,
    kt,
    sr,
    st,
    C,
    split,
    cd,
    cr,
    full,
    rtol,
    atol,
    thr,
    W,
    F,
    I,
    H,
    zf,
    zu,
    exponent,
    magnitude,
    direct,
    wide,
):
    """One pair of tensors (or one chunk of it, beginning at a row) into its result row."""
    W_R = W
    W_T = W + 8 * BLOCK
    M_R = W + 16 * BLOCK
    M_T = W + 24 * BLOCK
    d = p_f64(W + 32 * BLOCK)
    lane = p_u8(W + 40 * BLOCK)
    words = p_u64(W + 40 * BLOCK)
    h = p_u32(W + 41 * BLOCK)
    for i in range(8 * BINS):
        h[i] = np.uint32(0)
    rows_done = 0
    # places set to zero because they are not finite: the histogram sees them as zero errors
    masked = 0
    for o in range(0, n, BLOCK):
        m = min(BLOCK, n - o)
        is_equal = kr == kt and _equal_bytes(R + o * sr, T + o * st, m * sr)
        xr = pointer(R + o * sr, zf)
        if kr != direct:
            xr = pointer(W_R, zf)
            _fetch(R, kr, o, m, xr, wide)
        if is_equal:
            nf, nz = _nonfinite_zero(pointer_of(xr, zu), m, exponent, magnitude)
            if nf == 0:
                s, q, lo, hi = _figures(xr, m)
                m2 = _block_m2(xr, m, s, q)
                F[R_M2] = _join(I[R_FINITE], F[R_SUM], F[R_M2], m, s, m2)
                F[T_M2] = _join(I[T_FINITE], F[T_SUM], F[T_M2], m, s, m2)
                F[R_SUM] += s
                F[T_SUM] += s
                F[R_SQ] += q
                F[T_SQ] += q
                F[RR] += q
                F[TT] += q
                F[RT] += q
                if lo < F[R_MIN]:
                    F[R_MIN] = lo
                if hi > F[R_MAX]:
                    F[R_MAX] = hi
                if lo < F[T_MIN]:
                    F[T_MIN] = lo
                if hi > F[T_MAX]:
                    F[T_MAX] = hi
                I[R_FINITE] += m
                I[T_FINITE] += m
                I[PAIRS] += m
                I[CLOSE] += m
                I[REL_SKIPPED] += nz
                h[0] += np.uint32(m)
                if F[AD_MAX] < 0.0:
                    F[AD_MAX] = 0.0
                    I[AD_BLOCK] = o
                continue
        xt = pointer(T + o * st, zf)
        if kt != direct:
            xt = pointer(W_T, zf)
            _fetch(T, kt, o, m, xt, wide)
        ne, ns, nf = _bits(pointer_of(xr, zu), pointer_of(xt, zu), m, exponent, magnitude)
        clean = nf == 0
        k = 0
        pr = xr
        pt = xt
        rr = _side(xr, pointer(M_R, zf), m, clean, F, I, REFERENCE)
        tt = _side(xt, pointer(M_T, zf), m, clean, F, I, TARGET)
        if kr == kt and not is_equal:
            I[BYTES_DIFFER] = 1
        if not clean:
            pr = pointer(M_R, zf)
            pt = pointer(M_T, zf)
            k = _mask(xr, xt, pr, pt, m, o, I)
            rr = _squares(pr, m)
            tt = _squares(pt, m)
            ne, ns, _ = _bits(pointer_of(pr, zu), pointer_of(pt, zu), m, exponent, magnitude)
        I[PAIRS] += m - k
        I[SIGN] += ns
        I[VALUES_DIFFER] += ne
        rt, sd, sad, dd, mx, nc = _errors(pr, pt, d, m, atol, rtol)
        F[RR] += rr
        F[TT] += tt
        F[RT] += rt
        F[DD] += dd
        F[D_SUM] += sd
        F[AD_SUM] += sad
        if mx > F[AD_MAX] and k < m:
            F[AD_MAX] = mx
            I[AD_BLOCK] = o
        # a masked place counts as close to zero tolerance or not at all: 0 <= atol + rtol * 0
        I[CLOSE] += nc - (k if atol >= 0.0 else 0)
        if full:
            s, rmx, nz = _relative(pr, d, m)
            F[REL_SUM] += s
            if rmx > F[REL_MAX]:
                F[REL_MAX] = rmx
            I[REL_SKIPPED] += nz - k
            c = 0
            for t in range(8):
                if mx > thr[t]:
                    c = m if c == m else _over(d, m, thr[t])
                    I[OVER_0 + t] += c
            _histogram(d, m, lane, words, h)
            masked += k
            if kr == kt and ne != 0:
                us = 0.0
                um = 0.0
                if wide is None:
                    us, um = _ulp_narrow(R, T, o, kr, xr, xt, pr, pt, m, clean)
                elif kr == 7:
                    us, um = _ulp64(pointer_of(pr, np.int64(0)), pointer_of(pt, np.int64(0)), m)
                F[ULP_SUM] += us
                if um > F[ULP_MAX]:
                    F[ULP_MAX] = um
            if C > 0:
                if rows_done < o:
                    _rows_equal(
                        R, kr, direct, rows_done, o, W + 32 * BLOCK, C, cd, cr, F, I, sr, zf, wide
                    )
                _rows(pr, pt, m, o, C, cd, cr, F, I)
                rows_done = o + m
    if full and C > 0 and (split or rows_done > 0):
        _rows_equal(R, kr, direct, rows_done, n, W + 32 * BLOCK, C, cd, cr, F, I, sr, zf, wide)
        if not split:
            _worst_channel(C, cd, cr, F, I)
    if full:
        for i in range(BINS):
            t = np.int64(0)
            for j in range(8):
                t += np.int64(h[j * BINS + i])
            H[i] = t
        H[0] -= masked
    if F[AD_MAX] > 0.0:  # only the block was kept: look again for the first place in it
        o = I[AD_BLOCK]
        m = min(BLOCK, n - o)
        xr = pointer(R + o * sr, zf)
        xt = pointer(T + o * st, zf)
        if kr != direct:
            xr = pointer(W_R, zf)
            _fetch(R, kr, o, m, xr, wide)
        if kt != direct:
            xt = pointer(W_T, zf)
            _fetch(T, kt, o, m, xt, wide)
        for i in range(m):
            if abs(np.float64(xt[i]) - np.float64(xr[i])) == F[AD_MAX]:
                I[AD_INDEX] = o + i
                break


@_kernel()
def _first(a, b, x, y, n):
    """First place where a is the code x and b the code y, or n."""
    o = 0
    x = np.uint8(x)
    y = np.uint8(y)
    while o < n:
        m = min(4096, n - o)
        c = 0
        for i in range(o, o + m):
            c |= (a[i] == x) & (b[i] == y)
        if c:
            for i in range(o, o + m):
                if a[i] == x and b[i] == y:
                    return i
        o += m
    return n


@_kernel()
def _pair8(R, T, n, kr, kt, C, split, cd, cr, full, rtol, atol, thr, W, F, I, H):
    """One pair of 8-bit tensors: how often each of the 65536 pairs of codes occurs says everything
    but where.
    """
    J = p_u32(W + 41 * BLOCK + 8 * BINS * 4)
    for i in range(65536):
        J[i] = np.uint32(0)
    a = p_u8(R)
    b = p_u8(T)
    if R % 8 == 0 and T % 8 == 0:
        a64 = p_u64(R)
        b64 = p_u64(T)
        K = np.uint64(255)
        for i in range(n // 8):
            u = a64[i]
            v = b64[i]
            for k in range(8):
                s = np.uint64(8 * k)
                J[(((u >> s) & K) << np.uint64(8)) | ((v >> s) & K)] += np.uint32(1)
        for i in range(n // 8 * 8, n):
            J[(np.uint64(a[i]) << np.uint64(8)) | np.uint64(b[i])] += np.uint32(1)
    else:
        for i in range(n):
            J[(np.uint64(a[i]) << np.uint64(8)) | np.uint64(b[i])] += np.uint32(1)
    codes = p_u8(W + 40 * BLOCK)
    for i in range(256):
        codes[i] = np.uint8(i)
    lr = p_f32(W)
    lt = p_f32(W + 1024)
    _decode(W + 40 * BLOCK, kr, 0, 256, lr)
    _decode(W + 40 * BLOCK, kt, 0, 256, lt)
    nr = p_i64(W + 4096)  # how often each code occurs on either side
    nt = p_i64(W + 8192)
    for x in range(256):
        nr[x] = 0
        nt[x] = 0
    for x in range(256):
        u = np.float64(lr[x])
        for y in range(256):
            c = np.int64(J[x * 256 + y])
            if c == 0:
                continue
            v = np.float64(lt[y])
            nr[x] += c
            nt[y] += c
            if kr == kt and x != y:
                I[BYTES_DIFFER] = 1
            nu = u != u
            nv = v != v
            iu = abs(u) == np.inf
            iv = abs(v) == np.inf
            if nu | nv | iu | iv:
                wrong = True
                if nu & nv:
                    I[NAN_BOTH] += c
                    wrong = False
                elif nu | nv:
                    I[NAN_MISMATCH] += c
                elif iu & iv & (u == v):
                    I[INF_MATCH] += c
                    wrong = False
                else:
                    I[INF_MISMATCH] += c
                if wrong:
                    index = _first(a, b, x, y, n if I[BAD_INDEX] < 0 else I[BAD_INDEX])
                    if I[BAD_INDEX] < 0 or index < I[BAD_INDEX]:
                        I[BAD_INDEX] = index
                continue
            w = np.float64(c)
            e = v - u
            ae = abs(e)
            I[PAIRS] += c
            F[RR] += w * u * u
            F[TT] += w * v * v
            F[RT] += w * u * v
            F[DD] += w * e * e
            F[D_SUM] += w * e
            F[AD_SUM] += w * ae
            if ae > F[AD_MAX]:
                F[AD_MAX] = ae
            if u * v < 0.0:
                I[SIGN] += c
            if ae != 0.0:
                I[VALUES_DIFFER] += c
            if ae <= atol + rtol * abs(u):
                I[CLOSE] += c
            if full:
                if u == 0.0:
                    I[REL_SKIPPED] += c
                else:
                    q = ae / abs(u)
                    F[REL_SUM] += w * q
                    if q > F[REL_MAX]:
                        F[REL_MAX] = q
                for t in range(8):
                    if ae > thr[t]:
                        I[OVER_0 + t] += c
                bits = f64_bits(ae)
                k = min(max((bits >> 52) - (1023 - 48), 1), 63)
                H[k if bits != 0 else 0] += c
                if kr == kt and (kr == 3 or kr == 4):
                    p = x if x < 128 else -(x & 127)
                    z = y if y < 128 else -(y & 127)
                    k = abs(p - z)
                    F[ULP_SUM] += w * np.float64(k)
                    if np.float64(k) > F[ULP_MAX]:
                        F[ULP_MAX] = np.float64(k)
    for side in range(2):
        table = lr if side == 0 else lt
        count = nr if side == 0 else nt
        s = 0.0
        k = 0
        for x in range(256):
            v = np.float64(table[x])
            c = count[x]
            if c == 0:
                continue
            if v != v:
                I[R_NAN + side] += c
            elif abs(v) == np.inf:
                I[R_INF + side] += c
            else:
                k += c
                s += v * np.float64(c)
                F[R_SQ + side] += v * v * np.float64(c)
                if v < F[R_MIN + 2 * side]:
                    F[R_MIN + 2 * side] = v
                if v > F[R_MAX + 2 * side]:
                    F[R_MAX + 2 * side] = v
        F[R_SUM + side] = s
        I[R_FINITE + side] = k
        if k > 0:
            mean = s / np.float64(k)
            q = 0.0
            for x in range(256):
                v = np.float64(table[x])
                if count[x] > 0 and abs(v) < np.inf:
                    q += (v - mean) * (v - mean) * np.float64(count[x])
            F[R_M2 + side] = q
    if F[AD_MAX] > 0.0:
        best = n
        for x in range(256):
            for y in range(256):
                if J[x * 256 + y] != 0 and abs(np.float64(lt[y]) - np.float64(lr[x])) == F[AD_MAX]:
                    best = min(best, _first(a, b, x, y, best))
        I[AD_INDEX] = best
    if full and C > 0 and (split or I[VALUES_DIFFER] + I[NAN_MISMATCH] + I[INF_MISMATCH] > 0):
        zf = np.float32(0)
        for o in range(0, n, BLOCK):
            m = min(BLOCK, n - o)
            xr = p_f32(W)
            xt = p_f32(W + 8 * BLOCK)
            _decode(R, kr, o, m, xr)
            _decode(T, kt, o, m, xt)
            if I[R_NAN] + I[T_NAN] + I[R_INF] + I[T_INF] > 0:
                for i in range(m):
                    if not (abs(xr[i]) < np.inf and abs(xt[i]) < np.inf):
                        xr[i] = zf
                        xt[i] = zf
            _rows(xr, xt, m, o, C, cd, cr, F, I)
        if not split:
            _worst_channel(C, cd, cr, F, I)


@_kernel(entry=True)
def compare(
    meta_address, count, tier, rtol, atol, thr_address, scratch, f_address, i_address, h_address
):
    """Compare `count` pairs of elements of at most 32 bits (PATH_32, PATH_SAME). meta: (count, NM)
    int64; results: (rows, NF) float64, (rows, NI) int64, (rows, BINS) int64, all addresses of
    C-contiguous memory already set to the empty row. tier: 0 same, 1 core, 2 full."""
    thr = p_f64(thr_address)
    full = tier == 2
    for k in range(count):
        meta = p_i64(meta_address + k * (8 * NM))
        row = meta[10]
        F = p_f64(f_address + row * (8 * NF))
        I = p_i64(i_address + row * (8 * NI))
        H = p_i64(h_address + row * (8 * BINS))
        n = meta[2]
        kr = meta[3]
        kt = meta[4]
        C = meta[5]
        split = meta[6] != 0
        cd = p_f64(meta[7])
        cr = p_f64(meta[8])
        I[N] = n
        if meta[9] == PATH_SAME:
            I[BYTES_DIFFER] = 0 if _equal_bytes(meta[0], meta[1], n) else 1
            continue
        if full and C > 0 and not split:
            for c in range(C):
                cd[c] = 0.0
                cr[c] = 0.0
        _pair(
            meta[0],
            meta[1],
            n,
            kr,
            kt,
            _itemsize(kr),
            _itemsize(kt),
            C,
            split,
            cd,
            cr,
            full,
            rtol,
            atol,
            thr,
            scratch,
            F,
            I,
            H,
            np.float32(0),
            np.uint32(0),
            np.uint32(0x7F800000),
            np.uint32(0x7FFFFFFF),
            0,
            None,
        )


@_kernel(entry=True)
def compare_wide(
    meta_address, count, tier, rtol, atol, thr_address, scratch, f_address, i_address, h_address
):
    """As `compare`, pairs of elements of 64 bits, and large ones of 8 (PATH_64, PATH_8)."""
    thr = p_f64(thr_address)
    full = tier == 2
    for k in range(count):
        meta = p_i64(meta_address + k * (8 * NM))
        row = meta[10]
        F = p_f64(f_address + row * (8 * NF))
        I = p_i64(i_address + row * (8 * NI))
        H = p_i64(h_address + row * (8 * BINS))
        n = meta[2]
        kr = meta[3]
        kt = meta[4]
        C = meta[5]
        split = meta[6] != 0
        cd = p_f64(meta[7])
        cr = p_f64(meta[8])
        I[N] = n
        if full and C > 0 and not split:
            for c in range(C):
                cd[c] = 0.0
                cr[c] = 0.0
        if meta[9] == PATH_8:
            R = meta[0]
            T = meta[1]
            _pair8(R, T, n, kr, kt, C, split, cd, cr, full, rtol, atol, thr, scratch, F, I, H)
        else:
            _pair(
                meta[0],
                meta[1],
                n,
                kr,
                kt,
                _itemsize(kr),
                _itemsize(kt),
                C,
                split,
                cd,
                cr,
                full,
                rtol,
                atol,
                thr,
                scratch,
                F,
                I,
                H,
                np.float64(0),
                np.uint64(0),
                np.uint64(0x7FF0000000000000),
                np.uint64(0x7FFFFFFFFFFFFFFF),
                7,
                1,
            )


@_kernel()
def _itemsize(code):
    if code == 7 or code == 8 or code == 9:
        return 8
    if code == 0 or code == 12 or code == 13:
        return 4
    if code == 1 or code == 2 or code == 10 or code == 11:
        return 2
    return 1


# ----------------------------------------------------------------------------------- one tensor


@_kernel()
def _mix(z):
    """64 bits into 64 bits, one to one (finaliser of splitmix64, Steele, Lea, Flood 2014)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_kernel()
def _checksum(a, m):
    s = np.uint64(0)
    for i in range(m):
        s += _mix(np.uint64(a[i]))
    return s


@_kernel(fast=True)
def _powers(x, m):
    """Sums of x, x^2, |x|, x^3, x^4, and min and max, of m >= 1 finite values."""
    s = 0.0
    q = 0.0
    ab = 0.0
    cu = 0.0
    fo = 0.0
    lo = x[0]
    hi = x[0]
    for i in range(m):
        v = x[i]
        w = np.float64(v)
        w2 = w * w
        s += w
        q += w2
        ab += abs(w)
        cu += w2 * w
        fo += w2 * w2
        lo = fmin(lo, v)
        hi = fmax(hi, v)
    return s, q, ab, cu, fo, np.float64(lo), np.float64(hi)


@_kernel()
def _describe(base, n, code, size, direct, zf, zu, exponent, magnitude, wide, full):
    scratch = stack()
    packed = stack()
    nan = 0
    inf = 0
    zero = 0
    finite = 0
    lo = np.inf
    hi = -np.inf
    s = 0.0
    q = 0.0
    m2 = 0.0
    ab = 0.0
    cu = 0.0
    fo = 0.0
    check = np.uint64(0)
    for o in range(0, n, BLOCK):
        m = min(BLOCK, n - o)
        address = base + o * size
        if size == 4:
            check += _checksum(p_u32(address), m)
        elif size == 2:
            check += _checksum(p_u16(address), m)
        elif size == 8:
            check += _checksum(p_u64(address), m)
        else:
            check += _checksum(p_u8(address), m)
        if not full:
            continue
        x = pointer(address, zf)
        if code != direct:
            x = pointer(scratch, zf)
            _fetch(base, code, o, m, x, wide)
        nf, nz = _nonfinite_zero(pointer_of(x, zu), m, exponent, magnitude)
        zero += nz
        if nf:
            y = pointer(packed, zf)
            m, a, b = _finite_figures(x, y, m)
            nan += a
            inf += b
            x = y
            if m == 0:
                continue
        s1, q1, ab1, cu1, fo1, lo1, hi1 = _powers(x, m)
        m2 = _join(finite, s, m2, m, s1, _block_m2(x, m, s1, q1))
        s += s1
        q += q1
        ab += ab1
        cu += cu1
        fo += fo1
        finite += m
        if lo1 < lo:
            lo = lo1
        if hi1 > hi:
            hi = hi1
    return finite, nan, inf, zero, lo, hi, s, q, m2, ab, cu, fo, check


@_kernel(entry=True)
def describe(address, n, code, full):
    """Figures of one tensor: (finite, nan, inf, zero, min, max, sum, sum of squares, squared
    deviations, |x|, x^3, x^4, checksum).

    address of n elements of the type with this kernel code (not -1). full = 0: only the checksum is
    taken.
    """
    if code == 7 or code == 8 or code == 9 or code == 12 or code == 13:
        return _describe(
            address,
            n,
            code,
            _itemsize(code),
            7,
            np.float64(0),
            np.uint64(0),
            np.uint64(0x7FF0000000000000),
            np.uint64(0x7FFFFFFFFFFFFFFF),
            1,
            full != 0,
        )
    return _describe(
        address,
        n,
        code,
        _itemsize(code),
        0,
        np.float32(0),
        np.uint32(0),
        np.uint32(0x7F800000),
        np.uint32(0x7FFFFFFF),
        None,
        full != 0,
    )


# ------------------------------------------------------- many contents at once: digest and figures

# Words of XXH3's default secret, as its long form reads them: at every eighth byte, then eight at
# byte 121 (the last stripe), eight at 11 and eight at 117 (both halves of the end).
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_PARTS = (0, 192), (121, 64), (11, 64), (117, 64)
SECRET_WORDS = np.concatenate(
    [np.frombuffer(_SECRET[start : start + size], "<u8") for start, size in _SECRET_PARTS]
)
DIGEST_BYTES = 241
"""Contents from here on get a digest from `describe_many`; XXH3 has other ways for shorter ones."""

# Columns of its results: uint64 (the digest in two halves, counts), and float64.
COUNTS = "low", "high", "finite", "nan", "inf", "zero", "checksum"
FIGURES = "min", "max", "sum", "squares", "deviations", "absolute", "cube", "fourth"


@_kernel()
def _folded(a, b):
    """Both halves of the 128-bit product, one upon the other."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    al = a & mask
    ah = a >> half
    bl = b & mask
    bh = b >> half
    ll = al * bl
    hl = ah * bl
    lh = al * bh
    cross = (ll >> half) + (hl & mask) + lh
    upper = ah * bh + (hl >> half) + (cross >> half)
    return ((cross << half) | (ll & mask)) ^ upper


@_kernel()
def _merged(acc, words, start):
    h = start
    for i in range(4):
        h += _folded(acc[2 * i] ^ words[2 * i], acc[2 * i + 1] ^ words[2 * i + 1])
    h ^= h >> np.uint64(37)
    h *= np.uint64(0x165667919E3779F9)
    return h ^ (h >> np.uint64(32))


@_kernel()
def _stripes(address, count, words, acc):
    """Take `count` stripes of 64 bytes in, with the words from `words` on."""
    data = p_u64(address)
    secret = p_u64(words)
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    a0 = acc[0]
    a1 = acc[1]
    a2 = acc[2]
    a3 = acc[3]
    a4 = acc[4]
    a5 = acc[5]
    a6 = acc[6]
    a7 = acc[7]
    for n in range(count):
        o = 8 * n
        d0 = data[o]
        d1 = data[o + 1]
        d2 = data[o + 2]
        d3 = data[o + 3]
        d4 = data[o + 4]
        d5 = data[o + 5]
        d6 = data[o + 6]
        d7 = data[o + 7]
        k0 = d0 ^ secret[n]
        k1 = d1 ^ secret[n + 1]
        k2 = d2 ^ secret[n + 2]
        k3 = d3 ^ secret[n + 3]
        k4 = d4 ^ secret[n + 4]
        k5 = d5 ^ secret[n + 5]
        k6 = d6 ^ secret[n + 6]
        k7 = d7 ^ secret[n + 7]
        a0 += d1 + (k0 & mask) * (k0 >> half)
        a1 += d0 + (k1 & mask) * (k1 >> half)
        a2 += d3 + (k2 & mask) * (k2 >> half)
        a3 += d2 + (k3 & mask) * (k3 >> half)
        a4 += d5 + (k4 & mask) * (k4 >> half)
        a5 += d4 + (k5 & mask) * (k5 >> half)
        a6 += d7 + (k6 & mask) * (k6 >> half)
        a7 += d6 + (k7 & mask) * (k7 >> half)
    acc[0] = a0
    acc[1] = a1
    acc[2] = a2
    acc[3] = a3
    acc[4] = a4
    acc[5] = a5
    acc[6] = a6
    acc[7] = a7


@_kernel()
def _begun(acc):
    """The accumulators of XXH3 before the first byte."""
    acc[0] = np.uint64(0xC2B2AE3D)
    acc[1] = np.uint64(0x9E3779B185EBCA87)
    acc[2] = np.uint64(0xC2B2AE3D27D4EB4F)
    acc[3] = np.uint64(0x165667B19E3779F9)
    acc[4] = np.uint64(0x85EBCA77C2B2AE63)
    acc[5] = np.uint64(0x85EBCA77)
    acc[6] = np.uint64(0x27D4EB2F165667C5)
    acc[7] = np.uint64(0x9E3779B1)


@_kernel()
def _scrambled(acc, secret):
    """What follows each whole block."""
    for i in range(8):
        v = acc[i]
        acc[i] = (v ^ (v >> np.uint64(47)) ^ secret[16 + i]) * np.uint64(0x9E3779B1)


@_kernel()
def _ended(acc, last, n, words):
    """Take the last 64 bytes in, which lie at an address that 8 divides: (low half, high half) of
    the digest of n bytes.
    """
    _stripes(last, 1, words + 192, acc)
    length = np.uint64(n)
    low = _merged(acc, p_u64(words + 256), length * np.uint64(0x9E3779B185EBCA87))
    high = _merged(acc, p_u64(words + 320), ~(length * np.uint64(0xC2B2AE3D27D4EB4F)))
    return low, high


@_kernel()
def _xxh3(address, n, words):
    """xxh3_128 of n >= DIGEST_BYTES bytes at an address that 8 divides: (low half, high half).
    words: address of `SECRET_WORDS`.
    """
    place = stack()
    acc = p_u64(place)
    secret = p_u64(words)
    _begun(acc)
    blocks = (n - 1) // 1024
    for b in range(blocks):
        _stripes(address + 1024 * b, 16, words, acc)
        _scrambled(acc, secret)
    _stripes(address + 1024 * blocks, (n - 1 - 1024 * blocks) // 64, words, acc)
    # The last 64 bytes lie anywhere: they are moved to where words may be read.
    last = p_u8(address + n - 64)
    moved = p_u8(place + 64)
    for i in range(64):
        moved[i] = last[i]
    return _ended(acc, place + 64, n, words)


@_kernel(entry=True)
def describe_many(table, rows, words, counts, figures):
    """Digests and figures of many contents.

    table: address of `rows` rows of three int64: address (8 divides it), bytes, kernel code (-1: no
    figures). words: address of `SECRET_WORDS`. counts, figures: addresses of rows of `COUNTS` and
    `FIGURES` to write. Contents shorter than DIGEST_BYTES get no digest.
    """
    work = p_i64(table)
    whole = p_u64(counts)
    real = p_f64(figures)
    for r in range(rows):
        address = work[3 * r]
        nbytes = work[3 * r + 1]
        code = work[3 * r + 2]
        if nbytes >= 241:
            low, high = _xxh3(address, nbytes, words)
            whole[7 * r] = low
            whole[7 * r + 1] = high
        if code < 0:
            continue
        finite, nan, inf, zero, lo, hi, s, q, m2, ab, cu, fo, check = describe(
            address, nbytes // _itemsize(code), code, 1
        )
        whole[7 * r + 2] = np.uint64(finite)
        whole[7 * r + 3] = np.uint64(nan)
        whole[7 * r + 4] = np.uint64(inf)
        whole[7 * r + 5] = np.uint64(zero)
        whole[7 * r + 6] = check
        real[8 * r] = lo
        real[8 * r + 1] = hi
        real[8 * r + 2] = s
        real[8 * r + 3] = q
        real[8 * r + 4] = m2
        real[8 * r + 5] = ab
        real[8 * r + 6] = cu
        real[8 * r + 7] = fo


# -------------------------------------- what a device found out of each unit of bytes, put together

HASH_BLOCK = 1024
"""Bytes that XXH3 takes in between two scrambles of its accumulators."""
UNIT_BYTES = 32 * HASH_BLOCK
"""Of a content that a device describes by itself, in one row of `UNIT`."""
UNIT = (
    *("nan", "inf", "zero", "checksum"),
    *("min", "max", "sum", "squares", "deviations", "absolute", "cube", "fourth"),
)
"""Of its finite elements: four uint64, and float64 as in `FIGURES`. deviations: squared, from the
mean of the unit.
"""


@_kernel(entry=True)
def join_units(table, rows, words, counts, figures):
    """`describe_many`, of contents that a device read: from the sums of each block and the figures
    of each unit.

    table: address of `rows` rows of three int64: address (8 divides it), bytes of the content (at
    least DIGEST_BYTES), kernel code (-1: no figures). At the address lie the last 64 bytes of the
    content, eight uint64 for each block of HASH_BLOCK that it has or begins (what its whole
    stripes add to the accumulators; that of the last byte is none), and, but with -1, a row of
    `UNIT` for each UNIT_BYTES.
    """
    work = p_i64(table)
    whole = p_u64(counts)
    real = p_f64(figures)
    place = stack()
    acc = p_u64(place)
    for r in range(rows):
        address = work[3 * r]
        n = work[3 * r + 1]
        code = work[3 * r + 2]
        blocks = (n - 1) // 1024
        _begun(acc)
        for b in range(blocks + 1):
            added = p_u64(address + 64 + 64 * b)
            for i in range(8):
                acc[i] += added[i]
            if b < blocks:
                _scrambled(acc, p_u64(words))
        low, high = _ended(acc, address, n, words)
        whole[7 * r] = low
        whole[7 * r + 1] = high
        if code < 0:
            continue
        base = address + 64 + 64 * (blocks + 1)
        lo = np.inf
        hi = -np.inf
        s = 0.0
        m2 = 0.0
        finite = 0
        for u in range((n + 32767) // 32768):
            c = p_u64(base + 96 * u)
            f = p_f64(base + 96 * u)
            m = min(32768, n - 32768 * u) // _itemsize(code) - np.int64(c[0] + c[1])
            for i in range(4):
                whole[7 * r + 3 + i] += c[i]
            if m == 0:
                continue
            m2 = _join(finite, s, m2, m, f[6], f[8])
            s += f[6]
            finite += m
            lo = min(lo, f[4])
            hi = max(hi, f[5])
            real[8 * r + 3] += f[7]
            for i in range(3):
                real[8 * r + 5 + i] += f[9 + i]
        whole[7 * r + 2] = np.uint64(finite)
        real[8 * r] = lo
        real[8 * r + 1] = hi
        real[8 * r + 2] = s
        real[8 * r + 4] = m2


def checksum(data, itemsize) -> int:
    """The checksum of `describe with numpy alone: sum modulo 2^64 over the mixed bits of each
    element.

    data: 1-D uint8 array, C-contiguous, canonical bytes. itemsize: 1, 2, 4, 8, or 16, where the
    second word is added to the mixed first and mixed again. Equal for equal multisets of elements,
    whatever their order; else different but for one chance in 2^64.
    """
    if itemsize == 1:
        table = _mix_plain(np.arange(256, dtype=np.uint64))
        return int(
            (np.bincount(data, minlength=256).astype(np.uint64) * table).sum(dtype=np.uint64)
        )
    total = 0
    step = (1 << 16) * itemsize
    for o in range(0, data.size, step):
        part = data[o : o + step]
        if itemsize == 16:
            pair = part.view(np.uint64).reshape(-1, 2)
            mixed = _mix_plain(_mix_plain(pair[:, 0]) + pair[:, 1])
        else:
            mixed = _mix_plain(part.view(f"u{itemsize}").astype(np.uint64))
        total += int(mixed.sum(dtype=np.uint64))
    return total % (1 << 64)


def _mix_plain(z):
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# ----------------------------------------------------------------------------- compile and keep


def _machine() -> str:
    """What the compiled code depends on besides its source: Python, the processor and its
    features.
    """
    about = [platform.machine(), platform.processor(), ".".join(map(str, sys.version_info[:3]))]
    try:
        fields = ("model name", "flags", "Features", "CPU part")
        known_fields = set()
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                name = line.partition(":")[0].strip()
                if name in fields and name not in known_fields:
                    known_fields.add(name)
                    about.append(line)
                if not name and known_fields:
                    break
    except OSError:
        pass  # not Linux: the name of the processor has to do; numba checks the features itself
    about.append(os.environ.get("NUMBA_CPU_NAME", "") + os.environ.get("NUMBA_CPU_FEATURES", ""))
    return hashlib.sha256("|".join(about).encode()).hexdigest()[:12]


@functools.cache
def _cache_name() -> str:
    """By what is compiled and by which numba, and not by where they lie: all environments of a
    machine share what one of them compiled.
    """
    try:
        source, numba = Path(__file__).read_bytes(), metadata.version("numba")
    except (OSError, metadata.PackageNotFoundError):
        return __version__
    return f"{__version__}-{hashlib.sha256(source).hexdigest()[:12]}-numba{numba}"


def _source_in(folder: Path) -> str:
    """A copy of this file in the folder: numba finds a kernel again by the path, and in some
    releases by the time of change, of the file that its code names.
    """
    copy = folder / Path(__file__).name
    if not copy.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # deleted while this process ran
        written = folder / f"{copy.name}.{os.getpid()}"
        written.write_bytes(Path(__file__).read_bytes())
        os.utime(written, (0, 0))
        written.replace(copy)
    return str(copy)


def cache_dir() -> Path | None:
    """Where compiled kernels are kept: $NUMBA_CACHE_DIR, else the user's cache folder, else one of
    our own in the temporary folder; None when nothing is writable (they are then compiled again by
    every process)."""
    name = _cache_name()
    named_folder = (
        [Path(os.environ["NUMBA_CACHE_DIR"]) / "whence"]
        if os.environ.get("NUMBA_CACHE_DIR")
        else []
    )
    # The cache holds machine code, so a folder that others may write into is refused.
    return next(
        (
            home / name
            for home in (*named_folder, *cache_folders.homes())
            if cache_folders.private(home / name)
        ),
        None,
    )


def _marker(folder: Path, entry: str) -> Path:
    return folder / f"{entry}-{_machine()}.ready"


def _folder() -> Path | None:
    """Where the kernels of this process are kept: the cache folder, as it was when the first kernel
    was loaded. Numba goes on looking there whatever the environment says later.
    """
    return cache_dir() if _marked else _decorated_for


def compiled(*entries: str) -> bool:
    """Are the kernels on disk for this version and this machine? Does not import numba. entries:
    all when none is named.
    """
    folder = _folder()
    return folder is not None and all(_marker(folder, e).exists() for e in entries or ENTRIES)


def loaded(*entries: str) -> bool:
    """Are the kernels ready in this process?"""
    return _loaded.issuperset(entries or ENTRIES)


def load(*entries: str, report=None) -> None:
    """Make the kernels callable in this process: from disk, where they are compiled to first if
    they are not there. entries: all when none is named.

    report: told one line before a compilation, by default on standard error. Safe to call from
    several threads, any number of times. Raises ImportError when numba is missing.
    """
    entries = entries or ENTRIES
    if loaded(*entries):
        return
    with _lock:
        if loaded(*entries):
            return
        folder = _folder()
        missing = [e for e in entries if folder is None or not _marker(folder, e).exists()]
        if missing:
            seconds = sum(COMPILE_SECONDS[entry] for entry in missing)
            line = f"compiling kernels, once per machine (about {seconds} s) ..."
            if report is None:
                print(line, file=sys.stderr, flush=True)
            else:
                report(line)
            if folder is not None:
                with _alone(folder):
                    _compile_to_disk(folder, missing)
        _make_callable(entries, folder)
        if folder is not None:
            try:
                for entry in entries:
                    _marker(folder, entry).touch()
            except OSError:
                pass  # a full disk: compiled again next time


def compile_here(folder: str, *entries: str) -> None:
    """Compile these kernels in this process, and keep them in the folder."""
    _make_callable(entries, Path(folder))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into the folder, and let none while this one does.

    Of two that compile at once, one may write numba's index without the kernels of the other; who
    misses them there compiles them itself, and gets other last digits.
    """
    if fcntl is None:  # Windows
        yield
        return
    try:
        _compiling(folder).touch()
        file = _compiling(folder).open("rb")
    except OSError:  # a full disk: nothing is kept then
        yield
        return
    with file:  # closing it unlocks it
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiling(folder: Path) -> Path:
    return folder / "compiling.lock"


def _compile_to_disk(folder: Path, entries: Sequence[str]) -> None:
    """Have a process of its own compile these kernels and write them, where another process has
    not by now.

    A process that has just compiled a kernel calls other copies of its inner functions than one
    that loads it from disk, and their sums round otherwise in the last digit. All processes load
    from disk, so all give the same figures. Where the other process fails, this one compiles.
    """
    entries = [entry for entry in entries if not _marker(folder, entry).exists()]
    if not entries:
        return
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from whence import _kernels; _kernels.compile_here({str(folder)!r}, *{entries!r})"
    )
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],  # no hooks of a program that is captured
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MOST_COMPILE_S,
            check=False,
        )
        if not done.returncode:
            for entry in entries:
                _marker(folder, entry).touch()


def _make_callable(entries: Sequence[str], folder: Path | None) -> None:
    """Load these kernels from the folder, or compile them here where it does not have them."""
    if _marked:
        _decorate(folder)
    scratch = np.zeros(SCRATCH_BYTES, np.uint8)
    address = scratch.ctypes.data
    if "describe" in entries and "describe" not in _loaded:
        globals()["describe"](address, 0, 0, 1)
        _loaded.add("describe")
    for entry in {"describe_many", "join_units"}.intersection(entries) - _loaded:
        globals()[entry](address, 0, address, address, address)
        _loaded.add(entry)
    for entry in {"compare", "compare_wide"}.intersection(entries) - _loaded:
        globals()[entry](
            address,
            0,
            2,
            1e-3,
            1e-5,
            THRESHOLDS.ctypes.data,
            address,
            address,
            address,
            address,
        )
        _loaded.add(entry)


def warmup(report=print) -> float:
    """Compile everything and keep it on disk. Returns the seconds it took; well under one when it
    was there already.
    """
    start = time.perf_counter()
    were_ready = compiled()
    load(report=report)
    seconds = time.perf_counter() - start
    folder = _folder()
    report(
        f"kernels {'were ready' if were_ready else 'compiled'} in {seconds:.1f} s, kept in "
        f"{folder or 'memory only (nothing is writable)'}"
    )
    return seconds


def _decorate(folder: Path | None) -> None:
    """Turn the marked functions of this module into compiled ones. numba's own settings are put
    back afterwards.
    """
    import numba as nb
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils, config
    from numba.extending import intrinsic

    space = globals()

    def cast_pointer(element):
        @intrinsic
        def cast(typing, address):
            def code(context, builder, signature, args):
                return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

            return types.CPointer(element)(types.int64), code

        return cast

    for short in ("f32", "f64", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"):
        element = getattr(types, {"f": "float", "i": "int", "u": "uint"}[short[0]] + short[1:])
        space["p_" + short] = cast_pointer(element)

    @intrinsic
    def pointer(typing, address, like):
        def code(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(like)(types.int64, like), code

    @intrinsic
    def pointer_of(typing, address, like):
        def code(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(like)(address, like), code

    @intrinsic
    def zero_of(typing, like):
        def code(context, builder, signature, args):
            return args[0].type(0)

        return like(like), code

    @intrinsic
    def tally(typing, count, flag):
        def code(context, builder, signature, args):
            return builder.add(args[0], builder.zext(args[1], args[0].type))

        return count(count, types.boolean), code

    def extremum(name):
        @intrinsic
        def pick(typing, x, y):
            def code(context, builder, signature, args):
                kind = args[0].type
                suffix = {"float": "f32", "double": "f64"}[str(kind)]
                instruction = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(kind, [kind, kind]), f"llvm.{name}.{suffix}"
                )
                return builder.call(instruction, args, fastmath=("nnan", "nsz", "reassoc"))

            return x(x, y), code

        return pick

    def convert(source, target, how):
        @intrinsic
        def cast(typing, x):
            def code(context, builder, signature, args):
                return how(builder, args[0])

            return target(source), code

        return cast

    @intrinsic
    def stack(typing):
        def code(context, builder, signature, args):
            place = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), BLOCK))
            return builder.ptrtoint(place, ir.IntType(64))

        return types.int64(), code

    space.update(
        pointer=pointer,
        pointer_of=pointer_of,
        zero_of=zero_of,
        tally=tally,
        stack=stack,
        fmax=extremum("maxnum"),
        fmin=extremum("minnum"),
        half_f32=convert(
            types.uint16,
            types.float32,
            lambda b, x: b.fpext(b.bitcast(x, ir.HalfType()), ir.FloatType()),
        ),
        bits_f32=convert(types.uint32, types.float32, lambda b, x: b.bitcast(x, ir.FloatType())),
        f64_bits=convert(types.float64, types.int64, lambda b, x: b.bitcast(x, ir.IntType(64))),
    )
    configured = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(folder) if folder is not None else configured
        source = None
        with contextlib.suppress(OSError):  # a full disk, or no source: found by its own path
            source = _source_in(folder) if folder is not None else None
        for function, fast, entry in _marked:
            if source is not None:
                function.__code__ = function.__code__.replace(co_filename=source)
            space[function.__name__] = nb.njit(
                nogil=True,
                error_model="numpy",
                fastmath={"reassoc", "nsz"} if fast else False,
                cache=entry and folder is not None,
                **({} if entry else {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}),
            )(function)
    finally:
        config.CACHE_DIR = configured
    global _decorated_for
    _decorated_for = folder
    _marked.clear()
