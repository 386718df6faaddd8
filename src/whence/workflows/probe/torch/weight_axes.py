"""Which axis of a layer's weight counts the inputs, and which the outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from whence.workflows.probe.torch.exchange import Slot

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Layer(NamedTuple):
    """A layer that multiplies every position by the same matrix.

    inputs, outputs: numbers of channels.
    """

    name: str
    inputs: int
    outputs: int
    out_axis: int
    has_bias: bool

    def out_slots(self, outer: int = 1, inner: int = 1) -> tuple[Slot, ...]:
        """Slots of units among the outputs."""
        slots = [Slot(f"{self.name}.weight", self.out_axis, outer, inner)]
        if self.has_bias:
            slots.append(Slot(f"{self.name}.bias", 0, outer, inner))
        return tuple(slots)

    def in_slots(self, inner: int = 1) -> tuple[Slot, ...]:
        """Slots of units among the inputs."""
        return (Slot(f"{self.name}.weight", 1 - self.out_axis, 1, inner),)


def layer_of(name: str, module: Any) -> Layer | None:
    """A module as such a layer; None for any other module, and when its weight is not its own plain
    tensor.
    """
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"} or weight.is_meta:
        return None
    if not weight.is_floating_point():  # packed
        return None
    has_bias = module._parameters.get("bias") is not None
    if isinstance(module, _KINDS):
        if getattr(module, "groups", 1) != 1:
            return None
        return Layer(name, weight.shape[1], weight.shape[0], 0, has_bias)
    if type(module).__name__ == "Conv1D" and weight.ndim == 2:  # of transformers
        return Layer(name, weight.shape[0], weight.shape[1], 1, has_bias)
    return None


def layers_of(model: Any) -> dict[str, Layer]:
    """All such layers of a model, by name."""
    found = {name: layer_of(name, module) for name, module in model.named_modules()}
    return {name: layer for name, layer in found.items() if layer is not None}
