"""Which modules of one call may compute in a narrower type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from whence.results.precision import (
    ModuleEffect,
    PrecisionPlan,
    PrecisionRequest,
    PrecisionTable,
)
from whence.results.probe import Held, Property, PropertyAnswer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge
from whence.workflows.probe.torch.precision.measuring import Errors, Mixing
from whence.workflows.probe.torch.precision.narrowing import unfit
from whence.workflows.probe.torch.precision.planning import Planner
from whence.workflows.probe.torch.precision.units import Unit, units

CALIBRATION, CHECKS = 4, 3
"""Calls that groups of modules are run on, and that the plan is checked on: each of the former but
the first, and each of the latter, has inputs of its own.
"""
_ELEMENTS = 256
"""Elements of an output from which one call tells how far it moves: a root mean square of so many
varies by 4 %.
"""
_MOST_CALLS, _MOST_OF_PLANS = 8, 32
"""So many calls at most for each module alone and for groups, and for a plan."""


def precision(
    judge: Judge,
    inputs: CallInputs,
    request: PrecisionRequest,
    others: Sequence[CallInputs] = (),
) -> PropertyAnswer:
    """Run the model with one module after the other in each narrower type, and plan. others: calls
    of the same kind: modules are measured on the first half of them too, and plans are checked on
    the rest. Without any, inputs are made from those of the call.
    """
    try:
        found = units(judge.subject, inputs)
        mixing = Mixing(judge.subject, inputs, judge.unit)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        why = f"the model cannot be run again: {type(error).__name__}: {error}"[:160]
        return PropertyAnswer(Property.PRECISION, Held.UNKNOWN, why=why)
    if not found or not mixing.names:
        why = "no output holds numbers" if found else "no module with parameters was called"
        return PropertyAnswer(Property.PRECISION, Held.ABSENT, why=why)
    seeds = itertools.count(101)

    vocabulary = _vocabulary(found)

    def made() -> int:
        """A call with inputs of its own, every other one with ids that the call has not."""
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
        planner = Planner(
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
    """Another input of the same kind: ids of the same vocabulary, or numbers of the same mean and
    variance, half of them the tensor's own from another place, half noise.
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
    """Half of the ids drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, tokens.shape, generator=generator)
    is_drawn = torch.rand(tokens.shape, generator=generator) < 0.5
    return torch.where(is_drawn.to(tokens.device), drawn.to(tokens), tokens)


def _vocabulary(found: Sequence[Unit]) -> int:
    """Rows of the largest embedding, 0 for none."""
    tables = [u.module for u in found if isinstance(u.module, torch.nn.Embedding)]
    return max((int(table.num_embeddings) for table in tables), default=0)


def _alone(
    mixing: Mixing, found: Sequence[Unit], to: str, calls: tuple[Sequence[int], Sequence[int]]
) -> tuple[tuple[ModuleEffect, ...], dict[str, Errors]]:
    """The effect of each module alone, the most harmful first, and the errors by path. calls: to
    measure on, and those of embeddings: rows that a call does not read say nothing in it.
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
    """Most harmful first: what gives NaN, then by error, then what does not run so."""
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
        why = f"it does not run so: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
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
    """Parameters of the modules that are measured, tied ones counted for each, and of the rest."""
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
