"""The rule of content: parameters, or outputs, that no other call has."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from whence.align.calls import call_sequences
from whence.align.calls.fingerprints import distance
from whence.align.calls.site_pairing import CLOSE_OUTPUT, CONTENT, SitePairing, alone

_CLEARLY = 5.0  # times closer than the next candidate
_LEAST_COUNT = 16


def same_content(at: SitePairing) -> None:
    """Parameters that no other site has, then outputs that no other comes near in norm, sum of
    magnitudes and mean.
    """
    mine, theirs = at.free()
    if not mine or not theirs:
        return
    a, b = alone(mine, at.ours), alone(theirs, at.theirs)
    for content, site in a.items():
        other = b.get(content)
        if other is not None and at.fits(site, other) and at.same_parents(site, other):
            at.pair(site, other, CONTENT, at.why(site, other))
    _outputs(at)


def _outputs(at: SitePairing) -> None:
    mine, theirs = at.free()
    table: dict[float, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, free, features in ((0, mine, at.ours), (1, theirs, at.theirs)):
        for s in free:
            f = features[s]
            if f.out_moments[0] >= _LEAST_COUNT:
                table[f.out_moments[0]][side].append(s)
    for a, b in table.values():
        if not a or not b or len(a) * len(b) > 1 << 22:
            continue
        left, right = [at.ours[s].out_moments for s in a], [at.theirs[o].out_moments for o in b]
        apart = distance(left, right)
        for i, j in _clear_winners(apart):
            site, other = a[i], b[j]
            if (
                at.fits(site, other)
                and at.same_parents(site, other)
                and call_sequences.scores([at.ours[site]], [at.theirs[other]], at.word)[0, 0]
                >= call_sequences.LEAST
            ):
                evidence = (
                    f"output norm {left[i][1]:.6g} against {right[j][1]:.6g}, the next is "
                    f"{_CLEARLY:.0f} times further or more"
                )
                at.pair(site, other, CONTENT, evidence)


def _clear_winners(
    apart: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> list[tuple[int, int]]:
    """Rows and columns that are each other's nearest by far."""
    out = []
    for i in range(apart.shape[0]):
        j = int(apart[i].argmin())
        best = apart[i, j]
        if (
            best < CLOSE_OUTPUT
            and (apart[i] <= best * _CLEARLY + 1e-9).sum() == 1
            and (apart[:, j] <= best * _CLEARLY + 1e-9).sum() == 1
        ):
            out.append((i, j))
    return out
