"""The rule of numbers: one call more or less in a list, and all behind it have other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.sequence_alignment import align
from whence.align.calls.site_pairing import EXACT, NORMAL, ORDER, SIMILAR, SitePairing, grouped
from whence.align.module_names import normal_scope, starred

_MARGIN = 2.0  # by which an alignment must beat shared numbers, per pair it changes


def shifted(at: SitePairing) -> None:
    """Shared numbers that contradict what they number: one call more or less in a list, and all
    behind it have other numbers.

    Only where the lists differ in length or classes (of operators: types) contradict each other,
    and an alignment that keeps the order fits far better: then the numbers of that list, and all
    names below, are given up. Lists of one length keep their numbers: there, parameters in another
    place are a fault.
    """
    for mine, theirs in _numbered(at):
        keyed = [
            (s, at.face[s].other)
            for s in mine
            if s in at.face and at.face[s].rule in (EXACT, NORMAL, SIMILAR)
        ]
        # not other names for the same, as `mul` is for `matmul`
        both = _operators(at.left, mine) & _operators(at.right, theirs)
        clash = [(s, o) for s, o in keyed if at.contradict(s, o) or _other_operator(at, s, o, both)]
        if not keyed or (len(mine) == len(theirs) and not clash):
            continue
        if len(mine) * len(theirs) > 1 << 20:
            continue
        a, b = at.ours.many(mine), at.theirs.many(theirs)
        blind = [f._replace(word=0) for f in a], [f._replace(word=0) for f in b]
        table = call_sequences.scores(*blind, at.word)
        found = align(table, call_sequences.LEAST)
        row, column = {s: i for i, s in enumerate(mine)}, {o: j for j, o in enumerate(theirs)}
        before = {s: o for s, o in keyed if o in column}
        moved = [
            (mine[i], theirs[j]) for i, j, _ in found.pairs if before.get(mine[i], -1) != theirs[j]
        ]
        if not moved:
            continue
        # What the numbers say is taken at its worth: pairs that cannot be count against them.
        worth = sum(max(float(table[row[s], column[o]]), -4.0) for s, o in before.items())
        gain = sum(s for _, _, s in found.pairs) - worth
        telling = sum(at.tells(s, o) for s, o in moved) - sum(
            at.tells(s, before[s]) for s, _ in moved if s in before
        )
        if gain < _MARGIN * max(len(moved) ** 0.5, 1.0) or (not clash and telling < len(moved) / 2):
            continue
        stay = {
            s: o
            for s, o in before.items()
            if (s, o) in {(mine[i], theirs[j]) for i, j, _ in found.pairs}
        }
        for site in mine:
            if site not in stay:
                for one in (site, *at.left.below(site)):
                    at.part(one)
                    at.renumbered.add(one)
        for site, other in moved:
            at.pair(
                site, other, ORDER, f"the numbers contradict the content: {at.why(site, other)}"
            )
            _below(at, site, other)


def _operators(sites: Sites, among: list[int]) -> set[str]:
    return {sites.first[s].op_type for s in among if sites.first[s].kind == "operator"}


def _other_operator(at: SitePairing, site: int, other: int, both: set[str]) -> bool:
    """Are these two different operators, each of which the other's list has as well?"""
    one, two = at.left.first[site].op_type, at.right.first[other].op_type
    return one != two and one in both and two in both


def _below(at: SitePairing, site: int, other: int) -> None:
    """Pair what two partners call by its name inside them."""
    todo = [(site, other)]
    while todo:
        a, b = todo.pop()
        ours = {_inside(at, at.left, k, a): k for k in at.left.kids.get(a, ()) if k not in at.face}
        for o in at.right.kids.get(b, ()):
            k = ours.get(_inside(at, at.right, o, b))
            if k is not None and k not in at.face and o not in at.back:
                evidence = f"the same name inside {at.left.name(a)} and {at.right.name(b)}"
                at.pair(k, o, ORDER, "; ".join(filter(None, (evidence, at.classes(k, o)))))
                todo.append((k, o))


def _inside(at: SitePairing, sites: Sites, site: int, parent: int) -> Hashable:
    """A site's name inside its parent."""
    key, above = sites.keys[site], sites.keys[parent].scope
    scope = (
        key.scope[len(above) + 1 :] if above and key.scope.startswith(f"{above}.") else key.scope
    )
    return at.lane(sites, site), normal_scope(scope), key.op, key.occurrence


def _numbered(at: SitePairing) -> list[tuple[list[int], list[int]]]:
    """Lists of siblings that differ by a number only, below paired parents: layers.0, layers.1,
    ...
    """
    out = []
    for site, other in [(-1, -1), *((s, f.other) for s, f in list(at.face.items()))]:
        kids, others = at.left.kids.get(site, ()), at.right.kids.get(other, ())
        if not kids or not others or (len(kids) == 1 and len(others) == 1):
            continue
        ours, theirs = (
            grouped((_list(at, sites, k), k) for k in members)
            for sites, members in ((at.left, kids), (at.right, others))
        )
        for name, members in ours.items():
            across = Counter(_list(at, at.right, at.face[k].other) for k in members if k in at.face)
            found = theirs.get(across.most_common(1)[0][0] if across else name, ())
            if found and len(members) + len(found) > 2:
                out.append((members, found))
    return out


def _list(at: SitePairing, sites: Sites, site: int) -> Hashable:
    """What the siblings in one numbered list have in common."""
    key = sites.keys[site]
    return at.lane(sites, site), starred(normal_scope(key.scope)), key.op, key.occurrence
