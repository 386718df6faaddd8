"""Calls of the target under the names of the calls of the reference whose operators they are paired
with in the programs of both runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from msgspec.structs import replace

from whence.comparison.programs.operator_pairing import operators
from whence.comparison.programs.paddle_attributes import like
from whence.comparison.programs.program_diff import ProgramDiff, diff_programs
from whence.comparison.programs.program_flow import operators_of_calls
from whence.frameworks.paddle_programs import DRAWS
from whence.readers import UNTOLD
from whence.records import Call, Note, Over, Run, region
from whence.records.slots import is_read

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
