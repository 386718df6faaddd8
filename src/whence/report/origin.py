"""Describes the origin of a difference as text: the path back to it, the operator where it ends,
and what is known of that.
"""

from __future__ import annotations

import msgspec

from whence.records.slots import is_param
from whence.report.document import Document, answering
from whence.report.tables import count, listed
from whence.results import Origin, TracedInput, TracedStep, VerdictKind

_MOST_STEPS = 12
_MOST_INPUTS = 6


@answering
def origin_text(origin: Origin) -> Document:
    """The whole answer as text."""
    end, steps = origin.steps[-1], origin.steps
    yield "COMES FROM" if end.verdict != VerdictKind.IDENTICAL else "EQUAL", _call(end)
    yield from about(origin)
    yield "  evidence", origin.sentence
    left_out = len(steps) - _MOST_STEPS
    if left_out > 0:
        steps = (*steps[: _MOST_STEPS - 1], end)
    if len(steps) > 1:
        yield "THE WAY", (f"{_call(step)}   {_size(step.verdict, step.rel_l2)}" for step in steps)
    if left_out > 0:
        yield "", f"({count(left_out, 'step')} between the last two are in the JSON)"


def origin_json(origin: Origin) -> str:
    """The same content as `origin_text`, as JSON."""
    return msgspec.json.format(msgspec.json.encode(origin)).decode() + "\n"


def about(origin: Origin) -> Document:
    """What is known of the operator at the end of the path."""
    end = origin.steps[-1]
    if origin.among:
        yield "  or one of", f"{listed(origin.among, 4)}: what they made was not compared"
    reads = [_input(i) for i in end.inputs if not is_param(i.slot)]
    yield "  reads", listed(reads, _MOST_INPUTS)
    weights = [_input(i) for i in end.inputs if is_param(i.slot)]
    yield "  weights", ", ".join(weights[:_MOST_INPUTS])
    yield "  attributes", listed(_attributes(origin), 8)
    yield from (("  inside it", _input(label)) for label in origin.labels[:4])
    yield from (("  not captured", missing) for missing in origin.missing)
    yield "  replay says", origin.outcome
    yield "  written at", origin.source


def _attributes(origin: Origin) -> list[str]:
    """Attributes of the operator, those that differ in the target first."""
    of_target = origin.target_attributes
    return [
        f"{key}={value}" + (f" (target {of_target[key]})" if key in of_target else "")
        for key, value in sorted(
            origin.attributes.items(), key=lambda pair: pair[0] not in of_target
        )
    ]


def _call(step: TracedStep) -> str:
    number = f" #{step.occurrence}" if step.occurrence else ""
    return f"{step.name}   {step.op_type}{number}   step {step.step}"


def _input(traced: TracedInput) -> str:
    return f"{traced.name} {_size(traced.state, traced.rel_l2)}"


def _size(state: str, rel_l2: float | None) -> str:
    return f"{state} (rel_l2 {rel_l2:.2g})" if rel_l2 else state
