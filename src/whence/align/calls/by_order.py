"""One module called several times in a step, more often in one run than in the other: which of its
calls is the one too many?

Where the numbers of calls agree, the k-th is paired with the k-th. Else the neighbours decide: what
ran before and after, under which parent, with which output.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from whence.align.call_sites import Sites, selected
from whence.align.calls import call_sequences
from whence.align.calls.sequence_alignment import Scores, align
from whence.align.calls.site_pairing import EXACT, ORDER, SitePairing
from whence.align.module_names import family
from whence.errors import UsageError
from whence.records import Call, Run, children

Pairs = dict[int, tuple[int, str, str]]
_NEIGHBOUR = 2.0
_LONGEST = 2000


def realign(at: SitePairing, pairs: Pairs) -> dict[int, tuple[int, ...]]:
    """Correct pairs (call of the reference -> call of the target, rule, evidence) in place. Returns
    calls that several fit equally.
    """
    if not any(key.occurrence for sites in (at.left, at.right) for key in sites.keys):
        return {}
    left, right = _repeats(at.left), _repeats(at.right)
    family_of = {c: k for k, calls in right.items() for c in calls}
    doubtful: dict[int, tuple[int, ...]] = {}
    neighbours: tuple[_Neighbours, _Neighbours] | None = None
    back = {b: a for a, (b, _, _) in pairs.items()}
    for calls in left.values():
        across = {family_of[pairs[c][0]] for c in calls if c in pairs}
        if len(across) != 1 or at.left.site_of[calls[0]] in at.counted:
            continue
        others = right[across.pop()]
        if (
            len(calls) == len(others)
            or max(len(calls), len(others)) < 2
            or max(len(calls), len(others)) > _LONGEST
        ):
            continue
        if any(c in back and back[c] not in calls for c in others):
            continue
        neighbours = neighbours or (_Neighbours(at.left), _Neighbours(at.right))
        old = {c: pairs.pop(c) for c in calls if c in pairs}
        table = _table(calls, others, at, neighbours, pairs)
        found = align(table, call_sequences.LEAST)
        for i, j, _ in found.pairs:
            kept = old.get(calls[i])
            same = kept is not None and kept[0] == others[j]
            pairs[calls[i]] = (
                kept
                if same and kept
                else (
                    others[j],
                    ORDER,
                    "called more often in one run; neighbours and outputs agree",
                )
            )
        for i, js in found.doubtful:
            kept = old.get(calls[i])
            if kept is not None and kept[1] == EXACT and kept[0] in {others[j] for j in js}:
                pairs[calls[i]] = kept
            else:
                doubtful[calls[i]] = tuple(others[j] for j in js)
    taken = {b for b, _, _ in pairs.values()}
    still = {a: tuple(b for b in bs if b not in taken) for a, bs in doubtful.items()}
    return {a: bs for a, bs in still.items() if bs}


def _repeats(sites: Sites) -> dict[Hashable, list[int]]:
    """Selected calls of one module in one step, in execution order."""
    out: dict[Hashable, list[int]] = defaultdict(list)
    for site, key in enumerate(sites.keys):
        for moment, calls in sites.moments[site].items():
            out[key._replace(occurrence=0), moment] += calls
    return out


class _Neighbours:
    """The siblings before and after a call that are of another module."""

    def __init__(self, sites: Sites) -> None:
        self._calls, self._kids, self._site_of, self._keys = (
            sites.calls,
            children(sites.calls),
            sites.site_of,
            sites.keys,
        )

    def of(self, call: int) -> tuple[int, int, int]:
        """(parent, before, after), each -1 where there is none."""
        parent = self._calls[call].parent
        kids = self._kids[parent]
        at = bisect.bisect_left(kids, self._calls[call].order, key=lambda k: self._calls[k].order)
        before = next(
            (k for k in reversed(kids[max(at - 50, 0) : at]) if not self._same(k, call)), -1
        )
        after = next((k for k in kids[at + 1 : at + 50] if not self._same(k, call)), -1)
        return parent, before, after

    def _same(self, one: int, other: int) -> bool:
        a, b = self._keys[self._site_of[one]], self._keys[self._site_of[other]]
        return a.scope == b.scope and a.op == b.op


def _table(
    mine: list[int],
    theirs: list[int],
    at: SitePairing,
    around: tuple[_Neighbours, _Neighbours],
    pairs: Pairs,
) -> Scores:
    """How well each call fits each: outputs, and neighbours that are paired; -inf below
    parents that do not.
    """
    a = [at.ours.of_call(at.left.calls[c]) for c in mine]
    b = [at.theirs.of_call(at.right.calls[c]) for c in theirs]
    table = call_sequences.scores(a, b, lambda _: "")
    ours, others = [around[0].of(c) for c in mine], [around[1].of(c) for c in theirs]
    for place in range(3):
        across = np.array([pairs[o[place]][0] if o[place] in pairs else -2 for o in ours])[:, None]
        there = np.array([o[place] for o in others])[None, :]
        if place == 0:
            table = np.where((across >= 0) & (across != there), -np.inf, table)
        else:
            end = (np.array([o[place] for o in ours]) == -1)[:, None] & (there == -1)
            table = table + _NEIGHBOUR * ((across == there) | end)
    return table


def line_by_line(reference: Run, target: Run) -> list[tuple[Call, Call]]:
    """Pairs in execution order. Raises UsageError naming the first line that disagrees in kind or
    output shapes, or the counts.
    """
    left, right = (
        sorted(selected(run.calls), key=lambda c: (c.rank, c.order)) for run in (reference, target)
    )
    for line, (a, b) in enumerate(zip(left, right)):
        why = _disagree(a, b, reference, target)
        if why:
            counts = "" if len(left) == len(right) else f" ({len(left)} calls against {len(right)})"
            raise UsageError(
                f"match order: line {line} disagrees{counts}: reference {_name(a)} "
                f"{_few(_shapes(a, reference))}, "
                f"target {_name(b)} {_few(_shapes(b, target))}: {why}; match auto aligns runs "
                "with inserted or removed calls"
            )
    if len(left) != len(right):
        side, run, rest = (
            ("reference", reference, left[len(right) :])
            if len(left) > len(right)
            else ("target", target, right[len(left) :])
        )
        raise UsageError(
            f"match order: {len(left)} calls against {len(right)}; only {side} has "
            f"{_name(rest[0])} {_few(_shapes(rest[0], run))} at line "
            f"{min(len(left), len(right))}; match auto aligns runs with inserted or removed calls"
        )
    return list(zip(left, right))


def _disagree(a: Call, b: Call, reference: Run, target: Run) -> str:
    if a.kind != b.kind or a.phase != b.phase:
        return f"{a.phase} {a.kind} against {b.phase} {b.kind}"
    one, two = family(a.op_type), family(b.op_type)
    if one and two and one != two:
        return "another kind of operator"
    return "other output shapes" if _shapes(a, reference) != _shapes(b, target) else ""


def _name(call: Call) -> str:
    name = ".".join(p for p in (call.scope, call.op) if p) or call.root
    return f"{name} ({call.op_type})" if call.op_type else name


def _shapes(call: Call, run: Run) -> str:
    shapes = [run.records[r.record].shape for r in call.slots("output")]
    return " ".join(f"[{', '.join(map(str, s))}]" for s in shapes) or "without output"


def _few(shapes: str) -> str:
    found = shapes.split("] ")
    return shapes if len(found) <= 3 else "] ".join(found[:3]) + f"] and {len(found) - 3} more"


def counted(at: SitePairing) -> None:
    """Operators below paired parents, where a name is called more often on one side: aligned as one
    sequence, counters given up.

    One call more shifts every later call of that name against the other run, and with it what
    stands beside them; only the whole sequence (kinds, shapes, parameters, outputs) shows where it
    came in.
    """
    for site, other in [(-1, -1), *((s, f.other) for s, f in list(at.face.items()))]:
        ours, theirs = (
            _operators(at.left, at.left.kids.get(site, ())),
            _operators(at.right, at.right.kids.get(other, ())),
        )
        for lane in dict.fromkeys(at.lane(at.left, s) for s in ours):
            mine = [s for s in ours if at.lane(at.left, s) == lane]
            his = [o for o in theirs if at.lane(at.right, o) == lane]
            if _shifted(at, mine, his):
                _sequence(at, mine, his)


def _operators(sites: Sites, kids: Sequence[int]) -> list[int]:
    return [s for s in kids if sites.first[s].kind == "operator" and s not in sites.kids]


def _shifted(at: SitePairing, mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Is a name that is called several times called more often on one side?"""
    ours, others = (
        Counter(_counted_as(sites, s) for s in found)
        for sites, found in ((at.left, mine), (at.right, theirs))
    )
    return any(
        n != others[name] and max(n, others[name]) > 1 for name, n in ours.items() if name in others
    )


def _counted_as(sites: Sites, site: int) -> Hashable:
    key = sites.keys[site]
    return key.scope, key.op


def _sequence(at: SitePairing, mine: Sequence[int], theirs: Sequence[int]) -> None:
    for site in mine:
        at.part(site)
        at.counted.add(site)
    for other in theirs:
        if other in at.back:
            at.part(at.back[other])
    found = call_sequences.sequence(at.ours.many(mine), at.theirs.many(theirs), at.word)
    for i, j, _ in found.pairs:
        a, b = at.left.keys[mine[i]], at.right.keys[theirs[j]]
        moved = (
            ""
            if a.occurrence == b.occurrence
            else f"call {a.occurrence} of its name against call {b.occurrence}"
        )
        at.pair(
            mine[i], theirs[j], ORDER, ", ".join(filter(None, (moved, at.why(mine[i], theirs[j]))))
        )
    for i, others in found.doubtful:
        at.doubtful[mine[i]] = [theirs[j] for j in others]
