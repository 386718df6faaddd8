"""The calls of a run by site: calls that differ only by step and micro step are one site."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from whence import dtypes
from whence.dtypes import Array
from whence.records import Call, Run, in_order
from whence.records.marks import Mark, has_mark

MATCHES = ("auto", "exact", "names", "order")
"""How calls are paired: by all rules, by equal names, by similar names, or by order."""


class SiteKey(NamedTuple):
    """The fields that all calls of a site share."""

    rank: int
    root: str
    phase: str
    scope: str
    op: str
    occurrence: int


def selected(calls: Iterable[Call]) -> list[Call]:
    """The calls that the capture was asked for; other calls are in a run only to complete the
    tree.
    """
    return [c for c in calls if not has_mark(c, Mark.NOT_SELECTED)]


def step_of(call: Call) -> tuple[int, str, int, int]:
    """The call of a root that this call belongs to: (rank, root, step, micro step)."""
    return call.rank, call.root, call.step, call.micro


def same_step(a: Call, b: Call) -> bool:
    """Whether two calls belong to one call of a root."""
    return step_of(a) == step_of(b)


def match_roots(
    reference: Iterable[SiteKey | Call], target: Iterable[SiteKey | Call]
) -> dict[str, str]:
    """Names of the reference's roots -> names of the corresponding roots of the target."""
    names, target_names = (
        dict.fromkeys(c.root for c in reference),
        dict.fromkeys(c.root for c in target),
    )
    table = {name: name for name in names if name in target_names}
    free = [n for n in names if n not in table]
    target_free = [n for n in target_names if n not in table]
    if len(free) == 1 and len(target_free) == 1:
        table[free[0]] = target_free[0]
    return table


def facing_lanes(
    calls: Iterable[Call], others: Iterable[Call]
) -> list[tuple[list[Call], list[Call]]]:
    """Groups of calls of both runs that may be paired, each in execution order: those of one rank,
    root, step, micro step and phase.
    """
    sides = list(calls), list(others)
    ranks = [len({c.rank for c in side}) for side in sides]
    names: tuple[dict[str, str], dict[str, str]] = (match_roots(*sides), {})
    lanes: dict[Hashable, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for number, side in enumerate(sides):
        for call in in_order(side):
            rank = 0 if ranks == [1, 1] else call.rank
            root = names[number].get(call.root, call.root)
            lanes[rank, root, call.step, call.micro, call.phase][number].append(call)
    return list(lanes.values())


class LastWriters:
    """Finds the last call that wrote a tensor before another call reads it.

    written: (call, key of the content that it wrote).
    """

    def __init__(self, written: Iterable[tuple[Call, Hashable]]) -> None:
        self._writers: dict[Hashable, list[Call]] = defaultdict(list)
        for call, content in sorted(written, key=lambda item: _when(item[0])):
            self._writers[content].append(call)

    def before(self, reader: Call, content: Hashable) -> Call | None:
        """The last call that wrote this content before `reader` ran; None without one."""
        writers = self._writers.get(content, ())
        place = bisect.bisect_left(writers, _when(reader), key=_when)
        return writers[place - 1] if place else None


def _when(call: Call) -> tuple[int, int, int]:
    return call.step, call.micro, call.order


class Sites:
    """All sites of a run, numbered in the order in which they were first called.

    keys, first: key and first call of each site. moments: for each site, (step, micro) -> its
    selected calls then. selected: whether a site has selected calls. parent: site of the enclosing
    call, -1 for a root. kids: by site, the sites below in execution order; kids[-1] are the roots.
    A site that the first steps did not call comes after the site that ran before it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.calls: Sequence[Call] = (
            run.calls if isinstance(run.calls, (list, tuple)) else list(run.calls)
        )
        number: dict[SiteKey, int] = {}
        site_of = [-1] * len(self.calls)
        self.keys: list[SiteKey] = []
        self.first: list[Call] = []
        self.moments: list[dict[tuple[int, int], list[int]]] = []
        for call in in_order(self.calls):
            key = SiteKey(call.rank, call.root, call.phase, call.scope, call.op, call.occurrence)
            site = number.setdefault(key, len(self.keys))
            if site == len(self.keys):
                self.keys.append(key)
                self.first.append(call)
                self.moments.append({})
            site_of[call.id] = site
            if not has_mark(call, Mark.NOT_SELECTED):
                self.moments[site].setdefault((call.step, call.micro), []).append(call.id)
        self.site_of = site_of
        self.number = number
        self.parent = [site_of[c.parent] if c.parent >= 0 else -1 for c in self.first]
        self.kids = self._order()

    def _order(self) -> dict[int, list[int]]:
        first: dict[int, int] = {}  # by parent site
        next_sibling: dict[int, int] = {}  # site -> the next sibling
        last: dict[int, int] = {}  # by parent call: the child that ran last
        placed: set[int] = set()
        for call in in_order(self.calls):
            site, previous = self.site_of[call.id], last.get(call.parent, -1)
            if site not in placed and self.first[site].id == call.id:
                placed.add(site)
                parent = self.parent[site]
                if previous < 0 or self.parent[previous] != parent:
                    if parent in first:
                        next_sibling[site] = first[parent]
                    first[parent] = site
                else:
                    if previous in next_sibling:
                        next_sibling[site] = next_sibling[previous]
                    next_sibling[previous] = site
            last[call.parent] = site
        kids: dict[int, list[int]] = {}
        for parent, child in first.items():
            siblings = kids[parent] = [child]
            while siblings[-1] in next_sibling:
                siblings.append(next_sibling[siblings[-1]])
        return kids

    def leaves(self) -> list[int]:
        """Sites that call no other site, in execution order."""
        out: list[int] = []
        todo = list(reversed(self.kids.get(-1, ())))
        while todo:
            site = todo.pop()
            kids = self.kids.get(site)
            if kids:
                todo += reversed(kids)
            else:
                out.append(site)
        return out

    def __len__(self) -> int:
        return len(self.keys)

    def selected(self, site: int) -> bool:
        return bool(self.moments[site])

    def name(self, site: int) -> str:
        """The name of a site as used in sentences."""
        key = self.keys[site]
        words = ".".join(part for part in (key.scope, key.op) if part) or key.root
        return f"{words} #{key.occurrence}" if key.occurrence else words

    def word(self, site: int) -> str:
        """The last component of its name."""
        key = self.keys[site]
        return key.op or key.scope.rpartition(".")[2] or key.root

    def below(self, site: int) -> list[int]:
        """All sites below this one, in no particular order."""
        out: list[int] = []
        todo = list(self.kids.get(site, ()))
        while todo:
            current = todo.pop()
            out.append(current)
            todo += self.kids.get(current, ())
        return out


def coarser_input(sides: Sequence[tuple[Run, Sequence[Call]]]) -> str:
    """The coarsest floating dtype that only one side's inputs have; "" if both sides have the same
    dtypes.
    """
    names_by_side = [
        {run.records[r.record].dtype for call in calls for r in call.slots("input")}
        for run, calls in sides
    ]
    names = filter(dtypes.is_floating, set.symmetric_difference(*names_by_side))
    return max(names, key=dtypes.unit_roundoff, default="")


def coarsened(array: Array, coarse: str) -> Array:
    """Floating elements rounded to this dtype; the array as it is for "" and for other elements."""
    is_rounded = coarse and dtypes.of(array).is_floating
    return array.astype(dtypes.named(coarse).numpy) if is_rounded else array
