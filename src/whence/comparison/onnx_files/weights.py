"""Two weights element by element: equal, a copy in another precision, codes of it, or another one;
and which of a set a weight is, under another name, order of axes or as a part.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.onnx_files.graph import Weight
from whence.dtypes import Array, is_floating
from whence.errors import ElementsMissing

_ROUNDING = 1e-6
"""Relative to the largest element: what folding a norm into a weight in float32 rounds by, a few
times over (measured: 2e-7).
"""
_HALF_STEP = 0.5 + 1e-3
_SHOWN = 3
_SHARE, _FEW = 0.05, 64
"""What was computed anew differs in more than single elements, unless it has few."""


class State(StrEnum):
    """How a weight of the target stands to the reference's."""

    EQUAL = "equal"
    ROUNDED = "rounded"
    CODES = "codes"
    FOLDED = "folded"
    RECOMPUTED = "recomputed"
    DIFFERS = "differs"
    UNKNOWN = "not compared"


class Compared(NamedTuple):
    """words: what differs, or what the copy is; "" of equal ones. is_widened: of a copy of 16 bits
    that is stored in 32: a lone one is a difference.
    """

    state: State
    words: str = ""
    rel_l2: float = 0.0
    is_widened: bool = False


def compare(reference: Weight, target: Weight) -> Compared:
    """Compare two weights of one place."""
    try:
        a, b = reference.load(), target.load()
    except ElementsMissing as error:
        return Compared(State.UNKNOWN, f"its elements are not there: {error}")
    if not _is_one_layout(a.shape, b.shape):
        forms = f"{list(a.shape)} in the reference, {list(b.shape)} in the target"
        return Compared(State.DIFFERS, f"its shape is {forms}")
    a, b = a.reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if is_floating(reference.dtype) != is_floating(target.dtype):
        kinds = f"{reference.dtype} in the reference, {target.dtype} in the target"
        return Compared(State.UNKNOWN, f"it is {kinds}: codes, whose scale lies elsewhere")
    if not is_floating(reference.dtype):
        wide = [x.astype(np.complex128 if x.dtype.kind == "c" else object) for x in (a, b)]
        return _differing(a, b, reference.shape, wide[0] != wide[1])
    x, y = a.astype(np.float64), b.astype(np.float64)
    if np.array_equal(x, y, equal_nan=True):
        return Compared(State.EQUAL)
    if reference.step is not None or target.step is not None:
        return _codes(x, y, reference, target)
    if reference.dtype != target.dtype:
        return _rounded(a, b, reference, target)
    if reference.dtype == "float32" and (copy := _narrowed(a, b)) is not None:
        return copy
    off = ~((x == y) | (np.isnan(x) & np.isnan(y)))
    size = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    if reference.dtype == "float32" and bool((np.abs(x - y)[off] <= _ROUNDING * size).all()):
        if "folded" in (reference.how, target.how):
            return Compared(State.FOLDED, "a norm is folded in", _rel(x, y))
        if off.mean() > _SHARE or off.size < _FEW:
            words = "differ by rounding alone, as where a norm was folded in elsewhere"
            return Compared(State.RECOMPUTED, words, _rel(x, y))
    return _differing(a, b, reference.shape, off)


def _is_one_layout(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Is one the other with axes of extent 1?"""
    return [n for n in shape if n != 1] == [n for n in other if n != 1]


def _rounded(a: Array, b: Array, reference: Weight, target: Weight) -> Compared:
    """Two floating types: the narrower one must be the wider one, rounded."""
    is_wide = dtypes.named(reference.dtype).bits > dtypes.named(target.dtype).bits
    off = judge.not_converted(*((a, b) if is_wide else (b, a))) | (a.any() != b.any())
    if off.any():  # or nothing is left of it
        return _differing(a, b, reference.shape, off)
    words = f"{target.dtype} of {reference.dtype}"
    return Compared(State.ROUNDED, words, _rel(a.astype(np.float64), b.astype(np.float64)))


def _narrowed(a: Array, b: Array) -> Compared | None:
    """Of two in float32: how one is the other rounded to 16 bits, None where it is not."""
    for kind in ("float16", "bfloat16"):
        for wide, narrow in ((a, b), (b, a)):
            stored = judge.rounded(narrow, kind)
            is_held = np.array_equal(stored.astype(narrow.dtype), narrow) and a.any() == b.any()
            if is_held and not judge.not_converted(wide, stored).any():
                words = f"numbers of {kind}, stored in float32"
                rel = _rel(a.astype(np.float64), b.astype(np.float64))
                return Compared(State.ROUNDED, words, rel, is_widened=True)
    return None


def is_wide(weight: Weight) -> bool:
    """Does a weight hold numbers that 16 bits do not, as most do where nothing was rounded?"""
    if weight.dtype != "float32":
        return dtypes.is_floating(weight.dtype)
    array = weight.load()
    halves = ("float16", "bfloat16")
    return array.size > 1 and not any(judge.is_held_in(array, kind) for kind in halves)


def _codes(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], reference: Weight, target: Weight
) -> Compared:
    """Codes of one against the other's elements: each within half a step of it."""
    holder = target if target.step is not None else reference
    step = np.broadcast_to(np.asarray(holder.step), holder.shape).reshape(-1)
    distance = np.abs(x - y)
    # what a scheme cuts off lies at the end of the codes, where a zero point that was rounded moves
    # the range by up to half a step; as codes of runs are judged
    stored, exact = (y, x) if holder is target else (x, y)
    codes = stored / step
    ends = (codes == codes.max(initial=0)) | (codes == codes.min(initial=0))
    outward = ends & (np.abs(exact) > np.abs(stored)) & (np.sign(exact) == np.sign(stored))
    off = distance > np.where(outward, _HALF_STEP + 0.5, _HALF_STEP) * step
    if off.any():
        differing = _differing(x, y, reference.shape, off)
        cut = int((off & outward).sum())
        cut_off = f"; {cut} cut off at the end of the codes" if cut else ""
        return differing._replace(words=differing.words + cut_off)
    return Compared(State.CODES, "codes of it, each within half a step", _rel(x, y))


def _differing(a: Array, b: Array, shape: tuple[int, ...], off: np.ndarray[Any, Any]) -> Compared:
    places = np.flatnonzero(off)
    if not places.size:
        return Compared(State.EQUAL)
    listed = [
        f"{_place(int(k), shape)} is {_number(a[k])} in the reference, "
        f"{_number(b[k])} in the target"
        for k in places[: _SHOWN if places.size <= _SHOWN else 1]
    ]
    of = f"{places.size} of {a.size} element{'s' if a.size != 1 else ''} differ"
    of += "s" if places.size == 1 else ""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return Compared(State.DIFFERS, f"{of}: {'; '.join(listed)}", _rel(x, y))


def _place(k: int, shape: tuple[int, ...]) -> str:
    return str([int(i) for i in np.unravel_index(k, shape)]) if shape else "it"


def _number(value: Any) -> str:
    return f"{float(value):.6g}" if isinstance(value, (float, np.floating)) else str(value)


def _rel(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    with np.errstate(all="ignore"):
        size, error = float(np.linalg.norm(x)), float(np.linalg.norm(y - x))
    return error / size if size else error
