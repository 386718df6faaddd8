"""The figures of the `aclcmp` report, as that tool defines them: over flat float32 copies, small references left out.

They are kept for people whose limits were set on them. They hide what `measure` shows: a reference of zeros, values below 1.2e-7,
64-bit integers, imaginary parts, shapes. No verdict rests on them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whence.dtypes import Array

EPS = float(np.finfo(np.float32).eps)
"""Below this |reference| an element's relative error counts as 0, and a norm as zero."""
CHUNK = 1 << 20
DIGITS = 10


class Flattened(NamedTuple):
    """The figures; None for all and the reason where there are none."""

    cosine_similarity: float | None
    max_relative_error: float | None
    mean_relative_error: float | None
    relative_euclidean_distance: float | None
    why: str = ""


def flattened(reference: Array, target: Array) -> Flattened:
    """cosine_similarity, max and mean |t/r - 1|, ||t - r|| / ||r|| of two arrays of as many elements, in whatever shapes.

    reference, target: any dtype that becomes float32. Relative errors are taken in float32 and are 0 where |r| <= EPS; the mean is over all
    elements. Norms are sums in float64: the cosine is 1 when both are <= EPS, 0 when one is, and rounded to 10 digits; the distance is
    0 when the reference's is. Nothing but a reason when the numbers of elements differ, or a side is not finite in float32, or empty.
    """
    if reference.size != target.size:
        return _none("data shape doesn't match.")
    if not reference.size:
        return _none("data is empty.")
    rr = tt = rt = dd = total = worst = 0.0
    r_flat, t_flat = reference.reshape(-1), target.reshape(-1)
    for start in range(0, r_flat.size, CHUNK):
        with np.errstate(all="ignore"):
            r, t = (_single(flat[start : start + CHUNK]) for flat in (r_flat, t_flat))
            for side, name in ((r, "golden_data"), (t, "my_data")):
                if not np.isfinite(side).all():
                    return _none(f"{name} includes NAN or inf.")
            relative = np.where(np.abs(r) > EPS, np.abs(t / r - np.float32(1)), np.float32(0))
            wide_r, wide_t = r.astype(np.float64), t.astype(np.float64)
        worst = max(worst, float(relative.max()))
        total += float(relative.sum(dtype=np.float64))
        rr, tt, rt = rr + float(wide_r @ wide_r), tt + float(wide_t @ wide_t), rt + float(wide_r @ wide_t)
        apart = wide_t - wide_r
        dd += float(apart @ apart)
    r_norm, t_norm = math.sqrt(rr), math.sqrt(tt)
    zeros = (r_norm <= EPS) + (t_norm <= EPS)
    cosine = round(rt / (r_norm * t_norm), DIGITS) if not zeros else 1.0 if zeros == 2 else 0.0
    return Flattened(cosine, worst, total / r_flat.size, math.sqrt(dd) / r_norm if r_norm > EPS else 0.0)


def _single(part: Array) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (part.real if part.dtype.kind == "c" else part).astype(np.float32)


def _none(why: str) -> Flattened:
    return Flattened(None, None, None, None, why)
