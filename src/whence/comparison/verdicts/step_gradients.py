"""Acquits differences in a training step if the gradients that the optimiser takes are right.

Then a loss or a backward pass before the optimiser differs only in scale, in the order of summation
or in the parts (micro-batches) that are summed.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whence.comparison.verdicts.loss_scale import is_value_alone
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.judge.limits import LIMITS
from whence.records import Call, Region
from whence.records.slots import is_input, is_output, is_param, is_written, split_slot
from whence.records.training import GRADIENTS, LOSS, OPTIMIZER
from whence.results import GUILTY, SlotPair, Verdict

_TAKEN, _HELD = "input.grad", "input.param"
_MADE, _OF_INPUT = "output.grad.", "output.grad.input."
_CANCELLED = 3e-2  # of its module's largest gradient: a smaller one may be left of larger terms
_CLEARLY = 2.0  # times as far
_MOST_CAME_IN = 1e-3  # of a gradient: what earlier steps left explains no more


class StepGradients:
    """Tells of calls before an optimiser's step whether the step takes their difference back.
    figures: the figures of replays, by call and output slot.
    """

    def __init__(self, errors: PairErrors, figures: Mapping[int, Mapping[str, Any]]) -> None:
        self._paired, self._errors, self._figures = errors.paired, errors, figures
        self._right_steps: dict[tuple[int, str, int], bool] = {}

    def take_back(self, call: Call) -> bool:
        """Whether the gradients are right that each parameter's next step takes, and also those of
        the program's inputs. Then a difference in a loss or backward pass before is one of scale,
        of order or of the parts that are summed.
        """
        if not self._may_a_step_tell(call):
            return False
        taken = self._taken_behind(call)
        for step in taken - self._right_steps.keys():
            self._right_steps[step] = self._are_right(step)
        return bool(taken) and (
            all(map(self._right_steps.__getitem__, taken))
            and self._top(call) not in self._wrong_passes
        )

    def cover(self, call: Call) -> bool:
        """Whether a call that could not be measured is shown to be right: by the gradients that the
        next step takes, or, for an optimiser's call, by the parameters that later calls read.
        """
        written = [r.record for r in call.refs if is_written(r.slot)]
        is_step = call.phase == OPTIMIZER
        left = [self._errors.of(self._read[n]) for n in written if is_step and n in self._read]
        return self.take_back(call) or (
            bool(left) and all(e.exact or (e.value or math.inf) <= LIMITS.within(e.u) for e in left)
        )

    @functools.cached_property
    def _read(self) -> dict[int, SlotPair]:
        """The pairs of parameters that paired calls read, by record of the reference."""
        pairs = (pair for slots in self._paired.slots for pair in slots.values())
        return {p.reference_record: p for p in pairs if is_param(p.reference_slot)}

    def _may_a_step_tell(self, call: Call) -> bool:
        is_alone = call.phase == "backward" and call.id not in self._paired.pair_of
        if call.op == LOSS and not is_alone:
            return self._does_gradient_differ(call)
        if call.phase == OPTIMIZER:
            return call.op == GRADIENTS
        return call.phase != "forward" or self._is_given_other_rows(call)

    def _is_given_other_rows(self, call: Call) -> bool:
        """Whether one run splits a batch into micro-batches that the other processes as a whole.
        Then only the step, which sums over the parts, can be compared.
        """
        return any(
            self._paired.measured[pair.reference_record, pair.target_record].tier == "none"
            for pair in self._paired.slots_of(self._top(call)).values()
            if is_input(pair.reference_slot)
        )

    def make_up_for_inputs(self) -> bool:
        """Whether right gradients show that both models were given the same data, split into other
        parts.
        """
        tops = [c for c in self._paired.calls if c.parent < 0 and c.phase == "forward" and not c.op]
        return bool(tops) and all(map(self.take_back, tops))

    def call_of(self, region: Region) -> Call:
        """The call that a region belongs to. For code right before a loss or before the gradients
        of a step, that child call.
        """
        kids = self._paired.kids.get(region.call, ())
        if 0 <= region.stretch < len(kids):
            child = self._paired.calls[kids[region.stretch]]
            if child.op in (LOSS, GRADIENTS):
                return child
        return self._paired.calls[region.call]

    def _does_gradient_differ(self, loss: Call) -> bool:
        """Whether the gradient that a loss returns differs. A constant added to a loss has no
        gradient, so no step can take it back.
        """
        of_step = LOSS, "backward", loss.step, loss.rank
        return any(
            not self._paired.is_equal(pair)
            for call in self._paired.calls
            if (call.op, call.phase, call.step, call.rank) == of_step
            for pair in self._paired.slots_of(call.id).values()
            if pair.reference_slot.startswith(_MADE)
        )

    def _taken_behind(self, call: Call) -> set[tuple[int, str, int]]:
        """The steps (rank, root, step) that update the parameters next; empty if some parameter has
        no further step. Each parameter has its own next step: two optimisers run one after the
        other, and one of them perhaps less often.
        """
        nexts = []
        for steps in self._steps.get(call.rank, {}).values():
            place = bisect.bisect(steps, call.order, key=lambda taken: taken[0])
            nexts.append(steps[place] if place < len(steps) else None)
        known = [step for step in nexts if step is not None]
        if call.op == GRADIENTS:  # it belongs to one step
            return {min(known)[1]} if known else set()
        return {step for _, step in known} if len(known) == len(nexts) else set()

    @functools.cached_property
    def _steps(self) -> dict[int, dict[tuple[str, ...], list[tuple[int, tuple[int, str, int]]]]]:
        """(execution order, step) of the reference's optimiser calls, by rank and parameter."""
        steps: dict[int, dict[tuple[str, ...], list[tuple[int, tuple[int, str, int]]]]] = {}
        for call in self._paired.calls:
            if call.phase == OPTIMIZER and any(r.slot == _TAKEN for r in call.refs):
                of_rank = steps.setdefault(call.rank, {})
                step = call.order, (call.rank, call.root, call.step)
                bisect.insort(of_rank.setdefault((call.root, call.scope, call.op), []), step)
        return steps

    @functools.cached_property
    def _calls_of_steps(self) -> Mapping[tuple[str, int, str, int], list[Call]]:
        """The reference's optimiser calls and its root calls of models, by (phase, rank, root,
        step).
        """
        calls = defaultdict[tuple[str, int, str, int], list[Call]](list)
        for call in self._paired.calls:
            if call.phase == OPTIMIZER or (call.parent < 0 and call.phase == "forward"):
                calls[call.phase, call.rank, call.root, call.step].append(call)
        return calls

    @functools.cached_property
    def _wrong_passes(self) -> set[int]:
        """Root calls of backward passes that leave a wrong gradient of an input of the program."""
        inputs = {
            ref.record
            for call in self._paired.calls
            if call.parent < 0 and call.phase == "forward"
            for ref in call.slots("input")
        }
        wrong, alone = set(), inputs - self._paired.written
        for call in self._paired.calls:
            if call.phase != "backward":
                continue
            records = call.by_slot
            for slot, pair in self._paired.slots_of(call.id).items():
                at = records.get(slot.removeprefix(_MADE), -1) if slot.startswith(_OF_INPUT) else -1
                error = self._errors.of(pair)
                is_near = error.exact or (error.value or math.inf) <= LIMITS.within(error.u)
                if at in alone and not is_near:
                    wrong.add(self._top(call))
        return wrong

    def _top(self, call: Call) -> int:
        while call.parent >= 0:
            call = self._paired.calls[call.parent]
        return call.id

    def _are_right(self, step: tuple[int, str, int]) -> bool:
        """Whether all gradients that a step takes differ by no more than rounding.

        Code that rescales gradients before the step in both runs, as clipping does, must not hide a
        wrong scale: its inputs count too, unless that code itself differs.
        """
        pairs: dict[str, list[SlotPair | None]] = {}
        for call in self._calls_of_steps[OPTIMIZER, *step]:
            figures = self._figures.get(call.id, {}).values()
            slots = self._paired.slots_of(call.id)
            is_alike = (
                call.op == GRADIENTS
                and call.id
                in self._paired.pair_of  # of one run alone, it is right if what it leaves is
                and all(figure.score <= 1 for figure in figures)
            )
            for ref in call.refs:
                if ref.slot == _TAKEN:
                    pairs.setdefault(call.scope, []).append(slots.get(ref.slot))
                elif is_alike and is_input(ref.slot):
                    module = split_slot(ref.slot)[1].rpartition(".")[0]
                    pairs.setdefault(module, []).append(slots.get(ref.slot))
        came_in = min(_MOST_CAME_IN, LIMITS.growth**2 * self._came_in(step))
        return bool(pairs) and all(self._are_right_in_module(p, came_in) for p in pairs.values())

    def _came_in(self, step: tuple[int, str, int]) -> float:
        """The relative error that earlier steps left in the parameters, at most the largest error
        of the model's outputs: Adam turns the rounding of gradients near zero into large errors of
        parameters that no output shows.
        """
        parameters = self._errors_in(self._calls_of_steps[OPTIMIZER, *step], _HELD.__eq__)
        returned = self._errors_in(self._calls_of_steps["forward", *step], is_output)
        return min(max(parameters, default=0.0), max(returned, default=0.0))

    def _errors_in(self, calls: Iterable[Call], is_meant: Callable[[str], bool]) -> list[float]:
        """The relative errors of the paired calls' tensors in the slots that are meant."""
        pairs = (pair for call in calls for pair in self._paired.slots_of(call.id).items())
        return [self._errors.of(pair).value or 0.0 for slot, pair in pairs if is_meant(slot)]

    def _are_right_in_module(self, pairs: Sequence[SlotPair | None], came_in: float) -> bool:
        """Whether the gradients of a module's parameters differ by no more than rounding and the
        relative error `came_in`.
        """
        known = [pair for pair in pairs if pair is not None]
        errors, sizes = [self._errors.of(p) for p in known], [self._norm(p) for p in known]
        largest = max(sizes, default=0.0)
        limits = [max(LIMITS.within(error.u), came_in) for error in errors]
        return len(known) == len(pairs) and all(
            # a sum whose terms cancel rounds by the size of its terms, which its siblings show
            error.exact
            or (
                (error.value or math.inf) * size <= limit * max(size, _CANCELLED * largest)
                and error.lone * min(1.0, size / (_CANCELLED * largest or 1.0))
                <= limit * LIMITS.lone
            )
            for error, size, limit in zip(errors, sizes, limits, strict=True)
        )

    def resolve(self, verdict: Verdict) -> bool:
        """Whether the difference behind a verdict would show in the step's gradients. In 16 bits,
        one wrong element is smaller than rounding; a constant added to a loss has no gradient.
        """
        pair = self._paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        if pair is None or verdict.verdict not in GUILTY:
            return True
        call, error = self._paired.pair(verdict.pair).call, self._errors.of(pair)
        # Given other rows, a call may leave what the reference does, and not what its replay does.
        figure = self._figures.get(call.id, {}).get(verdict.slot)
        size = max(error.value or 0.0, figure.error_rel if figure is not None else 0.0)
        is_shown = error.value is None or size >= _CLEARLY * LIMITS.within(error.u)
        return is_shown and not is_value_alone(self._paired, call)

    def _norm(self, pair: SlotPair) -> float:
        statistics = self._paired.reference.records[pair.reference_record].statistics
        return (statistics.norm or 0.0) if statistics is not None else 0.0
