"""Finds the nearest call for a call without a partner, for a user who writes a map or asks why
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

_MOST = 20  # unpaired sites that are looked up, each against at most _ACROSS sites of the other run
_ACROSS = 20_000
_CLOSER = 200  # of these, the sites that are compared name by name
_PATH = 2.0  # the weight of a path whose words are all equal


def nearest(
    reference: Run, target: Run, plan: Plan, unpaired: Sequence[int]
) -> tuple[Nearest, ...]:
    """For up to 20 unpaired calls of the reference, one per module: the nearest unpaired call of
    the target, if any is near.

    unpaired: ids of the reference calls. Names, classes, shapes, parameters and outputs count;
    reads no elements.
    """
    if not unpaired:
        return ()
    pairing = SitePairing(reference, target)
    paired = {p.target for p in plan.pairs}
    free = [
        o
        for o in range(len(pairing.target))
        if not any(c in paired for calls in pairing.target.moments[o].values() for c in calls)
    ]
    free = [o for o in free if pairing.target.selected(o)][:_ACROSS]
    if not free:
        return ()
    across = pairing.target_features.many(free)
    paths = [normal_scope(pairing.target.keys[o].scope).split(".") for o in free]
    out: list[Nearest] = []
    for site in list(dict.fromkeys(pairing.reference.site_of[c] for c in unpaired))[:_MOST]:
        table = call_sequences.scores([pairing.features[site]], across, pairing.word)[0]
        path = normal_scope(pairing.reference.keys[site].scope).split(".")
        near = [int(k) for k in np.argsort(-table, kind="stable")[:_CLOSER]]
        total = np.full(len(free), -np.inf)
        total[near] = [table[k] + _PATH * _alike(path, paths[k]) for k in near]
        best = int(total.argmax())
        if total[best] < call_sequences.LEAST:
            continue
        words = [pairing.why(site, free[best])]
        if sum(total >= total[best] - 1e-9) > 1:
            words.append(f"{int((total >= total[best] - 1e-9).sum())} fit equally")
        why = ", ".join(w for w in words if w) or "a similar name"
        out.append(
            Nearest("reference", pairing.reference.name(site), pairing.target.name(free[best]), why)
        )
    return tuple(out)


def _alike(a: Sequence[str], b: Sequence[str]) -> float:
    """Similarity of two paths, 0..1: the likeness of words aligned in order, over the longer
    length.
    """
    n, m = len(a), len(b)
    best = np.zeros((n + 1, m + 1))
    for i in range(n):
        for j in range(m):
            best[i + 1, j + 1] = max(
                best[i, j + 1], best[i + 1, j], best[i, j] + likeness(a[i], b[j])
            )
    return float(best[n, m]) / max(n, m)
