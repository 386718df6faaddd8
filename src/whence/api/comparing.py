"""The stages of a comparison in order: first things first, plan, measure, judge (exact, replay, growth), locate."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from whence import __version__, align, judge, metrics
from whence.api.again import Again
from whence.api.declaring import Declaring, Replaying, Semantics
from whence.api.modelling import Models
from whence.api.replaying import Replayed, Replayer
from whence.api.sampling import Sampling
from whence.api.third import Third
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge.policy import Policy
from whence.locate import GUILTY, decide, declare_patched, findings, order_and_taint
from whence.records import Call, Record, Region, Run, children, regions
from whence.results import CallPair, Comparison, Coverage, Finding, Measured, Row, SlotPair, Verdict

_SAME = Measured("same", True, {"rel_l2": 0.0, "max_abs_err": 0.0})
_CACHED = 1 << 18  # records read from disk and kept as structs, each some hundred bytes
_SEVERITY = ("identical", "noise", "declared", "inherited", "amplified", "precision", "nondeterministic", "undetermined", "incomparable",
             "structural", "param-diff", "introduced")  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How two runs are compared.

    replay: run the reference's programs on the target's inputs where they are usable. tier: how much is measured per pair.
    rtol, atol: for the `close_share` column only; no verdict rests on them. allow: vendor namespaces whose operators may be
    replayed. policy: declared differences. sample: "all" replays every call, "auto" a few steps of many and what stands out.
    budget: seconds for all replays. threads: for measuring; None takes all cores. progress: called with (done, of, what).
    model: the user's own, for calls of the reference without a usable program.
    """

    replay: bool = True
    strict: bool = False
    min_coverage: float = 0.9
    tier: str = "full"
    rtol: float = 1e-3
    atol: float = 1e-5
    allow: tuple[str, ...] = ()
    threads: int | None = None
    sample: str = "auto"
    budget: float | None = None
    policy: Policy | None = None
    model: Models | None = None
    progress: Callable[[int, int, str], None] | None = field(default=None, compare=False)


def compare_runs(
    reference: Run, target: Run, options: CompareOptions, *, again: Sequence[Run] = (), third: Run | None = None
) -> Comparison:
    """Compare two opened runs. Reads all, writes nothing. again: further runs of the reference; third: it in higher precision."""
    return _Comparing(reference, target, options, again, third).result()


class _Read:
    """A run whose calls were read once and whose records stay read: they are looked at many times."""

    def __init__(self, run: Run) -> None:
        self.path, self.info, self.ended = run.path, run.info, run.ended
        self.programs, self.notes, self.steps = run.programs, run.notes, run.steps
        self.calls: Sequence[Call] = list(run.calls)
        self.records: Sequence[Record] = _Kept(run.records)
        self.array = run.array


class _Kept(Sequence[Record]):
    def __init__(self, records: Sequence[Record]) -> None:
        self._length = len(records)
        self._one = functools.lru_cache(maxsize=_CACHED)(records.__getitem__)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        return self._one(at)


class _Comparing:
    def __init__(self, reference: Run, target: Run, options: CompareOptions, again: Sequence[Run], third: Run | None) -> None:
        self.reference, self.target, self.options = _Read(reference), _Read(target), options
        self.timing: dict[str, float] = {}
        self.lone: dict[tuple[int, int], float] = {}
        self.notes: list[str] = []
        self.calls = self.reference.calls
        self.made = {r.record for c in self.calls for r in c.refs if r.slot.startswith(("output", "mutated"))}
        self.kids, self.target_kids = children(self.calls), children(self.target.calls)
        with self._timed("again"):
            further = [_Read(run) for run in again]
            self.again = Again(
                self.reference, further, allow=options.allow, model=options.model, threads=options.threads, tell=self._tell
            )  # fmt: skip
        with self._timed("third"):
            self.third = Third(self.reference, self.target, _Read(third) if third is not None else None, tell=self._tell)

    # ---- the stages

    def result(self) -> Comparison:
        with self._timed("plan"):
            self.plan = align.plan(self.reference, self.target)
            self.pair_of = {p.reference: i for i, p in enumerate(self.plan.pairs)}
            self.slots: list[dict[str, SlotPair]] = [{s.reference_slot: s for s in p.slots} for p in self.plan.pairs]
            self.declaring = Declaring(self.options.policy, self.reference, self.target, self.plan)
        with self._timed("measure"):
            self.measured = self._measure()
        self.inputs_differ = self._first_things()
        with self._timed("judge"):
            self.regions = list(regions(self.calls))
            self.again.find(self.regions)
            verdicts = self._judge()
            figures = ((call, local) for call, found in self.locals.items() for local in found.values())
            verdicts = self.again.explained(verdicts, figures)
            verdicts = self.third.judged(verdicts, self.regions, self.first, self._error)
            verdicts = declare_patched(verdicts, self.plan.pairs, self.calls, self.target.calls)
        with self._timed("locate"):
            judged = order_and_taint(self.calls, self.regions, verdicts)
            found = [self._with_worst(f) for f in findings(judged, self.calls, self.plan, align.starred)]
        per_call = self._per_call(verdicts)
        coverage = self._coverage(per_call)
        every = tuple(verdicts.values())
        status, why = decide(
            found,
            every,
            coverage,
            inputs_differ=bool(self.inputs_differ),
            strict=self.options.strict,
            min_coverage=self.options.min_coverage,
        )
        return Comparison(
            status=status, evidence=self._evidence(every, found), reference=self.reference.path, target=self.target.path,
            findings=tuple(found),
            first_difference=self._first_difference(per_call), counts=dict(Counter(v for v in per_call.values())), coverage=coverage,
            unmatched=len(self.plan.unmatched_reference) - coverage.inside + len(self.plan.unmatched_target) + len(self.plan.ambiguous),
            incomparable=self._incomparable(), inputs_differ=tuple(self.inputs_differ), versions=self._versions(), plan=self.plan,
            rows=tuple(self._rows(per_call)), verdicts=every, headline=why,
            notes=(
                *self.again.notes, *self.third.notes, *self.sampling.notes(len(self.not_replayed)), *self.notes, *self.declaring.notes(),
                *(self.options.model.note() if self.options.model is not None else ()), *self._run_notes(),
            ),
            declared=self.declaring.summary(),
            repetition=self.again.summary(), third=self.third.summary(verdicts, self.plan.pairs),
            without_partner=self._without_partner(),
            environment=tuple(align.differences(self.reference, self.target)), timing=self.timing,
        )  # fmt: skip

    # ---- measure

    def _measure(self) -> dict[tuple[int, int], Measured]:
        wanted = dict.fromkeys((s.reference_record, s.target_record) for p in self.plan.pairs for s in p.slots)
        out: dict[tuple[int, int], Measured] = {}
        left: list[tuple[int, int]] = []
        for key in wanted:
            a, b = self.reference.records[key[0]], self.target.records[key[1]]
            if a.hash and a.hash == b.hash and a.dtype == b.dtype and a.shape == b.shape:
                out[key] = _SAME
            elif a.shape != b.shape:
                out[key] = Measured("none", False, why=f"shape {_shape(a)} against {_shape(b)}")
            else:
                left.append(key)
        readable: list[tuple[int, int]] = []

        def arrays() -> Iterator[tuple[Array, Array]]:
            for key in left:
                try:
                    pair = self.reference.array(key[0]), self.target.array(key[1])
                except ElementsMissing as error:
                    out[key] = Measured("none", False, why=str(error))
                    continue
                readable.append(key)
                self._tell(len(readable), len(left), "measuring")
                yield pair

        results = metrics.measure_many(
            arrays(), tier=self.options.tier, rtol=self.options.rtol, atol=self.options.atol, threads=self.options.threads
        )
        out.update(zip(readable, results, strict=True))
        return out

    def _error(self, slot: SlotPair) -> judge.Error:
        a, b = self.reference.records[slot.reference_record], self.target.records[slot.target_record]
        unmasked = self.declaring.error(slot, metrics.measure, _u(a, b))
        if unmasked is not None:
            return unmasked
        measured = self.measured[slot.reference_record, slot.target_record]
        error = judge.error_of(measured, a, b, _u(a, b))
        if error.value is None and error.u and measured.tier != "none" and (arrays := self._arrays(slot)) is not None:
            error = judge.between(*arrays, error.u)
        if error.u and (at := judge.lone_element(measured)) is not None:
            error = dataclasses.replace(error, lone=self._lone(slot, at, measured))
        spread = self.again.spread(slot.reference_record, measured)
        return dataclasses.replace(error, spread=spread) if spread else error

    def _lone(self, slot: SlotPair, at: tuple[int, ...], measured: Measured) -> float:
        """Error of one element, relative to it or to its tensor's root mean square; 0 where the elements are gone."""
        key = (slot.reference_record, slot.target_record)
        found = self.lone.get(key)
        if found is None:
            arrays = self._arrays(slot)
            a, b = (complex(x[at]) for x in arrays) if arrays is not None else (0j, 0j)
            size = max(abs(a), (measured.values.get("reference_norm") or 0.0) / np.sqrt(self.reference.records[key[0]].count))
            found = self.lone[key] = float(abs(b - a) / size) if size else 0.0
        return found

    # ---- first things first

    def _first_things(self) -> list[str]:
        """Root inputs that differ without an explanation, in sentences. Tokens that parted within noise explain themselves: a note each."""
        sentences: list[str] = []
        parted: set[tuple[str, int]] = set()
        for pair, slots in zip(self.plan.pairs, self.slots):
            call = self.calls[pair.reference]
            if call.parent != -1:
                continue
            for slot in slots.values():
                if not slot.reference_slot.startswith("input") or slot.reference_record in self.made:
                    continue
                a, b = self.reference.records[slot.reference_record], self.target.records[slot.target_record]
                error = self._error(slot)
                limit = max(2 * _u(a, b), judge.LIMITS.spread * error.spread)
                if error.exact or (error.value is not None and error.value <= limit):
                    continue
                if any(root == call.root and step < call.step for root, step in parted):
                    continue
                sentence = self._input_sentence(call, slot)
                why = self._token_flip(pair, slot) if call.step > 0 else ""
                if why:
                    parted.add((call.root, call.step - 1))
                    self.notes.append(why)
                else:
                    sentences.append(sentence)
        return sentences

    def _input_sentence(self, call: Call, slot: SlotPair) -> str:
        name = slot.reference_slot.removeprefix("input.")
        where = f"{call.root} step {call.step}: {name}"
        arrays = self._arrays(slot)
        if arrays is None or arrays[0].shape != arrays[1].shape:
            return f"{where} ({self.measured[slot.reference_record, slot.target_record].why or 'different content'})"
        different = np.argwhere(arrays[0] != arrays[1])
        if different.size == 0 and arrays[0].ndim:
            return f"{where} ({arrays[0].dtype} against {arrays[1].dtype})"
        at = tuple(int(i) for i in different[0]) if arrays[0].ndim else ()
        return f"{where} at {list(at)}: {arrays[0][at]} against {arrays[1][at]} ({len(different)} of {arrays[0].size} differ)"

    def _token_flip(self, pair: CallPair, slot: SlotPair) -> str:
        """Tokens that differ because the scores of the step before were a near tie: a sentence; "" when that does not explain them."""
        call = self.calls[pair.reference]
        arrays = self._arrays(slot)
        if arrays is None or arrays[0].shape != arrays[1].shape or arrays[0].dtype.kind not in "iu" or arrays[0].ndim == 0:
            return ""
        before = next(
            (s for p, s in zip(self.plan.pairs, self.slots)
             if (c := self.calls[p.reference]).parent == -1 and c.root == call.root and c.step == call.step - 1 and c.rank == call.rank),
            None,
        )  # fmt: skip
        for score in (before or {}).values():
            if not score.reference_slot.startswith("output"):
                continue
            scores = self._arrays(score)
            if scores is None or scores[0].ndim < 2 or scores[0].dtype.kind in "iub" or scores[0].shape != scores[1].shape:
                continue
            flips = _flips(arrays, scores)
            if flips:
                a, b, gap, noise = flips
                tie = f"the scores part them by {gap:.3g}, within their own difference {noise:.3g}"
                return f"step {call.step - 1}: token {a} against {b}; {tie}: inherited"
        return ""

    def _arrays(self, slot: SlotPair) -> tuple[Array, Array] | None:
        try:
            return self.reference.array(slot.reference_record), self.target.array(slot.target_record)
        except ElementsMissing:
            return None

    # ---- judge

    def _judge(self) -> dict[tuple[int, int], Verdict]:
        """A verdict for every region whose call has a partner, by (reference call, stretch)."""
        self.first: dict[int, int] = {}
        self.locals: dict[int, dict[str, judge.Local]] = {}
        self.quick: set[int] = set()
        self.worst = self._worst_by_step()
        self.first_params: dict[tuple[str, str, str], tuple[int, int]] = {}
        self.parameter_cache: dict[tuple[int, int], judge.ParameterDifference] = {}
        self.inside: dict[int, int] = {}
        self.inner: dict[int, dict[str, int]] = {}
        self.replayer = None
        if self.options.replay:
            self.replayer = Replayer(
                self.reference, self.target, paired=self.pair_of, inner=self._inner_parameter, allow=self.options.allow,
                spread=self.again.elementwise, model=self.options.model,
            )  # fmt: skip
        self.between: dict[int, Replayed] = {}
        self.seen_errors: dict[int, list[judge.Error]] = {}
        self.not_replayed: set[int] = set()
        self.postponed: dict[int, int] = {}
        self.widened: set[tuple[str, str]] = set()
        self.sampling = Sampling(self.calls, everything=self.options.sample == "all", budget=self.options.budget)
        verdicts: dict[tuple[int, int], Verdict] = {}
        paired = [(region, self.pair_of[region.call]) for region in self.regions if region.call in self.pair_of]

        # All calls of one module together: its parameters are converted once. The order within a module stays.
        def order(item: tuple[Region, int]) -> tuple[bool, str]:
            call = self.calls[item[0].call]
            return not self.sampling.first(call), call.scope

        leaves = sorted((item for item in paired if item[0].stretch < 0), key=order)
        for done, (region, index) in enumerate(leaves):
            self._tell(done + 1, len(leaves), "judging")
            verdicts[region.call, -1] = self._leaf(index, self.plan.pairs[index])
        self._widen(verdicts)
        for region, index in paired:
            pair = self.plan.pairs[index]
            if region.stretch < 0:
                for slot in self.slots[index].values():
                    if slot.reference_slot.startswith(("input", "output", "mutated")):
                        self.first.setdefault(slot.reference_record, slot.target_record)
            else:
                verdict = self._stretch(index, pair, region)
                call, other = self.calls[pair.reference], self.target.calls[pair.target]
                verdict = self.declaring.stretch(verdict, call, other, list(self.slots[index].values()))
                if verdict is not None:
                    verdicts[region.call, region.stretch] = verdict
        self._second_look(verdicts)
        return verdicts

    def _worst_by_step(self) -> dict[int, float]:
        """The largest error of any output, by step."""
        worst: dict[int, float] = {}
        for pair, slots in zip(self.plan.pairs, self.slots):
            step = self.calls[pair.reference].step
            for slot in slots.values():
                if (
                    slot.reference_slot.startswith(("output", "mutated"))
                    and not self.measured[slot.reference_record, slot.target_record].identical
                ):
                    worst[step] = max(worst.get(step, 0.0), self._error(slot).value or 0.0)
        return worst

    def _second_look(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """When nothing is flagged by itself: weak evidence that points the same way at all siblings."""
        if any(v.verdict in GUILTY for v in verdicts.values()):
            return
        pooled = self._pooled()
        spared = {call for call in self.quick if any(self._group(call, slot) in pooled for slot in self.locals[call])}
        for call in spared:
            # The working replay was spared: what rounds inside has patterns that only it knows.
            pair = self.plan.pairs[self.pair_of[call]]
            given = self._given_parameters(self.calls[call], self.slots[self.pair_of[call]])
            self._replayed(self.pair_of[call], self.calls[call], self.target.calls[pair.target], given, thorough=True)
        if spared:
            pooled = self._pooled()
        for (call, stretch), verdict in verdicts.items():
            found = pooled.get((align.starred(self.calls[call].scope), self.calls[call].op_type, stretch))
            if found is not None and verdict.evidence == "replay":
                verdicts[call, stretch] = _but_verdict(
                    verdict, verdict="introduced", confidence="likely", score=found.z / judge.LIMITS.pooled,
                    sentence=f"introduced here: {found.sentence}",
                )  # fmt: skip

    def _pooled(self) -> dict[Any, judge.Pooled]:
        return judge.pool((self._group(call, slot), local) for call, found in self.locals.items() for slot, local in found.items())

    def _group(self, call: int, slot: str) -> tuple[str, str, int]:
        """What a call's output is a sibling of: names with their numbers starred, and the stretch that made it."""
        stretch = -1 if self.calls[call].leaf else int(slot.partition(":")[0]) if slot[0].isdigit() else len(self.kids.get(call, ()))
        return align.starred(self.calls[call].scope), self.calls[call].op_type, stretch

    def _leaf(self, index: int, pair: CallPair) -> Verdict:
        call, other = self.calls[pair.reference], self.target.calls[pair.target]
        slots = self.slots[index]
        given = self._given_parameters(call, slots)
        if slots and all(self.measured[s.reference_record, s.target_record].identical for s in slots.values()):
            return Verdict(index, "identical", evidence="two dumps", sentence="bitwise equal")
        inputs, outputs, parameters = self._sorted(call, slots)
        in_errors = [self._error(s) for s in inputs]
        out_errors = [self._error(s) for s in outputs]
        u = max((e.u for e in out_errors), default=0.0)
        evidence = judge.LeafEvidence(index, in_errors, out_errors, u, parameters, structural=self._structural(inputs, outputs))
        replaying = self._replaying(index, call, other, given) if self.replayer is not None else None
        declared, figures = self.declaring.leaf(evidence, call, other, slots, replaying)
        if declared is not None:
            self.locals[call.id] = {str(i): local for i, local in enumerate(figures)}
            return self._unless_unexplained(call, slots, given, declared)
        first = judge.judge_leaf(evidence)
        if first.verdict in ("identical", "structural") or self.replayer is None:
            return self._unless_unexplained(call, slots, given, first)
        reason = self._postponed(call, index, judge.grow(in_errors, out_errors, u))
        if reason:
            return self._unless_unexplained(call, slots, given, judge.judge_leaf(_but(evidence, no_replay=reason)))
        found = self._replayed(index, call, other, given)
        if not found.local:
            return self._unless_unexplained(call, slots, given, judge.judge_leaf(_but(evidence, no_replay=found.why)))
        verdict = self._with_cause(_but(evidence, local=list(found.local.items()), broken=found.broken), call, other)
        return self._unless_unexplained(call, slots, given, verdict)

    def _postponed(self, call: Call, index: int, growth: judge.Growth) -> str:
        """Why this call is not replayed now, "" when it is."""
        stands_out = (
            growth.growth > judge.LIMITS.amplified or growth.by > 1 or not np.isfinite(growth.e_out) or growth.verdict == "undetermined"
        )
        widened = (call.root, call.scope) in self.widened
        reason = self.sampling.reason(call, stands_out=stands_out or widened)
        if reason:
            self.not_replayed.add(call.id)
            self.postponed[call.id] = index
        else:
            self.not_replayed.discard(call.id)
        return reason

    def _widen(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """A module that is at fault in a step that was replayed is looked at in all."""
        guilty = (self.calls[call] for (call, _), verdict in verdicts.items() if verdict.verdict in GUILTY)
        self.widened = {(call.root, call.scope) for call in guilty}
        for call, index in list(self.postponed.items()):
            if (self.calls[call].root, self.calls[call].scope) in self.widened:
                verdicts[call, -1] = self._leaf(index, self.plan.pairs[index])

    def _replayed(self, index: int, call: Call, other: Call, given: Mapping[str, bool], *, thorough: bool = False) -> Replayed:
        """What a replay of this call finds, all its outputs together."""
        assert self.replayer is not None
        replaying = self._replaying(index, call, other, given, thorough=thorough)
        found = replaying.figures(self.declaring.masking(call, other))
        if not call.leaf:
            found = self.declaring.container(found, call, other, replaying)
        if self._surprising(index, found):
            found = self.replayer.examined(call, found)
            if not found.local and self.replayer.instead(call, found.why):
                return self._replayed(index, call, other, given, thorough=thorough)
        if not found.local:
            return found
        self.locals[call.id] = {slot: figures for slot, figures in found.local.items() if not figures.whole}
        (self.quick.add if found.quick else self.quick.discard)(call.id)
        if found.inside:
            self.inside[call.id] = len(self._alone(call.id))
        return found

    def _surprising(self, index: int, found: Replayed) -> bool:
        """Is there anything that a program must be right about the reference for, before it is believed?"""
        for slot, local in found.local.items():
            if local.score > 1 or (local.reference_rel or 0.0) > judge.LIMITS.growth * max(local.floor_rel, local.u):
                return True
            pair = self._slot(index, slot)
            if pair is not None and (self._error(pair).value or 0.0) > judge.LIMITS.growth * (
                (local.inherited_rel or 0.0) + local.floor_rel + 2 * local.u
            ):
                return True
        return False

    def _alone(self, call: int) -> list[int]:
        """Calls below this one without a partner, and without one between."""
        found: list[int] = []
        todo = [call]
        while todo:
            below = [k for k in self.kids.get(todo.pop(), ()) if k not in self.pair_of]
            found += below
            todo += below
        return found

    def _shows_no_inside(self, index: int, pair: CallPair) -> bool:
        """Is this a call whose inside only the reference shows, with the same bits going in and coming out?"""
        if self.target_kids.get(pair.target) or not self.kids.get(pair.reference):
            return False
        slots = [s for s in self.slots[index].values() if s.reference_slot.startswith(("input", "output", "mutated"))]
        return bool(slots) and all(self.measured[s.reference_record, s.target_record].identical for s in slots)

    def _replaying(self, index: int, call: Call, other: Call, given: Mapping[str, bool], *, thorough: bool = False) -> Replaying:
        replayer = self.replayer
        assert replayer is not None

        def slot_of(slot: str) -> SlotPair | None:
            return self._slot(index, slot)

        def figures(semantics: Semantics) -> Replayed:
            found = replayer.figures(
                call, other, slot_of, given, lambda slot, needs: self._all_same(index, (slot, *needs)), semantics, thorough=thorough
            )  # fmt: skip
            if found.refused and call.leaf and not semantics.name:
                self.not_replayed.add(call.id)
            return found

        return Replaying(figures, lambda flagged: replayer.cause(call, other, slot_of, flagged).cause, lambda p: replayer.wide(p, slot_of))

    def _inner_parameter(self, other: Call, inner: Call, slot: str) -> SlotPair | None:
        """What faces a parameter of a call without a partner: one that the target's call has itself, under the same name."""
        held = self.inner.get(other.id)
        if held is None:
            held = {align.normal_scope(r.slot[6:]): r.record for r in other.slots("param")}
            self.inner[other.id] = held
        name = align.normal_scope(f"{inner.scope}.{slot[6:]}" if inner.scope else slot[6:])
        scope = align.normal_scope(other.scope)
        record = held.get(name.removeprefix(f"{scope}.") if scope else name)
        mine = next((r.record for r in inner.refs if r.slot == slot), None)
        return SlotPair(slot, slot, mine, record) if record is not None and mine is not None else None

    def _inner_parameters(self, call: Call, other: Call) -> list[tuple[str, str, judge.ParameterDifference]]:
        """(scope, name, difference) of the parameters of calls below without a partner, against those of the target's call itself."""
        found: list[tuple[str, str, judge.ParameterDifference]] = []
        seen: set[tuple[int, int]] = set()
        for inner in (self.calls[k] for k in self._alone(call.id)):
            for ref in inner.slots("param"):
                pair = self._inner_parameter(other, inner, ref.slot)
                if pair is None or (pair.reference_record, pair.target_record) in seen or not self._is_given(inner, pair):
                    continue
                seen.add((pair.reference_record, pair.target_record))
                found.append((inner.scope, ref.slot[6:], self._parameter(pair)))
        return found

    def _with_cause(self, evidence: judge.LeafEvidence, call: Call, other: Call) -> Verdict:
        verdict = judge.judge_leaf(evidence)
        if verdict.verdict != "introduced" or verdict.side == "reference" or self.replayer is None:
            return verdict
        flagged = [slot for slot, local in evidence.local or () if local.score > 1]
        found = self.replayer.cause(call, other, lambda slot: self._slot(evidence.pair, slot), flagged)
        verdict = judge.judge_leaf(_but(evidence, cause=found.cause, cause_words=found.words))
        return _but_verdict(verdict, operator=found.operator)

    def _slot(self, index: int, slot: str) -> SlotPair | None:
        """What faces each other in a slot of a call's program: of the call itself, or of its k-th child ("3:output.0")."""
        if slot.startswith("param"):
            return self.slots[index].get(slot) or self._deeper_parameter(index, slot)
        if not slot[0].isdigit():
            return self.slots[index].get(slot)
        k, _, slot = slot.partition(":")
        kids = self.kids.get(self.plan.pairs[index].reference, [])
        child = self.pair_of.get(kids[int(k)]) if int(k) < len(kids) else None
        return self.slots[child].get(slot) if child is not None else None

    def _deeper_parameter(self, index: int, slot: str) -> SlotPair | None:
        """A parameter that the target's call has under a wrapper's name, or that a call below it has ("param.norm1.weight")."""
        pair = self.plan.pairs[index]
        other = self.target.calls[pair.target]
        wrapped = self._inner_parameter(other, self.calls[pair.reference], slot)
        if wrapped is not None:
            return wrapped
        record = next((r.record for r in self.calls[pair.reference].refs if r.slot == slot), None)
        name = f"{other.scope}.{slot[6:]}" if other.scope else slot[6:]
        below = list(self.target_kids.get(other.id, ()))
        while below and record is not None:
            call = self.target.calls[below.pop()]
            if name.startswith(f"{call.scope}."):
                inside = f"param.{name[len(call.scope) + 1 :]}"
                for ref in call.refs:
                    if ref.slot == inside:
                        return SlotPair(slot, inside, record, ref.record)
                below += self.target_kids.get(call.id, ())
        return None

    def _all_same(self, index: int, slots: Iterable[str]) -> bool:
        pairs = [self._slot(index, slot) for slot in slots]
        keys = [(p.reference_record, p.target_record) for p in pairs if p is not None]
        return len(keys) == len(pairs) and all(key in self.measured and self.measured[key].identical for key in keys)

    def _unless_unexplained(self, call: Call, slots: Mapping[str, SlotPair], given: Mapping[str, bool], verdict: Verdict) -> Verdict:
        """The verdict, or `undetermined` when the call read a parameter that parted between steps by more than anything before explains.

        What changed it (backward, an optimiser) is not part of the run, so nobody can say whether that was rounding.
        """
        if verdict.verdict not in ("noise", "inherited", "amplified"):
            return verdict
        for slot, was_given in given.items():
            pair = slots[slot]
            if was_given or pair.reference_record in self.made:
                continue
            error = self._error(pair)
            before = max((e for step, e in self.worst.items() if step < call.step), default=0.0)
            limit = max(judge.LIMITS.growth * (before + 2 * error.u), judge.LIMITS.spread * error.spread)
            if error.value is not None and error.value > limit:
                name = slot.removeprefix("param.")
                return _but_verdict(
                    verdict, verdict="undetermined", confidence="", numbers={**verdict.numbers, "e_out": error.value},
                    sentence=f"{name} parted between steps (rel_l2 {error.value:.2g}; before, nothing differed by more than {before:.2g}); "
                    "what changed it, backward or an optimiser, was not captured",
                )  # fmt: skip
        return verdict

    def _stretch(self, index: int, pair: CallPair, region: Region) -> Verdict | None:
        """A container's own operators between two children: what the next child reads, or it returns, against all it could see."""
        call = self.calls[region.call]
        kids = self.kids.get(region.call, [])
        outputs: list[tuple[str, SlotPair]] = []
        if region.stretch < len(kids):
            child = self.pair_of.get(kids[region.stretch])
            candidates = self.slots[child].values() if child is not None else ()
            outputs = [(f"{region.stretch}:{s.reference_slot}", s) for s in candidates if s.reference_slot.startswith("input")]
        else:
            outputs = [(s.reference_slot, s) for s in self.slots[index].values() if s.reference_slot.startswith(("output", "mutated"))]
        if region.stretch == 0:
            given = (s for s in self.slots[index].values() if s.reference_slot.startswith("input"))
            for slot in given:
                self.first.setdefault(slot.reference_record, slot.target_record)
        made = set(region.outputs)
        own: list[tuple[str, SlotPair]] = []
        for name, slot in outputs:
            # What calls without a partner made was never seen face to face before.
            handed_on = slot.reference_record not in made and slot.reference_record in self.first
            seen = self.first.setdefault(slot.reference_record, slot.target_record)
            # The reference handed this tensor on untouched; the target may have done something to it.
            if not handed_on or (
                seen != slot.target_record and self.target.records[seen].hash != self.target.records[slot.target_record].hash
            ):
                own.append((name, slot))
        errors_in = self.seen_errors.setdefault(region.call, [])
        errors_in += [
            self._error(SlotPair("", "", r, self.first[r]))
            for r in region.inputs
            if r in self.first and (r, self.first[r]) in self.measured
        ]
        parameters: list[tuple[str, judge.ParameterDifference]] = []
        inner: dict[str, str] = {}
        if region.stretch == 0:
            _, _, parameters = self._sorted(call, self.slots[index])
            for scope, name, difference in self._inner_parameters(call, self.target.calls[pair.target]):
                inner[f"{scope}.{name}"] = scope
                parameters.append((f"{scope}.{name}", difference))
        wrong = [p for p in parameters if p[1].comparable and not p[1].equal]
        if not own and not wrong:
            return None
        errors_out = [self._error(s) for _, s in own]
        # Who hands on from here what this stretch spoilt has nothing to do with it.
        self.first.update((s.reference_record, s.target_record) for _, s in own)
        u = max((e.u for e in errors_out), default=0.0)
        evidence = judge.LeafEvidence(index, errors_in, errors_out, u, parameters)
        if wrong:
            parameter = judge.judge_leaf(evidence)
            return _but_verdict(parameter, stretch=region.stretch, where=inner.get(parameter.slot, ""))
        if all(e.exact for e in errors_out) or self.replayer is None:
            return judge.judge_region(index, region.stretch, judge.grow(errors_in, errors_out, u))
        reason = self._postponed(call, index, judge.grow(errors_in, errors_out, u)) if call.id not in self.between else ""
        if reason:
            return judge.judge_region(index, region.stretch, judge.grow(errors_in, errors_out, u), note=reason)
        found = self._between(index, pair, call)
        local = [(name, found.local[name]) for name, _ in own if name in found.local]
        rest = [self._error(s) for name, s in own if name not in found.local and not self._explained(index, name)]
        verdict: Verdict | None = None
        if local:
            verdict = _but_verdict(
                self._with_cause(_but(evidence, local=local, broken=found.broken), call, self.target.calls[pair.target]),
                stretch=region.stretch,
            )
        if not rest:
            return verdict or judge.judge_region(index, region.stretch, judge.grow(errors_in, errors_out, u))
        self.not_replayed.add(call.id)
        why = next((found.refused[name] for name, _ in own if name in found.refused), found.why)
        other = judge.judge_region(index, region.stretch, judge.grow(errors_in, rest, u), note=why)
        return max((v for v in (verdict, other) if v is not None), key=lambda v: _SEVERITY.index(v.verdict))

    def _between(self, index: int, pair: CallPair, call: Call) -> Replayed:
        """The replay of a container's own operators, once for all its stretches."""
        found = self.between.get(call.id)
        if found is None:
            given = self._given_parameters(call, self.slots[index])
            found = self.between[call.id] = self._replayed(index, call, self.target.calls[pair.target], given)
        return found

    def _explained(self, index: int, name: str) -> bool:
        """Is an output that was not replayed bitwise equal?"""
        return self._all_same(index, (name,))

    def _sorted(
        self, call: Call, slots: Mapping[str, SlotPair]
    ) -> tuple[list[SlotPair], list[SlotPair], list[tuple[str, judge.ParameterDifference]]]:
        """(inputs, outputs, exactly comparable parameters) of a paired call.

        A parameter that changed during the run (an optimiser, running statistics) is state: an input that carries noise.
        """
        inputs: list[SlotPair] = []
        outputs: list[SlotPair] = []
        parameters: list[tuple[str, judge.ParameterDifference]] = []
        for slot in slots.values():
            kind = slot.reference_slot.partition(".")[0]
            if kind == "input":
                inputs.append(slot)
            elif kind in ("output", "mutated"):
                outputs.append(slot)
            elif kind == "param":
                if self._is_given(call, slot):
                    parameters.append((slot.reference_slot, self._parameter(slot)))
                else:
                    inputs.append(slot)
        return inputs, outputs, parameters

    def _is_given(self, call: Call, slot: SlotPair) -> bool:
        """Is this parameter as the run started with, not as the run changed it?"""
        key = (call.root, call.scope, slot.reference_slot)
        return self.first_params.setdefault(key, (slot.reference_record, slot.target_record)) == (slot.reference_record, slot.target_record)

    def _given_parameters(self, call: Call, slots: Mapping[str, SlotPair]) -> dict[str, bool]:
        return {s.reference_slot: self._is_given(call, s) for s in slots.values() if s.reference_slot.startswith("param")}

    def _parameter(self, slot: SlotPair) -> judge.ParameterDifference:
        key = (slot.reference_record, slot.target_record)
        known = self.parameter_cache.get(key)
        if known is None:
            if key in self.measured and self.measured[key].identical:
                known = judge.ParameterDifference(True, True)
            else:
                arrays = self._arrays(slot)
                if arrays is None:
                    known = self._parameter_from_hash(slot)
                else:
                    known = judge.parameters(*arrays)
            self.parameter_cache[key] = known
        return known

    def _parameter_from_hash(self, slot: SlotPair) -> judge.ParameterDifference:
        a, b = self.reference.records[slot.reference_record], self.target.records[slot.target_record]
        if a.dtype == b.dtype and a.shape == b.shape and a.hash and b.hash:
            return judge.ParameterDifference(False, True, "hashes differ (elements were not kept, so not how)", {})
        return judge.ParameterDifference(False, False, "elements were not kept")

    def _structural(self, inputs: Iterable[SlotPair], outputs: Iterable[SlotPair]) -> str:
        def clash(slot: SlotPair) -> bool:
            return self.reference.records[slot.reference_record].shape != self.target.records[slot.target_record].shape

        wrong = [s for s in outputs if clash(s)]
        if not wrong or any(clash(s) for s in inputs):
            return ""
        slot = wrong[0]
        return f"{slot.reference_slot} has {self.measured[slot.reference_record, slot.target_record].why}, its inputs agree in shape"

    # ---- what is reported

    def _per_call(self, verdicts: Mapping[tuple[int, int], Verdict]) -> dict[int, str]:
        """One verdict per paired call: of a leaf its own, of a container the worst of its stretches."""
        worst: dict[int, str] = {}
        for (call, _), verdict in verdicts.items():
            old = worst.get(call)
            if old is None or _SEVERITY.index(verdict.verdict) > _SEVERITY.index(old):
                worst[call] = verdict.verdict
        for pair, slots in zip(self.plan.pairs, self.slots):
            outputs = [s for s in slots.values() if s.reference_slot.startswith(("output", "mutated"))]
            if pair.reference not in worst:
                measured = [self.measured[s.reference_record, s.target_record] for s in outputs]
                same = all(m.identical for m in measured)
                worst[pair.reference] = "identical" if same else "inherited"
            if outputs and all(self._error(s).value is None for s in outputs) and worst[pair.reference] not in ("structural", "param-diff"):
                worst[pair.reference] = "incomparable"
        return worst

    def _coverage(self, per_call: Mapping[int, str]) -> Coverage:
        selected = align.selected(self.calls)
        for number, pair in enumerate(self.plan.pairs):
            if self._shows_no_inside(number, pair):
                self.inside[pair.reference] = len(self._alone(pair.reference))
        measured = 0
        root_ok = bool(self.plan.pairs)
        paired = {p.reference: i for i, p in enumerate(self.plan.pairs)}
        for call in selected:
            index = paired.get(call.id)
            full = index is not None and self._outputs_known(call, index)
            measured += full
            if call.parent == -1 and not full:
                root_ok = False
        return Coverage(
            len(selected),
            len(self.plan.pairs),
            measured,
            len(self.plan.pairs) - len(self.not_replayed) + sum(self.inside.values()) if self.replayer is not None else 0,
            sum(1 for c in selected if c.program or (self.options.model is not None and c.id in self.options.model.used)),
            root_ok,
            sum(self.inside.values()),
        )

    def _outputs_known(self, call: Call, index: int) -> bool:
        slots = self.slots[index]
        for ref in (*call.slots("output"), *call.slots("mutated")):
            slot = slots.get(ref.slot)
            if slot is None or self._error(slot).value is None:
                # Empty tensors and lone reasons hold nothing that could differ.
                if slot is not None and self.reference.records[ref.record].count == 0:
                    continue
                return False
        return True

    def _evidence(self, verdicts: Iterable[Verdict], found: Iterable[Finding]) -> str:
        kinds = {v.evidence for v in verdicts}
        if "replay" in kinds:
            return "replay"
        for kind in ("statistics", "three-way"):
            if kind in kinds:
                return kind
        return "two dumps" if kinds or any(found) else ""

    def _first_difference(self, per_call: Mapping[int, str]) -> dict[str, Any] | None:
        for pair in self.plan.pairs:
            verdict = per_call.get(pair.reference, "identical")
            if verdict in ("identical", "noise", "declared", "nondeterministic"):
                continue
            call = self.calls[pair.reference]
            if verdict == "inherited" and call.parent == -1:
                continue
            return {"name": call.scope or call.root, "op_type": call.op_type, "step": call.step, "rank": call.rank, "verdict": verdict}
        return None

    def _incomparable(self) -> int:
        keys = {(s.reference_record, s.target_record) for p in self.plan.pairs for s in p.slots}
        lost = [key for key in keys if self.measured[key].tier == "none" and self.reference.records[key[0]].count]
        return sum(1 for key in lost if self._error(SlotPair("", "", *key)).value is None)

    def _rows(self, per_call: Mapping[int, str]) -> Iterator[Row]:
        for index, pair in enumerate(self.plan.pairs):
            call, verdict = self.calls[pair.reference], per_call.get(pair.reference, "")
            name = call.scope or call.root
            for slot in pair.slots:
                key = slot.reference_record, slot.target_record
                a, b = self.reference.records[key[0]], self.target.records[key[1]]
                yield Row(
                    index, name, call.op_type, call.step, call.rank, call.occurrence, slot.reference_slot, slot.target_slot,
                    slot.reference_record, slot.target_record, a.dtype, b.dtype, a.shape, b.shape, verdict, pair.rule,
                    self.third.columns(key, self.measured[key]),
                )  # fmt: skip

    def _with_worst(self, finding: Finding) -> Finding:
        """Add the element with the largest error, as both sides have it."""
        if finding.pair < 0 or finding.verdict == "param-diff":
            return finding
        slots = self.slots[finding.pair]
        slot = self._slot(finding.pair, finding.slot) if finding.slot else None
        slot = slot or next((s for s in slots.values() if s.reference_slot.startswith("output")), None)
        if slot is None:
            return finding
        measured = self.measured[slot.reference_record, slot.target_record]
        arrays = self._arrays(slot)
        at = measured.max_abs_index
        if arrays is None or at is None or arrays[0].shape != arrays[1].shape:
            return finding
        numbers = {k: measured.values.get(k) for k in ("rel_l2", "cosine_similarity", "max_abs_err") if k in measured.values}
        return _but_finding(
            finding, slot=self._slot_name(finding, slot), worst_index=at, worst_reference=_number(arrays[0][at]),
            worst_target=_number(arrays[1][at]),
            numbers={**finding.numbers, **numbers},
        )  # fmt: skip

    def _slot_name(self, finding: Finding, slot: SlotPair) -> str:
        """The slot in words: what a child is given is named by the child ("o_proj:input.0")."""
        k, colon, name = finding.slot.partition(":")
        kids = self.kids.get(self.plan.pairs[finding.pair].reference, [])
        if not colon or not k.isdigit() or int(k) >= len(kids):
            return slot.reference_slot
        child = self.calls[kids[int(k)]]
        return f"{child.scope.rpartition('.')[2] or child.op_type}:{name}"

    def _without_partner(self) -> dict[str, tuple[str, ...]]:
        def names(calls: Sequence[Call], ids: Iterable[int]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(calls[i].scope or calls[i].root for i in ids))

        plan = self.plan
        inside = {k for call in self.inside for k in self._alone(call)}
        sides = {
            "reference": names(self.calls, (i for i in plan.unmatched_reference if i not in inside)),
            "target": names(self.target.calls, plan.unmatched_target),
            "ambiguous": names(self.calls, (a for a, _ in plan.ambiguous)),
        }
        return {side: found for side, found in sides.items() if found}

    def _run_notes(self) -> list[str]:
        out = []
        for side, run in (("reference", self.reference), ("target", self.target)):
            if run.ended:
                out.append(f"{side}: {run.ended}")
            out += [f"{side}: {sentence}" for sentence in align.changed(run)]
            out += [f"{side}: {n.text}" for n in run.notes if n.kind in ("budget", "error", "inside-not-seen")]
            hidden = {c.notes[0] for c in run.calls if c.notes and c.notes[0].endswith("inside not seen")}
            out += [f"{side}: {h}" for h in sorted(hidden)]
        return out

    def _versions(self) -> dict[str, str]:
        return {"whence": __version__, "format": str(self.reference.info.format)}

    def _tell(self, done: int, of: int, what: str) -> None:
        if self.options.progress is not None:
            self.options.progress(done, of, what)

    def _timed(self, name: str) -> _Timer:
        return _Timer(self.timing, name)


class _Timer:
    def __init__(self, table: dict[str, float], name: str) -> None:
        self.table, self.name = table, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.table[f"{self.name}_s"] = time.perf_counter() - self.start


def _u(a: Record, b: Record) -> float:
    """Unit roundoff of the coarser side; 0 when either is an exact kind."""
    ua, ub = judge.unit_roundoff(a.dtype), judge.unit_roundoff(b.dtype)
    return max(ua, ub) if ua and ub else 0.0


def _shape(record: Record) -> str:
    return f"({', '.join(map(str, record.shape))})"


def _number(value: Any) -> float | None:
    number = complex(value)
    return number.real if np.isfinite(number.real) else None


def _flips(tokens: tuple[Array, Array], scores: tuple[Array, Array]) -> tuple[int, int, float, float] | None:
    """(token, other token, gap, noise) of the first differing token, when every difference is the argmax of near-tied scores."""
    differ = np.argwhere(tokens[0] != tokens[1])
    first: tuple[int, int, float, float] | None = None
    for at in differ:
        row = int(at[0]) if tokens[0].ndim > 1 else 0
        a, b = (s.astype(np.float64).reshape(-1, s.shape[-2] if s.ndim > 2 else 1, s.shape[-1]) for s in scores)
        if row >= a.shape[0]:
            return None
        x, y = a[row, -1], b[row, -1]
        i, j = int(tokens[0][tuple(at)]), int(tokens[1][tuple(at)])
        if not (0 <= i < x.size and 0 <= j < x.size) or int(x.argmax()) != i or int(y.argmax()) != j:
            return None
        gap, noise = float(x[i] - x[j]), float(np.abs(x - y).max())
        if gap > 2 * noise:
            return None
        first = first or (i, j, gap, noise)
    return first


def _but(old: judge.LeafEvidence, /, **changes: Any) -> judge.LeafEvidence:
    return dataclasses.replace(old, **changes)


def _but_verdict(old: Verdict, /, **changes: Any) -> Verdict:
    return msgspec.structs.replace(old, **changes)


def _but_finding(old: Finding, /, **changes: Any) -> Finding:
    return msgspec.structs.replace(old, **changes)
