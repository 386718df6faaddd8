"""Checks the weights and biases of a layer that are stored as codes against the reference's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.judge import code_steps, quantised_weights
from whence.judge.policy import Scheme
from whence.records import Call, Run
from whence.records.quantised import CodedWeight, QuantisedLayer


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """The coded parameters of a layer, checked. sentences: what is wrong, by name. values: float64,
    by slot of the corresponding parameter of the reference. schemes: of the weights. all_face:
    whether the parameters of both sides correspond one to one.
    """

    sentences: Mapping[str, str]
    values: Mapping[str, Array]
    schemes: tuple[Scheme, ...]
    all_face: bool


class CodedParameters:
    """Checks the coded parameters of layers, each layer's once."""

    def __init__(self, reference: Run, target: Run) -> None:
        self.reference, self.target = reference, target
        self._checked: dict[tuple[int, ...], CheckedWeights] = {}

    def of(self, call: Call, layer: QuantisedLayer) -> CheckedWeights:
        """The checked parameters of a layer. Raises ElementsMissing."""
        params = {ref.slot: ref.record for ref in call.slots("param")}
        key = (*params.values(), *(w.coded.codes for w in layer.weights))
        if key not in self._checked:
            self._checked[key] = self._check(params, layer)
        return self._checked[key]

    def _check(self, params: Mapping[str, int], layer: QuantisedLayer) -> CheckedWeights:
        left = {
            slot
            for slot, record in params.items()
            if self.reference.records[record].count > 1
            and dtypes.is_floating(self.reference.records[record].dtype)
        } - {weight.facing for weight in layer.weights}
        same = [self._equal_to(record, left, params) for record in layer.floats]
        all_face = not left - {*same} and all((*same, *(w.facing for w in layer.weights)))
        sentences, values, schemes = dict[str, str](), dict[str, Array](), []
        for weight in layer.weights:
            own = self.target.array(weight.coded.record).astype(np.float64)
            float_ = None
            if all_face:
                values[weight.facing] = own
                float_ = self.reference.array(params[weight.facing])
            sentence, scheme = self._one(weight, float_)
            if sentence:
                sentences[weight.name] = sentence
            if scheme is not None:
                schemes.append(scheme)
        return CheckedWeights(sentences, values, tuple(schemes), all_face)

    def _equal_to(self, record: int, slots: Collection[str], params: Mapping[str, int]) -> str:
        """The slot of the reference's parameter that equals a float parameter of the target; "" for
        none.
        """
        array = self.target.array(record)
        equal = (
            s
            for s in slots
            if np.array_equal(array.ravel(), self.reference.array(params[s]).ravel())
        )
        return next(equal, "")

    def _one(self, weight: CodedWeight, reference: Array | None) -> tuple[str, Scheme | None]:
        """(what is wrong with a parameter, its scheme if it is a weight). reference: the float
        parameter, None where it is unknown.
        """
        grid, array = weight.coded.grid, self.target.array
        assert grid is not None
        codes = grid.codes(array(weight.coded.codes))
        scale, zero = grid.steps(array, codes.ndim)
        if codes.ndim < 2:
            expected = None
            if weight.factors:
                product = msgspec.structs.replace(grid, scale=weight.factors, zero=-1, axis=0)
                expected = product.steps(array, codes.ndim)[0]
            return code_steps.bias_sentence(reference, codes, scale, zero, expected), None
        if reference is not None and np.array_equal(reference, array(weight.coded.record)):
            reference = None
        return quantised_weights.checked_codes(reference, grid, array, weight.coded.codes)
