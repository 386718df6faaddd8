"""Training steps in captures of operators: which gradient a step takes for each parameter, and what
it leaves of that, found along what its operators read and write.

Both runs may step by other operators (one parameter after the other, many at once, fused), so
their tensors are paired by the parameter that they belong to. A loss, a backward pass or a step
that is written otherwise is right where the gradients that the next step takes are, or where the
reference's step makes of the target's gradients what the target made of them.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.call_tree import REPLICAS
from whence.comparison.replays.wired import WiredReplay
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.frameworks.operator_names import base_name
from whence.judge.limits import LIMITS
from whence.records import Call, Ref, Run, children
from whence.records.slots import is_input, is_mutated, is_param, is_written, split_slot
from whence.records.training import OPTIMIZER

_LISTS = ("aten._foreach_", "aten._fused_")
_CANCELLED = 1e-3  # of the largest gradient: smaller ones may be what is left of larger terms


class Gradient(NamedTuple):
    """taken: what the step takes; made: what it was before the script changed it, by these
    operators.
    """

    taken: int
    made: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What the operators of one step do with parameters, by the record each had before it.

    gradients: what it takes; after: what it leaves.
    """

    call: Call
    gradients: Mapping[int, Gradient]
    after: Mapping[int, int]


class OperatorSteps:
    """The steps of both runs, the k-th with the k-th."""

    def __init__(self, paired: PairedRuns, sides: BothSides) -> None:
        self._paired, self._sides = paired, sides
        self._right_gradients: dict[int, bool] = {}
        self._twins = {
            slot.reference_record: slot.target_record
            for slots in paired.slots
            for slot in slots.values()
            if is_param(slot.reference_slot)
        }

    @functools.cached_property
    def _steps(self) -> list[tuple[Step, Step]]:
        steps, partners = _steps_of(self._paired.reference), _steps_of(self._paired.target)
        places, others = ([(s.call.root, s.call.step) for s in n] for n in (steps, partners))
        return list(zip(steps, partners, strict=True)) if places == others else []

    def take_back(self, call: Call) -> bool:
        """Is a call of a training right by what comes behind it: the step by the parameters that
        it leaves, all before it by the gradients that the next step takes?
        """
        orders = [step.call.order for step, _ in self._steps]
        if call.phase == OPTIMIZER:
            return bisect.bisect_right(orders, call.order) - 1 in self._right_steps
        k = bisect.bisect_right(orders, call.order)
        if k < len(orders) and k not in self._right_gradients:
            self._right_gradients[k] = self._takes_right(k)
        return self._right_gradients.get(k, False)

    def _takes_right(self, k: int) -> bool:
        """Does every gradient that a step takes differ by rounding alone?

        Code before the step that takes a scale out in both runs, as clipping does, takes nothing
        back: what it is given counts, unless it is written otherwise.
        """
        step, partner = self._steps[k]
        with contextlib.suppress(KeyError, ElementsMissing):
            pairs = [(step.gradients[p], partner.gradients[self._twins[p]]) for p in step.after]
            is_same_code = all(a.operators == b.operators for a, b in pairs)
            scopes = [self._scopes[p] for p in step.after]
            return (
                len(step.after) == len(partner.after) > 0
                and self._are_near([(a.taken, b.taken) for a, b in pairs], scopes)
                and (
                    not is_same_code or self._are_near([(a.made, b.made) for a, b in pairs], scopes)
                )
            )
        return False

    @functools.cached_property
    def _scopes(self) -> dict[int, str]:
        """The module that holds each parameter."""
        return {
            r.record: f"{c.scope}.{r.slot}".rpartition(".")[0]
            for c in self._paired.reference.calls
            for r in c.slots("param")
        }

    def _are_near(self, records: Iterable[tuple[int, int]], scopes: Sequence[str]) -> bool:
        """Do gradients differ by rounding alone? One that cancels has the size of its terms, which
        those of the same module show. Raises KeyError, ElementsMissing.
        """
        figures = [self._apart(*pair) for pair in records]
        largest = dict.fromkeys(scopes, 0.0)
        for scope, (_, size, _) in zip(scopes, figures, strict=True):
            largest[scope] = max(largest[scope], size)
        of_all = _CANCELLED * max(largest.values())
        return all(
            error <= LIMITS.within(u) * max(largest[scope], of_all)
            for scope, (error, _, u) in zip(scopes, figures, strict=True)
        )

    def _apart(self, reference_record: int, target_record: int) -> tuple[float, float, float]:
        """(how far apart two tensors are, the size of the reference's, unit roundoff)."""
        reference = self._paired.reference.array(reference_record)
        target = self._paired.target.array(target_record)
        u = max(judge.unit_roundoff(dtypes.of(a).name) for a in (reference, target))
        exact = reference.astype(np.float64)
        size = float(np.linalg.norm(exact))
        if reference.shape != target.shape:
            return math.inf, size, u
        return float(np.linalg.norm(target.astype(np.float64) - exact)), size, u

    @functools.cached_property
    def _right_steps(self) -> set[int]:
        """The steps that leave what the reference's operators make of the target's gradients."""
        right: set[int] = set()
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
            working = self._working_dtype()
            runs = [self._replay("float64", None)]
            runs += [self._replay(working, seed) for seed in (None, *range(REPLICAS))]
            for k, (step, partner) in enumerate(self._steps):
                wide, *copies = (run.through(step, partner) for run in runs)
                if len(step.after) == len(partner.after) and all(
                    judge.whole(
                        self._paired.target.array(partner.after[self._twins[before]]),
                        wide[record],
                        [copy[record] for copy in copies],
                    ).score
                    <= 1
                    for before, record in step.after.items()
                ):
                    right.add(k)
        return right

    def _replay(self, working: str, seed: int | None) -> _StepReplay:
        noise = np.random.default_rng(seed) if seed is not None else None
        return _StepReplay(self._sides, working, self._twins, noise)

    def _working_dtype(self) -> str:
        """That of the target's parameters, where the reference's is another."""
        for before in (p for step, _ in self._steps for p in step.after):
            target = self._paired.target.records[self._twins[before]].dtype
            if self._paired.reference.records[before].dtype != target:
                return target
        return "recorded"


class _StepReplay(WiredReplay):
    """Runs the reference's steps on the target's parameters and gradients; what an optimiser keeps
    from step to step goes on as it is computed.
    """

    def __init__(
        self, sides: BothSides, working: str, twins: Mapping[int, int], noise: Any
    ) -> None:
        super().__init__(sides.reference, working, lambda *_: None, noise=noise)
        self._sides, self._twins = sides, twins
        self._kept: dict[int, Array] = {}

    def through(self, step: Step, partner: Step) -> dict[int, Array]:
        """What a step leaves, by record. Raises ReplayRefused, ElementsMissing, KeyError."""
        run = self._sides.target.run
        for before in step.after:
            twin = self._twins[before]
            self._kept[before] = run.array(twin)
            self._kept[step.gradients[before].taken] = run.array(partner.gradients[twin].taken)
        self.run(step.call, {})
        return {record: self._kept[record] for record in step.after.values()}

    def outside(self, call: Call, ref: Ref) -> Array | None:
        """As `WiredReplay.outside`."""
        known = self._kept.get(ref.record)
        return known if known is not None else super().outside(call, ref)

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """As `TreeReplay.passing`; keeps what operators leave."""
        self._kept.update((r.record, arrays[r.slot]) for r in call.refs if r.slot in arrays)
        return dict(arrays)


def _steps_of(run: Run) -> list[Step]:
    parameters = {r.record for c in run.calls for r in c.refs if is_param(r.slot)}
    elsewhere = {
        r.record
        for c in run.calls
        if c.phase != OPTIMIZER and c.kind == "operator"
        for r in c.refs
        if is_written(r.slot)
    }
    below = children(run.calls)
    steps: list[Step] = []
    before = _Trace(run)
    for region in (run.calls[k] for k in below.get(-1, ()) if run.calls[k].kind == "region"):
        operators = [run.calls[k] for k in below.get(region.id, ())]
        if region.phase != OPTIMIZER:
            before.follow(operators if region.phase == "forward" else ())
            continue
        inside = _Trace(run)
        inside.follow(operators)
        after = {p: record for p, record in inside.last.items() if p in parameters}
        taken = {p: inside.sources[record] & elsewhere - parameters for p, record in after.items()}
        gradients = {p: before.gradient(next(iter(t))) for p, t in taken.items() if len(t) == 1}
        if after:
            steps.append(Step(region, gradients, after))
            before = _Trace(run)
    return steps


class _Trace:
    """Follows tensors of one shape through operators. Numbers that all tensors share, as the length
    of a step or the factor of clipping, have other shapes.

    sources: by record, what it was made of that no operator here made; last: by record, what its
    memory held in the end.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first: dict[int, int] = {}
        self._operators: dict[int, tuple[str, ...]] = {}
        self.sources: dict[int, frozenset[int]] = {}
        self.last: dict[int, int] = {}

    def follow(self, operators: Iterable[Call]) -> None:
        """Go on through these, in the order of execution."""
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
        """What is behind a gradient that a step takes."""
        made = self.sources.get(taken, frozenset((taken,)))
        is_one = len(made) == 1
        return Gradient(
            taken, next(iter(made)) if is_one else taken, self._operators.get(taken, ())
        )


def _by_tensor(operator: Call) -> list[list[Ref]]:
    """The slots of an operator; of one that does the same to many tensors, those of each."""
    if not operator.op.startswith(_LISTS):
        return [list(operator.refs)]
    groups: dict[str, list[Ref]] = {}
    for ref in operator.refs:
        groups.setdefault(ref.slot.rpartition(".")[2], []).append(ref)
    return list(groups.values())
