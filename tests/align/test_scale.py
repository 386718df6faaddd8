"""Pairing runs of many roots: work grows with their number, not with its square."""

from typing import ClassVar

from whence.align.calls.match import plan
from whence.align.layout import logits_outside
from whence.align.plan_editor import PlanEditor
from whence.records import Call, MemoryRun, Record, Ref
from whence.results import CallPair


def _flat(count: int) -> MemoryRun:
    """Recorded arrays: roots that call nothing."""
    records = [Record(n, "float32", (4,), hash=f"{n:032x}") for n in range(count)]
    calls = [
        Call(n, f"h{n}", "", 0, n, kind="label", leaf=True, refs=(Ref("output.0", n),))
        for n in range(count)
    ]
    return MemoryRun(calls, records, {})


class _CountedPair(CallPair, frozen=True, eq=False):
    """A pair that counts how often one is compared with another."""

    times: ClassVar[list[int]] = []

    def __eq__(self, other: object) -> bool:
        self.times.append(1)
        return self is other

    __hash__ = object.__hash__


def test_roots_are_told_from_others_by_their_number() -> None:
    reference, target = _flat(200), _flat(200)
    editor = PlanEditor(reference, target, plan(reference, target))
    for number, pair in editor.pairs.items():
        editor.pairs[number] = _CountedPair(pair.reference, pair.target, pair.rule)
    logits_outside.heads(editor)
    assert len(_CountedPair.times) <= 200
