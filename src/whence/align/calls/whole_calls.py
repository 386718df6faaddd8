"""Several calls of a run as one: what they read, hold and leave, without the tensors that only pass
between them, and their program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from msgspec.structs import replace

from whence import dtypes
from whence.align.calls.facing_tensors import with_programs
from whence.align.calls.joined_programs import with_joined_program
from whence.align.derived_run import renumbered
from whence.records import Call, Program, Ref, Run, in_order
from whence.records.marks import Mark, mark, mark_value
from whence.records.slots import is_input, is_param, is_written, slot_kind

_MOST = 256  # members of one group; more are not joined
_SHOWN = 4  # names in a sentence


def content_of(run: Run, record: int) -> Hashable:
    """Hash, dtype and shape of a record; the record itself where the hash is not known."""
    stored = run.records[record]
    return (stored.hash, stored.dtype, stored.shape) if stored.hash else record


def together(run: Run, groups: Sequence[tuple[int, ...]]) -> tuple[Run, list[int]]:
    """(the run with each group joined into one call, the id of that call per group). The id is -1
    for a group that cannot be joined.
    """
    places: dict[int, list[int]] = defaultdict(list)  # call at which they stand -> groups
    member_of: set[int] = set()
    for number, group in enumerate(groups):
        fits = len(group) <= _MOST and len({run.calls[k].parent for k in group}) == 1
        if len(group) > 1 and fits:
            places[_place(run, group)].append(number)
            member_of.update(group)
    if not places:
        return run, [g[0] if len(g) == 1 else -1 for g in groups]
    held = {number for numbers in places.values() for number in numbers}
    begun: list[Call] = []  # in the order of beginning; joined calls have ids behind all others
    programs: dict[str, Program] = {}
    first = len(run.calls)
    for call in in_order(run.calls):
        for number in places.get(call.id, ()):
            members = [run.calls[k] for k in groups[number]]
            whole, program = _with_program(run, members, _whole(run, members, first + number))
            begun.append(whole)
            if program is not None:  # it is one operator now
                programs[program.id] = program
                continue
            begun += (
                replace(m, parent=whole.id, notes=(*m.notes, mark(Mark.NOT_SELECTED)))
                for m in members
            )
        if call.id not in member_of:
            begun.append(call)
    calls, new_ids = renumbered(begun)
    placed = [
        new_ids[first + n] if n in held else new_ids[g[0]] if len(g) == 1 else -1
        for n, g in enumerate(groups)
    ]
    return with_programs(run, calls, programs), placed


def _place(run: Run, group: Sequence[int]) -> int:
    """The id of the call at whose position the joined call is placed: the last member, or the first
    call that reads a member's result, if all inputs of the group exist by then.
    """
    members = [run.calls[k] for k in group]
    made = {content_of(run, r.record) for m in members for r in m.slots("output")}
    read = {content_of(run, r.record) for m in members for r in m.slots("input")} - made
    between = sorted(
        (c for c in run.calls if members[0].order < c.order < members[-1].order),
        key=lambda c: c.order,
    )
    others = [call for call in between if call.leaf and call.id not in group]
    for number, call in enumerate(others):
        if any(content_of(run, r.record) in made for r in call.slots("input")):
            later = {content_of(run, r.record) for c in others[number:] for r in c.slots("output")}
            return group[-1] if read & later else call.id
    return group[-1]


def _with_program(run: Run, members: Sequence[Call], whole: Call) -> tuple[Call, Program | None]:
    """(joined call, program of its members). The program is None, and the call states the reason,
    if a member cannot be replayed.
    """
    if not all(m.kind == "operator" for m in members) or not any(m.program for m in members):
        return whole, None
    joined, program = with_joined_program(run, whole, members, whole.refs, content_of)
    return replace(joined, leaf=program is not None), program


def _whole(run: Run, members: Sequence[Call], number: int) -> Call:
    """One call for its members, without the tensors that only pass between them."""
    written: set[Hashable] = set()
    inputs: dict[int, None] = {}
    params: dict[int, None] = {}
    read: set[Hashable] = set()
    for call in members:
        for ref in call.refs:
            content = content_of(run, ref.record)
            if is_input(ref.slot):
                read.add(content)
                if content not in written:
                    inputs[ref.record] = None
            elif is_param(ref.slot):
                params[ref.record] = None
        written.update(content_of(run, r.record) for r in call.refs if is_written(r.slot))
    last = members[-1].slots("output")
    ends = [
        r for c in members[:-1] for r in c.slots("output") if content_of(run, r.record) not in read
    ]
    outputs = dict.fromkeys(r.record for r in (*last, *ends))
    files = {
        (slot_kind(r.slot), r.record): c.files[r.slot]
        for c in reversed(members)
        for r in c.refs
        if r.slot in c.files
    }
    refs = [Ref(f"input.{k}", r) for k, r in enumerate(inputs)] + [
        Ref(f"param.{k}", r) for k, r in enumerate(params)
    ]
    refs += [Ref(f"output.{k}", r) for k, r in enumerate(outputs)]
    whole = whole_call(members, refs, number)
    of_record = {(slot_kind(r.slot), r.record): r.slot for r in refs}
    placed = {of_record[key]: file for key, file in files.items() if key in of_record}
    return replace(whole, files=placed)


def whole_call(members: Sequence[Call], refs: Sequence[Ref], number: int) -> Call:
    """A call in the place of the last of its members, with these tensors."""
    names = list(dict.fromkeys(c.scope for c in members))
    return replace(
        members[-1],
        id=number,
        scope=_called(names),
        op="",
        occurrence=0,
        op_type=_called([c.op_type for c in members]),
        refs=tuple(refs),
        leaf=False,
        arguments={},
        origins=tuple(dict.fromkeys(n for c in members for n in (c.origins or (c.scope,)))),
        notes=(*_executed(members), mark(Mark.TAKEN_TOGETHER, listed(names))),
        files={},
    )


def joined_names(members: Sequence[Call]) -> str:
    """The names of calls in a sentence."""
    return listed([call.scope or call.op_type for call in members])


def _executed(members: Sequence[Call]) -> tuple[str, ...]:
    """The mark of the dtype in which an engine executed the members: a 16-bit one if any member has
    it, since that rounds most.
    """
    kinds = sorted({mark_value(m, Mark.EXECUTED_IN) for m in members}, key=dtypes.is_half)
    is_stated = kinds and (len(kinds) == 1 or dtypes.is_half(kinds[-1])) and kinds[-1]
    return (mark(Mark.EXECUTED_IN, kinds[-1]),) if is_stated else ()


def _called(names: Sequence[str]) -> str:
    listed = (
        list(names)
        if len(names) <= _SHOWN
        else [*names[: _SHOWN - 2], f"{len(names) - _SHOWN + 1} more", names[-1]]
    )
    return "+".join(listed)


def listed(names: Sequence[str]) -> str:
    if len(names) > _SHOWN:
        return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
