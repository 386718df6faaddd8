"""Operators that lose numbers, planted in small models and in real families; and well-conditioned
forms of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import _families
import torch
from torch import nn


class Planted(NamedTuple):
    """A model that loses numbers. make() -> (model, inputs). symptom: of `whence.results.Symptom`,
    "" where the model is healthy. operator, scope: parts of the names that must be reported.
    """

    name: str
    make: Callable[[], tuple[Any, dict[str, Any]]]
    symptom: str
    operator: str = ""
    scope: str = "extra"


class Inner(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Between(nn.Module):
    """Linear, `function`, linear."""

    def __init__(
        self, function: Callable[..., Any], dtype: Any, scale: float, shift: float
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = nn.Linear(16, 32), Inner(function), nn.Linear(32, 8)
        self.to(dtype)
        self.scale, self.shift = scale, shift

    def forward(self, x: Any) -> Any:
        return self.last(self.extra(self.first(x) * self.scale + self.shift))


def between(
    function: Callable[..., Any], dtype: Any = torch.float32, scale: float = 1.0, shift: float = 0.0
) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """A `Between` and its inputs, made when called."""

    def make() -> tuple[Any, dict[str, Any]]:
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        return Between(function, dtype, scale, shift).eval(), {"x": x}

    return make


def family(
    kind: str, name: str, change: Callable[[Any], None], dtype: Any = torch.float32
) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """A model of a real family, changed in place, and its inputs."""

    def make() -> tuple[Any, dict[str, Any]]:
        made = _families.family(kind, name)
        change(made.model)
        made.model.to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.inputs.items()}
        return made.model, inputs

    return make


# ---- what loses numbers


def norm_in_one_pass(x: Any) -> Any:
    variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    return (x - x.mean(-1, keepdim=True)) / (variance.abs() + 1e-6).sqrt()


def norm_in_two_passes(x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-6).sqrt()


def distances(x: Any) -> Any:
    squares = (x * x).sum(-1)
    apart = squares[:, None] + squares[None] - 2 * x @ x.T
    return x + 0.1 * (apart.abs() / apart.abs().mean()) @ x / 6


def quadratic(x: Any) -> Any:
    return (x + 1e4) - (x * x + 1e8).sqrt()


def attend(factor: float) -> Callable[[Any], Any]:
    def attention(x: Any) -> Any:
        scores = x @ x.T * factor
        return scores.softmax(-1) @ x

    return attention


def plain_exponentials(x: Any) -> Any:
    e = (x * x * 20).exp()
    return e / e.sum(-1, keepdim=True)


def likelihoods(x: Any) -> Any:
    p = x.softmax(-1)
    return x + (p * 1e-30).pow(2).mul(1e30).mul(1e30)


def product_of_probabilities(x: Any) -> Any:
    return x + 1e-3 * (0.01 * x.sigmoid()).prod(-1, keepdim=True).log()


def small_steps(x: Any) -> Any:
    return (x * 1e-5) * (x.abs() * 1e-3) * 1e8


def variance_by_moments(x: Any) -> Any:
    return x + (x * x).mean(-1, keepdim=True).sub(x.mean(-1, keepdim=True) ** 2)


def sine(x: Any) -> Any:
    return (x * 3e5).sin()


def log_of_difference(x: Any) -> Any:
    p = (x * 1e-4).sigmoid() - 0.5
    return (p.abs() + 1e-30).log()


def expm1(x: Any) -> Any:
    return ((x * 1e-5).exp() - 1) * 1e5


def gate(x: Any) -> Any:
    return (x * 1e3 + 500).sigmoid() * x


def sum_of_squares(x: Any) -> Any:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def moments(model: Any) -> None:
    """Every layer norm in one pass, behind a shift."""
    for module in model.modules():
        for name, inner in module.named_children():
            if isinstance(inner, nn.LayerNorm):
                with torch.no_grad():
                    inner.bias += 40.0
                setattr(module, name, Moments(inner))


class Moments(nn.Module):
    """A layer norm with a variance of two moments; 200 is added before it, which an exact one
    takes away.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Any) -> Any:
        x = x + 200.0
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.abs() + self.eps).sqrt() * self.weight + self.bias - 40.0


def queries(factor: float) -> Callable[[Any], None]:
    """Projections of queries and keys are larger."""

    def change(model: Any) -> None:
        model.set_attn_implementation("eager")
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "k_proj", "query", "key")):
                module.weight.data *= factor

    return change


F16, BF16 = torch.float16, torch.bfloat16
PLANTED = (
    Planted(
        "variance E[x^2] - E[x]^2", between(norm_in_one_pass, shift=1e3),
        "cancellation", "sub",
    ),
    Planted("softmax of scores of hundreds", between(attend(100.0)), "saturation", "_softmax"),
    Planted("attention scores in float16", between(attend(1.0), F16, 200), "not finite", "mm"),
    Planted("exp without its maximum", between(plain_exponentials, scale=5), "not finite", "exp"),
    Planted("likelihoods that underflow", between(likelihoods), "underflow", "pow"),
    Planted(
        "log of a product of probabilities", between(product_of_probabilities),
        "not finite", "log",
    ),
    Planted("steps too small for float16", between(small_steps, F16), "underflow", "mul"),
    Planted("x - sqrt(x^2) of large x", between(quadratic), "cancellation", "sub"),
    Planted(
        "layer norm by moments in ViT", family("image", "vit", moments),
        "cancellation", "sub", "norm",
    ),
    Planted(
        "float16 queries in Llama", family("decoder", "llama", queries(3e3), F16),
        "not finite", "bmm", "self_attn",
    ),
)  # fmt: skip
HELD_OUT = (
    Planted("distances by squares", between(distances, shift=300.0), "cancellation", "sub"),
    Planted("exp(x) - 1 of small x", between(expm1), "cancellation", "sub"),
    Planted("sine of large angles", between(sine), "amplification", "sin"),
    Planted(
        "log of a difference of probabilities", between(log_of_difference),
        "cancellation", "sub",
    ),
    Planted(
        "variance by moments, added", between(variance_by_moments, shift=2e3),
        "cancellation", "sub",
    ),
    Planted("a gate at its bounds", between(gate), "saturation", "sigmoid"),
    Planted("squares in float16", between(sum_of_squares, F16, 300), "not finite", "mul"),
    Planted(
        "saturated attention in Mistral", family("decoder", "mistral", queries(300.0)),
        "saturation", "_softmax", "self_attn",
    ),
    Planted(
        "layer norm by moments in BERT", family("encoder", "bert", moments),
        "cancellation", "sub", "LayerNorm",
    ),
    Planted(
        "float16 queries in BERT", family("encoder", "bert", queries(5e3), F16),
        "not finite", "bmm", "self",
    ),
)  # fmt: skip
HEALTHY = (
    Planted("variance of differences", between(norm_in_two_passes, shift=3.0), ""),
    Planted("attention", between(attend(0.2)), ""),
    Planted("attention in float16", between(attend(0.2), F16), ""),
    Planted("attention in bfloat16", between(attend(0.2), BF16), ""),
    Planted("squares in float32", between(sum_of_squares, scale=300), ""),
    Planted("distances around 0", between(distances), ""),
    Planted("float16 Llama", family("decoder", "llama", lambda model: None, F16), ""),
    Planted("bfloat16 Mistral", family("decoder", "mistral", lambda model: None, BF16), ""),
    Planted("float16 BERT", family("encoder", "bert", lambda model: None, F16), ""),
    Planted("bfloat16 ViT", family("image", "vit", lambda model: None, BF16), ""),
)
