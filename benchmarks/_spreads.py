"""Operators that round otherwise in a larger batch, or on another number of threads: planted in
models of real families, and as they are in torch on this processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _violations import BERT, GPT2, LLAMA, OPT, QWEN, VIT, after
from torch import nn


class Spread(NamedTuple):
    """model(): (model, inputs). property: batch or repeat. scope: part of the name of the module
    that must be named; operators: beginnings of names, one of which must be.
    """

    name: str
    model: Callable[[], tuple[Any, dict[str, Any]]]
    property: str
    scope: str
    operators: tuple[str, ...]


def _in(family: tuple[str, str], plant: Callable[[Any], None]) -> Callable[[], Any]:
    def build() -> Any:
        import _families

        model, inputs = _families.family(*family)[1:]
        plant(model)
        return model, inputs

    return build


# ---- planted


def _replaced(scope: str, forward: Callable[..., Any]) -> Callable[[Any], None]:
    """The module computes the same in another order: forward(self, original, x, ...)."""

    def plant(model: Any) -> None:
        module = model.get_submodule(scope)
        original = type(module).forward

        def run(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, original, x, *args, **kwargs)

        module.__class__ = type(type(module).__name__, (type(module),), {"forward": run})

    return plant


def _parts_of_rows(x: Any) -> int:
    return 1 if len(x) == 1 else 2


def _parts_of_threads(x: Any) -> int:
    return torch.get_num_threads()


def split_products(parts: Callable[[Any], int]) -> Callable[..., Any]:
    """A product that is summed up in parts (split K)."""

    def forward(self: Any, original: Any, x: Any) -> Any:
        count = parts(x)
        if count == 1:
            return original(self, x)
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.T
        size = x.shape[-1] // count
        edges = [*range(0, size * count, size), x.shape[-1]]
        out = sum(x[..., a:b] @ weight[:, a:b].T for a, b in itertools.pairwise(edges))
        return out if self.bias is None else out + self.bias

    return forward


def mean_in_parts(parts: Callable[[Any], int]) -> Callable[..., Any]:
    """A norm by root mean squares whose sum is taken in parts."""

    def forward(self: Any, original: Any, x: Any) -> Any:
        count = parts(x)
        if count == 1:
            return original(self, x)
        square = x.square()
        size = x.shape[-1] // count
        total = sum(square[..., n * size : (n + 1) * size].sum(-1) for n in range(count))
        scale = torch.rsqrt(total[..., None] / x.shape[-1] + self.variance_epsilon)
        return self.weight * (x * scale)

    return forward


def layer_norm_in_parts(parts: Callable[[Any], int]) -> Callable[..., Any]:
    def forward(self: Any, original: Any, x: Any) -> Any:
        if parts(x) == 1:
            return original(self, x)
        half = x.shape[-1] // 2
        mean = (x[..., :half].sum(-1) + x[..., half:].sum(-1))[..., None] / x.shape[-1]
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    return forward


def added_in_order(parts: Callable[[Any], int]) -> Callable[..., Any]:
    """Four parts of a sum that arrive in another order."""

    def forward(self: Any, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, x, *args, **kwargs)
        pieces = [out * share for share in (0.1, 0.2, 0.3, 0.4)]
        total = torch.zeros_like(out).reshape(1, -1)
        order = pieces if parts(x) == 1 else pieces[::-1]
        for piece in order:
            total = total.index_add(0, torch.zeros(1, dtype=torch.long), piece.reshape(1, -1))
        return total.reshape(out.shape)

    return forward


def softmax_in_parts(x: Any) -> Any:
    """A soft maximum over channels with the sum of its halves, where there are several rows."""
    if len(x) == 1:
        return x + x.softmax(-1)
    power = (x - x.amax(-1, keepdim=True)).exp()
    half = x.shape[-1] // 2
    return x + power / (power[..., :half].sum(-1) + power[..., half:].sum(-1))[..., None]


def convolved_in_parts(self: Any, original: Any, x: Any) -> Any:
    if len(x) == 1:
        return original(self, x)
    first, *others = (
        nn.functional.conv2d(x[:, n : n + 1], self.weight[:, n : n + 1], None, self.stride)
        for n in range(x.shape[1])
    )
    return sum(others, first) + self.bias[:, None, None]


ROWS, THREADS = _parts_of_rows, _parts_of_threads
_SUMS = ("aten.add", "aten.mm", "aten.bmm", "aten.sum", "aten._unsafe_view", "aten.view")

PLANTED = [
    Spread("split K by rows", _in(LLAMA, _replaced("model.layers.1.mlp.down_proj",
           split_products(ROWS))), "batch", "layers.1.mlp.down_proj", _SUMS),
    Spread("split K by rows, of another module", _in(QWEN,
           _replaced("model.layers.0.self_attn.o_proj", split_products(ROWS))), "batch",
           "layers.0.self_attn.o_proj", _SUMS),
    Spread("root mean square in parts by rows", _in(LLAMA,
           _replaced("model.layers.1.post_attention_layernorm", mean_in_parts(ROWS))), "batch",
           "layers.1.post_attention_layernorm", ("aten.",)),
    Spread("layer norm in one pass by rows", _in(GPT2, _replaced("transformer.h.1.ln_1",
           layer_norm_in_parts(ROWS))), "batch", "h.1.ln_1", ("aten.",)),
    Spread("layer norm in one pass by rows, of an encoder", _in(BERT,
           _replaced("bert.encoder.layer.0.output.LayerNorm", layer_norm_in_parts(ROWS))), "batch",
           "layer.0.output.LayerNorm", ("aten.",)),
    Spread("a soft maximum in parts by rows", _in(BERT,
           after("bert.encoder.layer.1.intermediate", softmax_in_parts)), "batch",
           "layer.1.intermediate", ("aten.",)),
    Spread("a convolution in parts by rows", _in(VIT,
           _replaced("vit.embeddings.patch_embeddings.projection", convolved_in_parts)), "batch",
           "patch_embeddings.projection", ("aten.add", "aten.convolution")),
    Spread("sums in another order by rows", _in(QWEN, _replaced("model.layers.1.mlp",
           added_in_order(ROWS))), "batch", "layers.1.mlp", ("aten.index_add", "aten.mul")),
    Spread("split K by threads", _in(OPT, _replaced("model.decoder.layers.1.fc2",
           split_products(THREADS))), "repeat", "layers.1.fc2", _SUMS),
    Spread("layer norm in one pass by threads", _in(GPT2, _replaced("transformer.ln_f",
           layer_norm_in_parts(THREADS))), "repeat", "ln_f", ("aten.",)),
    Spread("sums in another order by threads", _in(GPT2, _replaced("transformer.h.0.mlp",
           added_in_order(THREADS))), "repeat", "h.0.mlp", ("aten.index_add", "aten.mul")),
]  # fmt: skip


# ---- as torch computes


class _Tower(nn.Module):
    """Rows through a norm-free tower with one layer in the middle."""

    def __init__(self, layer: Any, dtype: Any) -> None:
        super().__init__()
        self.layer = layer
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.layer(torch.tanh(x)))


class _Means(nn.Module):
    """Means over all elements, of several scales."""

    def forward(self, x: Any) -> Any:
        return torch.stack([(x * scale).mean() for scale in range(1, 9)])[None]


def _tower(layer: Callable[[], Any], shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        model = _Tower(layer(), dtype).eval()
        return model, {"x": torch.randn(shape).to(dtype)}

    return build


BF16 = torch.bfloat16
REAL = [
    Spread("float32 product of one row and of several", _tower(lambda: nn.Linear(512, 256),
           (4, 512), torch.float32), "batch", "layer", ("aten.addmm",)),
    Spread("bfloat16 product of one row and of several", _tower(lambda: nn.Linear(4096, 8192),
           (4, 4096), BF16), "batch", "layer", ("aten.addmm",)),
    Spread("float32 convolution of one image and of several", _tower(lambda: nn.Conv2d(16, 32, 3),
           (4, 16, 32, 32), torch.float32), "batch", "layer", ("aten.convolution",)),
    Spread("mean of 300,000 elements by threads", _tower(_Means, (1, 300_000),
           torch.float32), "repeat", "layer", ("aten.mean",)),
]  # fmt: skip
