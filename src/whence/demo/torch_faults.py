"""Faults that are planted in a running model and taken out again: what a port, a refactoring or a bad kernel leaves behind."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from torch import nn

# From strong to weak: the first that leaves the generated text as it was is taken.
STRENGTHS: dict[str, tuple[float, ...]] = {
    "eps": (1000.0, 100.0, 10.0),  # times the epsilon there was
    "weight": (16.0, 8.0, 4.0),  # standard deviations of the weight added to one element
    "scale": (1.01, 1.003, 1.001),  # times the output
    "drop-residual": (0.0, 0.5, 0.9, 0.99),  # times the branch
}
_EPS = ("eps", "variance_epsilon")


def sites(model: nn.Module, fault: str) -> list[str]:
    """Names of the modules in which this fault can be planted, in the model's order."""
    if fault == "eps":
        return [name for name, module in model.named_modules() if _eps_of(module)]
    if fault == "drop-residual":
        return [name for name, module in model.named_modules() if _branches(module)]
    shared = _shared_weights(model)
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module.weight) not in shared]


@contextmanager
def planted(model: nn.Module, site: str, fault: str, strength: float, random: Random) -> Iterator[str]:
    """The model with one fault while the block runs; gives the sentence that says what was planted.

    random: draws the element (weight) or the branch (drop-residual). Afterwards every bit is as it was.
    """
    module = model.get_submodule(site)
    plant = {"eps": _eps, "weight": _weight, "scale": _scale, "drop-residual": _drop}[fault]
    words, undo = plant(module, strength, random)
    try:
        yield words
    finally:
        undo()


def _eps(module: nn.Module, strength: float, random: Random) -> tuple[str, Callable[[], None]]:
    name = _eps_of(module)
    old = getattr(module, name)
    new = float(f"{old * strength:.6g}")
    setattr(module, name, new)
    return f"epsilon {new:g} instead of {old:g}", lambda: setattr(module, name, old)


def _weight(module: nn.Module, strength: float, random: Random) -> tuple[str, Callable[[], None]]:
    weight: Any = module.weight.detach()
    at = tuple(random.randrange(n) for n in weight.shape)
    old = weight[at].clone()
    weight[at] += strength * weight.std()
    new = float(weight[at])

    def undo() -> None:
        weight[at] = old

    return f"weight{list(at)} {new:.4g} instead of {float(old):.4g}, one of {weight.numel()} elements", undo


def _scale(module: nn.Module, strength: float, random: Random) -> tuple[str, Callable[[], None]]:
    hook = module.register_forward_hook(lambda _module, _given, made: made * strength)
    return f"its output times {strength:g}, the weights untouched", hook.remove


def _drop(module: nn.Module, strength: float, random: Random) -> tuple[str, Callable[[], None]]:
    first, second = _branches(module)
    left_out = random.choice((first, second))
    forward = _block(module, left_out, strength)
    module.forward = types.MethodType(forward, module)
    what = "left out of" if strength == 0.0 else f"times {strength:g} in"

    def undo() -> None:
        del module.forward

    return f"the {left_out} branch {what} the residual sum, between the modules", undo


def _block(module: nn.Module, left_out: str, strength: float) -> Callable[..., Any]:
    """The forward of a pre-norm block with one of its two branches weakened."""
    norms = ("input_norm", "mlp_norm") if hasattr(module, "mlp_norm") else ("input_layernorm", "post_attention_layernorm")

    def add(x: Any, branch: Any, name: str) -> Any:
        if name != left_out:
            return x + branch
        return x if strength == 0.0 else x + strength * branch

    def forward(self: Any, hidden_states: Any, *given: Any, **named: Any) -> Any:
        attention, mlp = _branches(self)
        normed = getattr(self, norms[0])(hidden_states)
        # A transformers layer hands its attention everything by name.
        made = getattr(self, attention)(normed, *given) if given else getattr(self, attention)(hidden_states=normed, **named)
        x = add(hidden_states, made[0] if isinstance(made, tuple) else made, attention)
        return add(x, getattr(self, mlp)(getattr(self, norms[1])(x)), mlp)

    return forward


def _eps_of(module: nn.Module) -> str:
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), "")


def _branches(module: nn.Module) -> tuple[str, ...]:
    """(attention, mlp) as a block calls them; () for what is no block."""
    for attention, mlp in (("attention", "mlp"), ("self_attn", "mlp")):
        if hasattr(module, attention) and hasattr(module, mlp):
            return attention, mlp
    return ()


def _shared_weights(model: nn.Module) -> set[int]:
    """Parameters held by more than one module (tied embeddings): a fault there has several names."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            seen[id(weight)] = seen.get(id(weight), 0) + 1
    return {key for key, times in seen.items() if times > 1}
