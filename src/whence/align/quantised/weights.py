"""The parameters of a layer that are stored as codes, and those of the reference that they stand
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from whence.align.quantised.coded_values import CodedValues
from whence.align.quantised.operands import operands
from whence.align.values.value_graph import Stretch
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Over, Ref, Run
from whence.records.quantised import Coded, CodedWeight
from whence.records.slots import is_param, param_name

_ALIKE = 0.5
"""Least cosine of two weights of which one may be the other's, whatever its scales."""


def coded_weights(
    values: CodedValues, part: Stretch, decoded: Callable[[int], int]
) -> list[CodedWeight]:
    """The parameters of a part that are codes, each once."""
    weights: dict[int, CodedWeight] = {}
    for call in part.calls:
        for operand in values.operands(call):
            ref = operand.ref
            if is_param(ref.slot):
                coded = Coded(decoded(ref.record), ref.record, operand.grid)
                weights[ref.record] = CodedWeight(param_name(ref.slot), coded)
    for call in part.calls:
        reads = {k: values.numbers.get(ref.record, -1) for k, ref in operands(call).items()}
        grids = [values.grids.get(reads.get(k, -1)) for k in range(3)]
        bias = weights.get(reads.get(2, -1))
        if bias is not None and grids[0] is not None and grids[1] is not None:
            factors = (*grids[0].scale, *grids[1].scale)
            weights[reads[2]] = replace(bias, factors=factors)
    return list(weights.values())


def faced(reference: Run, calls: Sequence[int], target: Run, partners: Sequence[int]) -> Run:
    """The target with each weight of its layers in the slot of the reference's that it stands
    for.
    """
    changed: dict[int, Call] = {}
    for a, b in zip(calls, partners, strict=True):
        partner = target.calls[b]
        layer = partner.quantised
        if layer is None or not layer.weights:
            continue
        facing = _facing(reference, reference.calls[a], target, layer.weights)
        weights = tuple(
            replace(w, facing=slot) for w, slot in zip(layer.weights, facing, strict=True)
        )
        params = [Ref(w.facing or f"param.beside.{w.name}", w.coded.record) for w in weights]
        refs = (*(r for r in partner.refs if not is_param(r.slot)), *params)
        layer = replace(layer, weights=weights)
        changed[b] = replace(partner, refs=refs, quantised=layer)
    return Over(target, [changed.get(call.id, call) for call in target.calls])


def _facing(reference: Run, call: Call, target: Run, weights: Sequence[CodedWeight]) -> list[str]:
    """By weight the slot of the reference's parameter that has its elements, by their direction;
    else the only one left of its shape, else "".
    """
    free = {ref.slot: ref.record for ref in call.slots("param")}
    shapes = {slot: reference.records[record].shape for slot, record in free.items()}
    facing = dict[int, str]()
    for k, weight in enumerate(weights):
        best, chosen = _ALIKE, ""
        for slot, record in free.items():
            if shapes[slot] != target.records[weight.coded.record].shape:
                continue
            try:
                cosine = _cosine(reference.array(record), target.array(weight.coded.record))
            except ElementsMissing:
                continue
            if cosine > best:
                best, chosen = cosine, slot
        if chosen:
            del free[chosen]
            facing[k] = chosen
    for k, weight in enumerate(weights):  # like none: of one shape with the only one left
        left = [s for s in free if shapes[s] == target.records[weight.coded.record].shape]
        if k not in facing and len(left) == 1:
            del free[left[0]]
            facing[k] = left[0]
    return [facing.get(k, "") for k in range(len(weights))]


def _cosine(one: Array, two: Array) -> float:
    a, b = (x.astype(np.float64).reshape(-1) for x in (one, two))
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else float(not a.any() and not b.any())
