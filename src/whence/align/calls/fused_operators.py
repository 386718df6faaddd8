"""Calls that one run has fused and the other has one by one: the members are joined into one call,
the partner of the fused one.

`Call.origins` names the operators of the original program that a call carries out; without it, a
name that is the names of the other run's calls put together says the same, where their data flow
agrees (`segments`). Works both ways and for n against m: calls that share origins are one group,
and a side that has several calls in it gets them joined. See docs/dev/decisions/0010.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from whence.align.call_sites import facing_lanes, selected
from whence.align.calls.facing_tensors import ResultNames, facing
from whence.align.calls.input_order import results_of
from whence.align.calls.whole_calls import content_of, listed, together
from whence.records import Call, Run, in_order
from whence.records.fused_names import segments
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_written

RULE = "original operators"
VALUES = "values"
"""The rule of pairs with corresponding inputs and outputs (`align/values`)."""
_PART = "part "  # prefix of a part of a concatenated name, which no origin has
_TRIED = 2000  # most names of a step that are tried as concatenations


_Table = dict[str, list[Call]]


class Fused(NamedTuple):
    """The two runs with members of fused calls joined. pairs: (reference call, target call,
    evidence). rule: the rule behind these pairs.
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
    """Join calls that the other run has fused, by origins or by concatenated names."""
    if not (
        any(c.origins for run in (reference, target) for c in run.calls)
        or any(map(_is_unshown, target.calls))
        or _concatenated(reference, target)
    ):
        return Fused(reference, target)
    inside = InnerCalls(reference), InnerCalls(target)
    groups = [
        group
        for lane in _lanes(reference, target)
        for group in _groups(lane, reference, target, inside)
    ]
    new_reference, ids = together(reference, [g.reference for g in groups])
    new_target, target_ids = together(target, [g.target for g in groups])
    placed = [(a, b) for a, b in zip(ids, target_ids) if a >= 0 and b >= 0]
    names_of_results = ResultNames(results_of(reference), results_of(target))
    new_reference, new_target = facing(new_reference, new_target, placed, names_of_results)
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
                f"{listed(names)} in {partner.scope}"
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
                    f"{listed([run.calls[k].scope for k in of])} of the {side} are taken "
                    f"together: in the other run, {across.scope} does it"
                ] += 1
    notes = tuple(
        f"{text} ({count} calls)" if count > 1 else text for text, count in sentences.items()
    )
    return Fused(new_reference, new_target, tuple(pairs), notes)


def _lanes(reference: Run, target: Run) -> Iterator[tuple[list[Call], list[Call]]]:
    """Lists of calls of one step that may be paired; repetitions of a call have their own."""
    leaves = ([c for c in selected(run.calls) if c.leaf] for run in (reference, target))
    for calls, others in facing_lanes(*leaves):
        for occurrence in dict.fromkeys(c.occurrence for c in calls):
            own, across = (
                [c for c in side if c.occurrence == occurrence] for side in (calls, others)
            )
            if across:
                yield own, across


def _groups(
    lane: tuple[list[Call], list[Call]],
    reference: Run,
    target: Run,
    inside: tuple[InnerCalls, InnerCalls],
) -> Iterable[_Group]:
    """Groups of calls of both runs that share origins, directly or through other calls."""
    names, target_names = map(_by_name, lane)
    cut: tuple[set[int], set[int]] = set(), set()
    if len(names) + len(target_names) < _TRIED:
        cut = (
            _bind_concatenated(*lane, names, target_names, target),
            _bind_concatenated(*lane[::-1], target_names, names, reference),
        )
    unshown = set[int]()
    if any(call.slots("output") for call in lane[1]):  # else only inputs were asked for
        unshown = _bind_unshown(lane[0], names, target_names, inside[0])
    steps = [{c.id for c in calls} for calls in lane]
    for group in _connected(names, target_names):
        a = in_order(c for in_reference, c in group if in_reference)
        b = in_order(c for in_reference, c in group if not in_reference)
        # else they only share a name
        is_stated = any(c.origins or c.id in cut[not in_reference] for in_reference, c in group)
        is_one = any(call.id in unshown for call in a)
        if a and b and (is_one or (is_stated and not _same_names(a, b))):
            a = inside[0].with_inner(a, steps[0], target_names)
            b = inside[1].with_inner(b, steps[1], names)
            yield _Group(tuple(c.id for c in a), tuple(c.id for c in b))


def _connected(names: _Table, target_names: _Table) -> Iterator[list[tuple[bool, Call]]]:
    """Groups of (whether of the reference, call) connected by shared names, directly or through
    other calls. A name connects calls only if both runs have it.
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
    """Calls by the names of the operators that they carry out."""
    out: _Table = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.origins or (call.scope,)):
            out[name].append(call)
    return out


def _same_names(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether both sides have the same calls, so that each is paired with its namesake."""
    return Counter((c.scope, c.op) for c in calls) == Counter((c.scope, c.op) for c in others)


def _concatenated(reference: Run, target: Run) -> bool:
    """Whether a name that only one run has may be a concatenation of names of the other."""
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
    """Connect calls whose name concatenates names of the other run with the calls of these names.
    Returns the ids of the former.

    names, across: calls by name, of this run and of the other; both gain the common names.
    """
    scopes = {call.scope for call in calls}
    by_scope: _Table = defaultdict(list)
    for call in others:
        by_scope[call.scope].append(call)
    contents = {
        scope: {content_of(other_run, r.record) for c in named for r in c.slots("output")}
        for scope, named in by_scope.items()
    }

    def feeds(source: str, reader: str) -> bool:
        return any(
            content_of(other_run, r.record) in contents[source]
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


def _is_unshown(call: Call) -> bool:
    """Whether an engine ran this operator and could not show its result."""
    is_of_engine = has_mark(call, Mark.OPSET) or has_mark(call, Mark.EXECUTED_IN)
    return call.leaf and is_of_engine and not call.slots("output")


def _bind_unshown(
    calls: Sequence[Call], names: _Table, target_names: _Table, inner: InnerCalls
) -> set[int]:
    """Connect calls whose result an engine cannot show (without changing it) with the calls that
    read it, so that all calls between visible values become one. Returns the ids of the former.
    """
    out: set[int] = set()
    for call in calls:
        partners = target_names.get(call.scope, ())
        if not partners or not all(map(_is_unshown, partners)) or not call.slots("output"):
            continue
        out.add(call.id)
        names[f"{_PART}{call.scope}"] = [call, *inner.readers(call)]
        target_names[f"{_PART}{call.scope}"] = list(partners)
    return out


# Adds unnamed helper calls between the members of a fused call to that call.


class InnerCalls:
    """Finds the calls between the members of a fused call."""

    def __init__(self, run: Run) -> None:
        self._writers: defaultdict[int, list[Call]] = defaultdict(list)
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._calls = run.calls
        for call in run.calls:
            for ref in call.refs:
                if is_input(ref.slot):
                    self._readers[ref.record].add(call.id)
                elif is_written(ref.slot):
                    self._writers[ref.record].append(call)

    def readers(self, call: Call) -> list[Call]:
        """The leaf calls that read the outputs of a call."""
        read = set[int]().union(*(self._readers[r.record] for r in call.slots("output")))
        return [c for c in map(self._calls.__getitem__, sorted(read)) if c.leaf]

    def with_inner(
        self, members: Sequence[Call], step: Collection[int], across: Collection[str]
    ) -> list[Call]:
        """The members and those calls of their step whose results only they read, in execution
        order. Only operators that can be replayed are added, since others could hide a fault.
        across: names of the other run, which are not added.
        """
        within = {call.id: call for call in members}
        waiting = list(members)
        while waiting:
            for ref in waiting.pop().slots("input"):
                makers = (c for c in reversed(self._writers[ref.record]) if c.id in step)
                maker = next(makers, None)
                if maker is None or maker.id in within or self._is_seen(maker, within, step):
                    continue
                if not any(n in across for n in maker.origins or (maker.scope,)):
                    within[maker.id] = maker
                    waiting.append(maker)
        return in_order(within.values())

    def _is_seen(self, call: Call, within: Collection[int], step: Collection[int]) -> bool:
        """Whether other calls read a call's results, a call around it returns them, or the call may
        hide a fault.
        """
        if call.kind != "operator" or not call.program:
            return True
        written = [ref.record for ref in call.refs if is_written(ref.slot)]
        return any(
            not self._readers[record] <= set(within)
            or any(c.id not in step and c.id not in within for c in self._writers[record])
            for record in written
        )
