"""Applies tolerances that a policy declares for single tensors."""

from __future__ import annotations

import numpy as np

from whence.comparison.verdicts.declared.ledger import DeclarationLedger, sqnr_of
from whence.dtypes import Array
from whence.judge.policy import Entry, Policy
from whence.records import Call
from whence.results import SlotPair, Verdict, VerdictKind


class TensorTolerances:
    """Applies `tolerance` entries to tensors whose calls are unknown; all other kinds of entries
    apply to calls.
    """

    def __init__(self, policy: Policy, ledger: DeclarationLedger) -> None:
        self._policy, self._ledger = policy, ledger

    def entry(self, slot: SlotPair, call: Call, label: Call) -> Entry | None:
        """The last entry that applies to a tensor, known as `call` in the reference or as `label`
        in the target.
        """
        entries = (
            self._policy.of(a.scope, (a.op_type, b.op_type)).get("tolerance")
            for a, b in ((call, label), (label, call))
        )
        fitting = (
            e
            for e in entries
            if e is not None
            and (e.covers_slot(slot.reference_slot) or e.covers_slot(slot.target_slot))
        )
        entry = max(fitting, key=lambda e: e.number, default=None)
        if entry is not None:
            self._ledger.consult(entry)
        return entry

    def declared(self, verdict: Verdict, entry: Entry, call: Call, error: float | None) -> Verdict:
        """The verdict of a tensor whose error the entry allows. error: relative 2-norm."""
        self._ledger.apply(entry)
        self._ledger.met(entry, call, sqnr_of(error))
        return verdict.withdrawn(VerdictKind.DECLARED, f"{entry}; {verdict.sentence}")


def allows(entry: Entry, produced: Array, right: Array) -> bool:
    """Whether a tensor is as near to the right one as an entry demands. Elements that are not
    finite must be equal.
    """
    if entry.ignore:
        return True
    if produced.shape != right.shape:
        return False
    y, r = (a.astype(np.float64).reshape(-1) for a in (produced, right))
    finite = np.isfinite(r)
    if (
        not np.array_equal(y[~finite], r[~finite], equal_nan=True)
        or not np.isfinite(y[finite]).all()
    ):
        return False
    y, r = y[finite], r[finite]
    if entry.rel_l2 is not None:
        return bool(np.linalg.norm(y - r) <= entry.rel_l2 * np.linalg.norm(r))
    return bool((np.abs(y - r) <= entry.atol + entry.rtol * np.abs(r)).all())
