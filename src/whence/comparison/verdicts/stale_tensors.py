"""Tensors that should have been made anew and are those of an earlier step: a message that came
late, a buffer that was sent before it was filled, a shard that nobody fetched again.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.errors import ElementsMissing
from whence.records import Call
from whence.records.slots import is_of_child, split_child
from whence.results import Verdict

_STEPS_BACK = 2
_TELLING = 8  # a tensor of fewer elements may come again by chance


class StaleTensors:
    """Looks for the tensor of a finding in the steps before."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._calls = {_key(call, call.step): call for call in paired.target.calls}

    def words(self, verdict: Verdict) -> str:
        """Of which earlier step the target's tensor is, "" where it is none of them."""
        place = self._place(verdict)
        if place is None:
            return ""
        call, slot = place
        now = _record(call, slot)
        for step in range(call.step - 1, max(call.step - 1 - _STEPS_BACK, -1), -1):
            if now is not None and self._is_that_of(step, call, slot, now):
                return f"it is bitwise that of step {step}: stale"
        return ""

    def _place(self, verdict: Verdict) -> tuple[Call, str] | None:
        """The target's call and slot of a finding, of a child of it where it is one's."""
        index, slot = verdict.pair, verdict.slot
        if is_of_child(slot):
            child, slot = split_child(slot)
            kids = self._paired.kids.get(self._paired.plan.pairs[index].reference, [])
            below = self._paired.pair_of.get(kids[child]) if child < len(kids) else None
            if below is None:
                return None
            index = below
        pair = self._paired.slot(index, slot)
        if pair is None:
            return None
        return self._paired.target.calls[self._paired.plan.pairs[index].target], pair.target_slot

    def _is_that_of(self, step: int, call: Call, slot: str, now: int) -> bool:
        """Is a tensor of a call bitwise what the call left in a slot in an earlier step?"""
        target, earlier = self._paired.target, self._calls.get(_key(call, step))
        before = _record(earlier, slot) if earlier is not None else None
        if before == now:
            return False
        try:
            a = target.array(now)
            b = (
                target.array(before)
                if before is not None
                else self._paired.left_out.target_elements(call, step, slot)
            )
        except ElementsMissing:
            return False
        if b is None or a.shape != b.shape or a.size < _TELLING or a.tobytes() != b.tobytes():
            return False
        return bool(np.any(a != a.reshape(-1)[0]))


def _record(call: Call, slot: str) -> int | None:
    return next((ref.record for ref in call.refs if ref.slot == slot), None)


def _key(call: Call, step: int) -> Hashable:
    return call.rank, call.root, step, call.micro, call.phase, call.scope, call.op, call.occurrence
