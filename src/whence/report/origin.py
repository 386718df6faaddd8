"""Where a difference comes from, as text: the way back, the operator it ends at, and what is known
of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from whence.records.slots import is_param
from whence.report.tables import clean, count
from whence.results import Origin, TracedInput, TracedStep, VerdictKind

_LEFT = 19
_MOST_STEPS = 12
_MOST_INPUTS = 6


def origin_text(origin: Origin) -> str:
    """The whole answer as text."""
    end = origin.steps[-1]
    lines = [_row("COMES FROM" if end.verdict != VerdictKind.IDENTICAL else "EQUAL", _call(end))]
    lines += [_row(title, text) for title, text in about(origin)]
    if origin.sentence:
        lines.append(_row("  evidence", clean(origin.sentence)))
    if len(origin.steps) > 1:
        steps = (
            origin.steps
            if len(origin.steps) <= _MOST_STEPS
            else (*origin.steps[: _MOST_STEPS - 1], origin.steps[-1])
        )
        for i, step in enumerate(steps):
            lines.append(
                _row(
                    "THE WAY" if i == 0 else "",
                    f"{_call(step)}   {_size(step.verdict, step.rel_l2)}",
                )
            )
        if len(steps) < len(origin.steps):
            lines.append(
                _row(
                    "",
                    f"({count(len(origin.steps) - len(steps), 'step')} between the last two are "
                    "in the JSON)",
                )
            )
    return "\n".join(lines) + "\n"


def origin_json(origin: Origin) -> str:
    """The same as JSON."""
    return msgspec.json.format(msgspec.json.encode(origin)).decode() + "\n"


def about(origin: Origin) -> Iterator[tuple[str, str]]:
    """(left, right) of what is known of the operator at the end."""
    end = origin.steps[-1]
    if origin.among:
        names = ", ".join(map(clean, origin.among[:4])) + (
            f" and {len(origin.among) - 4} more" if len(origin.among) > 4 else ""
        )
        yield "  or one of", f"{names}: what they made was not compared"
    reads = [i for i in end.inputs if not is_param(i.slot)]
    if reads:
        others = (
            f" and {count(len(reads) - _MOST_INPUTS)} more" if len(reads) > _MOST_INPUTS else ""
        )
        yield "  reads", ", ".join(map(_input, reads[:_MOST_INPUTS])) + others
    weights = [i for i in end.inputs if is_param(i.slot)]
    if weights:
        yield "  weights", ", ".join(map(_input, weights[:_MOST_INPUTS]))
    if origin.attributes:
        parts = []
        for key, value in origin.attributes.items():
            of_target = (
                f" (target {clean(str(origin.target_attributes[key]))})"
                if key in origin.target_attributes
                else ""
            )
            parts.append(f"{clean(key)}={clean(str(value))}{of_target}")
        first = sorted(parts, key=lambda part: " (target " not in part)
        others = f" and {len(first) - 8} more" if len(first) > 8 else ""
        yield "  attributes", ", ".join(first[:8]) + others
    for label in origin.labels[:4]:
        yield "  inside it", _input(label)
    for text in origin.missing:
        yield "  not captured", clean(text)
    if origin.outcome:
        yield "  replay says", clean(origin.outcome)
    if origin.source:
        yield "  written at", clean(origin.source)


def _call(step: TracedStep) -> str:
    number = f" #{step.occurrence}" if step.occurrence else ""
    return f"{clean(step.name)}   {clean(step.op_type)}{number}   step {step.step}"


def _input(traced: TracedInput) -> str:
    return f"{clean(traced.name)} {_size(traced.state, traced.rel_l2)}"


def _size(state: str, rel_l2: float | None) -> str:
    return f"{state} (rel_l2 {rel_l2:.2g})" if rel_l2 else state


def _row(title: str, text: str) -> str:
    return f"{title:<{_LEFT}}{text}"
