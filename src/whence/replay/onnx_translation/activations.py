"""Activations that other operators name: fused behind a product, or inside a recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whence.replay.onnx_translation.elementwise import hard_sigmoid, softplus
from whence.replay.onnx_translation.writer import Value, Writer

DEFAULTS: dict[str, tuple[float, ...]] = {
    "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,), "Elu": (1.0,), "HardSigmoid": (0.2, 0.5),
}  # fmt: skip
"""What an activation takes where the node does not say it."""
TAKES = {
    "LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1, "HardSigmoid": 2, "Affine": 2,
    "ScaledTanh": 2, "Clip": 2,
}  # fmt: skip
_ACTIVE: dict[str, Callable[[Writer, Value, Sequence[float]], Value]] = {
    "LeakyRelu": lambda w, x, n: w.do("leaky_relu.default", x, n[0]),
    "ThresholdedRelu": lambda w, x, n: w.do("threshold.default", x, n[0], 0),
    "Elu": lambda w, x, n: w.do("elu.default", x, n[0]),
    "HardSigmoid": lambda w, x, n: hard_sigmoid(w, x, n[0], n[1]),
    "Affine": lambda w, x, n: w.plus(w.times(x, n[0]), n[1]),
    "ScaledTanh": lambda w, x, n: w.times(w.do("tanh.default", w.times(x, n[1])), n[0]),
    "Clip": lambda w, x, n: w.do("clamp.default", x, n[0], n[1]),
    "Softsign": lambda w, x, n: w.div(x, w.plus(w.do("abs.default", x), 1)),
    "Softplus": lambda w, x, n: softplus(w, x),
    "HardSwish": lambda w, x, n: w.do("hardswish.default", x),
}
_PLAIN = {"Relu": "relu.default", "Tanh": "tanh.default", "Sigmoid": "sigmoid.default"}


def activated(w: Writer, x: Value, name: str, parameters: Sequence[float] = ()) -> Value:
    """x through the activation of this name, "" for none."""
    if not name:
        return x
    if name in _PLAIN:
        return w.do(_PLAIN[name], x)
    numbers = [*parameters, *DEFAULTS.get(name, ())[len(parameters) :]]
    if len(numbers) < TAKES.get(name, 0):
        raise w.refuse(f"what its activation {name} takes is not known")
    if name in _ACTIVE:
        return _ACTIVE[name](w, x, numbers)
    raise w.refuse(f"the activation {name[:40]} is not known to whence")
