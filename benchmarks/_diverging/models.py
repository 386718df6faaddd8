"""Small models and their data for `benchmarks/diverging.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH, ROWS, LAYERS = 64, 32, 16, 8, 1


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """causal: of a language model. eager: the formula in the place of torch's kernel."""

    def __init__(self, width: int, heads: int, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.eager = heads, causal, False
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=bias) for _ in range(4)
        )

    def forward(self, x: Any) -> Any:
        rows, length, width = x.shape
        q, k, v = (
            proj(x).view(rows, length, self.heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.eager:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if self.causal:
                mask = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(mask, float("-inf"))
            out = scores.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Each token goes to the better one of three experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width) for _ in range(3))

    def forward(self, x: Any) -> Any:
        chances = self.router(x).softmax(-1)
        best = chances.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            out[chosen] = expert(x[chosen]) * chances[chosen][:, number, None]
        return out


class Block(nn.Module):
    def __init__(self, width: int, norm: Any, mixer: Any, mlp: Any, chance: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(width), mixer, norm(width), mlp
        self.drop = nn.Dropout(chance)

    def forward(self, x: Any) -> Any:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """A language model, or over patches where `patches`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.patches = kind == "vit"
        bias, norm = kind in ("gpt", "vit"), nn.LayerNorm if kind in ("gpt", "vit") else RMSNorm
        chance = 0.1 if kind == "gpt" else 0.0
        self.embed = nn.Linear(48, WIDTH) if self.patches else nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

        def mlp() -> nn.Module:
            if kind == "moe":
                return Experts(WIDTH)
            if kind == "llama":
                return SwiGLU(WIDTH)
            return nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
            )

        self.layers = nn.ModuleList(
            Block(
                WIDTH, norm, Attention(WIDTH, 4, bias=bias, causal=not self.patches), mlp(), chance
            )
            for _ in range(LAYERS)
        )
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, 10 if self.patches else WORDS, bias=False)
        if kind == "gpt":
            self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        x = self.embed(x) + self.position[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.patches else x)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.body(x))), 2)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.cell(self.embed(x))[0]))


def model_of(name: str) -> nn.Module:
    """A model by its name."""
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(48, 64),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    if name == "conv":
        return Conv()
    return Recurrent() if name == "gru" else Transformer(name)


def is_language(name: str) -> bool:
    """Does a model read words?"""
    return name not in ("mlp", "conv", "vit")


def batch_of(name: str, seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels: something that can be learned."""
    made = torch.Generator().manual_seed(1000 * seed + number)
    if is_language(name):
        start = torch.randint(0, WORDS, (ROWS, 1), generator=made)
        jump = torch.randint(1, 4, (ROWS, 1), generator=made)
        words = (start + jump * torch.arange(LENGTH + 1)) % WORDS
        noise = torch.rand(words.shape, generator=made) < 0.1
        words = torch.where(noise, torch.randint(0, WORDS, words.shape, generator=made), words)
        return words[:, :-1], words[:, 1:]
    labels = torch.randint(0, 10, (2 * ROWS,), generator=made)
    means = torch.randn(10, 48 * LENGTH, generator=torch.Generator().manual_seed(seed))
    x = means[labels] + 2 * torch.randn(2 * ROWS, 48 * LENGTH, generator=made)
    if name == "mlp":
        return x[:, :48], labels
    return (x.view(-1, LENGTH, 48) if name == "vit" else x.view(-1, 3, 16, 16)), labels
