"""Weak evidence that points the same way at all siblings, when no call is flagged by itself."""

from __future__ import annotations

from typing import Any

from whence import align, judge
from whence.comparison.verdicts.call_replays import CallReplays
from whence.records.slots import is_of_child, split_child
from whence.results import GUILTY, Confidence, Evidence, Verdict, VerdictKind


def look_again(verdicts: dict[tuple[int, int], Verdict], replays: CallReplays) -> None:
    """Make regions guilty whose siblings together say so; nothing where one is guilty by itself."""
    if any(v.verdict in GUILTY for v in verdicts.values()):
        return
    pooled = _pooled(replays)
    spared = {
        call
        for call in replays.quick
        if any(_siblings(replays, call, slot) in pooled for slot in replays.figures[call])
    }
    for call in sorted(spared):
        # The working replay was spared: what rounds inside has patterns that only it knows.
        replays.replay(replays.paired.pair(replays.paired.pair_of[call]), thorough=True)
    if spared:
        pooled = _pooled(replays)
    for (call, segment), verdict in verdicts.items():
        evidence = pooled.get((*_name(replays, call), segment))
        if evidence is not None and verdict.evidence == Evidence.REPLAY:
            verdicts[call, segment] = verdict.replace(
                verdict=VerdictKind.INTRODUCED,
                confidence=Confidence.LIKELY,
                score=evidence.z / judge.LIMITS.pooled,
                sentence=f"introduced here: {evidence.sentence}",
            )


def _pooled(replays: CallReplays) -> dict[Any, judge.PooledEvidence]:
    return judge.pool(
        (_siblings(replays, call, slot), error)
        for call, figures in replays.figures.items()
        for slot, error in figures.items()
    )


def _siblings(replays: CallReplays, call: int, slot: str) -> tuple[str, str, int]:
    """What a call's output is a sibling of: names with their numbers starred, and the segment that
    made it.
    """
    if replays.paired.calls[call].leaf:
        return *_name(replays, call), -1
    children = replays.paired.kids.get(call, ())
    return *_name(replays, call), split_child(slot)[0] if is_of_child(slot) else len(children)


def _name(replays: CallReplays, call: int) -> tuple[str, str]:
    named = replays.paired.calls[call]
    return align.starred(named.scope), named.op_type
