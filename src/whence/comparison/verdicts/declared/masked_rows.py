"""Rows of padding that a policy leaves out of the comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.semantics import PLAIN, Semantics
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge.policy import Entry, Policy
from whence.records import Call, Record, Run
from whence.records.region import outwards
from whence.records.slots import is_input, is_of_child, is_output, split_child
from whence.results import Plan, SlotPair

_DECLARE = "skip-masked-rows"
Keep = Callable[[str, tuple[int, ...]], Array | None]
"""(slot, shape) -> which elements count; None for all."""


class MaskedRows:
    """Knows which rows count in tensors for which a policy declares `skip-masked-rows`."""

    def __init__(self, policy: Policy, reference: Run, target: Run, plan: Plan) -> None:
        self._policy, self.reference, self.target = policy, reference, target
        self._masks: dict[tuple[int, int], Array] = {}
        for pair in plan.pairs:
            call, partner = reference.calls[pair.reference], target.calls[pair.target]
            entry = self._entry(call, partner)
            if entry is None:
                continue
            keep = self.keeper(call, partner, entry)
            for slot in pair.slots:
                name, shape = slot.reference_slot, reference.records[slot.reference_record].shape
                if (is_input(name) or is_output(name)) and entry.covers_slot(name):
                    mask = keep(name, shape)
                    if mask is not None and shape == target.records[slot.target_record].shape:
                        self._masks[slot.reference_record, slot.target_record] = mask

    def _entry(self, call: Call, partner: Call) -> Entry | None:
        return self._policy.of(call.scope, (call.op_type, partner.op_type)).get(_DECLARE)

    def error(
        self, slot: SlotPair, measure: Callable[[Array, Array], Any], u: float
    ) -> judge.PairError | None:
        """The error of a pair over its unmasked rows; None if no declaration masks it or it cannot
        be read. u: unit roundoff.
        """
        keep = self._masks.get((slot.reference_record, slot.target_record))
        if keep is None:
            return None
        try:
            reference, target = (
                self.reference.array(slot.reference_record),
                self.target.array(slot.target_record),
            )
        except ElementsMissing:
            return None
        if reference.shape != target.shape or reference.shape != keep.shape:
            return None
        records = (
            self.reference.records[slot.reference_record],
            self.target.records[slot.target_record],
        )
        return error_where(keep, (reference, target), records, measure, u)

    def keeper(self, call: Call, partner: Call, entry: Entry) -> Keep:
        """(slot, shape) -> the elements that count in a call's tensors, by the entry's mask."""
        visible = _visible(self.reference, call, entry.mask)
        if visible is None:
            visible = _visible(self.target, partner, entry.mask)

        def keep(slot: str, shape: tuple[int, ...]) -> Array | None:
            name = split_child(slot)[1] if is_of_child(slot) else slot
            return (
                along_rows(visible, shape)
                if visible is not None and entry.covers_slot(name)
                else None
            )

        return keep

    def semantics(self, call: Call, partner: Call) -> Semantics:
        """The reference's own semantics, without masked rows if that is declared."""
        entry = self._entry(call, partner)
        return Semantics(keep=self.keeper(call, partner, entry)) if entry is not None else PLAIN


def error_where(
    keep: Array,
    arrays: tuple[Array, Array],
    records: tuple[Record, Record],
    measure: Callable[[Array, Array], Any],
    u: float,
) -> judge.PairError:
    """The error of a pair of tensors over the elements that count."""
    x, y = (np.where(keep, array, array.dtype.type(0)) for array in arrays)
    if x.dtype == y.dtype and x.tobytes() == y.tobytes():
        return judge.PairError(0.0, exact=True, u=u)
    # The records' statistics are those of whole tensors, so no drift is taken from them.
    return dataclasses.replace(judge.error_of(measure(x, y), *records, u), drift=None)


def _visible(run: Run, call: Call, name: str) -> Array | None:
    """Boolean (batch, position), True for rows that count, from the mask with this name among the
    tensors of the call or of one around it; None if there is none.
    """
    for around in outwards(run.calls, call.id):
        for ref in around.refs:
            if ref.slot in (f"input.{name}", name):
                try:
                    return _as_rows(run.array(ref.record))
                except ElementsMissing:
                    return None
    return None


def _as_rows(mask: Array) -> Array | None:
    """Boolean (batch, position), True for rows that count: where the mask is not 0, or above -1000
    for an additive float mask; in a 4-D mask, positions that any query sees.
    """
    wide = mask.astype(np.float64)
    is_additive = dtypes.of(mask).kind == "float" and bool((wide < 0).any())
    counts = wide > -1e3 if is_additive else wide != 0
    if counts.ndim == 4:
        counts = counts.any((1, 2))
    if counts.ndim == 1:
        counts = counts[None]
    return counts if counts.ndim == 2 else None


def along_rows(visible: Array, shape: tuple[int, ...]) -> Array | None:
    """The mask broadcast to a tensor of this shape: (batch, ..., position, ...), with both axes
    flattened into the first, or (position, batch, ...). None if all count or the shape does not
    fit.
    """
    batch, positions = visible.shape
    if visible.all():
        return None
    if shape and shape[0] == batch:
        for axis in range(1, len(shape)):
            if shape[axis] == positions and not (axis == len(shape) - 1 and len(shape) > 2):
                spread = visible.reshape(
                    batch, *(positions if a == axis else 1 for a in range(1, len(shape)))
                )
                return np.broadcast_to(spread, shape)
    if shape and shape[0] == batch * positions:
        return np.broadcast_to(visible.reshape(-1, *([1] * (len(shape) - 1))), shape)
    if shape[:2] == (positions, batch):
        return np.broadcast_to(visible.T.reshape(*shape[:2], *([1] * (len(shape) - 2))), shape)
    return None
