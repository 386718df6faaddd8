"""Weak evidence that points the same way at many siblings ("all RMSNorms are 0.08 % too small").

Taken only when nothing was flagged by itself. The scales of m outputs are averaged with the weights
of their precision, 1 / error^2; the average has the error 1 / sqrt(sum of the weights).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from whence.judge import noise_model
from whence.judge.replay_error import ReplayError


@dataclass(frozen=True, slots=True)
class PooledEvidence:
    """A group of siblings that share a scale error. score: significance over its limit; z: in
    standard deviations; slope: mean relative scale; members: outputs that count.
    """

    score: float
    z: float
    slope: float
    members: int

    @property
    def sentence(self) -> str:
        """What it says, in words."""
        return (
            f"coherent {100 * self.slope:+.2g} % scale over {self.members} outputs of "
            f"siblings together ({self.z:.3g} sigma)"
        )


def pool(outputs: Iterable[tuple[Hashable, ReplayError]]) -> dict[Hashable, PooledEvidence]:
    """Groups whose scale error is significant together. outputs: (group, figures); a group is a
    name with its numbers starred.
    """
    groups: dict[Hashable, list[ReplayError]] = {}
    for group, local in outputs:
        if local.structure.slope_error > 0:
            groups.setdefault(group, []).append(local)
    pooled: dict[Hashable, PooledEvidence] = {}
    for group, members in groups.items():
        if len(members) < 2:
            continue
        weights = [1 / m.structure.slope_error**2 for m in members]
        slope = math.fsum(
            w * m.structure.slope for w, m in zip(weights, members, strict=True)
        ) / math.fsum(weights)
        bias = max(m.bias() for m in members)
        t = max(0.0, abs(slope) - bias) * math.sqrt(math.fsum(weights))
        z = noise_model.normal_score(t, sum(m.structure.clusters - 1 for m in members))
        score = z / noise_model.limit(1, len(groups))
        if score > 1:
            pooled[group] = PooledEvidence(score, z, slope, len(members))
    return pooled
