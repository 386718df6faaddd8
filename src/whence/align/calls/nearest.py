"""What a call without a partner comes nearest to: for a person who writes a map, or wonders why
nothing was compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.align.calls import call_sequences
from whence.align.calls.site_pairing import SitePairing
from whence.align.module_names import likeness, normal_scope
from whence.records import Run
from whence.results import Nearest, Plan

_MOST = 20  # sites asked for, each against at most _ACROSS of the other run
_ACROSS = 20_000
_CLOSER = 200  # of these are compared name by name
_PATH = 2.0  # what a path that is equal word by word is worth


def nearest(reference: Run, target: Run, plan: Plan, wanted: Sequence[int]) -> tuple[Nearest, ...]:
    """For up to 20 calls of the reference, one per module: the free call of the target that comes
    nearest, if any comes near.

    wanted: ids of calls of the reference without a partner. Names, classes, shapes, parameters and
    outputs count; reads no elements.
    """
    if not wanted:
        return ()
    at = SitePairing(reference, target)
    paired = {p.target for p in plan.pairs}
    free = [
        o
        for o in range(len(at.right))
        if not any(c in paired for calls in at.right.moments[o].values() for c in calls)
    ]
    free = [o for o in free if at.right.selected(o)][:_ACROSS]
    if not free:
        return ()
    across = at.theirs.many(free)
    paths = [normal_scope(at.right.keys[o].scope).split(".") for o in free]
    out: list[Nearest] = []
    for site in list(dict.fromkeys(at.left.site_of[c] for c in wanted))[:_MOST]:
        table = call_sequences.scores([at.ours[site]], across, at.word)[0]
        mine = normal_scope(at.left.keys[site].scope).split(".")
        near = [int(k) for k in np.argsort(-table, kind="stable")[:_CLOSER]]
        total = np.full(len(free), -np.inf)
        total[near] = [table[k] + _PATH * _alike(mine, paths[k]) for k in near]
        best = int(total.argmax())
        if total[best] < call_sequences.LEAST:
            continue
        words = [at.why(site, free[best])]
        if sum(total >= total[best] - 1e-9) > 1:
            words.append(f"{int((total >= total[best] - 1e-9).sum())} fit equally")
        why = ", ".join(w for w in words if w) or "a similar name"
        out.append(Nearest("reference", at.left.name(site), at.right.name(free[best]), why))
    return tuple(out)


def _alike(one: Sequence[str], other: Sequence[str]) -> float:
    """Likeness of two paths, 0..1: their words in order."""
    n, m = len(one), len(other)
    best = np.zeros((n + 1, m + 1))
    for i in range(n):
        for j in range(m):
            best[i + 1, j + 1] = max(
                best[i, j + 1], best[i + 1, j], best[i, j] + likeness(one[i], other[j])
            )
    return float(best[n, m]) / max(n, m)
