"""Judges one expected value against the actual one, within the noise band of the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.results.accept import AcceptKind, JudgedValue
from whence.workflows.accept.golden_files import Golden

if TYPE_CHECKING:
    from whence.judge.band import F64, Band, Placed

FEWEST_WAYS = 3
"""Least number of ways of rounding that must be known before a change may be called noise."""
BLIND = 0.05
"""Width of the band, relative to the size of the values, above which a fault no longer stands out.
"""
_TIMES_CLOSER = 2.0
_MORE_WAYS = (
    "values of the same program on other threads or kernels (--again FILE), or the program itself "
    "(--program MODULE:FUNCTION)"
)
_ARRAYS = dict[str, Array]


@dataclass
class Evidence:
    """What is known about how the values may round.

    ways: values by the name of the way. exact: values in float64, {} for none. is_independent: the
    exact values come from something other than the judged program. coarser: ways in the precision
    that the old values are declared to have. ignored: for each value, the inputs that it does not
    depend on. sizes: for a value that is a difference, the root mean square of its operands.
    """

    ways: dict[str, _ARRAYS] = field(default_factory=dict)
    exact: _ARRAYS = field(default_factory=dict)
    is_independent: bool = False
    coarser: dict[str, _ARRAYS] = field(default_factory=dict)
    ignored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)


def judged(
    name: str, old: Golden, new: Golden | None, evidence: Evidence
) -> tuple[JudgedValue, Array | None]:
    """The verdict, and the values to expect from now on (None when the change is refused)."""
    if new is None:
        words = "expected, and no actual value has this name"
        return JudgedValue(
            name, AcceptKind.CANNOT_TELL, words=words, decides="an actual value"
        ), None
    if old.content.shape != new.content.shape:
        words = (
            f"its shape is {list(old.content.shape)} in the expectation, "
            f"now {list(new.content.shape)}"
        )
        return JudgedValue(name, AcceptKind.CHANGED, new.content.size, words=words), None
    if ignored := evidence.ignored.get(name):
        words = f"the program gives the same bits whatever {', '.join(ignored)} is"
        return _about(name, AcceptKind.IGNORES_INPUT, old, new, None, words), None
    kinds = old.content.dtype.kind + new.content.dtype.kind
    if kinds == "UU" or not set(kinds) - set("iub"):
        return _choices(name, old, new, evidence)
    if "U" in kinds:
        words = f"a {'text' if kinds[0] == 'U' else 'number'} is expected, and it is none now"
        return _about(name, AcceptKind.CHANGED, old, new, None, words), None
    return _rounded(name, old, new, evidence)


def _choices(
    name: str, old: Golden, new: Golden, evidence: Evidence
) -> tuple[JudgedValue, Array | None]:
    """Judge counts, indices and texts: each must be equal, or another way of rounding, or the
    program in float64, must give the old one.
    """
    a, b = old.content, new.content
    differs = a != b
    if not differs.any():
        return _about(name, AcceptKind.UNCHANGED, old, new, None, ""), b
    what = "texts" if b.dtype.kind == "U" else "whole numbers"
    ways = [w[name] for w in evidence.ways.values() if name in w and w[name].shape == a.shape]
    if len(ways) < FEWEST_WAYS:
        words = f"{what} differ, and too few ways of rounding are known"
        return _about(name, AcceptKind.CANNOT_TELL, old, new, None, words, _MORE_WAYS), None
    ways += [exact for exact in (evidence.exact.get(name),) if exact is not None]
    open_ = differs & ~np.any([w == a for w in ways], axis=0)
    if not open_.any():
        words = f"other ways of rounding give the old {what} too"
        return _about(name, AcceptKind.NOISE, old, new, None, words), b
    if (open_ & np.all([w == b for w in ways], axis=0)).any():
        words = f"{what} differ that are the same in every way of rounding"
        return _about(name, AcceptKind.CHANGED, old, new, None, words), None
    words = f"{what} differ that rounding alone changes, and no way of rounding gives the old ones"
    decides = "the scores that they are chosen by as an expectation (logits, log-probabilities)"
    return _about(name, AcceptKind.CANNOT_TELL, old, new, None, words, decides), None


def _rounded(
    name: str, old: Golden, new: Golden, evidence: Evidence
) -> tuple[JudgedValue, Array | None]:
    from whence.judge.band import band

    a, b = old.content, new.content
    resolution = max(old.resolution, new.resolution)
    same = (np.abs(_finite(a) - _finite(b)) <= 2.001 * resolution) & (
        np.isfinite(a) == np.isfinite(b)
    )
    if np.array_equal(a, b, equal_nan=True) or (resolution and bool(same.all())):
        return _about(name, AcceptKind.UNCHANGED, old, new, None, ""), b
    exact = evidence.exact.get(name)
    ways = _ways(name, evidence.ways, b, is_anchored=exact is not None)
    if exact is None and len(ways) < 2:
        words = "nothing tells how far rounding goes"
        return _about(name, AcceptKind.CANNOT_TELL, old, new, None, words, _MORE_WAYS), None
    unit = _unit(old, new)
    around = band(exact, ways, unit)
    at_new, at_old = around.place(b, new.resolution), around.place(a, old.resolution)
    kind, words, decides = _verdict(around, at_new, at_old, name, evidence, a, unit)
    seen = _seen(around, evidence.sizes.get(name, 0.0))
    if kind in (AcceptKind.NOISE, AcceptKind.CLOSER) and not seen.all():
        kind, words, decides = _part(around, seen, a, b, kind, words, decides)
    judged = _about(name, kind, old, new, (around, at_new, at_old), words, decides)
    is_accepted = kind in (AcceptKind.NOISE, AcceptKind.CLOSER)
    renewed = around.centre if exact is not None else b
    return judged, renewed.astype(b.dtype) if is_accepted else None


def _verdict(
    around: Band, new: Placed, old: Placed, name: str, evidence: Evidence, a: Array, unit: float
) -> tuple[AcceptKind, str, str]:
    from whence.judge.band import band

    if not new.is_inside:
        what = "the program in float64" if around.is_exact else "other runs of the program"
        words = (
            f"the new value is {_times(new)} from {what}; "
            f"rounding leaves it {new.limit_z:.3g} at most"
        )
        return AcceptKind.FAULT, words, ""
    if around.degrees < FEWEST_WAYS:
        words = f"{around.degrees} ways of rounding are known, which is too few to call it noise"
        return AcceptKind.CANNOT_TELL, words, _MORE_WAYS
    nearer = around.is_exact and _TIMES_CLOSER * new.error <= old.error
    if old.is_inside and nearer:
        return AcceptKind.CLOSER, "both are rounding, the new value nearer to the exact result", ""
    if old.is_inside:
        words = "both values are what rounding makes of the exact result"
        return AcceptKind.NOISE, words if around.is_exact else "rounding alone moves it as far", ""
    if around.is_exact and evidence.is_independent and nearer:
        words = f"the old value is {_times(old)} from an exact result of another source"
        return AcceptKind.CLOSER, words, ""
    coarser = _ways(name, evidence.coarser, a, is_anchored=True)
    if around.is_exact and coarser and band(around.centre, coarser, unit).place(a).is_inside:
        words = "the old value is what the coarser precision makes of the same program"
        return AcceptKind.CLOSER, words, ""
    words = (
        f"the old value is {_times(old)} from what the program computes now; "
        f"rounding leaves it {old.limit_z:.3g} at most"
    )
    return AcceptKind.CHANGED, words, ""


def _part(
    around: Band, seen: Array, a: Array, b: Array, kind: AcceptKind, words: str, decides: str
) -> tuple[AcceptKind, str, str]:
    """Restrict the verdict to the elements in `seen`; the band of the others is too wide to show a
    fault.

    Returns (kind, words, what would decide). CANNOT_TELL when `seen` is empty or the two arrays are
    equal there.
    """
    count = int(np.count_nonzero(seen))
    if not count or bool((a == b)[seen].all()):
        words = (
            f"rounding alone moves it by more than {BLIND:.0%}, so that no fault would stand out"
        )
        return AcceptKind.CANNOT_TELL, words, "an earlier value of the same program, or fewer steps"
    return (
        kind,
        f"{words}; judged by {count} of {seen.size} elements: of the others the band is wider "
        f"than {BLIND:.0%}",
        decides,
    )


def _seen(around: Band, least: float) -> Array:
    """Mask of the elements whose band is narrow enough to show a fault.

    least: lower bound for the size of the values.
    """
    finite = _finite(around.centre)
    size = math.sqrt(float(np.mean(finite * finite))) if finite.size else 0.0
    return np.asarray(around.halfwidth <= BLIND * max(size, least))


def _ways(
    name: str, all_ways: Mapping[str, _ARRAYS], like: Array, *, is_anchored: bool
) -> list[Array]:
    """Values of one name from all ways with the shape of `like`, without duplicates.

    A way that gives the same bits as another (a repetition on the same kernels) adds no evidence.
    Off-by-one draws are kept in any case when `is_anchored`.
    """
    rows: list[Array] = []
    for way, values in all_ways.items():
        array = values.get(name)
        if array is None or array.shape != like.shape:
            continue
        drawn = "off by one" in way and is_anchored
        if drawn or not any(np.array_equal(array, row, equal_nan=True) for row in rows):
            rows.append(array)
    return rows


def _unit(old: Golden, new: Golden) -> float:
    """Unit roundoff of the dtype that the numbers were computed in, as far as they show it."""
    units = []
    for golden in (old, new):
        array = golden.content
        name = dtypes.of(array).name
        if name == "float64" and not golden.resolution:
            name = _narrowest(array)
        units.append(dtypes.unit_roundoff(name) if not golden.resolution else 0.0)
    return max(*units, 2.0**-53)


def _narrowest(array: Array) -> str:
    """The coarsest dtype that represents all of these numbers exactly."""
    values = _finite(array)
    for name in ("bfloat16", "float16", "float32"):
        with np.errstate(over="ignore"):
            held = values.astype(dtypes.named(name).numpy).astype(np.float64)
        # a few round numbers, like 0.5, do not show the dtype
        if np.array_equal(held, values) and (name == "float32" or values.size >= 8):
            return name
    return "float64"


def _about(
    name: str,
    kind: AcceptKind,
    old: Golden,
    new: Golden,
    placed: tuple[Band, Placed, Placed] | None,
    words: str,
    decides: str = "",
) -> JudgedValue:
    a, b = old.content, new.content
    if "U" in (a.dtype.kind, b.dtype.kind):
        return JudgedValue(name, kind, int(b.size), words=words, decides=decides)
    flat_a, flat_b = _finite(a).reshape(-1), _finite(b).reshape(-1)
    far = np.abs(flat_a - flat_b)
    place = int(far.argmax()) if far.size else 0
    around = None
    if placed is not None:
        around, at_new, at_old = placed
        worse = at_old if at_old.score >= at_new.score else at_new
        place = int(np.ravel_multi_index(worse.index, b.shape)) if worse.index else 0
    size = float(np.linalg.norm(flat_a))
    moved = float(np.linalg.norm(flat_a - flat_b))
    widest = around.halfwidth.reshape(-1) if around is not None else None
    return JudgedValue(
        name,
        kind,
        int(b.size),
        _label(old, b, place),
        _at(a, place),
        _at(b, place),
        _at(around.centre, place) if around is not None and around.is_exact else None,
        moved / size if size else None,
        placed[1].z if placed else None,
        placed[2].z if placed else None,
        around.limit_z if around is not None else None,
        _rounded_up(float(widest.max())) if widest is not None and widest.size else None,
        _relative(around),
        words,
        decides,
    )


def _relative(around: Band | None) -> float | None:
    """The relative tolerance; only when no element is near zero."""
    if around is None or not around.centre.size:
        return None
    size = np.abs(around.centre)
    if not np.isfinite(size).all() or bool((size < 10 * around.halfwidth).any()):
        return None
    return _rounded_up(float((around.halfwidth / size).max()))


def _rounded_up(value: float) -> float:
    """The value rounded up to one significant digit, for readable messages."""
    if value <= 0 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / unit) * unit:.0e}")


def _label(old: Golden, array: Array, place: int) -> str:
    if old.steps and place < len(old.steps):
        return old.steps[place]
    if array.ndim == 0:
        return ""
    return "[" + ", ".join(str(int(i)) for i in np.unravel_index(place, array.shape)) + "]"


def _at(array: Array, place: int) -> float | None:
    if place >= array.size or np.iscomplexobj(array):
        return None
    value = float(array.reshape(-1)[place])
    return value if math.isfinite(value) else None


def _finite(array: Array) -> F64:
    """The array in which 0 replaces NaN and infinities; complex numbers are replaced by their
    magnitude.
    """
    is_complex = np.iscomplexobj(array)
    wide = np.abs(array.astype(np.complex128)) if is_complex else array.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0.0)


def _times(placed: Placed) -> str:
    if placed.mismatches:
        return (
            f"NaN or infinite in {placed.mismatches} elements otherwise, and so not rounding away"
        )
    return f"{placed.z:.3g} standard deviations of rounding away"


def worst_first(values: Sequence[JudgedValue]) -> tuple[JudgedValue, ...]:
    """Sort the values by verdict, the worst first."""
    order = list(AcceptKind)
    return tuple(sorted(values, key=lambda v: -order.index(v.verdict)))
