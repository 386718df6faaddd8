"""Verdicts of labels: tensors under a name, of which nothing says what they were made of."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from whence import judge
from whence.comparison.verdicts.declared.tolerances import allows
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.records import Call
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_written
from whence.results import SlotPair, Verdict, VerdictKind

_LEAST_SHARE = 10
"""Scales have one number for 16 codes or more: what has more is computed from as they are."""
_StepKey = tuple[int, str, int]
"""Process, root and step of a call."""


def is_label(call: Call) -> bool:
    """Is the call a tensor under a name, of which nothing says what it was made of?"""
    return call.kind == "label" and not call.slots("input")


def _step_of(call: Call) -> _StepKey:
    return call.rank, call.root, call.step


class _CallsAround:
    """What calls that are no labels made around labels, in one process, root and step."""

    def __init__(self, errors: PairErrors, labels: Mapping[int, int]) -> None:
        paired = errors.paired
        self._paired, self.errors = paired, errors
        self._calls: dict[_StepKey, list[Call]] = defaultdict(list)
        self._passed: dict[_StepKey, int] = defaultdict(int)
        self._worst: dict[_StepKey, list[judge.PairError]] = defaultdict(list)
        for call in sorted(paired.calls, key=lambda c: c.order) if labels else ():
            if (
                call.leaf
                and call.id in paired.pair_of
                and call.id not in labels
                and call.phase == "forward"
            ):
                self._calls[_step_of(call)].append(call)

    def before(self, label: Call) -> list[judge.PairError]:
        """The largest errors of what was made before a label. Labels are asked for in their
        order.
        """
        key = _step_of(label)
        calls, errors = self._calls[key], list(self._worst[key])
        while self._passed[key] < len(calls) and calls[self._passed[key]].order < label.order:
            slots = self._paired.slots[self._paired.pair_of[calls[self._passed[key]].id]].values()
            errors += map(self.size_only, (s for s in slots if is_written(s.reference_slot)))
            self._passed[key] += 1
        self._worst[key] = _worst(errors)
        return self._worst[key]

    def size_only(self, slot: SlotPair) -> judge.PairError:
        """The error of a tensor without its statistics and lone elements, which say nothing of
        tensors that need not be computed from each other.
        """
        return dataclasses.replace(self.errors.of(slot), drift=None, lone=0.0)

    def kernel(self, label: Call) -> str:
        """The operator whose kernel logged a label, in words; "" for a label that no kernel logged,
        or where no operator is seen.
        """
        if not has_mark(label, Mark.LOGGED):
            return ""
        calls = self._calls[_step_of(label)]
        following = next((c for c in calls if c.order > label.order), None)
        if following is not None:
            return f"the kernel of {following.scope or following.root} ({following.op_type})"
        return "a kernel after the last printed tensor" if calls else ""


class LabelJudge:
    """Judges labels of the reference: of these only the order is known, so each may depend on all
    before it in its step. labels: by call, the index of its pair.
    """

    def __init__(self, errors: PairErrors, labels: Mapping[int, int]) -> None:
        self.paired, self.errors, self._labels = errors.paired, errors, labels
        self._around = _CallsAround(errors, labels)
        self._note = (
            "labels have no programs"
            if self.paired.stated
            else "the reference is made of named arrays, which have no programs"
        )

    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """The verdicts by (call, -1)."""
        verdicts: dict[tuple[int, int], Verdict] = {}
        errors_before: dict[_StepKey, list[judge.PairError]] = defaultdict(list)
        for label in sorted((self.paired.calls[c] for c in self._labels), key=lambda c: c.order):
            index, key = self._labels[label.id], _step_of(label)
            slots = self.paired.plan.pairs[index].slots
            errors = list(map(self._around.size_only, slots))
            verdict, e_out = self._verdict(label, slots, errors, errors_before[key])
            verdicts[label.id, -1] = self._tolerated(verdict, label, slots, e_out)
            errors_before[key] = _worst([*errors_before[key], *errors])
        return verdicts

    def _verdict(
        self,
        label: Call,
        slots: Sequence[SlotPair],
        errors: Sequence[judge.PairError],
        labels_before: Sequence[judge.PairError],
    ) -> tuple[Verdict, float]:
        """The verdict of one label, and its error."""
        u = self.errors.roundoff(slots, errors, self._beside(label, slots))
        has_order = not has_mark(label, Mark.UNORDERED)
        errors_before = [*labels_before, *self._around.before(label)]
        growth = judge.grow(errors_before if has_order else [judge.PairError(None)], errors, u)
        verdict = judge.judge_region(self._labels[label.id], -1, growth, note=self._note)
        size = f"differs by rel_l2 {size_in_words(growth.e_out)}"
        look = functools.partial(self.errors.sight, slots)
        if self.paired.stated:
            verdict = judge.judge_stated(verdict, growth, u, look, first=not labels_before)
        elif verdict.verdict == VerdictKind.INTRODUCED and (kernel := self._around.kernel(label)):
            verdict = verdict.withdrawn(
                VerdictKind.UNDETERMINED,
                f"logged by {kernel}: {size}, which nothing printed before it explains; a log of "
                "some elements inside a kernel is no result of it, and no fault is read from it "
                "alone",
            )
        else:
            verdict = judge.judge_unseen(
                verdict,
                growth,
                u,
                errors_before if has_order and errors_before else None,
                look,
            )
        if not has_order and verdict.verdict == VerdictKind.UNDETERMINED:
            sentence = f"{size}; {Mark.UNORDERED}, so what it inherits is not known"
            verdict = verdict.replace(sentence=sentence)
        return verdict, growth.e_out

    def _beside(self, label: Call, slots: Iterable[SlotPair]) -> Iterator[float]:
        """Unit roundoffs of tensors of a label's step, but for what is too small to be more than
        scales of its tensors.
        """
        size = max((self.paired.records(slot)[0].count for slot in slots), default=0)
        for count, u in self._roundoffs[_step_of(label)]:
            if count * _LEAST_SHARE >= size:
                yield u

    @functools.cached_property
    def _roundoffs(self) -> dict[_StepKey, set[tuple[int, float]]]:
        """(elements, unit roundoff) of the tensors of labels, by step."""
        sizes: dict[_StepKey, set[tuple[int, float]]] = defaultdict(set)
        for call, index in self._labels.items():
            for slot in self.paired.plan.pairs[index].slots:
                records = self.paired.records(slot)
                key = _step_of(self.paired.calls[call])
                sizes[key].add((records[0].count, judge.roundoff(*records)))
        return sizes

    def _tolerated(
        self, verdict: Verdict, label: Call, slots: Iterable[SlotPair], e_out: float
    ) -> Verdict:
        """The verdict with what a policy allows."""
        partner = self.paired.pair(self._labels[label.id]).partner
        tolerances = self.errors.declared.tolerances
        if verdict.verdict not in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED):
            return verdict
        for slot in slots:
            entry, arrays = tolerances.entry(slot, label, partner), self.paired.arrays(slot)
            if entry is not None and arrays is not None and allows(entry, arrays[1], arrays[0]):
                verdict = tolerances.declared(verdict, entry, label, e_out)
        return verdict


def size_in_words(value: float | None) -> str:
    """An error as a sentence has it."""
    return "of unknown size" if value is None else f"{value:.2g}"


def _worst(errors: Sequence[judge.PairError]) -> list[judge.PairError]:
    """Of errors the few that say all about their size: the largest of each kind of evidence, and
    one that is not known.
    """
    measured = sorted((e for e in errors if e.value is not None), key=lambda e: e.inherited or 0.0)
    unknown = [e for e in errors if e.value is None]
    return [*{e.evidence: e for e in measured}.values(), *unknown[:1]]
