"""Attention computed otherwise. Each kernel takes q, k, v [batch, heads, length, width] and gives
[batch, length, heads, width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.editing import become
from _zoo.plain import HandAttention
from _zoo.sides import NotHere, Side
from _zoo.ways import way

Kernel = Callable[[Tensor, Tensor, Tensor, "Tensor | None", float], Tensor]
REFUSED = ("s_aux", "softcap", "position_bias")


def use(side: Side, name: str, kernel: Kernel, only: str = "") -> Side:
    """Every attention of the model, or the one of that name, by another kernel."""
    if "plain" in side.traits:
        places = [(n, m) for n, m in side.model.named_modules() if isinstance(m, HandAttention)]
        if not places:
            raise NotHere("no attention of its own")
        for n, module in places:
            if only in ("", n):
                module.attend = _plain(kernel)
                side.touched.add(n)
        return side
    return _transformers(side, name, kernel, only)


def _plain(kernel: Kernel) -> Callable[..., Any]:
    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, None]:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not getattr(kernel, "grouped", False):
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return kernel(q, k, v, mask, scaling), None

    return attend


def _transformers(side: Side, name: str, kernel: Kernel, only: str) -> Side:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    reached: set[str] = set()
    for n, m in side.model.named_modules():
        m.__dict__["zoo_name"] = n  # copies of the model keep it
    key = f"zoo_{name}" + only.replace(".", "_")

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if any(more.get(k) is not None for k in REFUSED):
            raise NotHere("attention with more than a mask")
        name = getattr(module, "zoo_name", "")
        reached.add(name)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[-2]]
        chosen = kernel if only in ("", name) else softmaxed
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not getattr(chosen, "grouped", False):
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return chosen(query, key, value, attention_mask, scaling).contiguous(), None

    AttentionInterface.register(key, attention)
    AttentionMaskInterface.register(key, eager_mask)
    choose(side, key)
    side.copied().run()
    if not any(reached) or (only and only not in reached):
        raise NotHere("attention is the model's own")
    side.touched |= reached
    return side


def choose(side: Side, name: str) -> None:
    """Have a model of transformers take this attention, whatever it declares to support."""
    config = getattr(side.model, "config", None)
    if config is None:
        raise NotHere("no configuration")
    for module in side.model.modules():
        own = getattr(module, "config", None)
        if own is not None and hasattr(own, "_attn_implementation_internal"):
            own._attn_implementation_internal = name


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with an additive mask."""
    return scores if mask is None else scores + mask


def softmaxed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """As transformers writes it out."""
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask).float()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return ((weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v).transpose(1, 2)


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked(torch.einsum("bhid,bhjd->bhij", q, k) * scaling, mask)
    return torch.einsum("bhij,bhjd->bihd", torch.softmax(scores.float(), -1).to(q.dtype), v)


def _heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    out = []
    for h in range(q.shape[1]):
        own = (
            None
            if mask is None
            else mask[:, h if mask.dim() > 3 and mask.shape[1] > 1 else 0]
            if mask.dim() > 3
            else mask
        )
        scores = masked(q[:, h] @ k[:, h].transpose(-2, -1) * scaling, own)
        out.append(torch.softmax(scores.float(), -1).to(q.dtype) @ v[:, h])
    return torch.stack(out, 2)


def _chunks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    out = []
    for at in range(0, q.shape[2], 5):
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., at : at + 5, :]
        out.append(softmaxed(q[:, :, at : at + 5], k, v, own, scaling))
    return torch.cat(out, 1)


def _online(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    shape = (*q.shape[:-1], 1)
    top, total = q.new_full(shape, -1e30).float(), q.new_zeros(shape).float()
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
    for at in range(0, k.shape[2], 4):
        own = None if mask is None else mask[..., at : at + 4]
        scores = masked(q @ k[:, :, at : at + 4].transpose(-2, -1) * scaling, own).float()
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, keep = torch.exp(scores - new), torch.exp(top - new)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ v[:, :, at : at + 4].float()
        top = new
    return (out / total).to(q.dtype).transpose(1, 2)


def _scaled_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked((q * scaling) @ k.transpose(-2, -1), mask)
    return (torch.softmax(scores.float(), -1).to(q.dtype) @ v).transpose(1, 2)


def _split_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    root = scaling**0.5
    scores = masked((q * root) @ (k * root).transpose(-2, -1), mask)
    return (torch.softmax(scores.float(), -1).to(q.dtype) @ v).transpose(1, 2)


def _boolean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = q @ k.transpose(-2, -1) * scaling
    if mask is not None:
        if bool(((mask != 0) & (mask > -1e3)).any()):
            raise NotHere("a mask of other numbers")
        scores = scores.masked_fill(mask < -1e3, float("-inf"))
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def _mask_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        if bool(((mask != 0) & (mask > -1e3)).any()):
            raise NotHere("a mask of other numbers")
        scores = scores + mask.clamp(min=-1e9 if q.dtype != torch.float16 else -3e4)
    return (torch.softmax((scores * scaling).float(), -1).to(q.dtype) @ v).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    b, h, n, d = q.shape
    if mask is not None and mask.dim() > 3 and mask.shape[1] > 1:
        raise NotHere("a mask for each head")
    q = q.view(b, k.shape[1], h // k.shape[1], n, d)
    scores = q @ k[:, :, None].transpose(-2, -1) * scaling
    scores = masked(scores, mask if mask is None or mask.dim() < 4 else mask[:, :, None])
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return (weights @ v[:, :, None]).reshape(b, h, n, -1).transpose(1, 2)


_grouped.grouped = True  # type: ignore[attr-defined]


def _flat(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    b, h, n, _ = q.shape
    add = q.new_zeros(b * h, n, k.shape[2])
    if mask is not None:
        add = mask.expand(b, h, n, k.shape[2]).reshape(b * h, n, -1).to(q.dtype)
    scores = torch.baddbmm(add, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=scaling)
    out = torch.bmm(torch.softmax(scores.float(), -1).to(q.dtype), v.flatten(0, 1))
    return out.view(b, h, n, -1).transpose(1, 2)


def _transposed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = k @ q.transpose(-2, -1) * scaling
    scores = scores if mask is None else scores + mask.transpose(-2, -1)
    weights = torch.softmax(scores.float(), -2).to(q.dtype)
    return (v.transpose(-2, -1) @ weights).permute(0, 3, 1, 2)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    width = v.shape[-1]
    q, k, v = (F.pad(t, (0, 8)) for t in (q, k, v))
    return softmaxed(q, k, v, mask, scaling)[..., :width]


def _upcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    mask = None if mask is None else mask.float()
    out = softmaxed(q.float(), k.float(), v.float(), mask, scaling)
    return out.to(q.dtype)


def _logsumexp(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask).float()
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
    return (weights.to(q.dtype) @ v).transpose(1, 2)


def _narrow(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def _divided_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = masked(q @ k.transpose(-2, -1) * scaling, mask).float()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    return ((weights.to(q.dtype) @ v) / total.to(q.dtype)).transpose(1, 2)


def _product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * scaling
    return (torch.softmax(masked(scores, mask).float(), -1).to(q.dtype) @ v).transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    mask = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    if mask is None or q.shape[2] != k.shape[2]:
        raise NotHere("no causal mask")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2)


def _enable_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, None if mask is None else mask.to(q.dtype), scale=scaling, enable_gqa=True
    ).transpose(1, 2)


_enable_gqa.grouped = True  # type: ignore[attr-defined]


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + full[b, h, i, j]

    full = q.new_zeros(*q.shape[:3], k.shape[2])
    if mask is not None:
        full = full + mask
    return flex_attention(q, k, v, score_mod=score, scale=scaling).transpose(1, 2)


KERNELS: dict[str, Kernel] = {
    "flex": _flex,
    "softmax-written-out": _written,
    "einsum": _einsum,
    "loop-over-heads": _heads,
    "chunks-of-queries": _chunks,
    "online-softmax": _online,
    "scale-on-the-query": _scaled_query,
    "scale-split": _split_scale,
    "boolean-mask": _boolean,
    "mask-before-scale": _mask_first,
    "grouped-heads": _grouped,
    "flat-batches": _flat,
    "transposed-scores": _transposed,
    "padded-heads": _padded,
    "upcast": _upcast,
    "logsumexp": _logsumexp,
    "softmax-in-its-dtype": _narrow,
    "divided-last": _divided_last,
    "products-summed": _product,
    "fused": _fused,
    "is-causal": _causal,
    "fused-grouped": _enable_gqa,
}

for _name, _kernel in KERNELS.items():

    def _make(side: Side, seed: int, name: str = _name, kernel: Kernel = _kernel) -> Side:
        return use(side, name, kernel)

    way(f"attention-{_name}")(_make)


@way("attention-sdpa")
def _sdpa(side: Side, seed: int) -> Side:
    if "transformers" not in side.traits:
        raise NotHere("no choice of attention")
    seen = _implementations(side)
    side.model.set_attn_implementation("sdpa")  # type: ignore[operator]
    if _implementations(side) == seen:
        raise NotHere("has no fused attention")
    return side


def _implementations(side: Side) -> list[Any]:
    configs = [getattr(m, "config", None) for m in side.model.modules()]
    return [getattr(c, "_attn_implementation", None) for c in configs]


@way("attention-module-written-out")
def _own_code(side: Side, seed: int) -> Side:
    """torch's MultiheadAttention, by its weights."""
    places = [(n, m) for n, m in side.model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if not places:
        raise NotHere("no MultiheadAttention")
    for name, module in places:
        become(module, _multihead)
        side.touched.add(name)
    return side


def _multihead(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        for t, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(mask, float("-inf"))
    out = softmaxed(q, k, v, mask, q.shape[-1] ** -0.5)
    return F.linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias), None
