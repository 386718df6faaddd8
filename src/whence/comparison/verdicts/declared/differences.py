"""Everything that a comparison asks of a policy, put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whence.comparison.paired_runs import PairedCall
from whence.comparison.replays.semantics import ReplayResult
from whence.comparison.verdicts.declared.candidates import (
    CallReplay,
    CandidateSemantics,
    DeclaredCall,
)
from whence.comparison.verdicts.declared.leaves import DeclaredLeaves
from whence.comparison.verdicts.declared.ledger import (
    PASSES,
    DeclarationLedger,
    sqnr_of,
)
from whence.comparison.verdicts.declared.masked_rows import MaskedRows
from whence.comparison.verdicts.declared.quantised_weights import QuantisedWeights
from whence.comparison.verdicts.declared.tolerances import TensorTolerances, allows
from whence.errors import ElementsMissing
from whence.judge.policy import Entry, Policy
from whence.records import Run
from whence.records.slots import is_of_child, split_child
from whence.results import Confidence, Plan, SlotPair, Verdict, VerdictKind


class DeclaredDifferences:
    """Applies a policy to two runs, with one part for each kind of declaration.

    Quantised weights are also recognised without a declaration; then their loss is `precision`, and
    the answer prints an entry that would declare it. Raises UsageError at once for an entry that
    selects no paired call.
    """

    def __init__(self, policy: Policy | None, reference: Run, target: Run, plan: Plan) -> None:
        policy = policy or Policy()
        pairs = [(reference.calls[p.reference], target.calls[p.target]) for p in plan.pairs]
        labels = [(c.scope, (c.op_type,)) for c in target.calls if c.kind == "label"]
        policy.check([*((a.scope, (a.op_type, b.op_type)) for a, b in pairs), *labels])
        self.ledger = DeclarationLedger(policy, [(a.scope, a.op_type) for a, _ in pairs if a.leaf])
        self.masked = MaskedRows(policy, reference, target, plan)
        self.tolerances = TensorTolerances(policy, self.ledger)
        candidates = CandidateSemantics(reference, target, self.masked, self.ledger)
        quantised = QuantisedWeights(reference, target)
        self.leaves = DeclaredLeaves(policy, reference, quantised, candidates, self.ledger)
        self.containers = DeclaredContainers(policy, reference, target, candidates, self.ledger)


# Applies declarations about a container to its own operators.

_IN_CONTAINERS = ("tf32", "fast-gelu", "fused-rounding", "tolerance")


class DeclaredContainers:
    """Judges a container's own operators against what is declared of it."""

    def __init__(
        self,
        policy: Policy,
        reference: Run,
        target: Run,
        candidates: CandidateSemantics,
        ledger: DeclarationLedger,
    ) -> None:
        self._policy, self.reference, self.target = policy, reference, target
        self._candidates, self._ledger = candidates, ledger
        # By call and child: the entries that explained it, and its SQNR without them.
        self._explained: dict[int, dict[int, tuple[Mapping[str, Entry], float | None]]] = {}

    def _entries(self, pair: PairedCall) -> dict[str, Entry]:
        return self._policy.of(pair.call.scope, (pair.call.op_type, pair.partner.op_type))

    def replayed(
        self, result: ReplayResult, pair: PairedCall, replaying: CallReplay
    ) -> ReplayResult:
        """The replay of a container's own operators, or the one under its declarations if that
        explains the target better.
        """
        entries = {
            kind: entry
            for kind, entry in self._entries(pair).items()
            if kind in _IN_CONTAINERS and not entry.ignore
        }
        if not entries or _worst(result, 0.0) <= 1:
            return result
        self._ledger.consult(*entries.values())
        best = result
        for semantics, _ in self._candidates.of(DeclaredCall(pair, entries, ()), replaying):
            candidate = replaying.figures(semantics)
            if candidate.local.keys() >= result.local.keys() and _worst(candidate) < _worst(best):
                best = candidate
            if _worst(best) <= 1:
                break
        if best is not result:
            self._explained[pair.call.id] = {
                _child_of(slot): (entries, sqnr_of(error.error_rel))
                for slot, error in result.local.items()
                if error.score > 1
            }
        return best

    def accounts_for(self, pair: PairedCall) -> bool:
        """Whether the call passes because of a declaration, or has a declared tolerance."""
        return pair.call.id in self._explained or "tolerance" in self._entries(pair)

    def segment(
        self, verdict: Verdict | None, pair: PairedCall, outputs: Sequence[SlotPair]
    ) -> Verdict | None:
        """The verdict of a container's own operators after its declarations are applied."""
        if verdict is None:
            return None
        call = pair.call
        if verdict.verdict in (*PASSES, VerdictKind.PRECISION):
            entries, sqnr = self._explained.get(call.id, {}).get(
                _child_of(verdict.slot), ({}, None)
            )
            if entries and (verdict.verdict in PASSES or "fused-rounding" in entries):
                for met in entries.values():
                    self._ledger.met(met, call, sqnr)
                words = "; ".join(map(str, entries.values()))
                return verdict.replace(
                    verdict=VerdictKind.DECLARED,
                    confidence=Confidence.NONE,
                    numbers={**verdict.numbers, "sqnr_db": sqnr},
                    sentence=f"{words}: SQNR {sqnr:.1f} dB; beyond that {verdict.sentence}"
                    if sqnr is not None
                    else verdict.sentence,
                )
        entry = self._entries(pair).get("tolerance")
        if entry is None or verdict.verdict in PASSES:
            return verdict
        if entry.ignore:
            return self._ledger.ignored(entry, call, verdict)
        self._ledger.consult(entry)
        self._ledger.apply(entry)
        if not self._are_allowed(entry, outputs):
            return verdict
        self._ledger.met(entry, call, sqnr_of(verdict.numbers.get("e_out")))
        sentence = f"{entry}, against the reference's output; {verdict.sentence}"
        return verdict.withdrawn(VerdictKind.DECLARED, sentence)

    def _are_allowed(self, entry: Entry, outputs: Sequence[SlotPair]) -> bool:
        """Whether an entry covers and allows every output; False if one cannot be compared."""
        try:
            return bool(outputs) and all(
                entry.covers_slot(slot.reference_slot)
                and allows(
                    entry,
                    self.target.array(slot.target_record),
                    self.reference.array(slot.reference_record),
                )
                for slot in outputs
            )
        except ElementsMissing:
            return False


def _worst(result: ReplayResult, default: float = math.inf) -> float:
    return max((error.score for error in result.local.values()), default=default)


def _child_of(slot: str) -> int:
    """3 for what a container's fourth child was given ("3:input.0"), -1 for what the container
    returned.
    """
    return split_child(slot)[0] if is_of_child(slot) else -1
