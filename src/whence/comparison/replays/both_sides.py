"""Both runs of a comparison as sources of replays, and which of their tensors are paired."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whence import dtypes, judge
from whence.comparison.prepare.masks import UnifiedMasks
from whence.comparison.replays.parameters import ParameterCache
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.records import Call, Run
from whence.results import SlotPair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from whence.comparison.replays.user_model import Models

Slots = Callable[[str], SlotPair | None]
"""The pair of tensors in a slot of a program; None where the target has none."""


@dataclass(frozen=True, slots=True)
class BothSides:
    """The sources of replays, and what a comparison knows of their pairs.

    own: the target as it ran, with masks in its own form. paired: calls of the reference that have
    a partner. inner: the parameter paired with one of a call without a partner. shown: the pair of
    a slot of a call that has one. spread: of a record of the reference, by how much each element
    differs between its runs (`RepeatedRuns.elementwise`).
    """

    reference: ReplaySource
    target: ReplaySource
    own: ReplaySource
    parameters: ParameterCache
    paired: Collection[int]
    inner: Callable[[Call, Call, str], SlotPair | None] | None
    shown: Callable[[Call, str], SlotPair | None]
    spread: Callable[[int], Array | None]

    def is_equal(self, pair: SlotPair) -> bool:
        """Are both tensors known to be bitwise equal?"""
        if pair.target_record < 0:
            return False
        a = self.reference.run.records[pair.reference_record]
        b = self.target.run.records[pair.target_record]
        return bool(a.hash) and a.hash == b.hash and a.dtype == b.dtype and a.shape == b.shape

    def is_print(self, pair: SlotPair) -> bool:
        """Was one of these tensors printed to fewer digits than its dtype holds?"""
        a = self.reference.run.records[pair.reference_record]
        b = self.target.run.records[pair.target_record]
        return judge.roundoff(a, b) > judge.coarser(a.dtype, b.dtype)

    def working_dtypes(
        self,
        inputs: Mapping[str, SlotPair],
        outputs: Mapping[str, SlotPair],
        produced: Mapping[str, Array],
    ) -> tuple[str, str]:
        """(dtype of the wide replay, dtype of the working one) for what the target produced."""
        names = [dtypes.of(array).name for array in produced.values()]
        floating = [n for n in names if dtypes.named(n).is_floating]
        target = max(floating, key=judge.unit_roundoff, default="float32")
        finest = min(
            (judge.unit_roundoff(n) for n in floating), default=judge.unit_roundoff("float32")
        )
        pairs = [p for s, p in inputs.items() if not s.startswith("param")] + list(outputs.values())
        recorded = {self.reference.run.records[p.reference_record].dtype for p in pairs}
        produced_in = {self.target.run.records[p.target_record].dtype for p in pairs}
        return (
            "float64" if finest < 1e-5 else "float32",
            "recorded" if recorded == produced_in else target,
        )


def both_sides(
    reference: Run,
    target: Run,
    *,
    paired: Collection[int],
    inner: Callable[[Call, Call, str], SlotPair | None] | None,
    shown: Callable[[Call, str], SlotPair | None],
    allow: Sequence[str],
    spread: Callable[[int], Array | None],
    model: Models | None,
) -> BothSides:
    """Both runs as sources. allow: vendor namespaces whose operators may be run. model: the user's,
    for calls of the reference without a usable program.
    """
    return BothSides(
        ReplaySource(reference, allow, model),
        ReplaySource(target, allow),
        ReplaySource(target.base if isinstance(target, UnifiedMasks) else target, allow),
        ParameterCache(reference, target),
        paired,
        inner,
        shown,
        spread,
    )
