"""The rule of counters: operators that are told apart only by how often their name was called, and one of them more on one side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from whence.align.call_sites import Sites
from whence.align.calls import sequence_alignment
from whence.align.calls.site_pairing import ORDER, Pairing


def counted(at: Pairing) -> None:
    """Operators below paired parents, where a name is called more often on one side: aligned as one sequence, counters given up.

    One call more shifts every later call of that name against the other run, and with it what stands beside them; only the whole
    sequence (kinds, shapes, parameters, outputs) shows where it came in.
    """
    for site, other in [(-1, -1), *((s, f.other) for s, f in list(at.face.items()))]:
        ours, theirs = _operators(at.left, at.left.kids.get(site, ())), _operators(at.right, at.right.kids.get(other, ()))
        for lane in dict.fromkeys(at.lane(at.left, s) for s in ours):
            mine = [s for s in ours if at.lane(at.left, s) == lane]
            his = [o for o in theirs if at.lane(at.right, o) == lane]
            if _shifted(at, mine, his):
                _sequence(at, mine, his)


def _operators(sites: Sites, kids: Sequence[int]) -> list[int]:
    return [s for s in kids if sites.first[s].kind == "operator" and s not in sites.kids]


def _shifted(at: Pairing, mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Is a name that is called several times called more often on one side?"""
    ours, others = (Counter(_name(sites, s) for s in found) for sites, found in ((at.left, mine), (at.right, theirs)))
    return any(n != others[name] and max(n, others[name]) > 1 for name, n in ours.items() if name in others)


def _name(sites: Sites, site: int) -> Hashable:
    key = sites.keys[site]
    return key.scope, key.op


def _sequence(at: Pairing, mine: Sequence[int], theirs: Sequence[int]) -> None:
    for site in mine:
        at.part(site)
        at.counted.add(site)
    for other in theirs:
        if other in at.back:
            at.part(at.back[other])
    found = sequence_alignment.sequence(at.ours.many(mine), at.theirs.many(theirs), at.word)
    for i, j, _ in found.pairs:
        a, b = at.left.keys[mine[i]], at.right.keys[theirs[j]]
        moved = "" if a.occurrence == b.occurrence else f"call {a.occurrence} of its name against call {b.occurrence}"
        at.pair(mine[i], theirs[j], ORDER, ", ".join(filter(None, (moved, at.why(mine[i], theirs[j])))))
    for i, others in found.doubtful:
        at.doubtful[mine[i]] = [theirs[j] for j in others]
