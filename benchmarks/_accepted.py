"""Programs for `accept_cases.py`, each rebuilt at the size of a processor from a public thread in
which an expectation moved: what gave it before, what gives it now, and whether it may be renewed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Case(NamedTuple):
    """thread: where it comes from. old: gave the expectation; new: gives the values now. may: is it
    to be accepted? inputs: of new. how: further arguments of `accept`. digits: that are printed.
    """

    thread: str
    old: Callable[..., Any]
    new: Callable[..., Any]
    may: bool
    inputs: Any = None
    how: Mapping[str, Any] = MappingProxyType({})
    digits: int = 0


def seeded(shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_product(a, b):
    """Products summed in parts, as another kernel does."""
    third = a.shape[-1] // 3 or 1
    parts = [a[..., s : s + third] @ b[s : s + third] for s in range(0, a.shape[-1], third)]
    return sum(reversed(parts[:-1]), parts[-1])


class Block(nn.Module):
    """A small transformer. product: of matrices. mask: causal or none; form of its GELU, eps."""

    def __init__(self, product=None, form="none", eps=1e-5, causal=True, scale=1.0, listens=True):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(60, 48)
        self.norm, self.final = nn.LayerNorm(48, eps=eps), nn.LayerNorm(48, eps=eps)
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.up, self.down, self.head = nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 60)
        self.product, self.form, self.causal = product, form, causal
        self.scale, self.listens = scale, listens

    def linear(self, layer, x):
        if self.product is None:
            return layer(x)
        return self.product(x, layer.weight.T) + layer.bias

    def forward(self, ids, mask=None):
        x = self.words(ids)
        q, k, v = self.linear(self.qkv, self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * self.scale / 48**0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        if mask is not None and self.listens:
            scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        x = x + self.linear(self.out, scores.softmax(-1) @ v)
        hidden = F.gelu(self.linear(self.up, x), approximate=self.form)
        return self.linear(self.head, self.final(x + self.linear(self.down, hidden)))


IDS = torch.arange(24).reshape(2, 12) % 60
MASK = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12])
BATCH = {"ids": IDS, "mask": MASK}


def logits(part=(slice(None), slice(-1, None), slice(0, 4)), **how):
    def program(ids, mask=None):
        with torch.no_grad():
            return Block(**how).eval()(ids, mask)[part]

    return program


def ids_only(ids):
    with torch.no_grad():
        return Block().eval()(ids)[:, -1, :4]


def deaf(ids, mask=None):
    with torch.no_grad():
        return Block().eval()(torch.ones_like(ids), mask)[:, -1, :4]


def training(
    product=None, steps=20, lr=1e-3, decay=0.01, clip=0.0, beta=0.999, warmup=False, mean=True
):
    def program():
        net = Block(product=product)
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=decay, betas=(0.9, beta))
        curve = {}
        for step in range(steps):
            if warmup:
                optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 10)
            ids = (torch.arange(32).reshape(4, 8) * 7 + step) % 60
            loss = F.cross_entropy(
                net(ids).flatten(0, 1),
                ids.roll(-1, 1).flatten(),
                reduction="mean" if mean else "sum",
            )
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            curve[step + 1] = loss.item()
        return {"lm loss": curve}

    return program


def schedule(steps, form):
    """Sigmas of a sampler."""

    def program():
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        kept = torch.cumprod(1 - betas, 0)
        if form == "logs":
            kept = torch.exp(torch.cumsum(torch.log1p(-betas), 0))
        sigmas = ((1 - kept) / kept).sqrt()
        places = torch.linspace(999, 0, steps).round().long()
        sample = seeded((4, 8))
        for high, low in zip(sigmas[places][:-1], sigmas[places][1:], strict=True):
            sample = sample - (high - low) * torch.tanh(sample) / (1 + high)
        return sample

    return program


def polar(form):
    def program():
        x = seeded((24, 24)) / 24
        for _ in range(14):
            x = 1.5 * x - 0.5 * (x @ (x.T @ x) if form == "right" else (x @ x.T) @ x)
        return x[:3, :3]

    return program


def solve(form):
    def program():
        a = seeded((40, 40))
        gram, b = a @ a.T + 0.1 * torch.eye(40), seeded((40,), 1)
        if form == "cholesky":
            return torch.cholesky_solve(b[:, None], torch.linalg.cholesky(gram))[:5, 0]
        return torch.linalg.solve(gram, b)[:5]

    return program


def norm_of(form):
    def program():
        x = seeded((5000,)).double()
        return math.sqrt(float((x * x).sum())) if form == "sum" else float(torch.linalg.norm(x))

    return program


def convolution(form, padding=1):
    def program():
        x, w = seeded((1, 8, 12, 12)), seeded((4, 8, 3, 3), 1)
        if form == "matrix":
            columns = F.unfold(x, 3, padding=padding)
            return plain_product(w.reshape(4, -1), columns[0]).reshape(1, 4, 12, 12)[0, :, 3:6, 3]
        return F.conv2d(x, w, padding=padding)[0, :, 3:6, 3]

    return program


def divergence(form):
    def program():
        p, q = seeded((6, 40)).softmax(-1), seeded((6, 40), 1).log_softmax(-1)
        if form == "written":
            return (p * (p.log() - q)).sum() / 6
        return F.kl_div(q, p, reduction="batchmean" if form == "batch" else "mean")

    return program


def gelu(form):
    def program():
        x = seeded((64,))
        return (
            0.5 * x * (1 + torch.erf(x / 2**0.5))
            if form == "written"
            else F.gelu(x, approximate=form)
        )

    return program


def image(resize, **how):
    def program():
        picture = seeded((1, 3, 16, 16)).sigmoid()
        big = F.interpolate(picture, (24, 24), mode=resize, **how)
        return big[0, 0, 9:12, 9:12]

    return program


def embedding(pool):
    def program(ids):
        with torch.no_grad():
            hidden = Block().eval()(ids)
        summed = hidden[:, 0] if pool == "first" else hidden.mean(1)
        return F.normalize(summed, dim=-1)[:, :6] if pool != "bare" else summed[:, :6]

    return program


def pooled_otherwise(ids):
    with torch.no_grad():
        hidden = Block(product=plain_product).eval()(ids)
    summed = torch.einsum("bsd->bd", hidden) / hidden.shape[1]
    return (summed / summed.square().sum(-1, keepdim=True).sqrt())[:, :6]


def recurrent(form):
    def program():
        torch.manual_seed(0)
        cell, x = nn.LSTM(8, 16), seeded((30, 2, 8))
        with torch.no_grad():
            if form == "module":
                return cell(x)[0][-1, :, :4]
            h = c = torch.zeros(2, 16)
            for step in x:
                gates = (
                    step @ cell.weight_ih_l0.T
                    + cell.bias_ih_l0
                    + h @ cell.weight_hh_l0.T
                    + cell.bias_hh_l0
                )
                i, f, g, o = gates.chunk(4, -1)
                c = (
                    f + (1.0 if form == "forgets less" else 0.0)
                ).sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return h[:, :4]

    return program


def bfloat(product=None):
    def program(x):
        net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        for n, p in enumerate(net.parameters()):
            p.data = seeded(p.shape, n, 0.2)
        with torch.no_grad():
            return net.bfloat16()(x.bfloat16()).float() if product == "bfloat16" else net(x)

    return program


X = seeded((6, 32), 5)
FIRST = (slice(None), slice(0, 1), slice(0, 4))
NVIDIA = "https://github.com/NVIDIA/Megatron-LM/pull/"
HF = "https://github.com/huggingface/"
CASES = {
    "kernels of another release": Case(
        f"{HF}transformers/pull/48750", logits(product=plain_product), logits(), True, BATCH
    ),
    "kernels of another release, four digits": Case(
        f"{HF}transformers/pull/30989",
        logits(product=plain_product),
        logits(),
        True,
        BATCH,
        digits=4,
    ),
    "image of another container": Case(
        f"{HF}transformers/pull/48164",
        image("bilinear", align_corners=False),
        image("bilinear", align_corners=False),
        True,
    ),
    "gelu written out": Case(f"{HF}transformers/pull/14167", gelu("written"), gelu("none"), True),
    "gelu by tanh": Case(f"{HF}transformers/pull/14167", gelu("tanh"), gelu("none"), False),
    "container update": Case(f"{NVIDIA}6991", training(product=plain_product), training(), True),
    "container update, five digits": Case(
        f"{NVIDIA}4611", training(product=plain_product), training(), True, digits=5
    ),
    "full precision": Case(f"{NVIDIA}7217", training(), training(), True, digits=5),
    "loss better by percents": Case(f"{NVIDIA}5459", training(lr=1.5e-3), training(), False),
    "weight decay changed": Case(f"{NVIDIA}6991", training(decay=0.1), training(), False),
    "clipping added": Case(f"{NVIDIA}3460", training(), training(clip=0.5), False),
    "second moment of another default": Case(
        f"{NVIDIA}4733", training(beta=0.98), training(), False
    ),
    "warmup added": Case(f"{NVIDIA}4733", training(), training(warmup=True), False),
    "loss summed": Case(f"{NVIDIA}5459", training(mean=False), training(), False),
    "epsilon of another default": Case(
        f"{HF}transformers/pull/38701", logits(eps=1e-6), logits(), False, BATCH
    ),
    "attention without its mask": Case(
        f"{HF}transformers/issues/2758", logits(), logits(listens=False), False, BATCH
    ),
    "mask inverted": Case(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2476",
        logits(),
        lambda ids, mask: logits()(ids, 1 - mask),
        False,
        BATCH,
    ),
    "model that ignores its ids": Case(f"{HF}transformers/pull/6621", logits(), deaf, False, BATCH),
    "golden of a model that ignores its ids": Case(
        f"{HF}transformers/pull/6621",
        lambda ids, mask: deaf(ids, mask) * (1 + 1e-7),
        deaf,
        False,
        BATCH,
    ),
    "not causal": Case(
        f"{HF}transformers/pull/16517", logits(FIRST, causal=False), logits(FIRST), False, BATCH
    ),
    "scale of the scores": Case(
        f"{HF}diffusers/pull/3389", logits(scale=1.001), logits(), False, BATCH
    ),
    "sampler in logarithms": Case(
        f"{HF}diffusers/pull/4986", schedule(10, "logs"), schedule(10, "products"), True
    ),
    "sampler with another number of steps": Case(
        f"{HF}diffusers/pull/466", schedule(9, "products"), schedule(10, "products"), False
    ),
    "image slice of another image": Case(
        f"{HF}diffusers/pull/2314", image("nearest"), image("bilinear", align_corners=False), False
    ),
    "corners aligned": Case(
        f"{HF}diffusers/pull/8678",
        image("bilinear", align_corners=True),
        image("bilinear", align_corners=False),
        False,
    ),
    "unseeded noise": Case(
        f"{HF}diffusers/pull/268",
        lambda: torch.rand(4, generator=torch.Generator().manual_seed(1)),
        lambda: torch.rand(4, generator=torch.Generator().manual_seed(2)),
        False,
    ),
    "polar factor from the other side": Case(
        "https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/237",
        polar("left"),
        polar("right"),
        True,
    ),
    "solve instead of factors": Case(
        "https://github.com/cornellius-gp/gpytorch/pull/578",
        solve("cholesky"),
        solve("general"),
        True,
    ),
    "norm of another order": Case(
        "https://github.com/FEniCS/dolfinx/pull/2964", norm_of("sum"), norm_of("norm"), True
    ),
    "product near zero": Case(
        "https://github.com/apache/tvm/issues/1784",
        lambda: plain_product(seeded((9, 90)), seeded((90, 9), 1)),
        lambda: seeded((9, 90)) @ seeded((90, 9), 1),
        True,
    ),
    "threshold that hides a transposed weight": Case(
        "https://github.com/triton-lang/triton/issues/723",
        lambda: seeded((9, 9)) @ seeded((9, 9), 1).T,
        lambda: seeded((9, 9)) @ seeded((9, 9), 1),
        False,
    ),
    "convolution by a matrix product": Case(
        "https://github.com/pytorch/TensorRT/pull/967",
        convolution("matrix"),
        convolution("direct"),
        True,
    ),
    "divergence written out": Case(
        "https://github.com/linkedin/Liger-Kernel/issues/259",
        divergence("written"),
        divergence("batch"),
        True,
    ),
    "divergence of another mean": Case(
        "https://github.com/linkedin/Liger-Kernel/issues/259",
        divergence("mean"),
        divergence("batch"),
        False,
    ),
    "embeddings of another release": Case(
        "https://github.com/huggingface/lerobot/pull/3032",
        pooled_otherwise,
        embedding("mean"),
        True,
        {"ids": IDS},
    ),
    "embeddings pooled otherwise": Case(
        "https://github.com/pytorch/pytorch/issues/157274",
        embedding("first"),
        embedding("mean"),
        False,
        {"ids": IDS},
    ),
    "recurrence written out": Case(
        f"{HF}transformers/pull/31088", recurrent("written"), recurrent("module"), True
    ),
    "forget gate": Case(
        f"{HF}transformers/pull/31088", recurrent("forgets less"), recurrent("module"), False
    ),
    "was bfloat16": Case(
        f"{HF}transformers/pull/38701",
        bfloat("bfloat16"),
        bfloat(),
        True,
        {"x": X},
        {"was": "bfloat16"},
    ),
    "was bfloat16, not declared": Case(
        f"{HF}transformers/pull/38701", bfloat("bfloat16"), bfloat(), False, {"x": X}
    ),
}
