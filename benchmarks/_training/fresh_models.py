"""Models of other families than those that the rules for trainings were set with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, CLASSES = 80, 6


def gpt2(**options: Any) -> nn.Module:
    """A decoder whose head is its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def t5(**options: Any) -> nn.Module:
    """An encoder and a decoder."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        **options,
    )
    return transformers.T5ForConditionalGeneration(config)


def convnext(**options: Any) -> nn.Module:
    """Convolutions with layer norms and scales of their own."""
    config = transformers.ConvNextConfig(
        num_channels=3,
        patch_size=2,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_scale_init_value=0.5,
        num_labels=CLASSES,
        **options,
    )
    return transformers.ConvNextForImageClassification(config)


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24, padding_idx=0)
        self.rnn = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> Any:
        """The scores of every next token."""
        return SimpleNamespace(logits=self.head(self.norm(self.rnn(self.embed(input_ids))[0])))


class _Double(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 1)
        self.norm, self.act = nn.GroupNorm(4, after), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two convolutions and a norm."""
        return self.act(self.norm(self.second(self.first(x))))


class UNet(nn.Module):
    """Down, up, and a connection past both; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down, self.up = _Double(3, 8), _Double(8, 16), _Double(24, 8)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.past, self.head = nn.Identity(), nn.Conv2d(8, CLASSES, 1)

    def forward(self, pixel_values: torch.Tensor) -> Any:
        """The scores of every pixel."""
        x = self.into(pixel_values)
        low = self.grow(self.down(self.pool(x)))
        return SimpleNamespace(logits=self.head(self.up(torch.cat([self.past(x), low], 1))))


class Lion(torch.optim.Optimizer):
    """The sign of an average of gradients. Source: arXiv:2302.06675, algorithm 2."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)
