"""The rule of numbers: one call more or less in a list changes the number of every later one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.sequence_alignment import align
from whence.align.calls.site_pairing import EXACT, NORMAL, ORDER, SIMILAR, SitePairing, grouped
from whence.align.module_names import normal_scope, starred

_MARGIN = 2.0  # by which an alignment must beat shared numbers, per pair it changes


def shifted(pairing: SitePairing) -> None:
    """Pair again lists whose shared numbers contradict their content: one call more or less in a
    list changes the number of every later one.

    Only where the lists differ in length or classes (of operators: types) contradict each other,
    and an alignment in order fits far better: then the numbers of that list, and all names below,
    are given up. Lists of one length keep their numbers: there, exchanged parameters are a fault.
    """
    for members, others in _numbered(pairing):
        keyed = [
            (s, pairing.partners[s].site)
            for s in members
            if s in pairing.partners and pairing.partners[s].rule in (EXACT, NORMAL, SIMILAR)
        ]
        # not other names for the same, as `mul` is for `matmul`
        shared = _operators(pairing.reference, members) & _operators(pairing.target, others)
        clash = [
            (s, o)
            for s, o in keyed
            if pairing.contradict(s, o) or _other_operator(pairing, s, o, shared)
        ]
        if not keyed or (len(members) == len(others) and not clash):
            continue
        if len(members) * len(others) > 1 << 20:
            continue
        _realign(pairing, members, others, dict(keyed), is_clash=bool(clash))


def _realign(
    pairing: SitePairing,
    members: list[int],
    others: list[int],
    keyed: dict[int, int],
    *,
    is_clash: bool,
) -> None:
    """Pair two lists in order, whatever their numbers, where that fits far better. keyed: the pairs
    by number; is_clash: do some of them contradict each other?
    """
    a, b = pairing.features.many(members), pairing.target_features.many(others)
    blind = [f._replace(word=0) for f in a], [f._replace(word=0) for f in b]
    table = call_sequences.scores(*blind, pairing.word)
    aligned = align(table, call_sequences.LEAST)
    row, column = {s: i for i, s in enumerate(members)}, {o: j for j, o in enumerate(others)}
    numbered = {s: o for s, o in keyed.items() if o in column}
    in_order = [(members[i], others[j]) for i, j, _ in aligned.pairs]
    moved = [(s, o) for s, o in in_order if numbered.get(s, -1) != o]
    if not moved:
        return
    # Pairs that cannot be count against the numbers, but no more than this.
    worth = sum(max(float(table[row[s], column[o]]), -4.0) for s, o in numbered.items())
    gain = sum(s for _, _, s in aligned.pairs) - worth
    telling = sum(pairing.tells(s, o) for s, o in moved)
    telling -= sum(pairing.tells(s, numbered[s]) for s, _ in moved if s in numbered)
    if gain < _MARGIN * max(len(moved) ** 0.5, 1.0) or (not is_clash and telling < len(moved) / 2):
        return
    stay = numbered.items() & set(in_order)
    for site in members:
        if (site, numbered.get(site)) not in stay:
            for inner in (site, *pairing.reference.below(site)):
                pairing.part(inner)
                pairing.renumbered.add(inner)
    for site, partner in moved:
        evidence = f"the numbers contradict the content: {pairing.why(site, partner)}"
        pairing.pair(site, partner, ORDER, evidence)
        _below(pairing, site, partner)


def _operators(sites: Sites, among: list[int]) -> set[str]:
    return {sites.first[s].op_type for s in among if sites.first[s].kind == "operator"}


def _other_operator(pairing: SitePairing, site: int, partner: int, shared: set[str]) -> bool:
    """Are these two different operators, each of which the other's list has as well?"""
    a, b = pairing.reference.first[site].op_type, pairing.target.first[partner].op_type
    return a != b and a in shared and b in shared


def _below(pairing: SitePairing, site: int, partner: int) -> None:
    """Pair what two partners call by its name inside them."""
    todo = [(site, partner)]
    while todo:
        a, b = todo.pop()
        by_name = {
            _inside(pairing, pairing.reference, k, a): k
            for k in pairing.reference.kids.get(a, ())
            if k not in pairing.partners
        }
        for o in pairing.target.kids.get(b, ()):
            k = by_name.get(_inside(pairing, pairing.target, o, b))
            if k is not None and k not in pairing.partners and o not in pairing.back:
                evidence = (
                    f"the same name inside {pairing.reference.name(a)} and {pairing.target.name(b)}"
                )
                pairing.pair(
                    k, o, ORDER, "; ".join(filter(None, (evidence, pairing.classes(k, o))))
                )
                todo.append((k, o))


def _inside(pairing: SitePairing, sites: Sites, site: int, parent: int) -> Hashable:
    """A site's name inside its parent."""
    key, above = sites.keys[site], sites.keys[parent].scope
    scope = (
        key.scope[len(above) + 1 :] if above and key.scope.startswith(f"{above}.") else key.scope
    )
    return pairing.lane(sites, site), normal_scope(scope), key.op, key.occurrence


def _numbered(pairing: SitePairing) -> list[tuple[list[int], list[int]]]:
    """Lists of siblings that differ by a number, below paired parents: layers.0, layers.1, ..."""
    out = []
    for site, partner in pairing.parents():
        kids, others = pairing.reference.kids.get(site, ()), pairing.target.kids.get(partner, ())
        if not kids or not others or (len(kids) == 1 and len(others) == 1):
            continue
        lists, target_lists = (
            grouped((_list(pairing, sites, k), k) for k in members)
            for sites, members in ((pairing.reference, kids), (pairing.target, others))
        )
        for name, members in lists.items():
            across = Counter(
                _list(pairing, pairing.target, pairing.partners[k].site)
                for k in members
                if k in pairing.partners
            )
            target_members = target_lists.get(across.most_common(1)[0][0] if across else name, ())
            if target_members and len(members) + len(target_members) > 2:
                out.append((members, target_members))
    return out


def _list(pairing: SitePairing, sites: Sites, site: int) -> Hashable:
    """What the siblings in one numbered list have in common."""
    key = sites.keys[site]
    return pairing.lane(sites, site), starred(normal_scope(key.scope)), key.op, key.occurrence
