"""Which modules of one call may compute in a narrower type.

The module chooses modules, predicts the error of all of them together, and checks it by running the
mixed model.

Independent rounding errors add up in squares. Correlation and the effect of other inputs are
measured: groups of modules are run on several calls, and the ratios of their errors to the root of
the sum of squares give the correction.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from whence.display import listed
from whence.results.precision import (
    ModuleEffect,
    PrecisionCheck,
    PrecisionPlan,
    PrecisionRequest,
    PrecisionTable,
)
from whence.results.probe import Held, Property, PropertyAnswer
from whence.workflows.probe.torch.answering import Unanswered
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, said
from whence.workflows.probe.torch.measuring import relative_rms
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.precision.narrowing import Narrowed, unfit
from whence.workflows.probe.torch.precision.units import Unit, units
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.trace import Key, Trace

CALIBRATION, CHECKS = 4, 3
"""Number of calls on which groups of modules are run, and number on which the plan is checked.
Apart from the first call, each has inputs of its own.
"""
_ELEMENTS = 256
"""Number of output elements from which one call is enough to measure the error: a root mean square
of so many elements varies by 4 %.
"""
_MOST_CALLS, _MOST_OF_PLANS = 8, 32
"""Most calls for each module alone and for groups, and most calls for a plan."""


def precision(
    judge: Judge,
    inputs: CallInputs,
    request: PrecisionRequest,
    others: Sequence[CallInputs] = (),
) -> PropertyAnswer:
    """Run the model with one module after the other in each narrower type, and make a plan.

    others: calls of the same kind; modules are measured on the first half of them too, and plans
    are checked on the rest. Without any, inputs are derived from those of the call.
    """
    try:
        found = units(judge.subject, inputs)
        mixing = Mixing(judge.subject, inputs, judge.unit)
    except Exception as error:  # whatever the user's model raises
        raise Unanswered(f"the model cannot be run again: {said(error)}", Held.UNKNOWN) from error
    if not found or not mixing.names:
        raise Unanswered(
            "no output holds numbers" if found else "no module with parameters was called"
        )
    seeds = itertools.count(101)

    vocabulary = _vocabulary(found)

    def made() -> int:
        """Add a call with new inputs to `mixing`; every other one contains ids that the call lacks.
        Returns its number.
        """
        seed = next(seeds)
        changed = similar(inputs.tensor, seed)
        if seed % 2 and vocabulary and inputs.is_tokens:
            number = mixing.add(
                inputs.changed(**{inputs.main: other_ids(changed, vocabulary, seed)})
            )
            if mixing.runs_on(number):
                return number
        return mixing.add(inputs.changed(**{inputs.main: changed}))

    own = [mixing.add(call) for call in others]
    learnt = own[: len(own) // 2]
    wanted = max(-(-_ELEMENTS // mixing.least_elements), 1 + len(learnt))
    for_each = min(_MOST_CALLS, wanted)
    for_plans = min(_MOST_OF_PLANS, max(wanted, CALIBRATION))
    calls = [0, *learnt, *(made() for _ in range(for_plans - 1 - len(learnt)))]
    to_check = own[len(learnt) :]
    everything = _everything(judge.subject.model, found)
    plans, rows = [], {}
    for to in request.to:
        rows[to], effects = _alone(mixing, found, to, (calls[:for_each], calls[:CALIBRATION]))
        planner = _Planner(
            mixing,
            (found, effects),
            to,
            calls,
            for_groups=max(for_each, CALIBRATION),
            to_check=lambda: to_check or [made() for _ in range(CHECKS)],
        )
        plans.append(planner.plan(request.budget, everything))
    table = PrecisionTable(tuple(plans), rows, mixing.runs)
    answer = _answer(table, plans, found, everything)
    return answer if own else replace(answer, notes=(*answer.notes, _MADE))


_MADE = (
    "other inputs were made of those of this call; real ones may have their largest activations "
    "elsewhere, and 8-bit types err more there: give some by whence.probe(..., others=[...])"
)


def similar(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Another input of the same kind.

    Ids are drawn from the tensor's own ids. Numbers keep mean and variance: half of the variance
    comes from the tensor's values moved to another place, half from noise.
    """
    if not tensor.is_floating_point():
        return other_tokens(tensor, seed)
    generator = torch.Generator().manual_seed(seed)
    wide = tensor.double()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(wide)
    mean, size = wide.mean(), wide.std(correction=0)
    moved = wide.flatten().roll(seed * 7919).reshape(wide.shape) - mean
    return (mean + 0.5**0.5 * (moved + size * noise)).to(tensor.dtype)


def other_ids(tokens: torch.Tensor, vocabulary: int, seed: int) -> torch.Tensor:
    """The ids with half of them drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, tokens.shape, generator=generator)
    is_drawn = torch.rand(tokens.shape, generator=generator) < 0.5
    return torch.where(is_drawn.to(tokens.device), drawn.to(tokens), tokens)


def _vocabulary(found: Sequence[Unit]) -> int:
    """Number of rows of the largest embedding, 0 without one."""
    tables = [u.module for u in found if isinstance(u.module, torch.nn.Embedding)]
    return max((int(table.num_embeddings) for table in tables), default=0)


def _alone(
    mixing: Mixing, found: Sequence[Unit], to: str, calls: tuple[Sequence[int], Sequence[int]]
) -> tuple[tuple[ModuleEffect, ...], dict[str, Errors]]:
    """The effect of each module alone, the most harmful first, and the errors by path.

    calls: numbers of the calls for most modules, and of those for embeddings: an embedding has no
    effect on a call that does not read the row.
    """
    rows, effects = [], {}
    for unit in found:
        row = ModuleEffect(unit.path, unit.op_type, unit.parameters, why=unfit(unit.module, to))
        if not row.why:
            row, errors = _effect(
                mixing, row, to, calls[isinstance(unit.module, torch.nn.Embedding)]
            )
            if errors is not None:
                effects[unit.path] = errors
        rows.append(row)
    return tuple(sorted(rows, key=_harm)), effects


def _harm(row: ModuleEffect) -> tuple[int, float]:
    """Sort key, the most harmful first: modules that give NaN, then by error, then modules that
    cannot run narrower.
    """
    if row.error is None:
        return (0 if row.why.startswith(_NOT_FINITE) else 2), 0.0
    return 1, -row.error


_NOT_FINITE = "NaN or Inf"


def _effect(
    mixing: Mixing, row: ModuleEffect, to: str, calls: Sequence[int]
) -> tuple[ModuleEffect, Errors | None]:
    try:
        moved = [mixing.moved([row.module], to, call) for call in calls]
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises in this type
        why = f"it does not run so: {said(error)}"
        return replace(row, why=why), None
    errors: Any = np.sqrt(np.mean([m.errors**2 for m in moved], axis=0))
    if not np.isfinite(errors).all():
        return replace(row, why=f"{_NOT_FINITE} in the outputs"), None
    return (
        replace(
            row,
            error=float(errors.max(initial=0.0)),
            output=mixing.names[int(errors.argmax())],
            flips=sum(m.flips for m in moved),
            rows=sum(m.rows for m in moved),
        ),
        errors,
    )


def _everything(model: Any, found: Sequence[Unit]) -> int:
    """Number of parameters: of the measured modules (tied ones counted in each) and of the rest."""
    inside = {id(p) for unit in found for p in unit.module.parameters()}
    rest = sum(int(p.numel()) for p in model.parameters() if id(p) not in inside)
    return rest + sum(unit.parameters for unit in found)


def _answer(
    table: PrecisionTable, plans: Sequence[PrecisionPlan], found: Sequence[Unit], everything: int
) -> PropertyAnswer:
    broken = [plan for plan in plans if not plan.holds]
    notes = [
        f"the model was called {table.runs} times; code between modules (sums, attention's "
        "products and softmax) stays as it is"
    ]
    held = sum(unit.parameters for unit in found)
    if held < everything:
        share = 100 * (everything - held) / everything
        notes.append(f"{share:.2g} % of the parameters belong to code between modules, and stay")
    if not broken:
        return PropertyAnswer(
            Property.PRECISION, Held.MEASURED, precision=table, notes=tuple(notes)
        )
    why = (
        f"{broken[0].to}: the mixed model errs more than predicted, however small it is planned: "
        "its inputs differ too much, or it takes discrete decisions"
    )
    return PropertyAnswer(
        Property.PRECISION,
        Held.UNKNOWN,
        precision=table,
        why=why,
        next="give further calls: whence.probe(..., others=[...])",
        notes=tuple(notes),
    )


_DEVIATIONS = 3.5
"""Number of standard deviations, of the logarithm of the measured ratios, by which a prediction
exceeds their mean.

If the logarithms are normal, 1 call in 4000 exceeds the prediction. Outputs of a few numbers have
longer tails, because the output itself may be small.
"""
_LEAST = 1.35
"""Least factor between quadrature and prediction: inputs derived from one call agree more with each
other than other inputs do.
"""
_GROUPS = 4
"""Number of random halves of the modules that are run in addition to all of them."""
_MOST_SHRUNK = 4
_INFINITE = 1e6
"""Ratio for a group that gives NaN or Inf although each of its modules alone gives none."""


class Ratios(NamedTuple):
    """Measured errors of groups divided by their quadrature.

    correlated: for groups on the call itself; the largest shows the effect of dependent roundings.
    all: on other calls too. least_spread: standard deviation of the logarithm that the number of
    outputs alone causes.
    """

    correlated: tuple[float, ...]
    all: tuple[float, ...]
    least_spread: float

    @property
    def correction(self) -> float:
        """The factor by which a group's error exceeded its quadrature on the same call;
        at least 1.
        """
        return max(1.0, *self.correlated) if self.correlated else 1.0

    @property
    def margin(self) -> float:
        """The factor that the prediction allows in addition to the correction."""
        return max(1.0, self.bound / self.correction)

    @property
    def bound(self) -> float:
        """The prediction is the quadrature times this factor."""
        logs = np.log([r for r in self.all if r > 0] or [1.0])
        spread = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
        spread = max(spread, self.least_spread)
        return float(max(_LEAST, self.correction, np.exp(logs.mean() + _DEVIATIONS * spread)))

    def and_also(self, found: Sequence[float]) -> Ratios:
        """The ratios extended by those of one more group, the first of them on the call itself."""
        finite = [r if np.isfinite(r) else _INFINITE for r in found]
        return self._replace(correlated=(*self.correlated, *finite[:1]), all=(*self.all, *finite))


class _Planner:
    """Makes plans for one type.

    measured: modules, and by path the errors of each alone; a module without a finite error is
    never chosen. calls: numbers of the calls of `mixing` on which plans are run, the first being
    the call itself; `for_groups` of them are used for groups. to_check: returns the numbers of
    calls on which to check a plan.
    """

    def __init__(
        self,
        mixing: Mixing,
        measured: tuple[Sequence[Unit], Mapping[str, Errors]],
        to: str,
        calls: Sequence[int],
        for_groups: int,
        to_check: Callable[[], Sequence[int]],
    ) -> None:
        self._mixing, self._to = mixing, to
        self._calls, self._for_groups, self._to_check = calls, for_groups, to_check
        self._used, self._decided = set(calls), 0
        units, effects = measured
        # A module without effect here may have one on another call, so it counts as one rounding of
        # the model's dtype.
        self._effects = {
            path: np.maximum(e, mixing.unit) for path, e in effects.items() if np.isfinite(e).all()
        }
        self._units = [u for u in units if u.path in self._effects]

    def plan(self, budget: float, of_parameters: int) -> PrecisionPlan:
        """Make the plan for an error budget, and run the mixed model."""
        ratios = self._groups()
        chosen = self._chosen(budget, ratios.bound)
        chosen, ratios = self._with_itself(chosen, ratios, budget)
        checks: tuple[PrecisionCheck, ...] = ()
        shrunk, holds = 0, True
        while chosen:
            checks = self._checked(chosen)
            predicted = ratios.bound * self.quadrature(chosen)
            holds = all(c.error is not None and c.error <= predicted for c in checks)
            if holds or shrunk == _MOST_SHRUNK:
                break
            shrunk += 1
            ratios, smaller = self._after(checks, chosen, ratios), budget / 2**shrunk
            chosen = self._chosen(smaller, ratios.bound)
            checks, holds = (), True
        return self._made(budget, of_parameters, chosen, ratios, checks, (shrunk, holds))

    def quadrature(self, paths: Sequence[str]) -> float:
        """Root of the sum of squares of the modules' own errors, for the output with the largest
        value.
        """
        if not paths:
            return 0.0
        return float(np.sqrt(sum(self._effects[p] ** 2 for p in paths)).max(initial=0.0))

    # ---- choosing

    def _chosen(self, budget: float, bound: float) -> list[str]:
        """Choose modules by error per parameter until the budget is used; a module that exceeds it
        is skipped.
        """
        order = sorted(
            self._units,
            key=lambda u: float(self._effects[u.path].max(initial=0.0)) ** 2 / u.parameters,
        )
        chosen: list[str] = []
        total = np.zeros(len(self._mixing.names))
        for unit in order:
            more = total + self._effects[unit.path] ** 2
            if bound * float(np.sqrt(more).max(initial=0.0)) <= budget:
                total = more
                chosen.append(unit.path)
        return chosen

    def _groups(self) -> Ratios:
        """Ratios of all modules together, and of random halves."""
        paths = [u.path for u in self._units]
        draw = random.Random(0)
        # A norm of n independent numbers varies by 1 / sqrt(2 n) of itself, and errors are divided
        # by the norm of the output.
        ratios = Ratios((), (), self._mixing.least_elements**-0.5)
        if not paths:
            return ratios
        halves = [draw.sample(paths, max(1, len(paths) // 2)) for _ in range(_GROUPS)]
        for group in (paths, *halves):
            ratios = self._more(ratios, group, self._for_groups)
        return ratios

    def _with_itself(
        self, chosen: list[str], ratios: Ratios, budget: float
    ) -> tuple[list[str], Ratios]:
        """Measure the chosen modules as a group and shrink the plan until its error fits the
        budget.

        More calls are used when outputs have few elements.
        """
        for _ in range(_MOST_SHRUNK):
            if not chosen:
                break
            ratios = self._more(ratios, chosen, len(self._calls))
            again = self._chosen(budget, ratios.bound)
            if set(again) >= set(chosen):
                break  # what was measured holds: it is not made larger than that
            chosen = again
        return chosen, ratios

    def _more(self, ratios: Ratios, group: Sequence[str], calls: int) -> Ratios:
        quadrature = self.quadrature(group)
        measured = [self._run(group, call) for call in self._calls[:calls]]
        found = [m.worst / quadrature for m in measured if m is not None and quadrature]
        return ratios.and_also(found)

    def _after(
        self, checks: Sequence[PrecisionCheck], chosen: Sequence[str], ratios: Ratios
    ) -> Ratios:
        quadrature = self.quadrature(chosen)
        errors = [c.error for c in checks if c.error is not None]
        return ratios.and_also([error / quadrature for error in errors if quadrature])

    # ---- running

    def _run(self, group: Sequence[str], call: int) -> Moved | None:
        try:
            moved = self._mixing.moved(group, self._to, call)
        except Exception:  # noqa: BLE001 - whatever the user's model raises in this type
            return None
        self._decided = max(self._decided, moved.decided)
        return moved

    def _checked(self, chosen: Sequence[str]) -> tuple[PrecisionCheck, ...]:
        """Check the mixed model on the call itself and on other calls."""
        out = []
        for number, call in enumerate((self._calls[0], *self._to_check())):
            moved = self._run(chosen, call)
            error = moved.worst if moved is not None and np.isfinite(moved.worst) else None
            flips, rows = (moved.flips, moved.rows) if moved is not None else (0, 0)
            decided = moved.decided if moved is not None else 0
            words = "this call" if not number else f"other inputs {number}"
            out.append(PrecisionCheck(words, error, flips, rows, call in self._used, decided))
            self._used.add(call)
        return tuple(out)

    def _made(
        self,
        budget: float,
        of_parameters: int,
        chosen: Sequence[str],
        ratios: Ratios,
        checks: tuple[PrecisionCheck, ...],
        ended: tuple[int, bool],
    ) -> PrecisionPlan:
        own = {u.path: u.parameters for u in self._units}
        worst = sorted(self._effects, key=lambda p: -float(self._effects[p].max(initial=0.0)))
        quadrature = self.quadrature(chosen)
        why = ""
        if not chosen:
            least = float(self._effects[worst[-1]].max(initial=0.0)) if worst else None
            why = (
                f"no module fits the budget: alone, the least harmful moves the outputs by "
                f"{least:.2g}, times {ratios.bound:.2g} for what groups and other inputs do"
                if least is not None
                else "no module can be narrowed to this type"
            )
        return PrecisionPlan(
            to=self._to,
            budget=budget,
            modules=tuple(chosen),
            keep=tuple(p for p in worst if p not in chosen),
            parameters=sum(own[p] for p in chosen),
            of_parameters=of_parameters,
            predicted=ratios.bound * quadrature,
            quadrature=quadrature,
            correction=ratios.correction,
            margin=ratios.margin,
            checks=checks,
            holds=ended[1],
            shrunk=ended[0],
            why=why,
            decides=self._mixing.decides,
            decided=self._decided,
        )


# Runs a model with some of its modules in a narrower type, and measures the error of its outputs.
#
# Discrete decisions that depend on computed numbers: which experts, what is above a limit.
#
# When a rounding changes a decision, the outputs jump; a sum of small errors cannot predict it.

Errors = npt.NDArray[np.float64]
"""||y' - y|| / ||y|| for each output; infinite when one has NaN, Inf or another shape."""


class Moved(NamedTuple):
    """The outputs of a mixed model compared with those of the unchanged model.

    flips: number of rows whose largest element changed place, out of `rows`, in the first output
    with two or more axes. decided: number of rows in which discrete decisions inside the model
    changed.
    """

    errors: Errors
    flips: int
    rows: int
    decided: int

    @property
    def worst(self) -> float:
        """The largest error over the outputs."""
        return float(self.errors.max(initial=0.0))


class Mixing:
    """Measures mixed models on numbered calls; number 0 is the call in question.

    The unchanged model runs once for each call. names: of the measured, floating-point outputs.
    unit: unit roundoff of the model. decides: the operators that take discrete decisions, in words.
    runs: how often the model was called. Raises what the model raises.
    """

    def __init__(self, subject: Subject, inputs: CallInputs, unit: float) -> None:
        self.subject, self.unit, self.runs = subject, unit, 0
        self._inputs = [inputs]
        self._bases: dict[int, tuple[Outputs, _Taken]] = {}
        first, taken = self._base(0)
        self.decides = _decision_words(taken)
        self.names = [n for n, t in first.items() if t.is_floating_point() and t.numel()]

    def add(self, inputs: CallInputs) -> int:
        """Add another call of the same kind and return its number."""
        self._inputs.append(inputs)
        return len(self._inputs) - 1

    def runs_on(self, call: int) -> bool:
        """Whether the unchanged model accepts this call; ids may be marks that it counts."""
        try:
            outputs, _ = self._base(call)
        except Exception:  # noqa: BLE001 - whatever the user's model raises
            return False
        return all(bool(outputs[name].isfinite().all()) for name in self.names if name in outputs)

    @property
    def least_elements(self) -> int:
        """Number of elements of the smallest output."""
        return min(int(self._base(0)[0][name].numel()) for name in self.names)

    def _base(self, call: int) -> tuple[Outputs, _Taken]:
        if call not in self._bases:
            self._bases[call] = self._run(self._inputs[call])
        return self._bases[call]

    def moved(self, paths: Collection[str], to: str, call: int = 0) -> Moved:
        """The outputs on one of the calls with these modules in a narrower type.

        Raises what the model raises in that type.
        """
        base, before = self._base(call)
        with Narrowed(self.subject.model, dict.fromkeys(paths, to)):
            outputs, after = self._run(self._inputs[call])
        errors = np.array([_error(base[n], outputs.get(n)) for n in self.names])
        return Moved(errors, *self._flips(base, outputs), _changed_decisions(before, after))

    def _run(self, call: CallInputs) -> tuple[Outputs, _Taken]:
        self.runs += 1
        if self._bases and not self.decides:
            return self.subject.run(call), {}
        deciding = _Deciding(self.subject.model)
        return self.subject.run(call, deciding.listening()), deciding.taken

    def _flips(self, base: Outputs, outputs: Outputs) -> tuple[int, int]:
        name = next((n for n in self.names if base[n].dim() >= 2 and base[n].shape[-1] > 1), None)
        if name is None or name not in outputs or base[name].shape != outputs[name].shape:
            return 0, 0
        before, after = base[name].argmax(-1), outputs[name].argmax(-1)
        return int((before != after).sum()), before.numel()


def _error(base: Any, other: Any) -> float:
    if other is None or other.shape != base.shape:
        return float("inf")
    return relative_rms(base, other)


_DECIDE = (
    "topk", "argmax", "argmin", "max.dim", "min.dim", "kthvalue", "multinomial", "gt.", "ge.",
    "lt.", "le.",
)  # fmt: skip

_Taken = dict[Key, torch.Tensor]
"""The choices of each deciding operator: indices, or whether each element is above a limit."""


class _Deciding(Trace):
    """A trace that records the decisions of a run in `taken`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, begin=1 << 60, change=self._decided)
        self.taken: _Taken = {}

    def _decided(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        name = str(func).partition(".")[2]
        if name.startswith(_DECIDE) and args and args[0].is_floating_point():
            indices = out[-1] if isinstance(out, tuple) else out
            self.taken[key] = indices.detach().clone()
        return out


def _changed_decisions(before: _Taken, after: _Taken) -> int:
    """Number of rows with other choices; the order within top-k choices does not count."""
    count = 0
    for key, indices in before.items():
        other = after.get(key)
        if other is None or other.shape != indices.shape:
            count += 1
        elif indices.dim() and key[2].startswith("aten.topk"):
            a, b = indices.sort(-1).values, other.sort(-1).values
            count += int((a != b).any(-1).sum())
        else:
            count += int((indices != other).sum())
    return count


def _decision_words(taken: _Taken) -> str:
    """The deciding operators: "aten.topk in model.layers.0.mlp.gate and 3 more"; "" for none."""
    places = dict.fromkeys((key[2].removesuffix(".default"), key[0]) for key in taken)
    words = [f"{operator} in {scope or 'the model itself'}" for operator, scope in places]
    return listed(words, 1)
