"""Programs of calls that were joined because the other run has their operators in one: put together
from the members' own.
"""

from __future__ import annotations

import msgspec

from whence.errors import ReplayRefused
from whence.records import Call, Over, Program, Run, children
from whence.records.marks import Mark, has_mark, mark, mark_value
from whence.replay.composed import compose


def with_joined_programs(run: Run) -> Run:
    """The run with a program of each joined call, or the reason why it has none; the run itself
    where it has no such call.
    """
    joined = [call for call in run.calls if has_mark(call, Mark.TAKEN_TOGETHER)]
    if not joined:
        return run
    below, programs = children(run.calls), dict(run.programs)
    changed: dict[int, Call] = {}
    for call in joined:
        kids = [run.calls[k] for k in below.get(call.id, ())]
        try:
            program = _program(run, call, kids)
            programs[program.id] = program
            changed[call.id] = msgspec.structs.replace(call, program=program.id, no_program="")
        except ReplayRefused as refused:
            changed[call.id] = msgspec.structs.replace(call, program="", no_program=str(refused))
    out = Over(run, [changed.get(call.id, call) for call in run.calls])
    out.programs = programs
    return out


def _program(run: Run, call: Call, kids: list[Call]) -> Program:
    """Raises ReplayRefused where a member has none."""
    without = next((kid for kid in kids if not kid.program), None)
    if without is not None:
        raise ReplayRefused(f"{without.scope}: {without.no_program or 'it has no program'}")
    program = compose(call, kids, run.programs, run.records)
    origins = {
        mark_value(run.programs[kid.program], Mark.TRANSLATED)
        for kid in kids
        if kid.program in run.programs
    }
    notes = [mark(Mark.TRANSLATED, origin) for origin in sorted(origins) if origin]
    return msgspec.structs.replace(program, notes=(*program.notes, *notes))
