"""The rule of content: parameters, or outputs, that no other call has."""

from __future__ import annotations

from collections import defaultdict

from whence.align.calls import call_sequences
from whence.align.calls.fingerprints import distance, nearest_by_far
from whence.align.calls.site_pairing import CLOSE_OUTPUT, CONTENT, SitePairing, unique_contents

_CLEARLY = 5.0  # times closer than the next candidate
_LEAST_COUNT = 16


def same_content(pairing: SitePairing) -> None:
    """Pair sites by parameters that no other site has, then by outputs that no other comes near in
    norm, sum of magnitudes and mean.
    """
    free, others = pairing.free()
    if not free or not others:
        return
    a, b = (
        unique_contents(free, pairing.features),
        unique_contents(others, pairing.target_features),
    )
    for content, site in a.items():
        partner = b.get(content)
        if (
            partner is not None
            and pairing.fits(site, partner)
            and pairing.same_parents(site, partner)
        ):
            pairing.pair(site, partner, CONTENT, pairing.why(site, partner))
    _outputs(pairing)


def _outputs(pairing: SitePairing) -> None:
    table: dict[float, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    features = pairing.features, pairing.target_features
    for side, free in enumerate(pairing.free()):
        for s in free:
            count = features[side][s].out_moments[0]
            if count >= _LEAST_COUNT:
                table[count][side].append(s)
    for a, b in table.values():
        if not a or not b or len(a) * len(b) > 1 << 22:
            continue
        moments, across = ([f.out_moments for f in fs.many(s)] for fs, s in zip(features, (a, b)))
        for i, j in nearest_by_far(distance(moments, across), CLOSE_OUTPUT, _CLEARLY):
            site, partner = a[i], b[j]
            if (
                pairing.fits(site, partner)
                and pairing.same_parents(site, partner)
                and pairing.score(site, partner) >= call_sequences.LEAST
            ):
                evidence = (
                    f"output norm {moments[i][1]:.6g} against {across[j][1]:.6g}, the next is "
                    f"{_CLEARLY:.0f} times further or more"
                )
                pairing.pair(site, partner, CONTENT, evidence)
