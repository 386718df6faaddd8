"""A map carried out: names rewritten, calls left out, pairs that take the place of all others of
the same calls.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from whence.align.call_sites import selected
from whence.align.calls.match import pair_of
from whence.align.derived_run import Derived, DerivedTensors
from whence.align.dims import Unfit, names
from whence.align.plan_editor import USER_MAP, PlanEditor
from whence.align.user_map import Entry, Map, compiled, filled
from whence.records import Call, Run
from whence.records.marks import Mark, mark
from whence.results import CallPair, Plan, SlotPair


def prepared(
    reference: Run, target: Run, chart: Map
) -> tuple[Run, Run, Mapping[str, str], list[str]]:
    """(reference, target, new names of the target -> old ones, notes): names rewritten, ignored
    calls not selected.

    Raises UsageError for patterns that match nothing.
    """
    notes = []
    left = _ignored(reference, chart, chart.ignore_reference, "reference")
    right = _ignored(target, chart, chart.ignore_target, "target")
    for side, before, after in (("reference", reference, left), ("target", target, right)):
        gone = len(selected(before.calls)) - len(selected(after.calls))
        if gone:
            notes.append(f"the map leaves out {gone} calls of the {side}")
    return left, *_renamed(right, chart), notes


def _ignored(run: Run, chart: Map, patterns: Sequence[tuple[str, int]], side: str) -> Run:
    if not patterns:
        return run
    gone: set[int] = set()
    for pattern, line in patterns:
        found = [c.id for c in run.calls if compiled(pattern).fullmatch(c.scope)]
        if not found:
            raise chart.error(line, f"ignore.{side}: {_nothing(pattern, run, side)}")
        gone.update(found)
    calls = [
        msgspec.structs.replace(c, notes=(*c.notes, mark(Mark.NOT_SELECTED))) if c.id in gone else c
        for c in run.calls
    ]
    return Derived(run, (), (), calls)


def _renamed(run: Run, chart: Map) -> tuple[Run, Mapping[str, str]]:
    if not chart.names:
        return run, {}
    rules = [(compiled(r.old), r) for r in chart.names]
    used: set[int] = set()
    new: dict[str, str] = {}
    for scope in dict.fromkeys(c.scope for c in run.calls):
        for at, (expression, rule) in enumerate(rules):
            found = expression.fullmatch(scope)
            if found:
                used.add(at)
                new[scope] = filled(rule.new, found)
                break
    for at, (_, rule) in enumerate(rules):
        if at not in used:
            raise chart.error(rule.line, f"names.from: {_nothing(rule.old, run, 'target')}")
    calls = [
        msgspec.structs.replace(c, scope=new[c.scope]) if c.scope in new else c for c in run.calls
    ]
    return Derived(run, (), (), calls), {new: old for old, new in new.items()}


def applied(
    reference: Run, target: Run, plan: Plan, chart: Map, named: Mapping[str, str]
) -> tuple[Run, Plan]:
    """(target with what the map makes of it, plan with its pairs): they take the place of all
    others of the same calls.

    named: the target's own names by rewritten ones. Raises UsageError for entries that match
    nothing, contradict or do not fit.
    """
    at = PlanEditor(reference, target, plan)
    at.pairs = {call: _by_name(pair, target, named) for call, pair in at.pairs.items()}
    said: dict[int, tuple[Entry, CallPair]] = {}
    others = _table(selected(target.calls))
    for entry in chart.pairs:
        calls = [
            (c, m)
            for c in selected(reference.calls)
            if (m := compiled(entry.reference).fullmatch(c.scope))
        ]
        if not calls:
            raise chart.error(
                entry.line, f"pairs.reference: {_nothing(entry.reference, reference, 'reference')}"
            )
        hit = 0
        for call, match in calls:
            if call.id in said:
                raise chart.error(
                    entry.line,
                    f"{call.scope} was paired on line {said[call.id][0].line} already; leave one "
                    "of them out",
                )
            facing = {
                name: _facing(call, filled(pattern, match), others)
                for name, pattern in entry.target
            }
            if all(facing.values()):
                hit += 1
                pair = _explicit(call, facing, entry, chart, reference, target, at.making)  # type: ignore[arg-type]
                said[call.id] = entry, pair
        if not hit:
            call, match = calls[0]
            wanted = next(
                w
                for _, pattern in entry.target
                if _facing(call, w := filled(pattern, match), others) is None
            )
            raise chart.error(
                entry.line,
                f"pairs.target: {_nothing(wanted, target, 'target')} where {call.scope} is",
            )
    for _, pair in said.values():
        at.free("reference", reference.calls[pair.reference])
        for other in (pair.target, *pair.also):
            at.free("target", target.calls[other])
    for _, pair in said.values():
        at.take(pair)
    return at.done()


def _by_name(pair: CallPair, target: Run, named: Mapping[str, str]) -> CallPair:
    """A pair that rests on a rewritten name says so."""
    old = named.get(target.calls[pair.target].scope)
    return (
        pair
        if old is None
        else msgspec.structs.replace(pair, rule=USER_MAP, evidence=f"{old} in the target")
    )


def _table(calls: Iterable[Call]) -> Mapping[tuple[Any, ...], list[Call]]:
    out: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        out[call.scope, call.step, call.micro, call.phase].append(call)
    return out


def _facing(call: Call, scope: str, others: Mapping[tuple[Any, ...], list[Call]]) -> Call | None:
    """The call of that name in the same step: of the same rank and occurrence where there are
    several.
    """
    found = others.get((scope, call.step, call.micro, call.phase), [])
    exact = [c for c in found if (c.rank, c.occurrence) == (call.rank, call.occurrence)]
    return next(iter(exact or (found if len(found) == 1 else [])), None)


def _explicit(
    call: Call,
    facing: Mapping[str, Call],
    entry: Entry,
    chart: Map,
    reference: Run,
    target: Run,
    making: DerivedTensors,
) -> CallPair:
    first = next(iter(facing.values()))
    base = pair_of(call, first, USER_MAP, reference, target)
    slots = {s.reference_slot: s for s in base.slots} if len(facing) == 1 else {}
    records = {r.slot: r.record for r in call.refs}
    for name, how in entry.slots.items():
        if name not in records:
            raise chart.error(
                how.line, f"{call.scope} has no slot {name!r}; it has {', '.join(records)}"
            )
        if how.dims is None:
            slots.pop(name, None)
            continue
        theirs = dict(how.names)
        bound: dict[str, list[int]] = {}
        used = set(names(how.dims))
        for operand in (o for o in (*facing, *theirs) if o in used):
            other = facing.get(operand, first)
            slot = theirs.get(operand, name)
            record = next((r.record for r in other.refs if r.slot == slot), None)
            if record is not None:
                bound[operand] = [record]
            elif operand in theirs:
                raise chart.error(
                    how.line,
                    f"{other.scope} of the target has no slot {slot!r} (it has "
                    f"{', '.join(r.slot for r in other.refs)})",
                )
        try:
            made = making.add(how.dims, bound, f"{chart.path}, line {how.line}")
        except Unfit as error:
            raise chart.error(how.line, f"{call.scope}, {name}: {error}") from None
        shape = reference.records[records[name]].shape
        if making.record(made).shape != shape:
            raise chart.error(
                how.line,
                f"{call.scope}, {name}: {how.dims} has shape {making.record(made).shape}, the "
                f"reference's is {shape}",
            )
        slots[name] = SlotPair(
            name, theirs.get(next(iter(facing)), name), records[name], made, str(how.dims)
        )
    only = tuple(r.slot for r in call.refs if r.slot not in slots)
    called = " and ".join(dict.fromkeys(c.scope for c in facing.values()))
    also = tuple(c.id for c in facing.values() if c.id != first.id)
    return CallPair(
        call.id,
        first.id,
        USER_MAP,
        f"line {entry.line}: {called}",
        tuple(slots.values()),
        only,
        base.only_target,
        also,
    )


def _nothing(pattern: str, run: Run, side: str) -> str:
    """Words for a pattern that matches no name, with the nearest."""
    scopes = list(dict.fromkeys(c.scope for c in run.calls if c.scope))
    plain = re.sub(r"\{\w+\}|\*", "0", pattern)
    near = difflib.get_close_matches(plain, scopes, 3, 0.5)
    return f"{pattern!r} matches no call of the {side}" + (
        f"; nearest: {', '.join(near)}" if near else ""
    )
