"""What an answer says beside its findings: verdicts by call, coverage, rows of the report, names
without a partner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from whence import align
from whence._version import __version__
from whence.align.environment import observer_effects
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.regions import RegionJudge
from whence.comparison.verdicts.third_run import ThirdRunJudge
from whence.dtypes import Array
from whence.records import Call, Program, Run, children, marks
from whence.records.marks import Mark
from whence.records.slots import (
    is_input,
    is_mutated,
    is_of_child,
    is_output,
    is_written,
    split_child,
)
from whence.results import (
    Coverage,
    Evidence,
    Finding,
    Nearest,
    Row,
    SlotPair,
    Verdict,
    VerdictKind,
    severity,
)

_CLEARLY = 0.1  # of the largest error of any token


class Summary:
    """Puts together what is reported of a judged comparison."""

    def __init__(self, paired: PairedRuns, judging: RegionJudge, third: ThirdRunJudge) -> None:
        self.paired, self.judging, self._third = paired, judging, third
        self._unread = unread(paired.reference)
        self._made = {made.record: made for made in paired.plan.made_target}

    def per_call(self, verdicts: Mapping[tuple[int, int], Verdict]) -> dict[int, str]:
        """One verdict per paired call: of a leaf its own, of a container the worst of its
        stretches.
        """
        worst: dict[int, str] = {}
        for (call, _), verdict in verdicts.items():
            old = worst.get(call)
            if old is None or severity(verdict.verdict) > severity(old):
                worst[call] = verdict.verdict
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots):
            outputs = [s for s in slots.values() if is_written(s.reference_slot)]
            if pair.reference not in worst and not outputs:
                if self.paired.calls[pair.reference].slots("output"):
                    worst[pair.reference] = VerdictKind.INCOMPARABLE
                elif slots and all(
                    self.paired.measured[s.reference_record, s.target_record].identical
                    for s in slots.values()
                ):
                    worst[pair.reference] = VerdictKind.IDENTICAL
            elif pair.reference not in worst:
                measured = [
                    self.paired.measured[s.reference_record, s.target_record] for s in outputs
                ]
                same = all(m.identical for m in measured)
                worst[pair.reference] = VerdictKind.IDENTICAL if same else VerdictKind.INHERITED
                if same and any(self.paired.partly(s) for s in outputs):
                    worst[pair.reference] = VerdictKind.UNDETERMINED
            own = self.paired.calls[pair.reference]
            if (
                outputs
                and all(
                    self.judging.errors.of(s).value is None
                    and not self._replayed_otherwise(own, s.reference_slot)
                    for s in outputs
                )
                and worst[pair.reference] not in (VerdictKind.STRUCTURAL, VerdictKind.PARAM_DIFF)
            ):
                worst[pair.reference] = VerdictKind.INCOMPARABLE
        return worst

    def counts(self, per_call: Mapping[int, str]) -> dict[str, int]:
        """How many calls have each verdict; a root that only stands for the whole of a dump is
        none.
        """
        return dict(
            Counter(
                verdict
                for call, verdict in per_call.items()
                if not marks.has_mark(self.paired.calls[call], Mark.PUT_TOGETHER)
            )
        )

    def coverage(self, per_call: Mapping[int, str]) -> Coverage:
        pair_of = {p.reference: i for i, p in enumerate(self.paired.plan.pairs)}
        selected = [
            c
            for c in align.selected(self.paired.calls)
            if not marks.has_mark(c, Mark.PUT_TOGETHER)
            and (c.id in pair_of or not self.paired.hands_on(c))
        ]
        handing_on = (
            c for c in self.paired.calls if c.id not in pair_of and self.paired.hands_on(c)
        )
        handed_on = {r.record for c in handing_on for r in c.slots("output")}
        put_together = [c for c in self.paired.calls if marks.has_mark(c, Mark.PUT_TOGETHER)]
        for number, pair in enumerate(self.paired.plan.pairs):
            if self.paired.shows_no_inside(number, pair):
                self.judging.inside[pair.reference] = len(self.paired.alone(pair.reference))
        measured = 0
        root_ok = bool(self.paired.plan.pairs)
        for call in selected:
            index = pair_of.get(call.id)
            full = index is not None and self._outputs_known(call, index)
            measured += full
            if call.parent == -1 and not full and (call.kind != "region" or call.slots("output")):
                root_ok = False
        for call in put_together:
            # A dump may end with an operator that only hands on, and that the other run has not.
            rest = msgspec.structs.replace(
                call, refs=tuple(r for r in call.refs if r.record not in handed_on)
            )
            ends = bool(rest.slots("output")) or not call.slots("output")
            root_ok &= (index := pair_of.get(call.id)) is not None and (
                not ends or self._outputs_known(rest, index)
            )
        facing = len(self.paired.plan.pairs) - sum(call.id in pair_of for call in put_together)
        return Coverage(
            len(selected),
            facing,
            measured,
            facing
            - len(self.judging.not_replayed - {c.id for c in put_together})
            + sum(self.judging.inside.values())
            if self.judging.replayer is not None
            else 0,
            sum(
                1
                for c in selected
                if c.program
                or (
                    self.judging.replayer is not None and self.judging.replayer.reference.borrows(c)
                )
            ),
            root_ok,
            sum(self.judging.inside.values()),
        )

    def partly(self) -> int:
        """How many pairs of outputs were printed in part only."""
        slots = {
            (s.reference_record, s.target_record): s
            for table in self.paired.slots
            for s in table.values()
        }
        return sum(
            is_written(s.reference_slot) and bool(self.paired.partly(s)) for s in slots.values()
        )

    def _outputs_known(self, call: Call, index: int) -> bool:
        slots = self.paired.slots[index]
        covered = self.judging.tapped.covered  # made on the way to what was compared
        refs = [
            r
            for r in (*call.slots("output"), *call.slots("mutated"))
            if r.slot in slots or r.record not in covered
        ]
        there = [
            ref
            for ref in refs
            if ref.slot in slots
            or (ref.record not in self._unread and not self._was_joined(call, ref.slot))
        ]
        for ref in there or refs:
            slot = slots.get(ref.slot)
            if (
                slot is None
                or self.judging.errors.of(slot).value is None
                or self.paired.partly(slot)
            ):
                # Empty tensors and lone reasons hold nothing that could differ.
                if slot is not None and (
                    self.paired.reference.records[ref.record].count == 0 or self._other_form(slot)
                ):
                    continue
                if self._replayed_otherwise(call, ref.slot):
                    continue
                return False
        return True

    def _replayed_otherwise(self, call: Call, slot: str) -> bool:
        """Was this output judged by replay on inputs of another extent, which replay of the code
        before the call judged too?

        So it is of an expert that was given other tokens, where the scores that sent them there
        tie.
        """
        if slot not in self.judging.locals.get(call.id, {}) or call.parent < 0:
            return False
        slots = self.paired.slots[self.paired.pair_of[call.id]].values()
        unknown = [
            s.reference_slot
            for s in slots
            if is_input(s.reference_slot) and self.judging.errors.of(s).value is None
        ]
        place = self.paired.kids[call.parent].index(call.id)
        judged = self.judging.locals.get(call.parent, {})
        return bool(unknown) and all(f"{place}:{name}" in judged for name in unknown)

    def _other_form(self, slot: SlotPair) -> bool:
        """A cache of another length than the other run's (static against growing, a window): what
        is read of it is compared where it is.
        """
        a, b = (
            self.paired.reference.records[slot.reference_record],
            self.paired.target.records[slot.target_record],
        )
        return align.is_cache(slot.reference_slot) and a.shape != b.shape

    def _was_joined(self, call: Call, slot: str) -> bool:
        """A cache that only one run has: what it held went on into later calls, which are joined
        with this one.
        """
        index = self.paired.pair_of[call.id]
        other = self.paired.target.calls[self.paired.plan.pairs[index].target]
        cache = align.is_cache(slot) or is_mutated(slot)
        return cache and any(marks.is_gathered(c) for c in (call, other))

    def evidence(self, verdicts: Iterable[Verdict], found: Iterable[Finding]) -> str:
        kinds = {v.evidence for v in verdicts}
        if Evidence.REPLAY in kinds:
            return Evidence.REPLAY
        if kinds and any(
            r.quantum or r.whole
            for run in (self.paired.reference, self.paired.target)
            for r in run.records
        ):
            return Evidence.TEXT
        for kind in (Evidence.STATISTICS, Evidence.THREE_WAY):
            if kind in kinds:
                return kind
        return Evidence.TWO_DUMPS if kinds or any(found) else Evidence.NONE

    def first_difference(self, per_call: Mapping[int, str]) -> dict[str, Any] | None:
        for pair in self.paired.plan.pairs:
            verdict = per_call.get(pair.reference, VerdictKind.IDENTICAL)
            if verdict in (
                VerdictKind.IDENTICAL,
                VerdictKind.NOISE,
                VerdictKind.DECLARED,
                VerdictKind.NONDETERMINISTIC,
            ):
                continue
            call = self.paired.calls[pair.reference]
            if verdict == VerdictKind.INHERITED and call.parent == -1:
                continue
            return {
                "name": call.scope or call.root,
                "op_type": call.op_type,
                "step": call.step,
                "rank": call.rank,
                "verdict": verdict,
            }
        return None

    def incomparable(self) -> int:
        keys = {
            (s.reference_record, s.target_record) for p in self.paired.plan.pairs for s in p.slots
        }
        lost = [
            key
            for key in keys
            if self.paired.measured[key].tier == "none"
            and self.paired.reference.records[key[0]].count
        ]
        return sum(
            1 for key in lost if self.judging.errors.of(SlotPair("", "", *key)).value is None
        )

    def rows(self, per_call: Mapping[int, str]) -> Iterator[Row]:
        for index, pair in enumerate(self.paired.plan.pairs):
            call, verdict = self.paired.calls[pair.reference], per_call.get(pair.reference, "")
            name = call.scope or call.root
            for slot in pair.slots:
                key = slot.reference_record, slot.target_record
                a, b = self.paired.reference.records[key[0]], self.paired.shown.records[key[1]]
                yield Row(
                    index,
                    name,
                    call.op_type,
                    call.step,
                    call.rank,
                    call.occurrence,
                    slot.reference_slot,
                    slot.target_slot,
                    slot.reference_record,
                    slot.target_record,
                    a.dtype,
                    b.dtype,
                    a.shape,
                    b.shape,
                    verdict,
                    pair.rule,
                    self._third.columns(key, self.paired.measured[key]),
                )

    def with_worst(self, finding: Finding) -> Finding:
        """Add the element with the largest error, as both sides have it, and where the tensors of a
        rearranged one are to be found.
        """
        finding = self._with_layout(finding)
        if finding.pair < 0 or finding.verdict == VerdictKind.PARAM_DIFF:
            return finding
        slots = self.paired.slots[finding.pair]
        slot = self.paired.slot(finding.pair, finding.slot) if finding.slot else None
        slot = slot or next((s for s in slots.values() if is_output(s.reference_slot)), None)
        if slot is None:
            return finding
        measured = self.paired.measured[slot.reference_record, slot.target_record]
        arrays = self.paired.arrays(slot)
        at = measured.max_abs_index
        if arrays is None or at is None or arrays[0].shape != arrays[1].shape:
            return finding
        since = self._since(finding, arrays)
        numbers = {
            k: measured.values.get(k)
            for k in ("rel_l2", "cosine_similarity", "max_abs_err")
            if k in measured.values
        }
        return _but_finding(
            finding,
            slot=self._slot_name(finding, slot),
            worst_index=at,
            worst_reference=_number(arrays[0][at]),
            worst_target=_number(arrays[1][at]),
            numbers={**finding.numbers, **numbers},
            sentence=finding.sentence + since,
        )

    def _with_layout(self, finding: Finding) -> Finding:
        """Where the target keeps what the finding is about, and which of the tensors that it was
        joined from differs.
        """
        slot = (
            self.paired.slot(finding.pair, finding.slot)
            if finding.pair >= 0 and finding.slot
            else None
        )
        if slot is None or not slot.dims or self._since(finding, self.paired.arrays(slot)):
            return finding
        arrays = self.paired.arrays(slot)
        parts: tuple[str, ...] = ()
        if arrays is not None and arrays[0].shape == arrays[1].shape:
            # Of activations all elements differ a little: those that differ most are meant.
            apart = (
                np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
                if arrays[0].dtype.kind not in "bc"
                else None
            )
            if apart is not None and np.isfinite(apart).all():
                limit = (
                    0.0 if finding.verdict == VerdictKind.PARAM_DIFF else float(apart.max()) / 10
                )
                parts = align.named(
                    self._made, self.paired.shown.records, slot.target_record, apart > limit
                )
        where = (
            _and(parts)
            if parts
            else slot.dims
            if len(slot.dims) <= _LONGEST
            else f"{slot.dims[:_LONGEST]} ..."
        )
        return _but_finding(finding, sentence=f"{finding.sentence}; {where} of the target")

    def _since(self, finding: Finding, arrays: tuple[Array, Array] | None) -> str:
        """Where the calls of several steps were joined: from which token and step on they part."""
        if arrays is None or arrays[0].shape != arrays[1].shape:
            return ""
        pair = self.paired.plan.pairs[finding.pair]
        sides = {
            "reference": self.paired.calls[pair.reference],
            "target": self.paired.target.calls[pair.target],
        }
        for joined in reversed(self.paired.plan.joined):  # of the target where both were
            call = sides[joined.side]
            total, dims = sum(tokens for *_, tokens in joined.pieces), arrays[0].ndim
            # Features are last, unless there is one number for each token.
            axis = next(
                (
                    k
                    for k in range(max(dims - 1, 1 + (dims < 3)))
                    if k < dims and arrays[0].shape[k] == total
                ),
                None,
            )
            if (
                (joined.root, joined.step, joined.micro) != (call.root, call.step, call.micro)
                or len(joined.pieces) < 2
                or axis is None
            ):
                continue
            error = np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
            by_token = error.max(axis=tuple(k for k in range(dims) if k != axis))
            token = int(np.argmax(by_token > _CLEARLY * by_token.max()))
            ends = np.cumsum([tokens for *_, tokens in joined.pieces])
            step = joined.pieces[int(np.searchsorted(ends, token, side="right"))][0]
            return f"; from token {token} on, step {step} of the {joined.side}"
        return ""

    def _slot_name(self, finding: Finding, slot: SlotPair) -> str:
        """The slot in words: what a child is given is named by the child ("o_proj:input.0")."""
        if not is_of_child(finding.slot):
            return slot.reference_slot
        kids = self.paired.kids.get(self.paired.plan.pairs[finding.pair].reference, [])
        k, name = split_child(finding.slot)
        if k >= len(kids):
            return slot.reference_slot
        child = self.paired.calls[kids[k]]
        return f"{child.scope.rpartition('.')[2] or child.op_type}:{name}"

    def without_partner(self) -> dict[str, tuple[str, ...]]:
        def names(calls: Sequence[Call], ids: Iterable[int]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(calls[i].scope or calls[i].root for i in ids))

        plan = self.paired.plan
        inside = {k for call in self.judging.inside for k in self.paired.alone(call)}
        sides = {
            "reference": names(
                self.paired.calls, (i for i in plan.unmatched_reference if i not in inside)
            ),
            "target": names(self.paired.target.calls, plan.unmatched_target),
            "ambiguous": names(self.paired.calls, (a for a, _ in plan.ambiguous)),
        }
        return {side: found for side, found in sides.items() if found}

    def nearest(self) -> tuple[Nearest, ...]:
        """For calls without a partner that the other run should have: what comes nearest."""
        plan = self.paired.plan
        inside = {k for call in self.judging.inside for k in self.paired.alone(call)}
        wanted = [i for i in plan.unmatched_reference if i not in inside]
        return align.nearest(self.paired.reference, self.paired.shown, plan, wanted)

    def run_notes(self) -> list[str]:
        out = []
        for side, run in (("reference", self.paired.reference), ("target", self.paired.target)):
            if run.ended:
                out.append(f"{side}: {run.ended}")
            raised = next((c for c in run.calls if c.error and c.parent == -1), None)
            if raised is not None:
                what = " ".join(raised.error.split())
                out.append(
                    f"{side}: {raised.scope or raised.root} raised in step {raised.step}: "
                    f"{what[:_SAID]}{'...' if what[_SAID:] else ''}"
                )
            out += [f"{side}: {sentence}" for sentence in align.changed(run)]
            out += [
                f"{side}: {n.text}"
                for n in run.notes
                if n.kind in ("budget", "error", "inside-not-seen")
            ]
            out += [f"{side}: {sentence}" for sentence in observer_effects(run)]
            hidden = {note for c in run.calls if (note := marks.hidden_inside(c))}
            out += [f"{side}: {note}" for note in sorted(hidden)]
        return out

    def versions(self) -> dict[str, str]:
        return {"whence": __version__, "format": str(self.paired.reference.info.format)}


_SAID = 200  # characters of an exception that are shown
_LONGEST = 80  # characters of a dims expression that are shown


def _and(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _number(value: Any) -> float | None:
    number = complex(value)
    return number.real if np.isfinite(number.real) else None


def _but_finding(old: Finding, /, **changes: Any) -> Finding:
    return msgspec.structs.replace(old, **changes)


def unread(run: Run) -> set[int]:
    """Records that a call returned or changed in place and that no call was given, no container's
    own operators read, and no root left.

    What a container without a program did with a tensor is not known: that one counts as read.
    """
    made: set[int] = set()
    read: set[int] = set()
    below = children(run.calls)
    for call in run.calls:
        left = _left(call)
        made.update(left.values())
        read.update(r.record for r in call.slots("input"))
        if call.parent == -1:
            read.update(left.values())
        kids = [run.calls[k] for k in below.get(call.id, ())]
        inside = {
            f"{k}:{slot}": record
            for k, kid in enumerate(kids)
            for slot, record in _left(kid).items()
        }
        program = run.programs.get(call.program)
        if program is None:
            read.update(inside.values())
            continue
        used = _used(program)
        # Handed on as it is, a tensor has its fate decided further up; unless it goes there as
        # another record.
        own = left | {
            f"{k}:{r.slot}": r.record for k, kid in enumerate(kids) for r in kid.slots("input")
        }
        for slot, operand in program.outputs:
            source = program.inputs[operand["in"]] if "in" in operand else ""
            if source in inside and own.get(slot) != inside[source]:
                used.add(source)
        read.update(record for slot, record in inside.items() if slot in used)
    return made - read


def _left(call: Call) -> dict[str, int]:
    return {r.slot: r.record for kind in ("output", "mutated") for r in call.slots(kind)}


def _used(program: Program) -> set[str]:
    """The inputs that operations of a program take."""
    return {
        program.inputs[at]
        for operation in program.operations
        for kind, at in operation.operands()
        if kind == "in"
    }
