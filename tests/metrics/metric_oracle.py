"""Every metric again, by the shortest formula that is right: whole arrays, extended precision, no
chunks, no bit tricks.

Shares no code with `whence.metrics`. Values are taken to Python integers or longdouble first, so
that nothing is lost before the formula; ULP distances are found by ranking every number of the
type, or by the integer behind its magnitude.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from scipy.spatial import distance

LONG = np.longdouble


@np.errstate(all="ignore")
def wide(a):
    if a.dtype.kind == "c":
        return a.astype(np.clongdouble)
    if a.dtype == bool:
        return a.astype(np.int64).astype(LONG)
    if a.dtype.kind in "iu" or a.dtype in (np.float16, np.float32, np.float64):
        return a.astype(LONG)  # 64 bits of significand: exact for every integer and float
    return a.astype(np.float64).astype(LONG)


def ranks(a):
    """Signed place of each number among all numbers of its type; 0 and -0 share place 0. Python
    ints.
    """
    size = a.dtype.itemsize
    if a.dtype == ml_dtypes.float8_e8m0fnu:
        return [int(v) for v in a.view(np.uint8)]
    codes = [int(v) for v in a.view(f"u{size}")]
    top = 1 << (8 * size - 1)
    return [c if c < top else -(c - top) for c in codes]


def figures(side, a, out):
    x = wide(a)
    nan, inf = np.isnan(x), np.isinf(x) & ~np.isnan(x)
    x = np.abs(x) if a.dtype.kind == "c" else x
    x = x[~(nan | inf)]
    out[f"{side}_nan"], out[f"{side}_inf"] = int(nan.sum()), int(inf.sum())
    for name, value in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        out[f"{side}_{name}"] = value(x) if x.size else None
    out[f"{side}_norm"] = np.sqrt((x * x).sum()) if x.size else None


@np.errstate(all="ignore")
def expected(r, t, rtol=1e-3, atol=1e-5):
    out = {}
    figures("reference", r, out)
    figures("target", t, out)
    shape = r.shape
    rows = (r, t)
    r, t = r.reshape(-1), t.reshape(-1)
    a, b = wide(r), wide(t)
    na, nb = np.isnan(a), np.isnan(b)
    ia, ib = np.isinf(a) & ~na, np.isinf(b) & ~nb
    fine = ~(na | nb | ia | ib)
    out["nan_mismatch"] = int((na != nb).sum())
    out["nan_matched"] = int((na & nb).sum())
    out["inf_matched"] = int((ia & ib & (a == b)).sum())
    out["inf_mismatch"] = int(((ia | ib) & ~(na | nb)).sum()) - out["inf_matched"]
    bad = (na != nb) | ((ia | ib) & ~(na | nb) & ~(ia & ib & (a == b)))
    if bad.any():
        out["first_nonfinite_mismatch"] = int(np.flatnonzero(bad)[0])
    x, y = a[fine], b[fine]
    n = x.size
    out["compared"] = n
    e = y - x
    ae = np.abs(e)
    is_complex = x.dtype.kind == "c" or y.dtype.kind == "c"
    out["equal_count"] = int((ae == 0).sum()) + out["inf_matched"]
    out["values_equal"] = float(out["equal_count"] + out["nan_matched"] == a.size)
    out["sign_mismatch"] = None if is_complex else int((np.sign(x) * np.sign(y) < 0).sum())
    close = (ae.astype(np.float64) <= atol + rtol * np.abs(x).astype(np.float64)).sum() + out[
        "inf_matched"
    ]
    judged = a.size - out["nan_matched"]
    out["close_share"] = close / judged if judged else None
    rr, tt, dd = (np.sum(np.abs(v) ** 2) for v in (x, y, e))
    absolute = ("max_abs_err", "mean_abs_err", "mean_err", "rmse", "rel_l2")
    names = (*absolute, "cosine_similarity", "scale_estimate", "max_rel_err", "mean_rel_err")
    out.update(dict.fromkeys(names))
    if n:
        out["max_abs_err"], out["mean_abs_err"] = ae.max(), ae.mean()
        out["mean_err"] = None if is_complex else e.mean()
        out["rmse"] = np.sqrt(dd / n)
        out["rel_l2"] = 0.0 if dd == 0 else (np.inf if rr == 0 else np.sqrt(dd / rr))
        if rr > 0 and tt > 0:
            if is_complex:
                out["cosine_similarity"] = np.sum((np.conj(x) * y).real) / np.sqrt(rr) / np.sqrt(tt)
            elif max(float(rr), float(tt)) < 1e300 and min(float(rr), float(tt)) > 1e-280:
                out["cosine_similarity"] = 1 - distance.cosine(
                    x.astype(np.float64), y.astype(np.float64)
                )
            else:
                out["cosine_similarity"] = np.sum(x * y) / np.sqrt(rr) / np.sqrt(tt)
        if rr > 0:
            out["scale_estimate"] = np.sum((np.conj(x) * y).real) / rr
        if ae.max() > 0:
            at = np.flatnonzero(fine)[int(np.argmax(ae.astype(np.float64) == float(ae.max())))]
            out["index"] = tuple(int(i) for i in np.unravel_index(at, shape))
    some = x != 0
    out["rel_err_skipped"] = int((~some).sum())
    if some.any():
        rel = ae[some] / np.abs(x[some])
        out["max_rel_err"], out["mean_rel_err"] = rel.max(), rel.mean()
    for k in range(1, 9):
        out[f"abs_err_over_1e-{k}"] = int((ae.astype(np.float64) > float(f"1e-{k}")).sum())
    out["ulp_max"] = out["ulp_mean"] = None
    if n and r.dtype == t.dtype and r.dtype.kind not in "iubc":
        gaps = [abs(p - q) for p, q in zip(ranks(r[fine]), ranks(t[fine]))]
        out["ulp_max"], out["ulp_mean"] = float(max(gaps)), sum(gaps) / n
    histogram = [0] * 64
    for v in ae.astype(np.float64):
        histogram[0 if v == 0 else min(max(int(np.frexp(v)[1]) - 1 + 48, 1), 63)] += 1
    out["histogram"] = tuple(histogram)
    for name in ("worst_row_rel_l2", "worst_row", "worst_channel_rel_l2", "worst_channel"):
        out[name] = None
    if len(shape) >= 2 and n:
        c = shape[-1]
        d2 = np.where(fine, np.abs(np.where(fine, b, 0) - np.where(fine, a, 0)) ** 2, 0).reshape(
            -1, c
        )
        r2 = np.where(fine, np.abs(np.where(fine, a, 0)) ** 2, 0).reshape(-1, c)
        for name, axis in (("worst_row", 1), ("worst_channel", 0)):
            up, down = d2.sum(axis), r2.sum(axis)
            ratio = [
                0.0 if u == 0 else (np.inf if v == 0 else float(np.sqrt(u / v)))
                for u, v in zip(up, down)
            ]
            out[f"{name}_rel_l2"], out[f"{name}s"] = max(ratio), ratio
    same = rows[0].tobytes() == rows[1].tobytes() and r.dtype == t.dtype
    out["identical"] = same
    return out


EXACT = {
    "compared",
    "values_equal",
    "equal_count",
    "nan_mismatch",
    "inf_mismatch",
    "nan_matched",
    "inf_matched",
    "sign_mismatch",
    "reference_nan",
    "reference_inf",
    "target_nan",
    "target_inf",
    "reference_min",
    "reference_max",
    "target_min",
    "target_max",
    "rel_err_skipped",
    "ulp_max",
    "first_nonfinite_mismatch",
    *(f"abs_err_over_1e-{k}" for k in range(1, 9)),
}


def check(measured, r, t, rtol=1e-3, atol=1e-5):
    """Assert that a full measurement says what the oracle says: counts and extremes exactly, sums
    to 1e-12.
    """
    want = expected(r, t, rtol, atol)
    values = measured.values
    assert measured.identical == want.pop("identical")
    assert measured.histogram == want.pop("histogram")
    extra = {"permuted", "reference_saturated", "target_saturated", "worst_row", "worst_channel"}
    is_complex = "c" in (r.dtype.kind, t.dtype.kind)
    index = want.pop("index", None)
    if index is None and "first_nonfinite_mismatch" in want:
        index = tuple(int(i) for i in np.unravel_index(want["first_nonfinite_mismatch"], r.shape))
    if not is_complex:
        assert measured.max_abs_index == index
    for kind in ("worst_row", "worst_channel"):  # of nearly equal ones either may come out first
        ratios = want.pop(f"{kind}s", None)
        place = want.pop(kind)
        if ratios is None:
            assert values[kind] is None and place is None
        else:
            if (
                max(
                    abs(float(want[f"{s}_{m}"] or 0))
                    for s in ("reference", "target")
                    for m in ("min", "max")
                )
                > 1e150
            ):
                want.pop(
                    f"{kind}_rel_l2"
                )  # rows of the smallest numbers beside the largest: right to a few bits only
                extra.add(f"{kind}_rel_l2")
                continue
            ratios = [
                v if v < 1e150 else np.inf for v in ratios
            ]  # the square of more than 1e154 is inf
            np.testing.assert_allclose(ratios[int(values[kind])], max(ratios), rtol=1e-9)
            if want[f"{kind}_rel_l2"] > 1e150:
                want.pop(f"{kind}_rel_l2")
                extra.add(f"{kind}_rel_l2")
    assert set(values) == set(want) | extra
    # what cancels can only be as good as the terms it is made of
    size = min(max(float(want["reference_norm"] or 0), float(want["target_norm"] or 0)), 1e300)
    slack = {
        "mean_err": 1e-13 * size,
        "reference_mean": 1e-13 * size,
        "target_mean": 1e-13 * size,
        "cosine_similarity": 1e-12,
        "scale_estimate": 1e-12 * (1 + size / max(float(want["reference_norm"] or 1), 1e-300)),
    }
    for name, value in want.items():
        if value is None:
            assert values[name] is None and measured.whys[name], name
        elif name in EXACT and not (is_complex and name.endswith(("_min", "_max"))):
            assert values[name] == float(value), (name, values[name], value)
        elif name == "mean_rel_err" and value > 1e300:
            assert values[name] > 1e300  # the sum of such errors has no float64
        else:
            np.testing.assert_allclose(
                values[name], float(value), rtol=2e-12, atol=slack.get(name, 0.0), err_msg=name
            )
    for name in values:
        assert (name in measured.whys) == (values[name] is None), name
