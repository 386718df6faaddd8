"""Calls beside a root: what a program runs behind the model by itself, as serving engines do with the scores of the last tokens."""

from __future__ import annotations

from collections.abc import Iterable

from whence.records import Call


def followers(calls: Iterable[Call]) -> dict[int, int]:
    """Outermost calls of a module of a root -> the root's own call that they follow, by id.

    A module that is called before the root ever was (an encoder) is a root of its own.
    """
    out: dict[int, int] = {}
    latest: dict[tuple[object, ...], int] = {}
    ahead: set[tuple[object, ...]] = set()
    for call in sorted((c for c in calls if c.parent == -1), key=lambda c: c.order):
        root = call.rank, call.root, call.phase
        if not call.scope:
            latest[root] = call.id
        elif root not in latest:
            ahead.add((*root, call.scope))
        elif (*root, call.scope) not in ahead:
            out[call.id] = latest[root]
    return out
