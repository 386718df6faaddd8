"""Rules of structure: what paired calls call, in the order in which it ran; calls that hold the
same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.fingerprints import Feature, distance
from whence.align.calls.sequence_alignment import longest_increasing
from whence.align.calls.site_pairing import CONTENT, ORDER, SitePairing, alone
from whence.align.module_names import likeness, starred

_NEAR_OUTPUT = 0.1
_NEAR_MOMENTS = 1e-3  # what rounding to 16 bits makes of norm and sum of magnitudes
_BY_FAR = 10.0
_CROSSINGS = 200


def structure(at: SitePairing) -> None:
    """Children of paired parents, in the order in which they ran; from the roots down."""
    todo = [(-1, -1), *((s, f.other) for s, f in at.face.items())]
    while todo:
        site, other = todo.pop()
        new = _children(at, at.left.kids.get(site, ()), at.right.kids.get(other, ()))
        todo += [(s, at.face[s].other) for s in new]


def _children(at: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    if all(k in at.face for k in kids) or all(o in at.back for o in others):
        return []
    new: list[int] = []
    lanes = dict.fromkeys(at.lane(at.left, k) for k in kids)
    for lane in lanes:
        mine = [k for k in kids if at.lane(at.left, k) == lane]
        theirs = [o for o in others if at.lane(at.right, o) == lane]
        new += _parallel(at, mine, theirs)
        new += _between(at, mine, theirs, ORDER)
    return new


def _parallel(at: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    """Siblings that read the same tensors run in any order: parameters say which is which, equal
    ones or the nearest by far.
    """
    mine = [k for k in kids if k not in at.face]
    theirs = [o for o in others if o not in at.back]
    if len(mine) > _CROSSINGS or len(theirs) > _CROSSINGS:
        return []
    a, b = alone(mine, at.ours), alone(theirs, at.theirs)
    row, column = {k: i for i, k in enumerate(mine)}, {o: j for j, o in enumerate(theirs)}
    equal = [(row[s], column[b[c]]) for c, s in a.items() if c in b]
    found = sorted({*equal, *_nearest(at, mine, theirs, equal)})
    crossing = [(p, q) for k, p in enumerate(found) for q in found[k + 1 :] if q[1] < p[1]]
    if not crossing or not all(
        at.ours.inputs(mine[p[0]]) == at.ours.inputs(mine[q[0]]) != ()
        and at.theirs.inputs(theirs[p[1]]) == at.theirs.inputs(theirs[q[1]])
        for p, q in crossing
    ):
        return []
    involved = dict.fromkeys(p for both in crossing for p in both)
    for i, j in involved:
        at.pair(mine[i], theirs[j], CONTENT, f"{at.why(mine[i], theirs[j])}; run in another order")
    return [mine[i] for i, _ in involved]


def _nearest(
    at: SitePairing, mine: Sequence[int], theirs: Sequence[int], equal: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Pairs (place in mine, in theirs) whose parameters are by far the nearest either way: in
    another dtype no two are equal.
    """
    rows = [i for i in range(len(mine)) if i not in {p for p, _ in equal}]
    columns = [j for j in range(len(theirs)) if j not in {p for _, p in equal}]
    if not rows or not columns:
        return []
    apart = distance(
        [at.ours[mine[i]].moments for i in rows], [at.theirs[theirs[j]].moments for j in columns]
    )
    shapes = [
        [at.ours[mine[i]].shapes == at.theirs[theirs[j]].shapes for j in columns] for i in rows
    ]
    apart = np.where(shapes, apart, np.inf)
    found = []
    for x, i in enumerate(rows):
        y = int(np.argmin(apart[x]))
        rest = min([*np.delete(apart[x], y), *np.delete(apart[:, y], x)], default=np.inf)
        if apart[x, y] < _NEAR_MOMENTS and rest > _BY_FAR * apart[x, y]:
            found.append((i, columns[y]))
    return found


def _between(at: SitePairing, mine: Sequence[int], theirs: Sequence[int], rule: str) -> list[int]:
    """Align what lies between pairs that are already there, so far as these keep the order."""
    to = {o: j for j, o in enumerate(theirs)}
    there = [
        (i, to[at.face[k].other])
        for i, k in enumerate(mine)
        if k in at.face and at.face[k].other in to
    ]
    new: list[int] = []
    named = at.shared_names is not None
    i0 = j0 = 0
    for i, j in [*longest_increasing(there), (len(mine), len(theirs))]:
        a = [k for k in mine[i0:i] if k not in at.face]
        b = [o for o in theirs[j0:j] if o not in at.back]
        if a and b:
            found = call_sequences.sequence(
                _translated(at, a), at.theirs.many(b), at.word, named=named
            )
            for x, y, _ in found.pairs:
                if not (named and _elsewhere(at, a[x], b[y])):
                    at.pair(a[x], b[y], rule, at.why(a[x], b[y]))
                    new.append(a[x])
            for x, ys in found.doubtful:
                at.doubtful[a[x]] = [b[y] for y in ys]
            if not named and not found.pairs and not found.doubtful and _same_forms(at, a, b):
                for x, y in zip(a, b):
                    at.pair(
                        x,
                        y,
                        rule,
                        ", ".join(filter(None, (at.why(x, y), "nothing else between partners"))),
                    )
                new += a
        i0, j0 = i + 1, j + 1
    return new


def _elsewhere(at: SitePairing, site: int, other: int) -> bool:
    """Does the name of one of the two stand across under the same name in other layers? Then this
    one was left out, not renamed.
    """
    mine, theirs = starred(at.left.keys[site].scope), starred(at.right.keys[other].scope)
    if (
        mine == theirs
        or likeness(at.left.word(site), at.right.word(other)) >= 0.5
        or at.tells(site, other)
    ):
        return False
    return not {mine, theirs}.isdisjoint(at.shared_names or ())


def _same_forms(at: SitePairing, mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Are these as many calls of the same forms, the outputs of several also near each other?"""
    if len(mine) != len(theirs):
        return False
    for x, y in zip(mine, theirs):
        a, b = at.ours[x], at.theirs[y]
        if not (
            a.out == b.out != 0
            and a.shapes == b.shapes
            and a.container == b.container
            and at.fits(x, y)
        ):
            return False
        if len(mine) > 1 and distance([a.out_moments], [b.out_moments])[0, 0] > _NEAR_OUTPUT:
            return False
    return True


def _translated(at: SitePairing, sites: Sequence[int]) -> list[Feature]:
    """Features with the classes that, wherever a class was paired so far, stood across."""
    return [f._replace(kind=at.classes_across.get(f.kind, f.kind)) for f in at.ours.many(sites)]


def learn(at: SitePairing) -> None:
    """Which class of the target stands for which of the reference, by the pairs there are."""
    across: dict[int, set[int]] = defaultdict(set)
    for site, face in at.face.items():
        a, b = at.ours[site].kind, at.theirs[face.other].kind
        if a and b:
            across[a].add(b)
    at.classes_across = {a: next(iter(b)) for a, b in across.items() if len(b) == 1}


def leaves(at: SitePairing) -> None:
    """Where the modules are nested otherwise: the calls that call no other, in the order in which
    they ran.
    """
    mine, theirs = at.free()
    if not mine or not theirs:
        return
    ours, others = at.left.leaves(), at.right.leaves()
    for lane in dict.fromkeys(at.lane(at.left, s) for s in mine):
        _between(
            at,
            [s for s in ours if at.lane(at.left, s) == lane],
            [o for o in others if at.lane(at.right, o) == lane],
            ORDER,
        )


def containers(at: SitePairing) -> None:
    """Modules whose insides are paired: the one that holds most of what faces what is inside,
    and little else.
    """
    weigh_left, weigh_right = _weights(at.left), _weights(at.right)
    common: dict[int, Counter[int]] = defaultdict(Counter)
    for site, face in at.face.items():
        if site in at.left.kids:
            continue
        above = _above(at.right, face.other)
        for one in _above(at.left, site):
            if one not in at.face:
                common[one].update(above)
    for site in sorted(common, key=lambda s: weigh_left[s]):
        found = [
            (2 * n / (weigh_left[site] + weigh_right[o]), o)
            for o, n in common[site].items()
            if o not in at.back
            and at.lane(at.left, site) == at.lane(at.right, o)
            and not at.contradict(site, o)
        ]
        if not found or (best := max(found)[0]) < 0.5:
            continue
        top = [o for share, o in found if share == best]
        if len(top) > 1:  # a chain of modules with one child each
            alike = [
                call_sequences.scores([at.ours[site]], [at.theirs[o]], at.word)[0, 0] for o in top
            ]
            top = [o for o, s in zip(top, alike) if s == max(alike)]
        if len(top) == 1:
            at.pair(site, top[0], ORDER, f"{best:.0%} of what they call faces each other")


def _above(sites: Sites, site: int) -> list[int]:
    out = []
    while (site := sites.parent[site]) >= 0:
        out.append(site)
    return out


def _weights(sites: Sites) -> list[int]:
    """How many leaves are below each site."""
    out = [0] * len(sites)
    for site in range(len(sites)):
        if site not in sites.kids:
            for one in _above(sites, site):
                out[one] += 1
    return out
