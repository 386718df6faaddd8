"""Chooses what the script of a finding shows: operators, their tensors, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from whence.comparison.replays.program_difference import differing_arguments, differing_sizes
from whence.comparison.replays.self_check import Threads
from whence.records.marks import was_compiled
from whence.results import VerdictKind
from whence.workflows.repro.execution import conditions, way_of, why_not_here
from whence.workflows.repro.reference_operators import ReferenceTrace, reference_trace
from whence.workflows.repro.target_operators import TargetTrace, target_trace

if TYPE_CHECKING:
    from whence.replay.export.script import Case
    from whence.replay.export.trace import Piece
    from whence.replay.export.ways import Way
    from whence.workflows.repro.subject import Subject

_SHOWN = 6
"""So many operators of each side are listed."""


class ChosenCase(NamedTuple):
    """The contents of the script, how the fault shows (`Reproduction.how`), and remarks."""

    case: Case
    how: str
    notes: list[str]


class _Ways(NamedTuple):
    """How both sides run their operators; the reference's run eagerly on the CPU."""

    target: Way
    reference: Way


def choose_case(subject: Subject, tell: Callable[[str], None]) -> ChosenCase:
    """The smallest case that shows the finding. Raises ReplayRefused, ElementsMissing."""
    notes: list[str] = []
    tell("running the reference's operators on the target's inputs")
    with Threads(1):
        good = reference_trace(subject)
    call, swapped = subject.target_call, subject.is_of_reference
    target_way = way_of(subject.paired.target, call, notes)
    reference_way = way_of(subject.paired.reference, subject.reference_call, notes)
    ways = _Ways(target_way, replace(reference_way, backend="", device="cpu"))
    compiled = was_compiled(call) and not swapped
    if not compiled and not swapped:
        bad = target_trace(subject, good)
        if bad is not None and bad.reproduces:
            return _semantic(subject, good, bad, ways, notes)
    missing = why_not_here(target_way, compiled)
    if compiled and not missing and any(step.is_own for step in good.trace.steps):
        missing = "a script compiles neither backward passes nor steps of optimisers"
    if missing:
        notes.append(f"{missing}: only what was recorded shows the fault")
    elif not swapped:
        if not compiled and not call.program:
            notes.append(
                "the target's own operators are not known "
                f"({call.no_program or 'no program'}); the reference's are run"
            )
        tell("looking for the operator")
        case = _kernel(good, ways, notes)
        if case is not None:
            return ChosenCase(case, "compiled" if compiled else "kernel", notes)
        notes.append(
            "run here as the target was, nothing is wrong: only what was recorded shows the fault"
        )
    return ChosenCase(_recorded(good, ways, missing), "recorded", notes)


def _semantic(
    subject: Subject, good: ReferenceTrace, bad: TargetTrace, ways: _Ways, notes: list[str]
) -> ChosenCase:
    """Both sides' operators, where they differ."""
    from whence.replay.export.isolate import parting
    from whence.replay.export.script import Case

    reference, target, equal = parting(
        good.trace, bad.trace, good.results, bad.results, _is_bitwise_equal
    )
    differs = differing(reference, target)
    # The fault is in what was asked of the device, so any device shows it.
    way = replace(ways.target, backend="", device="cpu")
    case = Case(reference, target, way, ways.reference, equal=equal, differs=differs[0])
    is_parameter = subject.finding.verdict == VerdictKind.PARAM_DIFF
    return ChosenCase(case, "parameter" if is_parameter else "semantic", [*notes, *differs])


def _is_bitwise_equal(a: Any, b: Any) -> bool:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(first, second))


def _kernel(good: ReferenceTrace, ways: _Ways, notes: list[str]) -> Case | None:
    """The fewest operators that are wrong where they run as the target's did; None where all are
    right.
    """
    from whence.replay.export.isolate import Drill
    from whence.replay.export.script import Case
    from whence.replay.export.trace import piece

    threads = ways.target.settings.get("threads")
    with Threads(threads if isinstance(threads, int) else 1):
        drill = Drill(good.trace, good.results, ways.target)
        smallest = drill.smallest()
    if drill.failed_to_run:
        notes.append(f"{drill.failed_to_run} of {drill.tried} pieces could not be run alone")
    if smallest is None:
        return None
    count = len(good.trace.steps)
    is_all = (smallest.begin, smallest.end) == (0, count)
    operators = piece(good.trace, smallest.begin, smallest.end, good.results if is_all else ())
    recorded = {
        operators.results.index(n): t for n, t in good.recorded.items() if n in operators.results
    }
    notes.append(f"operator {smallest.end} of {count}: wrong {smallest.words}")
    return Case(operators, None, *ways, recorded=recorded)


def _recorded(good: ReferenceTrace, ways: _Ways, missing: str) -> Case:
    """All operators, judged by what the target recorded."""
    from whence.replay.export.script import Case
    from whence.replay.export.trace import piece

    whole = piece(good.trace, 0, len(good.trace.steps), good.results)
    recorded = {list(whole.results).index(n): t for n, t in good.recorded.items()}
    # a compiler that no script can name
    foreign = ways.target.backend and missing and ways.target.device == "cpu"
    return Case(
        whole,
        None,
        ways.reference if foreign else ways.target,
        ways.reference,
        recorded=recorded,
        default="recorded",
        missing=missing,
    )


# ---- words


def describe(case: Case, subject: Subject, number: int, comparison: str, how: str) -> None:
    """Fill the case's title and story."""
    f, reference, target = subject.finding, subject.paired.reference, subject.paired.target
    names = [
        s.title.removeprefix("aten.").removesuffix(".default") for s in executed_piece(case).steps
    ]
    operators = ", ".join(names[:4]) or "nothing"
    if len(names) > 4:
        operators += f" and {len(names) - 4} more"
    where = f"{f.name} ({f.op_type})" if f.op_type and f.op_type != f.name else f.name
    verb = {
        "compiled": "is wrong as the target compiled it",
        "kernel": "is wrong as the target runs it",
        "semantic": "is not what the reference runs",
        "parameter": "has other parameters than the reference",
        "recorded": "is not what the target recorded",
    }[how]
    place = f"{f.root or subject.reference_call.root}, {where}, step {f.step}, rank {f.rank}"
    facts = {
        "found by": f"whence compare {reference.path} {target.path}, finding {number} "
        f"of {comparison}",
        "where": place + (f", {f.source}" if f.source else ""),
        "target": conditions(target, subject.target_call, case.way),
        "reference": conditions(reference, subject.reference_call, case.reference),
    }
    case.title = f"{where}: {operators} {verb}."
    case.story = [f.sentence, *(f"{name:<11}{text}" for name, text in facts.items() if text)]


def executed_piece(case: Case) -> Piece:
    """The operators at fault: the target's own, where the case has them."""
    return case.bad if case.bad is not None and case.bad.steps else case.good


def differing(reference: Piece, target: Piece) -> list[str]:
    """What differs between the operators of both sides, in words."""
    if [s.name for s in reference.steps] == [s.name for s in target.steps]:
        arguments = []
        for step, its_partner in zip(reference.steps, target.steps):
            clauses = differing_arguments(step, its_partner) or differing_sizes(step, its_partner)
            arguments += [f"{its_partner.title}: {clause}" for clause in clauses]
        return arguments or ["the same operators with the same arguments, on other tensors"]
    a, b = ([s.title for s in p.steps] for p in (reference, target))
    are_whole = reference.differentiated and target.differentiated
    if are_whole or a[:_SHOWN] == b[:_SHOWN]:
        a, b = _without_common_ends(a, b)
    words = [", ".join(titles[:_SHOWN]) or "nothing" for titles in (a, b)]
    return [f"the reference runs {words[0]}; the target {words[1]}"]


def _without_common_ends(a: list[str], b: list[str]) -> tuple[list[str], list[str]]:
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b
