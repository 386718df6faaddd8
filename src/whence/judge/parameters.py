"""Level 0 for parameters: the reference rounded to the target's dtype must be bitwise equal; if it
is not, the difference is described in words.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import U32

F64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """The difference of one parameter, in words and numbers. equal: whether nothing differs.
    comparable: False if that is not known. is_rounding: elements differ by rounding, upwards and
    downwards, as if both sides drew or computed them. is_last_digit: elements of 32 bits or more
    differ by at most their last digit, in one direction or both. rounded_to: a coarser dtype; the
    target's elements are the reference's rounded to it.
    """

    equal: bool
    comparable: bool
    sentence: str = ""
    numbers: dict[str, float | None] | None = None
    index: tuple[int, ...] | None = None
    is_rounding: bool = False
    is_last_digit: bool = False
    rounded_to: str = ""

    @property
    def differs(self) -> bool:
        """Whether the parameters are known to differ."""
        return self.comparable and not self.equal


def compare(reference: Array, target: Array) -> ParameterDifference:
    """Compare one parameter of two models that should hold the same weights, possibly at different
    precision.

    The wider one is rounded to the narrower dtype (a float32 checkpoint in a bfloat16 model is
    equal when rounding gives its bits). Different kinds (a float weight against its int8 codes) and
    shapes are not comparable here.
    """
    if reference.shape != target.shape:
        if (
            reference.shape == target.shape[::-1]
            and reference.ndim == 2
            and _equal(*_common(reference.T, target))
        ):
            return ParameterDifference(
                False, True, f"transposed: {list(reference.shape)} against {list(target.shape)}", {}
            )
        return ParameterDifference(
            False, False, f"shape {list(reference.shape)} against {list(target.shape)}"
        )
    a, b = dtypes.of(reference), dtypes.of(target)
    if a.is_floating != b.is_floating or (a.kind == "complex") != (b.kind == "complex"):
        return ParameterDifference(
            False, False, f"{a.name} against {b.name}: stored in another form"
        )
    ref, tgt = _common(reference, target)
    if _equal(ref, tgt) or _of_one(reference, target) or _is_converted(reference, target):
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


def _of_one(reference: Array, target: Array) -> bool:
    """Whether all elements of a float16 and a bfloat16 parameter may be roundings of the same
    numbers. Neither dtype holds the other, and rounding one to the other would round twice.
    """
    if {dtypes.of(reference).name, dtypes.of(target).name} != {"float16", "bfloat16"}:
        return False
    a, b = reference.astype(np.float64), target.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        half = (
            sum(np.abs(np.spacing(np.abs(x)).astype(np.float64)) for x in (reference, target)) / 2
        )
        fits = np.abs(a - b) <= half
    return bool(np.all(np.where(finite, fits, (a == b) | (np.isnan(a) & np.isnan(b)))))


def not_converted(wide: Array, narrow: Array) -> Array:
    """Boolean array, True for elements of the narrower dtype that no converter makes of the wider
    ones.

    Besides rounding to nearest, converters to float16 keep numbers close to zero from becoming
    zero, and replace infinities by the largest number or by 10000.
    """
    kind = dtypes.of(narrow)
    expected, held = rounded(wide, kind.name).astype(np.float64), narrow.astype(np.float64)
    off: npt.NDArray[np.bool_] = ~((expected == held) | (np.isnan(expected) & np.isnan(held)))
    if kind.name == "float16" and off.any():
        exact = wide.astype(np.float64)
        is_tiny = (np.abs(exact) < _NEXT_TO_ZERO) & (np.abs(held) < _NEXT_TO_ZERO)
        is_bound = np.isinf(expected) & np.isin(np.abs(held), _BOUNDS)
        off &= ~(is_tiny | (is_bound & (np.sign(expected) == np.sign(held))))
    return off


_NEXT_TO_ZERO = 2.0**-22  # four of the smallest numbers of float16
_BOUNDS = (1e4, 65504.0, np.inf)


def _is_converted(reference: Array, target: Array) -> bool:
    """Whether the parameter stored in float16 is a converted copy of the other."""
    kinds = dtypes.of(reference), dtypes.of(target)
    if [k.bits for k in kinds] not in ([32, 16], [16, 32], [64, 16], [16, 64]):
        return False
    wide, narrow = (reference, target) if kinds[0].bits > kinds[1].bits else (target, reference)
    return kinds[0].is_floating and not not_converted(wide, narrow).any()


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
        return ParameterDifference(
            False,
            True,
            "equal values, different bits (signed zeros or NaN payloads)",
            {"elements": 0.0},
        )
    flat = int(np.argmax(different))
    index = tuple(int(i) for i in np.unravel_index(flat, ref.shape)) if ref.ndim else ()
    a, b = ref.astype(np.float64), tgt.astype(np.float64)
    with np.errstate(all="ignore"):
        size = float(np.linalg.norm(a.ravel()))
        rel = float(np.linalg.norm((b - a).ravel())) / size if size else float("inf")
    numbers: dict[str, float | None] = {
        "elements": float(count),
        "of": float(ref.size),
        "rel_l2": rel,
    }
    how = _shape_of_difference(a, b, ref, tgt, different, numbers)
    where = f"first at {list(index)}: {a.reshape(-1)[flat]:.6g} against {b.reshape(-1)[flat]:.6g}"
    return ParameterDifference(
        False,
        True,
        f"{how}; {where}" if count < ref.size or ref.size == 1 else how,
        numbers,
        index,
        *_rounding(a, b, dtypes.of(ref), different),
        rounded_to=how.removeprefix(_ROUNDED) if how.startswith(_ROUNDED) else "",
    )


def is_held_in(array: Array, dtype: str) -> bool:
    """Whether a dtype can represent all these numbers exactly."""
    return _equal(array, rounded(rounded(array, dtype), dtypes.of(array).name))


def _rounding(
    a: F64, b: F64, kind: dtypes.DType, different: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> tuple[bool, bool]:
    """(is it rounding, is it the last digit of 32 bits or more): do elements differ by what other
    kernels make of the same numbers, as much up as down?

    Tables of sines that are computed where a model is built, and weights that are drawn there from
    one seed, differ so between processors. A conversion that cuts digits off makes all numbers
    smaller, and a factor or a constant moves all one way.
    """
    if (
        not kind.is_floating
        or kind.kind == "complex"
        or not (np.isfinite(a) & np.isfinite(b)).all()
    ):
        return False, False
    size = float(np.sqrt(np.mean(a * a)))
    moved = np.abs(b - a)
    u = kind.unit_roundoff or 0.0
    # Numbers of 16 bits were computed in float32: near zero they differ by that.
    fine = min(u, U32)
    # Below the smallest normal number the last digit stays what it is there.
    last_digit = 2 * u * np.maximum(np.abs(a), ml_dtypes.finfo(kind.numpy).smallest_normal)
    x, y = a[different], b[different]
    # One number that stands at many places rounds one way at all of them.
    if (moved <= last_digit + 2 * fine * size).all():
        both_ways = _goes_both_ways(np.abs(y) > np.abs(x), len(np.unique(x)))
        return both_ways, u <= U32 and bool((moved <= last_digit).all())
    # A lone element that is further off is not a kernel's doing.
    is_spread = x.size >= max(2, a.size / _SPREAD)
    drawn = _DRAWN * fine * (np.abs(a) + size)
    is_drawn = (
        is_spread
        and bool((moved <= last_digit + drawn).all())
        and _goes_both_ways(np.abs(y) > np.abs(x), x.size)
        and _goes_both_ways(y > x, x.size)
    )
    return is_drawn, False


def _goes_both_ways(upwards: Array, count: int) -> bool:
    """Are as many of these changes up as down, but for chance (sqrt(count) / 2 is its standard
    deviation) and the bias of a kernel?
    """
    share = float(np.count_nonzero(upwards)) / upwards.size
    return bool(abs(share - 0.5) <= 2 / np.sqrt(count) + _BIASED)


def _turned(reference: Array, target: Array) -> str:
    """Which axes of a tensor are swapped or run backwards in the target, "" where none."""
    is_small = 0 < target.size <= _MOST_TURNED and target.ndim <= _MOST_AXES
    if not is_small or (target == target.flat[0]).all():
        return ""
    for i, j in itertools.combinations(range(target.ndim), 2):
        if target.shape[i] == target.shape[j] and np.array_equal(reference.swapaxes(i, j), target):
            return "transposed" if target.ndim == 2 else f"axes {i} and {j} swapped"
    for count in range(1, target.ndim + 1):
        for axes in itertools.combinations(range(target.ndim), count):
            if np.array_equal(np.flip(reference, axes), target):
                named = " and ".join(map(str, axes))
                return f"back to front along {'axes' if count > 1 else 'axis'} {named}"
    return ""


def _shape_of_difference(
    a: F64,
    b: F64,
    ref: Array,
    tgt: Array,
    different: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    numbers: dict[str, float | None],
) -> str:
    if turned := _turned(ref, tgt):
        return turned
    with np.errstate(all="ignore"):
        power = float((a * a).sum())
        scale = float((a * b).sum()) / power if power > 0 else float("nan")
        scaled_rest = (
            float(np.linalg.norm((b - scale * a).ravel())) if np.isfinite(scale) else float("inf")
        )
        size = float(np.linalg.norm((b - a).ravel()))
    if not b.any():
        return "all zero in the target"
    if np.array_equal(b, -a):
        return "sign flipped"
    if size > 0 and scaled_rest < 0.02 * size and a.size > 1:
        numbers["scale"] = scale
        return f"scaled by {scale:.6g}"
    rounded_to = next((name for name in _COARSER if _rounds_to(ref, tgt, name)), "")
    if rounded_to:
        return f"{_ROUNDED}{rounded_to}"
    if ref.ndim >= 1 and (order := _moved(a, b)):
        return order
    if ref.ndim >= 2:
        rows = different.reshape(ref.shape[0], -1).any(1)
        changed = int(np.count_nonzero(rows))
        if changed < ref.shape[0]:
            wrong = np.flatnonzero(rows)
            flipped = all(np.array_equal(b[i], -a[i]) for i in wrong)
            rows_named = (
                f"row{'s' if changed > 1 else ''} "
                f"{', '.join(map(str, wrong[:4]))}{' ...' if changed > 4 else ''}"
            )
            if flipped:
                return f"sign flipped in {rows_named} of {ref.shape[0]}"
            return f"{_how_many(different)}, in {rows_named}"
    return f"{_how_many(different)} (rel_l2 {numbers['rel_l2']:.2g})"


def _how_many(different: Array) -> str:
    number = int(np.count_nonzero(different))
    return f"{number} of {different.size} elements {'differs' if number == 1 else 'differ'}"


# A target that went through a coarser dtype on its way: a checkpoint saved in 16 bits and widened
# again.
_ROUNDED = "rounded to "
_COARSER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_BLOCKS = 256
# torch.randn, trunc_normal_, orthogonal_ and uniform_ of one seed with ATEN_CPU_CAPABILITY=default
# and avx2 part by 76 roundings at most, in 38 % of the elements or more, 52 % of them one way.
_DRAWN, _SPREAD, _BIASED = 128, 64, 1 / 16
_MOST_TURNED, _MOST_AXES = 1 << 26, 5  # elements and axes of what is turned to see whether it fits


def _rounds_to(ref: Array, tgt: Array, name: str) -> bool:
    if (
        name not in dtypes.DTYPES
        or not dtypes.of(ref).is_floating
        or dtypes.of(ref).itemsize <= dtypes.named(name).itemsize
    ):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(
            np.array_equal(
                ref.astype(dtypes.named(name).numpy).astype(ref.dtype), tgt, equal_nan=True
            )
        )


def _moved(a: F64, b: F64) -> str:
    """How the same values lie in another order along an axis: chunks, heads, halves against pairs,
    rows; "" when they do not.
    """
    for axis in range(min(a.ndim, 2)):
        nouns = (
            ("row", "rows")
            if axis == 0 and a.ndim > 1
            else ("column", "columns")
            if axis
            else ("element", "elements")
        )
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        n = x.shape[0]
        if n < 2 or not np.array_equal(_sorted_rows(x), _sorted_rows(y)):
            continue
        # Rotary embeddings pair element i with i + n/2 or with its neighbour; heads are permuted
        # one by one.
        for heads in (h for h in range(1, min(n // 2, _MOST_BLOCKS) + 1) if n % (2 * h) == 0):
            half = n // heads // 2
            for shape, words in (
                ((heads, 2, half, -1), "interleaved, halves as pairs"),
                ((heads, half, 2, -1), "de-interleaved, pairs as halves"),
            ):
                if np.array_equal(np.swapaxes(x.reshape(shape), 1, 2).ravel(), y.ravel()):
                    blocks = f"{heads} block{'s' if heads > 1 else ''} of {n // heads}"
                    return f"{nouns[1]} {words}, in {blocks} (rotary layout)"
        for count in (k for k in range(2, min(n // 2, _MOST_BLOCKS) + 1) if n % k == 0):
            reference_blocks, target_blocks = x.reshape(count, -1), y.reshape(count, -1)
            if np.array_equal(_sorted_rows(reference_blocks), _sorted_rows(target_blocks)):
                order = _order_of(reference_blocks, target_blocks)
                listed = f"{', '.join(map(str, order[:12]))}{' ...' if count > 12 else ''}"
                return f"{count} blocks of {n // count} {nouns[1]} in another order: {listed}"
        moved = int(np.count_nonzero((x.reshape(n, -1) != y.reshape(n, -1)).any(1)))
        return f"{nouns[1]} in another order ({moved} of {n} moved)"
    return ""


def _order_of(reference: F64, target: F64) -> list[int]:
    """For each block of `right`, the index of the equal block in `left`."""
    order: list[int] = []
    for block in target:
        order.append(
            next(
                i
                for i in range(len(reference))
                if i not in order and np.array_equal(reference[i], block)
            )
        )
    return order


def _sorted_rows(a: F64) -> F64:
    rows = a.reshape(a.shape[0], -1)
    return rows[np.lexsort(rows.T[:8][::-1])]
