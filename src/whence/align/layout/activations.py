"""How the activations of the target lie: what shapes allow and elements confirm, as the weights
beside them, as they are used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.axes import X, applied, candidates, in_memory, turned
from whence.align.layout.consumers import used_so
from whence.align.layout.distances import AGREES, clear_best, distance, resembles
from whence.align.layout.layout_state import Face, Family, LayoutState
from whence.align.plan_editor import spread
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_param


def activations(at: LayoutState) -> None:
    """Decide for all tensors but parameters that lie otherwise."""
    for family in at.families(("input", "output", "mutated", "grad")):
        faces = [face for face in family if face not in at.decided]
        if not faces:
            continue
        a, b = at.records(faces[0])
        same = a.shape == b.shape
        if same and at.channel_orders and dtypes.is_floating(a.dtype):
            faces = _as_channels(at, faces, family)
            if not faces:
                continue
        if same and _as_in_memory(at, faces, family):
            continue
        if same and (
            not dtypes.is_floating(a.dtype) or a.count < 4 or not _may_be_turned(at, faces[0])
        ):
            continue
        possible = candidates(b.shape, a.shape)
        if len(possible) < 2 and same:
            continue
        node = _chosen(at, faces, possible)
        why = "confirmed on data"
        if node is None and not same and possible and ex.keeps_order(possible[0], b.shape):
            node, why = possible[0], "from shapes alone"
        if node is None or node is X:
            continue
        if a.count < b.count and not _may_be_left_out(at, faces[0], family[faces[0]][0]):
            continue
        if (
            not ex.keeps_order(node, b.shape)
            and a.count == b.count
            and not used_so(at, faces, node, family, same)
        ):
            continue
        for face in faces:
            at.decided[face] = node, why


def _as_in_memory(at: LayoutState, faces: Sequence[Face], family: Family) -> bool:
    """Decide for tensors that on one side stand as a kernel library lays them out, where their
    elements say how.
    """
    ours, theirs = (
        has_mark(call, Mark.MEMORY_ORDER) for call in at.calls(at.pairs[family[faces[0]][0]])
    )
    if not (ours or theirs):
        return False
    found = {}
    for face in faces:
        shape, arrays = at.records(face)[1].shape, at.arrays(face)
        possible = [
            X,
            *(
                node
                for undo, may in ((True, theirs), (False, ours))
                if may
                for node in in_memory(shape, undo=undo)
            ),
        ]
        best = (
            clear_best([distance(arrays[0], applied(node, arrays[1])) for node in possible])
            if arrays is not None
            else None
        )
        if best:
            found[face] = (
                possible[best],
                "as its kernel library lays it out in memory, confirmed on data",
            )
    at.decided.update(found)
    return len(found) == len(faces)


def _as_channels(at: LayoutState, faces: Sequence[Face], family: Family) -> list[Face]:
    """Decide for tensors whose channels lie as those of a weight beside them, all or head by head.
    Returns the others.
    """
    beside = {face: nodes for face in faces if (nodes := _beside(at, face, family[face][0]))}
    clear: dict[Face, ex.Node] = {}
    blurred: list[Face] = []
    for face, nodes in beside.items():
        arrays = at.arrays(face)
        if arrays is None or resembles(*arrays):
            continue
        best = clear_best([distance(arrays[0], applied(node, arrays[1])) for node in nodes])
        if best is not None and nodes[best] is not X:
            clear[face] = nodes[best]
        else:
            blurred.append(face)
    # Behind a fault nothing agrees: then as the siblings, where there is one order only.
    if 2 * len(clear) >= len(beside):
        clear.update((face, beside[face][0]) for face in blurred if len(beside[face]) == 1)
    at.decided.update(
        (face, (node, "as the channels of a weight beside it")) for face, node in clear.items()
    )
    return [face for face in faces if face not in clear]


def _beside(at: LayoutState, face: Face, call: int) -> list[ex.Node]:
    """The orders of channels that weights in the same module, or in this one, have, as far as they
    fit this tensor.
    """
    scope, shape = at.reference.calls[call].scope, at.records(face)[1].shape
    nodes: list[ex.Node] = []
    for places in (
        at.channel_orders.get(scope.rpartition(".")[0]) or at.channel_orders.get(scope) or ()
    ):
        n, order = (shape[-1] if len(shape) > 1 else 0), np.array(places)
        if n > 1 and len(order) > n and len(order) % n == 0:
            heads = order.reshape(-1, n) - np.arange(0, len(order), n)[:, None]
            order = heads[0] if (heads == heads[0]).all() else order
        if len(order) == n and sorted(order.tolist()) == list(range(n)):
            nodes.append(permutations.taken(X, shape, -1, order))
    return nodes


def _may_be_turned(at: LayoutState, face: Face) -> bool:
    """Do these differ by much, although their figures are alike?"""
    a, b = at.records(face)
    if a.statistics is not None and b.statistics is not None:
        x, y = a.statistics.norm, b.statistics.norm
        if x is None or y is None or not math.isclose(x, y, rel_tol=AGREES):
            return False
    if not turned(b.shape):
        return False
    arrays = at.arrays(face)
    return arrays is not None and not resembles(*arrays)


def _may_be_left_out(at: LayoutState, face: Face, call: int) -> bool:
    """May a part of the target's tensor be left out: is it made of what the reference's weight has
    not, or filled with one value?
    """
    for slot in at.pairs[call].slots:
        if is_param(slot.reference_slot):
            a, b = at.records((slot.reference_record, slot.target_record))
            if a.count < b.count and (slot.reference_record, slot.target_record) in at.decided:
                return True
    arrays = at.arrays(face)
    if arrays is None:
        return False
    left = arrays[1].size - arrays[0].size
    values, counts = np.unique(arrays[1], return_counts=True)
    return bool(
        counts.max() >= left
        and np.count_nonzero(arrays[0] == values[counts.argmax()]) <= counts.max() - left
    )


def _chosen(at: LayoutState, faces: Sequence[Face], possible: Sequence[ex.Node]) -> ex.Node | None:
    """The way that the elements of a few siblings agree on."""
    if len(possible) == 1 and ex.keeps_order(possible[0], at.records(faces[0])[1].shape):
        return possible[0]
    votes: Counter[int] = Counter()
    for face in spread(faces):
        arrays = at.arrays(face)
        if arrays is None or not possible:
            continue
        best = clear_best([distance(arrays[0], applied(node, arrays[1])) for node in possible])
        if best is not None:
            votes[best] += 1
    return possible[votes.most_common(1)[0][0]] if votes else None
