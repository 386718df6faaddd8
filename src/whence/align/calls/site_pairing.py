"""The sites of two runs while rules bring them face to face: who has a partner, and what speaks for
a pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import NamedTuple

from whence.align.call_sites import Sites
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


class Face(NamedTuple):
    """The site across, with the rule that said so and its evidence in words."""

    other: int
    rule: str
    evidence: str


class SitePairing:
    """The sites of two runs, paired. face: site of the reference -> Face; back: site of the target
    -> site of the reference.

    doubtful: site of the reference -> sites of the target that fit it equally. renumbered: sites of
    the reference whose numbers mean something else across. classes_across: classes that, wherever a
    class was paired so far, stood across.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self.left, self.right = Sites(reference), Sites(target)
        self.face: dict[int, Face] = {}
        self.back: dict[int, int] = {}
        self.doubtful: dict[int, list[int]] = {}
        self._vocabulary = Vocabulary()
        self.ours, self.theirs = (
            Features(self.left, self._vocabulary),
            Features(self.right, self._vocabulary),
        )
        self._ranks = self._rank_table()
        self.classes_across: dict[int, int] = {}
        # sites of the reference whose numbers mean something else across
        self.renumbered: set[int] = set()
        # sites of the reference that were aligned as part of a sequence, whatever their counters
        self.counted: set[int] = set()

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

    @cached_property
    def shared_names(self) -> frozenset[str] | None:
        """Names, with stars for numbers, that partners share, None unless most calls share theirs.
        As when first asked: before structure adds its pairs.
        """
        if 2 * len(self.face) < min(len(self.left), len(self.right)) or len(self.face) < 2:
            return None
        keys = (
            (starred(self.left.keys[s].scope), starred(self.right.keys[f.other].scope))
            for s, f in self.face.items()
        )
        return frozenset(a for a, b in keys if a == b)

    def free(self) -> tuple[list[int], list[int]]:
        """Sites without a partner, of either side."""
        return [s for s in range(len(self.left)) if s not in self.face], [
            s for s in range(len(self.right)) if s not in self.back
        ]

    def settled(self) -> bool:
        """Has one side no site left that was asked for and has no partner?"""
        mine, theirs = self.free()
        return not any(map(self.left.selected, mine)) or not any(map(self.right.selected, theirs))

    def lane(self, sites: Sites, site: int) -> tuple[int, str]:
        """Calls of different ranks or phases are never paired here."""
        key = sites.keys[site]
        return (self._ranks.get(key.rank, key.rank) if sites is self.left else key.rank), key.phase

    def _rank_table(self) -> dict[int, int]:
        ours, theirs = ({k.rank for k in s.keys} for s in (self.left, self.right))
        return {ours.pop(): theirs.pop()} if len(ours) == 1 and len(theirs) == 1 else {}

    def contradict(self, site: int, other: int) -> bool:
        one, two = family(self.left.first[site].op_type), family(self.right.first[other].op_type)
        return bool(one and two and one != two)

    def classes(self, site: int, other: int) -> str:
        one, two = self.left.first[site].op_type, self.right.first[other].op_type
        return "" if one == two else f"{one} against {two}"

    def tells(self, site: int, other: int) -> bool:
        """Do the parameters of two sites say that they are one, elements or moments?"""
        a, b = self.ours[site], self.theirs[other]
        if a.held or b.held:
            if len(a.held & b.held) * 2 > max(len(a.held), len(b.held)):
                return True
            return bool(distance([a.moments], [b.moments])[0, 0] < CLOSE_OUTPUT / 5)
        return bool(a.out_hash and a.out_hash == b.out_hash)

    def fits(self, site: int, other: int) -> bool:
        return self.lane(self.left, site) == self.lane(self.right, other) and not self.contradict(
            site, other
        )

    def same_parents(self, site: int, other: int) -> bool:
        """Are the parents partners, or is one of them without any?"""
        mine, theirs = self.left.parent[site], self.right.parent[other]
        paired = self.face.get(mine)
        return (
            (paired is None and theirs not in self.back)
            or (paired is not None and paired.other == theirs)
            or mine == theirs == -1
        )

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
            words.append(
                f"{len(a.held & b.held)} of {max(len(a.held), len(b.held))} parameters equal"
            )
        elif distance([a.moments], [b.moments])[0, 0] < CLOSE_OUTPUT:
            words.append(f"parameter norm {a.moments[1]:.6g} against {b.moments[1]:.6g}")
        elif a.shapes and a.shapes == b.shapes:
            words.append("same parameter shapes")
        if a.kind and a.kind == b.kind:
            words.append(f"same class {self.left.first[site].op_type or self.left.first[site].op}")
        elif a.family and a.family == b.family:
            words.append(
                f"{self.left.first[site].op_type} against {self.right.first[other].op_type}"
            )
        if a.container and a.layout == b.layout:
            words.append("same structure")
        if a.out_hash and a.out_hash == b.out_hash:
            words.append("same output")
        elif a.out and a.out == b.out:
            words.append("same output shape")
        return ", ".join(words)


def grouped(keyed: Iterable[tuple[Hashable, int]]) -> dict[Hashable, list[int]]:
    """Sites by key; those whose key is None are left out."""
    out: dict[Hashable, list[int]] = defaultdict(list)
    for key, site in keyed:
        if key is not None:
            out[key].append(site)
    return out


def alone(sites: Iterable[int], features: Features) -> dict[Hashable, int]:
    """Content of the parameters -> the site, where only one has it."""
    return {
        c: found[0]
        for c, found in grouped((features[s].content or None, s) for s in sites).items()
        if len(found) == 1
    }
