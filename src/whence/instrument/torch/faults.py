"""Plants faults in a running model and removes them again: typical errors of a port, a refactoring
or a wrong kernel.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn

from whence.frameworks.torch_trees import rebuilt

Undo = Callable[[], None]
_EPS = ("eps", "variance_epsilon")
# Modules whose channels are axis 1 of their output; elsewhere they are the last one.
_CHANNELS_FIRST = (
    "Conv",
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "MaxPool",
    "AvgPool",
    "AdaptiveAvgPool",
    "AdaptiveMaxPool",
)

# What each kind does at its strength, and the strength it has when none is given (None: it depends
# on the module).
DEFAULTS: dict[str, float | None] = {
    "scale": 1.01,  # the output times this
    "weight": 8.0,  # standard deviations of the weight added to one element
    "row": 1.01,  # one row of the weight times this
    "eps": None,  # the epsilon times this: 1000, or what makes it 1e-3
    "bias": 0.0,  # the bias times this, in the output only: the kernel forgot it
    "channel": 0.0,  # one channel of the output times this
    "stale": 1
    # this share of the columns, the last ones, holds what the columns before them should hold
    / 16,
    "constant": 0.01,  # this many root mean squares of the output added to all of it
    "drop-residual": 0.0,  # one branch of a residual block times this
}


class NotPlanted(Exception):
    """This fault has no place in this module; the message says why."""


def sites(model: nn.Module, fault: str) -> list[str]:
    """Names of the modules in which this fault can be planted, in the model's order."""
    if fault == "eps":
        return [name for name, module in model.named_modules() if _eps_of(module)]
    if fault == "drop-residual":
        return [name for name, module in model.named_modules() if _branches(module)]
    shared = _shared_weights(model)
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in shared
    ]
    return [name for name, module in linear if fault != "bias" or module.bias is not None]


@contextmanager
def planted(
    model: nn.Module, site: str, fault: str, strength: float | None, random: Random
) -> Iterator[str]:
    """Context in which the model has one fault. Yields a sentence that says what was planted;
    afterwards every bit is as before.

    random: draws the element, row, channel or branch. Raises NotPlanted.
    """
    words, undo = plant(model.get_submodule(site), fault, strength, random)
    try:
        yield words
    finally:
        undo()


def plant(
    module: nn.Module, fault: str, strength: float | None, random: Random
) -> tuple[str, Undo]:
    """Put one fault into a module: (what was done in words, a function that takes it out). strength
    None: as DEFAULTS says.

    Raises NotPlanted when the module has nothing to spoil (no epsilon, no bias, no weight matrix).
    """
    strength = DEFAULTS[fault] if strength is None else strength
    if fault == "eps":
        return _eps(module, strength)
    assert strength is not None
    if fault in ("weight", "row"):
        return _weight(module, fault, strength, random)
    if fault == "drop-residual":
        return _drop(module, strength, random)
    change, words = _OUTPUTS[fault](module, strength, random)
    return words, _spoil(module, change)


def _eps(module: nn.Module, strength: float | None) -> tuple[str, Undo]:
    name = _eps_of(module)
    if not name:
        raise NotPlanted(f"{type(module).__name__} has no epsilon")
    old = getattr(module, name)
    new = (
        float(
            f"{old * (max(1000.0, 1e-3 / old if old else 0.0) if strength is None else strength):.6g}"  # noqa: E501
        )
        or 1e-3
    )
    setattr(module, name, new)
    return f"epsilon {new:g} instead of {old:g}", lambda: setattr(module, name, old)


def _weight(module: nn.Module, fault: str, strength: float, random: Random) -> tuple[str, Undo]:
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim < 2 or not weight.is_floating_point():
        raise NotPlanted(f"{type(module).__name__} has no weight matrix")
    weight = weight.detach()
    index: Any = (
        tuple(random.randrange(n) for n in weight.shape)
        if fault == "weight"
        else random.randrange(weight.shape[0])
    )
    old = weight[index].clone()
    with torch.no_grad(), torch.inference_mode(weight.is_inference()):
        weight[index] = old * strength if fault == "row" else old + strength * weight.std()

    def undo() -> None:
        with torch.no_grad(), torch.inference_mode(weight.is_inference()):
            weight[index] = old

    if fault == "row":
        return f"row {index} of {weight.shape[0]} of the weight times {strength:g}", undo
    return (
        f"weight{list(index)} {float(weight[index]):.4g} instead of {float(old):.4g}, one of "
        f"{weight.numel()} elements",
        undo,
    )


# ---- faults of the output: the module's forward is replaced by one that changes what it returns


def _scale(module: nn.Module, strength: float, random: Random) -> tuple[Callable[[Any], Any], str]:
    return lambda output: output * strength, f"its output times {strength:g}, the weights untouched"


def _bias(module: nn.Module, strength: float, random: Random) -> tuple[Callable[[Any], Any], str]:
    bias: Any = getattr(module, "bias", None)
    if not isinstance(bias, torch.Tensor):
        raise NotPlanted(f"{type(module).__name__} has no bias")

    def change(output: Any) -> Any:
        trailing = output.ndim - 1 - (_axis(module, output) % output.ndim)
        return output - (1 - strength) * bias.detach().to(output.dtype).reshape(
            *bias.shape, *(1,) * trailing
        )

    return change, "the bias dropped" if strength == 0 else f"the bias times {strength:g}"


def _channel(
    module: nn.Module, strength: float, random: Random
) -> tuple[Callable[[Any], Any], str]:
    place = random.random()

    def change(output: Any) -> Any:
        axis = _axis(module, output)
        channel = int(place * output.shape[axis])
        output = output.clone()
        output.select(axis, channel).mul_(strength)
        return output

    return change, f"one channel of its output ({place:.0%} of the way) " + (
        "zeroed" if strength == 0 else f"times {strength:g}"
    )


def _stale(module: nn.Module, strength: float, random: Random) -> tuple[Callable[[Any], Any], str]:
    def change(output: Any) -> Any:
        count = min(max(1, round(output.shape[-1] * strength)), output.shape[-1] // 2)
        output = output.clone()
        output[..., output.shape[-1] - count :] = output[
            ..., output.shape[-1] - 2 * count : output.shape[-1] - count
        ].clone()
        return output

    return change, f"the last {strength:.3g} of its output's columns hold the columns before them"


def _constant(
    module: nn.Module, strength: float, random: Random
) -> tuple[Callable[[Any], Any], str]:
    def change(output: Any) -> Any:
        return output + (strength * output.detach().double().square().mean().sqrt()).to(
            output.dtype
        )

    return change, f"{strength:g} of its root mean square added to all of its output"


_OUTPUTS: dict[str, Callable[[nn.Module, float, Random], tuple[Callable[[Any], Any], str]]] = {
    "scale": _scale,
    "bias": _bias,
    "channel": _channel,
    "stale": _stale,
    "constant": _constant,
}


def _spoil(module: nn.Module, change: Callable[[Any], Any]) -> Undo:
    """Replace the module's forward by one whose first floating-point output is changed."""
    own_forward = vars(module).get("forward")
    forward = module.forward

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = True

        def put(_slot: str, tensor: Any) -> Any:
            nonlocal first
            if not first or not tensor.is_floating_point() or tensor.ndim == 0:
                return tensor
            first = False
            return change(tensor)

        return rebuilt(forward(*args, **kwargs), put)

    module.forward = types.MethodType(spoilt, module)

    def undo() -> None:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward

    return undo


def _axis(module: nn.Module, output: Any) -> int:
    return 1 if output.ndim > 1 and type(module).__name__.startswith(_CHANNELS_FIRST) else -1


# ---- a residual branch left out, between the modules


def _drop(module: nn.Module, strength: float, random: Random) -> tuple[str, Undo]:
    branches = _branches(module)
    if not branches:
        raise NotPlanted(f"{type(module).__name__} is not a block of attention and mlp")
    left_out = random.choice(branches)
    forward = _block(module, left_out, strength)
    module.forward = types.MethodType(forward, module)
    effect = "left out of" if strength == 0.0 else f"times {strength:g} in"

    def undo() -> None:
        del module.forward

    return f"the {left_out} branch {effect} the residual sum, between the modules", undo


def _block(module: nn.Module, left_out: str, strength: float) -> Callable[..., Any]:
    """The forward of a pre-norm block with one of its two branches weakened."""
    norms = (
        ("input_norm", "mlp_norm")
        if hasattr(module, "mlp_norm")
        else ("input_layernorm", "post_attention_layernorm")
    )

    def add(x: Any, branch: Any, name: str) -> Any:
        if name != left_out:
            return x + branch
        return x if strength == 0.0 else x + strength * branch

    def forward(self: Any, hidden_states: Any, *rest_args: Any, **named: Any) -> Any:
        attention, mlp = _branches(self)
        normed = getattr(self, norms[0])(hidden_states)
        # A transformers layer hands its attention everything by name.
        branch = (
            getattr(self, attention)(normed, *rest_args)
            if rest_args
            else getattr(self, attention)(hidden_states=normed, **named)
        )
        x = add(hidden_states, branch[0] if isinstance(branch, tuple) else branch, attention)
        return add(x, getattr(self, mlp)(getattr(self, norms[1])(x)), mlp)

    return forward


# ---- what a module has


def _eps_of(module: nn.Module) -> str:
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), "")


def _branches(module: nn.Module) -> tuple[str, ...]:
    """(attention, mlp) as a block calls them; () for what is not a block."""
    for attention, mlp in (("attention", "mlp"), ("self_attn", "mlp")):
        if hasattr(module, attention) and hasattr(module, mlp):
            return attention, mlp
    return ()


def _shared_weights(model: nn.Module) -> set[int]:
    """Parameters held by more than one module (tied embeddings): a fault there has several
    names.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            uses[id(weight)] = uses.get(id(weight), 0) + 1
    return {key for key, times in uses.items() if times > 1}
