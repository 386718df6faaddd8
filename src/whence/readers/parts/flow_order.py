"""The order in which operators ran, of dumps that do not say it: producers before readers, by what their tensors hold."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)


def ordered(first: Sequence[T], reads: Mapping[T, Sequence[Hashable]], makes: Mapping[T, Sequence[Hashable]]) -> list[T]:
    """The operators so that each comes behind those that make what it reads; among equals in the order given.

    reads, makes: what stands for the content of its tensors. What several make, the first of them made. Where they wait for each other
    in a circle (in-place updates, copies), the order given decides.
    """
    place = {one: k for k, one in enumerate(first)}
    makers: dict[Hashable, list[T]] = defaultdict(list)
    for one in first:
        for content in dict.fromkeys(makes.get(one, ())):
            makers[content].append(one)
    waiting: dict[T, int] = dict.fromkeys(first, 0)
    readers: dict[T, list[T]] = defaultdict(list)
    for one in first:
        before = {found[0] for content in reads.get(one, ()) if (found := makers.get(content)) and one not in found}
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
