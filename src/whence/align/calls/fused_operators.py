"""Calls of which one run has fused what the other has apart: the members are joined into one call,
which faces the fused one.

`Call.origins` names the operators of the original program that a call carries out; without it, a
name that is the names of the other run's calls put together says the same, where their data flow
agrees (`segments`). Works both ways and for n against m: calls that share origins are one group,
and a side that has several calls in it gets them joined. See docs/decisions/0010.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from whence.align.call_sites import match_roots, selected
from whence.align.derived_run import Derived, renumbered
from whence.records import Call, Ref, Run
from whence.records.fused_names import segments
from whence.records.marks import Mark, mark
from whence.records.slots import is_input, is_param, is_written, slot_kind

RULE = "original operators"
_MOST = 256  # members of one group; more are not joined
_PART = "part "  # before a name that another is made of, which no origin is
_SHOWN = 4  # names in a sentence
_TRIED = 2000  # names that are cut into others, per step


_Table = dict[str, list[Call]]


class Fused(NamedTuple):
    """The two runs with members joined. faced: calls that carry out the same operators,
    (reference's, target's, evidence). notes: what was joined.
    """

    reference: Run
    target: Run
    faced: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[str, ...] = ()


class _Group(NamedTuple):
    """Calls of one step that carry out the same operators. ours, theirs: ids, in order."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]


def joined(reference: Run, target: Run) -> Fused:
    """Join what one run has apart. Runs whose calls say nothing of origins, and share their names,
    come back as they are.
    """
    if not any(c.origins for run in (reference, target) for c in run.calls) and not _concatenated(
        reference, target
    ):
        return Fused(reference, target)
    groups = [g for lane in _lanes(reference, target) for g in _groups(lane, reference, target)]
    ours, left = _joined(reference, [g.ours for g in groups])
    theirs, right = _joined(target, [g.theirs for g in groups])
    faced, told = [], Counter[str]()
    for group, a, b in zip(groups, left, right):
        if a < 0 or b < 0:
            continue
        one, other = ours.calls[a], theirs.calls[b]
        names = one.origins or other.origins
        faced.append(
            (
                a,
                b,
                f"{_listed(names)} in {other.scope}" if names else f"{one.scope} and {other.scope}",
            )
        )
        for side, of, run, across in (
            ("reference", group.ours, reference, other),
            ("target", group.theirs, target, one),
        ):
            if len(of) > 1:
                told[
                    f"{_listed([run.calls[k].scope for k in of])} of the {side} are taken "
                    f"together: across, {across.scope} does it"
                ] += 1
    notes = tuple(f"{text} ({count} calls)" if count > 1 else text for text, count in told.items())
    return Fused(ours, theirs, tuple(faced), notes)


class _Lane(NamedTuple):
    """The calls of one step that may be paired. What was called again is another lane: a
    repetition is no fusion.
    """

    ours: list[Call]
    theirs: list[Call]


def _lanes(reference: Run, target: Run) -> Iterable[_Lane]:
    left, right = ([c for c in selected(run.calls) if c.leaf] for run in (reference, target))
    roots = match_roots(left, right)
    ranks = {c.rank for c in left}, {c.rank for c in right}
    alone = len(ranks[0]) == len(ranks[1]) == 1

    def key(call: Call, root: str) -> Hashable:
        return (0 if alone else call.rank), root, call.step, call.micro, call.phase, call.occurrence

    lanes: dict[Hashable, _Lane] = defaultdict(lambda: _Lane([], []))
    for call in left:
        lanes[key(call, roots.get(call.root, call.root))].ours.append(call)
    for call in right:
        lanes[key(call, call.root)].theirs.append(call)
    return (lane for lane in lanes.values() if lane.ours and lane.theirs)


def _groups(lane: _Lane, reference: Run, target: Run) -> Iterable[_Group]:
    """Connected calls: of both sides, that share an origin."""
    ours, theirs = _by_name(lane.ours), _by_name(lane.theirs)
    cut: tuple[set[int], set[int]] = set(), set()
    if len(ours) + len(theirs) < _TRIED:
        cut = (
            _cut(lane.ours, lane.theirs, ours, theirs, target),
            _cut(lane.theirs, lane.ours, theirs, ours, reference),
        )
    seen: set[tuple[bool, int]] = set()
    of: dict[tuple[bool, int], list[str]] = defaultdict(list)
    calls: dict[tuple[bool, int], Call] = {}
    for mine, table in ((True, ours), (False, theirs)):
        for name, found in table.items():
            for call in found:
                of[mine, call.id].append(name)
                calls[mine, call.id] = call
    for start in list(of):
        if start in seen:
            continue
        group, todo = [], [start]
        seen.add(start)
        while todo:
            one = todo.pop()
            group.append(one)
            for name in of[one]:
                for mine, table in ((True, ours), (False, theirs)):
                    # A name only binds where both sides have it.
                    if name not in ours or name not in theirs:
                        continue
                    for call in table[name]:
                        if (mine, call.id) not in seen:
                            seen.add((mine, call.id))
                            todo.append((mine, call.id))
        a = sorted((c for m, c in group if m), key=lambda k: calls[True, k].order)
        b = sorted((c for m, c in group if not m), key=lambda k: calls[False, k].order)
        # else they only share a name
        said = any(calls[one].origins or one[1] in cut[not one[0]] for one in group)
        if (
            not a
            or not b
            or not said
            or _same_names([calls[True, k] for k in a], [calls[False, k] for k in b])
        ):
            continue
        yield _Group(tuple(a), tuple(b))


def _by_name(calls: Iterable[Call]) -> _Table:
    """Calls by the names of what they carry out."""
    out: _Table = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.origins or (call.scope,)):
            out[name].append(call)
    return out


def _same_names(ours: Sequence[Call], theirs: Sequence[Call]) -> bool:
    """Do both sides have the same calls? Then each is paired with its own."""
    return Counter((c.scope, c.op) for c in ours) == Counter((c.scope, c.op) for c in theirs)


def _concatenated(reference: Run, target: Run) -> bool:
    """May a name of one run be names of the other put together? Cheap: does it begin with one of
    them, and is it unknown there?
    """
    names = {c.scope for c in reference.calls if c.leaf}, {c.scope for c in target.calls if c.leaf}
    for mine, other in (names, names[::-1]):
        alone = sorted(mine - other)
        rest = other - mine
        if (
            alone
            and len(rest) > 1
            and len(alone) < _TRIED
            and any(any(n[:k] in rest for k in range(1, len(n))) for n in alone)
        ):
            return True
    return False


def _cut(
    calls: Sequence[Call], others: Sequence[Call], names: _Table, across: _Table, other: Run
) -> set[int]:
    """Bind calls that share nothing with the other side, and whose name is others put together, to
    those. Returns which.

    names, across: calls by name, of this side and the other, which gain names.
    """
    scopes = {call.scope for call in calls}
    theirs: _Table = defaultdict(list)
    for call in others:
        theirs[call.scope].append(call)
    contents = {
        scope: {_content(other, r.record) for c in found for r in c.slots("output")}
        for scope, found in theirs.items()
    }

    def feeds(one: str, two: str) -> bool:
        return any(
            _content(other, r.record) in contents[one]
            for c in theirs[two]
            for r in c.slots("input")
        )

    free = {scope for scope in theirs if scope not in scopes}
    out: set[int] = set()
    for call in calls:
        if not call.scope or call.scope in theirs or any(name in across for name in call.origins):
            continue
        for part in segments(call.scope, free, feeds):
            out.add(call.id)
            names[f"{_PART}{part}"].append(call)
            across[f"{_PART}{part}"] = theirs[part]
    return out


def _content(run: Run, record: int) -> Hashable:
    """What a record holds; the record itself where that is not known."""
    found = run.records[record]
    return (found.hash, found.dtype, found.shape) if found.hash else record


def _joined(run: Run, groups: Sequence[tuple[int, ...]]) -> tuple[Run, list[int]]:
    """(the run with every group of several calls as one, the call that stands for each group; -1
    where it cannot be joined).
    """
    heads: dict[int, int] = {}  # last member -> group
    member_of: set[int] = set()
    for number, group in enumerate(groups):
        fits = len(group) <= _MOST and len({run.calls[k].parent for k in group}) == 1
        if len(group) > 1 and fits:
            heads[group[-1]] = number
            member_of.update(group)
    if not heads:
        return run, [g[0] if len(g) == 1 else -1 for g in groups]
    begun: list[
        Call
    ] = []  # in the order of beginning; ids as they were, those of joined calls behind all
    first = len(run.calls)
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.id not in member_of:
            begun.append(call)
        elif call.id in heads:
            number = heads[call.id]
            members = [run.calls[k] for k in groups[number]]
            whole = _whole(run, members, first + number)
            begun.append(whole)
            begun += (
                msgspec.structs.replace(
                    m, parent=whole.id, notes=(*m.notes, mark(Mark.NOT_SELECTED))
                )
                for m in members
            )
    calls, at = renumbered(begun)
    placed = [
        at[first + n] if n in heads.values() else at[g[0]] if len(g) == 1 else -1
        for n, g in enumerate(groups)
    ]
    return Derived(run, (), (), calls), placed


def _whole(run: Run, members: Sequence[Call], number: int) -> Call:
    """One call in the place of its members: it reads what they read and do not make, and makes what
    they make and do not read.
    """
    made: set[Hashable] = set()
    inputs: dict[int, None] = {}
    params: dict[int, None] = {}
    read: set[Hashable] = set()
    for call in members:
        for ref in call.refs:
            same = _content(run, ref.record)
            if is_input(ref.slot):
                read.add(same)
                if same not in made:
                    inputs[ref.record] = None
            elif is_param(ref.slot):
                params[ref.record] = None
        made.update(_content(run, r.record) for r in call.refs if is_written(r.slot))
    last = members[-1].slots("output")
    ends = [
        r for c in members[:-1] for r in c.slots("output") if _content(run, r.record) not in read
    ]
    outputs = dict.fromkeys(r.record for r in (*last, *ends))
    kept = {
        (_kind(r), r.record): c.files[r.slot]
        for c in reversed(members)
        for r in c.refs
        if r.slot in c.files
    }
    refs = [Ref(f"input.{k}", r) for k, r in enumerate(inputs)] + [
        Ref(f"param.{k}", r) for k, r in enumerate(params)
    ]
    refs += [Ref(f"output.{k}", r) for k, r in enumerate(outputs)]
    names = [c.scope for c in members]
    origins = tuple(dict.fromkeys(n for c in members for n in (c.origins or (c.scope,))))
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
        origins=origins,
        notes=(f"{_listed(names)} taken together",),
        files={r.slot: kept[_kind(r), r.record] for r in refs if (_kind(r), r.record) in kept},
    )


def _kind(ref: Ref) -> str:
    return slot_kind(ref.slot)


def _called(names: Sequence[str]) -> str:
    shown = (
        list(names)
        if len(names) <= _SHOWN
        else [*names[: _SHOWN - 2], f"{len(names) - _SHOWN + 1} more", names[-1]]
    )
    return "+".join(shown)


def _listed(names: Sequence[str]) -> str:
    if len(names) > _SHOWN:
        return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
