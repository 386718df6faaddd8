"""Rules of structure: what paired calls call, in the order in which it ran; calls that hold the
same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.fingerprints import Feature, distance, nearest_by_far
from whence.align.calls.sequence_alignment import longest_increasing
from whence.align.calls.site_pairing import CONTENT, ORDER, SitePairing, unique_contents
from whence.align.module_names import likeness, starred

_NEAR_OUTPUT = 0.1
_NEAR_MOMENTS = 1e-3  # what rounding to 16 bits makes of norm and sum of magnitudes
_BY_FAR = 10.0
_CROSSINGS = 200


def structure(pairing: SitePairing) -> None:
    """Children of paired parents, in the order in which they ran; from the roots down."""
    todo = pairing.parents()
    while todo:
        site, partner = todo.pop()
        new = _children(
            pairing, pairing.reference.kids.get(site, ()), pairing.target.kids.get(partner, ())
        )
        todo += [(s, pairing.partners[s].site) for s in new]


def _children(pairing: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    if all(k in pairing.partners for k in kids) or all(o in pairing.back for o in others):
        return []
    new: list[int] = []
    for members, others_of_lane in pairing.by_lane(kids, others):
        new += _parallel(pairing, members, others_of_lane)
        new += _between(pairing, members, others_of_lane, ORDER)
    return new


def _parallel(pairing: SitePairing, kids: Sequence[int], others: Sequence[int]) -> list[int]:
    """Pair siblings that read the same tensors, and so run in any order, by their parameters."""
    free = [k for k in kids if k not in pairing.partners]
    free_across = [o for o in others if o not in pairing.back]
    if len(free) > _CROSSINGS or len(free_across) > _CROSSINGS:
        return []
    features, across = pairing.features, pairing.target_features
    a, b = unique_contents(free, features), unique_contents(free_across, across)
    row, column = {k: i for i, k in enumerate(free)}, {o: j for j, o in enumerate(free_across)}
    equal = [(row[s], column[b[c]]) for c, s in a.items() if c in b]
    nearest = _nearest(features.many(free), across.many(free_across), equal)
    matches = [(free[i], free_across[j]) for i, j in sorted({*equal, *nearest})]
    crossing = [
        (p, q)
        for k, p in enumerate(matches)
        for q in matches[k + 1 :]
        if column[q[1]] < column[p[1]]
    ]
    if not crossing or not all(
        features.inputs(p[0]) == features.inputs(q[0]) != ()
        and across.inputs(p[1]) == across.inputs(q[1])
        for p, q in crossing
    ):
        return []
    involved = dict.fromkeys(p for crossed in crossing for p in crossed)
    for site, partner in involved:
        evidence = f"{pairing.why(site, partner)}; run in another order"
        pairing.pair(site, partner, CONTENT, evidence)
    return [site for site, _ in involved]


def _nearest(
    features: Sequence[Feature], across: Sequence[Feature], equal: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Positions of parameters that are nearest by far: in another dtype no two are equal."""
    rows = [i for i in range(len(features)) if i not in {p for p, _ in equal}]
    columns = [j for j in range(len(across)) if j not in {p for _, p in equal}]
    if not rows or not columns:
        return []
    distances = distance([features[i].moments for i in rows], [across[j].moments for j in columns])
    shapes = [[features[i].shapes == across[j].shapes for j in columns] for i in rows]
    distances = np.where(shapes, distances, np.inf)
    pairs = nearest_by_far(distances, _NEAR_MOMENTS, _BY_FAR)
    return [(rows[x], columns[y]) for x, y in pairs]


def _between(
    pairing: SitePairing, sites: Sequence[int], others: Sequence[int], rule: str
) -> list[int]:
    """Align the sites between those that are paired already, as far as these keep the order."""
    partners = pairing.partners
    to = {o: j for j, o in enumerate(others)}
    sites_across = ((i, partners[k].site) for i, k in enumerate(sites) if k in partners)
    paired = [(i, to[o]) for i, o in sites_across if o in to]
    new: list[int] = []
    named = pairing.shared_names is not None
    i0 = j0 = 0
    for i, j in [*longest_increasing(paired), (len(sites), len(others))]:
        a = [k for k in sites[i0:i] if k not in pairing.partners]
        b = [o for o in others[j0:j] if o not in pairing.back]
        if a and b:
            aligned = call_sequences.sequence(
                _translated(pairing, a), pairing.target_features.many(b), pairing.word, named=named
            )
            for x, y, _ in aligned.pairs:
                if not (named and _elsewhere(pairing, a[x], b[y])):
                    pairing.pair(a[x], b[y], rule, pairing.why(a[x], b[y]))
                    new.append(a[x])
            for x, ys in aligned.doubtful:
                pairing.doubtful[a[x]] = [b[y] for y in ys]
            nothing = not aligned.pairs and not aligned.doubtful
            if nothing and not named and _same_forms(pairing, a, b):
                for x, y in zip(a, b):
                    words = filter(None, (pairing.why(x, y), "nothing else between partners"))
                    pairing.pair(x, y, rule, ", ".join(words))
                new += a
        i0, j0 = i + 1, j + 1
    return new


def _elsewhere(pairing: SitePairing, site: int, partner: int) -> bool:
    """Do other layers pair one of these names with itself? Then the site was left out."""
    reference, target = pairing.reference, pairing.target
    names = {starred(reference.keys[site].scope), starred(target.keys[partner].scope)}
    alike = likeness(reference.word(site), target.word(partner)) >= 0.5
    if len(names) == 1 or alike or pairing.tells(site, partner):
        return False
    return not names.isdisjoint(pairing.shared_names or ())


def _same_forms(pairing: SitePairing, sites: Sequence[int], others: Sequence[int]) -> bool:
    """Are these as many calls of the same forms, the outputs of several also near each other?"""
    if len(sites) != len(others):
        return False
    for x, y in zip(sites, others):
        a, b = pairing.features[x], pairing.target_features[y]
        if not (
            a.out == b.out != 0
            and a.shapes == b.shapes
            and a.container == b.container
            and pairing.fits(x, y)
        ):
            return False
        if len(sites) > 1 and distance([a.out_moments], [b.out_moments])[0, 0] > _NEAR_OUTPUT:
            return False
    return True


def _translated(pairing: SitePairing, sites: Sequence[int]) -> list[Feature]:
    """Features with the target's classes in place of the reference's."""
    classes = pairing.classes_across
    return [f._replace(kind=classes.get(f.kind, f.kind)) for f in pairing.features.many(sites)]


def learn(pairing: SitePairing) -> None:
    """Note which class of the target stands for which of the reference, by the pairs so far."""
    across: dict[int, set[int]] = defaultdict(set)
    for site, partner in pairing.partners.items():
        a, b = pairing.features[site].kind, pairing.target_features[partner.site].kind
        if a and b:
            across[a].add(b)
    pairing.classes_across = {a: next(iter(b)) for a, b in across.items() if len(b) == 1}


def leaves(pairing: SitePairing) -> None:
    """Where modules are nested differently: calls that call no other, in the order they ran."""
    free, others = pairing.free()
    if not free or not others:
        return
    for sites, across in pairing.by_lane(pairing.reference.leaves(), pairing.target.leaves()):
        _between(pairing, sites, across, ORDER)


def containers(pairing: SitePairing) -> None:
    """Pair modules with those that hold most of the partners of their leaves, and little else."""
    weights, across = _weights(pairing.reference), _weights(pairing.target)
    common: dict[int, Counter[int]] = defaultdict(Counter)
    for site, partner in pairing.partners.items():
        if site in pairing.reference.kids:
            continue
        above = _above(pairing.target, partner.site)
        for ancestor in _above(pairing.reference, site):
            if ancestor not in pairing.partners:
                common[ancestor].update(above)
    for site in sorted(common, key=lambda s: weights[s]):
        candidates = [
            (2 * n / (weights[site] + across[o]), o)
            for o, n in common[site].items()
            if o not in pairing.back
            and pairing.lane(pairing.reference, site) == pairing.lane(pairing.target, o)
            and not pairing.contradict(site, o)
        ]
        if not candidates or (best := max(candidates)[0]) < 0.5:
            continue
        top = [o for share, o in candidates if share == best]
        if len(top) > 1:  # a chain of modules with one child each
            scores = [pairing.score(site, o) for o in top]
            top = [o for o, s in zip(top, scores) if s == max(scores)]
        if len(top) == 1:
            pairing.pair(site, top[0], ORDER, f"{best:.0%} of the calls below them are paired")


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
            for ancestor in _above(sites, site):
                out[ancestor] += 1
    return out
