"""How the activations of the target lie, by shapes, elements, weights beside them and readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.axes import X, applied, candidates, in_memory, turned
from whence.align.layout.consumers import used_so
from whence.align.layout.distances import AGREES, clear_best, distance, resembles
from whence.align.layout.layout_state import Family, LayoutState, TensorPair
from whence.align.plan_editor import voted
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_param


def activations(state: LayoutState) -> None:
    """Decide for all tensors but parameters that lie otherwise."""
    for family in state.families(("input", "output", "mutated", "grad")):
        pairs = [
            tensors
            for tensors, (call, _) in family.items()
            if tensors not in state.decided and not _lie_as_said(state, tensors, call)
        ]
        if not pairs:
            continue
        a, b = state.records(pairs[0])
        same_shape = a.shape == b.shape
        if same_shape and state.channel_orders and dtypes.is_floating(a.dtype):
            pairs = _as_channels(state, pairs, family)
            if not pairs:
                continue
        if same_shape and _as_in_memory(state, pairs, family):
            continue
        if same_shape and (
            not dtypes.is_floating(a.dtype) or a.count < 4 or not _may_be_turned(state, pairs[0])
        ):
            continue
        possible = candidates(b.shape, a.shape)
        if len(possible) < 2 and same_shape:
            continue
        node = _chosen(state, pairs, possible)
        why = "confirmed on data"
        if node is None and not same_shape and possible and ex.keeps_order(possible[0], b.shape):
            node, why = possible[0], "from shapes alone"
        if node is None or node is X:
            continue
        if a.count < b.count and not _may_be_left_out(state, pairs[0], family[pairs[0]][0]):
            continue
        if (
            not ex.keeps_order(node, b.shape)
            and a.count == b.count
            and not used_so(state, pairs, node, family, same_shape)
        ):
            continue
        for tensors in pairs:
            state.decided[tensors] = node, why


def _lie_as_said(state: LayoutState, tensors: TensorPair, call: int) -> bool:
    """Are both tensors of one shape, and of nodes of one type, whose axes ONNX fixes?"""
    a, b = state.records(tensors)
    calls = state.calls(state.pairs[call])
    return (
        a.shape == b.shape
        and calls[0].op_type == calls[1].op_type
        and all(has_mark(c, Mark.OPSET) for c in calls)
    )


def _as_in_memory(state: LayoutState, pairs: Sequence[TensorPair], family: Family) -> bool:
    """Decide for tensors that one side has in a kernel library's order, by their elements."""
    in_reference, in_target = (
        has_mark(call, Mark.MEMORY_ORDER) for call in state.calls(state.pairs[family[pairs[0]][0]])
    )
    if not (in_reference or in_target):
        return False
    decided = {}
    for tensors in pairs:
        shape = state.records(tensors)[1].shape
        possible = [
            X,
            *(
                node
                for undo, may in ((True, in_target), (False, in_reference))
                if may
                for node in in_memory(shape, undo=undo)
            ),
        ]
        if best := _nearest(state, possible, tensors):
            decided[tensors] = (
                possible[best],
                "as its kernel library lays it out in memory, confirmed on data",
            )
    state.decided.update(decided)
    return len(decided) == len(pairs)


def _as_channels(
    state: LayoutState, pairs: Sequence[TensorPair], family: Family
) -> list[TensorPair]:
    """Decide for tensors whose channels lie as a weight's beside them. Returns the others."""
    orders = {
        tensors: nodes
        for tensors in pairs
        if (nodes := _weight_orders(state, tensors, family[tensors][0]))
    }
    clear: dict[TensorPair, ex.Node] = {}
    blurred: list[TensorPair] = []
    for tensors, nodes in orders.items():
        arrays = state.arrays(tensors)
        if arrays is None or resembles(*arrays):
            continue
        best = _nearest(state, nodes, tensors)
        if best is not None and nodes[best] is not X:
            clear[tensors] = nodes[best]
        else:
            blurred.append(tensors)
    # Behind a fault nothing agrees: then as the siblings, where there is one order only.
    if 2 * len(clear) >= len(orders):
        clear.update(
            (tensors, orders[tensors][0]) for tensors in blurred if len(orders[tensors]) == 1
        )
    state.decided.update(
        (tensors, (node, "as the channels of a neighbouring weight"))
        for tensors, node in clear.items()
    )
    return [tensors for tensors in pairs if tensors not in clear]


def _weight_orders(state: LayoutState, tensors: TensorPair, call: int) -> list[ex.Node]:
    """Orders of channels of weights in the same module, or in this one, that fit this tensor."""
    scope, shape = state.reference.calls[call].scope, state.records(tensors)[1].shape
    nodes: list[ex.Node] = []
    for places in (
        state.channel_orders.get(scope.rpartition(".")[0]) or state.channel_orders.get(scope) or ()
    ):
        n, order = (shape[-1] if len(shape) > 1 else 0), np.array(places)
        if n > 1 and len(order) > n and len(order) % n == 0:
            heads = order.reshape(-1, n) - np.arange(0, len(order), n)[:, None]
            order = heads[0] if (heads == heads[0]).all() else order
        if len(order) == n and sorted(order.tolist()) == list(range(n)):
            nodes.append(permutations.taken(X, shape, -1, order))
        nodes += _head_orders(shape, np.array(places))
    return nodes


def _head_orders(shape: tuple[int, ...], order: permutations.Order) -> list[ex.Node]:
    """The same order of a tensor that has heads in an axis of their own, as caches and attention
    weights do: where the channels of each stay together.
    """
    nodes: list[ex.Node] = []
    for axis in range(1, len(shape) - 1):
        count = shape[axis]
        if not 1 < count < len(order) or len(order) % count:
            continue
        size = len(order) // count
        heads = order.reshape(count, size)
        firsts = heads[:, 0] // size
        is_whole = (heads == firsts[:, None] * size + np.arange(size)).all()
        if is_whole and sorted(firsts.tolist()) == list(range(count)):
            nodes.append(permutations.taken(X, shape, axis, firsts))
    return nodes


def _may_be_turned(state: LayoutState, tensors: TensorPair) -> bool:
    """Do these differ by much, although their figures are alike?"""
    a, b = state.records(tensors)
    if a.statistics is not None and b.statistics is not None:
        x, y = a.statistics.norm, b.statistics.norm
        if x is None or y is None or not math.isclose(x, y, rel_tol=AGREES):
            return False
    if not turned(b.shape):
        return False
    arrays = state.arrays(tensors)
    return arrays is not None and not resembles(*arrays)


def _may_be_left_out(state: LayoutState, tensors: TensorPair, call: int) -> bool:
    """May a part of the target's tensor be left out: filler, or made of what only it has?"""
    for slot in state.pairs[call].slots:
        if is_param(slot.reference_slot):
            a, b = state.records(slot.records)
            if a.count < b.count and slot.records in state.decided:
                return True
    arrays = state.arrays(tensors)
    if arrays is None:
        return False
    extra = arrays[1].size - arrays[0].size
    values, counts = np.unique(arrays[1], return_counts=True)
    return bool(
        counts.max() >= extra
        and np.count_nonzero(arrays[0] == values[counts.argmax()]) <= counts.max() - extra
    )


def _chosen(
    state: LayoutState, pairs: Sequence[TensorPair], possible: Sequence[ex.Node]
) -> ex.Node | None:
    """The way that the elements of a few siblings agree on."""
    if len(possible) == 1 and ex.keeps_order(possible[0], state.records(pairs[0])[1].shape):
        return possible[0]
    best = voted(pairs, partial(_nearest, state, possible)) if possible else None
    return possible[best] if best is not None else None


def _nearest(state: LayoutState, possible: Sequence[ex.Node], tensors: TensorPair) -> int | None:
    """Which way makes these two one, by far the nearest; None without elements."""
    arrays = state.arrays(tensors)
    if arrays is None:
        return None
    return clear_best([distance(arrays[0], applied(node, arrays[1])) for node in possible])
