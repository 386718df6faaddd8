"""Splits a name that is a concatenation of several names.

Compilers name a fused operator `MulCast_9` when it fuses `Mul` and `Cast_9`. Taking the longest
matching name repeatedly fails where one name is a prefix of another (`Add`, `Add_1`, `Add_1_0`):
every split is tried, and the graph decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

_WAYS = 1000  # of cutting one name; the rest is not looked at
_STEPS = 50_000  # of the search
_LEAST = 2  # members of a fusion


def segments(
    name: str, among: Collection[str], feeds: Callable[[str, str], bool], *, max_ways: int = _WAYS
) -> tuple[str, ...]:
    """Returns the names of `among` that `name` consists of, in order; () when it consists of none,
    of one only, or of several in splits that fit equally well.

    feeds: whether the second name reads an output of the first. A split fits when its members are
    connected; it fits best when each feeds the next.
    """
    lengths = sorted({len(n) for n in among if n and len(n) < len(name)}, reverse=True)
    names = among if isinstance(among, (set, frozenset, dict)) else set(among)
    ways: list[tuple[str, ...]] = []
    stack: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    ends = _ends(name, names, lengths)
    steps = 0
    while stack and len(ways) < max_ways and steps < _STEPS:
        steps += 1
        place, members = stack.pop()
        if place == len(name):
            ways.append(members)
            continue
        for length in reversed(lengths):  # the longest is looked at first
            part = name[place : place + length]
            end = place + length
            if end in ends and len(part) == length and part in names and part not in members:
                stack.append((end, (*members, part)))
    chained = [
        way
        for way in ways
        if len(way) >= _LEAST and all(feeds(a, b) for a, b in itertools.pairwise(way))
    ]
    joined = chained or [way for way in ways if len(way) >= _LEAST and _connected(way, feeds)]
    return joined[0] if len(joined) == 1 else ()


def _ends(name: str, names: Collection[str], lengths: list[int]) -> set[int]:
    """Returns the positions from which the end of the name can be reached."""
    good = {len(name)}
    for place in range(len(name) - 1, -1, -1):
        if any(
            place + length in good and name[place : place + length] in names for length in lengths
        ):
            good.add(place)
    return good


def _connected(way: tuple[str, ...], feeds: Callable[[str, str], bool]) -> bool:
    """Whether the members form a connected graph."""
    reached, todo = {way[0]}, [way[0]]
    while todo:
        name = todo.pop()
        near = [b for b in way if b not in reached and (feeds(name, b) or feeds(b, name))]
        reached.update(near)
        todo += near
    return len(reached) == len(way)
