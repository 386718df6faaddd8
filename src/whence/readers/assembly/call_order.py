"""The order in which operators ran, of dumps that do not say it: producers before readers, by what
their tensors hold.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)


def ordered(
    first: Sequence[T], reads: Mapping[T, Sequence[Hashable]], makes: Mapping[T, Sequence[Hashable]]
) -> list[T]:
    """The operators so that each comes behind those that make what it reads; among equals in the
    order given.

    reads, makes: what stands for the content of its tensors. What several make, the first of them
    made that does not read it too; those that only hand it on (views, copies, a sum with nothing)
    come next, before all others that read it. Where they wait for each other in a circle (in-place
    updates), the order given decides.
    """
    place = {one: k for k, one in enumerate(first)}
    makers: dict[Hashable, list[T]] = defaultdict(list)
    for one in first:
        for content in dict.fromkeys(makes.get(one, ())):
            makers[content].append(one)
    sources = {
        content: _sources(content, found, reads, makers) for content, found in makers.items()
    }
    waiting: dict[T, int] = dict.fromkeys(first, 0)
    readers: dict[T, list[T]] = defaultdict(list)
    for one in first:
        read = [content for content in dict.fromkeys(reads.get(one, ())) if content in sources]
        before = {
            maker
            for content in read
            for maker in sources[content][: 1 if one in makers[content] else None]
        } - {one}
        waiting[one] = len(before)
        for maker in before:
            readers[maker].append(one)
    ready: list[Any] = [(place[one], one) for one in first if not waiting[one]]
    heapq.heapify(ready)
    rest = list(reversed(first))
    out: dict[T, None] = {}
    while len(out) < len(first):
        if ready:
            one = heapq.heappop(ready)[1]
        else:
            one = rest.pop()
        if one in out:
            continue
        out[one] = None
        for reader in readers[one]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (place[reader], reader))
    return list(out)


def _sources(
    content: Hashable,
    found: Sequence[T],
    reads: Mapping[T, Sequence[Hashable]],
    makers: Mapping[Hashable, Sequence[T]],
) -> list[T]:
    """Of those that make a content: the one that made it, and those that only hand it on."""
    maker = next((one for one in found if content not in reads.get(one, ())), found[0])
    return [
        maker,
        *(
            one
            for one in found
            if one != maker and {c for c in reads.get(one, ()) if c in makers} == {content}
        ),
    ]


def parents(scopes: Sequence[str]) -> list[int]:
    """For calls in the order in which they ended, by dotted scope: the place of the one each is
    part of, -1 where there is none.

    A call holds those that ended right before it whose scope lies below its own; the empty scope
    holds all.
    """
    out = [-1] * len(scopes)
    open_: list[int] = []
    for place, scope in enumerate(scopes):
        while open_ and _below(scopes[open_[-1]], scope):
            out[open_.pop()] = place
        open_.append(place)
    return out


def _below(scope: str, above: str) -> bool:
    return scope.startswith(f"{above}.") if above else bool(scope)


def begun(parent: Sequence[int]) -> Iterator[int]:
    """The places in the order in which the calls began: what holds others before them, siblings as
    they ended.
    """
    below: dict[int, list[int]] = {}
    for place, above in enumerate(parent):
        below.setdefault(above, []).append(place)
    todo = list(reversed(below.get(-1, [])))
    while todo:
        place = todo.pop()
        yield place
        todo += reversed(below.get(place, []))
