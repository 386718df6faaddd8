"""Reports on a terminal when two trainings diverge."""

from __future__ import annotations

from whence.report.document import Document, answering
from whence.report.tables import count, spaced
from whence.results import Diverged, Parting, PartKind, Status

_MOST = 6
_PLACES: dict[str, str] = {
    PartKind.BATCH: "what the model is given",
    PartKind.PARAMETER: "a parameter that no step changed",
    PartKind.STATE: "the optimiser's state, between two steps",
    PartKind.SETTING: "a setting",
    PartKind.RANDOM: "random numbers, or the chance of a dropout",
    PartKind.FORWARD: "what the module makes",
    PartKind.LOSS: "the loss",
    PartKind.BACKWARD: "a gradient in the backward pass",
    PartKind.GRADIENTS: "what is done to gradients before the optimiser",
    PartKind.OPTIMIZER: "what the optimiser makes",
    PartKind.CALLS: "the calls that are made",
}


@answering
def diverged_text(result: Diverged) -> Document:
    """The answer as text."""
    steps, part, first = _extent(result.steps), result.part, result.first
    if result.status == Status.DIFFERENT and part is not None:
        yield "PART", _place(part)
        yield from _found(part)
    elif result.status == Status.SAME and first is None:
        yield "SAME", f"equal bit for bit in {steps}: {count(result.tensors, 'tensor')} a step"
    elif result.status == Status.SAME:
        yield "SAME", f"never apart by more than noise in {steps}"
        yield "  first differs", _brief(first)
    else:
        yield "CANNOT TELL", f"nothing beyond noise stands out in {steps}"
        yield "  because", result.why
        yield "  first differs", _brief(part or first)
    if part is not None and first is not None and first != part:
        yield "  before", f"noise since step {first.step}, {first.name} {first.slot}"
    elif part is not None and part.step > min(result.steps, default=0):
        yield "  before", f"equal bit for bit up to step {part.step}"
    yield from _drift(result)
    yield "  next", result.next
    yield from (f"note: {note}" for note in result.notes[:_MOST])


def _extent(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}"


def _place(part: Parting) -> str:
    at = f"step {part.step}, rank {part.rank}"
    if part.during >= 0:
        at = f"its step {part.step}, in step {part.during} of the training, rank {part.rank}"
    if part.micro:
        at += f", micro-batch {part.micro}"
    if part.phase != "forward":
        at += f", {part.phase}"
    return spaced(part.name, part.op_type, part.slot, at)


def _found(part: Parting) -> Document:
    yield "  differs", _PLACES[part.kind] + (f": {part.words}" if part.words else "")
    if part.others:
        yield "", f"so in {count(part.others, 'other call')} of this step"
    if part.error is not None and part.noise is not None:
        times = f"{part.error / part.noise:,.0f} times the noise ({part.noise:.2g})"
        yield "  by", f"{_size(part.error)}, {times}"
    if part.inputs is not None and part.error is not None:
        agree = "equal bit for bit" if part.inputs == 0 else f"agree to {part.inputs:.2g}"
        yield "  inputs", agree


def _size(error: float) -> str:
    return f"{error:.2g} of its size" if error < 1 else "as much as its size"


def _brief(part: Parting | None) -> str:
    if part is None:
        return ""
    return spaced(_place(part), _size(part.error) if part.error is not None else "")


def _drift(result: Diverged) -> Document:
    """Says how far apart the runs are at the first steps that differ and at the end."""
    known = [d for d in result.drift if d.apart is not None]
    if not known or not known[-1].apart:
        return
    part = result.part.step if result.part is not None else -1
    chosen = [d for d in known if d.step in (part - 1, part, known[-1].step)]
    words = [f"{d.apart:.2g} at step {d.step}" for d in chosen]
    if known[-1].repetition is not None:
        words[-1] += f" (repetitions {known[-1].repetition:.2g})"
    yield "  apart", ", ".join(words)
    last = known[-1]
    if last.reference is not None and last.target is not None:
        yield "  loss", f"{last.reference:.7g} and {last.target:.7g} at step {last.step}"
