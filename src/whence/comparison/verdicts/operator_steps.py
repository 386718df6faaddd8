"""Training steps in captures of operators: which gradient a step takes for each parameter and which
value it leaves, traced through what its operators read and write.

The runs may use different operators for a step (one parameter after the other, many at once, or
fused), so tensors are paired by the parameter that they belong to. A loss or a backward pass that
is written differently is right if the next step takes right gradients. A step that is written
differently is right if the reference's step computes the same parameters from the target's
gradients.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.prepare.rewritten_modules import unfolded
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.call_tree import REPLICAS
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.wired import WiredReplay
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.frameworks.operator_names import base_name
from whence.records import Call, Ref, Run, children, in_order
from whence.records.slots import is_input, is_mutated, is_param, is_read, is_written, split_slot
from whence.records.training import OPTIMIZER
from whence.results import SlotPair

_FAR = 100.0  # times as far apart: more than a sum in another order leaves
_LISTS = ("aten._foreach_", "aten._fused_")


class Gradient(NamedTuple):
    """The gradient of one parameter. taken: record that the step takes; made: record from which the
    script computed it; operators: their names, in order.
    """

    taken: int
    made: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Parameters are identified by their record before the step.

    calls: the calls of its optimisers, in direct succession. gradients: by parameter, the gradient
    that the step takes (a parameter may lack one); after: by parameter, the record after the step.
    """

    calls: tuple[Call, ...]
    gradients: Mapping[int, Gradient]
    after: Mapping[int, int]

    def followed_by(self, step: Step) -> Step:
        """This step and the next as one: two optimisers, each with its own parameters."""
        gradients, after = {**self.gradients, **step.gradients}, {**self.after, **step.after}
        return Step((*self.calls, *step.calls), gradients, after)


class OperatorSteps:
    """Compares the training steps of both runs, paired by their number."""

    def __init__(self, paired: PairedRuns, sides: BothSides) -> None:
        self._paired, self._sides = paired, sides
        self._right_gradients: dict[int, bool] = {}

    @functools.cached_property
    def _twins(self) -> dict[int, int]:
        """By record that a paired call of the reference reads, the target's record."""
        slots = (slot for slots in self._paired.slots for slot in slots.values())
        read = [slot for slot in slots if is_read(slot.reference_slot)]
        read.sort(key=lambda slot: is_param(slot.reference_slot))  # parameters last: they win
        return {slot.reference_record: slot.target_record for slot in read}

    @functools.cached_property
    def _source(self) -> ReplaySource:
        """The reference with all operators that it ran, none folded into its module."""
        return ReplaySource(unfolded(self._paired.reference), self._sides.reference.allow)

    @functools.cached_property
    def _steps(self) -> list[tuple[Step, Step]]:
        steps, partners = _steps_of(self._source.run), _steps_of(unfolded(self._paired.target))
        places, others = (
            [(s.calls[0].root, s.calls[0].step) for s in n] for n in (steps, partners)
        )
        both = list(zip(steps, partners, strict=True)) if places == others else []
        for step, partner in both:
            self._pair_equal(step, partner)
            for before, after in step.after.items():
                left = partner.after.get(self._twins.get(before, -1))
                if left is not None:
                    self._twins[after] = left
        return both

    def _pair_equal(self, step: Step, partner: Step) -> None:
        """Pair the remaining parameters, which no paired call reads, by equal content."""
        paired = {self._twins.get(before) for before in step.after}
        free = [twin for twin in partner.after if twin not in paired]
        for before in (p for p in step.after if p not in self._twins):
            equal = (n for n in free if self._sides.is_equal(SlotPair("", "", before, n)))
            if (twin := next(equal, None)) is not None:
                self._twins[before] = twin
                free.remove(twin)

    def take_back(self, call: Call) -> bool:
        """Whether later tensors show that a call of a training script is right: for a step, the
        parameters that it leaves; for any call before it, the gradients that the next step takes.
        """
        orders = [step.calls[0].order for step, _ in self._steps]
        k = bisect.bisect_right(orders, call.order)
        if call.phase == OPTIMIZER:
            return self._right_steps.get(k - 1, False) and not self._is_changed_before(k - 1)
        if k < len(orders) and k not in self._right_gradients:
            self._right_gradients[k] = self._takes_right(k)
        return self._right_gradients.get(k, False)

    def _gradients(self, k: int) -> list[tuple[Gradient, Gradient]]:
        """The pairs of gradients that step `k` takes. A parameter without a gradient in either run
        is left out if the step leaves it bitwise equal in both. Raises KeyError for a gradient that
        only one run has.
        """
        step, partner = self._steps[k]
        return [
            (step.gradients[before], partner.gradients[twin])
            for before, after in step.after.items()
            if (twin := self._twins[before]) in partner.gradients
            or before in step.gradients
            or not self._sides.is_equal(SlotPair("", "", after, partner.after[twin]))
        ]

    def _is_changed_before(self, k: int) -> bool:
        """Whether code before a step changes gradients differently that were alike when computed.
        The step that takes them does not make up for this.
        """
        with contextlib.suppress(KeyError, ElementsMissing):
            pairs = self._gradients(k)
            taken = self._apart((a.taken, b.taken) for a, b in pairs)
            return taken > _FAR * self._apart((a.made, b.made) for a, b in pairs)
        return False

    def _apart(self, records: Iterable[tuple[int, int]]) -> float:
        """The relative error of all these gradients together, at least the unit roundoff."""
        error = size = u = 0.0
        for reference_record, target_record in records:
            reference = self._paired.reference.array(reference_record)
            target = self._paired.target.array(target_record)
            u = max(u, *(judge.unit_roundoff(dtypes.of(a).name) for a in (reference, target)))
            if reference.shape == target.shape:
                exact = reference.astype(np.float64)
                error += float(np.sum((target.astype(np.float64) - exact) ** 2))
                size += float(np.sum(exact**2))
        return max(u, math.sqrt(error / size)) if size else u

    def _takes_right(self, k: int) -> bool:
        """Whether the reference's calls, run on the target's parameters, give the gradients that
        the target's step takes.

        Code that rescales gradients before the step in both runs, as clipping does, must not hide a
        wrong scale: its inputs are compared too, unless the runs use different operators there.
        """
        step, partner = self._steps[k]
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
            pairs = self._gradients(k)
            records = {a.taken: b.taken for a, b in pairs}
            if all(a.operators == b.operators for a, b in pairs):
                records |= {a.made: b.made for a, b in pairs}
            begin = self._steps[k - 1][0].calls[-1].order if k else -1
            tops = (self._source.run.calls[number] for number in self._source.children(-1))
            calls = [c for c in tops if begin < c.order < step.calls[0].order]
            runs = self._replays(self._slots_of_modules())
            left = [run.leave(calls, records) for run in runs]
            return len(step.after) == len(partner.after) > 0 and self._agree(records, left)
        return False

    def _agree(self, records: Mapping[int, int], left: Sequence[Mapping[int, Array]]) -> bool:
        """Whether the target's tensors equal the replayed ones, up to rounding. records: by record
        of the reference, the target's; left: replayed arrays, wide first, then in working dtype.
        """
        wide, *copies = left
        return all(
            judge.whole(
                self._paired.target.array(twin),
                wide[record],
                [copy[record] for copy in copies],
            ).score
            <= 1
            for record, twin in records.items()
        )

    def unexplained(self) -> Iterator[tuple[int, bool]]:
        """(call, whether it was replayed) of each step that is written differently and leaves other
        parameters than the reference's operators compute from the target's gradients.
        """
        regions = {c.order: c.id for c in self._paired.calls if c.phase == OPTIMIZER}
        for k, (step, partner) in enumerate(self._steps if regions else ()):
            number = regions.get(step.calls[0].order, -1)
            if number not in self._paired.pair_of or all(
                kid in self._paired.pair_of for kid in self._paired.kids.get(number, ())
            ):
                continue
            twins = ((n, partner.after.get(self._twins[p], -1)) for p, n in step.after.items())
            if all(self._sides.is_equal(SlotPair("", "", *pair)) for pair in twins):
                continue
            if not self._right_steps.get(k, False) or self._is_changed_before(k):
                yield number, k in self._right_steps

    @functools.cached_property
    def _right_steps(self) -> dict[int, bool]:
        """By number of each step that could be replayed: whether it leaves the parameters that the
        reference's operators compute from the target's gradients.
        """
        right: dict[int, bool] = {}
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
            runs = self._replays()
            for k, (step, partner) in enumerate(self._steps):
                left = [run.through(step, partner) for run in runs]
                after = {n: partner.after[self._twins[p]] for p, n in step.after.items()}
                right[k] = len(after) == len(partner.after) and self._agree(after, left)
        return right

    def _replays(self, slots: Iterable[SlotPair] = ()) -> list[_StepReplay]:
        """One replay in float64, then one without and several with noise in the working dtype. That
        is the coarsest dtype in which the target stores a parameter, or one of `slots`, otherwise
        than the reference.
        """
        target, runs = self._sides.target.run, (self._paired.reference, self._paired.target)
        parameters = {p for step, _ in self._steps for p in step.after}
        pairs = [(p, self._twins[p]) for p in parameters]
        pairs += [(slot.reference_record, slot.target_record) for slot in slots]
        both = ([run.records[n].dtype for run, n in zip(runs, p, strict=True)] for p in pairs)
        differing = {b for a, b in both if a != b and all(map(dtypes.is_floating, (a, b)))}
        working = max(differing, key=dtypes.unit_roundoff, default="recorded")
        return [
            _StepReplay(self._source, target, dtype, self._twins, parameters, noise)
            for dtype, noise in (
                ("float64", None),
                (working, None),
                *((working, np.random.default_rng(seed)) for seed in range(REPLICAS)),
            )
        ]

    def _slots_of_modules(self) -> Iterator[SlotPair]:
        """The tensors of modules in forward passes, whose dtypes tell how the target rounds."""
        for pair, slots in zip(self._paired.plan.pairs, self._paired.slots, strict=True):
            call = self._paired.calls[pair.reference]
            yield from slots.values() if call.scope and call.phase == "forward" else ()


class _StepReplay(WiredReplay):
    """Runs the reference's steps on the target's parameters and gradients. The optimiser's state is
    carried from step to step as it is computed.
    """

    def __init__(
        self,
        source: ReplaySource,
        target: Run,
        working: str,
        twins: Mapping[int, int],
        parameters: Collection[int],
        noise: np.random.Generator | None,
    ) -> None:
        super().__init__(source, working, self._held, noise=noise)
        self._target, self._twins, self._parameters = target, twins, parameters
        self._kept: dict[int, Array] = {}
        self._start = 0

    def through(self, step: Step, partner: Step) -> dict[int, Array]:
        """The parameters after a step, by record. Raises ReplayRefused, ElementsMissing, KeyError
        for a gradient that only one run has.
        """
        run = self._target
        for before in step.after:
            twin = self._twins[before]
            self._kept[before] = run.array(twin)
            if before in step.gradients or twin in partner.gradients:
                gradient = step.gradients[before], partner.gradients[twin]
                self._kept[gradient[0].taken] = run.array(gradient[1].taken)
        return self.leave(step.calls, step.after.values())

    def _held(self, loaded: Any, call: Call, working: str) -> Any:
        records = call.by_slot
        arrays = {
            slot: self._target.array(self._twins[records[slot]]) for slot in loaded.program.params
        }
        return loaded.hold(arrays, working=working)

    def leave(self, calls: Sequence[Call], records: Iterable[int]) -> dict[int, Array]:
        """Run these calls in order and return the arrays of these records. Raises ReplayRefused,
        ElementsMissing, KeyError for a record that no call computes.
        """
        self._start = calls[0].order
        for call in calls:
            self.run(call, {})
        return {record: self._kept[record] for record in records}

    def run(self, call: Call, given_tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As `TreeReplay.run`. An operator without inputs that cannot be run (it draws a batch, for
        example) returns the recorded tensors.
        """
        try:
            return super().run(call, given_tensors)
        except ReplayRefused:
            if call.kind != "operator" or any(is_input(r.slot) for r in call.refs):
                raise
        written = {r.slot: self.side.run.array(r.record) for r in call.slots("output")}
        return self.passing(call, written)

    def outside(self, call: Call, ref: Ref) -> Array | None:
        """As `WiredReplay.outside`. Parameters come from the target; batches and other tensors that
        were made in an earlier step come from the reference's recording.
        """
        known = self._kept.get(ref.record)
        if known is None and ref.record in self._parameters:
            return self._target.array(self._twins[ref.record])
        if known is None and self.side.first_made.get(ref.record, self._start) < self._start:
            return self.side.run.array(ref.record)
        return known if known is not None else super().outside(call, ref)

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """As `TreeReplay.passing`; keeps every array by its record."""
        self._kept.update((r.record, arrays[r.slot]) for r in call.refs if r.slot in arrays)
        return dict(arrays)


def _steps_of(run: Run) -> list[Step]:
    read: set[int] = set()
    elsewhere: set[int] = set()
    for call in in_order(c for c in run.calls if c.phase != OPTIMIZER):
        reads = (r.record for r in call.refs if is_read(r.slot))
        read.update(n for n in reads if call.phase == "forward" and n not in elsewhere)
        if call.kind == "operator":
            written = {r.record for r in call.refs if is_written(r.slot)}
            elsewhere |= written - read  # a view of what was read shows that again
    parameters = read
    below = children(run.calls)
    steps: list[Step] = []
    before, is_behind_step = _Trace(run), False
    for region in (run.calls[k] for k in below.get(-1, ()) if run.calls[k].kind == "region"):
        operators = [run.calls[k] for k in below.get(region.id, ())]
        if region.phase != OPTIMIZER:
            before = _Trace(run) if is_behind_step else before
            before.follow(operators if region.phase == "forward" else ())
            is_behind_step = False
            continue
        inside = _Trace(run)
        inside.follow(operators)
        after = {p: record for p, record in inside.last.items() if p in parameters}
        taken = {p: inside.sources[record] & elsewhere - parameters for p, record in after.items()}
        gradients = {p: before.gradient(next(iter(t))) for p, t in taken.items() if len(t) == 1}
        if not after:
            continue
        step = Step((region,), gradients, after)
        if is_behind_step and after.keys().isdisjoint(steps[-1].after.values()):
            step = steps.pop().followed_by(step)
        steps.append(step)
        is_behind_step = True
    return steps


class _Trace:
    """Follows tensors through operators that keep their shape. Numbers that all tensors share, such
    as the step size or the factor of clipping, have another shape and are not followed.

    sources: by record, the records from outside these operators that it was computed from; last: by
    record of a tensor that is updated in place, the record of its last value.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first: dict[int, int] = {}
        self._operators: dict[int, tuple[str, ...]] = {}
        self.sources: dict[int, frozenset[int]] = {}
        self.last: dict[int, int] = {}

    def follow(self, operators: Iterable[Call]) -> None:
        """Follow tensors through these operators, which come in execution order."""
        for operator in operators:
            for refs in _by_tensor(operator):
                self._through(operator, refs)

    def _through(self, operator: Call, refs: Iterable[Ref]) -> None:
        inputs = {split_slot(r.slot)[1]: r.record for r in refs if is_input(r.slot)}
        for ref in (r for r in refs if is_written(r.slot)):
            base = inputs.get(split_slot(ref.slot)[1]) if is_mutated(ref.slot) else None
            if base == ref.record or ref.record in inputs.values():
                continue  # handed on as it is
            shape = self._run.records[ref.record].shape
            read = [n for n in inputs.values() if self._run.records[n].shape == shape]
            self.sources[ref.record] = frozenset[int]().union(
                *(self.sources.get(n, frozenset((n,))) for n in read)
            )
            names = (name for n in read for name in self._operators.get(n, ()))
            self._operators[ref.record] = (*names, base_name(operator.op).strip("_"))
            if base is not None:
                first = self._first[ref.record] = self._first.get(base, base)
                self.last[first] = ref.record

    def gradient(self, taken: int) -> Gradient:
        """The gradient whose record a step takes, with its origin and the operators in between."""
        made = self.sources.get(taken, frozenset((taken,)))
        is_one = len(made) == 1
        return Gradient(
            taken, next(iter(made)) if is_one else taken, self._operators.get(taken, ())
        )


def _by_tensor(operator: Call) -> list[list[Ref]]:
    """The slots of an operator; for one that treats many tensors alike (`_foreach_`, `_fused_`),
    one list for each tensor.
    """
    if not operator.op.startswith(_LISTS):
        return [list(operator.refs)]
    groups: dict[str, list[Ref]] = {}
    for ref in operator.refs:
        groups.setdefault(ref.slot.rpartition(".")[2], []).append(ref)
    return list(groups.values())
