"""Declared differences in a comparison: which semantics a call is replayed with, what its verdict
is then, and what the answer says.

Quantised weights are recognised without a declaration too; then the loss is `precision`, and the
answer prints what would declare it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import align, dtypes, judge
from whence.comparison.replays.semantics import PLAIN, Quantise, Semantics, _worst_share
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge import quantised_weights, stored_codes
from whence.judge.policy import Entry, Policy, Scheme
from whence.records import Call, Program, Run
from whence.records.slots import is_input, is_output
from whence.replay import declared_semantics as semantics_of
from whence.results import CauseKind, Confidence, Declared, Plan, SlotPair, Verdict, VerdictKind

if TYPE_CHECKING:
    from whence.comparison.replays.semantics import ReplayResult

_PASSES = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED)
_IN_CONTAINERS = ("tf32", "fast-gelu", "fused-rounding", "tolerance")
_HELD = 4  # weights taken apart, kept for the other calls of the same module
_INPUT_SCALES = ("input_scale", "act_scale", "activation_scale", "x_scale", "scale_x")
# What is tried, in this order, when a target's quantised layers were not declared.
_DYNAMIC = (
    None,
    Scheme(8, "token", mode="dynamic"),
    Scheme(8, "token", symmetric=False, mode="dynamic"),
    Scheme(8, "tensor", mode="dynamic"),
    Scheme(8, "tensor", symmetric=False, mode="dynamic"),
)


@dataclass(frozen=True, slots=True)
class CallReplay:
    """Replays of one paired call. figures: under some semantics. cause: of flagged outputs, in one
    word. wide: outputs of a program without parameters on the target's inputs, in float64.
    """

    figures: Callable[[Semantics], ReplayResult]
    cause: Callable[[Sequence[str]], str]
    wide: Callable[[Program], Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class _Weight:
    """One quantised parameter of a call. values: the ways its values may be, dequantised.
    difference: to what it should be.

    loss: relative 2-norm of what quantising it took away.
    """

    slot: str
    scheme: Scheme
    difference: judge.ParameterDifference
    values: tuple[Array, ...]
    loss: float


class DeclaredDifferences:
    """Verdicts of calls that a policy speaks of, or whose weights are quantised in the target.

    error: of a pair of tensors. Raises UsageError at once for an entry that selects no paired call.
    """

    def __init__(self, policy: Policy | None, reference: Run, target: Run, plan: Plan) -> None:
        self.policy, self.reference, self.target = policy or Policy(), reference, target
        pairs = [(reference.calls[p.reference], target.calls[p.target]) for p in plan.pairs]
        labels = [(c.scope, (c.op_type,)) for c in target.calls if c.kind == "label"]
        self.policy.check([*((a.scope, (a.op_type, b.op_type)) for a, b in pairs), *labels])
        self._leaves = [(a.scope, a.op_type) for a, _ in pairs if a.leaf]
        self._weights: OrderedDict[Any, _Weight | None] = OrderedDict()
        self._programs: dict[tuple[str, str], Program | None] = {}
        self._looked: Counter[int] = Counter()
        self._applied: Counter[int] = Counter()
        self._said: list[
            tuple[Entry | None, tuple[Scheme, Scheme | None] | None, Call, float | None, str]
        ] = []
        self._wrong: set[str] = set()
        self._between: dict[int, dict[str, tuple[dict[str, Entry], float | None]]] = {}
        self._usual: list[Scheme | None] = list(_DYNAMIC)
        self._masks = self._all_masks(plan)

    # ---- leaves

    def leaf(
        self,
        evidence: judge.LeafEvidence,
        call: Call,
        other: Call,
        slots: Mapping[str, SlotPair],
        replaying: CallReplay | None,
    ) -> tuple[Verdict | None, list[judge.ReplayError]]:
        """(verdict, figures it rests on) of a leaf call; (None, []) when nothing is declared of it
        and nothing is quantised.
        """
        entries = self.policy.of(call.scope, (call.op_type, other.op_type))
        tolerance = entries.get("tolerance")
        if tolerance is not None and tolerance.ignore:
            return self._ignored(tolerance, call, judge.judge_leaf(evidence)), []
        entry = entries.get("quantisation")
        weights = self._quantised(call, other, slots, entry)
        if evidence.structural or not (entries or weights):
            return None, []
        for known in entries.values():
            self._looked[known.number] += 1
        if entry is not None and (weights or entry.activations is not None):
            self._applied[entry.number] += 1
        replaced = {w.slot for w in weights}
        parameters = [(s, d) for s, d in evidence.parameters if s not in replaced] + [
            (w.slot, w.difference) for w in weights
        ]
        evidence = dataclasses.replace(evidence, parameters=parameters)
        if any(d.comparable and not d.equal for _, d in parameters):
            self._wrong.add(call.scope)
            return judge.judge_leaf(evidence), []
        if replaying is None:
            return self._from_dumps(evidence, call, entries, weights, "replay was switched off"), []
        base = {w.slot: self._reference(call, w.slot) for w in weights}
        found = replaying.figures(Semantics(params=base))
        plain = list(found.local.items())
        if not plain:
            return (
                self._from_dumps(evidence, call, entries, weights, found.why)
                if found.refused
                else None
            ), []
        undeclared = max(item.score for _, item in plain)
        if undeclared <= 1 and not weights:
            return judge.judge_leaf(dataclasses.replace(evidence, local=plain)), [
                item for _, item in plain
            ]
        best, chosen = plain, PLAIN
        whys: list[str] = []
        activations: Scheme | None = None
        for semantics, scheme in self._candidates(call, other, entries, weights, replaying):
            found = replaying.figures(semantics)
            local = list(found.local.items())
            if len(local) < len(plain):
                whys.append(found.why)
                continue
            if chosen is PLAIN or max(i.score for _, i in local) < max(i.score for _, i in best):
                best, chosen, activations = local, semantics, scheme
            if max(i.score for _, i in best) <= 1:
                # Layers of one model are quantised alike: what explained this one is tried first at
                # the next.
                self._usual.sort(key=lambda known: known != scheme)
                break
        if chosen is PLAIN and whys:
            return self._from_dumps(evidence, call, entries, weights, whys[0]), []
        verdict = judge.judge_leaf(dataclasses.replace(evidence, local=best))
        sqnr = _sqnr(max(item.error_rel for _, item in plain))
        verdict = self._declared(
            verdict,
            call,
            entries,
            weights,
            activations,
            sqnr,
            replaying,
            changed=chosen is not PLAIN,
        )
        return verdict, [item for _, item in best]

    def _declared(
        self,
        verdict: Verdict,
        call: Call,
        entries: Mapping[str, Entry],
        weights: Sequence[_Weight],
        activations: Scheme | None,
        sqnr: float | None,
        replaying: CallReplay,
        *,
        changed: bool,
    ) -> Verdict:
        """The verdict against the declared semantics, told apart by what was declared."""
        numbers = {**verdict.numbers, "sqnr_db": sqnr}
        loss = f"SQNR {sqnr:.1f} dB" if sqnr is not None else "SQNR not defined"
        passes = verdict.verdict in _PASSES or (
            verdict.verdict == VerdictKind.PRECISION and "fused-rounding" in entries
        )
        if weights and "quantisation" not in entries:
            what = f"weights {weights[0].scheme}" + (
                f", activations {activations}" if activations else ""
            )
            if not passes:
                return self._but_introduced(
                    verdict, replaying, f"not explained by its quantised weights ({what})", numbers
                )
            self._said.append((None, (weights[0].scheme, activations), call, sqnr, what))
            return verdict.replace(
                verdict=VerdictKind.PRECISION,
                numbers=numbers,
                sentence=f"{what}, not declared: {loss}; beyond that {verdict.sentence}",
            )
        if not entries or not changed:
            return verdict
        what = "; ".join(str(e) for e in entries.values())
        if not passes:
            return self._but_introduced(
                verdict, replaying, f"beyond what is declared ({what})", numbers
            )
        least = max((e.min_sqnr for e in entries.values() if e.min_sqnr is not None), default=None)
        if least is not None and sqnr is not None and sqnr < least:
            return verdict.replace(
                verdict=VerdictKind.INTRODUCED,
                confidence=Confidence.CERTAIN,
                cause=CauseKind.UNKNOWN,
                numbers=numbers,
                sentence=f"declared {what}, with an SQNR of at least {least:g} dB; it is "
                f"{sqnr:.1f} dB",
            )
        for entry in entries.values():
            self._said.append((entry, None, call, sqnr, str(entry)))
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            numbers=numbers,
            sentence=f"{what}: {loss}; beyond that {verdict.sentence}",
        )

    @staticmethod
    def _but_introduced(
        verdict: Verdict, replaying: CallReplay, what: str, numbers: dict[str, float | None]
    ) -> Verdict:
        if verdict.verdict != VerdictKind.INTRODUCED:
            return verdict.replace(numbers=numbers)
        return verdict.replace(
            cause=replaying.cause([verdict.slot]),
            numbers=numbers,
            sentence=f"{verdict.sentence}; {what}",
        )

    def _ignored(self, entry: Entry, call: Call, verdict: Verdict) -> Verdict:
        self._looked[entry.number] += 1
        self._applied[entry.number] += 1
        if verdict.verdict in _PASSES:
            return verdict
        e_out = verdict.numbers.get("e_out")
        self._said.append((entry, None, call, _sqnr(e_out), str(entry)))
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            score=None,
            sentence=f"ignored as declared; otherwise: {verdict.sentence}",
        )

    def _from_dumps(
        self,
        evidence: judge.LeafEvidence,
        call: Call,
        entries: Mapping[str, Entry],
        weights: Sequence[_Weight],
        why: str,
    ) -> Verdict:
        """Without replay: growth, with the loss of the quantised weights as rounding; nothing else
        can be told from a fault then.
        """
        quantisation = entries.get("quantisation")
        loss = max((w.loss for w in weights), default=0.0)
        if quantisation is not None and quantisation.activations is not None:
            loss += 2.0**-quantisation.activations.bits
        verdict = judge.judge_leaf(
            dataclasses.replace(evidence, u=max(evidence.u, loss), no_replay=why)
        )
        e_out = verdict.numbers.get("e_out")
        tolerance = entries.get("tolerance")
        if (
            tolerance is not None
            and tolerance.rel_l2 is not None
            and e_out is not None
            and e_out <= tolerance.rel_l2
        ):
            self._applied[tolerance.number] += 1
        elif verdict.verdict not in _PASSES or not weights:
            return verdict
        if not entries:
            self._said.append(
                (
                    None,
                    (weights[0].scheme, None),
                    call,
                    _sqnr(e_out),
                    f"weights {weights[0].scheme}",
                )
            )
            return verdict.replace(
                verdict=VerdictKind.PRECISION,
                sentence=f"weights {weights[0].scheme}, not declared; {verdict.sentence}",
            )
        for entry in entries.values():
            self._applied[entry.number] += 1
            self._said.append((entry, None, call, _sqnr(e_out), str(entry)))
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            score=None,
            numbers={**verdict.numbers, "sqnr_db": _sqnr(e_out)},
            sentence=f"{'; '.join(map(str, entries.values()))}; {verdict.sentence}",
        )

    # ---- which semantics

    def _candidates(
        self,
        call: Call,
        other: Call,
        entries: Mapping[str, Entry],
        weights: Sequence[_Weight],
        replaying: CallReplay,
    ) -> Iterable[tuple[Semantics, Scheme | None]]:
        """Every replay that what is declared allows, the likeliest first; with each the activation
        scheme it assumes.
        """
        entry = entries.get("quantisation")
        acts: Sequence[Scheme | None] = (
            self._usual
            if weights and entry is None
            else (entry.activations if entry is not None else None,)
        )
        values: list[dict[str, Array]] = [
            dict(zip((w.slot for w in weights), v))
            for v in itertools.product(*(w.values for w in weights))
        ]
        programs = list(self._edited(call, entries, replaying))
        keep = tolerance = None
        for kind in ("skip-masked-rows", "tolerance", "fused-rounding"):
            if kind in entries:
                self._applied[entries[kind].number] += 1
        if "skip-masked-rows" in entries:
            keep = self._keeper(call, other, entries["skip-masked-rows"])
        if "tolerance" in entries:
            bound = entries["tolerance"]
            tolerance = lambda slot: bound if bound.covers_slot(slot) else None  # noqa: E731
        size_only = "fused-rounding" in entries
        number = itertools.count()
        for scheme in acts:
            for quantise in self._activations(scheme, other):
                for program, params in itertools.product(programs, values):
                    yield (
                        Semantics(
                            f"{call.id}.{next(number)}",
                            params,
                            quantise,
                            program,
                            size_only,
                            keep,
                            tolerance,
                        ),
                        scheme,
                    )

    def _edited(
        self, call: Call, entries: Mapping[str, Entry], replaying: CallReplay
    ) -> Iterable[Program | None]:
        program = self.reference.programs.get(call.program)
        made: list[Program | None] = [None]
        if program is None:
            return made
        if "fast-gelu" in entries:
            entry = entries["fast-gelu"]
            forms = (entry.form,) if entry.form else ("tanh", "erf")
            found = [p for f in forms if (p := self._gelu(program, f, replaying)) is not None]
            self._applied[entry.number] += bool(found)
            made = [*found] or made
        if "tf32" in entries:
            both = [
                semantics_of.with_tf32(p or program, how)
                for how in ("even", "truncate", "away")
                for p in made
            ]
            found = [p for p in both if p is not None]
            self._applied[entries["tf32"].number] += bool(found)
            made = [*found] or made
        return made

    def _gelu(self, program: Program, form: str, replaying: CallReplay) -> Program | None:
        key = (program.id, form)
        if key not in self._programs:
            found = semantics_of.with_gelu(program, form)
            if found is None:
                for now in ("erf", "tanh", "sigmoid"):
                    try:
                        same = semantics_of.computes_gelu(program, now, replaying.wide)
                    except (ReplayRefused, ElementsMissing):
                        break
                    if same:
                        found = semantics_of.gelu_program(program, form) if now != form else None
                        break
            self._programs[key] = found
        return self._programs[key]

    def _activations(self, scheme: Scheme | None, other: Call) -> Iterable[Quantise | None]:
        """The ways activations of this scheme are computed in practice: two spans, in float32 or in
        the input's own dtype.
        """
        if scheme is None:
            yield None
            return
        scale: Array | None = None
        if scheme.mode == "static":
            scale = self._input_scale(other, scheme)
        spans = (
            ("full", "narrow")
            if scheme.symmetric and scheme.format == "int" and scale is None
            else ("narrow",)
        )
        for inner, span in itertools.product((False, True), spans):
            grid = semantics_of.Grid(
                scheme.bits, scheme.per, 0, 0, scheme.symmetric, scheme.format, span
            )
            yield _quantiser(grid, scale, inner)

    def _input_scale(self, other: Call, scheme: Scheme) -> Array | None:
        if scheme.scale is not None:
            return np.asarray(scheme.scale)
        for ref in other.slots("param"):
            if (
                any(word in ref.slot for word in _INPUT_SCALES)
                and self.target.records[ref.record].count == 1
            ):
                return self.target.array(ref.record).astype(np.float64).reshape(())
        return None

    # ---- quantised weights

    def _reference(self, call: Call, slot: str) -> Array:
        return self.reference.array(next(r.record for r in call.refs if r.slot == slot))

    def _quantised(
        self, call: Call, other: Call, slots: Mapping[str, SlotPair], entry: Entry | None
    ) -> list[_Weight]:
        declared = entry.weights if entry is not None else None
        found: list[_Weight] = []
        for ref in call.slots("param"):
            record = self.reference.records[ref.record]
            if len(record.shape) < 2 or judge.unit_roundoff(record.dtype) == 0.0:
                continue
            pair = slots.get(ref.slot)
            mine = self.target.records[pair.target_record] if pair is not None else None
            if (
                mine is not None
                and mine.hash
                and (mine.hash, mine.dtype, mine.shape) == (record.hash, record.dtype, record.shape)
            ):
                continue
            params = tuple((r.slot, r.record) for r in other.slots("param"))
            key = (ref.record, params, entry.number if entry is not None else 0)
            if key in self._weights:
                self._weights.move_to_end(key)
            else:
                self._weights[key] = self._take_apart(
                    ref.record, ref.slot, dict(params), pair, declared, self._precision(other)
                )
                while len(self._weights) > _HELD:
                    self._weights.popitem(last=False)
            weight = self._weights[key]
            if weight is not None:
                found.append(weight)
        return found

    def _take_apart(
        self,
        record: int,
        slot: str,
        params: Mapping[str, int],
        pair: SlotPair | None,
        declared: Scheme | None,
        dtype: str,
    ) -> _Weight | None:
        """The quantised form of one parameter in the target, checked against the reference's; None
        when there is none.

        dtype: what the target computes in; a 16-bit model was quantised from 16-bit weights.
        """
        try:
            reference = judge.rounded(self.reference.array(record), dtype)
            held = {s: self.target.array(r) for s, r in params.items()}
            mine = self.target.array(pair.target_record) if pair is not None else None
        except ElementsMissing:
            return None
        axis = declared.axis if declared is not None else 0
        stored = stored_codes.stored(reference, held, slot, axis=axis)
        if stored is None and mine is not None and mine.shape == reference.shape:
            if declared is None and stored_codes.on_a_grid(reference, axis=axis) is not None:
                return None  # quantised on both sides: an ordinary parameter
            stored = stored_codes.on_a_grid(mine, axis=axis)
            if stored is None and declared is not None and dtypes.of(mine).is_floating:
                return self._by_values(reference, mine, slot, declared)
        if stored is not None:
            checked = quantised_weights.check(reference, stored, declared=declared)
            scheme = declared or quantised_weights.looks_like(stored, checked)
            words = f"is not the reference's, quantised ({scheme}): {checked.sentence}"
            difference = judge.ParameterDifference(
                not checked.sentence, True, words if checked.sentence else "", checked.numbers
            )
            values = stored.dequantised()
            return _Weight(slot, scheme, difference, (values,), _loss(reference, values))
        if declared is None or pair is not None:
            return None
        # Declared, and the target does not show its weights: they are what the scheme makes of the
        # reference's.
        made = tuple(semantics_of.fake_quantise(reference, g) for g in _grids(declared))
        return _Weight(
            slot, declared, judge.ParameterDifference(True, True), made, _loss(reference, made[0])
        )

    def _precision(self, other: Call) -> str:
        names = [self.target.records[r.record].dtype for r in other.slots("output")]
        kinds = [dtypes.named(name) for name in names if dtypes.is_floating(name)]
        floating = [k.name for k in kinds if k.kind == "float" and k.bits > 8]
        return min(floating, key=lambda name: dtypes.named(name).bits, default="float32")

    @staticmethod
    def _by_values(reference: Array, mine: Array, slot: str, declared: Scheme) -> _Weight | None:
        """A floating weight that should be the reference's, quantised and rounded to the target's
        dtype.
        """
        made = [semantics_of.fake_quantise(reference, g) for g in _grids(declared)]
        u = judge.unit_roundoff(dtypes.of(mine).name)
        wide = mine.astype(np.float64)
        near = [bool((np.abs(wide - m) <= 2 * u * np.abs(m)).all()) for m in made]
        if any(near):
            return _Weight(
                slot,
                declared,
                judge.ParameterDifference(True, True),
                (wide,),
                _loss(reference, wide),
            )
        kind = mine.dtype
        difference = judge.parameters(made[0].astype(kind), mine)
        if judge.parameters(reference, mine).equal:
            return None
        words = f"is not the reference's, quantised ({declared}): {difference.sentence}"
        return _Weight(
            slot,
            declared,
            dataclasses.replace(difference, sentence=words),
            (wide,),
            _loss(reference, wide),
        )

    # ---- masked rows

    def error(
        self, slot: SlotPair, measure: Callable[[Array, Array], Any], u: float
    ) -> judge.PairError | None:
        """The error of a pair over the rows that are not masked; None when no declaration masks it,
        or it cannot be read.
        """
        keep = self._masks.get((slot.reference_record, slot.target_record))
        if keep is None:
            return None
        try:
            a, b = (
                self.reference.array(slot.reference_record),
                self.target.array(slot.target_record),
            )
        except ElementsMissing:
            return None
        if a.shape != b.shape or a.shape != keep.shape:
            return None
        zero = a.dtype.type(0)
        left, right = np.where(keep, a, zero), np.where(keep, b, b.dtype.type(0))
        if left.dtype == right.dtype and left.tobytes() == right.tobytes():
            return judge.PairError(0.0, exact=True, u=u)
        measured = measure(left, right)
        return judge.error_of(
            measured,
            self.reference.records[slot.reference_record],
            self.target.records[slot.target_record],
            u,
        )

    def _all_masks(self, plan: Plan) -> dict[tuple[int, int], Array]:
        out: dict[tuple[int, int], Array] = {}
        for pair in plan.pairs:
            call, other = self.reference.calls[pair.reference], self.target.calls[pair.target]
            entry = self.policy.of(call.scope, (call.op_type, other.op_type)).get(
                "skip-masked-rows"
            )
            if entry is None:
                continue
            keep = self._keeper(call, other, entry)
            for slot in pair.slots:
                record = self.reference.records[slot.reference_record]
                if (
                    is_input(slot.reference_slot) or is_output(slot.reference_slot)
                ) and entry.covers_slot(slot.reference_slot):
                    found = keep(slot.reference_slot, record.shape)
                    if (
                        found is not None
                        and record.shape == self.target.records[slot.target_record].shape
                    ):
                        out[slot.reference_record, slot.target_record] = found
        return out

    def _keeper(
        self, call: Call, other: Call, entry: Entry
    ) -> Callable[[str, tuple[int, ...]], Array | None]:
        visible = self._visible(self.reference, call, entry.mask)
        if visible is None:
            visible = self._visible(self.target, other, entry.mask)

        def keep(slot: str, shape: tuple[int, ...]) -> Array | None:
            if visible is None or not entry.covers_slot(slot.rpartition(":")[2]):
                return None
            return _rows(visible, shape)

        return keep

    def masking(self, call: Call, other: Call) -> Semantics:
        """The reference's own semantics, with masked rows left out where that is declared."""
        entry = self.policy.of(call.scope, (call.op_type, other.op_type)).get("skip-masked-rows")
        return Semantics(keep=self._keeper(call, other, entry)) if entry is not None else PLAIN

    @staticmethod
    def _visible(run: Run, call: Call, name: str) -> Array | None:
        """(batch, position) -> does it count?, from the mask the call or one around it was
        given.
        """
        at: Call | None = call
        while at is not None:
            for ref in at.refs:
                if ref.slot in (f"input.{name}", name):
                    try:
                        return _as_rows(run.array(ref.record))
                    except ElementsMissing:
                        return None
            at = run.calls[at.parent] if at.parent >= 0 else None
        return None

    # ---- stretches

    def container(
        self, found: ReplayResult, call: Call, other: Call, replaying: CallReplay
    ) -> ReplayResult:
        """The replay of a container's own operators, under what is declared of the container where
        that explains them better.
        """
        known = self.policy.of(call.scope, (call.op_type, other.op_type))
        entries = {kind: e for kind, e in known.items() if kind in _IN_CONTAINERS and not e.ignore}
        if not entries or max((item.score for item in found.local.values()), default=0.0) <= 1:
            return found
        for entry in entries.values():
            self._looked[entry.number] += 1
        best = found
        for semantics, _ in self._candidates(call, other, entries, (), replaying):
            again = replaying.figures(semantics)
            if again.local.keys() >= found.local.keys() and _worst(again) < _worst(best):
                best = again
            if _worst(best) <= 1:
                break
        if best is not found:
            self._between[call.id] = {
                _stretch_of(slot): (entries, _sqnr(item.error_rel))
                for slot, item in found.local.items()
                if item.score > 1
            }
        return best

    def stretch(
        self, verdict: Verdict | None, call: Call, other: Call, outputs: Sequence[SlotPair]
    ) -> Verdict | None:
        """The verdict of a container's own operators, with what is declared of the container
        applied to it.
        """
        if verdict is not None and verdict.verdict in (*_PASSES, VerdictKind.PRECISION):
            entries, sqnr = self._between.get(call.id, {}).get(
                _stretch_of(verdict.slot), ({}, None)
            )
            if entries and (verdict.verdict in _PASSES or "fused-rounding" in entries):
                for known in entries.values():
                    self._said.append((known, None, call, sqnr, str(known)))
                what = "; ".join(map(str, entries.values()))
                return verdict.replace(
                    verdict=VerdictKind.DECLARED,
                    confidence=Confidence.NONE,
                    numbers={**verdict.numbers, "sqnr_db": sqnr},
                    sentence=f"{what}: SQNR {sqnr:.1f} dB; beyond that {verdict.sentence}"
                    if sqnr is not None
                    else verdict.sentence,
                )
        entry = self.policy.of(call.scope, (call.op_type, other.op_type)).get("tolerance")
        if entry is None or verdict is None or verdict.verdict in _PASSES:
            return verdict
        if entry.ignore:
            return self._ignored(entry, call, verdict)
        self._looked[entry.number] += 1
        self._applied[entry.number] += 1
        worst = 0.0
        for slot in outputs:
            if not entry.covers_slot(slot.reference_slot):
                return verdict
            try:
                a, b = (
                    self.reference.array(slot.reference_record).astype(np.float64),
                    self.target.array(slot.target_record).astype(np.float64),
                )
            except ElementsMissing:
                return verdict
            if a.shape != b.shape:
                return verdict
            if entry.rel_l2 is not None:
                size = stored_codes.norm(a)
                error = stored_codes.norm(b - a) / size if size else math.inf
                worst = max(worst, error / entry.rel_l2 if entry.rel_l2 else math.inf)
            else:
                worst = max(worst, _worst_share(np.abs(b - a), np.abs(a), entry))
        if not outputs or not worst <= 1:
            return verdict
        e_out = verdict.numbers.get("e_out")
        self._said.append((entry, None, call, _sqnr(e_out), str(entry)))
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            score=worst,
            sentence=f"{entry}, against the reference's output; {verdict.sentence}",
        )

    # ---- the answer

    def looked(self, entry: Entry) -> None:
        """Note that an entry spoke of something."""
        self._looked[entry.number] += 1

    def met(self, entry: Entry, call: Call, error: float | None) -> None:
        """Note that an entry explained the error of a call, a relative 2-norm."""
        self._applied[entry.number] += 1
        self._said.append((entry, None, call, _sqnr(error), str(entry)))

    def summary(self) -> tuple[Declared, ...]:
        """What was declared and met, and what is quantised without a declaration: one statement
        each, with the worst SQNR and where.
        """
        groups: dict[Any, list[tuple[Call, float | None, str]]] = {}
        for entry, schemes, call, sqnr, what in self._said:
            groups.setdefault((entry, schemes), []).append((call, sqnr, what))
        return tuple(
            self._statement(entry, schemes, members) for (entry, schemes), members in groups.items()
        )

    def _statement(
        self,
        entry: Entry | None,
        schemes: tuple[Scheme, Scheme | None] | None,
        members: Sequence[tuple[Call, float | None, str]],
    ) -> Declared:
        known = [(sqnr, call) for call, sqnr, _ in members if sqnr is not None]
        sqnr, worst = min(known, key=lambda item: item[0]) if known else (None, None)
        calls = [call for call, _, _ in members]
        names = tuple(dict.fromkeys(c.scope or c.root for c in calls))
        ops = tuple(dict.fromkeys(c.op_type for c in calls))
        snippet = (
            _snippet(schemes, self._selection(calls, names, ops)) if schemes is not None else ""
        )
        return Declared(
            members[0][2],
            entry is not None,
            len(calls),
            names,
            ops,
            sqnr,
            (worst.scope or worst.root) if worst is not None else "",
            snippet,
            entry.why if entry is not None else "",
            bool(entry is not None and entry.ignore),
        )

    def _selection(self, calls: Sequence[Call], names: Sequence[str], ops: Sequence[str]) -> str:
        """What selects these calls and no other leaf: the operator types, if need be with the
        module they lie in, else their modules.
        """
        alike = [scope for scope, op in self._leaves if op in ops and scope not in self._wrong]
        if len(alike) == len(calls):
            return f"op: {_flow(ops)}"
        starred = tuple(dict.fromkeys(align.starred(n) for n in names))
        prefix = ".".join(
            part
            for part, *rest in itertools.takewhile(
                lambda p: len(set(p)) == 1, zip(*(n.split(".") for n in starred))
            )
        )
        pattern = f"{prefix}.*"
        if prefix and sum(fnmatch.fnmatchcase(scope, pattern) for scope in alike) == len(calls):
            return f'module: "{pattern}", op: {_flow(ops)}'
        return f"module: {_flow(starred)}, op: {_flow(ops)}"

    def notes(self) -> list[str]:
        """Entries that select calls and yet say nothing about any of them."""
        needs = {
            "fast-gelu": "computes a GELU of another form",
            "tf32": "multiplies matrices",
            "quantisation": "is quantised",
        }
        return [
            f"policy entry {e.number} ({e}): none of the {self._looked[e.number]} differing "
            f"calls it selects {needs[e.declare]}"
            for e in self.policy.entries
            if self._looked[e.number] and not self._applied[e.number] and e.declare in needs
        ]


def _worst(found: ReplayResult) -> float:
    return max((item.score for item in found.local.values()), default=math.inf)


def _stretch_of(slot: str) -> str:
    """ "3" for what a container's fourth child was given ("3:input.0"), "" for what the container
    returned.
    """
    return slot.partition(":")[0] if ":" in slot else ""


def _quantiser(grid: semantics_of.Grid, scale: Array | None, inner: bool) -> Quantise:
    def quantise(x: Array, flips: tuple[int, ...]) -> tuple[Array, int]:
        kind = dtypes.of(x).name
        working = kind if inner else "float32" if judge.unit_roundoff(kind) > 2.0**-53 else kind
        # Division, or multiplication with a rounded reciprocal, of a scale that was rounded once: a
        # few units either way.
        ties = semantics_of.Ties(4 * judge.unit_roundoff(working))
        return semantics_of.fake_quantise(
            x, grid, scale, working=working, ties=ties, flips=flips
        ), ties.most

    return quantise


def _grids(scheme: Scheme) -> list[semantics_of.Grid]:
    spans = ("narrow", "full") if scheme.symmetric and scheme.format == "int" else ("narrow",)
    return [
        semantics_of.Grid(
            scheme.bits, scheme.per, scheme.axis, scheme.group, scheme.symmetric, scheme.format, s
        )
        for s in spans
    ]


def _loss(reference: Array, values: Array) -> float:
    wide = reference.astype(np.float64)
    size = stored_codes.norm(wide)
    return (
        stored_codes.norm(values.astype(np.float64).reshape(wide.shape) - wide) / size
        if size
        else 0.0
    )


def _sqnr(error_rel: float | None) -> float | None:
    """10 log10(sum r^2 / sum (r - y)^2) in dB from ||y - r|| / ||r||; None when either sum is 0 or
    unknown.
    """
    if error_rel is None or not math.isfinite(error_rel) or error_rel <= 0:
        return None
    return -20.0 * math.log10(error_rel)


def _as_rows(mask: Array) -> Array | None:
    """(batch, position), True where it counts. 2-D: 1 or True counts; additive floats: near zero
    counts. 4-D: seen by any query.
    """
    wide = mask.astype(np.float64)
    if mask.dtype.kind == "f" or dtypes.of(mask).kind == "float":
        additive = bool((wide < 0).any())
        counts = wide > -1e3 if additive else wide != 0
    else:
        counts = wide != 0
    if counts.ndim == 4:
        counts = counts.any((1, 2))
    if counts.ndim == 1:
        counts = counts[None]
    return counts if counts.ndim == 2 else None


def _rows(visible: Array, shape: tuple[int, ...]) -> Array | None:
    """The mask over a tensor of this shape: (batch, ..., position, ...), or with both axes
    flattened into the first.
    """
    batch, positions = visible.shape
    if visible.all():
        return None
    if shape and shape[0] == batch:
        for axis in range(1, len(shape)):
            if shape[axis] == positions and not (axis == len(shape) - 1 and len(shape) > 2):
                laid = visible.reshape(
                    batch, *(positions if a == axis else 1 for a in range(1, len(shape)))
                )
                return np.broadcast_to(laid, shape)
    if shape and shape[0] == batch * positions:
        return np.broadcast_to(visible.reshape(-1, *([1] * (len(shape) - 1))), shape)
    return None


def _flow(names: Sequence[str]) -> str:
    quoted = [f'"{n}"' if not n.isidentifier() else n for n in names]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _snippet(schemes: tuple[Scheme, Scheme | None], selection: str) -> str:
    """A policy, as one line of YAML, that declares what was found."""
    weights, activations = schemes
    parts = [selection, "declare: quantisation", f"weights: {_scheme(weights)}"]
    if activations is not None:
        parts.append(f"activations: {_scheme(activations)}")
    return f"allow: [{{{', '.join(parts)}}}]"


def _scheme(scheme: Scheme) -> str:
    parts = [
        f"bits: {scheme.bits}" if scheme.format == "int" else f"format: {scheme.format}",
        f"per: {scheme.per}",
    ]
    parts += [f"mode: {scheme.mode}"] if scheme.mode else []
    parts += [f"axis: {scheme.axis}"] if scheme.axis else []
    parts += [f"group: {scheme.group}"] if scheme.group else []
    parts += ["symmetric: false"] if not scheme.symmetric else []
    parts += ["rounding: free"] if scheme.rounding == "free" else []
    return f"{{{', '.join(parts)}}}"


class TensorTolerances:
    """Applies `tolerance` entries; what else can be declared is of calls, which such tensors have
    none of.
    """

    def __init__(self, declaring: DeclaredDifferences) -> None:
        self._declaring = declaring

    def entry(self, slot: SlotPair, call: Call, label: Call) -> Entry | None:
        """The last entry that speaks of a tensor, as `call` of the reference or `label` of the
        target has it.
        """
        policy = self._declaring.policy
        pairs = [(call, label), (label, call)]
        found = (policy.of(a.scope, (a.op_type, b.op_type)).get("tolerance") for a, b in pairs)
        fits = (
            e
            for e in found
            if e is not None
            and (e.covers_slot(slot.reference_slot) or e.covers_slot(slot.target_slot))
        )
        entry = max(fits, key=lambda e: e.number, default=None)
        if entry is not None:
            self._declaring.looked(entry)
        return entry

    def declared(self, verdict: Verdict, entry: Entry, call: Call, error: float | None) -> Verdict:
        """The verdict of a tensor whose error the entry allows. error: relative 2-norm."""
        sentence = f"{entry}; {verdict.sentence}"
        self._declaring.met(entry, call, error)
        return verdict.replace(
            verdict=VerdictKind.DECLARED,
            confidence=Confidence.NONE,
            cause=CauseKind.UNKNOWN,
            score=None,
            sentence=sentence,
        )


def allows(entry: Entry, made: Array, right: Array) -> bool:
    """Is what was made as near to what is right as an entry says? Where one of them is not finite,
    both must be, and alike.
    """
    if entry.ignore:
        return True
    if made.shape != right.shape:
        return False
    y, r = (a.astype(np.float64).reshape(-1) for a in (made, right))
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
