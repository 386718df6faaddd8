"""A small language model of the llama kind, trained on the spot until it has memorised a short
text.

It has the components of a large model: token embedding, RMSNorm, rotary attention, SwiGLU, and
residual sums written inline in the block. Trained weights have properties that random ones lack:
uneven channels, sharp attention, one clear next word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.demo import story

WIDTH, HEADS, HIDDEN, LAYERS = 128, 4, 352, 6
STEPS, BATCH, LENGTH, RATE = 60, 6, 32, 3e-3


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 whatever the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, its core written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q = _rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        # of q, k, v: (batch, head, length, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.act = nn.SiLU()
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer. The residual sums belong to no module but this one."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class TinyLM(nn.Module):
    """Tokens (batch, length) -> scores of the next token (batch, length, vocabulary)."""

    def __init__(
        self,
        vocabulary: int,
        width: int = WIDTH,
        heads: int = HEADS,
        hidden: int = HIDDEN,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.rotary = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = _angles(tokens.shape[1], self.rotary, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out


def _angles(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (length, width)."""
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block.

    The sums of the model, and therefore its weights, then do not depend on the number of cores. For
    tensors this small a second thread only waits: training took 0.9 s of CPU with one thread, 3 to
    30 s with two on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build() -> TinyLM:
    """The trained model, the same on every call in one environment.

    It uses its own random numbers; the random state of the process is unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = torch.tensor(story.encode(story.TEXT))
        model = TinyLM(len(story.vocabulary()))
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                # Layers that write into the residual stream start smaller, as in GPT-2.
                late = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight,
                    std=(0.5 if "embed" in name else 0.08)
                    / (math.sqrt(2 * LAYERS) if late else 1.0),
                )
        with torch.enable_grad():
            _train(model, tokens)
    model.requires_grad_(False)
    model.eval()
    return model


def _train(model: TinyLM, tokens: Tensor) -> None:
    """Train with Adam on random windows of the text.

    Adam is written out, because torch.optim loads the compiler, which takes seconds.
    """
    weights = list(model.parameters())
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step in range(1, STEPS + 1):
        starts = torch.randint(0, len(tokens) - LENGTH - 1, (BATCH,))
        window = starts[:, None] + torch.arange(LENGTH + 1)
        batch = tokens[window]
        scores = model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, weights)
        rate = RATE * min(1.0, step / 10) * (1.0 if step < STEPS * 0.6 else 0.3)
        with torch.no_grad():
            torch._foreach_lerp_(first, gradients, 0.1)
            torch._foreach_mul_(second, 0.98)
            torch._foreach_addcmul_(second, gradients, gradients, 0.02)
            size = torch._foreach_sqrt(torch._foreach_div(second, 1 - 0.98**step))
            torch._foreach_add_(size, 1e-8)
            torch._foreach_addcdiv_(weights, first, size, -rate / (1 - 0.9**step))


def generate(model: nn.Module, tokens: list[int], new: int) -> list[int]:
    """The `new` most probable tokens after these, one model call each over all tokens so far."""
    extended = list(tokens)
    with torch.no_grad():
        for _ in range(new):
            scores: Tensor = model(torch.tensor([extended]))
            extended.append(int(scores[0, -1].argmax()))
    return extended[len(tokens) :]
