"""Which call made which, where a dump only says in what order they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def parents(scopes: Sequence[str]) -> list[int]:
    """For calls in the order in which they ended, by dotted scope: the place of the one each is part of, -1 where there is none.

    A call holds those that ended right before it whose scope lies below its own; the empty scope holds all.
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
    """The places in the order in which the calls began: what holds others before them, siblings as they ended."""
    below: dict[int, list[int]] = {}
    for place, above in enumerate(parent):
        below.setdefault(above, []).append(place)
    todo = list(reversed(below.get(-1, [])))
    while todo:
        place = todo.pop()
        yield place
        todo += reversed(below.get(place, []))
