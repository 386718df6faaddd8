"""Calls that one run has fused and the other has one by one: the members are joined into one call,
the partner of the fused one.

`Call.origins` names the operators of the original program that a call carries out; without it, a
name that is the names of the other run's calls put together says the same, where their data flow
agrees (`segments`). Works both ways and for n against m: calls that share origins are one group,
and a side that has several calls in it gets them joined. See docs/decisions/0010.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from whence.align.call_sites import match_roots, selected
from whence.align.calls.facing_tensors import facing, with_programs
from whence.align.calls.inner_calls import InnerCalls
from whence.align.calls.joined_programs import joined_program
from whence.align.derived_run import renumbered
from whence.errors import ReplayRefused
from whence.records import Call, Program, Ref, Run
from whence.records.fused_names import segments
from whence.records.marks import Mark, mark, mark_value
from whence.records.slots import is_input, is_param, is_written, slot_kind

RULE = "original operators"
VALUES = "values"
"""The rule of pairs that were found by what they read and make (`align/values`)."""
_MOST = 256  # members of one group; more are not joined
_PART = "part "  # before a name that another is made of, which no origin is
_SHOWN = 4  # names in a sentence
_TRIED = 2000  # names that are cut into others, per step


_Table = dict[str, list[Call]]


class Fused(NamedTuple):
    """The two runs with members joined. pairs: (reference call, target call, evidence). rule: by
    which they were found.
    """

    reference: Run
    target: Run
    pairs: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[str, ...] = ()
    rule: str = RULE


class _Group(NamedTuple):
    """Ids of calls of one step that carry out the same operators, in order."""

    reference: tuple[int, ...]
    target: tuple[int, ...]


def joined(reference: Run, target: Run) -> Fused:
    """Join calls that the other run has fused, by origins or by names put together."""
    if not any(c.origins for run in (reference, target) for c in run.calls) and not _concatenated(
        reference, target
    ):
        return Fused(reference, target)
    groups = [g for lane in _lanes(reference, target) for g in _groups(lane, reference, target)]
    new_reference, ids = _joined(reference, [g.reference for g in groups])
    new_target, target_ids = _joined(target, [g.target for g in groups])
    new_reference, new_target = facing(
        new_reference, new_target, [(a, b) for a, b in zip(ids, target_ids) if a >= 0 and b >= 0]
    )
    pairs, sentences = [], Counter[str]()
    for group, a, b in zip(groups, ids, target_ids):
        if a < 0 or b < 0:
            continue
        call, partner = new_reference.calls[a], new_target.calls[b]
        names = call.origins or partner.origins
        pairs.append(
            (
                a,
                b,
                f"{_listed(names)} in {partner.scope}"
                if names
                else f"{call.scope} and {partner.scope}",
            )
        )
        for side, of, run, across in (
            ("reference", group.reference, reference, partner),
            ("target", group.target, target, call),
        ):
            if len(of) > 1:
                sentences[
                    f"{_listed([run.calls[k].scope for k in of])} of the {side} are taken "
                    f"together: in the other run, {across.scope} does it"
                ] += 1
    notes = tuple(
        f"{text} ({count} calls)" if count > 1 else text for text, count in sentences.items()
    )
    return Fused(new_reference, new_target, tuple(pairs), notes)


class _Lane(NamedTuple):
    """Calls of one step that may be paired; a repeated call is in a lane of its own."""

    reference: list[Call]
    target: list[Call]


def _lanes(reference: Run, target: Run) -> Iterable[_Lane]:
    calls, others = ([c for c in selected(run.calls) if c.leaf] for run in (reference, target))
    roots = match_roots(calls, others)
    ranks = {c.rank for c in calls}, {c.rank for c in others}
    one_rank = len(ranks[0]) == len(ranks[1]) == 1

    def key(call: Call, root: str) -> Hashable:
        return (
            (0 if one_rank else call.rank),
            root,
            call.step,
            call.micro,
            call.phase,
            call.occurrence,
        )

    lanes: dict[Hashable, _Lane] = defaultdict(lambda: _Lane([], []))
    for call in calls:
        lanes[key(call, roots.get(call.root, call.root))].reference.append(call)
    for call in others:
        lanes[key(call, call.root)].target.append(call)
    return (lane for lane in lanes.values() if lane.reference and lane.target)


def _groups(lane: _Lane, reference: Run, target: Run) -> Iterable[_Group]:
    """Calls of both runs that share origins, directly or through each other."""
    names, target_names = _by_name(lane.reference), _by_name(lane.target)
    cut: tuple[set[int], set[int]] = set(), set()
    if len(names) + len(target_names) < _TRIED:
        cut = (
            _bind_concatenated(lane.reference, lane.target, names, target_names, target),
            _bind_concatenated(lane.target, lane.reference, target_names, names, reference),
        )
    inside = (
        InnerCalls(reference, lane.reference, target_names),
        InnerCalls(target, lane.target, names),
    )
    for group in _connected(names, target_names):
        a = sorted((c for in_reference, c in group if in_reference), key=lambda c: c.order)
        b = sorted((c for in_reference, c in group if not in_reference), key=lambda c: c.order)
        # else they only share a name
        is_stated = any(c.origins or c.id in cut[not in_reference] for in_reference, c in group)
        if a and b and is_stated and not _same_names(a, b):
            a, b = inside[0].with_inner(a), inside[1].with_inner(b)
            yield _Group(tuple(c.id for c in a), tuple(c.id for c in b))


def _connected(names: _Table, target_names: _Table) -> Iterator[list[tuple[bool, Call]]]:
    """Calls (of the reference?, call) that names bind, directly or through each other. A name only
    binds where both runs have it.
    """
    tables = (True, names), (False, target_names)
    names_of: dict[tuple[bool, int], list[str]] = defaultdict(list)
    calls: dict[tuple[bool, int], Call] = {}
    for in_reference, table in tables:
        for name, named in table.items():
            for call in named:
                names_of[in_reference, call.id].append(name)
                calls[in_reference, call.id] = call
    visited: set[tuple[bool, int]] = set()
    for start in names_of:
        if start in visited:
            continue
        group, todo = [], [start]
        visited.add(start)
        while todo:
            member = todo.pop()
            group.append((member[0], calls[member]))
            for name in (n for n in names_of[member] if n in names and n in target_names):
                keys = [(side, call.id) for side, table in tables for call in table[name]]
                bound = dict.fromkeys(keys)
                todo += (key for key in bound if key not in visited)
                visited.update(bound)
        yield group


def _by_name(calls: Iterable[Call]) -> _Table:
    """Calls by the names of what they carry out."""
    out: _Table = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.origins or (call.scope,)):
            out[name].append(call)
    return out


def _same_names(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Do both sides have the same calls? Then each is paired with its own."""
    return Counter((c.scope, c.op) for c in calls) == Counter((c.scope, c.op) for c in others)


def _concatenated(reference: Run, target: Run) -> bool:
    """May a name of one run, unknown in the other, be names of the other put together?"""
    names = {c.scope for c in reference.calls if c.leaf}, {c.scope for c in target.calls if c.leaf}
    for scopes, across in (names, names[::-1]):
        unshared = sorted(scopes - across)
        unshared_across = across - scopes
        if (
            unshared
            and len(unshared_across) > 1
            and len(unshared) < _TRIED
            and any(any(n[:k] in unshared_across for k in range(1, len(n))) for n in unshared)
        ):
            return True
    return False


def _bind_concatenated(
    calls: Sequence[Call], others: Sequence[Call], names: _Table, across: _Table, other_run: Run
) -> set[int]:
    """Bind calls whose name is names of the other run put together to the calls of these names.
    Returns which.

    names, across: calls by name, of this run and the other, which gain names.
    """
    scopes = {call.scope for call in calls}
    by_scope: _Table = defaultdict(list)
    for call in others:
        by_scope[call.scope].append(call)
    contents = {
        scope: {_content(other_run, r.record) for c in named for r in c.slots("output")}
        for scope, named in by_scope.items()
    }

    def feeds(source: str, reader: str) -> bool:
        return any(
            _content(other_run, r.record) in contents[source]
            for c in by_scope[reader]
            for r in c.slots("input")
        )

    free = {scope for scope in by_scope if scope not in scopes}
    out: set[int] = set()
    for call in calls:
        if not call.scope or call.scope in by_scope or any(name in across for name in call.origins):
            continue
        for part in segments(call.scope, free, feeds):
            out.add(call.id)
            names[f"{_PART}{part}"].append(call)
            across[f"{_PART}{part}"] = by_scope[part]
    return out


def _content(run: Run, record: int) -> Hashable:
    """Hash, dtype and shape of a record; the record itself where the hash is not known."""
    stored = run.records[record]
    return (stored.hash, stored.dtype, stored.shape) if stored.hash else record


def _joined(run: Run, groups: Sequence[tuple[int, ...]]) -> tuple[Run, list[int]]:
    """(the run with every group as one call, that call of each group; -1 where none can be)."""
    heads: dict[int, int] = {}  # last member -> group
    member_of: set[int] = set()
    for number, group in enumerate(groups):
        fits = len(group) <= _MOST and len({run.calls[k].parent for k in group}) == 1
        if len(group) > 1 and fits:
            heads[group[-1]] = number
            member_of.update(group)
    if not heads:
        return run, [g[0] if len(g) == 1 else -1 for g in groups]
    begun: list[Call] = []  # in the order of beginning; joined calls have ids behind all others
    programs: dict[str, Program] = {}
    first = len(run.calls)
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.id not in member_of:
            begun.append(call)
        elif call.id in heads:
            number = heads[call.id]
            members = [run.calls[k] for k in groups[number]]
            whole, program = _with_program(run, members, _whole(run, members, first + number))
            begun.append(whole)
            if program is not None:  # it is one operator now
                programs[program.id] = program
                continue
            begun += (
                msgspec.structs.replace(
                    m, parent=whole.id, notes=(*m.notes, mark(Mark.NOT_SELECTED))
                )
                for m in members
            )
    calls, new_ids = renumbered(begun)
    placed = [
        new_ids[first + n] if n in heads.values() else new_ids[g[0]] if len(g) == 1 else -1
        for n, g in enumerate(groups)
    ]
    return with_programs(run, calls, programs), placed


def _with_program(run: Run, members: Sequence[Call], whole: Call) -> tuple[Call, Program | None]:
    """The call with the program of its members, and that; None with the reason where one of them
    cannot be run again.
    """
    if not all(m.kind == "operator" for m in members) or not any(m.program for m in members):
        return whole, None
    try:
        program = joined_program(run, members, whole.refs, _content)
    except ReplayRefused as refused:
        return msgspec.structs.replace(whole, program="", no_program=str(refused)), None
    whole = msgspec.structs.replace(whole, program=program.id, no_program="", leaf=True)
    return whole, program


def _whole(run: Run, members: Sequence[Call], number: int) -> Call:
    """One call for its members, without the tensors that only pass between them."""
    written: set[Hashable] = set()
    inputs: dict[int, None] = {}
    params: dict[int, None] = {}
    read: set[Hashable] = set()
    for call in members:
        for ref in call.refs:
            content = _content(run, ref.record)
            if is_input(ref.slot):
                read.add(content)
                if content not in written:
                    inputs[ref.record] = None
            elif is_param(ref.slot):
                params[ref.record] = None
        written.update(_content(run, r.record) for r in call.refs if is_written(r.slot))
    last = members[-1].slots("output")
    ends = [
        r for c in members[:-1] for r in c.slots("output") if _content(run, r.record) not in read
    ]
    outputs = dict.fromkeys(r.record for r in (*last, *ends))
    files = {
        (_kind(r), r.record): c.files[r.slot]
        for c in reversed(members)
        for r in c.refs
        if r.slot in c.files
    }
    refs = [Ref(f"input.{k}", r) for k, r in enumerate(inputs)] + [
        Ref(f"param.{k}", r) for k, r in enumerate(params)
    ]
    refs += [Ref(f"output.{k}", r) for k, r in enumerate(outputs)]
    whole = whole_call(members, refs, number)
    of_record = {(_kind(r), r.record): r.slot for r in refs}
    placed = {of_record[key]: file for key, file in files.items() if key in of_record}
    return msgspec.structs.replace(whole, files=placed)


def whole_call(members: Sequence[Call], refs: Sequence[Ref], number: int) -> Call:
    """A call in the place of the last of its members, with these tensors."""
    names = list(dict.fromkeys(c.scope for c in members))
    return msgspec.structs.replace(
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
        notes=(*_executed(members), mark(Mark.TAKEN_TOGETHER, _listed(names))),
        files={},
    )


def joined_names(members: Sequence[Call]) -> str:
    """The names of calls in a sentence."""
    return _listed([call.scope or call.op_type for call in members])


def _executed(members: Sequence[Call]) -> tuple[str, ...]:
    """In what an engine executed the members, where that is one dtype."""
    kinds = {mark_value(m, Mark.EXECUTED_IN) for m in members}
    kind = next(iter(kinds)) if len(kinds) == 1 else ""
    return (mark(Mark.EXECUTED_IN, kind),) if kind else ()


def _kind(ref: Ref) -> str:
    return slot_kind(ref.slot)


def _called(names: Sequence[str]) -> str:
    listed = (
        list(names)
        if len(names) <= _SHOWN
        else [*names[: _SHOWN - 2], f"{len(names) - _SHOWN + 1} more", names[-1]]
    )
    return "+".join(listed)


def _listed(names: Sequence[str]) -> str:
    if len(names) > _SHOWN:
        return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
