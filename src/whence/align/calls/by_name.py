"""Rules of names: equal keys, names in another spelling, names that are alike at one place of the
tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from whence.align.call_sites import Sites, match_roots
from whence.align.calls.site_pairing import EXACT, NORMAL, SIMILAR, SitePairing
from whence.align.module_names import WRAPPER_CLASSES, likeness, normal_scope, plain_scope

_ALIKE = 0.8  # of two components of a name


def exact(at: SitePairing) -> None:
    """Every part of the key is equal."""
    for site, key in enumerate(at.left.keys):
        other = at.right.number.get(key)
        if other is not None and site not in at.face and other not in at.back:
            at.pair(site, other, EXACT, at.classes(site, other))


def normalised(at: SitePairing) -> None:
    """The names are equal without wrappers and index styles; roots are matched by class or as the
    only ones left.
    """
    mine, theirs = at.free()
    if not mine or not theirs:
        return
    roots = match_roots(at.left.keys, at.right.keys)
    table: dict[Hashable, list[int]] = defaultdict(list)
    for other in theirs:
        table[_normal(at, at.right, other, {})].append(other)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for site in mine:
        groups[_normal(at, at.left, site, roots)].append(site)
    for name, sites in groups.items():
        matched, doubtful = _within(at, sites, table.get(name, []))
        for site, other in matched:
            at.pair(site, other, NORMAL, at.classes(site, other))
        at.doubtful.update(doubtful)


def _normal(at: SitePairing, sites: Sites, site: int, roots: dict[str, str]) -> Hashable:
    key = sites.keys[site]
    return (
        at.lane(sites, site),
        roots.get(key.root, key.root),
        normal_scope(key.scope),
        key.op,
        key.occurrence,
    )


def _within(
    at: SitePairing, mine: Sequence[int], others: Sequence[int]
) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """Pair the sites that share one normalised name: (pairs, doubtful).

    A wrapper and what it wraps normalise to one name: wrappers face wrappers, and only classes that
    agree decide between several.
    """
    if not others:
        return [], {}
    if len(mine) == 1 and len(others) == 1:
        return [(mine[0], others[0])], {}
    kinds = {s: at.left.first[s].op_type for s in mine}
    theirs = {o: at.right.first[o].op_type for o in others}
    pairs: list[tuple[int, int]] = []
    free, left = list(others), []
    for site in mine:
        same = [o for o in free if theirs[o] == kinds[site]]
        if len(same) == 1:
            pairs.append((site, same[0]))
            free.remove(same[0])
        else:
            left.append(site)
    plain_left = [s for s in left if kinds[s] not in WRAPPER_CLASSES]
    plain_free = [o for o in free if theirs[o] not in WRAPPER_CLASSES]
    if len(plain_left) == 1 and len(plain_free) == 1:
        pairs.append((plain_left[0], plain_free[0]))
        left.remove(plain_left[0])
        free.remove(plain_free[0])
    return pairs, dict.fromkeys(left, free) if free else {}


def spelt_alike(at: SitePairing) -> None:
    """Equal without classes inside the names and without a prefix; then a typo or a word more in
    one component.

    The names of either side form a tree; equal components are paired, then what is left at one
    place and is alike.
    """
    mine, theirs = at.free()
    if not mine or not theirs:
        return
    roots = match_roots(at.left.keys, at.right.keys)
    ours = _tree(at, at.left, roots)
    others = _tree(at, at.right, {})
    for root in list(ours):
        if root in others:
            cut_left, cut_right = _prefixes(ours[root], others[root])
            if cut_left or cut_right:
                how = (
                    f"{'.'.join(cut_left) or 'no prefix'} against "
                    f"{'.'.join(cut_right) or 'no prefix'}"
                )
                _walk(at, _under(ours[root], cut_left), _under(others[root], cut_right), how)
            _walk(at, ours[root], others[root])


def _tree(at: SitePairing, sites: Sites, roots: dict[str, str]) -> dict[Hashable, _Node]:
    out: dict[Hashable, _Node] = {}
    for site, key in enumerate(sites.keys):
        node = out.setdefault((at.lane(sites, site), roots.get(key.root, key.root)), _Node())
        for part in (
            *plain_scope(key.scope, sites.first[site].op_type),
            *((key.op,) if key.op else ()),
        ):
            node = node.below.setdefault(part, _Node())
        node.sites.setdefault(key.occurrence, []).append(site)
    return out


def _walk(at: SitePairing, left: _Node, right: _Node, how: str = "") -> None:
    todo = [(left, right, True, how)]
    while todo:
        a, b, plain, how = todo.pop()
        for occurrence in a.sites.keys() & b.sites.keys():
            mine = [s for s in a.sites[occurrence] if s not in at.face and s not in at.renumbered]
            theirs = [o for o in b.sites[occurrence] if o not in at.back]
            if len(mine) == 1 and len(theirs) == 1 and not at.contradict(mine[0], theirs[0]):
                classes = at.classes(mine[0], theirs[0])
                at.pair(
                    mine[0],
                    theirs[0],
                    NORMAL if plain else SIMILAR,
                    "; ".join(filter(None, (how, classes))),
                )
        todo += [(a.below[p], b.below[p], plain, how) for p in a.below.keys() & b.below.keys()]
        for part, other in _alike(
            [p for p in a.below if p not in b.below], [p for p in b.below if p not in a.below]
        ):
            words = f"{part} is spelt {other}"
            todo.append((a.below[part], b.below[other], False, f"{how}, {words}" if how else words))


class _Node:
    """A place in the tree of names: the sites of that name by occurrence, and what is below."""

    def __init__(self) -> None:
        self.sites: dict[int, list[int]] = {}
        self.below: dict[str, _Node] = {}


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Components that are alike and have no other that is as much so."""
    if not ours or not theirs or len(ours) * len(theirs) > 10_000:
        return []
    table = np.array([[likeness(a, b) for b in theirs] for a in ours])
    out = []
    for i, a in enumerate(ours):
        j = int(table[i].argmax())
        best = table[i, j]
        if best >= _ALIKE and (table[i] == best).sum() == 1 and (table[:, j] >= best).sum() == 1:
            out.append((a, theirs[j]))
    return out


def _prefixes(left: _Node, right: _Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leading components that only one side has (`model.`): cut where more names below agree
    then.
    """
    ways = {
        (x, y): _agreeing(_under(left, x), _under(right, y))
        for x in _leading(left)
        for y in _leading(right)
    }
    best = max(ways, key=lambda w: (ways[w], -len(w[0]) - len(w[1])))
    return best if ways[best] > max(2 * ways[(), ()], 2) else ((), ())


def _leading(node: _Node) -> list[tuple[str, ...]]:
    one = [(part,) for part, n in node.below.items() if n.below and not part.isdigit()][:8]
    return [
        (),
        *one,
        *(
            (a, b)
            for (a,) in one
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
        both = x.below.keys() & y.below.keys()
        n += sum(bool(x.below[p].sites and y.below[p].sites) for p in both if not p.isdigit())
        todo += [(x.below[p], y.below[p]) for p in both]
    return n
