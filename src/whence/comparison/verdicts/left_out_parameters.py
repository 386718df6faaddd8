"""Parameters that a change of the others left out.

A model that is folded or smoothed holds other parameters and computes the same, if every
parameter of a channel takes part: a norm's weight and its bias are both divided by what the next
layer is multiplied by. Where one was left out, the model is right again with it changed as its
siblings were; then it is the fault, and what the others changed is another form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call
from whence.records.slots import is_param, param_name

_CLOSE = 1e-3  # a channel follows a factor up to this part of its size


class LeftOut(NamedTuple):
    """A parameter (slot, record of the reference) that both runs hold alike, and what it would be
    if it had been changed as its sibling was.
    """

    slot: str
    record: int
    changed: Array
    sibling: str

    @property
    def in_words(self) -> str:
        """What is wrong."""
        names = param_name(self.sibling), param_name(self.slot)
        return "{} is changed channel by channel, and {} is not changed with it".format(*names)


def _changed(paired: PairedRuns, call: Call) -> dict[str, tuple[int, Array, Array]]:
    """Parameters of a call that differ: record, the reference's, the target's, by slot."""
    return {
        slot: (pair.reference_record, *both)
        for slot, pair in paired.slots[paired.pair_of[call.id]].items()
        if is_param(slot) and not paired.is_equal(pair)
        if (both := paired.arrays(pair)) is not None and both[0].shape == both[1].shape
    }


def patches(paired: PairedRuns, call: Call) -> dict[int, Array]:
    """The target's parameters of a call that differ, by record of the reference."""
    return {record: target for record, _, target in _changed(paired, call).values()}


def left_out(paired: PairedRuns, call: Call) -> Iterator[LeftOut]:
    """The parameters of a call that may have been left out of a change of its others."""
    changed = _changed(paired, call)
    for slot, pair in paired.slots[paired.pair_of[call.id]].items():
        if not is_param(slot) or slot in changed or (both := paired.arrays(pair)) is None:
            continue
        for sibling, (_, reference, target) in changed.items():
            moved = _moved_alike(both[0], reference, target)
            if moved is not None and not np.array_equal(moved, both[0]):
                yield LeftOut(slot, pair.reference_record, moved, sibling)


def _moved_alike(array: Array, reference: Array, target: Array) -> Array | None:
    """An array of one element a channel, times the factors that make another parameter's channels
    of the reference's; None where these are no multiples.
    """
    if array.ndim != 1 or not dtypes.of(array).is_floating:
        return None
    axes = (k for k in (0, -1) if reference.ndim and reference.shape[k] == array.size)
    for axis in axes:
        before, after = (
            np.moveaxis(a, axis, 0).astype(np.float64).reshape(array.size, -1)
            for a in (reference, target)
        )
        with np.errstate(all="ignore"):
            factors = (before * after).sum(axis=1) / (before * before).sum(axis=1)
        rest = np.linalg.norm(after - factors[:, None] * before)
        if np.isfinite(factors).all() and rest <= _CLOSE * np.linalg.norm(after):
            moved: Array = (array.astype(np.float64) * factors).astype(array.dtype)
            return moved
    return None
