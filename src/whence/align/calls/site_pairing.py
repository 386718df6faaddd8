"""The sites of two runs while rules pair them: their partners and the evidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from whence.align.call_sites import Sites
from whence.align.calls import call_sequences
from whence.align.calls.fingerprints import Features, Vocabulary, distance
from whence.align.module_names import family, starred
from whence.records import Run

EXACT, NORMAL, SIMILAR, ORDER, FLOW, CONTENT = (
    "exact key",
    "normalised name",
    "similar name",
    "order",
    "data flow",
    "content",
)
CLOSE_OUTPUT = 1e-3


class Partner(NamedTuple):
    """The paired site of the target, the rule that paired it, and the evidence in words."""

    site: int
    rule: str
    evidence: str


class SitePairing:
    """The pairing of the sites of two runs. partners: by site of the reference. back: site of the
    target -> site of the reference. doubtful: site of the reference -> sites of the target that fit
    it equally well.

    classes_across: class of the reference -> the only class with which it has been paired so far.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self.reference, self.target = Sites(reference), Sites(target)
        self.partners: dict[int, Partner] = {}
        self.back: dict[int, int] = {}
        self.doubtful: dict[int, list[int]] = {}
        self._vocabulary = Vocabulary()
        self.features, self.target_features = (
            Features(self.reference, self._vocabulary),
            Features(self.target, self._vocabulary),
        )
        self._ranks = self._rank_table()
        self.classes_across: dict[int, int] = {}
        # sites of the reference whose numbers have another meaning in the target
        self.renumbered: set[int] = set()
        # sites of the reference that were aligned as part of a sequence, regardless of their
        # counters
        self.counted: set[int] = set()

    def pair(self, site: int, partner: int, rule: str, evidence: str = "") -> None:
        former = self.back.get(partner)
        if former is not None:
            self.part(former)
        self.partners[site] = Partner(partner, rule, evidence)
        self.back[partner] = site
        self.doubtful.pop(site, None)

    def part(self, site: int) -> None:
        """Undo a pair."""
        partner = self.partners.pop(site, None)
        if partner is not None:
            del self.back[partner.site]

    @cached_property
    def shared_names(self) -> frozenset[str] | None:
        """Starred names that paired sites have in common, before structure adds pairs; None if
        fewer than half of the sites are paired.
        """
        if (
            2 * len(self.partners) < min(len(self.reference), len(self.target))
            or len(self.partners) < 2
        ):
            return None
        keys = (
            (starred(self.reference.keys[s].scope), starred(self.target.keys[f.site].scope))
            for s, f in self.partners.items()
        )
        return frozenset(a for a, b in keys if a == b)

    def free(self) -> tuple[list[int], list[int]]:
        """Sites without a partner: (of the reference, of the target)."""
        return [s for s in range(len(self.reference)) if s not in self.partners], [
            s for s in range(len(self.target)) if s not in self.back
        ]

    def settled(self) -> bool:
        """Whether every selected site of at least one side has a partner."""
        free, free_target = self.free()
        return not any(map(self.reference.selected, free)) or not any(
            map(self.target.selected, free_target)
        )

    def lane(self, sites: Sites, site: int) -> tuple[int, str]:
        """The (rank, phase) of a site; sites of different lanes are never paired here."""
        key = sites.keys[site]
        return (
            self._ranks.get(key.rank, key.rank) if sites is self.reference else key.rank
        ), key.phase

    def by_lane(
        self, sites: Sequence[int], others: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The sites of both sides that may be paired, one pair of lists for each lane of the
        reference.
        """
        lane_of = {s: self.lane(self.reference, s) for s in sites}
        across = {o: self.lane(self.target, o) for o in others}
        for lane in dict.fromkeys(lane_of.values()):
            yield [s for s in sites if lane_of[s] == lane], [o for o in others if across[o] == lane]

    def parents(self) -> list[tuple[int, int]]:
        """Pairs of sites whose children may be paired; the first, (-1, -1), stands above the
        roots.
        """
        return [(-1, -1), *((s, partner.site) for s, partner in self.partners.items())]

    def score(self, site: int, partner: int) -> float:
        """How well the features of two sites fit, by `call_sequences.scores`."""
        a, b = [self.features[site]], [self.target_features[partner]]
        return float(call_sequences.scores(a, b, self.word)[0, 0])

    def _rank_table(self) -> dict[int, int]:
        ranks, target_ranks = ({k.rank for k in s.keys} for s in (self.reference, self.target))
        return (
            {ranks.pop(): target_ranks.pop()} if len(ranks) == 1 and len(target_ranks) == 1 else {}
        )

    def contradict(self, site: int, partner: int) -> bool:
        a, b = (
            family(self.reference.first[site].op_type),
            family(self.target.first[partner].op_type),
        )
        return bool(a and b and a != b)

    def classes(self, site: int, partner: int) -> str:
        a, b = self.reference.first[site].op_type, self.target.first[partner].op_type
        return "" if a == b else f"{a} against {b}"

    def tells(self, site: int, partner: int) -> bool:
        """Whether the parameters of two sites (elements or moments) show that they correspond;
        without parameters, whether their outputs are equal.
        """
        a, b = self.features[site], self.target_features[partner]
        if a.elements or b.elements:
            if len(a.elements & b.elements) * 2 > max(len(a.elements), len(b.elements)):
                return True
            return bool(distance([a.moments], [b.moments])[0, 0] < CLOSE_OUTPUT / 5)
        return bool(a.out_hash and a.out_hash == b.out_hash)

    def fits(self, site: int, partner: int) -> bool:
        return self.lane(self.reference, site) == self.lane(
            self.target, partner
        ) and not self.contradict(site, partner)

    def same_parents(self, site: int, partner: int) -> bool:
        """Whether the innermost paired containers around two sites are paired with each other, or
        both have none around them.
        """
        around, around_target = self.reference.parent[site], self.target.parent[partner]
        while around != -1 and around not in self.partners:
            around = self.reference.parent[around]
        while around_target != -1 and around_target not in self.back:
            around_target = self.target.parent[around_target]
        return (around if around == -1 else self.partners[around].site) == around_target

    def word(self, number: int) -> str:
        """The name behind the id `Feature.word`."""
        return self._vocabulary.spelt(number)

    def why(self, site: int, partner: int) -> str:
        """The evidence for a pair, in words."""
        a, b = self.features[site], self.target_features[partner]
        words: list[str] = []
        if a.elements and a.elements == b.elements:
            count = int(a.moments[0])
            words.append(f"parameters equal ({count} elements)")
        elif a.elements & b.elements:
            count = max(len(a.elements), len(b.elements))
            words.append(f"{len(a.elements & b.elements)} of {count} parameters equal")
        elif distance([a.moments], [b.moments])[0, 0] < CLOSE_OUTPUT:
            words.append(f"parameter norm {a.moments[1]:.6g} against {b.moments[1]:.6g}")
        elif a.shapes and a.shapes == b.shapes:
            words.append("same parameter shapes")
        if a.kind and a.kind == b.kind:
            words.append(
                f"same class {self.reference.first[site].op_type or self.reference.first[site].op}"
            )
        elif a.family and a.family == b.family:
            words.append(
                f"{self.reference.first[site].op_type} against {self.target.first[partner].op_type}"
            )
        if a.container and a.layout == b.layout:
            words.append("same structure")
        if a.out_hash and a.out_hash == b.out_hash:
            words.append("same output")
        elif a.out and a.out == b.out:
            words.append("same output shape")
        return ", ".join(words)


def grouped(keyed: Iterable[tuple[Hashable, int]]) -> dict[Hashable, list[int]]:
    """Sites grouped by key; those whose key is None are left out."""
    out: dict[Hashable, list[int]] = defaultdict(list)
    for key, site in keyed:
        if key is not None:
            out[key].append(site)
    return out


def unique_contents(sites: Iterable[int], features: Features) -> dict[Hashable, int]:
    """Contents of parameters that only one site has -> that site."""
    return {
        c: holders[0]
        for c, holders in grouped((features[s].content or None, s) for s in sites).items()
        if len(holders) == 1
    }
