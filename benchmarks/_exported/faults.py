"""Thirty faults planted in exported files, and in graphs that ONNX Runtime has optimised.

Half of them (`HELD`) were not looked at while the first rules of whence were written, and `LATER`
not while those for these were.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

Edit = Callable[[ModelProto, NodeProto], None]


@dataclass(frozen=True)
class Fault:
    """One wrong node. node: its type and which of that type it is, in the order of the graph.
    rewritten: it is planted in the graph as the runtime optimised it. place: the torch module that
    it is in; "" where the exporter wrote it down.
    """

    model: str
    kind: str
    node: tuple[str, int]
    edit: Edit
    rewritten: bool = False
    place: str = ""

    @property
    def title(self) -> str:
        """Unique in the list."""
        where = "optimised graph, " if self.rewritten else ""
        return f"{self.model}: {self.kind} ({where}{self.node[0]} {self.node[1]})"


# ---- edits


def attributes(**values: Any) -> Edit:
    """Other values of attributes."""

    def edit(_: ModelProto, node: NodeProto) -> None:
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in values.items())

    return edit


def moved_pads(_: ModelProto, node: NodeProto) -> None:
    """One row or column of padding is taken from the front and added at the back."""
    pads = next(a for a in node.attribute if a.name == "pads").ints
    half = len(pads) // 2
    pads[half - 1] -= 1
    pads[-1] += 1


def weight(position: int, change: Callable[[np.ndarray], None]) -> Edit:
    """An initialiser that a node reads; `change` writes into it. Where others read it too, the node
    gets one of its own.
    """

    def edit(model: ModelProto, node: NodeProto) -> None:
        name = node.input[position]
        array = constant(model, name).copy()
        change(array)
        node.input[position] = f"{name}.wrong"
        model.graph.initializer.append(numpy_helper.from_array(array, f"{name}.wrong"))

    return edit


def constant(model: ModelProto, name: str) -> np.ndarray:
    """The elements of an initialiser or of a Constant node. Raises LookupError."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] == name:
            return numpy_helper.to_array(node.attribute[0].t)
    raise LookupError(name)


def one_element(array: np.ndarray) -> None:
    """The largest element becomes its opposite."""
    at = np.unravel_index(np.abs(array).argmax(), array.shape)
    array[at] = -array[at]


def flipped_bit(array: np.ndarray) -> None:
    """One bit of the exponent of the largest element."""
    at = np.unravel_index(np.abs(array).argmax(), array.shape)
    (bits,) = struct.unpack("I", struct.pack("f", array[at]))
    (array[at],) = struct.unpack("f", struct.pack("I", bits ^ (1 << 24)))


def swapped(axis: int, first: int, second: int, size: int = 1) -> Callable[[np.ndarray], None]:
    """Two runs of `size` rows along an axis change places."""

    def change(array: np.ndarray) -> None:
        rows = np.moveaxis(array, axis, 0)
        a, b = slice(first, first + size), slice(second, second + size)
        rows[a], rows[b] = rows[b].copy(), rows[a].copy()

    return change


def scaled(factor: float) -> Callable[[np.ndarray], None]:
    """Everything times a factor."""

    def change(array: np.ndarray) -> None:
        array *= array.dtype.type(factor)

    return change


# ---- the faults

_FILE = [
    Fault("convnet", "attribute count_include_pad", ("AveragePool", 0),
          attributes(count_include_pad=1)),
    Fault("convnet", "wrong pad index", ("Conv", 2), moved_pads),
    Fault("resnet", "initialiser element", ("Conv", 4), weight(1, one_element)),
    Fault("resnet", "initialiser element", ("Gemm", 0), weight(1, flipped_bit)),
    Fault("unet", "Resize mode", ("Resize", 0),
          attributes(coordinate_transformation_mode="asymmetric")),
    Fault("detector", "Resize mode", ("Resize", 0), attributes(mode="linear")),
    Fault("upscaler", "attribute cubic_coeff_a", ("Resize", 0), attributes(cubic_coeff_a=-0.5)),
    Fault("upscaler", "attribute align_corners", ("GridSample", 0), attributes(align_corners=1)),
    Fault("mobilenet", "channel permutation", ("Conv", 2), weight(1, swapped(0, 3, 7))),
    Fault("vit", "epsilon", ("LayerNormalization", 4), attributes(epsilon=1e-2)),
    Fault("convnext", "attribute approximate", ("Gelu", 1), attributes(approximate="none")),
    Fault("tcn", "wrong pad index", ("Conv", 3), moved_pads),
    Fault("gru", "swapped gates", ("GRU", 0), weight(1, swapped(1, 0, 24, 24))),
    Fault("lstm", "swapped gates", ("LSTM", 1), weight(2, swapped(1, 20, 40, 20))),
    Fault("bilstm", "initialiser element", ("LSTM", 0), weight(3, one_element)),
    Fault("streaming-lstm", "swapped gates", ("LSTM", 0), weight(1, swapped(1, 0, 16, 16))),
    Fault("gated", "softmax axis", ("Softmax", 0), attributes(axis=2)),
    Fault("bert", "softmax axis", ("Softmax", 1), attributes(axis=2)),
    Fault("mixer", "softmax axis", ("LogSoftmax", 0), attributes(axis=0)),
    Fault("spectral", "folded constant", ("STFT", 0), weight(2, one_element)),
    Fault("t5", "folded constant", ("Add", 6), weight(1, one_element)),
    Fault("gpt2", "folded constant", ("Mul", 4), weight(1, scaled(1.02))),
    Fault("llama", "folded constant", ("Mul", 0), weight(1, scaled(1.05))),
    Fault("whisper", "channel permutation", ("MatMul", 8), weight(1, swapped(1, 2, 5))),
    Fault("minilm", "initialiser element", ("MatMul", 29), weight(1, one_element)),
]  # fmt: skip
_REWRITTEN = [
    Fault("resnet", "fused activation", ("com.microsoft.nchwc.Conv", 2),
          attributes(activation="LeakyRelu", activation_params=[0.02]), True, "layers.0.conv2"),
    Fault("minilm", "fused epsilon", ("com.microsoft.SkipLayerNormalization", 5),
          attributes(epsilon=1e-2), True, "model.encoder.layer.2.output.LayerNorm"),
    Fault("translator", "fused scale", ("com.microsoft.FusedMatMul", 4),
          attributes(alpha=0.4), True, "decoder.multihead_attn"),
    Fault("qwen", "fused attribute alpha", ("com.microsoft.QuickGelu", 1),
          attributes(alpha=1.702), True, "model.model.layers.1.mlp.act_fn"),
    Fault("mobilenet", "folded constant", ("com.microsoft.nchwc.Conv", 6),
          weight(2, one_element), True, "blocks.1.expand"),
]  # fmt: skip
FAULTS = (*_FILE, *_REWRITTEN)
HELD = FAULTS[1::2]
LATER = (
    Fault("unet", "epsilon", ("InstanceNormalization", 0), attributes(epsilon=0.05)),
    Fault("detector", "attribute largest", ("TopK", 0), attributes(largest=0)),
    Fault("convnext", "epsilon", ("LayerNormalization", 0), attributes(epsilon=0.05)),
    Fault("distilbert", "initialiser element", ("MatMul", 9), weight(1, one_element)),
    Fault("mixtral", "channel permutation", ("MatMul", 2), weight(1, swapped(1, 1, 6))),
    Fault("qwen", "folded constant", ("Mul", 0), weight(1, scaled(1.05))),
    Fault("whisper", "epsilon", ("LayerNormalization", 5), attributes(epsilon=1e-2)),
    Fault("gru", "initialiser element", ("GRU", 0), weight(2, one_element)),
    Fault("convnet", "folded constant", ("com.microsoft.nchwc.Conv", 1),
          weight(2, one_element), True, "dilated"),
    Fault("gpt2", "fused epsilon", ("com.microsoft.SkipLayerNormalization", 0),
          attributes(epsilon=0.05), True, "model.transformer.ln_f"),
)  # fmt: skip
"""Written when the rules for what the others showed were."""


def planted(fault: Fault, source: Path, destination: Path) -> tuple[tuple[str, ...], str]:
    """Write the model with the fault; gives the names of the values that the wrong node makes, and
    the torch module that the node comes from, "" where it is the model itself.
    """
    model = onnx.load(source)
    kind, index = fault.node
    nodes = [n for n in model.graph.node if kind == ".".join(filter(None, (n.domain, n.op_type)))]
    node = nodes[index]
    fault.edit(model, node)
    onnx.save(model, destination)
    return tuple(node.output), fault.place or _module_of(node)


def _module_of(node: NodeProto) -> str:
    """As torch's exporter wrote it down: the names of all modules around, then of the operator."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            return str(ast.literal_eval(entry.value)[-2])
    return ""
