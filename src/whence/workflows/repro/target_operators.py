"""Runs the target's own operators of a finding, as its program has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whence import dtypes, judge
from whence.comparison.replays.self_check import Threads
from whence.errors import ElementsMissing, ReplayRefused
from whence.records.slots import is_of_child, split_child
from whence.workflows.repro.operator_calls import gathered_program, tensor_number

if TYPE_CHECKING:
    from whence.replay.export.trace import Trace
    from whence.replay.flatten import Flat
    from whence.workflows.repro.reference_operators import ReferenceTrace
    from whence.workflows.repro.subject import Subject


@dataclass(frozen=True)
class TargetTrace:
    """What the target's operators computed. results: numbers of the judged tensors. reproduces: is
    that what the target recorded, but for rounding?
    """

    trace: Trace
    results: Sequence[int]
    reproduces: bool


def target_trace(subject: Subject, reference: ReferenceTrace) -> TargetTrace | None:
    """The trace; None where the target has no program that can be run for these outputs."""
    try:
        return _trace(subject, reference)
    except (ReplayRefused, ElementsMissing, KeyError, ValueError):
        return None


def _trace(subject: Subject, reference: ReferenceTrace) -> TargetTrace | None:
    from whence.replay.export.trace import Trace

    source, call = subject.target_source, subject.target_call
    gathered = gathered_program(source, call, source.program)
    loaded = _loaded(subject, gathered)
    program = loaded.program
    outputs = [_target_slot(subject, slot) for slot in reference.slots]
    outputs = [s for s in outputs if s in dict(program.outputs)]
    if len(outputs) != len(reference.results):
        return None
    slots = (*program.inputs, *program.params)
    if gathered is not None:
        records = {}
        for slot in slots:
            number, own_slot = gathered.origins[slot]
            if (record := source.record(source.run.calls[number], own_slot)) is not None:
                records[slot] = record
    else:
        records = source.records(call, slots)
    arrays, strides = source.arrays(records)
    recorded, _ = source.arrays(source.records(call, outputs))
    if not recorded:
        return None
    trace = Trace(copies=loaded.writes)
    with Threads(1):
        working = loaded.run(arrays, arrays, strides=strides, outputs=outputs, watch=trace)
        roundoffs = [judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in recorded.values()]
        wide = "float64" if min(roundoffs) < 1e-5 else "float32"
        exact = loaded.run(arrays, arrays, working=wide, strides=strides, outputs=outputs)
    scores = (
        judge.local(array, exact[s], working[s]).score
        for s, array in recorded.items()
        if exact[s].shape == array.shape
    )
    reproduces = max(scores, default=float("inf")) <= 1
    numbers = [n for s in outputs if (n := tensor_number(trace, program, s)) is not None]
    return TargetTrace(trace, numbers, reproduces) if len(numbers) == len(outputs) else None


def _loaded(subject: Subject, gathered: Flat | None) -> Any:
    from whence.replay.validation import load

    source = subject.target_source
    if gathered is None:
        return source.load(subject.target_call)
    constants = [source.run.array(c) for c in gathered.program.constants]
    return load(gathered.program, constants, allow=source.allow)


def _target_slot(subject: Subject, slot: str) -> str:
    """The target's name of an output of the reference's program; "" where it has none."""
    paired = subject.paired
    pair = paired.slot(subject.pair, slot)
    if pair is None:
        return ""
    if not is_of_child(slot):
        return pair.target_slot
    child = subject.reference_source.children(subject.reference_call.id)[split_child(slot)[0]]
    partner = paired.plan.pairs[paired.pair_of[child]].target
    children = subject.target_source.children(subject.target_call.id)
    return f"{children.index(partner)}:{pair.target_slot}" if partner in children else ""
