"""What a policy tolerates of tensors without calls: selected by the tensor's own name, or by the module that it faces."""

from __future__ import annotations

import msgspec
import numpy as np

from whence.comparison.verdicts.declared import Declaring
from whence.dtypes import Array
from whence.judge.policy import Entry
from whence.records import Call
from whence.results import SlotPair, Verdict


class Tolerated:
    """Applies `tolerance` entries; what else can be declared is of calls, which such tensors have none of."""

    def __init__(self, declaring: Declaring) -> None:
        self._declaring = declaring

    def entry(self, slot: SlotPair, call: Call, label: Call) -> Entry | None:
        """The last entry that speaks of a tensor, as `call` of the reference or `label` of the target has it."""
        policy = self._declaring.policy
        pairs = [(call, label), (label, call)]
        found = (policy.of(a.scope, (a.op_type, b.op_type)).get("tolerance") for a, b in pairs)
        fits = (e for e in found if e is not None and (e.covers_slot(slot.reference_slot) or e.covers_slot(slot.target_slot)))
        entry = max(fits, key=lambda e: e.number, default=None)
        if entry is not None:
            self._declaring.looked(entry)
        return entry

    def declared(self, verdict: Verdict, entry: Entry, call: Call, error: float | None) -> Verdict:
        """The verdict of a tensor whose error the entry allows. error: relative 2-norm."""
        sentence = f"{entry}; {verdict.sentence}"
        self._declaring.met(entry, call, error)
        return msgspec.structs.replace(verdict, verdict="declared", confidence="", cause="", score=None, sentence=sentence)


def allows(entry: Entry, made: Array, right: Array) -> bool:
    """Is what was made as near to what is right as an entry says? Where one of them is not finite, both must be, and alike."""
    if entry.ignore:
        return True
    if made.shape != right.shape:
        return False
    y, r = (a.astype(np.float64).reshape(-1) for a in (made, right))
    finite = np.isfinite(r)
    if not np.array_equal(y[~finite], r[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return False
    y, r = y[finite], r[finite]
    if entry.rel_l2 is not None:
        return bool(np.linalg.norm(y - r) <= entry.rel_l2 * np.linalg.norm(r))
    return bool((np.abs(y - r) <= entry.atol + entry.rtol * np.abs(r)).all())
