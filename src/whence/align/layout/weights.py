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
from whence.align.layout.distances import resembles
from whence.align.layout.layout_state import Face, Family, LayoutState
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


def lies(reference: Array, target: Array) -> Order | None:
    """How a parameter of the target must be laid to be the reference's, None where nothing is
    found. Raises nothing.
    """
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
            found = permutations.located(a, b)
            order = permutations.completed(found, len(b)) if found is not None else None
            if order is not None and sorted(order.tolist()) == list(range(len(order))):
                return Order(
                    kind, permutations.taken(base, source.shape, axis, order), tuple(order.tolist())
                )
    return None


def parameters(at: LayoutState) -> None:
    """Decide for all parameters that lie otherwise, and for the tensors whose channels are
    theirs.
    """
    found = [(lie, family) for family in at.families(("param",)) if (lie := _orders_of(at, family))]
    # The order of inputs is told by what the call makes of them; with these in place it shows what
    # the order of outputs leads to.
    found.sort(key=lambda item: next(iter(item[0].values())).kind == "rows")
    for lie, family in found:
        if _legitimate(at, lie, family):
            _order(at, lie, family)


def _orders_of(at: LayoutState, family: Family) -> dict[Face, Order]:
    """How the parameters of one family lie, {} where they lie as the reference's or it cannot be
    told.
    """
    faces = list(family)
    suspects = [face for face in faces if _suspect(at, face)]
    # Weights under one name that differ in nothing but a few are a fault in these few.
    if 2 * len(suspects) <= len(faces) + _identical_siblings(at, family):
        return {}
    read = spread(suspects)
    seen = [_lies(at, face) for face in read]
    if seen[0] is not None and seen[0].node is X:
        return {}
    votes = Counter((o.kind, str(o.node)) for o in seen if o is not None)
    if not votes:
        _by_shape(at, faces)
        return {}
    (kind, node), count = votes.most_common(1)[0]
    if 2 * count > len(read):
        shared = next(o for o in seen if o is not None and (o.kind, str(o.node)) == (kind, node))
        return dict.fromkeys(faces, shared) if shared.node is not X else {}
    # Every sibling has an order of its own.
    return {
        face: order
        for face in faces
        if (order := _lies(at, face)) is not None and order.node is not X
    }


def _suspect(at: LayoutState, face: Face) -> bool:
    """May these parameters hold the same elements in another order?"""
    a, b = at.records(face)
    if a.shape != b.shape:
        return True
    if a.count < 4 or max(a.shape, default=0) == a.count:
        return False  # a vector follows its weight
    if a.dtype == b.dtype and a.sketch is not None and b.sketch is not None:
        return a.sketch.checksum == b.sketch.checksum
    norms = [r.statistics.norm for r in (a, b) if r.statistics is not None and r.statistics.norm]
    return len(norms) == 2 and math.isclose(*norms, rel_tol=0.02)


def _identical_siblings(at: LayoutState, family: Family) -> int:
    """How many parameters of the same starred name are equal bit by bit."""
    call, slot = next(iter(family.values()))
    return at.equal_parameters[starred(at.reference.calls[call].scope), slot.reference_slot]


def _lies(at: LayoutState, face: Face) -> Order | None:
    arrays = at.arrays(face)
    return lies(*arrays) if arrays is not None else None


def _by_shape(at: LayoutState, faces: Iterable[Face]) -> None:
    """Where data say nothing, a layout that is the only one possible, and hides no element."""
    for face in faces:
        a, b = at.records(face)
        found = ways(b.shape, a.shape)
        if a.shape != b.shape and len(found) == 1 and a.count == b.count:
            at.decided[face] = found[0], "the only way the shapes allow"


def _legitimate(at: LayoutState, found: dict[Face, Order], family: Family) -> bool:
    """Does what is computed with these parameters agree, so that the order is a choice and not a
    fault?
    """
    for asked, (face, order) in enumerate(found.items()):
        a, b = at.records(face)
        where, _ = family[face]
        call, other = at.calls(at.pairs[where])
        if order.kind == "axes" and (
            a.shape != b.shape
            or ex.keeps_order(order.node, b.shape)
            or call.op_type != other.op_type
        ):
            return True
        if asked >= READ:
            break
        if outputs_agree(at, where) if order.kind != "rows" else follows(at, where):
            return True
    return False


def _order(at: LayoutState, found: dict[Face, Order], family: Family) -> None:
    for face, order in found.items():
        call, slot = family[face]
        what = (
            "elements are equal after it"
            if order.kind == "axes"
            else f"{order.kind} found by their elements"
        )
        at.decided[face] = order.node, f"{param_name(slot.reference_slot)}: {what}"
        if order.kind == "axes":
            continue
        places = np.array(order.places)
        scope = at.reference.calls[call].scope
        at.channel_orders.setdefault(scope.rpartition(".")[0], {})[order.places] = None
        for same in at.modules[at.module(at.pairs[call])]:
            for s in at.pairs[same].slots:
                kind = slot_kind(s.reference_slot)
                own = (s.reference_record, s.target_record)
                a, b = at.records(own)
                if (
                    kind == "param"
                    and order.kind == "rows"
                    and a.shape == b.shape == (len(places),)
                ):
                    at.decided[own] = (
                        permutations.taken(X, b.shape, 0, places),
                        "as the rows of the weight",
                    )
                elif kind == ("output" if order.kind == "rows" else "input") and b.shape:
                    _channels(
                        at, own, places, axis=-1 if len(at.records(face)[0].shape) == 2 else 1
                    )


def _channels(at: LayoutState, face: Face, places: permutations.Order, axis: int) -> None:
    """The channels of an input or output lie as the rows or columns of the weight do."""
    a, b = at.records(face)
    if len(b.shape) < 2 - (axis == -1) or b.shape[axis] != len(places):
        return
    node = next(orders(b.shape, a.shape, permutations.taken(X, b.shape, axis, places)), None)
    if node is not None:
        at.decided[face] = node, "as the rows of the weight" if axis else ""
