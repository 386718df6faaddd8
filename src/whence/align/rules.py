"""Who faces whom, site by site: rules by falling strictness, each adding to what the stricter ones left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from whence.align import order
from whence.align.content import Feature, Features, Vocabulary, distance
from whence.align.flow import Flow
from whence.align.names import WRAPPER_CLASSES, family, likeness, normal_scope, plain_scope, starred
from whence.align.sites import Sites, match_roots
from whence.records import Run

EXACT, NORMAL, SIMILAR, ORDER, FLOW, CONTENT = "exact key", "normalised name", "similar name", "order", "data flow", "content"
_ALIKE = 0.8  # of two components of a name
_MARGIN = 2.0  # by which an alignment must beat shared numbers, per pair it changes
_ROUNDS = 8
_CLOSE_OUTPUT = 1e-3
_NEAR_OUTPUT = 0.1
_CLEARLY = 5.0  # times closer than the next candidate
_LEAST_COUNT = 16
_CROSSINGS = 200


class Face(NamedTuple):
    """The site across, with the rule that said so and its evidence in words."""

    other: int
    rule: str
    evidence: str


class Rules:
    """The sites of two runs, paired. face: site of the reference -> Face; back: site of the target -> site of the reference.

    doubtful: site of the reference -> sites of the target that fit it equally.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self.left, self.right = Sites(reference), Sites(target)
        self.face: dict[int, Face] = {}
        self.back: dict[int, int] = {}
        self.doubtful: dict[int, list[int]] = {}
        self._vocabulary = Vocabulary()
        self.ours, self.theirs = Features(self.left, self._vocabulary), Features(self.right, self._vocabulary)
        self._ranks = self._rank_table()
        self._classes_across: dict[int, int] = {}
        self._renumbered: set[int] = set()  # sites of the reference whose numbers mean something else across
        self._names_shared: bool | None = None  # before structure adds its pairs
        self._shared_names: set[str] = set()

    # ---- what every rule uses

    def pair(self, site: int, other: int, rule: str, evidence: str = "") -> None:
        before = self.back.get(other)
        if before is not None:
            self.part(before)
        self.face[site] = Face(other, rule, evidence)
        self.back[other] = site
        self.doubtful.pop(site, None)

    def part(self, site: int) -> None:
        """Undo a pair."""
        found = self.face.pop(site, None)
        if found is not None:
            del self.back[found.other]

    def free(self) -> tuple[list[int], list[int]]:
        """Sites without a partner, of either side."""
        return [s for s in range(len(self.left)) if s not in self.face], [s for s in range(len(self.right)) if s not in self.back]

    def settled(self) -> bool:
        """Has one side no site left that was asked for and has no partner?"""
        mine, theirs = self.free()
        return not any(map(self.left.selected, mine)) or not any(map(self.right.selected, theirs))

    def lane(self, sites: Sites, site: int) -> tuple[int, str]:
        """Calls of different ranks or phases never face each other here."""
        key = sites.keys[site]
        return (self._ranks.get(key.rank, key.rank) if sites is self.left else key.rank), key.phase

    def _rank_table(self) -> dict[int, int]:
        ours, theirs = ({k.rank for k in s.keys} for s in (self.left, self.right))
        return {ours.pop(): theirs.pop()} if len(ours) == 1 and len(theirs) == 1 else {}

    # ---- names

    def exact(self) -> None:
        """Every part of the key is equal."""
        for site, key in enumerate(self.left.keys):
            other = self.right.number.get(key)
            if other is not None:
                self.pair(site, other, EXACT, self._classes(site, other))

    def normalised(self) -> None:
        """The names are equal without wrappers and index styles; roots are matched by class or as the only ones left."""
        mine, theirs = self.free()
        if not mine or not theirs:
            return
        roots = match_roots(self.left.keys, self.right.keys)
        table: dict[Hashable, list[int]] = defaultdict(list)
        for other in theirs:
            table[self._normal(self.right, other, {})].append(other)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for site in mine:
            groups[self._normal(self.left, site, roots)].append(site)
        for name, sites in groups.items():
            matched, doubtful = self._within(sites, table.get(name, []))
            for site, other in matched:
                self.pair(site, other, NORMAL, self._classes(site, other))
            self.doubtful.update(doubtful)

    def _normal(self, sites: Sites, site: int, roots: dict[str, str]) -> Hashable:
        key = sites.keys[site]
        return (self.lane(sites, site), roots.get(key.root, key.root), normal_scope(key.scope), key.op, key.occurrence)

    def _within(self, mine: Sequence[int], others: Sequence[int]) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Pair the sites that share one normalised name: (pairs, doubtful).

        A wrapper and what it wraps normalise to one name: wrappers face wrappers, and only classes that agree decide between several.
        """
        if not others:
            return [], {}
        if len(mine) == 1 and len(others) == 1:
            return [(mine[0], others[0])], {}
        kinds = {s: self.left.first[s].op_type for s in mine}
        theirs = {o: self.right.first[o].op_type for o in others}
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

    def spelt_alike(self) -> None:
        """Equal without classes inside the names and without a prefix; then a typo or a word more in one component.

        The names of either side form a tree; equal components face each other, then what is left at one place and is alike.
        """
        mine, theirs = self.free()
        if not mine or not theirs:
            return
        roots = match_roots(self.left.keys, self.right.keys)
        ours = self._tree(self.left, roots)
        others = self._tree(self.right, {})
        for root in list(ours):
            if root in others:
                cut_left, cut_right = _prefixes(ours[root], others[root])
                if cut_left or cut_right:
                    how = f"{'.'.join(cut_left) or 'no prefix'} against {'.'.join(cut_right) or 'no prefix'}"
                    self._walk(_under(ours[root], cut_left), _under(others[root], cut_right), how)
                self._walk(ours[root], others[root])

    def _tree(self, sites: Sites, roots: dict[str, str]) -> dict[Hashable, _Node]:
        out: dict[Hashable, _Node] = {}
        for site, key in enumerate(sites.keys):
            node = out.setdefault((self.lane(sites, site), roots.get(key.root, key.root)), _Node())
            for part in (*plain_scope(key.scope, sites.first[site].op_type), *((key.op,) if key.op else ())):
                node = node.below.setdefault(part, _Node())
            node.sites.setdefault(key.occurrence, []).append(site)
        return out

    def _walk(self, left: _Node, right: _Node, how: str = "") -> None:
        todo = [(left, right, True, how)]
        while todo:
            a, b, plain, how = todo.pop()
            for occurrence in a.sites.keys() & b.sites.keys():
                mine = [s for s in a.sites[occurrence] if s not in self.face and s not in self._renumbered]
                theirs = [o for o in b.sites[occurrence] if o not in self.back]
                if len(mine) == 1 and len(theirs) == 1 and not self._contradict(mine[0], theirs[0]):
                    classes = self._classes(mine[0], theirs[0])
                    self.pair(mine[0], theirs[0], NORMAL if plain else SIMILAR, "; ".join(filter(None, (how, classes))))
            todo += [(a.below[p], b.below[p], plain, how) for p in a.below.keys() & b.below.keys()]
            for part, other in _alike([p for p in a.below if p not in b.below], [p for p in b.below if p not in a.below]):
                words = f"{part} is spelt {other}"
                todo.append((a.below[part], b.below[other], False, f"{how}, {words}" if how else words))

    def _contradict(self, site: int, other: int) -> bool:
        one, two = family(self.left.first[site].op_type), family(self.right.first[other].op_type)
        return bool(one and two and one != two)

    def _classes(self, site: int, other: int) -> str:
        one, two = self.left.first[site].op_type, self.right.first[other].op_type
        return "" if one == two else f"{one} against {two}"

    # ---- structure

    def shifted(self) -> None:
        """Shared numbers that contradict what they number: one call more or less in a list, and all behind it have other numbers.

        Only where the lists differ in length or classes contradict each other, and an alignment that keeps the order fits far
        better: then the numbers of that list, and all names below, are given up. Lists of one length keep their numbers: there,
        parameters in another place are a fault.
        """
        for mine, theirs in self._numbered():
            keyed = [(s, self.face[s].other) for s in mine if s in self.face and self.face[s].rule in (EXACT, NORMAL, SIMILAR)]
            clash = [(s, o) for s, o in keyed if self._contradict(s, o)]
            if not keyed or (len(mine) == len(theirs) and not clash):
                continue
            if len(mine) * len(theirs) > 1 << 20:
                continue
            a, b = self.ours.many(mine), self.theirs.many(theirs)
            blind = [f._replace(word=0) for f in a], [f._replace(word=0) for f in b]
            table = order.scores(*blind, self.word)
            found = order.align(table)
            at, to = {s: i for i, s in enumerate(mine)}, {o: j for j, o in enumerate(theirs)}
            before = {s: o for s, o in keyed if o in to}
            moved = [(mine[i], theirs[j]) for i, j, _ in found.pairs if before.get(mine[i], -1) != theirs[j]]
            if not moved:
                continue
            # What the numbers say is taken at its worth: pairs that cannot be count against them.
            worth = sum(max(float(table[at[s], to[o]]), -4.0) for s, o in before.items())
            gain = sum(s for _, _, s in found.pairs) - worth
            telling = sum(self._tells(s, o) for s, o in moved) - sum(self._tells(s, before[s]) for s, _ in moved if s in before)
            if gain < _MARGIN * max(len(moved) ** 0.5, 1.0) or (not clash and telling < len(moved) / 2):
                continue
            stay = {s: o for s, o in before.items() if (s, o) in {(mine[i], theirs[j]) for i, j, _ in found.pairs}}
            for site in mine:
                if site not in stay:
                    for one in (site, *self.left.below(site)):
                        self.part(one)
                        self._renumbered.add(one)
            for site, other in moved:
                self.pair(site, other, ORDER, f"the numbers contradict the content: {self.why(site, other)}")
                self._below(site, other)

    def _below(self, site: int, other: int) -> None:
        """Pair what two partners call by its name inside them."""
        todo = [(site, other)]
        while todo:
            a, b = todo.pop()
            ours = {self._inside(self.left, k, a): k for k in self.left.kids.get(a, ()) if k not in self.face}
            for o in self.right.kids.get(b, ()):
                k = ours.get(self._inside(self.right, o, b))
                if k is not None and k not in self.face and o not in self.back:
                    evidence = f"the same name inside {self.left.name(a)} and {self.right.name(b)}"
                    self.pair(k, o, ORDER, "; ".join(filter(None, (evidence, self._classes(k, o)))))
                    todo.append((k, o))

    def _inside(self, sites: Sites, site: int, parent: int) -> Hashable:
        """A site's name inside its parent."""
        key, above = sites.keys[site], sites.keys[parent].scope
        scope = key.scope[len(above) + 1 :] if above and key.scope.startswith(f"{above}.") else key.scope
        return self.lane(sites, site), normal_scope(scope), key.op, key.occurrence

    def _tells(self, site: int, other: int) -> bool:
        """Do the parameters of two sites say that they are one, elements or moments?"""
        a, b = self.ours[site], self.theirs[other]
        if a.held or b.held:
            if len(a.held & b.held) * 2 > max(len(a.held), len(b.held)):
                return True
            return bool(distance([a.moments], [b.moments])[0, 0] < _CLOSE_OUTPUT / 5)
        return bool(a.out_hash and a.out_hash == b.out_hash)

    def _numbered(self) -> list[tuple[list[int], list[int]]]:
        """Lists of siblings that differ by a number only, below paired parents: layers.0, layers.1, ..."""
        out = []
        for site, other in [(-1, -1), *((s, f.other) for s, f in list(self.face.items()))]:
            kids, others = self.left.kids.get(site, ()), self.right.kids.get(other, ())
            if not kids or not others or (len(kids) == 1 and len(others) == 1):
                continue
            ours, theirs = (
                _grouped((self._list(sites, k), k) for k in members) for sites, members in ((self.left, kids), (self.right, others))
            )
            for name, members in ours.items():
                across = Counter(self._list(self.right, self.face[k].other) for k in members if k in self.face)
                found = theirs.get(across.most_common(1)[0][0] if across else name, ())
                if found and len(members) + len(found) > 2:
                    out.append((members, found))
        return out

    def _list(self, sites: Sites, site: int) -> Hashable:
        """What the siblings in one numbered list have in common."""
        key = sites.keys[site]
        return self.lane(sites, site), starred(normal_scope(key.scope)), key.op, key.occurrence

    def structure(self) -> None:
        """Children of paired parents, in the order in which they ran; from the roots down."""
        todo = [(-1, -1), *((s, f.other) for s, f in self.face.items())]
        while todo:
            site, other = todo.pop()
            new = self._children(self.left.kids.get(site, ()), self.right.kids.get(other, ()))
            todo += [(s, self.face[s].other) for s in new]

    def _children(self, kids: Sequence[int], others: Sequence[int]) -> list[int]:
        if all(k in self.face for k in kids) or all(o in self.back for o in others):
            return []
        new: list[int] = []
        lanes = dict.fromkeys(self.lane(self.left, k) for k in kids)
        for lane in lanes:
            mine = [k for k in kids if self.lane(self.left, k) == lane]
            theirs = [o for o in others if self.lane(self.right, o) == lane]
            new += self._parallel(mine, theirs)
            new += self._between(mine, theirs, ORDER)
        return new

    def _parallel(self, kids: Sequence[int], others: Sequence[int]) -> list[int]:
        """Siblings that read the same tensors run in any order: equal parameters say which is which."""
        mine = [k for k in kids if k not in self.face]
        theirs = [o for o in others if o not in self.back]
        if len(mine) > _CROSSINGS or len(theirs) > _CROSSINGS:
            return []
        a, b = _alone(mine, self.ours), _alone(theirs, self.theirs)
        at, to = {k: i for i, k in enumerate(mine)}, {o: j for j, o in enumerate(theirs)}
        found = sorted((at[s], to[b[c]]) for c, s in a.items() if c in b)
        crossing = [(p, q) for k, p in enumerate(found) for q in found[k + 1 :] if q[1] < p[1]]
        if not crossing or not all(
            self.ours.inputs(mine[p[0]]) == self.ours.inputs(mine[q[0]]) != () and
            self.theirs.inputs(theirs[p[1]]) == self.theirs.inputs(theirs[q[1]]) for p, q in crossing
        ):  # fmt: skip
            return []
        involved = dict.fromkeys(p for both in crossing for p in both)
        for i, j in involved:
            self.pair(mine[i], theirs[j], CONTENT, f"{self.why(mine[i], theirs[j])}; run in another order")
        return [mine[i] for i, _ in involved]

    def _between(self, mine: Sequence[int], theirs: Sequence[int], rule: str) -> list[int]:
        """Align what lies between pairs that are already there, so far as these keep the order."""
        to = {o: j for j, o in enumerate(theirs)}
        there = [(i, to[self.face[k].other]) for i, k in enumerate(mine) if k in self.face and self.face[k].other in to]
        new: list[int] = []
        named = self._named()
        i0 = j0 = 0
        for i, j in [*order.longest_increasing(there), (len(mine), len(theirs))]:
            a = [k for k in mine[i0:i] if k not in self.face]
            b = [o for o in theirs[j0:j] if o not in self.back]
            if a and b:
                found = order.sequence(self._translated(a), self.theirs.many(b), self.word, named=named)
                for x, y, _ in found.pairs:
                    if not (named and self._elsewhere(a[x], b[y])):
                        self.pair(a[x], b[y], rule, self.why(a[x], b[y]))
                        new.append(a[x])
                for x, ys in found.doubtful:
                    self.doubtful[a[x]] = [b[y] for y in ys]
                if not named and not found.pairs and not found.doubtful and self._same_forms(a, b):
                    for x, y in zip(a, b):
                        self.pair(x, y, rule, ", ".join(filter(None, (self.why(x, y), "nothing else between partners"))))
                    new += a
            i0, j0 = i + 1, j + 1
        return new

    def _named(self) -> bool:
        """Do most calls share their names?"""
        if self._names_shared is None:
            self._names_shared = 2 * len(self.face) >= min(len(self.left), len(self.right)) and len(self.face) > 1
            keys = ((self.left.keys[s].scope, self.right.keys[f.other].scope) for s, f in self.face.items())
            self._shared_names = {starred(a) for a, b in keys if starred(a) == starred(b)}
        return self._names_shared

    def _elsewhere(self, site: int, other: int) -> bool:
        """Does the name of one of the two stand across under the same name in other layers? Then this one was left out, not renamed."""
        mine, theirs = starred(self.left.keys[site].scope), starred(self.right.keys[other].scope)
        if mine == theirs or likeness(self.left.word(site), self.right.word(other)) >= 0.5 or self._tells(site, other):
            return False
        return mine in self._shared_names or theirs in self._shared_names

    def _same_forms(self, mine: Sequence[int], theirs: Sequence[int]) -> bool:
        """Are these as many calls of the same forms, the outputs of several also near each other?"""
        if len(mine) != len(theirs):
            return False
        for x, y in zip(mine, theirs):
            a, b = self.ours[x], self.theirs[y]
            if not (a.out == b.out != 0 and a.shapes == b.shapes and a.container == b.container and self._fits(x, y)):
                return False
            if len(mine) > 1 and distance([a.out_moments], [b.out_moments])[0, 0] > _NEAR_OUTPUT:
                return False
        return True

    def _translated(self, sites: Sequence[int]) -> list[Feature]:
        """Features with the classes that, wherever a class was paired so far, stood across."""
        return [f._replace(kind=self._classes_across.get(f.kind, f.kind)) for f in self.ours.many(sites)]

    def learn(self) -> None:
        """Which class of the target stands for which of the reference, by the pairs there are."""
        across: dict[int, set[int]] = defaultdict(set)
        for site, face in self.face.items():
            a, b = self.ours[site].kind, self.theirs[face.other].kind
            if a and b:
                across[a].add(b)
        self._classes_across = {a: next(iter(b)) for a, b in across.items() if len(b) == 1}

    def leaves(self) -> None:
        """Where the modules are nested otherwise: the calls that call no other, in the order in which they ran."""
        mine, theirs = self.free()
        if not mine or not theirs:
            return
        ours, others = self.left.leaves(), self.right.leaves()
        for lane in dict.fromkeys(self.lane(self.left, s) for s in mine):
            self._between(
                [s for s in ours if self.lane(self.left, s) == lane], [o for o in others if self.lane(self.right, o) == lane], ORDER
            )

    def containers(self) -> None:
        """Modules whose insides face each other: the one that holds most of what faces what is inside, and little else."""
        weigh_left, weigh_right = _weights(self.left), _weights(self.right)
        common: dict[int, Counter[int]] = defaultdict(Counter)
        for site, face in self.face.items():
            if site in self.left.kids:
                continue
            above = _above(self.right, face.other)
            for one in _above(self.left, site):
                if one not in self.face:
                    common[one].update(above)
        for site in sorted(common, key=lambda s: weigh_left[s]):
            found = [
                (2 * n / (weigh_left[site] + weigh_right[o]), o)
                for o, n in common[site].items()
                if o not in self.back and self.lane(self.left, site) == self.lane(self.right, o) and not self._contradict(site, o)
            ]
            if not found or (best := max(found)[0]) < 0.5:
                continue
            top = [o for share, o in found if share == best]
            if len(top) > 1:  # a chain of modules with one child each
                alike = [order.scores([self.ours[site]], [self.theirs[o]], self.word)[0, 0] for o in top]
                top = [o for o, s in zip(top, alike) if s == max(alike)]
            if len(top) == 1:
                self.pair(site, top[0], ORDER, f"{best:.0%} of what they call faces each other")

    # ---- data flow and content

    def flow(self) -> None:
        """A site between paired sites: what it reads comes from partners, what it makes goes to partners."""
        mine, theirs = self.free()
        if not mine or not theirs:
            return
        ours, others = Flow(self.left), Flow(self.right)
        for _ in range(_ROUNDS):
            mine, theirs = self.free()
            partner, itself = {s: f.other for s, f in self.face.items()}, {o: o for o in self.back}
            a = _grouped((self._place(self.left, ours, s, partner), s) for s in mine)
            b = _grouped((self._place(self.right, others, o, itself), o) for o in theirs)
            new = 0
            for place, sites in a.items():
                if len(sites) == 1 and len(b.get(place, ())) == 1:
                    site, other = sites[0], b[place][0]
                    if order.scores([self.ours[site]], [self.theirs[other]], self.word)[0, 0] >= order.OUT:
                        self.pair(site, other, FLOW, ours.words(site, self.left))
                        new += 1
            if not new:
                return

    def _place(self, sites: Sites, flow: Flow, site: int, partner: dict[int, int]) -> Hashable:
        producers = tuple(partner.get(p, -1) if p is not None else None for p in flow.producers(site))
        consumers = frozenset(partner[c] for c in flow.consumers(site) if c in partner)
        known = any(p is not None and p >= 0 for p in producers)
        if not known or -1 in producers or not consumers:
            return None
        return self.lane(sites, site), producers, consumers

    def same_content(self) -> None:
        """Parameters that no other site has, then outputs that no other comes near in norm, sum of magnitudes and mean."""
        mine, theirs = self.free()
        if not mine or not theirs:
            return
        a, b = _alone(mine, self.ours), _alone(theirs, self.theirs)
        for content, site in a.items():
            other = b.get(content)
            if other is not None and self._fits(site, other) and self._same_parents(site, other):
                self.pair(site, other, CONTENT, self.why(site, other))
        self._outputs()

    def _fits(self, site: int, other: int) -> bool:
        return self.lane(self.left, site) == self.lane(self.right, other) and not self._contradict(site, other)

    def _same_parents(self, site: int, other: int) -> bool:
        """Are the parents partners, or is one of them without any?"""
        mine, theirs = self.left.parent[site], self.right.parent[other]
        paired = self.face.get(mine)
        return (paired is None and theirs not in self.back) or (paired is not None and paired.other == theirs) or mine == theirs == -1

    def _outputs(self) -> None:
        mine, theirs = self.free()
        table: dict[float, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for side, free, features in ((0, mine, self.ours), (1, theirs, self.theirs)):
            for s in free:
                f = features[s]
                if f.out_moments[0] >= _LEAST_COUNT:
                    table[f.out_moments[0]][side].append(s)
        for a, b in table.values():
            if not a or not b or len(a) * len(b) > 1 << 22:
                continue
            left, right = [self.ours[s].out_moments for s in a], [self.theirs[o].out_moments for o in b]
            apart = distance(left, right)
            for i, j in _clear_winners(apart):
                site, other = a[i], b[j]
                if self._fits(site, other) and self._same_parents(site, other) and order.scores(
                    [self.ours[site]], [self.theirs[other]], self.word
                )[0, 0] >= order.LEAST:  # fmt: skip
                    evidence = f"output norm {left[i][1]:.6g} against {right[j][1]:.6g}, the next is {_CLEARLY:.0f} times further or more"
                    self.pair(site, other, CONTENT, evidence)

    # ---- words

    def word(self, number: int) -> str:
        """The name behind `Feature.word`."""
        return self._vocabulary.spelt(number)

    def why(self, site: int, other: int) -> str:
        """What speaks for a pair, in words."""
        a, b = self.ours[site], self.theirs[other]
        words: list[str] = []
        if a.held and a.held == b.held:
            count = int(a.moments[0])
            words.append(f"parameters equal ({count} elements)")
        elif a.held & b.held:
            words.append(f"{len(a.held & b.held)} of {max(len(a.held), len(b.held))} parameters equal")
        elif distance([a.moments], [b.moments])[0, 0] < _CLOSE_OUTPUT:
            words.append(f"parameter norm {a.moments[1]:.6g} against {b.moments[1]:.6g}")
        elif a.shapes and a.shapes == b.shapes:
            words.append("same parameter shapes")
        if a.kind and a.kind == b.kind:
            words.append(f"same class {self.left.first[site].op_type or self.left.first[site].op}")
        elif a.family and a.family == b.family:
            words.append(f"{self.left.first[site].op_type} against {self.right.first[other].op_type}")
        if a.container and a.layout == b.layout:
            words.append("same structure")
        if a.out_hash and a.out_hash == b.out_hash:
            words.append("same output")
        elif a.out and a.out == b.out:
            words.append("same output shape")
        return ", ".join(words)


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
    """Leading components that only one side has (`model.`): cut where more names below agree then."""
    ways = {(x, y): _agreeing(_under(left, x), _under(right, y)) for x in _leading(left) for y in _leading(right)}
    best = max(ways, key=lambda w: (ways[w], -len(w[0]) - len(w[1])))
    return best if ways[best] > max(2 * ways[(), ()], 2) else ((), ())


def _leading(node: _Node) -> list[tuple[str, ...]]:
    one = [(part,) for part, n in node.below.items() if n.below and not part.isdigit()][:8]
    return [(), *one, *((a, b) for (a,) in one for b, n in node.below[a].below.items() if n.below and not b.isdigit())][:32]


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


def _grouped(keyed: Iterable[tuple[Hashable, int]]) -> dict[Hashable, list[int]]:
    """Sites by key; those whose key is None are left out."""
    out: dict[Hashable, list[int]] = defaultdict(list)
    for key, site in keyed:
        if key is not None:
            out[key].append(site)
    return out


def _alone(sites: Iterable[int], features: Features) -> dict[Hashable, int]:
    """Content of the parameters -> the site, where only one has it."""
    return {c: found[0] for c, found in _grouped((features[s].content or None, s) for s in sites).items() if len(found) == 1}


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


def _clear_winners(apart: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[tuple[int, int]]:
    """Rows and columns that are each other's nearest by far."""
    out = []
    for i in range(apart.shape[0]):
        j = int(apart[i].argmin())
        best = apart[i, j]
        if best < _CLOSE_OUTPUT and (apart[i] <= best * _CLEARLY + 1e-9).sum() == 1 and (apart[:, j] <= best * _CLEARLY + 1e-9).sum() == 1:
            out.append((i, j))
    return out
