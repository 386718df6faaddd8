"""Weights that the target holds in quantised form, checked against the reference's."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedCall
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge import quantised_weights, stored_codes
from whence.judge.error_structure import norm
from whence.judge.policy import Entry, Scheme
from whence.records import Call, Run
from whence.replay import declared_semantics
from whence.results import SlotPair

_MAX_WEIGHTS = 4  # dequantised weights kept for other calls of the same module


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """One quantised parameter of a call. values: the dequantised values it may have. difference:
    from what it should be. loss: relative 2-norm of the quantisation error.
    """

    slot: str
    scheme: Scheme
    difference: judge.ParameterDifference
    values: tuple[Array, ...]
    loss: float


class QuantisedWeights:
    """Recognises quantised parameters of paired calls."""

    def __init__(self, reference: Run, target: Run) -> None:
        self.reference, self.target = reference, target
        self._weights: OrderedDict[Any, QuantisedWeight | None] = OrderedDict()

    def of(
        self, pair: PairedCall, slots: Mapping[str, SlotPair], entry: Entry | None
    ) -> list[QuantisedWeight]:
        """The quantised parameters of a call. entry: what declares them."""
        weights: list[QuantisedWeight] = []
        params = tuple((r.slot, r.record) for r in pair.partner.slots("param"))
        for ref in pair.call.slots("param"):
            record = self.reference.records[ref.record]
            if len(record.shape) < 2 or judge.unit_roundoff(record.dtype) == 0.0:
                continue
            slot = slots.get(ref.slot)
            target = self.target.records[slot.target_record] if slot is not None else None
            if (
                target is not None
                and target.hash
                and (target.hash, target.dtype, target.shape)
                == (record.hash, record.dtype, record.shape)
            ):
                continue
            key = (ref.record, params, entry.number if entry is not None else 0)
            if key in self._weights:
                self._weights.move_to_end(key)
            else:
                declared = entry.weights if entry is not None else None
                self._weights[key] = self._take_apart(
                    ref.record, ref.slot, pair.partner, slot, declared
                )
                while len(self._weights) > _MAX_WEIGHTS:
                    self._weights.popitem(last=False)
            weight = self._weights[key]
            if weight is not None:
                weights.append(weight)
        return weights

    def _take_apart(
        self, record: int, name: str, partner: Call, slot: SlotPair | None, declared: Scheme | None
    ) -> QuantisedWeight | None:
        """The quantised form of one parameter in the target, checked against the reference's; None
        when there is none.
        """
        try:
            # A 16-bit model was quantised from 16-bit weights.
            reference = judge.rounded(self.reference.array(record), self._precision(partner))
            params = {r.slot: self.target.array(r.record) for r in partner.slots("param")}
            target = self.target.array(slot.target_record) if slot is not None else None
        except ElementsMissing:
            return None
        axis = declared.axis if declared is not None else 0
        stored = stored_codes.stored(reference, params, name, axis=axis)
        if stored is None and target is not None and target.shape == reference.shape:
            if declared is None and stored_codes.on_a_grid(reference, axis=axis) is not None:
                return None  # quantised on both sides: an ordinary parameter
            stored = stored_codes.on_a_grid(target, axis=axis)
            if stored is None and declared is not None and dtypes.of(target).is_floating:
                return _by_values(reference, target, name, declared)
        if stored is not None:
            return _of_codes(reference, stored, name, declared)
        if declared is None or slot is not None:
            return None
        # Declared, and the target does not show its weights: they are what the scheme makes of the
        # reference's.
        values = _fake_quantised(reference, declared)
        return QuantisedWeight(
            name,
            declared,
            judge.ParameterDifference(True, True),
            values,
            _loss(reference, values[0]),
        )

    def _precision(self, partner: Call) -> str:
        """The dtype that a call of the target computes in."""
        names = [self.target.records[r.record].dtype for r in partner.slots("output")]
        kinds = [dtypes.named(name) for name in names if dtypes.is_floating(name)]
        floating = [k.name for k in kinds if k.kind == "float" and k.bits > 8]
        return min(floating, key=lambda name: dtypes.named(name).bits, default="float32")


def _of_codes(
    reference: Array, stored: stored_codes.Stored, name: str, declared: Scheme | None
) -> QuantisedWeight:
    """A weight that the target stores as codes and scales."""
    checked = quantised_weights.check(reference, stored, declared=declared)
    scheme = declared or quantised_weights.looks_like(stored, checked)
    words = f"not the reference's, quantised ({scheme}): {checked.sentence}"
    difference = judge.ParameterDifference(
        not checked.sentence, True, words if checked.sentence else "", checked.numbers
    )
    values = stored.dequantised()
    return QuantisedWeight(name, scheme, difference, (values,), _loss(reference, values))


def _by_values(
    reference: Array, target: Array, name: str, declared: Scheme
) -> QuantisedWeight | None:
    """A floating weight that should be the reference's, quantised and rounded to the target's
    dtype.
    """
    right = _fake_quantised(reference, declared)
    u = judge.unit_roundoff(dtypes.of(target).name)
    wide = target.astype(np.float64)
    difference = judge.ParameterDifference(True, True)
    if not any(bool((np.abs(wide - r) <= 2 * u * np.abs(r)).all()) for r in right):
        difference = judge.parameters(right[0].astype(target.dtype), target)
        if judge.parameters(reference, target).equal:
            return None
        words = f"not the reference's, quantised ({declared}): {difference.sentence}"
        difference = dataclasses.replace(difference, sentence=words)
    return QuantisedWeight(name, declared, difference, (wide,), _loss(reference, wide))


def _fake_quantised(reference: Array, scheme: Scheme) -> tuple[npt.NDArray[np.float64], ...]:
    """What a scheme makes of a weight, with each span of codes that is in use."""
    spans = ("narrow", "full") if scheme.symmetric and scheme.format == "int" else ("narrow",)
    grids = (
        declared_semantics.Grid(
            scheme.bits, scheme.per, scheme.axis, scheme.group, scheme.symmetric, scheme.format, s
        )
        for s in spans
    )
    return tuple(declared_semantics.fake_quantise(reference, grid) for grid in grids)


def _loss(reference: Array, values: Array) -> float:
    wide = reference.astype(np.float64)
    size = norm(wide)
    lost = norm(values.astype(np.float64).reshape(wide.shape) - wide)
    return lost / size if size else 0.0
