"""Programs beside runs: which program belongs to a run, and what two programs differ in before
anything is computed.

A program is a run of calls without values (`readers/formats/paddle_program.py`): operators,
attributes, data flow.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from whence import align
from whence._version import __version__
from whence.comparison.programs.onnx_attributes import with_node_programs
from whence.comparison.programs.operator_pairing import (
    constant_records,
    operators,
)
from whence.comparison.programs.paddle_attributes import like, with_programs
from whence.comparison.programs.program_diff import (
    EQUAL,
    Difference,
    ProgramDiff,
    diff_programs,
    weights_beside,
    weights_seen,
)
from whence.comparison.programs.program_flow import (
    PROGRAM,
    folded_weights,
    operators_of_calls,
    with_data_flow,
)
from whence.comparison.programs.program_forms import is_rewritten, told_by_form
from whence.errors import UsageError
from whence.frameworks.paddle_programs import DRAWS
from whence.readers import UNTOLD
from whence.readers.opening import open_run
from whence.records import Call, Note, Over, Run, region
from whence.records.marks import Mark
from whence.records.slots import is_read
from whence.results import (
    CallPair,
    CauseKind,
    Comparison,
    Confidence,
    Coverage,
    Evidence,
    Finding,
    Plan,
    Status,
    VerdictKind,
)

_MOST = 200  # differences that become findings


def is_program(run: Run) -> bool:
    """Does this run hold operators without values?"""
    return run.info.kind.endswith(PROGRAM)


# ---- two programs


def compare(reference: Run, target: Run) -> Comparison:
    """Two programs: `different` when they do other things, else `undecided`, since nothing was
    computed that could be the same.

    Raises UsageError when only one of the two is a program.
    """
    for program, counterpart in ((reference, target), (target, reference)):
        if not is_program(counterpart):
            raise UsageError(
                f"{program.path} is a program and has no values, {counterpart.path} has: compare "
                "two runs and give the program with --program"
            )
    diff = told_by_form(diff_programs(reference, target), reference, target)
    findings = tuple(map(_finding, diff.differences[:_MOST]))
    calls = len(operators(reference))
    pairs = tuple(CallPair(a, b, "order", "") for a, b in diff.pairs)
    paired_a, paired_b = {a for a, _ in diff.pairs}, {b for _, b in diff.pairs}
    only_reference = tuple(c.id for c in operators(reference) if c.id not in paired_a)
    only_target = tuple(c.id for c in operators(target) if c.id not in paired_b)
    at_fault = len({d.call for d in diff.differences if d.call in paired_a})
    counts = {VerdictKind.STRUCTURAL: at_fault, VerdictKind.UNDETERMINED: len(pairs) - at_fault}
    note = "nothing was run, so nothing was measured" + (
        "" if not diff.differences else f"; {diff.sentence}"
    )
    without = {
        side: tuple(run.calls[i].scope for i in ids)
        for side, run, ids in (
            ("reference", reference, only_reference),
            ("target", target, only_target),
        )
        if ids
    }
    programs = diff.lines if len(diff.differences) > 1 or diff.forms else ()
    return Comparison(
        status=Status.DIFFERENT if findings else Status.UNDECIDED,
        evidence=PROGRAM,
        reference=reference.path,
        target=target.path,
        findings=findings,
        first_difference=_first(findings),
        counts={k: n for k, n in counts.items() if n},
        coverage=Coverage(calls, len(pairs), 0, 0, 0, False),
        unmatched=len(only_reference) + len(only_target),
        incomparable=0,
        inputs_differ=(),
        versions={"whence": __version__},
        plan=Plan(pairs, only_reference, only_target, ()),
        rows=(),
        verdicts=(),
        headline="" if findings else f"{diff.sentence}; nothing was run, so nothing was measured",
        notes=(note,) if findings else (),
        without_partner=without,
        programs=programs,
    )


def _finding(difference: Difference) -> Finding:
    is_weight = difference.kind == "weights"
    return Finding(
        name=difference.name,
        op_type=difference.op_type,
        cause=_cause(difference),
        verdict=VerdictKind.PARAM_DIFF if is_weight else VerdictKind.STRUCTURAL,
        confidence=Confidence.CERTAIN,
        step=0,
        rank=0,
        evidence=Evidence.PROGRAM,
        sentence=difference.words,
        root="model",
    )


def _cause(difference: Difference) -> CauseKind:
    if difference.kind == "weights":
        return CauseKind.PARAMETER
    return CauseKind.SEMANTIC if difference.attributes else CauseKind.STRUCTURAL


def _first(findings: Sequence[Finding]) -> dict[str, Any] | None:
    finding = next(iter(findings), None)
    return (
        None
        if finding is None
        else {
            "name": finding.name,
            "op_type": finding.op_type,
            "step": 0,
            "rank": 0,
            "verdict": finding.verdict,
        }
    )


# ---- a program beside a log


def open_programs(
    sources: str | os.PathLike[str] | Run | Sequence[Any] | None, opened: Callable[[Any], Run]
) -> tuple[Run, ...]:
    """The programs a user gave: of the reference, and of the target when it is another. Raises
    UsageError, UnreadableRun.
    """
    if sources is None:
        return ()
    listed = (
        [sources]
        if isinstance(sources, (str, os.PathLike)) or hasattr(sources, "calls")
        else list(sources)
    )
    if not 1 <= len(listed) <= 2:
        raise UsageError(
            "program takes one (of both runs) or two (of the reference, of the target), not "
            f"{len(listed)}"
        )
    runs = tuple(opened(source) for source in listed)
    for run in runs:
        if not is_program(run):
            raise UsageError(
                f"{run.path} is not a program; --program takes the file in which a framework "
                "saved a model without its weights (.pdmodel)"
            )
    return runs


class Programs(NamedTuple):
    """Programs of two runs. pairs: (root, the reference's, the target's), root "" for those that
    were given; files: those.
    """

    pairs: tuple[tuple[str, Run, Run], ...] = ()
    files: tuple[str, ...] = ()


def apply_programs(reference: Run, target: Run, chosen: Sequence[Run]) -> tuple[Run, Run, Programs]:
    """Both runs with what their programs say, and the programs: those given, else those that a
    capture saved with its run. Nodes of ONNX graphs say themselves what they compute.
    """
    reference, target = with_node_programs(reference), with_node_programs(target)
    if chosen:
        pair = (("", chosen[0], chosen[-1]),)
        files = tuple(run.path for run in chosen[:2])
        is_pair = len(chosen) == 2
        # What lies between two prints is then another operator in each program.
        direct = is_pair and is_rewritten(diff_programs(chosen[0], chosen[1], ({}, {})))
        target = with_data_flow(target, chosen[-1], direct=direct)
        return (
            with_data_flow(reference, chosen[0], direct=direct),
            _marked(target) if direct else target,
            Programs(pair if is_pair else (), files),
        )
    programs_of = saved_programs(reference), saved_programs(target)
    sides = [
        _with_attributes(run, programs_) for run, programs_ in zip((reference, target), programs_of)
    ]
    pairs = tuple(
        (root, programs_of[0][root], programs_of[1][root])
        for root in programs_of[0]
        if root in programs_of[1]
    )
    reference_run, target_run = sides
    for root, reference_program, target_program in pairs:
        reference_run, target_run = renamed_as_partners(
            reference_run, target_run, (reference_program, target_program), root
        )
    return reference_run, target_run, Programs(pairs)


def saved_programs(run: Run) -> dict[str, Run]:
    """The programs that a capture of Paddle saved with its run, by root: what a predictor ran,
    after passes.
    """

    named = {
        root: Path(run.path) / str(s["program"])
        for root, s in align.settings_of(run).items()
        if s.get("program")
    }
    return {root: open_run(str(file)) for root, file in named.items() if file.is_file()}


def _with_attributes(run: Run, programs_of: Mapping[str, Run]) -> Run:
    """A captured run with what its programs say of its calls."""
    for root, program in programs_of.items():
        run = with_programs(run, program, operators_of_calls(run, program, root))
    return run


def with_differences(
    result: Comparison, programs: Programs, reference: Run, target: Run
) -> Comparison:
    """The comparison with what the programs of both runs differ in, first of all and at the
    findings it concerns.

    reference, target: the runs, whose captured weights are compared by hash where there are none
    beside the programs.
    """
    differing: list[str] = []
    equal: list[str] = []
    findings = list(result.findings)
    for root, reference_program, target_program in programs.pairs:
        sides = (reference_program, reference), (target_program, target)
        weights = _weights(*sides, root)
        diff = diff_programs(reference_program, target_program, weights)
        diff = told_by_form(diff, reference_program, target_program, weights)
        named = f"{root}: " if len(programs.pairs) > 1 else ""
        (differing if diff.differences else equal).extend(f"{named}{line}" for line in diff.lines)
        by_name = _by_operator(diff, reference_program)
        where = operators_of_calls(reference, reference_program, root or None)
        ran = {reference.calls[a].scope: reference_program.calls[b].scope for a, b in where.items()}
        findings = [
            _explained(f, ran.get(f.name, f.name), by_name) if root in ("", f.root) else f
            for f in findings
        ]
    if len(programs.files) == 1:
        findings = [_of_either(finding) for finding in findings]
    if len(programs.pairs) > 1:
        equal_count = sum(line.partition(": ")[2].startswith(EQUAL) for line in equal)
        equal = (
            [f"the programs of {equal_count} of {len(programs.pairs)} predictors are equal"]
            if equal_count
            else []
        )
    return replace(
        result,
        findings=tuple(findings),
        programs=(*differing, *equal),
        program_files=programs.files,
    )


def _by_operator(diff: ProgramDiff, program: Run) -> dict[str, Difference]:
    """Differences by the name of their operator, and of those that read a constant made by it: a
    pass may fold what depends on weights alone. program: the reference's.
    """
    by_name = {d.name: d for d in diff.differences}
    calls = operators(program)
    constant = constant_records(calls)
    behind: dict[int, Difference] = {}  # by record
    for call in calls if by_name else ():
        folded = next((d for r in call.slots("input") if (d := behind.get(r.record))), None)
        difference = by_name.get(call.scope, folded)
        if difference is not None:
            by_name[call.scope] = difference
            outputs = (r.record for r in call.slots("output"))
            behind.update((record, difference) for record in outputs if record in constant)
    return by_name


def _weights(
    reference: tuple[Run, Run], target: tuple[Run, Run], root: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Hashes of the parameters of both sides, each a program and its run, by name. A parameter that
    was folded into a constant counts where both sides read an equal constant: in one that differs,
    an attribute may be what differs.
    """
    seen, other_seen = (
        weights_beside(program) or weights_seen(run, root) for program, run in (reference, target)
    )
    folded, other_folded = (
        folded_weights(run, program, root or None) for program, run in (reference, target)
    )
    equal = set(folded.values()) & set(other_folded.values())
    return (
        {name: hash_ for name, hash_ in folded.items() if hash_ in equal} | seen,
        {name: hash_ for name, hash_ in other_folded.items() if hash_ in equal} | other_seen,
    )


def _of_either(finding: Finding) -> Finding:
    """A finding of two runs beside one program: whether the target's operator has the same
    attributes is not known.
    """
    if finding.cause != CauseKind.KERNEL:
        return finding
    words = (
        "one program was given for both runs: another attribute in the target's is as likely "
        "as its kernel (--program once for each)"
    )
    return replace(finding, cause=CauseKind.UNKNOWN, sentence=f"{finding.sentence}; {words}")


def _explained(finding: Finding, name: str, by_name: Mapping[str, Difference]) -> Finding:
    """A finding with what its operator, `name` in the program, differs in there."""
    difference = by_name.get(name)
    if difference is None:
        return finding
    cause = (
        CauseKind.SEMANTIC
        if finding.verdict == VerdictKind.INTRODUCED
        and not finding.cause
        and difference.kind == "attributes"
        else finding.cause
    )
    values = difference.words.rpartition(": ")[2].split(" against ")
    is_said = all(value in finding.sentence for value in values) or (
        difference.kind == "weights" and finding.cause == CauseKind.PARAMETER
    )
    place = f" ({name})" if name != finding.name else ""
    words = "" if is_said else f"; in its program{place} {difference.words}"
    return replace(finding, cause=cause, sentence=f"{finding.sentence}{words}")


# Calls of the target under the names of the calls of the reference whose operators they are
# paired with in the programs of both runs.

Execution = tuple[Any, int, int]
"""(step, operator of the program, which time it ran in that step)."""
_NUMBERED = re.compile(r"inner_var\.\d+")


def renamed_as_partners(
    reference: Run, target: Run, both_programs: tuple[Run, Run], root: str
) -> tuple[Run, Run]:
    """Both runs, calls of the target named as those of the reference whose operators they are
    paired with in the programs.

    Only where the programs differ; names of variables that are no numbers of the executor stay. An
    operator that does what several of the reference do is paired with the last of them; what the
    two read cannot be compared. Constants that a pass folded are left out.
    """
    diff = diff_programs(both_programs[0], both_programs[1], ({}, {}))
    if all(d.kind in ("attributes", "weights") for d in diff.differences):
        return reference, target
    if is_rewritten(diff):
        return reference, _marked(target, root)
    places = [
        operators_of_calls(run, program, root)
        for run, program in zip((reference, target), both_programs)
    ]
    reference_calls, target_calls = (
        _executions(run, ran) for run, ran in zip((reference, target), places)
    )
    put_in = [_put_in(run, ran, root) for run, ran in zip((reference, target), places)]
    names = {call.scope for call in reference_calls.values()}
    numbered = any(_NUMBERED.fullmatch(name) for name in names)
    reference_changes, target_changes, omitted = _changes_of_pairs(
        diff, reference_calls, target_calls, numbered
    )
    for call in target.calls:
        is_unmatched = call.root == root and call.id not in target_changes
        if numbered and is_unmatched and call.scope in names:
            target_changes[call.id] = replace(call, scope=f"{call.scope} (target)")
    if not diff.turned:
        paired = {a for a, _ in diff.pairs}
        folded = {
            c.id
            for c in operators(both_programs[0])
            if c.leaf and c.id not in paired and _reads_nothing(c)
        }
        omitted |= {
            call.id for (_, operator, _), call in reference_calls.items() if operator in folded
        }
        constants = [[c for c in calls if _reads_nothing(c)] for calls in put_in]
        target_types = {constant.op_type for constant in constants[1]}
        omitted |= {call.id for call in constants[0] if call.op_type not in target_types}
    out = [_changed(reference, reference_changes), _changed(target, target_changes)]
    left_out = [
        {c.id for c in calls if region.hands_on(run, c)}
        for run, calls in zip((reference, target), put_in)
    ]
    left_out[diff.turned] |= omitted
    out = [_without(run, ids) for run, ids in zip(out, left_out)]
    if omitted:
        sentence = (
            f"{len(omitted)} calls of operators that passes fused or folded in the other run are "
            "compared by what they end in"
        )
        out[diff.turned].notes = [*out[diff.turned].notes, Note("inside-not-seen", sentence)]  # type: ignore[misc]
    return out[0], out[1]


def _marked(run: Run, root: str | None = None) -> Run:
    """The run, for its operators to be paired by the values that they make."""
    chosen = (c for c in operators(run) if c.kind == "operator" and root in (None, c.root))
    marked = {c.id: replace(c, notes=(*c.notes, Mark.REWRITTEN)) for c in chosen}
    return _changed(run, marked)


def _changes_of_pairs(
    diff: ProgramDiff,
    reference_calls: Mapping[Execution, Call],
    target_calls: Mapping[Execution, Call],
    numbered: bool,
) -> tuple[dict[int, Call], dict[int, Call], set[int]]:
    """(changed calls of the reference, of the target, calls to leave out) for operators that are
    paired. numbered: names are numbers of the executor.
    """
    partner = {b: a for a, b in diff.pairs}
    reference_changes: dict[int, Call] = {}
    target_changes: dict[int, Call] = {}
    omitted: set[int] = set()
    for (group, operator, number), call in target_calls.items():
        reference_call = reference_calls.get((group, partner.get(operator, -1), number))
        if reference_call is None or not (numbered or reference_call.scope == call.scope):
            continue
        renamed = replace(call, scope=reference_call.scope, occurrence=reference_call.occurrence)
        target_changes[call.id] = renamed
        end = operator if diff.turned else partner[operator]
        if end in diff.fused:
            reference_changes[reference_call.id] = _unread(reference_call)
            target_changes[call.id] = _unread(renamed)
            longer = target_calls if diff.turned else reference_calls
            members = (longer.get((group, member, number)) for member in diff.fused[end])
            omitted |= {member.id for member in members if member is not None}
    return reference_changes, target_changes, omitted


def _reads_nothing(call: Call) -> bool:
    return not call.slots("input") and not call.slots("param")


def _put_in(run: Run, ran: Mapping[int, int], root: str) -> list[Call]:
    """Calls that the program does not have: constants and changes of layout that Paddle puts in
    when it lowers it.
    """
    return [
        c
        for c in operators(run)
        if c.root == root and c.leaf and c.id not in ran and c.op_type not in DRAWS
    ]


def _without(run: Run, omitted: Set[int]) -> Run:
    """The run without some of its leaf calls."""
    if not omitted:
        return run
    remaining = [c for c in run.calls if c.id not in omitted]
    position = {c.id: i for i, c in enumerate(remaining)}
    out = Over(
        run,
        [replace(c, id=i, parent=position.get(c.parent, -1)) for i, c in enumerate(remaining)],
    )
    return like(run, out)


def _executions(run: Run, ran: Mapping[int, int]) -> dict[Execution, Call]:
    """Calls of the operators of a program."""
    out: dict[Execution, Call] = {}
    times: Counter[tuple[Any, int]] = Counter()
    for call in operators(run):
        if call.id in ran:
            key = (call.rank, call.step, call.micro), ran[call.id]
            out[*key, times[key]] = call
            times[key] += 1
    return out


def _unread(call: Call) -> Call:
    """A call without its inputs, which counts as depending on everything before it."""
    return replace(
        call,
        refs=tuple(r for r in call.refs if not is_read(r.slot)),
        notes=(*call.notes, UNTOLD),
        program="",
        no_program="a pass fused it with others in the target",
    )


def _changed(run: Run, calls: Mapping[int, Call]) -> Run:
    return like(run, Over(run, [calls.get(c.id, c) for c in run.calls])) if calls else run
