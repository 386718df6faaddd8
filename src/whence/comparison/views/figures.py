"""The figures of other tools, as they compute them, for people who must quote them. Sources:
docs/views.md.

Each takes (reference, target) of any dtype and returns (figures, why there are none). Where such a
formula misleads, the figure is still theirs; what is right stands in whence's own columns.
Everything is taken on whole tensors: memory is some times that of a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array

Figures = dict[str, float | str | None]
Floats = npt.NDArray[np.floating[Any]]

_EPS32, _EPS64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)


def msit(reference: Array, target: Array) -> tuple[Figures, str]:
    """`msit llm compare`: in float32 (imaginary parts are dropped), numbers of elements are
    compared and not shapes.

    Relative and absolute errors are 0 where |reference| <= 1.19e-7; kl_divergence is of the softmax
    over the whole tensor, in float64 here, where the tool's float32 leaves some 1e-7 of rounding.
    Nothing is computed where either side is not finite.
    """
    if reference.size != target.size:
        return {}, "data shape doesn't match."
    g, m = _narrow(reference), _narrow(target)
    for name, side in (("golden_data", g), ("my_data", m)):
        if not np.isfinite(side).all():
            return {}, f"{name} includes NAN or inf."
    if not g.size:
        return {}, "empty"  # the tool ends with an error here
    found = _masked(g, m, _EPS32)
    found["cosine_similarity"] = _cosine(g, m, _EPS32, 10, lone=0.0)
    found["kl_divergence"] = _kl(g, m)
    size = float(np.linalg.norm(g.astype(np.float64)))
    apart = float(np.linalg.norm(m.astype(np.float64) - g.astype(np.float64)))
    found["relative_euclidean_distance"] = apart / size if size > _EPS32 else 0.0
    return found, ""


def aclcmp(reference: Array, target: Array) -> tuple[Figures, str]:
    """`ait debug compare aclcmp`: as msit, but the cosine of one zero vector is the text NaN, with
    the machine epsilon of float64.
    """
    found, why = msit(reference, target)
    if why:
        return found, why
    return {
        **found,
        "cosine_similarity": _cosine(_narrow(reference), _narrow(target), _EPS64, 10, lone="NaN"),
    }, ""


def torch_xray(reference: Array, target: Array) -> tuple[Figures, str]:
    """torch_xray's `compare`: cosine, root mean square of the error, per cent that is close (rtol
    1e-3, atol 1e-5), largest error, elements that differ at all.
    """
    if reference.shape != target.shape:
        return {}, f"shape {tuple(reference.shape)} against {tuple(target.shape)}"
    if not reference.size:
        return {}, "empty"
    g, m = _wide(reference), _wide(target)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(m - g)
        rmse, close = (
            float(np.sqrt(np.mean(apart**2))),
            np.isclose(m, g, rtol=1e-3, atol=1e-5, equal_nan=True),
        )
    return {
        "cosine": _cosine(g, m, 0.0, 10, lone=0.0),
        "rmse": rmse,
        "is_close": 100.0 * float(np.mean(close)),
        "max_err": float(np.max(apart)),
        "gt_num": float(np.count_nonzero(~((g == m) | (np.isnan(g) & np.isnan(m))))),
    }, ""


def msprobe(reference: Array, target: Array) -> tuple[Figures, str]:
    """`msprobe compare` on tensors: what is not finite at equal places counts as 0 on both sides,
    whatever its sign.

    Relative errors are |n - b| / |b| in float32 at least; where b is 0, the machine epsilon is
    added to both.
    """
    if reference.shape != target.shape:
        return {}, "shape unmatched"
    if not reference.size:
        return {}, "This is empty data, can not compare."
    b, n = _wide(reference), _wide(target)
    odd = ~np.isfinite(b)
    for test in (np.isnan, np.isinf):
        if not np.array_equal(test(b), test(n)):
            return {}, "Position of inf or nan in NPU and bench Tensor do not match."
    b, n = np.where(odd, 0.0, b), np.where(odd, 0.0, n)
    apart = np.abs(n - b)
    wide = reference.dtype.itemsize > 4
    narrow, eps = (np.dtype(np.float64), _EPS64) if wide else (np.dtype(np.float32), _EPS32)
    bench: npt.NDArray[Any] = b.astype(narrow)
    npu: npt.NDArray[Any] = n.astype(narrow)
    shift = np.where(bench == 0, eps, 0.0).astype(narrow)
    relative = np.abs(npu - bench) / np.abs(bench + shift)
    cosine = _cosine(b, n, 2.2e-16, 12, lone="NaN")
    if isinstance(cosine, float) and cosine > 0.9999:
        cosine = round(cosine, 6)
    return {
        "cosine": cosine,
        "euc_dist": float(np.linalg.norm(apart)),
        "max_abs_err": round(float(apart.max()), 12),
        "max_relative_err": round(float(relative.max()), 12),
        "one_thousandth": round(float(np.mean(relative < 1e-3)), 12),
        "five_thousandths": round(float(np.mean(relative < 5e-3)), 12),
    }, ""


def polygraphy(reference: Array, target: Array) -> tuple[Figures, str]:
    """Polygraphy's simple comparison: relative differences are over |reference| (the second
    runner), 2.2e-16 where that is a floating 0; over an integer 0 they are NaN or infinite.

    failing: elements beyond both tolerances, of 1e-5 each; what is not finite on both sides is a
    failing element too.
    """
    if reference.shape != target.shape:
        return {}, f"shape {tuple(reference.shape)} against {tuple(target.shape)}"
    if not reference.size:
        return {}, "empty"
    second, first = _wide(reference), _wide(target)
    least = 0.0 if reference.dtype.kind in "iub" else 2.220446049250313e-16
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(first - second)
        relative = apart / np.where(second == 0, least, np.abs(second))
        found: Figures = {}
        for name, values in (("absdiff", apart), ("reldiff", relative)):
            found |= {
                f"max_{name}": float(np.max(values)),
                f"mean_{name}": float(np.mean(values)),
                f"median_{name}": float(np.median(values)),
                f"quantile_{name}": float(np.quantile(values, 0.99)),
            }
        found["failing"] = float(np.count_nonzero(~((apart <= 1e-5) | (relative <= 1e-5))))
    return found, ""


FORMULAS: dict[str, Callable[[Array, Array], tuple[Figures, str]]] = {
    "aclcmp": aclcmp,
    "msit": msit,
    "msprobe": msprobe,
    "polygraphy": polygraphy,
    "torch_xray": torch_xray,
}


def _narrow(array: Array) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            np.asarray(array.real if array.dtype.kind == "c" else array)
            .reshape(-1)
            .astype(np.float32)
        )


def _wide(array: Array) -> npt.NDArray[np.float64]:
    return (
        np.asarray(np.abs(array) if array.dtype.kind == "c" else array)
        .reshape(-1)
        .astype(np.float64)
    )


def _masked(g: npt.NDArray[np.float32], m: npt.NDArray[np.float32], eps: float) -> Figures:
    """Errors that count as 0 where |g| <= eps."""
    there = np.abs(g) > eps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(
            there, np.abs(m / np.where(there, g, np.float32(1)) - np.float32(1)), np.float32(0)
        )
        apart = np.where(there, np.abs(m - g), np.float32(0))
    return {
        "max_relative_error": float(relative.max()),
        "mean_relative_error": float(relative.mean()),
        "max_absolute_error": float(apart.max()),
        "mean_absolute_error": float(apart.mean()),
    }


def _cosine(
    g: Floats, m: Floats, eps: float, digits: int, *, lone: float | str
) -> float | str | None:
    """lone: what the tool says where one side alone is zero."""
    a, b = g.astype(np.float64), m.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        one, two = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        if one <= eps and two <= eps:
            return 1.0
        if one <= eps or two <= eps:
            return lone
        value = float(np.dot(a / one, b / two))
    return round(value, digits) if np.isfinite(value) else None


def _kl(g: npt.NDArray[np.float32], m: npt.NDArray[np.float32]) -> float:
    def log_softmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        wide = x.astype(np.float64) - float(x.max())
        return np.asarray(wide - float(np.log(np.exp(wide).sum())))

    p, q = log_softmax(g), log_softmax(m)
    return max(float(np.sum(np.exp(p) * (p - q))), 0.0)
