"""What each quantised layer costs: its own loss, and how much of the error at the model's outputs
goes away where it alone is left in float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from whence import dtypes
from whence.align import step_of
from whence.comparison.context import Context
from whence.comparison.verdicts.quantised.programs import LayerPrograms
from whence.comparison.verdicts.quantised.weights import CodedParameters
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call
from whence.records.quantised import F64, Coded, QuantisedLayer
from whence.records.slots import is_output
from whence.results import LayerCost, SlotPair, Verdict

_MOST_REPLAYS = 600
"""Layers run again in all: of each that is tried, those behind it."""
_REPRODUCED = 0.05
"""The layers, run again one after the other, make the target's outputs if these are off by no more
than this share of their squared error.
"""
_UNKNOWN = "which quantised layers to leave in float is not known: {}"


class LayerCosts(NamedTuple):
    """The quantised layers, the most costly first, and why nothing is known of what each explains
    of the error at the outputs ("" where it is).
    """

    costs: tuple[LayerCost, ...] = ()
    why_no_shares: str = ""


def layer_costs(context: Context, verdicts: Sequence[Verdict]) -> LayerCosts:
    """The quantised layers; none where there are none."""
    costs, why = _own(context, verdicts), ""
    judge = context.judge.quantised
    if not costs or judge.programs is None:
        return LayerCosts(tuple(costs.values()))
    try:
        chain = _Chain(context, judge.programs, judge.parameters)
        why = chain.why_not_reproduced()
        costs = costs if why else chain.explained(costs)
    except (ReplayRefused, ElementsMissing) as error:
        # What is behind some layer cannot be run again: its own loss is known all the same.
        why = str(error)

    def rank(cost: LayerCost) -> tuple[float, float]:
        return -(cost.explains if cost.explains is not None else -np.inf), cost.sqnr_db

    return LayerCosts(tuple(sorted(costs.values(), key=rank)), _UNKNOWN.format(why) if why else "")


def _own(context: Context, verdicts: Sequence[Verdict]) -> dict[str, LayerCost]:
    """The layers by name, with their own loss, the largest first."""
    costs: dict[str, LayerCost] = {}
    pairs, calls = context.paired.plan.pairs, context.paired.calls
    for verdict in verdicts:
        sqnr = verdict.numbers.get("sqnr_db")
        pair = pairs[verdict.pair] if 0 <= verdict.pair < len(pairs) else None
        if sqnr is None or pair is None:
            continue
        call, partner = calls[pair.reference], context.paired.target.calls[pair.target]
        if partner.quantised is None or call.quantised is not None:
            continue  # where both compute with codes, nothing is lost by that
        saturated = verdict.numbers.get("saturated") or 0.0
        used = verdict.numbers.get("range_used")
        before = costs.get(call.scope)
        if before is not None:
            sqnr, saturated = min(sqnr, before.sqnr_db), max(saturated, before.saturated)
        number = before.calls + 1 if before is not None else 1
        costs[call.scope] = LayerCost(
            call.scope, call.op_type, number, sqnr, saturated=saturated, range_used=used
        )
    return dict(sorted(costs.items(), key=lambda item: item[1].sqnr_db))


class _Chain:
    """The layers of the first steps, run one after the other with some of their results replaced.

    steps: how many of them, as many as there is time for.
    """

    def __init__(
        self, context: Context, programs: LayerPrograms, parameters: CodedParameters
    ) -> None:
        self._paired, self._programs, self._parameters = context.paired, programs, parameters
        target = context.paired.target
        every = [
            (context.paired.calls[pair.reference], target.calls[pair.target], pair)
            for pair in context.paired.plan.pairs
        ]
        layers = Counter(step_of(call) for call, partner, _ in every if partner.leaf)
        # Each is left in float twice, and half of the others are behind it.
        fitting = _MOST_REPLAYS // max(layers.values(), default=1) ** 2
        steps = sorted(layers)[: max(1, fitting)]
        self.steps = len(steps)
        here = [item for item in every if step_of(item[0]) in steps]
        self._layers = sorted(
            ((call, partner) for call, partner, _ in here if partner.leaf),
            key=lambda item: item[1].order,
        )
        self._weighted = {
            call.scope
            for call, partner in self._layers
            if partner.quantised is not None and partner.quantised.weights
        }
        self._ends: list[SlotPair] = [
            slot
            for call, _, pair in here
            if call.parent == -1
            for slot in pair.slots
            if is_output(slot.reference_slot) and self._is_measured(slot)
        ]
        self._replays = 0

    def _is_measured(self, slot: SlotPair) -> bool:
        one = self._paired.reference.records[slot.reference_record]
        two = self._paired.target.records[slot.target_record]
        return dtypes.is_floating(one.dtype) and one.shape == two.shape

    def explained(self, costs: Mapping[str, LayerCost]) -> dict[str, LayerCost]:
        """The costs, with what each layer explains of the error at the outputs, as far as there is
        time for it: those with the largest loss first.
        """
        whole = self._error({})
        out = dict(costs)
        for name, cost in costs.items():
            if not whole or self._replays > _MOST_REPLAYS:
                break
            left = self._error(self._with_float(name, False))
            cost = msgspec.structs.replace(cost, explains=1 - left / whole, steps=self.steps)
            if name in self._weighted:
                with_codes = self._error(self._with_float(name, True))
                cost = msgspec.structs.replace(cost, weights_explain=1 - with_codes / whole)
            out[name] = cost
        return out

    def why_not_reproduced(self) -> str:
        """Why the layers, run again one after the other from the model's inputs, are not the
        target: what they say of it without one of them would be about another model. "" where they
        make its outputs.
        """
        whole = self._error({})
        results = self._run_again()
        missing = [slot for slot in self._ends if slot.target_record not in results]
        if not self._ends or missing:
            return "the layers, run again one after the other, do not lead to the model's outputs"
        run = self._paired.target
        off = sum(
            float(np.sum((_wide(results[end]) - _wide(run.array(end))) ** 2))
            for end in {slot.target_record for slot in self._ends}
        )
        if off <= _REPRODUCED * whole:
            return ""
        share = f"{off / whole:.2g} times" if whole else "by more than"
        return (
            "the layers, run again one after the other, do not make the target's own outputs (off "
            f"{share} the squared error that was to be explained)"
        )

    def _error(self, made: Mapping[int, Array]) -> float:
        """The squared error of the outputs, with some records of the target replaced."""
        run, reference = self._paired.target, self._paired.reference
        total = 0.0
        for slot in self._ends:
            array = made.get(slot.target_record)
            produced = run.array(slot.target_record) if array is None else array
            right = reference.array(slot.reference_record).astype(np.float64)
            off = produced.astype(np.float64) - right
            total += float(np.sum(off * off))
        return total

    def _run_again(self) -> dict[int, Array]:
        """What every layer makes of what those before it made, by record."""
        made: dict[int, Array] = {}
        for call, partner in self._layers:
            layer = partner.quantised or _plain_layer(partner)
            self._keep(made, layer, self._as_coded(call, layer, made))
        return made

    def _keep(
        self, made: dict[int, Array], layer: QuantisedLayer, results: Sequence[Array]
    ) -> None:
        for coded, result in zip(layer.makes, results, strict=False):
            made[coded.record] = result.reshape(self._paired.target.records[coded.record].shape)

    def _with_float(self, name: str, is_rounded: bool) -> dict[int, Array]:
        """What the target would make with one layer left in float, by record. is_rounded: its
        results are codes all the same, as those that are handed to quantised layers.
        """
        made: dict[int, Array] = {}
        for call, partner in self._layers:
            layer = partner.quantised or _plain_layer(partner)
            is_left = call.scope == name
            reads = {record for coded in layer.reads for record in (coded.record, coded.of)}
            if not is_left and not reads & made.keys():
                continue
            self._replays += 1
            results = (
                self._programs.right(call, layer, {}, given=made, rounds=is_rounded)
                if is_left
                else self._as_coded(call, layer, made)
            )
            if is_left and is_rounded:
                results = self._on_grid(layer, results)
            self._keep(made, layer, results)
        return made

    def _on_grid(self, layer: QuantisedLayer, results: Sequence[Array]) -> list[Array]:
        """Results as the nearest numbers that the layer has codes for."""
        array = self._paired.target.array
        return [
            result if coded.grid is None else coded.grid.rounded(array, result)
            for coded, result in zip(layer.makes, results, strict=False)
        ]

    def _as_coded(
        self, call: Call, layer: QuantisedLayer, made: Mapping[int, Array]
    ) -> list[Array]:
        """What a quantised layer makes of other inputs."""
        programs, run = self._programs, self._paired.target
        weights = self._parameters.of(call, layer)
        if weights.all_face or not layer.weights:
            results = programs.right(call, layer, weights.values, given=made, rounds=True)
            return self._on_grid(layer, results)
        # weights that face none: what they cost stays what it was
        results = programs.right(call, layer, {}, given=made, rounds=True)
        before = programs.right(call, layer, {}, rounds=True)
        return [
            _wide(new) + _wide(run.array(coded.record).reshape(new.shape)) - _wide(old)
            for coded, new, old in zip(layer.makes, results, before, strict=False)
        ]


def _wide(array: Array) -> F64:
    out: F64 = array.astype(np.float64)
    return out


def _plain_layer(partner: Call) -> QuantisedLayer:
    """A call without codes as a layer."""
    return QuantisedLayer(
        tuple(Coded(ref.record) for ref in partner.slots("input")),
        tuple(Coded(ref.record) for ref in partner.slots("output")),
    )
