"""How far a difference between two runs of one training reaches: gradients, loss, parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whence import dtypes
from whence.errors import ElementsMissing
from whence.records.slots import is_input, is_output
from whence.results import StepLoss, TouchedGradient
from whence.workflows.repeat.equal_records import EqualRecords, partners, rel_l2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from whence.records import Call, Ref, Run

_GRADIENTS, _LOSS, _SUM = "gradients", "loss", "AccumulateGrad"


class Reach:
    """What differs between two runs at the places that a user looks at."""

    def __init__(self, records: EqualRecords) -> None:
        self._records = records
        self._first, self._second = records.first, records.second
        self._partners = partners(self._first.calls, self._second.calls)

    def _pairs(self, call: Call, refs: Iterable[Ref]) -> list[tuple[int, int]]:
        """The records of some tensors of a call in both runs."""
        number = self._partners.get(call.id)
        if number is None:
            return []
        others = {ref.slot: ref.record for ref in self._second.calls[number].refs}
        return [(r.record, others[r.slot]) for r in refs if r.slot in others]

    def gradient(self) -> TouchedGradient | None:
        """The gradients of the first step in which one of a parameter differs; None where none
        does.
        """
        by_step: dict[int, list[tuple[int, int]]] = {}
        kind = _GRADIENTS if any(c.op == _GRADIENTS for c in self._first.calls) else _SUM
        for call in self._first.calls:
            if kind in (call.op, call.op_type):
                slots = (
                    [r for r in call.refs if is_input(r.slot)]
                    if kind == _GRADIENTS
                    else [r for r in call.refs if is_output(r.slot)]
                )
                by_step.setdefault(call.step, []).extend(self._pairs(call, slots))
        for step, pairs in sorted(by_step.items()):
            differing = [pair for pair in pairs if self._records.equal(*pair) is False]
            if differing:
                return self._touched(step, pairs, set(differing))
        return None

    def _touched(
        self, step: int, pairs: list[tuple[int, int]], differing: set[tuple[int, int]]
    ) -> TouchedGradient:
        squares = {pair: self._norm(pair[0]) ** 2 for pair in pairs}
        whole = sum(squares.values())
        share = sum(squares[pair] for pair in differing) / whole if whole else 1.0
        error = rel_l2(self._records.elements(*pair) for pair in pairs)
        return TouchedGradient(step, share, error, len(differing), len(pairs))

    def _norm(self, record: int) -> float:
        statistics = self._first.records[record].statistics
        return (statistics.norm or 0.0) if statistics is not None else 0.0

    def losses(self) -> tuple[StepLoss, ...]:
        """The loss of the first step in which it differs, and of the last; () where it is equal."""
        steps: dict[int, tuple[int, int]] = {}
        for call in sorted(self._first.calls, key=lambda c: c.order):
            if call.op == _LOSS and call.phase == "forward":
                for pair in self._pairs(call, call.slots("output")):
                    if self._first.records[pair[0]].count == 1:
                        steps[call.step] = pair
        differing = [s for s, pair in sorted(steps.items()) if not self._records.equal(*pair)]
        if not differing:
            return ()
        wanted = dict.fromkeys((differing[0], max(steps)))
        return tuple(
            StepLoss(s, _number(self._first, steps[s][0]), _number(self._second, steps[s][1]))
            for s in wanted
        )

    def end(self) -> tuple[str, float | None]:
        """What the last step leaves (its name), and the relative 2-norm of its difference: the
        parameters of a training, the outputs of a model otherwise.
        """
        steps = [c for c in self._first.calls if c.phase == "optimizer" and c.refs]
        if steps:
            last = max(c.step for c in steps)
            calls = [c for c in steps if c.step == last]
            refs = [(c, [r for r in c.refs if r.slot == "output.param"]) for c in calls]
            name = f"parameters after step {last}"
        else:
            roots = [c for c in self._first.calls if c.parent == -1 and c.slots("output")]
            if not roots:
                return "", None
            last = max(c.step for c in roots)
            refs = [(c, list(c.slots("output"))) for c in roots if c.step == last]
            name = f"outputs of step {last}"
        pairs = [pair for call, slots in refs for pair in self._pairs(call, slots)]
        numbers = [p for p in pairs if dtypes.is_floating(self._first.records[p[0]].dtype)]
        if not numbers:
            return "", None
        return name, rel_l2(self._records.elements(*pair) for pair in numbers)


def _number(run: Run, record: int) -> float | None:
    try:
        return float(run.array(record).reshape(()))
    except ElementsMissing:
        statistics = run.records[record].statistics
        return statistics.mean if statistics is not None else None
