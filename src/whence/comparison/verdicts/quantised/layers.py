"""Judges quantised layers.

The target's output must be, to the nearest code, the result of the reference's program on the
numbers that the target's inputs and weights stand for. The remaining error is the loss of the
scheme, which `sqnr_db` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence import judge
from whence.align.quantised.operands import PRODUCTS
from whence.comparison.paired_runs import PairedCall
from whence.comparison.replays.replayer import Replayer
from whence.comparison.verdicts.declared.ledger import DeclarationLedger, sqnr_of
from whence.comparison.verdicts.quantised.dithered import beyond_steps, saturates_inside
from whence.comparison.verdicts.quantised.programs import TABLES, LayerPrograms, with_shape
from whence.comparison.verdicts.quantised.weights import CheckedWeights, CodedParameters
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge import code_steps
from whence.judge.limits import FLOAT_KERNELS
from whence.judge.policy import Policy, Scheme
from whence.records import Run
from whence.records.quantised import F64, Coded, QuantisedLayer
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind

_HELD_TO_A_CODE = "its codes are those of what the reference's operators make"
_HELD_TO_ROUNDING = "what it is off by is what rounding its codes explains"
_MAY_SATURATE = (
    "processors without VNNI add pairs of products of unsigned and signed codes in 16 bits, where "
    "they saturate: reduce_range=True (weights of 7 bits) or unsigned weights show whether it is"
)
_ROUND_INSIDE = frozenset(("DynamicQuantizeLSTM",))
"""Nodes that quantise what they compute on the way."""
_SAID = 1e-3
"""Share of saturated numbers from which on the verdict mentions them."""


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of a layer. produced: the target's numbers. right: the reference's program with the
    target's weights; None where these have no counterpart. plain: the reference's program with its
    own weights.
    """

    coded: Coded
    produced: Array
    right: Array | None
    plain: Array


class QuantisedLayers:
    """Judges layers that hold codes. programs: None where replay is switched off."""

    def __init__(
        self,
        reference: Run,
        target: Run,
        replayer: Replayer | None,
        policy: Policy,
        ledger: DeclarationLedger,
    ) -> None:
        self.target, self._replayer = target, replayer
        self.parameters = CodedParameters(reference, target)
        self.programs = (
            LayerPrograms(replayer.reference, replayer.target) if replayer is not None else None
        )
        self._policy, self._ledger = policy, ledger

    def judged(self, pair: PairedCall, evidence: judge.LeafEvidence) -> Verdict | None:
        """The verdict of a call whose partner is a quantised layer; None for any other."""
        layer = pair.partner.quantised
        errors: dict[str, float | None] = {
            "e_in": evidence.growth.e_in, "e_out": evidence.growth.e_out
        }  # fmt: skip
        verdict = Verdict(
            pair.index, VerdictKind.UNDETERMINED, evidence=Evidence.REPLAY, numbers=errors
        )
        if evidence.structural:
            return None
        if layer is None:
            multiplies = any(kind in pair.partner.op_type for kind in PRODUCTS)
            return verdict.replace(sentence=_FOLDED) if multiplies else None
        try:
            weights = self.parameters.of(pair.call, layer)
            if fault := _stated_fault(layer, weights):
                self._ledger.wrong.add(pair.call.scope)
                slot, sentence = fault
                return verdict.replace(
                    verdict=VerdictKind.PARAM_DIFF,
                    confidence=Confidence.CERTAIN,
                    cause=CauseKind.PARAMETER,
                    sentence=sentence,
                    slot=slot,
                )
            if self.programs is None:
                return verdict.replace(sentence="replay was switched off")
            return self._replayed(verdict, pair, layer, weights)
        except (ReplayRefused, ElementsMissing) as refused:
            return verdict.replace(sentence=f"no replay: {refused}")

    def _replayed(
        self, verdict: Verdict, pair: PairedCall, layer: QuantisedLayer, weights: CheckedWeights
    ) -> Verdict:
        call, partner, programs = pair.call, pair.partner, self.programs
        assert programs is not None and self._replayer is not None
        plain = programs.right(call, layer, {})
        right: Sequence[Array | None] = [None] * len(plain)
        if call.quantised is not None:
            # Codes on both sides: the reference's own parameters, as numbers, equal the target's.
            right = list(plain)
        elif weights.all_face and not any(m.kind in _ROUND_INSIDE for m in layer.members):
            right = programs.right(call, layer, weights.values, rounds=True)
        produced = [self.target.array(ref.record) for ref in partner.slots("output")]
        outputs = [
            _Output(
                coded,
                made,
                None if exact is None else with_shape(exact, made.shape),
                with_shape(float_, made.shape),
            )
            for coded, made, exact, float_ in zip(layer.makes, produced, right, plain, strict=False)
        ]
        if not outputs or any(o.produced.shape != o.plain.shape for o in outputs):
            return verdict.replace(sentence="no replay: its results have another shape")
        wrong = self._wrong(outputs, pair, layer)
        loss = max(_error(o.produced, o.plain) for o in outputs)
        sqnr = sqnr_of(loss)
        numbers: dict[str, float | None] = {**verdict.numbers, "sqnr_db": sqnr}
        if wrong is not None:
            why, _ = programs.reference.confirm(call) if not call.quantised else ("", 0)
            if why:
                return verdict.replace(sentence=f"no replay: {why}", numbers=numbers)
            return wrong.replace(numbers={**wrong.numbers, **numbers})
        return self._passed(verdict, pair, layer, weights, outputs, numbers)

    def _wrong(
        self, outputs: Sequence[_Output], pair: PairedCall, layer: QuantisedLayer
    ) -> Verdict | None:
        """The verdict on a layer whose output is wrong; None where it is right."""
        programs = self.programs
        assert programs is not None
        verdict = Verdict(
            pair.index,
            VerdictKind.INTRODUCED,
            evidence=Evidence.REPLAY,
            confidence=Confidence.LIKELY,
            score=judge.LIMITS.certain,
            slot="output.0",
        )
        for coded in layer.reads:
            if fault := self._off_as_read(coded):
                return verdict.replace(
                    cause=CauseKind.KERNEL, sentence=f"what it reads as codes: {fault}"
                )
        first = outputs[0]
        if layer.inner or first.right is None:
            return self._wrong_beyond_steps(verdict, first, layer)
        by_tables = any(member.kind in TABLES for member in layer.members)
        offs = [self._off(o, o.right, by_tables) for o in outputs if o.right is not None]
        sentence, score = max(offs, key=lambda fault: fault[1])
        if not sentence:
            return None
        broken = self._broken_node(layer)
        if broken is None:
            cause, words = CauseKind.UNKNOWN, ""
        elif broken:
            cause, words = CauseKind.KERNEL, f"; {broken}"
        else:
            cause = CauseKind.SEMANTIC
            words = "; its own nodes give what it made, so they are not the reference's"
        is_sure = score > judge.LIMITS.certain
        return verdict.replace(
            confidence=Confidence.CERTAIN if is_sure else Confidence.LIKELY,
            score=score,
            cause=cause,
            sentence=sentence + words,
        )

    def _wrong_beyond_steps(
        self, verdict: Verdict, output: _Output, layer: QuantisedLayer
    ) -> Verdict | None:
        """The verdict on a wrong output, as `_wrong`, where roundings inside the layer, or of
        weights without a counterpart, affect the result.
        """
        programs = self.programs
        assert programs is not None
        if broken := self._broken_node(layer):
            return verdict.replace(
                cause=CauseKind.KERNEL, confidence=Confidence.CERTAIN, sentence=broken
            )
        right = output.plain if output.right is None else output.right
        sentence = beyond_steps(
            programs, layer, output.produced, right, with_weights=output.right is None
        )
        if not sentence:
            return None
        if saturates_inside(programs, layer):
            return verdict.withdrawn(
                VerdictKind.UNDETERMINED,
                f"{sentence}; but codes inside lie at the end of their range: a reference without "
                "optimisations shows each layer alone",
            )
        return verdict.replace(cause=CauseKind.SEMANTIC, sentence=sentence)

    def _off_as_read(self, coded: Coded) -> str:
        """Describes what is wrong with numbers that were quantised on their way into a layer; ""
        for nothing.
        """
        if coded.of < 0 or coded.grid is None or coded.codes < 0:
            return ""
        codes, array = self.target.array(coded.codes), self.target.array
        scale, zero = coded.grid.steps(array, codes.ndim)
        produced = (codes.astype(np.float64) - zero) * scale
        found = code_steps.steps(produced, array(coded.of), scale, zero, coded.grid.ends)
        return "" if found.score <= 1 else f"{found.elements} of {codes.size} are not the nearest"

    def _broken_node(self, layer: QuantisedLayer) -> str | None:
        """Describes the node whose program, run again on its recorded inputs, does not give its
        recorded output, and why; "" where there is none, None where that is unknown.
        """
        assert self.programs is not None
        try:
            node = self.programs.broken_node(layer)
        except (ReplayRefused, ElementsMissing):
            return None
        if node is None:
            return ""
        words = f"{node.name}, run again on what it was given, gives something else"
        codes = {self.target.records[record].dtype for record in node.reads}
        return f"{words}; {_MAY_SATURATE}" if {"uint8", "int8"} <= codes else words

    def _off(self, output: _Output, right: Array, by_tables: bool) -> tuple[str, float]:
        """(what is wrong with an output, score); ("", score) when nothing is wrong."""
        grid = output.coded.grid
        if grid is None:
            limit = FLOAT_KERNELS * max(float(np.abs(right).max(initial=0.0)), 1e-30)
            off = np.abs(output.produced.astype(np.float64) - right.astype(np.float64))
            score = float(off.max(initial=0.0)) / limit
            if score <= 1:
                return "", score
            return (
                f"is off by {_error(output.produced, right):.2g} (rel_l2), nothing of it codes",
                score,
            )
        found = code_steps.steps(output.produced, right, *self._grid(output))
        score = found.score_of_tables if by_tables else found.score
        if score <= 1:
            return "", score
        return (
            f"{found.elements} of {output.produced.size} codes are not the nearest to what the "
            "reference's operators make of the same numbers, with the weights that the codes stand "
            f"for; the worst, {list(found.worst)}, is off by {found.most:.4g} steps"
        ), score

    def _passed(
        self,
        verdict: Verdict,
        pair: PairedCall,
        layer: QuantisedLayer,
        weights: CheckedWeights,
        outputs: Sequence[_Output],
        numbers: dict[str, float | None],
    ) -> Verdict:
        """The verdict on a layer whose only loss is that of its scheme."""
        sqnr = numbers["sqnr_db"]
        held = _HELD_TO_A_CODE
        if layer.inner or outputs[0].right is None:
            held = _HELD_TO_ROUNDING
        if sqnr is None or all(_is_on_both(pair, o) for o in outputs):
            return verdict.replace(verdict=VerdictKind.NOISE, numbers=numbers, sentence=held)
        parts = [f"weights {scheme}" for scheme in dict.fromkeys(weights.schemes)]
        activations = self._activations(layer)
        parts += [f"activations {activations}"] if activations else []
        words = ", ".join(parts) or "codes"
        reached = [
            code_steps.reach(o.plain, *self._grid(o)) for o in outputs if o.coded.grid is not None
        ]
        saturated = max((r.saturated for r in reached), default=0.0)
        used = min((r.used for r in reached), default=1.0)
        numbers |= {"saturated": saturated, "range_used": used}
        loss = f"SQNR {sqnr:.1f} dB"
        if saturated >= _SAID:
            loss += f", {100 * saturated:.2g} % of its results lie beyond the largest code"
        if used < 0.25:
            loss += f", its results reach {100 * used:.2g} % of the largest code"
        entries = self._policy.of(pair.call.scope, (pair.call.op_type, pair.partner.op_type))
        entry = entries.get("quantisation")
        if entry is None:
            scheme = weights.schemes[0] if weights.schemes else Scheme(8, "tensor")
            self._ledger.undeclared((scheme, activations), pair.call, sqnr, words)
            return verdict.replace(
                verdict=VerdictKind.PRECISION,
                numbers=numbers,
                sentence=f"{words}, not declared: {loss}; {held}",
            )
        self._ledger.consult(entry)
        self._ledger.apply(entry)
        if entry.min_sqnr is not None and sqnr < entry.min_sqnr:
            return verdict.replace(
                verdict=VerdictKind.INTRODUCED,
                confidence=Confidence.CERTAIN,
                numbers=numbers,
                sentence=f"declared {entry}, with an SQNR of at least {entry.min_sqnr:g} dB; it is "
                f"{sqnr:.1f} dB ({loss})",
            )
        self._ledger.met(entry, pair.call, sqnr)
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            numbers=numbers,
            sentence=f"{entry}: {loss}; {held}",
        )

    def _activations(self, layer: QuantisedLayer) -> Scheme | None:
        grids = [c.grid for c in (*layer.reads, *layer.makes) if c.grid is not None]
        if not grids:
            return None
        _, zero = grids[0].steps(self.target.array, 0)
        return Scheme(8, "tensor", symmetric=not zero.any(), mode="static")

    def _grid(self, output: _Output) -> tuple[F64, F64, tuple[float, float]]:
        grid = output.coded.grid
        assert grid is not None
        return *grid.steps(self.target.array, output.produced.ndim), grid.ends


_FOLDED = (
    "it multiplies codes, and the scale of what it reads is folded into that of its weight, so the "
    "loss of its codes is not known: run the target without the runtime's optimisations"
)


def _is_on_both(pair: PairedCall, output: _Output) -> bool:
    return pair.call.quantised is not None and output.coded.grid is not None


def _stated_fault(layer: QuantisedLayer, weights: CheckedWeights) -> tuple[str, str] | None:
    """(slot, sentence) of a fault that the parameters alone prove; None without one."""
    for name, sentence in weights.sentences.items():
        slot = next((w.facing for w in layer.weights if w.name == name), "")
        return slot, f"{name}: {sentence}"
    if layer.rereads:
        reread = layer.rereads[0]
        return "", f"{reread.name}: read with another scale or zero point than it was made with"
    return None


def _error(produced: Array, right: Array) -> float:
    wide = right.astype(np.float64)
    size = float(np.linalg.norm(wide))
    off = float(np.linalg.norm(produced.astype(np.float64) - wide))
    return off / size if size else 0.0 if off == 0 else float("inf")
