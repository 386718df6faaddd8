"""Sums checksums and norms over ranks, so that sharded modules can be paired before their layout is
known.

Checksums and sums of magnitudes of pieces add up, so a weight cut over the ranks is recognised
under any name, and in its shape.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from whence.align.module_names import starred
from whence.align.ranks import shards
from whence.align.ranks.groups import Key, Side
from whence.align.ranks.shards import Shape
from whence.records import Record, Sketch, Statistics
from whence.records.slots import is_input, is_param, slot_kind

_NEAR = 1e-3  # relative difference of norm and sum of magnitudes that rounding keeps below
_ASKED = 8  # members of a family of siblings that vote on their shape
_CHECKSUMS = 1 << 64

Option = tuple[Shape, Record]  # a shape that a whole tensor may have, with its figures


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a side. family: siblings that lie alike. options: the likeliest first."""

    slot: tuple[Key, str]
    family: tuple[object, ...]
    options: tuple[Option, ...]


def combined_figures(side: Side, other_side: Side) -> dict[tuple[Key, str], Record]:
    """The whole tensor in the place of a slot's pieces, as far as figures tell. Reads no elements;
    tensors that lie whole are left out.

    Of the shapes that the pieces allow the one counts under which siblings have the figures of a
    tensor of the other side; where none does, one that occurs there.
    """
    across = _OtherSide(other_side)
    tensors = list(_tensors(side))
    votes: dict[tuple[object, ...], Counter[Shape]] = defaultdict(Counter)
    voters: Counter[tuple[object, ...]] = Counter()
    for tensor in tensors:
        if len(tensor.options) > 1 and voters[tensor.family] < _ASKED:
            voters[tensor.family] += 1
            for shape, figures in tensor.options:
                votes[tensor.family][shape] += across.has(tensor.slot[1], shape, figures)
    out: dict[tuple[Key, str], Record] = {}
    for tensor in tensors:
        if len(tensor.options) < 2:
            continue
        voted = votes[tensor.family].most_common(1)[0]
        picked = (
            voted[0]
            if voted[1]
            else across.occurring(tensor.slot[1], [shape for shape, _ in tensor.options])
        )
        # Siblings may have a shape that this one's figures rule out.
        shape, figures = next((o for o in tensor.options if o[0] == picked), tensor.options[-1])
        own_shape = tensor.options[-1][0]
        if shape != own_shape:
            out[tensor.slot] = replace(figures, shape=shape)
    _constants(side, out)
    return out


def _tensors(side: Side) -> Iterator[_Tensor]:
    for key in side.groups:
        for slot in side.slots(key):
            records = [side.run.records[r] for r in side.holders(key, slot)[1]]
            if is_input(slot) or not records:
                continue
            pieces = _distinct(records)
            shapes = tuple(r.shape for r in records)
            family = starred(str(key[4])), key[5], slot, shapes
            options: list[Option] = []
            if len(pieces) > 1 and (figures := _summed(pieces)) is not None:
                whole = sum(p.count for p in pieces)
                wholes = dict.fromkeys(
                    shape for _, shape in shards.candidates(shapes) if math.prod(shape) == whole
                )
                options = [(shape, figures) for shape in wholes if shape not in shapes]
            yield _Tensor((key, slot), family, (*options, (records[0].shape, records[0])))


def _distinct(records: Sequence[Record]) -> list[Record]:
    """The records without those that hold the same bytes as one before."""
    unique: dict[object, Record] = {}
    for index, record in enumerate(records):
        unique.setdefault(
            (record.hash, record.dtype, record.shape) if record.hash else index, record
        )
    return list(unique.values())


def _summed(pieces: Sequence[Record]) -> Record | None:
    """Figures of pieces together, with no shape of the whole; None for several dtypes."""
    first = pieces[0]
    if any(p.dtype != first.dtype for p in pieces):
        return None
    out = Record(first.id, first.dtype, first.shape, device=first.device)
    parts = [
        p.statistics for p in pieces if p.statistics is not None and p.statistics.norm is not None
    ]
    if len(parts) == len(pieces):
        count = sum(s.count for s in parts)
        norm, mean = (
            math.hypot(*(s.norm or 0.0 for s in parts)),
            sum((s.mean or 0.0) * s.count for s in parts) / count,
        )
        low, high = min(s.min or 0.0 for s in parts), max(s.max or 0.0 for s in parts)
        spread = math.sqrt(max(norm**2 / count - mean**2, 0.0)) if low != high else 0.0
        counts = (sum(s.nan for s in parts), sum(s.inf for s in parts), sum(s.zero for s in parts))
        out = replace(out, statistics=Statistics(count, low, high, mean, spread, norm, *counts))
    sketches = [p.sketch for p in pieces if p.sketch is not None]
    if len(sketches) == len(pieces):
        sums = [
            [s.abs_sum for s in sketches],
            [s.cube_sum for s in sketches],
            [s.fourth_sum for s in sketches],
        ]
        checksum = sum(s.checksum for s in sketches) % _CHECKSUMS
        out = replace(out, sketch=Sketch(checksum, *map(_total, sums)))
    return out


def _total(parts: Sequence[float | None]) -> float | None:
    sums = [p for p in parts if p is not None]
    return sum(sums) if len(sums) == len(parts) else None


def _constants(side: Side, combined: dict[tuple[Key, str], Record]) -> None:
    """Cut constant parameters (a bias of zeros) as the other parameters of their call."""
    for key, slot in list(combined):
        if not is_param(slot):
            continue
        piece, whole = (
            side.run.records[side.holders(key, slot)[1][0]].shape,
            combined[key, slot].shape,
        )
        for slot_beside in side.slots(key):
            record = side.run.records[side.holders(key, slot_beside)[1][0]]
            constant = record.statistics is not None and record.statistics.std == 0.0
            if (
                is_param(slot_beside)
                and (key, slot_beside) not in combined
                and constant
                and record.shape[:1] == piece[:1] != whole[:1]
            ):
                combined[key, slot_beside] = replace(
                    record, shape=(*whole[:1], *record.shape[1:]), hash="", sketch=None
                )


class _OtherSide:
    """What the other side holds: its tensors by kind and count, each in every shape it may have."""

    def __init__(self, side: Side) -> None:
        self._figures: dict[tuple[str, int], list[tuple[float, int, Option]]] = defaultdict(list)
        self._shapes: set[tuple[str, Shape]] = set()
        for index, tensor in enumerate(_tensors(side)):
            kind = slot_kind(tensor.slot[1])
            for shape, figures in tensor.options:
                self._shapes.add((kind, tuple(sorted(shape))))
                if norm := _norm(figures):
                    self._figures[kind, math.prod(shape)].append((norm, index, (shape, figures)))
        for entries in self._figures.values():
            entries.sort(key=lambda item: item[:2])

    def has(self, slot: str, shape: Shape, figures: Record) -> int:
        """Has the other side these figures? 2: in this shape; 1: axes in another order; 0: no."""
        norm, best = _norm(figures), 0
        among = self._figures.get((slot_kind(slot), math.prod(shape)), []) if norm else []
        for size, _, (other_shape, other_figures) in among[
            bisect.bisect_left(among, norm * (1 - _NEAR), key=lambda item: item[0]) :
        ]:
            if size > norm * (1 + _NEAR) or best == 2:
                break
            if sorted(other_shape) == sorted(shape) and _alike(figures, other_figures):
                best = max(best, 2 if other_shape == shape else 1)
        return best

    def occurring(self, slot: str, shapes: Sequence[Shape]) -> Shape:
        """The first of these shapes that the other side has; the last where it has none."""
        return next(
            (s for s in shapes if (slot_kind(slot), tuple(sorted(s))) in self._shapes), shapes[-1]
        )


def _norm(figures: Record) -> float:
    """The 2-norm of what is no constant; 0 where it is one or nothing is known."""
    return (
        (figures.statistics.norm or 0.0)
        if figures.statistics is not None and figures.statistics.std
        else 0.0
    )


def _alike(first: Record, second: Record) -> bool:
    """Are sums of magnitudes near too, where they are known?"""
    a, b = (r.sketch.abs_sum if r.sketch is not None else None for r in (first, second))
    return a is None or b is None or abs(a - b) <= _NEAR * max(a, b)
