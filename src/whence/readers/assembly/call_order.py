"""Infers the order in which operators ran, for dumps that do not state it, from the content of
their tensors: producers come before readers.
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
    """Returns the operators sorted so that each follows the producers of its inputs; `first`
    decides ties and cycles (in-place updates).

    reads, makes: hashable stand-ins for the content of its inputs and outputs. If several operators
    output the same content, its producer is the first that does not also read it; those that only
    pass it on (views, copies, adding zero) come next, before all other readers.
    """
    place = {operator: k for k, operator in enumerate(first)}
    makers: dict[Hashable, list[T]] = defaultdict(list)
    for operator in first:
        for content in dict.fromkeys(makes.get(operator, ())):
            makers[content].append(operator)
    sources = {
        content: _sources(content, candidates, reads, makers)
        for content, candidates in makers.items()
    }
    waiting: dict[T, int] = dict.fromkeys(first, 0)
    readers: dict[T, list[T]] = defaultdict(list)
    for operator in first:
        read = [content for content in dict.fromkeys(reads.get(operator, ())) if content in sources]
        producers = {
            maker
            for content in read
            for maker in sources[content][: 1 if operator in makers[content] else None]
        } - {operator}
        waiting[operator] = len(producers)
        for maker in producers:
            readers[maker].append(operator)
    ready: list[Any] = [(place[operator], operator) for operator in first if not waiting[operator]]
    heapq.heapify(ready)
    pending = list(reversed(first))
    out: dict[T, None] = {}
    while len(out) < len(first):
        if ready:
            operator = heapq.heappop(ready)[1]
        else:
            operator = pending.pop()
        if operator in out:
            continue
        out[operator] = None
        for reader in readers[operator]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (place[reader], reader))
    return list(out)


def _sources(
    content: Hashable,
    candidates: Sequence[T],
    reads: Mapping[T, Sequence[Hashable]],
    makers: Mapping[Hashable, Sequence[T]],
) -> list[T]:
    """Returns the operators that output a content: its producer, then those that only
    pass it on.
    """
    maker = next(
        (operator for operator in candidates if content not in reads.get(operator, ())),
        candidates[0],
    )
    return [
        maker,
        *(
            operator
            for operator in candidates
            if operator != maker
            and {c for c in reads.get(operator, ()) if c in makers} == {content}
        ),
    ]


def parents(scopes: Sequence[str]) -> list[int]:
    """Returns the parents of calls, which are given by dotted scope in the order in which they
    ended: the position of the parent, -1 where there is none.

    A call is the parent of those that ended right before it and whose scope is below its own; the
    empty scope contains all.
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
    """Returns positions in the order in which the calls began: parents before children, siblings in
    the order in which they ended.
    """
    below: dict[int, list[int]] = {}
    for place, above in enumerate(parent):
        below.setdefault(above, []).append(place)
    todo = list(reversed(below.get(-1, [])))
    while todo:
        place = todo.pop()
        yield place
        todo += reversed(below.get(place, []))
