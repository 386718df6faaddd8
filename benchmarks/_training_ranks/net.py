"""A small decoder in one process, and what it is trained on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LAYERS, EXPERTS = 16, 4, 32, 2, 4
STEPS, ROWS, TOKENS = 3, 4, 8
"""Steps of the optimiser, and the extents of the batch of each, all ranks together."""


class Norm(nn.Module):
    """A root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    """Attention of which a rank may hold some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token goes to the expert with the largest score, weighted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            own = (choice == number).nonzero().squeeze(-1)
            out = out.index_add(0, own, expert(tokens[own]) * share[own, None])
        return out.view_as(x)


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = Norm(), Attention(), Norm()
        self.mlp = Experts() if experts else Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """The decoder, with the weights that it always has."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(experts=experts) for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a step and those that follow them, of all ranks."""
    draw = torch.Generator().manual_seed(1 + step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def optimizer_of(net: nn.Module, learning_rate: float = 1e-2) -> torch.optim.Optimizer:
    """What makes the steps."""
    return torch.optim.AdamW(net.parameters(), lr=learning_rate, weight_decay=0.1)
