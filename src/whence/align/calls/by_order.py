"""Pairs the calls of one module that is called more often per step in one run than in the other,
and finds the calls without a partner.

Where the counts agree, the k-th call is paired with the k-th. Otherwise the surroundings decide:
the calls before and after, the parent and the output.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from whence.align.call_sites import Sites, selected
from whence.align.calls import call_sequences
from whence.align.calls.fused_operators import RULE
from whence.align.calls.sequence_alignment import Scores, align
from whence.align.calls.site_pairing import EXACT, ORDER, SitePairing
from whence.align.module_names import family
from whence.errors import UsageError
from whence.records import Call, Run, children

Pairs = dict[int, tuple[int, str, str]]
_NEIGHBOUR = 2.0
_LONGEST = 2000


def realign(pairing: SitePairing, pairs: Pairs) -> dict[int, tuple[int, ...]]:
    """Correct pairs (reference call -> target call, rule, evidence) in place. Returns, by reference
    call, the target calls that fit it equally well.
    """
    reference, target = pairing.reference, pairing.target
    if not any(key.occurrence for sites in (reference, target) for key in sites.keys):
        return {}
    repeats, target_repeats = _repeats(reference), _repeats(target)
    family_of = {c: k for k, calls in target_repeats.items() for c in calls}
    doubtful: dict[int, tuple[int, ...]] = {}
    neighbours: tuple[_Neighbours, _Neighbours] | None = None
    back = {b: a for a, (b, _, _) in pairs.items()}
    for calls in repeats.values():
        across = {family_of[pairs[c][0]] for c in calls if c in pairs}
        if len(across) != 1 or reference.site_of[calls[0]] in pairing.counted:
            continue
        others = target_repeats[across.pop()]
        if len(calls) == len(others) or not 2 <= max(len(calls), len(others)) <= _LONGEST:
            continue
        if any(c in back and back[c] not in calls for c in others):
            continue
        neighbours = neighbours or (_Neighbours(reference), _Neighbours(target))
        old = {c: pairs.pop(c) for c in calls if c in pairs}
        table = _table(calls, others, pairing, neighbours, pairs)
        aligned = align(table, call_sequences.LEAST)
        for i, j, _ in aligned.pairs:
            former = old.get(calls[i])
            evidence = "called more often in one run; neighbours and outputs agree"
            is_old = former is not None and former[0] == others[j]
            pairs[calls[i]] = former if former and is_old else (others[j], ORDER, evidence)
        for i, js in aligned.doubtful:
            former = old.get(calls[i])
            if former is not None and former[1] == EXACT and former[0] in {others[j] for j in js}:
                pairs[calls[i]] = former
            else:
                doubtful[calls[i]] = tuple(others[j] for j in js)
    return doubtful


def _repeats(sites: Sites) -> dict[Hashable, list[int]]:
    """Selected calls by module and moment, in execution order."""
    out: dict[Hashable, list[int]] = defaultdict(list)
    for site, key in enumerate(sites.keys):
        for moment, calls in sites.moments[site].items():
            out[key._replace(occurrence=0), moment] += calls
    return out


class _Neighbours:
    """Finds the nearest siblings before and after a call that belong to another module."""

    def __init__(self, sites: Sites) -> None:
        self._sites, self._calls = sites, sites.calls
        self._kids = children(sites.calls)

    def of(self, call: int) -> tuple[int, int, int]:
        """(parent, sibling before, sibling after), each -1 where there is none."""
        calls, parent = self._calls, self._calls[call].parent
        kids = self._kids[parent]
        index = bisect.bisect_left(kids, calls[call].order, key=lambda k: calls[k].order)
        nearest = [
            next((k for k in siblings if self._module(k) != self._module(call)), -1)
            for siblings in (kids[max(index - 50, 0) : index][::-1], kids[index + 1 : index + 50])
        ]
        return parent, nearest[0], nearest[1]

    def _module(self, call: int) -> tuple[str, str]:
        key = self._sites.keys[self._sites.site_of[call]]
        return key.scope, key.op


def _table(
    calls: list[int],
    others: list[int],
    pairing: SitePairing,
    around: tuple[_Neighbours, _Neighbours],
    pairs: Pairs,
) -> Scores:
    """Scores (n, m) of how well calls fit, by features, outputs and paired neighbours; -inf where
    the parent is paired with another call.
    """
    a = [pairing.features.of_call(pairing.reference.calls[c]) for c in calls]
    b = [pairing.target_features.of_call(pairing.target.calls[c]) for c in others]
    table = call_sequences.scores(a, b, lambda _: "")
    near, near_across = [around[0].of(c) for c in calls], [around[1].of(c) for c in others]
    for place in range(3):
        across = np.array([pairs[o[place]][0] if o[place] in pairs else -2 for o in near])[:, None]
        opposite = np.array([o[place] for o in near_across])[None, :]
        if place == 0:
            table = np.where((across >= 0) & (across != opposite), -np.inf, table)
        else:
            end = (np.array([o[place] for o in near]) == -1)[:, None] & (opposite == -1)
            table = table + _NEIGHBOUR * ((across == opposite) | end)
    return table


def line_by_line(reference: Run, target: Run) -> list[tuple[Call, Call]]:
    """Pairs in execution order. Raises UsageError at the first call, or count, that disagrees."""
    calls, others = (
        sorted(selected(run.calls), key=lambda c: (c.rank, c.order)) for run in (reference, target)
    )
    for line, (a, b) in enumerate(zip(calls, others)):
        why = _disagree(a, b, reference, target)
        if why:
            counts = (
                "" if len(calls) == len(others) else f" ({len(calls)} calls against {len(others)})"
            )
            raise UsageError(
                f"match order: line {line} disagrees{counts}: reference {_name(a)} "
                f"{_few(_shapes(a, reference))}, "
                f"target {_name(b)} {_few(_shapes(b, target))}: {why}; match auto aligns runs "
                "with inserted or removed calls"
            )
    if len(calls) != len(others):
        side, run, extra = (
            ("reference", reference, calls[len(others) :])
            if len(calls) > len(others)
            else ("target", target, others[len(calls) :])
        )
        raise UsageError(
            f"match order: {len(calls)} calls against {len(others)}; only {side} has "
            f"{_name(extra[0])} {_few(_shapes(extra[0], run))} at line "
            f"{min(len(calls), len(others))}; match auto aligns runs with inserted or "
            "removed calls"
        )
    return list(zip(calls, others))


def _disagree(a: Call, b: Call, reference: Run, target: Run) -> str:
    if a.kind != b.kind or a.phase != b.phase:
        return f"{a.phase} {a.kind} against {b.phase} {b.kind}"
    family_a, family_b = family(a.op_type), family(b.op_type)
    if family_a and family_b and family_a != family_b:
        return "another kind of operator"
    return "other output shapes" if _shapes(a, reference) != _shapes(b, target) else ""


def _name(call: Call) -> str:
    name = ".".join(p for p in (call.scope, call.op) if p) or call.root
    return f"{name} ({call.op_type})" if call.op_type else name


def _shapes(call: Call, run: Run) -> str:
    shapes = [run.records[r.record].shape for r in call.slots("output")]
    return " ".join(f"[{', '.join(map(str, s))}]" for s in shapes) or "without output"


def _few(shapes: str) -> str:
    parts = shapes.split("] ")
    return shapes if len(parts) <= 3 else "] ".join(parts[:3]) + f"] and {len(parts) - 3} more"


def counted(pairing: SitePairing) -> None:
    """Pair operators below paired parents where a name is called more often on one side, by
    aligning them as one sequence regardless of their counters.

    One additional call shifts every later call of that name against the other run. Only the whole
    sequence (kinds, shapes, parameters, outputs) shows where it was inserted. Calls that state what
    they carry out keep their partners.
    """
    stated = {a: b for a, (b, rule, _) in pairing.partners.items() if rule == RULE}
    settled = {*stated.values()}
    for site, partner in pairing.parents():
        operators = [s for s in _operators(pairing.reference, site) if s not in stated]
        across = [s for s in _operators(pairing.target, partner) if s not in settled]
        for members, others in pairing.by_lane(operators, across):
            if _shifted(pairing, members, others):
                _sequence(pairing, members, others)


def _operators(sites: Sites, parent: int) -> list[int]:
    kids = sites.kids.get(parent, ())
    return [s for s in kids if sites.first[s].kind == "operator" and s not in sites.kids]


def _shifted(pairing: SitePairing, members: Sequence[int], others: Sequence[int]) -> bool:
    """Whether a name that is called several times is called more often on one side."""
    counts = Counter(_counted_as(pairing.reference, s) for s in members)
    across = Counter(_counted_as(pairing.target, s) for s in others)
    return any(
        n != across[name] and max(n, across[name]) > 1
        for name, n in counts.items()
        if name in across
    )


def _counted_as(sites: Sites, site: int) -> Hashable:
    key = sites.keys[site]
    return key.scope, key.op


def _sequence(pairing: SitePairing, members: Sequence[int], others: Sequence[int]) -> None:
    for site in members:
        pairing.part(site)
        pairing.counted.add(site)
    for partner in others:
        if partner in pairing.back:
            pairing.part(pairing.back[partner])
    a, b = pairing.features.many(members), pairing.target_features.many(others)
    aligned = call_sequences.sequence(a, b, pairing.word)
    for i, j, _ in aligned.pairs:
        site, partner = members[i], others[j]
        k, n = (pairing.reference.keys[site].occurrence, pairing.target.keys[partner].occurrence)
        moved = "" if k == n else f"call {k} of its name against call {n}"
        evidence = ", ".join(filter(None, (moved, pairing.why(site, partner))))
        pairing.pair(site, partner, ORDER, evidence)
    for i, js in aligned.doubtful:
        pairing.doubtful[members[i]] = [others[j] for j in js]
