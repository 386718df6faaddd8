"""Finds the expressions that bring one tensor to the shape of another: the shapes propose
candidates, the elements decide between them.

A candidate is a dims expression over `x`: it permutes, merges or splits axes, adds or drops axes of
extent one, or cuts or pads one axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from whence.align import dims as ex
from whence.align.layout.distances import CLOSE, typical_distance
from whence.dtypes import Array

Shape = tuple[int, ...]
X = ex.Name("x")
_MOST_AXES = 6  # axes that are permuted; 720 orders
_WIDTHS = (32, 64, 80, 96, 128, 256)  # of heads, tried where no extent gives it


# ---- what shapes propose


def ways(have: Shape, want: Shape) -> list[ex.Node]:
    """Expressions over x that bring shape `have` to `want`, the simplest first; [] for none."""
    if have == want:
        return [X]
    return [node for part, shape in _resized(have, want) for node in orders(shape, want, part)]


def turned(shape: Shape) -> list[ex.Node]:
    """Expressions over x that keep this shape and permute axes of equal extent."""
    return list(orders(shape, shape))[1:]


def candidates(have: Shape, want: Shape) -> list[ex.Node]:
    """All expressions that bring `have` to `want`, including permutations of axes for equal
    shapes.
    """
    return [*ways(have, want), *(turned(have) if have == want else ())]


def orders(have: Shape, want: Shape, of: ex.Node = X) -> Iterator[ex.Node]:
    """Expressions that bring `have` to `want` and keep every element: first the tensor itself, then
    reshapes that split or merge whole axes, then permutations of axes, then other reshapes.

    of: the expression, of shape `have`, to which they are applied.
    """
    if have == want:
        yield of
    sizes, wanted_sizes = [n for n in have if n != 1], [n for n in want if n != 1]
    if (
        math.prod(have) != math.prod(want)
        or not math.prod(have)
        or max(len(sizes), len(wanted_sizes)) > _MOST_AXES
    ):
        return
    texts: set[str] = set()
    for atoms, order in _regrouped(sizes, wanted_sizes):
        node = _pattern(of, have, want, atoms, order)
        if not (have == want and order == sorted(order)) and str(node) not in texts:
            texts.add(str(node))
            yield node


def _regrouped(sizes: list[int], wanted_sizes: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (atoms, order): the extents that the axes of `sizes` split into, and the order in
    which they merge into `wanted_sizes`.
    """
    atoms = _atoms(sizes, wanted_sizes)
    fine = sizes if len(sizes) >= len(wanted_sizes) else wanted_sizes
    is_across = atoms is not None and len(atoms) > len(fine)  # new axes hold parts of several
    if atoms is not None and not is_across:
        yield atoms, list(range(len(atoms)))
    for picked in itertools.permutations(range(len(fine))):
        order = list(picked)
        moved = [fine[i] for i in order]
        if (
            order == sorted(order)
            or _groups(moved, wanted_sizes if fine is sizes else sizes) is None
        ):
            continue
        # Where the right side is the finer one, its axes are listed in the order in which the left
        # side merges them.
        yield (
            (sizes, order)
            if fine is sizes
            else (moved, [order.index(i) for i in range(len(order))])
        )
    if atoms is not None and is_across:
        yield atoms, list(range(len(atoms)))


def _atoms(sizes: Sequence[int], wanted_sizes: Sequence[int]) -> list[int] | None:
    """The finest extents whose products, in order, give the axes of both shapes; None if there are
    none.
    """
    ends = sorted(
        {math.prod(axes[: i + 1]) for axes in (sizes, wanted_sizes) for i in range(len(axes))}
    )
    atoms, product = [], 1
    for end in ends:
        if end % product:
            return None
        atoms.append(end // product)
        product = end
    return atoms


def _groups(atoms: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """For each axis of `shape`, the consecutive indices of the atoms whose product is its extent;
    None where the atoms do not give this shape.
    """
    out: list[list[int]] = []
    index = 0
    for extent in shape:
        group: list[int] = []
        size = 1
        while size < extent and index < len(atoms):
            size *= atoms[index]
            group.append(index)
            index += 1
        if size != extent:
            return None
        out.append(group)
    return out if index == len(atoms) else None


def _pattern(
    of: ex.Node, have: Shape, want: Shape, atoms: Sequence[int], order: list[int]
) -> ex.Node:
    """The rearrangement from `have` to `want`. atoms: the extents that the axes of `have` split
    into. order: the order of these atoms in `want`.
    """
    if len(have) == 2 and want == have[::-1] and order == [1, 0]:
        return ex.Reverse(of)
    names = [chr(ord("a") + i) for i in range(len(atoms))]

    def side(shape: Shape, order: Sequence[int]) -> tuple[str, list[list[int]]]:
        groups = _groups([atoms[i] for i in order], [n for n in shape if n != 1]) or []
        remaining = iter(groups)
        words = []
        for n in shape:
            group = [] if n == 1 else [names[order[i]] for i in next(remaining)]
            words.append(
                "1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})"
            )
        return " ".join(words), groups

    pattern, groups = side(have, list(range(len(atoms))))
    lengths = tuple((names[i], atoms[i]) for group in groups for i in group[:-1])
    return ex.Rearrange(of, f"{pattern} -> {side(want, order)[0]}", lengths)


def _resized(have: Shape, want: Shape) -> Iterator[tuple[ex.Node, Shape]]:
    """Yields (expression, its shape) with as many elements as `want`: the tensor itself, or the
    tensor with one axis cut or padded at its end.
    """
    count, target_count = math.prod(have), math.prod(want)
    if count == target_count:
        yield X, have
        return
    for axis, extent in enumerate(have if count else ()):
        n, remainder = divmod(target_count * extent, count)
        if remainder or n not in want:
            continue
        shape = (*have[:axis], n, *have[axis + 1 :])
        last = axis == len(have) - 1
        if n < extent:
            yield (
                ex.Cut(
                    X, (..., slice(0, n)) if last and axis else (*[slice(None)] * axis, slice(0, n))
                ),
                shape,
            )
        else:
            yield ex.Pad(X, -1 if last else axis, n, 0), shape
            yield ex.Pad(X, -1 if last else axis, n, "lowest"), shape


# ---- what elements say


@dataclass(frozen=True, slots=True)
class Fit:
    """An expression that brings a tensor to a shape. distance: `typical_distance` after it."""

    node: ex.Node
    distance: float

    @property
    def close(self) -> bool:
        """Whether the elements agree better than those of unrelated tensors do."""
        return self.distance <= CLOSE


def cuts(have: Shape, want: Shape) -> Iterator[tuple[ex.Node, Shape]]:
    """Yields (expression, its shape) with as many elements as `want`: the tensor itself, or the
    front of one of its axes.
    """
    return ((part, shape) for part, shape in _resized(have, want) if not isinstance(part, ex.Pad))


def fit(array: Array, reference: Array) -> Fit | None:
    """The expression over `array` whose result is closest to `reference`; None where no expression
    gives the shape of `reference`.

    The unchanged tensor is tried first and accepted if it is close. Then axes are permuted, split
    and merged, and an axis that is longer than in `reference` is cut. Last come the two RoPE
    conventions for the order of the channels inside a head. Reads both tensors.
    """
    best: Fit | None = None
    parts = list(cuts(array.shape, reference.shape))
    for part, shape in parts:
        for node in orders(shape, reference.shape, part):
            trial = Fit(node, typical_distance(reference, applied(node, array)))
            if (
                best is None
                or trial.distance < best.distance / 2
                or (trial.distance < best.distance and not best.close)
            ):
                best = trial
            if best.close and best.node is part:
                return best
    if best is None or best.close:
        return best
    for part, shape in parts:
        if _same_elements(applied(part, array), reference):
            tried = (
                Fit(node, typical_distance(reference, applied(node, array)))
                for node in _halves(shape, reference.shape, part)
            )
            best = min(
                (best, *(trial for trial in tried if trial.close)), key=lambda trial: trial.distance
            )
    return best


def applied(node: ex.Node, array: Array) -> Array:
    """The result of an expression over x for this tensor."""
    result: Array = node.apply({"x": [array]})
    return result


def _same_elements(array: Array, reference: Array) -> bool:
    """Whether both tensors hold the same elements, in any order, up to noise. False for exact and
    complex dtypes.
    """
    if array.size != reference.size or array.dtype.kind in "iubc":
        return False
    return typical_distance(np.sort(reference, axis=None), np.sort(array, axis=None)) <= CLOSE / 2


def _halves(have: Shape, want: Shape, of: ex.Node) -> Iterator[ex.Node]:
    """Rearrangements between interleaved and separate halves of a head, the two conventions of
    RoPE.
    """
    last = want[-1] if want else 1
    heads = dict.fromkeys(n for n in (*have, *want) if 2 < n < last and last % n == 0)
    widths = dict.fromkeys(
        [last, *heads, *(last // n for n in heads), *(n for n in _WIDTHS if last % n == 0)]
    )
    front = " ".join(f"a{i}" if n != 1 else "1" for i, n in enumerate(want[:-1]))
    for node in orders(have, want, of):
        for width in widths:
            if width % 2 or width < 4:
                continue
            for inner in ("(h i two) -> {0} (h two i)", "(h two i) -> {0} (h i two)"):
                pattern = " ".join(f"{front} {inner.format(front)}".split())
                yield ex.Rearrange(node, pattern, (("i", width // 2), ("two", 2)))


_BLOCKS = (16, 8, 4)  # channels in one

_SPACE = "hwd"  # axes behind the channels


def in_memory(shape: Shape, *, undo: bool) -> Iterator[ex.Node]:
    """Expressions over x that convert between a kernel library's order in memory and (batch,
    channels, space ...). undo: convert from memory order to the latter.

    A kernel library may fill up the last block of channels, so that the record holds only a part of
    them: no expression here recovers the rest.
    """
    space = shape[2:]
    if not 1 <= len(space) <= len(_SPACE):
        return
    words, sizes = " ".join(_SPACE[: len(space)]), tuple(zip(_SPACE, space))
    blocks = (block for block in _BLOCKS if shape[1] % block == 0 and shape[1] > block)
    layouts = [
        (f"{words} c", "c", sizes),
        *((f"g {words} c", "(g c)", (*sizes, ("c", block))) for block in blocks),
    ]
    for memory, channels, lengths in layouts:
        if undo:
            yield ex.Rearrange(
                ex.Rearrange(X, f"n c {words} -> n (c {words})"),
                f"n ({memory}) -> n {channels} {words}",
                lengths,
            )
        else:
            flat = ex.Rearrange(X, f"n {channels} {words} -> n ({memory})", lengths)
            yield ex.Rearrange(flat, f"n (c {words}) -> n c {words}", sizes)
