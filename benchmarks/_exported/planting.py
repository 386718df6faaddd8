"""Faults that are planted in a treated file, and whether an answer names their node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from _exported.answers import Aligned, nodes_of
from whence.frameworks.onnx_names import scope_of

Edit = Callable[[ModelProto, NodeProto], bool]
_SMALL = 1 + 1e-4
_SMALL_IN_16_BITS = 1.05
"""Beyond what weights of 16 bits round by, several times over."""


def _initializer(model: ModelProto, name: str) -> Any:
    return next((t for t in model.graph.initializer if t.name == name), None)


def _scaled(model: ModelProto, node: NodeProto) -> bool:
    """All of a weight is a little larger."""
    if node.op_type not in ("Conv", "MatMul", "Gemm"):
        return False
    for name in node.input[1:2]:
        tensor = _initializer(model, name)
        if tensor is not None and len(tensor.dims) > 1:
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind == "f":
                by = _SMALL if _is_wide(array) else _SMALL_IN_16_BITS
                wrong = (array.astype(np.float64) * by).astype(array.dtype)
                tensor.CopyFrom(numpy_helper.from_array(wrong, name))
                return True
    return False


def _is_wide(array: np.ndarray) -> bool:
    """Does it hold numbers that 16 bits do not?"""
    wide = array.astype(np.float32)
    low = wide.view(np.uint32) & 0x1FFF
    return bool(low.any())


def _other_axis(_: ModelProto, node: NodeProto) -> bool:
    """A softmax over another axis."""
    if node.op_type != "Softmax":
        return False
    stated = [a.i for a in node.attribute]
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", 0 if any(n > 0 for n in stated) else -2))
    return True


def _other_epsilon(_: ModelProto, node: NodeProto) -> bool:
    """A norm with a larger epsilon."""
    if node.op_type not in ("LayerNormalization", "BatchNormalization", "InstanceNormalization"):
        return False
    kept = [a for a in node.attribute if a.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("epsilon", 1e-2)])
    return True


def _other_padding(_: ModelProto, node: NodeProto) -> bool:
    """A convolution that takes a row of its padding from the other side."""
    pads = next((a for a in node.attribute if a.name == "pads"), None)
    if node.op_type != "Conv" or pads is None or len(pads.ints) != 4 or not pads.ints[0]:
        return False
    pads.ints[0] -= 1
    pads.ints[2] += 1
    return True


_EDITS: dict[str, Edit] = {
    "weight": _scaled,
    "axis": _other_axis,
    "epsilon": _other_epsilon,
    "padding": _other_padding,
}


def _planted(edit: Edit) -> Callable[[Path, Path], tuple[str, ...]]:
    """Plants a fault in the node in the middle of those that can have it."""

    def plant(source: Path, wrong: Path) -> tuple[str, ...]:
        model = onnx.load(str(source))
        fits = []
        for number in range(len(model.graph.node)):
            probe = ModelProto()
            probe.CopyFrom(model)
            if edit(probe, probe.graph.node[number]):
                fits.append(number)
            if len(fits) > 4:
                break
        if not fits:
            return ()
        node = model.graph.node[fits[len(fits) // 2]]
        edit(model, node)
        onnx.save(model, str(wrong))
        return tuple(scope_of(name) for name in node.output)

    return plant


FAULTS = {name: _planted(edit) for name, edit in _EDITS.items()}


def answer(reference: Path, target: Path, nodes: tuple[str, ...]) -> dict[str, Any]:
    """Does the first finding hold one of these nodes, by the names of the reference?"""
    aligned = Aligned.of(reference, target)
    for finding in aligned.result.findings[:1]:
        pair = aligned.result.plan.pairs[finding.pair]
        names = nodes_of(aligned.reference.calls[pair.reference])
        names |= nodes_of(aligned.target.calls[pair.target])
        return {"first": bool(names & {*nodes}), "node": nodes[0], "span": len(names)}
    return {"first": False, "node": nodes[0], "span": 0}
