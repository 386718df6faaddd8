"""Level 0 for parameters: the reference rounded to the target's dtype must be bit-equal; if not, say in words what differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whence import dtypes
from whence.dtypes import Array


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """What differs in one parameter, in words and numbers. equal: nothing does. comparable: False when it could not be told."""

    equal: bool
    comparable: bool
    sentence: str = ""
    numbers: dict[str, float | None] | None = None
    index: tuple[int, ...] | None = None


def compare(reference: Array, target: Array) -> ParameterDifference:
    """Compare one parameter of two models that should hold the same weights, possibly at different precision.

    The wider one is rounded to the narrower dtype (a float32 checkpoint in a bfloat16 model is equal when rounding gives its
    bits). Different kinds (a float weight against its int8 codes) and shapes are not comparable here.
    """
    if reference.shape != target.shape:
        if reference.shape == target.shape[::-1] and reference.ndim == 2 and _equal(*_common(reference.T, target)):
            return ParameterDifference(False, True, f"transposed: {list(reference.shape)} against {list(target.shape)}", {})
        return ParameterDifference(False, False, f"shape {list(reference.shape)} against {list(target.shape)}")
    a, b = dtypes.of(reference), dtypes.of(target)
    if a.is_floating != b.is_floating or (a.kind == "complex") != (b.kind == "complex"):
        return ParameterDifference(False, False, f"{a.name} against {b.name}: stored in another form")
    ref, tgt = _common(reference, target)
    if _equal(ref, tgt):
        return ParameterDifference(True, True)
    return _describe(ref, tgt)


def rounded(reference: Array, dtype: str) -> Array:
    """The reference's parameter at the target's precision: what a correct target would hold."""
    kind = dtypes.named(dtype)
    if kind.numpy == reference.dtype or not (dtypes.of(reference).is_floating and kind.is_floating):
        return reference
    with np.errstate(over="ignore", invalid="ignore"):
        return reference.astype(kind.numpy)


def _common(reference: Array, target: Array) -> tuple[Array, Array]:
    a, b = dtypes.of(reference), dtypes.of(target)
    if a.name == b.name or not a.is_floating:
        return reference, target
    coarser = a if (a.unit_roundoff or 0) > (b.unit_roundoff or 0) else b
    return rounded(reference, coarser.name), rounded(target, coarser.name)


def _equal(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype:
        return bool(np.array_equal(a, b))
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _describe(ref: Array, tgt: Array) -> ParameterDifference:
    different = ref != tgt
    with np.errstate(invalid="ignore"):
        different &= ~((ref != ref) & (tgt != tgt))  # NaN in both
    count = int(np.count_nonzero(different))
    if count == 0:
        return ParameterDifference(False, True, "equal values, different bits (signed zeros or NaN payloads)", {"elements": 0.0})
    flat = int(np.argmax(different))
    index = tuple(int(i) for i in np.unravel_index(flat, ref.shape)) if ref.ndim else ()
    a, b = ref.astype(np.float64), tgt.astype(np.float64)
    with np.errstate(all="ignore"):
        size = float(np.linalg.norm(a.ravel()))
        rel = float(np.linalg.norm((b - a).ravel())) / size if size else float("inf")
    numbers: dict[str, float | None] = {"elements": float(count), "of": float(ref.size), "rel_l2": rel}
    how = _shape_of_difference(a, b, ref, tgt, different, numbers)
    where = f"first at {list(index)}: {a.reshape(-1)[flat]:.6g} against {b.reshape(-1)[flat]:.6g}"
    return ParameterDifference(False, True, f"{how}; {where}" if count < ref.size or ref.size == 1 else how, numbers, index)


def _shape_of_difference(
    a: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    b: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    ref: Array,
    tgt: Array,
    different: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    numbers: dict[str, float | None],
) -> str:
    if ref.ndim == 2 and ref.shape[0] == ref.shape[1] and np.array_equal(ref.T, tgt):
        return "transposed"
    with np.errstate(all="ignore"):
        power = float((a * a).sum())
        scale = float((a * b).sum()) / power if power > 0 else float("nan")
        left = float(np.linalg.norm((b - scale * a).ravel())) if np.isfinite(scale) else float("inf")
        gone = float(np.linalg.norm((b - a).ravel()))
    if not b.any():
        return "all zero in the target"
    if np.array_equal(b, -a):
        return "sign flipped"
    if gone > 0 and left < 0.02 * gone and a.size > 1:
        numbers["scale"] = scale
        return f"scaled by {scale:.6g}"
    if ref.ndim >= 2:
        rows = different.reshape(ref.shape[0], -1).any(1)
        changed = int(np.count_nonzero(rows))
        if np.array_equal(_sorted_rows(a), _sorted_rows(b)):
            return f"rows in another order ({changed} of {ref.shape[0]} moved)"
        if changed < ref.shape[0]:
            wrong = np.flatnonzero(rows)
            flipped = all(np.array_equal(b[i], -a[i]) for i in wrong)
            rows_named = f"row{'s' if changed > 1 else ''} {', '.join(map(str, wrong[:4]))}{' ...' if changed > 4 else ''}"
            if flipped:
                return f"sign flipped in {rows_named} of {ref.shape[0]}"
            return f"{int(np.count_nonzero(different))} of {ref.size} elements differ, in {rows_named}"
    return f"{int(np.count_nonzero(different))} of {ref.size} elements differ (rel_l2 {numbers['rel_l2']:.2g})"


def _sorted_rows(a: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rows = a.reshape(a.shape[0], -1)
    return rows[np.lexsort(rows.T[:8][::-1])]
