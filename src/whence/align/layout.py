"""Which order of axes brings one tensor to another: found from shapes, decided on elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence.align import expressions
from whence.dtypes import Array

Shape = tuple[int, ...]
F64 = npt.NDArray[np.float64]

_ATOMS = 5  # axes that are told apart; 120 orders
_SAMPLE = 1 << 13  # elements looked at to tell orders apart
_CLOSE = 0.1  # of the typical element: what noise of any kernel, also one of 8 bits, keeps below
_QUANTILES = (0.5, 0.9)
_HALVES = 2  # RoPE pairs: (i, i + d/2) in one convention, (2i, 2i + 1) in the other


@dataclass(frozen=True, slots=True)
class Fit:
    """An expression over `x` that brings a tensor to a shape, and how far its elements then are (`distance`)."""

    node: expressions.Node
    distance: float

    @property
    def close(self) -> bool:
        """Are the elements alike beyond what unlike tensors are?"""
        return self.distance <= _CLOSE


def distance(a: Array, b: Array) -> float:
    """How far apart two tensors of one shape are: |a - b| over |a|, at the median or the 90 % quantile of each, whichever is further.

    A few giant elements do not decide, nor a fault in a few. Where most elements are 0, 2-norms are taken instead. Of integers and
    bool: the share that differs. inf where most are not finite on one side. Over a regular sample where they are large.
    """
    if a.size == 0:
        return 0.0
    x, y = (_sampled(v) for v in (a, b))
    if a.dtype.kind in "iub" or b.dtype.kind in "iub":
        return float(np.mean(x != y))
    finite = np.isfinite(x) & np.isfinite(y)
    if 2 * np.count_nonzero(finite) < x.size:
        return 0.0 if np.array_equal(x[~finite], y[~finite], equal_nan=True) and finite.any() else math.inf
    x, y = x[finite], y[finite]
    apart, size = np.abs(x - y), np.abs(x)
    at = [int(q * (x.size - 1)) for q in _QUANTILES]
    middle, high = np.partition(size, at)[at]
    if middle > 0:
        off = np.partition(apart, at)[at]
        return float(max(off[0] / middle, off[1] / high))
    whole = float(np.linalg.norm(x))
    return float(np.linalg.norm(apart)) / whole if whole else (0.0 if not apart.any() else math.inf)


def _sampled(array: Array) -> F64:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.size > _SAMPLE:
        # A stride that shares no factor with usual extents meets every row and column.
        stride = flat.size // _SAMPLE
        flat = flat[:: stride + 1 - stride % 2]
    return np.abs(flat).astype(np.float64) if flat.dtype.kind == "c" else flat.astype(np.float64)


def compatible(shape: Shape, wanted: Shape) -> bool:
    """Could some order of axes bring one shape to the other?"""
    return math.prod(shape) == math.prod(wanted) and next(orders(shape, wanted), None) is not None


def fit(array: Array, wanted: Array) -> Fit | None:
    """The order of the axes of `array` in which it is closest to `wanted`, None where shapes allow none.

    Orders that keep the shape are tried first and taken when they are close; then axes moved, split and merged; an axis that is
    longer is cut; last, what RoPE conventions do inside heads. Reads both.
    """
    best: Fit | None = None
    source = expressions.Name("x")
    for cut in _cuts(array.shape, wanted.shape):
        part = expressions.Cut(source, cut) if cut else source
        shape = part.shape({"x": [array.shape]})
        for node in orders(shape, wanted.shape, part):
            found = Fit(node, distance(wanted, node.apply({"x": [array]})))
            if best is None or found.distance < best.distance / 2 or (found.distance < best.distance and not best.close):
                best = found
            if best.close and best.node is node and isinstance(node, expressions.Name | expressions.Cut):
                return best
    if best is None or best.close:
        return best
    for cut in _cuts(array.shape, wanted.shape):
        part = expressions.Cut(source, cut) if cut else source
        if _same_elements(part.apply({"x": [array]}), wanted):
            best = min((best, *_halves(array, wanted, part)), key=lambda found: found.distance)
    return best


def _cuts(shape: Shape, wanted: Shape) -> Iterator[tuple[object, ...]]:
    """Indices that bring the count of elements to that of `wanted`: none, or the front of one axis (a padded cache)."""
    have, want = math.prod(shape), math.prod(wanted)
    if have == want:
        yield ()
        return
    if want == 0 or have < want:
        return
    for axis, extent in enumerate(shape):
        rest = have // extent
        if want % rest == 0 and want // rest < extent and want // rest in wanted:
            keys = [slice(None)] * len(shape)
            keys[axis] = slice(0, want // rest)
            yield tuple(keys)


def orders(shape: Shape, wanted: Shape, source: expressions.Node | None = None) -> Iterator[expressions.Node]:
    """Expressions that bring `shape` to `wanted`: the tensor itself, then axes moved, the side with fewer axes merged from the other's."""
    of = source if source is not None else expressions.Name("x")
    if shape == wanted:
        yield of
    mine, theirs = ([n for n in s if n != 1] for s in (shape, wanted))
    if max(len(mine), len(theirs)) > _ATOMS:
        return
    finer, coarser = (mine, theirs) if len(mine) >= len(theirs) else (theirs, mine)
    seen: set[str] = set()
    for order in itertools.permutations(range(len(finer))):
        groups = _grouped([finer[i] for i in order], coarser)
        if groups is None:
            continue
        names = [_axis(i) for i in range(len(finer))]
        split: list[list[str]] = [[n] for n in names]
        at = iter(order)
        merged = [[names[next(at)] for _ in range(group)] for group in groups]
        left, right = (split, merged) if finer is mine else (merged, split)
        extents = dict(zip(names, finer))
        pattern = f"{_side(left, shape)} -> {_side(right, wanted)}"
        if (shape == wanted and list(order) == sorted(order)) or pattern in seen:
            continue
        seen.add(pattern)
        yield expressions.Rearrange(of, pattern, tuple((n, extents[n]) for group in left for n in group[1:]))


def _axis(i: int) -> str:
    return "abcdefgh"[i]


def _grouped(atoms: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """How many atoms, in this order, make up each wanted extent; None where they do not."""
    out: list[int] = []
    at = 0
    for extent in wanted:
        product, count = 1, 0
        while product < extent and at < len(atoms):
            product *= atoms[at]
            at, count = at + 1, count + 1
        if product != extent:
            return None
        out.append(count)
    return out if at == len(atoms) else None


def _side(groups: Sequence[Sequence[str]], shape: Shape) -> str:
    left = iter(groups)
    words = []
    for extent in shape:
        group = next(left, ()) if extent != 1 else ()
        words.append("1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})")
    return " ".join(words)


def _same_elements(array: Array, wanted: Array) -> bool:
    """Do both hold the same elements, in whatever order?"""
    if array.size != wanted.size or array.dtype.kind in "iubc":
        return False
    return distance(np.sort(wanted, axis=None), np.sort(array, axis=None)) <= _CLOSE / 2


def _halves(array: Array, wanted: Array, source: expressions.Node) -> Iterator[Fit]:
    """Heads whose halves lie interleaved on one side: "... (h i two) -> ... (h two i)" on the last axis, or the other way round."""
    for node in orders(source.shape({"x": [array.shape]}), wanted.shape, source):
        moved = node.apply({"x": [array]})
        last = moved.shape[-1] if moved.ndim else 1
        heads = dict.fromkeys(n for n in (*array.shape, *wanted.shape) if 2 < n < last and last % n == 0)
        widths = dict.fromkeys([last, *heads, *(last // n for n in heads), *(n for n in (32, 64, 80, 96, 128, 256) if last % n == 0)])
        front = " ".join(f"a{i}" if n != 1 else "1" for i, n in enumerate(moved.shape[:-1]))
        for width in widths:
            if width % _HALVES or width < 2 * _HALVES:
                continue
            lengths = (("i", width // _HALVES), ("two", _HALVES))
            for inner in ("(h i two) -> {0} (h two i)", "(h two i) -> {0} (h i two)"):
                pattern = f"{front} {inner.format(front)}".strip()
                found = expressions.Rearrange(node, " ".join(pattern.split()), lengths)
                tried = Fit(found, distance(wanted, found.apply({"x": [array]})))
                if tried.close:
                    yield tried
