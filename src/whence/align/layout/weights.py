"""How the parameters of the target lie: rows, columns or axes in another order than the
reference's.

Parameters come first: equal elements after a change of layout are proof, and the order of a
weight's rows is that of its bias and its outputs. Siblings of one starred name (`layers.*.q_proj`)
share one layout, so that a faulty tensor among them is not explained away. A change of order is
believed only where what is computed from it agrees again: weights in a wrong order are a fault,
weights in another order are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.axes import X, applied, candidates, orders, ways
from whence.align.layout.consumers import follows, outputs_agree
from whence.align.layout.distances import distance, resembles
from whence.align.layout.layout_state import Family, LayoutState, TensorPair
from whence.align.layout.refuted_orders import is_equal, is_read_unmoved, is_refuted
from whence.align.module_names import starred
from whence.align.plan_editor import READ, spread
from whence.dtypes import Array
from whence.records.slots import param_name, slot_kind


@dataclass(frozen=True, slots=True)
class Order:
    """How a parameter of the target lies. kind: "axes" (moved as a whole), "rows" (of its outputs),
    "columns" (of its inputs).

    places: of the rows or columns.
    """

    kind: str
    node: ex.Node
    places: tuple[int, ...] = ()


def layout_of(reference: Array, target: Array) -> Order | None:
    """How a parameter of the target becomes the reference's, None where nothing is found."""
    if reference.shape == target.shape and resembles(reference, target):
        return Order("axes", X)
    for node in candidates(target.shape, reference.shape):
        if node is not X and resembles(reference, applied(node, target)):
            return Order("axes", node)
    if reference.ndim < 2 or target.ndim != reference.ndim:
        return None
    for base, turn in ((X, False), (ex.Reverse(X), True)):
        source = target.T if turn else target
        if source.shape != reference.shape or (turn and target.ndim != 2):
            continue
        for kind, axis in (("rows", 0), ("columns", 1)):
            a, b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (reference, source))
            rows = permutations.located(a, b)
            order = permutations.completed(rows, len(b)) if rows is not None else None
            if order is not None and sorted(order.tolist()) == list(range(len(order))):
                return Order(
                    kind, permutations.taken(base, source.shape, axis, order), tuple(order.tolist())
                )
    return None


def parameters(state: LayoutState) -> None:
    """Decide for parameters in another order, and for the tensors with their channels."""
    decisions = [
        (layouts, family)
        for family in state.families(("param",))
        if (layouts := _orders_of(state, family))
    ]
    # The order of inputs is told by what the call makes of them; with these in place it shows what
    # the order of outputs leads to.
    decisions.sort(key=lambda item: next(iter(item[0].values())).kind == "rows")
    for suggested, family in decisions:
        layouts = _unrefuted(state, suggested, family)
        if _legitimate(state, layouts, family):
            _order(state, layouts, family)


def _unrefuted(
    state: LayoutState, layouts: dict[TensorPair, Order], family: Family
) -> dict[TensorPair, Order]:
    """The orders that nothing along the same axis speaks against.

    Where few siblings are read by weights that did not move, these weights are the fault.
    """
    rows = {t: np.array(order.places) for t, order in layouts.items() if order.kind == "rows"}
    read = spread(list(rows))
    unmoved = sum(is_read_unmoved(state, family[t][0], rows[t]) for t in read)
    return {
        tensors: order
        for tensors, order in layouts.items()
        if tensors not in rows
        or not (2 * unmoved > len(read) or is_refuted(state, *family[tensors], rows[tensors]))
    }


def _orders_of(state: LayoutState, family: Family) -> dict[TensorPair, Order]:
    """Orders of the parameters of a family, {} where they have the reference's or none is known."""
    pairs = list(family)
    suspects = [tensors for tensors in pairs if _suspect(state, tensors)]
    # Weights under one name that differ in nothing but a few are a fault in these few.
    if 2 * len(suspects) <= len(pairs) + _identical_siblings(state, family):
        return {}
    read = spread(suspects)
    layouts = [_layout_of(state, tensors) for tensors in read]
    if layouts[0] is not None and layouts[0].node is X:
        return {}
    votes = Counter((o.kind, str(o.node)) for o in layouts if o is not None)
    if not votes:
        _by_shape(state, pairs)
        return {}
    (kind, node), count = votes.most_common(1)[0]
    if 2 * count > len(read):
        shared = next(o for o in layouts if o is not None and (o.kind, str(o.node)) == (kind, node))
        return dict.fromkeys(pairs, shared) if shared.node is not X else {}
    # Every sibling has an order of its own.
    return {
        tensors: order
        for tensors in pairs
        if (order := _layout_of(state, tensors)) is not None and order.node is not X
    }


def _suspect(state: LayoutState, tensors: TensorPair) -> bool:
    """May these parameters hold the same elements in another order?"""
    a, b = state.records(tensors)
    if a.shape != b.shape:
        return True
    if a.count < 4 or max(a.shape, default=0) == a.count:
        return False  # a vector follows its weight
    if a.dtype == b.dtype and a.sketch is not None and b.sketch is not None:
        return a.sketch.checksum == b.sketch.checksum
    norms = [r.statistics.norm for r in (a, b) if r.statistics is not None and r.statistics.norm]
    return len(norms) == 2 and math.isclose(*norms, rel_tol=0.02)


def _identical_siblings(state: LayoutState, family: Family) -> int:
    """How many parameters of the same starred name and shape are equal bit by bit. In a sequence a
    norm has the starred name of a matrix beside it, and says nothing of how that lies.
    """
    (tensors, (call, slot)) = next(iter(family.items()))
    scope, shape = starred(state.reference.calls[call].scope), state.records(tensors)[0].shape
    return state.equal_parameters[scope, slot.reference_slot, shape]


def _layout_of(state: LayoutState, tensors: TensorPair) -> Order | None:
    arrays = state.arrays(tensors)
    return layout_of(*arrays) if arrays is not None else None


def _by_shape(state: LayoutState, pairs: Iterable[TensorPair]) -> None:
    """Where data say nothing, a layout that is the only one possible, and hides no element."""
    for tensors in pairs:
        a, b = state.records(tensors)
        nodes = ways(b.shape, a.shape)
        if a.shape != b.shape and len(nodes) == 1 and a.count == b.count:
            state.decided[tensors] = nodes[0], "the only way the shapes allow"


def _legitimate(state: LayoutState, layouts: dict[TensorPair, Order], family: Family) -> bool:
    """Does what is computed with these parameters agree? Then the order is no fault."""
    for n, (tensors, order) in enumerate(layouts.items()):
        a, b = state.records(tensors)
        where, _ = family[tensors]
        call, target_call = state.calls(state.pairs[where])
        if order.kind == "axes" and (
            a.shape != b.shape
            or ex.keeps_order(order.node, b.shape)
            or call.op_type != target_call.op_type
        ):
            return True
        if n >= READ:
            break
        if outputs_agree(state, where) if order.kind != "rows" else follows(state, where):
            return True
    return False


def _order(state: LayoutState, layouts: dict[TensorPair, Order], family: Family) -> None:
    parameters = {
        s.records
        for pair in state.pairs.values()
        for s in pair.slots
        if slot_kind(s.reference_slot) == "param"
    }
    for tensors, order in layouts.items():
        call, slot = family[tensors]
        evidence = (
            "elements are equal after it"
            if order.kind == "axes"
            else f"{order.kind} found by their elements"
        )
        state.decided[tensors] = order.node, f"{param_name(slot.reference_slot)}: {evidence}"
        if order.kind == "axes":
            continue
        places = np.array(order.places)
        scope = state.reference.calls[call].scope
        state.channel_orders.setdefault(scope.rpartition(".")[0], {})[order.places] = None
        for sibling in state.modules[state.module(state.pairs[call])]:
            for s in state.pairs[sibling].slots:
                kind = slot_kind(s.reference_slot)
                near = s.records
                a, b = state.records(near)
                if (
                    kind == "param"
                    and order.kind == "rows"
                    and a.shape == b.shape == (len(places),)
                    and not is_equal(a, b)  # of one value, or not of these rows
                ):
                    state.decided[near] = (
                        permutations.taken(X, b.shape, 0, places),
                        "as the rows of the weight",
                    )
                elif (
                    kind == ("output" if order.kind == "rows" else "input")
                    and b.shape
                    and near not in parameters  # which an operator has for inputs
                ):
                    _channels(
                        state,
                        near,
                        places,
                        axis=-1 if len(state.records(tensors)[0].shape) == 2 else 1,
                        is_inside=state.reference.calls[sibling].kind == "operator",
                    )


def _channels(
    state: LayoutState, tensors: TensorPair, places: permutations.Order, axis: int, is_inside: bool
) -> None:
    """The channels of an input or output lie as the rows or columns of the weight do. is_inside: of
    an operator inside the module, which reads and makes other tensors too: if elements show it.
    """
    a, b = state.records(tensors)
    if len(b.shape) < 2 - (axis == -1) or b.shape[axis] != len(places):
        return
    node = next(orders(b.shape, a.shape, permutations.taken(X, b.shape, axis, places)), None)
    arrays = state.arrays(tensors) if is_inside and tensors not in state.decided else None
    if node is None or (
        arrays is not None and distance(arrays[0], applied(node, arrays[1])) >= distance(*arrays)
    ):
        return
    state.decided[tensors] = node, "as the rows of the weight" if axis else ""
