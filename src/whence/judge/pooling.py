"""The second look: weak evidence that points the same way at many siblings ("all RMSNorms are 0.08
% too small").

Source: VERDICT.md. Taken only when nothing was flagged by itself. Each output contributes its
signed slope z, at most 8; the sum over m outputs has spread sqrt(m) when they are noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from whence.judge.limits import LIMITS, POOLED_CHANGED, POOLED_MOST, Limits
from whence.judge.replay_error import ReplayError


@dataclass(frozen=True, slots=True)
class PooledEvidence:
    """A group of siblings that share a scale error. z: significance; slope: mean relative scale;
    members: outputs that count.
    """

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


def pool(
    outputs: Iterable[tuple[Hashable, ReplayError]], limits: Limits = LIMITS
) -> dict[Hashable, PooledEvidence]:
    """Groups whose scale error is significant together. outputs: (group, figures); a group is a
    name with its numbers starred.
    """
    groups: dict[Hashable, list[ReplayError]] = {}
    for group, local in outputs:
        # what runs of the reference differ by is no evidence
        beyond = abs(local.structure.slope) >= limits.spread * local.spread_rel
        if beyond and local.structure.changed > POOLED_CHANGED and local.structure.slope_z > 0:
            groups.setdefault(group, []).append(local)
    pooled: dict[Hashable, PooledEvidence] = {}
    for group, members in groups.items():
        if len(members) < 2:
            continue
        z = abs(
            sum(
                math.copysign(min(m.structure.slope_z, POOLED_MOST), m.structure.slope)
                for m in members
            )
        ) / math.sqrt(len(members))
        slope = sum(m.structure.slope for m in members) / len(members)
        if z > limits.pooled and abs(slope) >= limits.effect:
            pooled[group] = PooledEvidence(z, slope, len(members))
    return pooled
