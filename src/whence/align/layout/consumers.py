"""Confirms a reordering of a tensor by checking that the calls that read it agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence.align import dims as ex
from whence.align.layout.axes import applied, candidates
from whence.align.layout.distances import distance
from whence.align.layout.layout_state import Family, LayoutState, TensorPair
from whence.align.plan_editor import spread
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_output, is_param

# times as far as a turned tensor may be what is made of it, or twice as far as such a tensor may be
# at all
_AS_NEAR = 10.0
_NEAR = 0.05


def outputs_agree(state: LayoutState, call: int) -> bool:
    """Does an output of this call of the reference agree with its partner?"""
    outputs = [s for s in state.pairs[call].slots if is_output(s.reference_slot)]
    return any(state.agree(s.records) for s in outputs)


def follows(state: LayoutState, maker: int) -> bool:
    """Does a tensor agree that was not there before this call: what a later sibling reads, or the
    parent returns?

    Not what the module itself is given again: what a recurrent cell reads at every step need not
    have been made with it.
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
    return any(state.resemble(tensors) for tensors in new if not _constant(state, tensors[0]))


def _constant(state: LayoutState, record: int) -> bool:
    """Has it one value only? A first hidden state agrees with anything."""
    figures = state.reference.records[record].statistics
    return figures is not None and figures.min == figures.max


def used_so(
    state: LayoutState, pairs: Sequence[TensorPair], node: ex.Node, family: Family, same_shape: bool
) -> bool:
    """Do the readers of this tensor agree? In a wrong order they would not."""
    is_read = False
    for tensors in spread(pairs):
        readers = state.readers.get(tensors[0], [])
        if is_input(family[tensors][1].reference_slot):
            readers = list(dict.fromkeys([family[tensors][0], *readers]))
        is_read |= bool(readers)
        if same_shape:
            # Nothing but the elements speaks for another order: what is made of it must be as near
            # as it is then.
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
            # All operators that read it were captured: a sum behind them may hide what they do.
            if all(outputs_agree(state, reader) for reader in readers):
                return True
        elif any(outputs_agree(state, reader) for reader in readers) or follows(
            state, family[tensors][0]
        ):
            return True
    return not is_read and not same_shape


def _are_nodes(state: LayoutState, calls: Sequence[int]) -> bool:
    """Are these calls of the reference nodes of an ONNX graph?"""
    return all(has_mark(state.reference.calls[call], Mark.OPSET) for call in calls)


def _inputs_laid_so(state: LayoutState, call: int, node: ex.Node) -> bool:
    """Was what this call is given laid in this order too?"""
    inputs = (s for s in state.pairs[call].slots if is_input(s.reference_slot))
    layouts = (state.decided.get(s.records) for s in inputs)
    return any(layout is not None and layout[0] == node for layout in layouts)


def _output_distance(state: LayoutState, call: int) -> float:
    """The largest distance of an output from its partner, in the best order of axes."""
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
