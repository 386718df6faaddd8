"""Where a parameter that differs may come from: it is tied on one side only, it is what the
reference has under another name, or it was never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from whence.comparison.paired_runs import PairedRuns
from whence.judge.initialisation import unlike
from whence.records import Record
from whence.records.slots import is_param, param_name
from whence.results import SlotPair, Verdict

_PLAIN = re.compile("elements differ|all zero")
"""What a sentence says where no order, scale or rounding explains the difference."""


class _Held(NamedTuple):
    """A pair of parameters, by its full name in the reference."""

    name: str
    reference: Record
    target: Record


class ParameterOrigins:
    """What is said of the parameters of guilty verdicts; each is looked at once."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._held: list[_Held] | None = None
        self._words: dict[tuple[int, int], str] = {}

    def words(self, verdict: Verdict) -> str:
        """An explanation of the parameter that the verdict is about, "" where there is none."""
        slot = self._paired.slots[verdict.pair].get(verdict.slot)
        if slot is None or not is_param(verdict.slot):
            return ""
        key = slot.reference_record, slot.target_record
        if key not in self._words:
            call = self._paired.calls[self._paired.plan.pairs[verdict.pair].reference]
            name, is_plain = _full(call.scope, verdict.slot), bool(_PLAIN.search(verdict.sentence))
            self._words[key] = self._explain(name, slot, is_plain)
        return self._words[key]

    def _explain(self, name: str, slot: SlotPair, is_plain: bool) -> str:
        reference, target = self._paired.records(slot)
        others = [held for held in self._parameters() if held.name != name]
        tied = self._tied(reference, target, others)
        clauses = [tied or self._elsewhere(reference, target, others)]
        if is_plain and not any(clauses):
            arrays = self._paired.arrays(slot)
            if arrays is not None and arrays[0].shape == arrays[1].shape:
                clauses.append(unlike(*arrays))
        return "; ".join(filter(None, clauses))

    def _tied(self, reference: Record, target: Record, others: list[_Held]) -> str:
        """That one side alone holds the same elements for two parameters.

        Not where it holds them for more than two: layers that are made alike start that way.
        """
        equal: dict[str, list[tuple[str, bool]]] = {"reference": [], "target": []}
        for other in others:
            in_reference = _hold_the_same(reference, other.reference)
            in_target = _hold_the_same(target, other.target)
            if in_reference and not in_target:
                equal["reference"].append((other.name, reference.id == other.reference.id))
            if in_target and not in_reference:
                equal["target"].append((other.name, target.id == other.target.id))
        for side, counterpart in (("reference", "target"), ("target", "reference")):
            for name, is_one_tensor in equal[side]:
                if is_one_tensor:
                    return f"the {side} ties it to {name} (one tensor), the {counterpart} does not"
            if len(equal[side]) == 1:
                name = equal[side][0][0]
                return f"the {side} holds the same elements as {name}, the {counterpart} does not"
        return ""

    @staticmethod
    def _elsewhere(reference: Record, target: Record, others: list[_Held]) -> str:
        """That it is bit by bit another parameter of the reference."""
        for other in others:
            if _hold_the_same(target, other.reference) and not _hold_the_same(
                reference, other.reference
            ):
                return f"it is what the reference has as {other.name}"
        return ""

    def _parameters(self) -> list[_Held]:
        if self._held is None:
            self._held = list(self._all())
        return self._held

    def _all(self) -> Iterator[_Held]:
        paired = self._paired
        visited: set[tuple[int, int, str]] = set()
        for pair in paired.plan.pairs:
            scope = paired.calls[pair.reference].scope
            for slot in pair.slots:
                if not is_param(slot.reference_slot):
                    continue
                key = slot.reference_record, slot.target_record, scope
                if key not in visited:
                    visited.add(key)
                    yield _Held(_full(scope, slot.reference_slot), *paired.records(slot))


def _full(scope: str, slot: str) -> str:
    return ".".join(filter(None, (scope, param_name(slot))))


def _hold_the_same(first: Record, second: Record) -> bool:
    """Do two parameters hold the same elements? Matrices of more than one value alone: norms are
    equal where they are made.
    """
    if first.shape != second.shape or len(first.shape) < 2 or first.dtype != second.dtype:
        return False
    statistics = first.statistics
    if statistics is None or statistics.min == statistics.max:
        return False
    return first.id == second.id or bool(first.hash and first.hash == second.hash)
