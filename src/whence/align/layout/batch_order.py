"""Finds that the target has the samples of a batch in another order, by the elements of the first
tensors of a pass: in dumps, and in what no tokens of a model's inputs order, such as a backward
pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout.axes import X, applied
from whence.align.layout.distances import AGREES, CLOSE, clear_best, distance
from whence.align.layout.layout_state import LayoutState, TensorPair, is_constant
from whence.align.layout.permutations import Order
from whence.align.plan_editor import spread
from whence.dtypes import Array
from whence.records import Call, Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_param
from whence.results import CallPair, Plan, SlotPair

_MOST_SAMPLES = 1024
_COLUMNS = 4096  # elements of a sample that tell it from others
_FEWEST = 3
"""Least number of tensors that follow an order which no input shows: an order of the results alone
is that of answers that went to others."""

_TRIED = 4
"""Tensors of a backward pass that are tried: gradients of parameters may come before the others."""

_Moment = tuple[str, int, int, int, str]


class _Samples(NamedTuple):
    """For each sample of the reference its place in the target. axis: of the samples in the first
    tensor. name: of its call. is_stated: whether that tensor is an input.
    """

    places: Order
    axis: int
    name: str
    is_stated: bool

    def nodes(self, shape: tuple[int, ...]) -> Iterator[ex.Node]:
        """Yields the ways in which a tensor of this shape may follow, on either of two axes."""
        for axis in (0, 1)[: len(shape)]:
            places = _of_extent(self.places, shape[axis])
            if places is not None:
                yield ex.Take(X, tuple(places.tolist()), axis)


class _Vote(NamedTuple):
    """How the tensors of one name follow. node: X where they stay; off: distance in it."""

    members: list[TensorPair]
    node: ex.Node
    off: float
    rank: int


def in_one_order(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Bring the target's samples to the reference's order, where its first tensors, and those
    behind them, show another one. Reads one pair of tensors where they do not.
    """
    state = LayoutState(reference, target, plan)
    moments: dict[_Moment, list[CallPair]] = defaultdict(list)
    for pair in sorted(state.pairs.values(), key=lambda p: reference.calls[p.reference].order):
        moments[_moment(reference.calls[pair.reference])].append(pair)
    orders: dict[_Moment, _Samples] = {}
    in_order: set[str] = set()  # phases whose first moment is, so that the others are too
    for moment, pairs in moments.items():
        samples = None if moment[-1] in in_order else _samples(state, pairs)
        if samples is not None:
            orders[moment] = samples
        elif not orders:
            in_order.add(moment[-1])
    if not orders:
        return target, plan
    votes = _votes(state, orders)
    is_unordered = any(has_mark(call, Mark.UNORDERED) for call in reference.calls)
    for moment, samples in orders.items():
        if not _all_follow(samples, votes[moment], is_unordered):
            continue
        for vote in votes[moment]:
            if vote.node is not X:
                why = f"the samples' order, as {samples.name} shows it first"
                state.decided.update((tensors, (vote.node, why)) for tensors in vote.members)
        listed = ", ".join(map(str, samples.places[:8])) + ", ..." * (len(samples.places) > 8)
        state.notes.append(
            f"the target has the batch in another order: its samples {listed} are the reference's "
            f"0, 1, 2, ..., first in {samples.name}; if both were given one order, that is a fault"
        )
    return state.laid_out() if state.decided else (target, plan)


def _moment(call: Call) -> _Moment:
    return call.root, call.rank, call.step, call.micro, call.phase


def _samples(state: LayoutState, pairs: Iterable[CallPair]) -> _Samples | None:
    """The order of samples in the first pair of tensors whose samples differ; None where they have
    one order.
    """
    tried = 0
    for call, slot in _first(state, pairs):
        arrays = state.arrays(slot.records)
        if arrays is None or (arrays[0] == arrays[0][:1]).all():  # as positions are
            continue
        for axis in (0, 1)[: arrays[0].ndim - 1]:
            places = _places(*arrays, axis)
            if places is not None:
                return _Samples(places, axis, call.scope, is_input(slot.reference_slot))
        tried += 1
        if call.phase != "backward" or tried == _TRIED:
            return None
    return None


def _first(state: LayoutState, pairs: Iterable[CallPair]) -> Iterator[tuple[Call, SlotPair]]:
    """Yields pairs of tensors of one shape, as far as none of them is equal that has samples."""
    for pair in pairs:
        holds_others = bool(state.kids_reference.get(pair.reference))  # which return before it
        for slot in sorted(pair.slots, key=lambda s: not is_input(s.reference_slot)):
            a, b = state.records(slot.records)
            is_first = is_input(slot.reference_slot) or (
                not holds_others and not is_param(slot.reference_slot)
            )
            if not is_first or a.shape != b.shape or len(a.shape) < 2:
                continue
            if not (a.hash and a.hash == b.hash):
                yield state.reference.calls[pair.reference], slot
            elif dtypes.is_floating(a.dtype) and not is_constant(a):
                return


def _places(reference: Array, target: Array, axis: int) -> Order | None:
    """For each sample of the reference the one of the target that is nearest; None where the order
    of both is as near.
    """
    a, b = (_rows(array, axis) for array in (reference, target))
    if not 2 <= len(a) <= _MOST_SAMPLES:
        return None
    size = max(abs(a).max(initial=0.0), abs(b).max(initial=0.0)) or 1.0  # squares of it overflow
    a, b = a / size, b / size
    far = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
    places = np.empty(len(a), np.int64)
    for sample, row in enumerate(far):
        places[sample] = row.argmin()
        far[:, places[sample]] = np.inf
    moved = np.take(target, places, axis)
    off = distance(reference, target), distance(reference, moved)
    return places if clear_best(off) == 1 else None


def _rows(array: Array, axis: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    rows = rows[:, :: max(1, rows.shape[1] // _COLUMNS)]
    rows = np.abs(rows) if rows.dtype.kind == "c" else rows
    return np.nan_to_num(rows.astype(np.float64), posinf=0.0, neginf=0.0)


def _of_extent(places: Order, extent: int) -> Order | None:
    """The same order of an axis on which samples have several places each, such as their heads, or
    which the places of one sample share.
    """
    count = len(places)
    if extent and extent % count == 0:
        each = extent // count
        return np.asarray(places[:, None] * each + np.arange(each)).reshape(-1)
    each = count // extent if extent > 1 and count % extent == 0 else count
    firsts = places[::each] // each
    is_whole = np.array_equal(places, (firsts[:, None] * each + np.arange(each)).reshape(-1))
    return firsts if is_whole and len(firsts) > 1 else None


def _votes(
    state: LayoutState, orders: dict[_Moment, _Samples]
) -> defaultdict[_Moment, list[_Vote]]:
    """How the tensors of each name that may follow an order do so, by a few of them."""
    votes: defaultdict[_Moment, list[_Vote]] = defaultdict(list)
    for family in state.families(("input", "output", "mutated", "grad")) if orders else ():
        parts: defaultdict[_Moment, list[TensorPair]] = defaultdict(list)
        for tensors, (call, _) in family.items():
            parts[_moment(state.reference.calls[call])].append(tensors)
        for moment, members in parts.items():
            a, b = state.records(members[0])
            nodes = [*orders[moment].nodes(a.shape)] if moment in orders else []
            if not nodes or a.shape != b.shape:
                continue
            read = [arrays for tensors in spread(members) if (arrays := state.arrays(tensors))]
            off = {
                node: float(np.median([distance(a, applied(node, b)) for a, b in read] or [np.inf]))
                for node in (X, *nodes)
            }
            nearest = min(off, key=lambda node: (off[node], node is not X))
            votes[moment].append(_Vote(members, nearest, off[nearest], len(a.shape)))
    return votes


def _all_follow(samples: _Samples, votes: list[_Vote], is_unordered: bool) -> bool:
    """Whether the order is one of samples. Behind a fault tensors may be near in neither order, but
    an order of tokens or channels, which only a sample has, is believed where all are near in it.
    """
    if is_unordered and any(v.node is X and v.off < AGREES for v in votes if v.rank > 2):
        return False
    moved = [vote for vote in votes if vote.node is not X]
    # gradients of parameters, and what no sample changes, stay as they are
    votes = [vote for vote in votes if vote.node is not X or vote.off >= CLOSE]
    if len({t for vote in moved for t in vote.members}) < _FEWEST and not samples.is_stated:
        return False
    if samples.axis == 0 and 2 * sum(vote.rank > 2 for vote in votes) > len(votes):
        return 2 * len(moved) > len(votes)
    return 10 * sum(vote.off < CLOSE for vote in moved) >= 9 * len(votes)
