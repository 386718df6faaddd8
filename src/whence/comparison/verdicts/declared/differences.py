"""Everything that a comparison asks of a policy, put together."""

from __future__ import annotations

from whence.comparison.verdicts.declared.candidates import CandidateSemantics
from whence.comparison.verdicts.declared.containers import DeclaredContainers
from whence.comparison.verdicts.declared.leaves import DeclaredLeaves
from whence.comparison.verdicts.declared.ledger import DeclarationLedger
from whence.comparison.verdicts.declared.masked_rows import MaskedRows
from whence.comparison.verdicts.declared.quantised_weights import QuantisedWeights
from whence.comparison.verdicts.declared.tolerances import TensorTolerances
from whence.judge.policy import Policy
from whence.records import Run
from whence.results import Plan


class DeclaredDifferences:
    """What a policy says of two runs, one part for each thing it may speak of.

    Quantised weights are recognised without a declaration too; then the loss is `precision`, and
    the answer prints what would declare it. Raises UsageError at once for an entry that selects no
    paired call.
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
