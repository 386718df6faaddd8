"""What the comparison of a rung with the lowest says, and what a ladder names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from whence.records.slots import is_output
from whence.results import Evidence, Rung, RungKind, Status, VerdictKind
from whence.workflows.ladder.climbers import FINE

if TYPE_CHECKING:
    from whence.records import Record, Run
    from whence.results import Comparison
    from whence.workflows.ladder.climbers import Climber


def judged(rungs: Sequence[Rung], climber: Climber) -> tuple[str, tuple[str, ...], str]:
    """(status, what is at fault, that in a sentence) of a ladder."""
    top, base = rungs[-1], rungs[0].name
    outside = next((i for i, r in enumerate(rungs) if r.verdict == RungKind.OUTSIDE), -1)
    if outside > 0:
        fine = max(i for i, r in enumerate(rungs[:outside]) if r.verdict in FINE)
        named = tuple(climber.stage(r.name, top) for r in rungs[fine + 1 : outside + 1])
        start = f"{rungs[fine].name} is {_words_of(rungs[fine], base)}, " if fine else ""
        first = rungs[outside]
        sentence = f"{start}{first.name} is outside the noise: {first.sentence}"
        if len(named) > 1:
            sentence += "".join(f"; {_with_reason(r, base)}" for r in rungs[fine + 1 : outside])
        if top.verdict in FINE:
            sentence += (
                f"; the program as it is ({top.name}) is {_words_of(top, base)} all the same"
            )
        return Status.DIFFERENT, named, sentence
    bad = [r for r in rungs if r.verdict not in FINE]
    if top.verdict in FINE:
        equal = all(r.verdict == RungKind.BIT_EQUAL for r in rungs)
        start = f"every rung is bit-equal to {base}" if equal else "no rung is outside the noise"
        return Status.SAME, (), "; ".join((start, *(_with_reason(r, base) for r in bad)))
    return Status.UNDECIDED, (), "; ".join(_with_reason(r, base) for r in bad)


class Outcome(NamedTuple):
    """How a run stands against the lowest rung. why: it is undecided. sentence: of what differs
    most, "" for nothing. node: name and type of the first that differs, where it is outside.
    """

    verdict: str
    why: str = ""
    sentence: str = ""
    node: str = ""


def boundary_of(result: Comparison) -> Outcome:
    """Of a comparison as it stands."""
    words = words_of_worst(result)
    if result.status == Status.DIFFERENT:
        return Outcome(RungKind.OUTSIDE, "", words, _first_node(result))
    if result.status == Status.UNDECIDED:
        why = result.headline or "; ".join(result.inputs_differ[:1]) or words
        return Outcome(RungKind.UNDECIDED, why, words)
    if all(row.measured.identical for row in result.rows):
        return Outcome(RungKind.BIT_EQUAL)
    return Outcome(RungKind.NOISE, "", words)


def outcome_of(result: Comparison, reference: Run, target: Run) -> Outcome:
    """Of a comparison that sees nodes, which an optimiser may replace by others that compute the
    same: what models return must differ too.
    """
    outcome = boundary_of(result)
    if result.inputs_differ:
        return outcome
    before, after = _returned(reference), _returned(target)
    for key in before.keys() & after.keys():
        one, other = before[key], after[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            name = f"{key.root} {key.slot}"
            words = f"{name}: returned as {_form(other)}, on the lowest rung as {_form(one)}"
            return Outcome(RungKind.OUTSIDE, "", words, name)
    if outcome.verdict in FINE:
        return outcome
    if before and {k: r.hash for k, r in before.items()} == {k: r.hash for k, r in after.items()}:
        words = f"what is returned is bit-equal, though inside not all is: {outcome.sentence}"
        return Outcome(RungKind.NOISE, "", words)
    if result.findings and all(f.verdict == VerdictKind.PARAM_DIFF for f in result.findings):
        # codes of int8 written as uint8, for one: each differs by 128, and means the same
        why = (
            "only parameters differ, which an optimiser may write otherwise, and so does what is "
            f"returned; whether by more than rounding is not known: {outcome.sentence}"
        )
        return Outcome(RungKind.UNDECIDED, why, outcome.sentence)
    return outcome


class _Place(NamedTuple):
    """Where a root call of a run hands something out."""

    root: str
    rank: int
    step: int
    occurrence: int
    slot: str


def _returned(run: Run) -> dict[_Place, Record]:
    """What the root calls of a run return."""
    return {
        _Place(call.root, call.rank, call.step, call.occurrence, ref.slot): run.records[ref.record]
        for call in run.calls
        if call.parent == -1
        for ref in call.refs
        if is_output(ref.slot)
    }


def _form(record: Record) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _first_node(result: Comparison) -> str:
    """Name and type of the first finding that is not of parameters alone, which an optimiser may
    write otherwise; of the first where there is no other, "" without one.
    """
    computed = [f for f in result.findings if f.verdict != VerdictKind.PARAM_DIFF]
    found = next(iter(computed or result.findings), None)
    return "" if found is None else f"{found.name} ({found.op_type})"


def distance(result: Comparison, reference: Run) -> tuple[bool, float | None]:
    """(is everything that was compared bit-equal, the largest rel_l2 of an output of a root call;
    None where one has none).
    """
    roots = {
        i
        for i, pair in enumerate(result.plan.pairs)
        if reference.calls[pair.reference].parent == -1
    }
    outputs = [
        row.measured for row in result.rows if row.pair in roots and is_output(row.reference_slot)
    ]
    sizes = [0.0 if m.identical else m.values.get("rel_l2") for m in outputs]
    errors = [s for s in sizes if s is not None]
    largest = max(errors) if errors and len(errors) == len(sizes) else None
    return all(row.measured.identical for row in result.rows), largest


def is_unproven(result: Comparison) -> bool:
    """Is something beyond the noise by two dumps alone, without a replay?"""
    return (
        result.status != Status.SAME
        and not result.inputs_differ
        and all(f.evidence != Evidence.REPLAY for f in result.findings)
    )


def words_of_worst(result: Comparison) -> str:
    """What differs most, in words."""
    if result.inputs_differ:
        return result.inputs_differ[0]
    if result.findings:
        first = result.findings[0]
        return f"{first.name}: {first.sentence}"
    scored = [v for v in result.verdicts if v.verdict != VerdictKind.IDENTICAL]
    worst = max(scored, key=lambda v: (v.score or 0.0, v.numbers.get("e_out") or 0.0), default=None)
    return result.headline if worst is None else worst.sentence


def short_reason(why: str) -> str:
    """The exception of an output that ends with one, else the first line."""
    from whence.workflows.rerun import RAISED

    lines = [line.removeprefix("  | ") for line in why.splitlines()]
    return next((line for line in lines if RAISED.match(line)), lines[0] if lines else "")


def _with_reason(rung: Rung, base: str) -> str:
    return f"{rung.name} {_words_of(rung, base)}: {short_reason(rung.why)}"


def _words_of(rung: Rung, base: str) -> str:
    words: dict[str, str] = {
        RungKind.BIT_EQUAL: f"bit-equal to {base}",
        RungKind.NOISE: "within the noise",
        RungKind.FAILED: "does not compile or run",
    }
    return words.get(rung.verdict, rung.verdict)
