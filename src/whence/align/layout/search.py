"""Finds the layout of the target's tensors where it differs: flattened, transposed, padded,
channels permuted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.axes import X, applied, candidates, in_memory, orders, turned, ways
from whence.align.layout.distances import AGREES, clear_best, distance, resembles
from whence.align.layout.layout_state import Family, LayoutState, TensorPair, is_constant
from whence.align.layout.refuted_orders import (
    is_equal,
    is_read_unmoved,
    is_refuted,
    undo_moves_of_equal_parameters,
)
from whence.align.module_names import starred
from whence.align.plan_editor import READ, spread, voted
from whence.dtypes import Array
from whence.records import Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_output, is_param, param_name, slot_kind
from whence.results import Plan, SlotPair


def laid_out(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Bring the target's tensors to their partners' axes. Reads a few tensors of each family of
    siblings.
    """
    state = LayoutState(reference, target, plan)
    _pair_leftovers(state)
    parameters(state)
    activations(state)
    undo_moves_of_equal_parameters(state)
    state.notes += _sentences(state)
    return state.laid_out()


def _pair_leftovers(state: LayoutState) -> None:
    """Pair slots that are unpaired on both sides where exactly one fits by its shape and the
    elements agree.
    """
    agreeing: dict[tuple[object, ...], bool] = {}
    for pair in list(state.pairs.values()):
        if not pair.only_reference or not pair.only_target:
            continue
        call, target_call = state.calls(pair)
        records, target_records = (c.by_slot for c in (call, target_call))
        slots, free = list(pair.slots), list(pair.only_target)
        for name in pair.only_reference:
            kind = name.partition(".")[0]
            fits = [
                f
                for f in free
                if f.partition(".")[0] == kind
                and f in target_records
                and name in records
                and _fit(state, (records[name], target_records[f]))
            ]
            if len(fits) != 1:
                continue
            tensors = records[name], target_records[fits[0]]
            shapes = tuple(r.shape for r in state.records(tensors))
            key = (starred(call.scope), starred(target_call.scope), name, fits[0], shapes)
            if not agreeing.get(key):
                agreeing[key] = state.agree(tensors)
            if agreeing[key]:
                slots.append(SlotPair(name, fits[0], *tensors))
                free.remove(fits[0])
        if len(slots) != len(pair.slots):
            state.set_slots(call.id, slots)


def _fit(state: LayoutState, tensors: TensorPair) -> bool:
    a, b = state.records(tensors)
    return dtypes.is_floating(a.dtype) == dtypes.is_floating(b.dtype) and bool(
        ways(b.shape, a.shape)
    )


def _sentences(state: LayoutState) -> list[str]:
    """Sentences on how many tensors were brought to other axes, and which parts of parameters are
    left out.
    """
    counts = Counter(_brief(str(node)) for node, _ in state.decided.values())
    listed = ", ".join(f"{how} ({count})" for how, count in counts.most_common(3)) + (
        ", ..." if len(counts) > 3 else ""
    )
    total = sum(counts.values())
    out: dict[str, None] = (
        {f"{total} tensors of the target were brought to the reference's axes: {listed}": None}
        if counts
        else {}
    )
    for pair in state.pairs.values():
        for slot in pair.slots:
            tensors = slot.records
            if is_param(slot.reference_slot) and tensors in state.decided:
                a, b = state.records(tensors)
                if a.count < b.count:
                    name = f"{state.target.calls[pair.target].scope}.{param_name(slot.target_slot)}"
                    out[
                        f"{name} of the target is {list(b.shape)}, of the reference "
                        f"{list(a.shape)}: the rest was left out"
                    ] = None
    return list(out)


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]} ..."


# The layout of the target's activations, by shapes, elements, neighbouring weights and the calls
# that read them.


def activations(state: LayoutState) -> None:
    """Decide the layout of every tensor that is not a parameter and whose layout differs."""
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
        is_known = node is not None  # else a fault before it may be why no elements agree
        if not is_known and not same_shape and possible:
            node, why = possible[0], "from shapes alone"
        if node is None or node is X:
            continue
        if a.count < b.count and not _may_be_left_out(state, pairs[0], family[pairs[0]][0]):
            pairs = [tensors for tensors in pairs if _is_padded(state, tensors, node, family)]
        if not ex.keeps_order(node, b.shape) and (
            is_known and not used_so(state, pairs, node, family, same_shape)
            if a.count == b.count
            else not is_known
        ):
            continue
        for tensors in pairs:
            state.decided[tensors] = node, why


def _lie_as_said(state: LayoutState, tensors: TensorPair, call: int) -> bool:
    """Whether both tensors have one shape and belong to nodes of one type, so that ONNX fixes the
    order of their axes.
    """
    a, b = state.records(tensors)
    calls = state.calls(state.pairs[call])
    return (
        a.shape == b.shape
        and calls[0].op_type == calls[1].op_type
        and all(has_mark(c, Mark.OPSET) for c in calls)
    )


def _as_in_memory(state: LayoutState, pairs: Sequence[TensorPair], family: Family) -> bool:
    """Decide, by their elements, for tensors that one side stores in a kernel library's memory
    order. Returns whether all of them were decided.
    """
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
    """Decide for tensors whose channels are permuted as in a neighbouring weight. Returns the
    others.
    """
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
    # After a fault no permutation agrees: such tensors follow their siblings, where only one
    # permutation is known.
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
    """Channel permutations found in weights of the enclosing module, or of this one, that fit this
    tensor.
    """
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
    """The same permutation for a tensor with an axis of heads, such as caches and attention
    weights, provided that it keeps the channels of each head together.
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
    """Whether two tensors differ by much although their norms are alike, and their shape allows a
    permutation of axes.
    """
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
    """Whether a part of the target's tensor may be left out: it is padding, or made by rows of a
    parameter that only the target has.
    """
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


def _is_padded(state: LayoutState, tensors: TensorPair, node: ex.Node, family: Family) -> bool:
    """Whether the target's tokens go on behind the reference's with one token that fills them up,
    in this tensor, such as an embedding, or in another of its model's call with as many tokens.
    """
    a, b = (record.shape for record in state.records(tensors))
    longer = [axis for axis, (n, m) in enumerate(zip(a, b, strict=False)) if n != m]
    if len(a) != len(b) or len(longer) != 1:
        return False
    axis = longer[0]
    _, call = state.calls(state.pairs[family[tensors][0]])
    key = call.root, call.rank, call.step, a[axis], b[axis]
    if key not in state.padded and (arrays := state.arrays(tensors)) is not None:
        rest = np.moveaxis(arrays[1], axis, 0)[a[axis] :]
        is_filled = len(rest) > 1 and bool((rest == rest[0]).all())
        if is_filled and resembles(arrays[0], applied(node, arrays[1])):
            state.padded.add(key)
    return key in state.padded


def _chosen(
    state: LayoutState, pairs: Sequence[TensorPair], possible: Sequence[ex.Node]
) -> ex.Node | None:
    """The expression on which the elements of a few siblings agree; None without one."""
    if len(possible) == 1 and ex.keeps_order(possible[0], state.records(pairs[0])[1].shape):
        return possible[0]
    best = voted(pairs, partial(_nearest, state, possible)) if possible else None
    return possible[best] if best is not None else None


def _nearest(state: LayoutState, possible: Sequence[ex.Node], tensors: TensorPair) -> int | None:
    """The index of the expression that makes the two tensors agree by far the best; None without
    one or without elements.
    """
    arrays = state.arrays(tensors)
    if arrays is None:
        return None
    return clear_best([distance(arrays[0], applied(node, arrays[1])) for node in possible])


# The layout of the target's parameters: rows, columns or axes in another order than in the
# reference.
#
# Parameters come first: equal elements after a change of layout are proof, and the permutation of a
# weight's rows is that of its bias and its outputs. Siblings of one starred name
# (`layers.*.q_proj`) share one layout, so that a faulty tensor among them is not explained away. A
# permutation is accepted only where tensors computed from it agree again: a permuted weight may be
# a fault of the target or a layout.


@dataclass(frozen=True, slots=True)
class Order:
    """The layout of a target parameter. kind: "axes" (all axes rearranged), "rows" (output channels
    permuted) or "columns" (input channels permuted).

    places: the permutation of the rows or columns.
    """

    kind: str
    node: ex.Node
    places: tuple[int, ...] = ()


def layout_of(reference: Array, target: Array) -> Order | None:
    """The layout by which a target parameter equals the reference's; None where none is found."""
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
    """Decide for permuted parameters, and for the tensors that share their channels."""
    decisions = [
        (layouts, family)
        for family in state.families(("param",))
        if (layouts := _orders_of(state, family))
    ]
    # The order of inputs shows in the call's outputs; once the inputs are in place, they show what
    # the order of the outputs leads to.
    decisions.sort(key=lambda item: next(iter(item[0].values())).kind == "rows")
    for suggested, family in decisions:
        layouts = _unrefuted(state, suggested, family)
        if _legitimate(state, layouts, family):
            _order(state, layouts, family)


def _unrefuted(
    state: LayoutState, layouts: dict[TensorPair, Order], family: Family
) -> dict[TensorPair, Order]:
    """The layouts that no other tensor along the same axis contradicts.

    If more than half of the siblings are read by weights that were not permuted, all row
    permutations of the family are dropped. If only a few are, those weights are at fault.
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
    """The layout of each parameter of a family; {} where they have the reference's layout or none
    is known.
    """
    pairs = list(family)
    suspects = [tensors for tensors in pairs if _suspect(state, tensors)]
    # If only a few of the weights of one name differ, these few are at fault.
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
    """Whether these parameters may hold the same elements in another order."""
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
    """Number of parameters with the same starred name, slot and shape that are equal bit by bit.
    The shape counts too: in a sequence a norm has the starred name of a neighbouring matrix and
    tells nothing of its layout; nor does a table of words tell how a product reads the same table.
    """
    (tensors, (call, slot)) = next(iter(family.items()))
    shape, other = (record.shape for record in state.records(tensors))
    scope = starred(state.reference.calls[call].scope)
    return state.equal_parameters[scope, slot.reference_slot, shape] if shape == other else 0


def _layout_of(state: LayoutState, tensors: TensorPair) -> Order | None:
    arrays = state.arrays(tensors)
    return layout_of(*arrays) if arrays is not None else None


def _by_shape(state: LayoutState, pairs: Iterable[TensorPair]) -> None:
    """Where the elements tell nothing, decide for the only layout that the shapes allow, if it
    drops no element.
    """
    for tensors in pairs:
        a, b = state.records(tensors)
        nodes = ways(b.shape, a.shape)
        if a.shape != b.shape and len(nodes) == 1 and a.count == b.count:
            state.decided[tensors] = nodes[0], "the only way the shapes allow"


def _legitimate(state: LayoutState, layouts: dict[TensorPair, Order], family: Family) -> bool:
    """Whether results computed with these parameters agree, so that the permutation is a layout and
    not a fault.
    """
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
                    and not is_equal(a, b)  # constant, or not along the rows
                ):
                    state.decided[near] = (
                        permutations.taken(X, b.shape, 0, places),
                        "as the rows of the weight",
                    )
                elif (
                    kind == ("output" if order.kind == "rows" else "input")
                    and b.shape
                    and near not in parameters  # an operator may read parameters as inputs
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
    """Decide that the channels of an input or output are permuted like the rows or columns of the
    weight. is_inside: the call is an operator inside the module, which reads and makes other
    tensors too; then the elements must confirm it.
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


# Confirms the permutation of a tensor by checking that the calls that read it agree.

# Limits of the error of outputs after a permutation: this many times the permuted tensor's own
# error, and twice the largest error that such a tensor may have.
_AS_NEAR = 10.0
_NEAR = 0.05


def outputs_agree(state: LayoutState, call: int) -> bool:
    """Whether an output of this reference call agrees with its partner."""
    outputs = [s for s in state.pairs[call].slots if is_output(s.reference_slot)]
    return any(state.agree(s.records) for s in outputs)


def follows(state: LayoutState, maker: int) -> bool:
    """Whether a tensor that did not exist before this call agrees: an input of a later sibling, or
    an output of the parent.

    Inputs that the module itself reads in later calls do not count: what a recurrent cell reads at
    every step need not depend on this call.
    """
    call = state.reference.calls[maker]
    known_records: set[int] = set()
    earlier: set[int] = set()
    new: set[TensorPair] = set()
    for sibling in state.kids_reference.get(call.parent, ()):
        later = state.reference.calls[sibling].order > call.order
        elsewhere = state.reference.calls[sibling].scope != call.scope
        for slot in state.pairs[sibling].slots if sibling in state.pairs else ():
            if (
                is_input(slot.reference_slot)
                and later
                and elsewhere
                and slot.reference_record not in known_records
            ):
                new.add(slot.records)
            if not is_param(slot.reference_slot):
                known_records.add(slot.reference_record)
                if not later:
                    earlier.add(slot.reference_record)
    parent = state.pairs.get(call.parent)
    if parent is not None:
        outputs = (
            s
            for s in parent.slots
            if is_output(s.reference_slot) and s.reference_record not in earlier
        )
        new.update(s.records for s in outputs)
    return any(
        state.resemble(tensors) for tensors in new if not is_constant(state.records(tensors)[0])
    )


def used_so(
    state: LayoutState, pairs: Sequence[TensorPair], node: ex.Node, family: Family, same_shape: bool
) -> bool:
    """Whether the calls that read this tensor agree; with a wrong permutation they would not."""
    is_read = False
    for tensors in spread(pairs):
        readers = state.readers.get(tensors[0], [])
        if is_input(family[tensors][1].reference_slot):
            readers = list(dict.fromkeys([family[tensors][0], *readers]))
        is_read |= bool(readers)
        if same_shape:
            # Only the elements suggest this permutation, so the outputs must be about as near as
            # the tensor is once permuted.
            arrays = state.arrays(tensors)
            near = distance(arrays[0], applied(node, arrays[1])) if arrays is not None else math.inf
            if near > _NEAR:
                continue
            call = family[tensors][0]
            as_near = all(
                _output_distance(state, reader) <= max(_AS_NEAR * near, 2 * _NEAR)
                for reader in readers
            )
            if _inputs_laid_so(state, call, node) or (
                as_near and (readers or follows(state, call))
            ):
                return True
        elif readers and _are_nodes(state, readers):
            # All operators that read it were captured, and all must agree: a later sum could hide
            # that one of them does not.
            if all(outputs_agree(state, reader) for reader in readers):
                return True
        elif any(outputs_agree(state, reader) for reader in readers) or follows(
            state, family[tensors][0]
        ):
            return True
    return not is_read and not same_shape


def _are_nodes(state: LayoutState, calls: Sequence[int]) -> bool:
    """Whether these calls of the reference are nodes of an ONNX graph."""
    return all(has_mark(state.reference.calls[call], Mark.OPSET) for call in calls)


def _inputs_laid_so(state: LayoutState, call: int, node: ex.Node) -> bool:
    """Whether an input of this call was decided to have the same layout."""
    inputs = (s for s in state.pairs[call].slots if is_input(s.reference_slot))
    layouts = (state.decided.get(s.records) for s in inputs)
    return any(layout is not None and layout[0] == node for layout in layouts)


def _output_distance(state: LayoutState, call: int) -> float:
    """The largest distance of an output of this call from its partner, each in its best order of
    axes.
    """
    out = 0.0
    for slot in state.pairs[call].slots:
        arrays = state.arrays(slot.records) if is_output(slot.reference_slot) else None
        if arrays is not None:
            nodes = candidates(arrays[1].shape, arrays[0].shape)
            out = max(
                out,
                min(
                    (distance(arrays[0], applied(node, arrays[1])) for node in nodes),
                    default=math.inf,
                ),
            )
    return out
