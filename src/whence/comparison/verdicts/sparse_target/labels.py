"""Verdicts of labels: named tensors without recorded inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from whence import judge
from whence.comparison.verdicts.declared.tolerances import allows
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.dtypes import is_half_roundoff
from whence.judge.limits import ENOUGH_EQUAL
from whence.records import Call, in_order, known_order
from whence.records.known_order import Trace
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_written
from whence.results import SlotPair, Verdict, VerdictKind

_LEAST_SHARE = 10
"""Scales have one number for 16 codes or more: what has more is computed from as they are."""
_SUSPECT = (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED)
_PASSES = 3
"""Sums behind a gradient of 16 bits: the pass forward, the pass back, and that over the batch."""
_NAMED = 4
"""Most labels that a sentence names if any of them may be to blame."""
_StepKey = tuple[int, str, int]
"""Process, root and step of a call."""


def is_label(call: Call) -> bool:
    """Whether the call is a label: a named tensor without recorded inputs."""
    return call.kind == "label" and not call.slots("input")


def _step_of(call: Call) -> _StepKey:
    return call.rank, call.root, call.step


class _CallsAround:
    """The forward calls, other than labels, in each process, root and step."""

    def __init__(self, errors: PairErrors, labels: Mapping[int, int]) -> None:
        paired = errors.paired
        self._paired, self.errors = paired, errors
        self._calls: dict[_StepKey, list[Call]] = defaultdict(list)
        self._passed: dict[_StepKey, int] = defaultdict(int)
        self._worst: dict[_StepKey, list[judge.PairError]] = defaultdict(list)
        for call in in_order(paired.calls) if labels else ():
            if (
                call.leaf
                and call.id in paired.pair_of
                and call.id not in labels
                and call.phase == "forward"
            ):
                self._calls[_step_of(call)].append(call)

    def before(self, label: Call) -> list[judge.PairError]:
        """The largest errors of these calls' outputs before a label. Call this in the order of
        labels.
        """
        key = _step_of(label)
        calls, errors = self._calls[key], list(self._worst[key])
        while self._passed[key] < len(calls) and calls[self._passed[key]].order < label.order:
            slots = self._paired.slots_of(calls[self._passed[key]].id).values()
            errors += map(self.size_only, (s for s in slots if is_written(s.reference_slot)))
            self._passed[key] += 1
        self._worst[key] = _worst(errors)
        return self._worst[key]

    def size_only(self, slot: SlotPair) -> judge.PairError:
        """The error of a tensor without its statistics and lone elements, which cannot be compared
        between tensors that do not depend on each other.
        """
        return dataclasses.replace(self.errors.of(slot), drift=None, lone=0.0)

    def kernel(self, label: Call) -> str:
        """The operator, in words, whose kernel logged a label; "" if no kernel logged it or no
        operator is known.
        """
        if not has_mark(label, Mark.LOGGED):
            return ""
        calls = self._calls[_step_of(label)]
        following = next((c for c in calls if c.order > label.order), None)
        if following is not None:
            return f"the kernel of {following.module_name} ({following.op_type})"
        return "a kernel after the last printed tensor" if calls else ""


_IN_LAYER = re.compile(r"(.*?)(\d+)(?=[./_-]|$)")
"""The number of the layer in a name."""


class LabelJudge:
    """Judges the labels of the reference. Only their order is known, so each may depend on all
    earlier ones of its step. labels: by call, the index of its pair.
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
        moments: dict[_StepKey, list[Call]] = defaultdict(list)
        for label in in_order(self.paired.calls[c] for c in self._labels):
            moments[_step_of(label)].append(label)
        verdicts: dict[tuple[int, int], Verdict] = {}
        for labels in moments.values():
            has_order = not any(has_mark(label, Mark.UNORDERED) for label in labels)
            judged = self._one_by_one(labels) if has_order else self._as_far_as_ordered(labels)
            verdicts |= {(call, -1): verdict for call, verdict in judged.items()}
        return verdicts

    def _one_by_one(self, labels: Sequence[Call]) -> dict[int, Verdict]:
        """Verdicts, by call, of labels whose order is known and given."""
        verdicts: dict[int, Verdict] = {}
        errors_before: list[judge.PairError] = []
        for label in labels:
            errors = self._errors(label)
            around = self._around.before(label)
            verdicts[label.id] = self._verdict(label, errors, errors_before, around)
            errors_before = _worst([*errors_before, *errors])
        return verdicts

    def _as_far_as_ordered(self, labels: Sequence[Call]) -> dict[int, Verdict]:
        """Verdicts, by call, of labels whose order is known in part. A label may depend on all that
        may precede it, so only the first ones that differ can be to blame. If there are several,
        the module that contains them all is.
        """
        order = known_order.known(
            [known_order.trace_of(label) for label in labels],
            other=[known_order.trace_of(self._partner(label)) for label in labels],
        )
        before: list[list[judge.PairError]] = [[] for _ in order.before]
        errors = [self._errors(label) for label in labels]
        suspects: set[int] = set()
        firsts: list[int] = []
        verdicts: dict[int, Verdict] = {}
        for node in order.order:
            former = order.before[node]
            before[node] = _worst(
                [e for f in former for e in (*before[f], *(errors[f] if f < len(labels) else ()))]
            )
            is_behind = not suspects.isdisjoint(former)
            if node < len(labels):
                label = labels[node]
                verdict = self._verdict(label, errors[node], before[node], ())
                if verdict.verdict in _SUSPECT:
                    if is_behind:
                        verdict = verdict.withdrawn(VerdictKind.INHERITED, verdict.sentence)
                    else:
                        firsts.append(node)
                    is_behind = True
                verdicts[label.id] = verdict
            if is_behind:
                suspects.add(node)
        for node in self._behind_layers(firsts, [label.scope for label in labels], errors):
            number = labels[node].id
            verdict = verdicts[number]
            verdicts[number] = verdict.withdrawn(VerdictKind.INHERITED, verdict.sentence)
            firsts.remove(node)
        if len(firsts) > 1:
            everything = _common([label.scope for label in labels])
            verdicts |= _together([labels[node] for node in firsts], verdicts, everything)
        return verdicts

    def _behind_layers(
        self,
        firsts: Sequence[int],
        names: Sequence[str],
        errors: Sequence[Sequence[judge.PairError]],
    ) -> set[int]:
        """Which of the first differences are behind those in layers: they are in no layer, and what
        layers are given would have changed all of the first one, which is equal.
        """
        layers: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for node, name in enumerate(names):
            if match := _IN_LAYER.match(name):
                layers[match[1]][int(match[2])].append(node)
        if not layers:
            return set()
        stack = max(layers.values(), key=len)
        inside = {node for nodes in stack.values() for node in nodes}
        is_equal = all(e.value == 0 for node in stack[min(stack)] for e in errors[node])
        if len(stack) < 2 or not is_equal or inside.isdisjoint(firsts):
            return set()
        return {n for n in firsts if n not in inside and not _IN_LAYER.match(names[n])}

    def _partner(self, label: Call) -> Call:
        return self.paired.pair(self._labels[label.id]).partner

    def _errors(self, label: Call) -> list[judge.PairError]:
        return [self._of_terms(slot, label) for slot in self._slots(label)]

    def _slots(self, label: Call) -> Sequence[SlotPair]:
        return self.paired.plan.pairs[self._labels[label.id]].slots

    def _of_terms(self, slot: SlotPair, label: Call) -> judge.PairError:
        """The error of a tensor. The error of a small gradient, whose terms cancel, is taken in
        units of these terms, whose size the other gradients of its module show.
        """
        error, module = self._around.size_only(slot), known_order.module_of(label.scope)
        largest = self._gradients.get((_step_of(label), module), 0.0) if module else 0.0
        of_all = self._gradients[_step_of(label), ""] if largest else 0.0
        return self.errors.of_terms(slot, error, largest, of_all)

    def _is_rounded_gradient(self, label: Call, growth: judge.ErrorGrowth, u: float) -> bool:
        """Whether a label is a 16-bit gradient whose error does not stand out from earlier ones."""
        is_gradient = bool(self._gradients) and bool(known_order.module_of(label.scope))
        room, limits = _PASSES * judge.LIMITS.within(u), judge.LIMITS
        is_near = growth.e_out <= room and growth.growth <= limits.growth
        return is_gradient and is_half_roundoff(u) and is_near

    @functools.cached_property
    def _gradients(self) -> Mapping[tuple[_StepKey, str], float]:
        """The largest norm of a gradient by (step, module), and of all modules by (step, "")."""
        labels = [self.paired.calls[call] for call in self._labels]
        largest: dict[tuple[_StepKey, str], float] = defaultdict(float)
        if known_order.are_gradients([label.scope for label in labels]):
            for label in labels:
                if module := known_order.module_of(label.scope):
                    for key in ((_step_of(label), module), (_step_of(label), "")):
                        largest[key] = max(
                            largest[key], *map(self.errors.norm, self._slots(label)), 0.0
                        )
        return largest

    def _verdict(
        self,
        label: Call,
        errors: Sequence[judge.PairError],
        labels_before: Sequence[judge.PairError],
        around: Sequence[judge.PairError],
    ) -> Verdict:
        """The verdict of one label. labels_before, around: errors of earlier labels and of other
        earlier calls.
        """
        slots = self._slots(label)
        u = self.errors.roundoff(slots, errors, self._beside(label, slots))
        errors_before = [*labels_before, *around]
        growth = judge.grow(errors_before, errors, u)
        verdict = judge.judge_region(self._labels[label.id], -1, growth, note=self._note)
        look = functools.partial(self.errors.sight, slots)
        if self.paired.stated:
            verdict = judge.judge_stated(
                verdict,
                growth,
                u,
                look,
                first=not labels_before,
                in_other_steps=self._in_other_tasks(label),
            )
        elif verdict.verdict == VerdictKind.INTRODUCED and (kernel := self._around.kernel(label)):
            verdict = verdict.withdrawn(
                VerdictKind.UNDETERMINED,
                f"logged by {kernel}: differs by rel_l2 {size_in_words(growth.e_out)}, which "
                "nothing printed before it explains; a log of some elements inside a kernel is not "
                "its result, and no fault is read from it alone",
            )
        else:
            verdict = judge.judge_unseen(
                verdict,
                growth,
                u,
                errors_before or None,
                look,
                elsewhere=judge.Elsewhere(layer_before=self._in_layer_before(label)),
            )
            if verdict.verdict == VerdictKind.UNDETERMINED and self._is_rounded_gradient(
                label, growth, u
            ):
                why = f"{verdict.sentence}; within what 16 bits leave of a gradient"
                verdict = verdict.withdrawn(VerdictKind.INHERITED, why)
        return self._tolerated(verdict, label, slots, growth.e_out)

    def _in_other_tasks(self, label: Call) -> judge.OtherSteps:
        """The largest errors of the labels of this name in other tasks, none of which depends on
        another; where names differ from task to task, of those of its line.
        """
        for place in (label.scope, label.source):
            others = [e for task, e in self._by_place[place, label.rank] if task != label.root]
            if others:
                break
        return judge.OtherSteps(after=others)

    def _in_layer_before(self, label: Call) -> float | None:
        """The largest error of the label of this name in the layer before."""
        names = known_order.layer_before(self._spelt[label.id])
        before = (self._sizes.get((_step_of(label), name)) for name in names)
        return next((size for size in before if size is not None), None)

    @functools.cached_property
    def _spelt(self) -> Mapping[int, str]:
        """Names of labels with the number of their layer in front, by call."""
        traces = [Trace(self.paired.calls[call].scope) for call in self._labels]
        spelt = known_order.with_spelt_names(traces)
        return {call: trace.name for call, trace in zip(self._labels, spelt, strict=True)}

    @functools.cached_property
    def _sizes(self) -> Mapping[tuple[_StepKey, str], float]:
        """The largest error of the labels of a step, by name."""
        labels = [self.paired.calls[call] for call in self._labels]
        sizes = ((label, [e.value for e in self._errors(label)]) for label in labels)
        return {
            (_step_of(label), self._spelt[label.id]): max(known)
            for label, values in sizes
            if (known := [value for value in values if value is not None])
        }

    @functools.cached_property
    def _by_place(self) -> Mapping[tuple[str, int], Sequence[tuple[str, float]]]:
        """(task, largest error) of the labels, by name or line, and process."""
        placed: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
        for label in (self.paired.calls[call] for call in self._labels):
            known = [e.value for e in self._errors(label) if e.value is not None]
            for place in {label.scope, label.source} if known else ():
                placed[place, label.rank].append((label.root, max(known)))
        return placed

    def _beside(self, label: Call, slots: Iterable[SlotPair]) -> Iterator[float]:
        """Unit roundoffs of the tensors in a label's step, without those that are so small that
        they may be scales of its codes.
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
        """The verdict, or the declared one if the policy allows the error."""
        partner = self.paired.pair(self._labels[label.id]).partner
        tolerances = self.errors.declared.tolerances
        if verdict.verdict not in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED):
            return verdict
        for slot in slots:
            entry, arrays = tolerances.entry(slot, label, partner), self.paired.arrays(slot)
            if entry is not None and arrays is not None and allows(entry, arrays[1], arrays[0]):
                verdict = tolerances.declared(verdict, entry, label, e_out)
        return verdict


def _together(
    firsts: Sequence[Call], verdicts: Mapping[int, Verdict], everything: str
) -> dict[int, Verdict]:
    """Verdicts of the first labels that differ, whose order among each other is not known. If one
    is wrong and their names share a module, the fault is placed in that module; else all are
    undetermined. everything: the common prefix of all labels, which does not count as a module.
    """
    names = [label.scope for label in firsts]
    whole = _common(names).removeprefix(everything) and _common(names)
    wrong = [label.id for label in firsts if verdicts[label.id].verdict == VerdictKind.INTRODUCED]
    listed = ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    )
    words = f"first differences{f' in {whole}' if whole else ''}: {listed}; {Mark.UNORDERED}"
    together: dict[int, Verdict] = {}
    for label in firsts:
        verdict = verdicts[label.id]
        sentence = f"{words}; {verdict.sentence}"
        if wrong and whole and label.id == wrong[0]:
            together[label.id] = verdict.replace(where=whole, sentence=sentence)
        else:
            kind = VerdictKind.INHERITED if wrong and whole else VerdictKind.UNDETERMINED
            together[label.id] = verdict.withdrawn(kind, sentence)
    return together


def _common(names: Sequence[str]) -> str:
    """The longest common prefix of whole name parts."""
    parts = [re.split(r"([./_-])", name) for name in names]
    many = sum(
        1 for _ in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    )
    return "".join(parts[0][: many - (many % 2 == 0)]) if many else ""


def size_in_words(value: float | None) -> str:
    """An error as text for a sentence."""
    return "of unknown size" if value is None else f"{value:.2g}"


def _worst(errors: Sequence[judge.PairError]) -> list[judge.PairError]:
    """The few errors that matter for the largest: the largest one of each kind of evidence, one
    unknown error if there is any, and a few of those that agree.
    """
    measured = sorted((e for e in errors if e.value is not None), key=lambda e: e.inherited or 0.0)
    unknown = [e for e in errors if e.value is None]
    few = [e for e in measured if e.u > 0][:ENOUGH_EQUAL]
    largest = {e.evidence: e for e in measured}.values()
    return [*few, *(e for e in largest if all(e is not other for other in few)), *unknown[:1]]
