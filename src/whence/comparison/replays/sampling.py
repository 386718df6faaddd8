"""Selects the calls to replay if there are many, within a limit of time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from whence.records import Call

# If a root has more steps than this, only the first, the middle and the last are replayed, and
# calls of other steps that stand out.
MANY_STEPS = 16


class Sampling:
    """Chooses the calls to replay.

    calls: those that a capture kept; steps that it left out do not count. everything: whether to
    replay all steps. budget: seconds of wall time for all replays, None for no limit.
    """

    def __init__(self, calls: Sequence[Call], *, everything: bool, budget: float | None) -> None:
        steps: dict[str, set[int]] = {}
        for call in calls:
            steps.setdefault(call.root, set()).add(call.step)
        self._of = {
            root: len(numbers)
            for root, numbers in steps.items()
            if len(numbers) > MANY_STEPS and not everything
        }
        self._chosen = {root: _three(sorted(numbers)) for root, numbers in steps.items()}
        self._ends = time.monotonic() + budget if budget is not None else None
        self._hurried = budget is not None
        self.spent = False

    def reason(self, call: Call, *, stands_out: bool = False) -> str:
        """Why this call is not replayed, "" if it is. stands_out: whether it must be replayed even
        in a step that is not sampled.
        """
        if self._ends is not None and time.monotonic() > self._ends:
            self.spent = True
            return "the time budget was spent"
        if stands_out or call.root not in self._of or call.step in self._chosen[call.root]:
            return ""
        return f"not among the sampled steps ({self._words(call.root)})"

    def first(self, call: Call) -> bool:
        """Whether the call is replayed before others if time is limited."""
        return not self._hurried or call.step in self._chosen[call.root]

    def notes(self, skipped: int) -> list[str]:
        """Notes about calls that were not replayed. skipped: their number."""
        if not skipped:
            return []
        sampled = [
            f"{root}: steps {self._words(root)} of {count} were replayed, and what stood out in "
            "the others; --sample all replays every step"
            for root, count in self._of.items()
        ]
        return (
            [f"the time budget was spent: {skipped} calls were not replayed", *sampled]
            if self.spent
            else sampled
        )

    def _words(self, root: str) -> str:
        return ", ".join(str(step) for step in sorted(self._chosen[root]))


def _three(steps: Sequence[int]) -> set[int]:
    return {steps[0], steps[len(steps) // 2], steps[-1]}
