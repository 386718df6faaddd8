"""Activations that other operators name: fused behind a product, or inside a recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whence.replay.onnx_translation.elementwise import ACTIVATIONS
from whence.replay.onnx_translation.writer import Writer
from whence.replay.program_writing import Tensor

_GIVEN: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "Affine": lambda x, alpha, beta: x * alpha + beta,
    "ScaledTanh": lambda x, alpha, beta: (x * beta).tanh() * alpha,
    "Clip": lambda x, low, high: x.clamp(low, high),
}
"""Activations whose two numbers are always given."""
NAMES = {name.lower(): name for name in (*ACTIVATIONS, *_GIVEN)}


def takes(name: str) -> int:
    """Returns how many numbers an activation takes."""
    return 2 if name in _GIVEN else len(ACTIVATIONS[name].numbers) if name in ACTIVATIONS else 0


def activated(w: Writer, x: Tensor, name: str, parameters: Sequence[float] = ()) -> Tensor:
    """Applies the activation of this name to x, "" for none."""
    if not name:
        return x
    if name in ACTIVATIONS:
        known = ACTIVATIONS[name]
        numbers = [*parameters, *[*known.numbers.values()][len(parameters) :]]
        return known.of(x, *numbers[: len(known.numbers)])
    if name not in _GIVEN:
        raise w.refuse(f"the activation {name[:40]} is not known to whence")
    if len(parameters) < 2:
        raise w.refuse(f"what its activation {name} takes is not known")
    return _GIVEN[name](x, *parameters[:2])
