"""Rules of names: equal keys, other spellings, names that are alike at one place of the tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from whence.align.call_sites import Sites, match_roots
from whence.align.calls.site_pairing import EXACT, NORMAL, SIMILAR, SitePairing
from whence.align.module_names import WRAPPER_CLASSES, likeness, normal_scope, plain_scope

_ALIKE = 0.8  # of two components of a name


def exact(pairing: SitePairing) -> None:
    """Every part of the key is equal."""
    for site, key in enumerate(pairing.reference.keys):
        partner = pairing.target.number.get(key)
        if partner is not None and site not in pairing.partners and partner not in pairing.back:
            pairing.pair(site, partner, EXACT, pairing.classes(site, partner))


def normalised(pairing: SitePairing) -> None:
    """Names equal without wrappers and index styles; roots by class or as the only ones."""
    free, others = pairing.free()
    if not free or not others:
        return
    roots = match_roots(pairing.reference.keys, pairing.target.keys)
    table: dict[Hashable, list[int]] = defaultdict(list)
    for partner in others:
        table[_normal(pairing, pairing.target, partner, {})].append(partner)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for site in free:
        groups[_normal(pairing, pairing.reference, site, roots)].append(site)
    for name, sites in groups.items():
        matched, doubtful = _pair_namesakes(pairing, sites, table.get(name, []))
        for site, partner in matched:
            pairing.pair(site, partner, NORMAL, pairing.classes(site, partner))
        pairing.doubtful.update(doubtful)


def _normal(pairing: SitePairing, sites: Sites, site: int, roots: dict[str, str]) -> Hashable:
    key = sites.keys[site]
    return (
        pairing.lane(sites, site),
        roots.get(key.root, key.root),
        normal_scope(key.scope),
        key.op,
        key.occurrence,
    )


def _pair_namesakes(
    pairing: SitePairing, sites: Sequence[int], others: Sequence[int]
) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """Pair the sites that share one normalised name: (pairs, doubtful).

    A wrapper and what it wraps normalise to one name: wrappers are paired with wrappers, and only
    classes that agree decide between several.
    """
    if not others:
        return [], {}
    if len(sites) == 1 and len(others) == 1:
        return [(sites[0], others[0])], {}
    kinds = {s: pairing.reference.first[s].op_type for s in sites}
    target_kinds = {o: pairing.target.first[o].op_type for o in others}
    pairs: list[tuple[int, int]] = []
    free, unpaired = list(others), []
    for site in sites:
        of_kind = [o for o in free if target_kinds[o] == kinds[site]]
        if len(of_kind) == 1:
            pairs.append((site, of_kind[0]))
            free.remove(of_kind[0])
        else:
            unpaired.append(site)
    plain = [s for s in unpaired if kinds[s] not in WRAPPER_CLASSES]
    plain_free = [o for o in free if target_kinds[o] not in WRAPPER_CLASSES]
    if len(plain) == 1 and len(plain_free) == 1:
        pairs.append((plain[0], plain_free[0]))
        unpaired.remove(plain[0])
        free.remove(plain_free[0])
    return pairs, dict.fromkeys(unpaired, free) if free else {}


def spelt_alike(pairing: SitePairing) -> None:
    """Equal without classes inside the names and without a prefix; then a typo or a word more in
    one component.

    The names of either side form a tree; equal components are paired, then what is left at one
    place and is alike.
    """
    free, others = pairing.free()
    if not free or not others:
        return
    roots = match_roots(pairing.reference.keys, pairing.target.keys)
    trees = _tree(pairing, pairing.reference, roots)
    target_trees = _tree(pairing, pairing.target, {})
    for root in list(trees):
        if root in target_trees:
            cut, target_cut = _prefixes(trees[root], target_trees[root])
            if cut or target_cut:
                how = (
                    f"{'.'.join(cut) or 'no prefix'} against {'.'.join(target_cut) or 'no prefix'}"
                )
                _walk(
                    pairing, _under(trees[root], cut), _under(target_trees[root], target_cut), how
                )
            _walk(pairing, trees[root], target_trees[root])


def _tree(pairing: SitePairing, sites: Sites, roots: dict[str, str]) -> dict[Hashable, _Node]:
    out: dict[Hashable, _Node] = {}
    for site, key in enumerate(sites.keys):
        node = out.setdefault((pairing.lane(sites, site), roots.get(key.root, key.root)), _Node())
        for part in (
            *plain_scope(key.scope, sites.first[site].op_type),
            *((key.op,) if key.op else ()),
        ):
            node = node.below.setdefault(part, _Node())
        node.sites.setdefault(key.occurrence, []).append(site)
    return out


def _walk(pairing: SitePairing, tree: _Node, target_tree: _Node, how: str = "") -> None:
    todo = [(tree, target_tree, True, how)]
    while todo:
        a, b, plain, how = todo.pop()
        for occurrence in a.sites.keys() & b.sites.keys():
            sites = [
                s
                for s in a.sites[occurrence]
                if s not in pairing.partners and s not in pairing.renumbered
            ]
            others = [o for o in b.sites[occurrence] if o not in pairing.back]
            if len(sites) == 1 and len(others) == 1 and not pairing.contradict(sites[0], others[0]):
                classes = pairing.classes(sites[0], others[0])
                pairing.pair(
                    sites[0],
                    others[0],
                    NORMAL if plain else SIMILAR,
                    "; ".join(filter(None, (how, classes))),
                )
        todo += [(a.below[p], b.below[p], plain, how) for p in a.below.keys() & b.below.keys()]
        for part, spelling in _similar(
            [p for p in a.below if p not in b.below], [p for p in b.below if p not in a.below]
        ):
            words = f"{part} is spelt {spelling}"
            todo.append(
                (a.below[part], b.below[spelling], False, f"{how}, {words}" if how else words)
            )


class _Node:
    """A place in the tree of names: the sites of that name by occurrence, and what is below."""

    def __init__(self) -> None:
        self.sites: dict[int, list[int]] = {}
        self.below: dict[str, _Node] = {}


def _similar(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Components that are alike and have no other that is as much so."""
    if not names or not others or len(names) * len(others) > 10_000:
        return []
    table = np.array([[likeness(a, b) for b in others] for a in names])
    out = []
    for i, a in enumerate(names):
        j = int(table[i].argmax())
        best = table[i, j]
        if best >= _ALIKE and (table[i] == best).sum() == 1 and (table[:, j] >= best).sum() == 1:
            out.append((a, others[j]))
    return out


def _prefixes(tree: _Node, target_tree: _Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leading components of one side (`model.`): cut where more names below agree then."""
    ways = {
        (x, y): _agreeing(_under(tree, x), _under(target_tree, y))
        for x in _leading(tree)
        for y in _leading(target_tree)
    }
    best = max(ways, key=lambda w: (ways[w], -len(w[0]) - len(w[1])))
    return best if ways[best] > max(2 * ways[(), ()], 2) else ((), ())


def _leading(node: _Node) -> list[tuple[str, ...]]:
    single = [(part,) for part, n in node.below.items() if n.below and not part.isdigit()][:8]
    return [
        (),
        *single,
        *(
            (a, b)
            for (a,) in single
            for b, n in node.below[a].below.items()
            if n.below and not b.isdigit()
        ),
    ][:32]


def _under(node: _Node, path: Iterable[str]) -> _Node:
    for part in path:
        node = node.below[part]
    return node


def _agreeing(a: _Node, b: _Node) -> int:
    """How many names that are no numbers both have at the same place below."""
    n, todo = 0, [(a, b)]
    while todo:
        x, y = todo.pop()
        shared = x.below.keys() & y.below.keys()
        n += sum(bool(x.below[p].sites and y.below[p].sites) for p in shared if not p.isdigit())
        todo += [(x.below[p], y.below[p]) for p in shared]
    return n
