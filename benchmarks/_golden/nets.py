"""Small models and how they are captured, for the cases of several kinds."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import whence
from whence.demo.torch_tiny import TinyLM

Record = Callable[[Path], None]
IDS = torch.arange(16).reshape(2, 8) * 7 % 40


def seeded(*shape: int, seed: int = 1) -> torch.Tensor:
    """The same numbers each time: quarters, so that sums of few of them are exact."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=draw).float() / 4


def captured(
    build: Callable[[], Any],
    given: Callable[[], Any] | None = None,
    drive: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Record:
    """A run of a model: of one call with what `given` returns, or of `drive(model)`."""

    def record(path: Path) -> None:
        torch.manual_seed(0)
        model = build()
        with (
            torch.no_grad(),
            contextlib.redirect_stderr(io.StringIO()),
            whence.capture(model, path, **options),
        ):
            if drive is not None:
                drive(model)
            else:
                inputs = given() if given is not None else (IDS,)
                model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    return record


def language(change: Callable[[Any], object] | None = None, dtype: Any = torch.float32) -> Any:
    """A maker of a language model of two layers."""

    def build() -> nn.Module:
        model = TinyLM(40, width=32, heads=2, hidden=48, layers=2).eval().to(dtype)
        if change is not None:
            change(model)
        return model

    return build


class Images(nn.Module):
    """A stem, a residual block and a head, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(batch, channel, height, width) -> (batch, 5)."""
        hidden = torch.relu(self.norm(self.stem(image)))
        return self.head((hidden + torch.relu(self.conv(hidden))).mean((2, 3)))


class Gain(nn.Module):
    """Times a number."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x * self.gain


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 32)
        self.act, self.down, self.scale = nn.GELU(), nn.Linear(32, 16), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 16) -> the same."""
        return x + self.down(self.act(self.up(self.norm(x)))) * self.scale


def blocks(*scales: float) -> nn.Module:
    """A linear layer, blocks, a norm and a head."""
    return nn.Sequential(
        nn.Linear(8, 16), *map(Block, scales), nn.LayerNorm(16), nn.Linear(16, 4)
    ).eval()


class Attention(nn.Module):
    """Two heads; the mask sees `ahead` later positions; padding is hidden or not."""

    def __init__(self, ahead: int = 0, *, pads: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.ahead, self.pads, self.scale = ahead, pads, scale
        self.eval()

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 8, 40)."""
        mask = torch.ones(8, 8, dtype=torch.bool).tril(self.ahead)[None, None]
        if self.pads:
            mask = mask & attention_mask[:, None, None].bool() | torch.eye(8, dtype=torch.bool)
        x = self.embed(ids)
        y = self.norm(x)
        heads = (f(y).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            *heads, attn_mask=mask.expand(2, 1, 8, 8), scale=self.scale
        )
        return self.head(x + self.o(y.transpose(1, 2).flatten(2)))
