"""Labels of the reference paired with labels of the target, in one run or in two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import (
    Call,
    Collective,
    Note,
    Program,
    Record,
    Ref,
    Run,
    RunInfo,
    Step,
    missing_of,
)


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a run. occurrence: how many labels of the same rank, task, side and name came
    before, over all processes. step: number of its task, from 0. time: ns, or call order.
    """

    run: Run
    call: Call
    side: str
    task: str
    id: str
    time: int
    occurrence: int
    step: int

    @property
    def record(self) -> Record:
        return self.run.records[self.call.refs[0].record]

    @property
    def words(self) -> str:
        """name#occurrence, and the task."""
        return f"{self.call.scope}#{self.occurrence}" + (f" in {self.task}" if self.task else "")


@dataclass(frozen=True, slots=True)
class TensorMatcher:
    """A row of the comparison: a pair of labels, or one label and why it has no partner."""

    reference: Label | None
    target: Label | None
    why: str = ""


def labels_of(runs: Sequence[Run]) -> list[Label]:
    """All labels, in the order in which they were set. If the labels of two runs name no side, the
    first run is the reference and the second the target.
    """
    listed: list[tuple[int, int, Run, Call, str]] = []
    for place, run in enumerate(runs):
        assumed = ("reference", "target")[place] if len(runs) == 2 else ""
        labels = (call for call in run.calls if call.kind == "label")
        listed += [
            (int(call.arguments.get("at", call.order)), place, run, call, call.root or assumed)
            for call in labels
        ]
    # Each process numbers its own calls, so labels are ordered by the machine's clock.
    listed.sort(key=lambda item: (item[1], item[0]) if len(runs) == 2 else (0, item[0]))
    steps: dict[str, int] = {}
    counts: Counter[tuple[int, str, str, str]] = Counter()
    out = []
    for time, _, run, call, side in listed:
        task = str(call.arguments.get("task", ""))
        key = call.rank, task, side, call.scope
        step = steps.setdefault(task, len(steps))
        out.append(
            Label(run, call, side, task, str(call.arguments.get("id", "")), time, counts[key], step)
        )
        counts[key] += 1
    return out


def faced(labels: Iterable[Label]) -> list[TensorMatcher]:
    """The labels as rows, in order of time. Labels of one rank and one task are paired by id, else
    by name and occurrence; a label without a partner gets a row of its own.
    """
    labels = list(labels)
    sides: dict[str, list[Label]] = {"reference": [], "target": []}
    out: list[TensorMatcher] = []
    for label in labels:
        if label.side in sides:
            sides[label.side].append(label)
        else:
            out.append(
                TensorMatcher(
                    label,
                    None,
                    'names no side: whence.label(..., side="reference") or side="target"',
                )
            )
    partner: dict[int, Label] = {}
    for key in (_by_id, _by_name):
        open_: dict[Any, list[Label]] = defaultdict(list)
        for label in sides["target"]:
            if id(label) not in partner and (k := key(label)) is not None:
                open_[k].append(label)
        for label in sides["reference"]:
            k = key(label)
            if id(label) not in partner and k is not None and open_.get(k):
                partner_label = open_[k].pop(0)
                partner[id(label)], partner[id(partner_label)] = partner_label, label
    out += [
        TensorMatcher(label, partner[id(label)])
        for label in sides["reference"]
        if id(label) in partner
    ]
    for name, opposite in (("reference", "target"), ("target", "reference")):
        places: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        for label in sides[opposite]:
            places[label.call.scope][label.task, label.call.rank] += 1
        for label in sides[name]:
            if id(label) not in partner:
                why = _alone(label, opposite, places[label.call.scope])
                out.append(
                    TensorMatcher(label, None, why)
                    if name == "reference"
                    else TensorMatcher(None, label, why)
                )
    return sorted(out, key=lambda row: (row.reference or row.target).time)  # type: ignore[union-attr]


def _by_id(label: Label) -> Any:
    return (label.call.rank, label.task, label.id) if label.id else None


def _by_name(label: Label) -> Any:
    return label.call.rank, label.task, label.call.scope, label.occurrence


def _alone(label: Label, opposite: str, places: Counter[tuple[str, int]]) -> str:
    """Why a label has no partner, in words. places: how often the other side has its name, by
    (task, rank).
    """
    name = f"id {label.id}" if label.id else label.words
    count = places[label.task, label.call.rank]
    if count:
        return f"the {opposite} has no label {name}, only {count} of that name"
    where = sorted(
        (f"task {task}" if task else "no task") + f", rank {rank}"
        for (task, rank), n in places.items()
        if n
    )
    return f"the {opposite} has no label {name}" + (
        f"; it has that name in {'; '.join(where[:3])}" if where else ""
    )


class Side:
    """The labels of one side as a Run. Call k has the same name as call k of the other side and is
    paired with it.
    """

    def __init__(
        self, labels: Sequence[Label], names: Sequence[tuple[str, int]], words: str
    ) -> None:
        runs = list({id(label.run): label.run for label in labels}.values())
        self.path = f"{', '.join(run.path for run in runs)} ({words})"
        self.info: RunInfo = runs[0].info if runs else RunInfo()
        self.ended = "; ".join(dict.fromkeys(run.ended for run in runs if run.ended))
        self.missing = tuple(one for run in runs for one in missing_of(run))
        self.programs: dict[str, Program] = {}
        self.notes: Sequence[Note] = [
            n for run in runs for n in run.notes if n.kind in ("error", "budget", "label-error")
        ]
        self.labels = list(labels)
        self.records = [
            msgspec.structs.replace(label.record, id=i) for i, label in enumerate(labels)
        ]
        # The task is the root, so a fault in one task is not blamed for a difference in another.
        self.calls = [
            Call(
                i,
                name,
                label.task,
                label.step,
                i,
                rank=label.call.rank,
                occurrence=occurrence,
                kind="label",
                source=label.call.source,
                number=str(i),
                leaf=True,
                no_program="a label has no program",
                refs=(Ref("output.0", i),),
            )
            for i, (label, (name, occurrence)) in enumerate(zip(labels, names))
        ]
        ends = {(label.task, label.step, label.call.rank) for label in labels}
        self.collectives: Sequence[Collective] = ()
        self.steps = [
            Step(task, step, 0, True, rank)
            for task, step, rank in sorted(ends, key=lambda end: end[1:])
        ]

    def array(self, record: int) -> Array:
        label = self.labels[record]
        return label.run.array(label.call.refs[0].record)


def sides(rows: Sequence[TensorMatcher]) -> tuple[Run, Run, list[str]]:
    """(reference, target, sentences) of the paired rows. The target's tensors are brought to the
    reference's shapes; a sentence names each one whose layout was changed.
    """
    pairs = [
        (row.reference, row.target)
        for row in rows
        if row.reference is not None and row.target is not None
    ]
    counts: Counter[tuple[int, int, str]] = Counter()
    names = []
    for label, _ in pairs:
        key = label.call.rank, label.step, label.call.scope
        names.append((label.call.scope, counts[key]))
        counts[key] += 1
    reference = Side([a for a, _ in pairs], names, "reference labels")
    target = Side([b for _, b in pairs], names, "target labels")
    # A task has the same step number on both sides.
    target.calls = [
        msgspec.structs.replace(c, step=label.step)
        for c, label in zip(target.calls, reference.calls)
    ]
    aligned, sentences = _laid_out(reference, target)
    return reference, aligned, sentences


def _laid_out(reference: Side, target: Side) -> tuple[Run, list[str]]:
    """The target with tensors of another shape brought to the reference's axes, if comparing the
    elements shows how; and a sentence for each.
    """
    from whence import align

    making = align.DerivedTensors(target)
    calls, sentences = list(target.calls), []
    for i, (reference_record, target_record) in enumerate(zip(reference.records, target.records)):
        if (
            reference_record.shape == target_record.shape
            or not reference_record.count
            or reference_record.count != target_record.count
        ):
            continue
        try:
            fit = align.fit(target.array(i), reference.array(i))
        except ElementsMissing:
            continue
        if fit is None:
            continue
        derived = making.add(fit.node, {"x": [i]}, "its elements")
        calls[i] = msgspec.structs.replace(calls[i], refs=(Ref("output.0", derived),))
        sentences.append(
            f"{calls[i].scope}#{calls[i].occurrence}: the target's {list(target_record.shape)} is "
            f"read as {fit.node}"
        )
    run = making.done()
    if sentences:
        from whence.records import Over

        run = Over(run, calls)
    return run, sentences
