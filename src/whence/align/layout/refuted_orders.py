"""Rejects a row permutation when other tensors along the same axis were not permuted.

A permutation of a module's output channels is a layout only where every tensor with this axis
agrees with it. Permuted rows of a weight beside a bias in its original order are a fault of the
weight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whence.align.layout.distances import resembles
from whence.align.layout.layout_state import LayoutState, TensorPair
from whence.align.layout.permutations import Order
from whence.records import Record
from whence.records.slots import is_input, is_output, is_param
from whence.results import SlotPair


def is_refuted(state: LayoutState, call: int, slot: SlotPair, places: Order) -> bool:
    """Whether another tensor of the module contradicts this permutation of a parameter's rows."""
    return _vector_stays(state, call, slot, places) or _mixes_groups(state, call, slot, places)


def is_equal(a: Record, b: Record) -> bool:
    """Whether two records are equal in shape, dtype and every bit."""
    return bool(a.hash) and a.hash == b.hash and a.shape == b.shape and a.dtype == b.dtype


def undo_moves_of_equal_parameters(state: LayoutState) -> None:
    """Drop the layouts decided for a module where they would make a parameter differ that is equal
    as recorded.
    """
    for calls in state.modules.values():
        tensors = [
            (is_param(s.reference_slot), s.records)
            for call in calls
            for s in state.pairs[call].slots
        ]
        moved = [
            pair
            for is_parameter, pair in tensors
            if is_parameter and pair in state.decided and is_equal(*state.records(pair))
        ]
        if moved:
            for pair in dict.fromkeys(p for _, p in tensors):
                state.decided.pop(pair, None)


def _vector_stays(state: LayoutState, call: int, slot: SlotPair, places: Order) -> bool:
    """Whether a bias or another vector of the module's outputs is equal without the permutation."""
    slots = [
        s
        for sibling in state.modules[state.module(state.pairs[call])]
        for s in state.pairs[sibling].slots
        if is_param(s.reference_slot)
    ]
    matrices = {
        s.reference_slot
        for s in slots
        if len(state.reference.records[s.reference_record].shape) > 1
    }
    shape = state.reference.records[slot.reference_record].shape
    # A vector as long as the inputs may belong to the inputs, and one beside several weights to
    # another weight.
    is_alone = len(matrices) == 1 and shape[0] != shape[1]
    return any(
        _stays(state, s.records, places)
        for s in slots
        if is_alone
        or (
            "bias" in s.reference_slot
            and s.reference_slot.replace("bias", "weight") == slot.reference_slot
        )
    )


def _stays(state: LayoutState, tensors: TensorPair, places: Order) -> bool:
    """Whether this vector is equal on both sides and would change under the permutation."""
    a, b = state.records(tensors)
    if a.shape != (len(places),) or not is_equal(a, b):
        return False
    array = state.array("reference", tensors[0])
    if array is not None:
        return not np.array_equal(array, array[places], equal_nan=array.dtype.kind in "fc")
    return a.statistics is not None and a.statistics.min != a.statistics.max


def _mixes_groups(state: LayoutState, call: int, slot: SlotPair, places: Order) -> bool:
    """Whether the permutation gives rows of a grouped convolution other input channels than before.

    Whole groups may be permuted only where the channels of the input are permuted too.
    """
    shape = state.reference.records[slot.reference_record].shape
    if len(shape) < 3 or shape[0] != len(places):
        return False
    axis = 1 - len(shape)
    for s in state.pairs[call].slots:
        a, b = state.records(s.records)
        if not is_input(s.reference_slot) or len(a.shape) < -axis or a.shape != b.shape:
            continue
        groups, rest = divmod(a.shape[axis], shape[1])
        if rest or groups < 2 or len(places) % groups:
            continue
        sources = places.reshape(groups, -1) // (len(places) // groups)
        if (sources != sources[:, :1]).any():
            return True
        if (sources[:, 0] != np.arange(groups)).any() and is_equal(a, b):
            return not _repeats(state, s.records, sources[:, 0], axis)
    return False


def _repeats(state: LayoutState, tensors: TensorPair, groups: Order, axis: int) -> bool:
    """Whether this input stays the same when its groups of channels are permuted like this."""
    array = state.array("reference", tensors[0])
    if array is None:
        return False
    channels = np.moveaxis(array, axis, 0)
    parts = channels.reshape(len(groups), -1)
    return bool(np.array_equal(parts, parts[groups]))


def is_read_unmoved(state: LayoutState, call: int, places: Order) -> bool:
    """Whether later modules read these outputs with weights that were not permuted, so that nothing
    undoes the permutation.

    Modules without parameters in between are followed through, unless their output agrees.
    """
    if any(_receives_moved(state, reader, places) for reader in _later_siblings(state, call)):
        return True
    frontier = _tensors(state, call, is_output)
    visited = set(frontier)
    while frontier:
        tensors = frontier.pop()
        for reader in state.readers.get(tensors[0], []):
            slots = state.pairs[reader].slots
            if not any(is_input(s.reference_slot) and s.records == tensors for s in slots):
                continue
            outputs, parameters = (
                _tensors(state, reader, is_output),
                _tensors(state, reader, is_param),
            )
            if any(state.resemble(pair) for pair in outputs):
                continue
            if _keeps_columns(state, parameters, outputs, places):
                return True
            if not parameters:
                frontier += [pair for pair in outputs if pair not in visited]
                visited.update(outputs)
    return False


def _later_siblings(state: LayoutState, call: int) -> list[int]:
    maker = state.reference.calls[call]
    return [
        sibling
        for sibling in state.kids_reference.get(maker.parent, ())
        if sibling in state.pairs
        and state.reference.calls[sibling].order > maker.order
        and state.reference.calls[sibling].scope != maker.scope
    ]


def _receives_moved(state: LayoutState, reader: int, places: Order) -> bool:
    """Whether code between modules passes the channels, permuted, to parameters that were not
    permuted.
    """
    outputs, parameters = _tensors(state, reader, is_output), _tensors(state, reader, is_param)
    if not _keeps_columns(state, parameters, outputs, places):
        return False
    # The channels of a matrix product lie last, those of a convolution before the spatial axes,
    # those beside a vector in either place.
    dims = max(len(state.reference.records[r].shape) for r, _ in parameters)
    for s in state.pairs[reader].slots:
        tensors = s.records
        a, b = state.records(tensors)
        if not is_input(s.reference_slot) or a.shape != b.shape or is_equal(a, b):
            continue
        axes = {1 - len(a.shape), -1} if dims < 2 else {1 - dims if dims > 2 else -1}
        axes = {i for i in axes if 0 < -i <= len(a.shape) and a.shape[i] == len(places)}
        arrays = state.arrays(tensors) if axes else None
        if (
            arrays is not None
            and not resembles(*arrays)
            and any(resembles(arrays[0], np.take(arrays[1], places, i)) for i in axes)
            and not any(state.resemble(pair) for pair in outputs)
        ):
            return True
    return False


def _tensors(state: LayoutState, call: int, is_meant: Callable[[str], bool]) -> list[TensorPair]:
    """The pairs of tensors in those slots of a call for which `is_meant` is true."""
    return [s.records for s in state.pairs[call].slots if is_meant(s.reference_slot)]


def _keeps_columns(
    state: LayoutState, parameters: list[TensorPair], outputs: list[TensorPair], places: Order
) -> bool:
    """Whether a parameter of a reader has this axis and is equal without the permutation."""
    for tensors in parameters:
        a, b = state.records(tensors)
        if len(a.shape) < 2 or a.shape[1] != len(places) or not is_equal(a, b):
            continue
        axis = -1 if len(a.shape) == 2 else 1 - len(a.shape)
        for output in outputs:
            shape = state.reference.records[output[0]].shape
            if len(shape) >= -axis and shape[axis] == a.shape[0]:
                return True
    are_vectors = all(len(state.reference.records[r].shape) < 2 for r, _ in parameters)
    return are_vectors and any(_stays(state, tensors, places) for tensors in parameters)
