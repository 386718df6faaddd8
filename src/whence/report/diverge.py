"""When two trainings part, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, count, headed
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


def diverged_text(result: Diverged) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def headline(result: Diverged) -> str:
    """The answer in one line."""
    if result.status == Status.DIFFERENT and result.part is not None:
        part = result.part
        step = part.during if part.during >= 0 else part.step
        words = f"Part at step {step} in {clean(part.name)} {clean(part.slot)}".rstrip()
        return f"{words}: {_PLACES.get(part.kind, part.kind)}"
    if result.status == Status.SAME:
        return f"Never apart by more than noise in {_extent(result.steps)}"
    return f"Cannot tell: {clean(result.why[0])}" if result.why else "Cannot tell"


def _lines(result: Diverged) -> Iterator[str]:
    steps = _extent(result.steps)
    if result.status == Status.DIFFERENT and result.part is not None:
        yield headed("PART", _place(result.part))
        yield from _found(result.part)
    elif result.status == Status.SAME and result.first is None:
        yield headed(
            "SAME", f"equal bit for bit in {steps}: {count(result.tensors, 'tensor')} a step"
        )
    elif result.status == Status.SAME:
        yield headed("SAME", f"never apart by more than noise in {steps}")
        yield headed("  first differs", _brief(result.first))
    else:
        yield headed("CANNOT TELL", f"nothing beyond noise stands out in {steps}")
        for number, why in enumerate(result.why):
            yield headed("" if number else "  because", clean(why))
        first = result.part or result.first
        if first is not None:
            yield headed("  first differs", _brief(first))
    if result.part is not None and result.first is not None and result.first != result.part:
        yield headed("  before", _before(result))
    elif result.status == Status.DIFFERENT and result.part is not None:
        first_step = result.steps[0] if result.steps else 0
        if result.part.step > first_step:
            yield headed("  before", f"equal bit for bit up to step {result.part.step}")
    yield from _drift(result)
    for number, line in enumerate(result.next):
        yield headed("" if number else "  next", clean(line))
    for note in result.notes[:_MOST]:
        yield f"note: {clean(note)}"


def _extent(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}"


def _place(part: Parting) -> str:
    where = f"step {part.step}, rank {part.rank}"
    if part.during >= 0:
        where = f"its step {part.step}, in step {part.during} of the training, rank {part.rank}"
    if part.micro:
        where += f", micro-batch {part.micro}"
    if part.phase != "forward":
        where += f", {clean(part.phase)}"
    return "   ".join(
        filter(None, (clean(part.name), clean(part.op_type), clean(part.slot), where))
    )


def _found(part: Parting) -> Iterator[str]:
    words = _PLACES.get(part.kind, part.kind)
    if part.words:
        words += f": {clean(part.words)}"
    yield headed("  differs", words)
    if part.others:
        yield headed("", f"so in {count(part.others, 'other call')} of this step")
    if part.error is not None and part.noise is not None:
        yield headed("  by", f"{_size(part.error)}, {_times(part)}")
    if part.inputs is not None and part.error is not None:
        agree = "equal bit for bit" if part.inputs == 0 else f"agree to {part.inputs:.2g}"
        yield headed("  inputs", agree)


def _size(error: float) -> str:
    return f"{error:.2g} of its size" if error < 1 else "as much as its size"


def _times(part: Parting) -> str:
    assert part.error is not None and part.noise
    return f"{part.error / part.noise:,.0f} times the noise ({part.noise:.2g})"


def _brief(part: Parting | None) -> str:
    if part is None:
        return ""
    size = f"   {_size(part.error)}" if part.error is not None else ""
    return f"{_place(part)}{size}"


def _before(result: Diverged) -> str:
    first = result.first
    assert first is not None
    return f"noise since step {first.step}, {clean(first.name)} {clean(first.slot)}"


def _drift(result: Diverged) -> Iterator[str]:
    """How far the runs are apart: at the first steps that differ and at the end."""
    known = [d for d in result.drift if d.apart is not None]
    if not known or not known[-1].apart:
        return
    part = result.part.step if result.part is not None else -1
    chosen = [d for d in known if d.step in (part - 1, part, known[-1].step)]
    words = [f"{d.apart:.2g} at step {d.step}" for d in chosen]
    if known[-1].repetition is not None:
        words[-1] += f" (repetitions {known[-1].repetition:.2g})"
    yield headed("  apart", ", ".join(words))
    last = known[-1]
    if last.reference is not None and last.target is not None:
        yield headed("  loss", f"{last.reference:.7g} and {last.target:.7g} at step {last.step}")
