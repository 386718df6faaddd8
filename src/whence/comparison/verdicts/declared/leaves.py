"""Judges leaf calls for which a policy declares something, or whose weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whence import judge
from whence.comparison.paired_runs import PairedCall
from whence.comparison.replays.semantics import Semantics
from whence.comparison.verdicts.declared.candidates import (
    CallReplay,
    CandidateSemantics,
    DeclaredCall,
)
from whence.comparison.verdicts.declared.ledger import (
    PASSES,
    DeclarationLedger,
    sqnr_of,
)
from whence.comparison.verdicts.declared.quantised_weights import QuantisedWeights
from whence.dtypes import Array
from whence.judge.policy import Policy, Scheme
from whence.records import Run
from whence.results import CauseKind, Confidence, SlotPair, Verdict, VerdictKind

Figures = list[tuple[str, judge.ReplayError]]
Judged = tuple[Verdict | None, list[judge.ReplayError]]
"""A verdict and the figures it is based on."""


@dataclass(frozen=True, slots=True)
class _Explanation:
    """The best explanation of the outputs of a call. plain: figures under the reference's
    semantics. changed: whether other semantics explain more than those.
    """

    plain: Figures
    figures: Figures
    activations: Scheme | None = None
    changed: bool = False


class DeclaredLeaves:
    """Judges leaf calls against the declarations for them."""

    def __init__(
        self,
        policy: Policy,
        reference: Run,
        quantised: QuantisedWeights,
        candidates: CandidateSemantics,
        ledger: DeclarationLedger,
    ) -> None:
        self._policy, self.reference = policy, reference
        self._quantised, self._candidates, self._ledger = quantised, candidates, ledger

    def judged(
        self,
        evidence: judge.LeafEvidence,
        pair: PairedCall,
        slots: Mapping[str, SlotPair],
        replaying: CallReplay | None,
    ) -> Judged:
        """(verdict, figures it is based on) of a leaf call; (None, []) when nothing is declared for
        it and nothing is quantised.
        """
        call, ledger = pair.call, self._ledger
        entries = self._policy.of(call.scope, (call.op_type, pair.partner.op_type))
        tolerance, entry = entries.get("tolerance"), entries.get("quantisation")
        if tolerance is not None and tolerance.ignore:
            return ledger.ignored(tolerance, call, judge.judge_leaf(evidence)), []
        weights = self._quantised.of(pair, slots, entry)
        if evidence.structural or not (entries or weights):
            return None, []
        declared = DeclaredCall(pair, entries, weights)
        ledger.consult(*entries.values())
        if entry is not None and (weights or entry.activations is not None):
            ledger.apply(entry)
        replaced = {w.slot for w in weights}
        parameters = [(s, d) for s, d in evidence.parameters if s not in replaced]
        parameters += [(w.slot, w.difference) for w in weights]
        evidence = evidence.replace(parameters=parameters)
        if any(d.differs for _, d in parameters):
            ledger.wrong.add(call.scope)
            return judge.judge_leaf(evidence), []
        if replaying is None:
            return self._from_dumps(evidence, declared, "replay was switched off"), []
        return self._replayed(evidence, declared, replaying)

    def _replayed(
        self, evidence: judge.LeafEvidence, declared: DeclaredCall, replaying: CallReplay
    ) -> Judged:
        base = {w.slot: self._parameter(declared, w.slot) for w in declared.weights}
        result = replaying.figures(Semantics(params=base))
        if not result.local:
            if not result.refused:
                return None, []
            return self._from_dumps(evidence, declared, result.why), []
        explanation = self._explanation(list(result.local.items()), declared, replaying)
        if isinstance(explanation, str):
            return self._from_dumps(evidence, declared, explanation), []
        verdict = judge.judge_leaf(evidence.replace(local=explanation.figures))
        if _worst(explanation.plain) > 1 or declared.weights:
            verdict = self._told_apart(verdict, declared, explanation, replaying)
        return verdict, [error for _, error in explanation.figures]

    def _parameter(self, declared: DeclaredCall, slot: str) -> Array:
        return self.reference.array(
            next(r.record for r in declared.pair.call.refs if r.slot == slot)
        )

    def _explanation(
        self, plain: Figures, declared: DeclaredCall, replaying: CallReplay
    ) -> _Explanation | str:
        """The semantics that explain a call best, or why none that is declared could be run."""
        best = _Explanation(plain, plain)
        if _worst(plain) <= 1 and not declared.weights:
            return best
        refusals: list[str] = []
        for semantics, scheme in self._candidates.of(declared, replaying):
            result = replaying.figures(semantics)
            figures = list(result.local.items())
            if len(figures) < len(plain):
                refusals.append(result.why)
                continue
            if not best.changed or _worst(figures) < _worst(best.figures):
                best = _Explanation(plain, figures, scheme, changed=True)
            if _worst(best.figures) <= 1:
                self._candidates.prefer(scheme)
                break
        return refusals[0] if refusals and not best.changed else best

    def _told_apart(
        self,
        verdict: Verdict,
        declared: DeclaredCall,
        explanation: _Explanation,
        replaying: CallReplay,
    ) -> Verdict:
        """The verdict against the declared semantics, by kind of declaration."""
        entries, weights, call = declared.entries, declared.weights, declared.pair.call
        sqnr = sqnr_of(max(error.error_rel for _, error in explanation.plain))
        numbers = {**verdict.numbers, "sqnr_db": sqnr}
        loss = f"SQNR {sqnr:.1f} dB" if sqnr is not None else "SQNR not defined"
        passes = verdict.verdict in PASSES or (
            verdict.verdict == VerdictKind.PRECISION and "fused-rounding" in entries
        )
        if weights and "quantisation" not in entries:
            activations = explanation.activations
            words = f"weights {weights[0].scheme}"
            words += f", activations {activations}" if activations else ""
            if not passes:
                words = f"not explained by its quantised weights ({words})"
                return _unexplained(verdict, replaying, words, numbers)
            self._ledger.undeclared((weights[0].scheme, activations), call, sqnr, words)
            return verdict.replace(
                verdict=VerdictKind.PRECISION,
                numbers=numbers,
                sentence=f"{words}, not declared: {loss}; beyond that {verdict.sentence}",
            )
        if not entries or not explanation.changed:
            return verdict
        if not passes:
            words = f"beyond what is declared ({declared.words})"
            return _unexplained(verdict, replaying, words, numbers)
        least = max((e.min_sqnr for e in entries.values() if e.min_sqnr is not None), default=None)
        if least is not None and sqnr is not None and sqnr < least:
            return verdict.replace(
                verdict=VerdictKind.INTRODUCED,
                confidence=Confidence.CERTAIN,
                cause=CauseKind.UNKNOWN,
                numbers=numbers,
                sentence=f"declared {declared.words}, with an SQNR of at least {least:g} dB; it is "
                f"{sqnr:.1f} dB",
            )
        for entry in entries.values():
            self._ledger.met(entry, call, sqnr)
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            numbers=numbers,
            sentence=f"{declared.words}: {loss}; beyond that {verdict.sentence}",
        )

    def _from_dumps(
        self, evidence: judge.LeafEvidence, declared: DeclaredCall, why: str
    ) -> Verdict:
        """Without replay: judges the error growth, with the loss of the quantised weights as
        rounding. Nothing else can be told from a fault then.
        """
        entries, weights, call = declared.entries, declared.weights, declared.pair.call
        quantisation, tolerance = entries.get("quantisation"), entries.get("tolerance")
        loss = max((w.loss for w in weights), default=0.0)
        if quantisation is not None and quantisation.activations is not None:
            loss += 2.0**-quantisation.activations.bits
        verdict = judge.judge_leaf(evidence.replace(u=max(evidence.u, loss), no_replay=why))
        e_out = verdict.numbers.get("e_out")
        sqnr = sqnr_of(e_out)
        if (
            tolerance is not None
            and tolerance.rel_l2 is not None
            and e_out is not None
            and e_out <= tolerance.rel_l2
        ):
            self._ledger.apply(tolerance)
        elif verdict.verdict not in PASSES or not weights:
            return verdict
        if not entries:
            scheme = weights[0].scheme
            self._ledger.undeclared((scheme, None), call, sqnr, f"weights {scheme}")
            return verdict.replace(
                verdict=VerdictKind.PRECISION,
                sentence=f"weights {scheme}, not declared; {verdict.sentence}",
            )
        self._ledger.apply(*entries.values())
        for entry in entries.values():
            self._ledger.met(entry, call, sqnr)
        return verdict.withdrawn(
            VerdictKind.DECLARED,
            f"{declared.words}; {verdict.sentence}",
            numbers={**verdict.numbers, "sqnr_db": sqnr},
        )


def _worst(figures: Sequence[tuple[str, judge.ReplayError]]) -> float:
    return max(error.score for _, error in figures)


def _unexplained(
    verdict: Verdict, replaying: CallReplay, words: str, numbers: dict[str, float | None]
) -> Verdict:
    """The verdict on an error that the declarations do not explain."""
    if verdict.verdict != VerdictKind.INTRODUCED:
        return verdict.replace(numbers=numbers)
    return verdict.replace(
        cause=replaying.cause([verdict.slot]),
        numbers=numbers,
        sentence=f"{verdict.sentence}; {words}",
    )
