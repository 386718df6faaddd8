"""Acquits differences in a training step if the gradients that the optimiser takes are right.

Then a loss or a backward pass before the optimiser differs only in scale, in the order of summation
or in the parts (micro-batches) that are summed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from whence.comparison.verdicts.call_replays import CallReplays
from whence.comparison.verdicts.loss_scale import is_value_alone
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.dtypes import unit_roundoff
from whence.judge import PairError
from whence.judge.limits import LIMITS, U32
from whence.judge.replay_error import ratio
from whence.records import Call, Record, Region, Run
from whence.records.region import outwards
from whence.records.slots import is_input, is_output, is_param, is_written, split_slot
from whence.records.training import GRADIENTS, LOSS, OPTIMIZER
from whence.results import GUILTY, SlotPair, Verdict

_TAKEN, _HELD, _LEFT = "input.grad", "input.param", "output.param"
_MADE, _OF_INPUT = "output.grad.", "output.grad.input."
_SEED = "input.grad.output.0"
_CANCELLED = 3e-2  # of its module's largest gradient: a smaller one may be left of larger terms
_CLEARLY = 2.0  # times as far
_SCALE = "scale_estimate"
_COHERENT = 2.0  # unit roundoffs by which the size of all gradients together may differ
_ONE_SCALE = 0.02  # by which scales of gradients differ that are told as one
_MOST_CAME_IN = 1e-3  # of a gradient: what earlier steps left explains no more


class _Losses(NamedTuple):
    """The losses of a step that have a backward pass. value, size: the sums of their values and of
    the magnitudes of these; gradient: the norm of all their gradients, as of a seed of one; u: the
    largest unit roundoff of a value. NaN where a number is not known.
    """

    number: int
    value: float
    size: float
    gradient: float
    u: float

    @classmethod
    def of(cls, run: Run, loss: Call) -> _Losses:
        """Those of a run in the step of `loss`."""
        place = LOSS, loss.root, loss.step, loss.rank
        calls = [c for c in run.calls if (c.op, c.root, c.step, c.rank) == place]
        by_order = {call.order: call for call in calls}
        values, gradients, u = list[float](), list[float](), 0.0
        for call in calls:
            forward = by_order.get(call.forward) if call.phase == "backward" else None
            for ref in forward.slots("output") if forward is not None else ():
                record = run.records[ref.record]
                mean = record.statistics.mean if record.statistics is not None else None
                values.append(math.nan if mean is None else mean)
                u = max(u, unit_roundoff(record.dtype) or 0.0)
            if forward is not None:
                norms = {ref.slot: _norm_of(run.records[ref.record]) for ref in call.refs}
                seed = norms.get(_SEED) or math.nan
                gradients += [n / seed for slot, n in norms.items() if slot.startswith(_OF_INPUT)]
        return cls(len(values), sum(values), sum(map(abs, values)), math.hypot(*gradients), u)


def _norm_of(record: Record) -> float:
    norm = record.statistics.norm if record.statistics is not None else None
    return math.nan if norm is None else norm


class StepGradients:
    """Tells of calls before an optimiser's step whether the step takes their difference back."""

    def __init__(self, errors: PairErrors, replays: CallReplays) -> None:
        self._paired, self._errors, self._replays = errors.paired, errors, replays
        self._made_up: dict[tuple[int, str, int], bool] = {}
        self._distances: dict[tuple[int, str, int], float] = {}

    def take_back(self, call: Call) -> bool:
        """Whether the gradients are right that each parameter's next step takes, and also those of
        the program's inputs. Then a difference in a loss or backward pass before is one of scale,
        of order or of the parts that are summed.
        """
        if not self._may_a_step_tell(call):
            return False
        taken = self._taken_behind(call)
        return bool(taken) and (
            all(self._distance(step) <= 1 for step in taken)
            and self._top(call) not in self._wrong_passes
        )

    def make_up(self, call: Call) -> bool:
        """Whether each parameter's next step leaves the right parameter although its gradient is
        not the reference's, and most would not by the reference's step: a factor of the loss in the
        rate, decay in the loss. A step of both runs that hides a factor, as Adam's, makes nothing
        up for it.
        """
        if call.phase == OPTIMIZER and call.op != GRADIENTS:
            steps = {(call.rank, call.root, call.step)}
        else:
            is_before = call.phase != "forward" or call.op == LOSS
            steps = self._taken_behind(call) if is_before else set()
        return bool(steps) and all(map(self._is_made_up, steps))

    def _is_made_up(self, step: tuple[int, str, int]) -> bool:
        """As `make_up`, of one step."""
        calls = [
            call
            for call in self._calls_of_steps[OPTIMIZER, *step]
            if call.op != GRADIENTS and any(ref.slot == _TAKEN for ref in call.refs)
        ]
        if step not in self._made_up:
            # Replays last: most steps are not right.
            self._made_up[step] = all(map(self._leaves_right_parameter, calls)) and (
                2 * sum(map(self._makes_up, calls)) > len(calls)
            )
        return self._made_up[step]

    def _leaves_right_parameter(self, call: Call) -> bool:
        """Whether an optimiser's call leaves the reference's parameter, but for its own rounding:
        what came in wrong may be all that is left.
        """
        slots = self._paired.slots_of(call.id)
        if not {_HELD, _TAKEN, _LEFT} <= slots.keys():
            return False
        left = self._errors.of(slots[_LEFT])
        return left.exact or (left.value is not None and left.value <= LIMITS.growth * 2 * left.u)

    def _makes_up(self, call: Call) -> bool:
        """Whether the reference's step would leave another parameter with the target's gradient."""
        figures = self._replays.figures.get(call.id)
        if figures is None and self._replays.replayer is not None:
            figures = self._replays.replay(self._paired.pair(self._paired.pair_of[call.id])).local
        figure = (figures or {}).get(_LEFT)
        return figure is not None and figure.score > LIMITS.certain

    def wrong_behind(self, loss: Call) -> str:
        """Behind a loss of rows that the runs take in other parts: what is wrong with the gradients
        that the step takes, as words; "" if they are right, or were not all compared.
        """
        if loss.op != LOSS or not self._are_inputs_unlike(loss.id) or self._are_rows_alone:
            return ""
        for step in sorted(self._taken_behind(loss)):
            if _CLEARLY <= self._distance(step) < math.inf and self._is_forward_right(step):
                pairs = list(itertools.chain(*self._gradients(step).values()))
                return f"{self._difference(pairs)}: in the loss, its backward pass, or their sum"
        return ""

    def _is_forward_right(self, step: tuple[int, str, int]) -> bool:
        """Whether the outputs of the models in a step differ by no more than rounding."""
        calls = self._calls_of_steps["forward", *step]
        errors = [
            self._errors.of(pair)
            for call in calls
            for slot, pair in self._paired.slots_of(call.id).items()
            if is_output(slot)
        ]
        room = LIMITS.root_output_room(self._coarsest)
        return bool(errors) and all(
            e.exact or (e.value is not None and e.value <= room) for e in errors
        )

    @functools.cached_property
    def _are_rows_alone(self) -> bool:
        """Whether a run has forward passes without a partner, on rows that the other does not."""
        across = {pair.target for pair in self._paired.plan.pairs}
        return any(
            call.parent < 0 and call.phase == "forward" and not call.op and call.id not in paired
            for run, paired in (
                (self._paired.reference, self._paired.pair_of),
                (self._paired.target, across),
            )
            for call in run.calls
        )

    def _difference(self, pairs: Sequence[SlotPair | None]) -> str:
        """By how much gradients differ, in words."""
        known = [pair for pair in pairs if pair is not None]
        largest, measured = max(map(self._norm, known)), self._paired.measured
        scales = [
            scale
            for pair in known
            if self._norm(pair) > _CANCELLED * largest
            and (scale := measured[pair.reference_record, pair.target_record].values.get(_SCALE))
            is not None
        ]
        errors = [self._errors.of(pair) for pair in known]
        far = sum((error.value or 0.0) > self._within(error) for error in errors)
        if scales and max(scales) - min(scales) <= _ONE_SCALE * abs(max(scales)):
            return (
                f"the gradients that the optimiser takes are {np.median(scales):.3g} times the "
                "reference's"
            )
        return f"{far} of {len(known)} gradients that the optimiser takes are not the reference's"

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
    def _coarsest(self) -> float:
        """The largest unit roundoff in which a backward pass of either run computes: under
        autocast, gradients that are kept in float32 have been through it.
        """
        names = {
            run.records[ref.record].dtype
            for run in (self._paired.reference, self._paired.target)
            for call in run.calls
            if call.phase == "backward"
            for ref in call.refs
            if is_written(ref.slot)
        }
        return max((unit_roundoff(name) or 0.0 for name in names), default=0.0)

    def _within(self, error: PairError) -> float:
        """The relative error that rounding may leave in a gradient."""
        return LIMITS.within(max(error.u, self._coarsest))

    @functools.cached_property
    def _read(self) -> dict[int, SlotPair]:
        """The pairs of parameters that paired calls read, by record of the reference."""
        pairs = (pair for slots in self._paired.slots for pair in slots.values())
        return {p.reference_record: p for p in pairs if is_param(p.reference_slot)}

    def _may_a_step_tell(self, call: Call) -> bool:
        is_alone = call.phase == "backward" and call.id not in self._paired.pair_of
        if call.op == LOSS and not is_alone:
            does_add_up = self._do_losses_add_up(call)
            return self._does_gradient_differ(call) if does_add_up is None else does_add_up
        if call.phase == OPTIMIZER:
            return call.op == GRADIENTS
        return call.phase != "forward" or self._is_given_other_rows(call)

    def _is_given_other_rows(self, call: Call) -> bool:
        """Whether one run splits a batch into micro-batches that the other processes as a whole.
        Then only the step, which sums over the parts, can be compared.
        """
        return self._are_inputs_unlike(self._top(call))

    def _are_inputs_unlike(self, call: int) -> bool:
        """Whether some input of a call could not be measured."""
        return any(
            self._paired.measured[pair.reference_record, pair.target_record].tier == "none"
            for pair in self._paired.slots_of(call).values()
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

    def _do_losses_add_up(self, loss: Call) -> bool | None:
        """Whether the losses of a step add up to the same in both runs, but for the scale of their
        gradients. None where each has as many losses with a backward pass, or one is not known.
        """
        runs = self._paired.reference, self._paired.target
        sums = [_Losses.of(run, loss) for run in runs]
        known = all(each.gradient and math.isfinite(each.size) for each in sums)
        if sums[0].number == sums[1].number or not known:
            return None
        scale = sums[1].gradient / sums[0].gradient
        u = max(each.u for each in sums)
        return abs(sums[1].value - scale * sums[0].value) <= LIMITS.within(u) * sums[1].size

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
                is_near = error.exact or (error.value or math.inf) <= self._within(error)
                if at in alone and not is_near:
                    wrong.add(self._top(call))
        return wrong

    def _top(self, call: Call) -> int:
        *_, top = outwards(self._paired.calls, call.id)
        return top.id

    def _distance(self, step: tuple[int, str, int]) -> float:
        """The largest error of the gradients that a step takes, as a multiple of what rounding may
        leave; inf where one is not compared or there are none.

        Together they may differ in size by less, as their rounding averages out.
        """
        if step not in self._distances:
            by_module = self._gradients(step)
            came_in = min(_MOST_CAME_IN, LIMITS.growth**2 * self._came_in(step))
            multiples = [self._distance_in_module(p, came_in) for p in by_module.values()]
            pairs = [pair for pairs in by_module.values() for pair in pairs if pair is not None]
            sizes = [
                math.hypot(*(self._norm(pair, in_target=side) for pair in pairs))
                for side in (False, True)
            ]
            limit = max(LIMITS.within(U32), _COHERENT * self._coarsest, came_in)
            multiples.append(ratio(abs(sizes[1] - sizes[0]), limit * sizes[0]))
            self._distances[step] = max(multiples) if by_module else math.inf
        return self._distances[step]

    def _gradients(self, step: tuple[int, str, int]) -> dict[str, list[SlotPair | None]]:
        """The pairs of gradients that a step takes, by module; None for one without a partner.

        Code that rescales gradients before the step in both runs, as clipping does, must not hide a
        wrong scale: its inputs count too, unless that code itself differs.
        """
        pairs: dict[str, list[SlotPair | None]] = {}
        for call in self._calls_of_steps[OPTIMIZER, *step]:
            figures = self._replays.figures.get(call.id, {}).values()
            slots = self._paired.slots_of(call.id)
            # what one run alone does is right if what it leaves is
            is_alike = (
                call.op == GRADIENTS
                and call.id in self._paired.pair_of
                and all(figure.score <= 1 for figure in figures)
            )
            for ref in call.refs:
                if ref.slot == _TAKEN:
                    pairs.setdefault(call.scope, []).append(slots.get(ref.slot))
                elif is_alike and is_input(ref.slot):
                    module = split_slot(ref.slot)[1].rpartition(".")[0]
                    pairs.setdefault(module, []).append(slots.get(ref.slot))
        return pairs

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

    def _distance_in_module(self, pairs: Sequence[SlotPair | None], came_in: float) -> float:
        """The largest error of the gradients of a module's parameters, as a multiple of what
        rounding and the relative error `came_in` may leave; inf where one is not compared.
        """
        known = [pair for pair in pairs if pair is not None]
        if len(known) < len(pairs):
            return math.inf
        largest, multiples = max(map(self._norm, known), default=0.0), [0.0]
        for pair, error in zip(known, map(self._errors.of, known)):
            if error.exact:
                continue
            size, limit = self._norm(pair), max(self._within(error), came_in)
            # a sum whose terms cancel rounds by the size of its terms, which its siblings show
            terms = _CANCELLED * largest
            off = math.inf if error.value is None else error.value * size
            lone = error.lone * min(1.0, size / (terms or 1.0))
            multiples += [ratio(off, limit * max(size, terms)), lone / (limit * LIMITS.lone)]
        return max(multiples)

    def resolve(self, verdict: Verdict) -> bool:
        """Whether the difference behind a verdict would show in the step's gradients. In 16 bits,
        one wrong element is smaller than rounding; a constant added to a loss has no gradient.
        """
        pair = self._paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        if pair is None or verdict.verdict not in GUILTY:
            return True
        if (pair.reference_record, pair.target_record) not in self._paired.measured:
            return True
        call, error = self._paired.pair(verdict.pair).call, self._errors.of(pair)
        # Given other rows, a call may leave what the reference does, and not what its replay does.
        figure = self._replays.figures.get(call.id, {}).get(verdict.slot)
        size = max(error.value or 0.0, figure.error_rel if figure is not None else 0.0)
        is_shown = error.value is None or size >= _CLEARLY * self._within(error)
        is_constant = is_value_alone(self._paired, call) and not self._do_losses_add_up(call)
        return is_shown and not is_constant

    def _norm(self, pair: SlotPair, *, in_target: bool = False) -> float:
        paired = self._paired
        record = (
            paired.target.records[pair.target_record]
            if in_target
            else paired.reference.records[pair.reference_record]
        )
        return (record.statistics.norm or 0.0) if record.statistics is not None else 0.0
