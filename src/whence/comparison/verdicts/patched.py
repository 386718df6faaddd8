"""Calls whose outputs were replaced on purpose: what they and their children did says nothing about
the program any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whence.records import Call, in_order
from whence.records.marks import Mark, has_mark
from whence.results import CallPair, Verdict, VerdictKind


def declare_patched(
    verdicts: Mapping[tuple[int, int], Verdict],
    pairs: Sequence[CallPair],
    reference: Sequence[Call],
    target: Sequence[Call],
) -> dict[tuple[int, int], Verdict]:
    """The verdicts with those of patched calls, and of everything they called, made `declared`.
    verdicts: by (call, stretch).
    """
    patched = (_patched(reference), _patched(target))
    if not any(patched):
        return dict(verdicts)

    def declared(verdict: Verdict) -> bool:
        pair = pairs[verdict.pair]
        return pair.reference in patched[0] or pair.target in patched[1]

    return {
        key: verdict.withdrawn(
            VerdictKind.DECLARED, "its outputs were replaced by those of another run"
        )
        if declared(verdict) and verdict.verdict != VerdictKind.IDENTICAL
        else verdict
        for key, verdict in verdicts.items()
    }


def _patched(calls: Sequence[Call]) -> set[int]:
    """Ids of the calls that carry the note, and of those below them."""
    patched: set[int] = set()
    for call in in_order(calls):  # parents before children
        if call.parent in patched or has_mark(call, Mark.PATCHED):
            patched.add(call.id)
    return patched
