"""Nets of plain torch, as people write them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _zoo.sides import ids, normal


class Mlp(nn.Module):
    """Linear layers with norms between."""

    def __init__(self, act: type[nn.Module] = nn.GELU, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            act(),
            nn.Linear(width, width),
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = (
            nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
        )
        self.conv3, self.bn3 = nn.Conv2d(24, 24, 3, groups=4), nn.BatchNorm2d(24)
        self.relu, self.pool = nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.relu(self.bn3(self.conv3(x)))
        return self.head(self.pool(x).flatten(1))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, a: int, b: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.shortcut = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResidualNet(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(16, 16), ResidualBlock(16, 32, 2)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Mobile(nn.Module):
    """Depthwise convolutions with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(3, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depthwise, self.bn2 = (
            nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
            nn.BatchNorm2d(32),
        )
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project, self.bn3 = nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn1(self.expand(x)))
        x = F.relu6(self.bn2(self.depthwise(x)))
        weight = self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
        x = self.bn3(self.project(x * weight.sigmoid()))
        return self.head(x.mean((2, 3)))


class DoubleConv(nn.Sequential):
    """Two convolutions with group norm."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(4, b),
            nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.GroupNorm(4, b),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Down, up, and a skip, with an embedded time."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, 16), DoubleConv(16, 32)
        self.time = nn.Linear(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.merge, self.head = DoubleConv(32, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        frequencies = torch.exp(torch.arange(8, device=x.device) * -0.5).to(x.dtype)
        angles = time[:, None] * frequencies
        b = b + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        return self.head(self.merge(torch.cat([self.up(b), a], 1)))


class Recurrent(nn.Module):
    """A recurrent net between an embedding and a head."""

    def __init__(self, kind: str, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.rnn = getattr(nn, kind)(24, 32, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(64 if bidirectional else 32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.rnn(self.embed(tokens))
        return self.head(out)


class CellLoop(nn.Module):
    """A GRU cell called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 32)
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
        return self.head(h)


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=norm_first
            )
            for _ in range(2)
        )
        self.head = nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, None]:
    """Attention in one operator; q, k, v are [batch, heads, length, width]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    return out.transpose(1, 2), None


class HandAttention(nn.Module):
    """Attention with rotary positions and grouped heads, written out."""

    attend: Callable[..., Any] = staticmethod(attend)

    def __init__(
        self, width: int = 32, heads: int = 4, groups: int = 2, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.num_key_value_groups = heads // groups
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, groups * self.size, bias=bias)
        self.v_proj = nn.Linear(width, groups * self.size, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        split = (*x.shape[:-1], -1, self.size)
        q = self.q_proj(x).view(split).transpose(1, 2)
        k = self.k_proj(x).view(split).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, _ = self.attend(self, q, k, v, mask, self.size**-0.5)
        return self.o_proj(out.reshape(x.shape))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of two halves."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Gated(nn.Module):
    """A gated network."""

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HandBlock(nn.Module):
    """Attention and a network, each behind a norm and added to what came in."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)
        self.attention, self.mlp = HandAttention(), mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        residual = x
        x = residual + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class HandDecoder(nn.Module):
    """A small decoder."""

    def __init__(self, mlp: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(HandBlock(mlp()) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 97, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, n = self.embed(tokens), tokens.shape[1]
        angles = torch.arange(n)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = torch.zeros(n, n, dtype=x.dtype)
        mask = mask.masked_fill(
            torch.ones(n, n, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
        )
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Weights of experts, run in a loop."""

    def __init__(self, width: int = 32, inner: int = 48, count: int = 6) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.empty(count, inner, width))
        self.down = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            rows, slot = torch.where(index == e)
            hidden = F.gelu(F.linear(x[rows], self.up[e]))
            out.index_add_(0, rows, F.linear(hidden, self.down[e]) * weight[rows, slot, None])
        return out


class Router(nn.Module):
    """The best two experts of each row, and their shares."""

    def __init__(self, width: int = 32, count: int = 6) -> None:
        super().__init__()
        self.proj = nn.Linear(width, count, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, index = self.proj(x).softmax(-1).topk(2, -1)
        return weight / weight.sum(-1, keepdim=True), index


class HandMoe(nn.Module):
    """Experts behind a router, beside one that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(), Experts(), Gated(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, index = self.router(flat)
        out = self.experts(flat, index, weight)
        return out.view(x.shape) + self.shared(x)


class AutoEncoder(nn.Module):
    """A variational autoencoder without its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(24, 8), nn.Linear(24, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 40), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(mean), mean, log_variance


class Generator(nn.Sequential):
    """The generator of a GAN."""

    def __init__(self) -> None:
        super().__init__(
            nn.ConvTranspose2d(16, 32, 4),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 3, 3, padding=1),
            nn.Tanh(),
        )


class GraphNet(nn.Module):
    """Graph convolutions by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        a = (edges > 0.5).to(x.dtype) + torch.eye(x.shape[0], dtype=x.dtype)
        degree = a.sum(1).rsqrt()
        a = degree[:, None] * a * degree[None]
        x = F.relu(a @ self.first(x))
        x = x + F.relu(a @ self.second(self.norm(x)))
        return self.head(x)


class Mixer(nn.Module):
    """Networks over patches and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class Crossing(nn.Module):
    """A query that looks at memory, by torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(16, 32), nn.Linear(20, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 6)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, m = self.query(x), self.memory(memory)
        out, _ = self.attention(q, m, m)
        return self.head(self.norm(q + out))


class Speech(nn.Module):
    """Convolutions over time, with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(24, 48, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.inp, self.out = nn.Conv1d(8, 24, 1), nn.Conv1d(24, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for conv in self.convs:
            a, b = conv(x).chunk(2, 1)
            x = x + a.tanh() * b.sigmoid()
        return self.out(F.relu(x))


class Scan(nn.Module):
    """A linear recurrence with gates, written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.value = (
            nn.Embedding(97, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.norm, self.head = nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 97, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        decay, value = self.gate(x).sigmoid(), self.value(x)
        state, out = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + (1 - decay[:, i]) * value[:, i]
            out.append(state)
        return self.head(torch.stack(out, 1))


class Recommender(nn.Module):
    """Embedding bags, products of pairs, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(26, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        parts = [self.bottom(dense), *(t(items[:, i]) for i, t in enumerate(self.tables))]
        stack = torch.stack(parts, 1)
        rows, columns = torch.triu_indices(5, 5, 1)
        pairs = (stack @ stack.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([parts[0], pairs], 1))


class Siamese(nn.Module):
    """One encoder, called for both of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.encoder(a), dim=-1), F.normalize(self.encoder(b), dim=-1)
        return self.scale.exp() * a @ b.T


IMAGES = {"0": (4, 3, 16, 16)}
TEXT = (3, 12)


def _text() -> dict[str, Tensor]:
    return {"0": ids("tokens", *TEXT, 97)}


def _of(**shapes: tuple[int, ...]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {k.strip("_"): normal(f"input {k}", *shape) for k, shape in shapes.items()}


_IMAGES = _of(_0=(4, 3, 16, 16))

NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "mlp-gelu": (Mlp, _of(_0=(12, 16)), "rows"),
    "mlp-relu": (lambda: Mlp(nn.ReLU), _of(_0=(12, 16)), "rows"),
    "mlp-silu-wide": (lambda: Mlp(nn.SiLU, 200), _of(_0=(12, 16)), "rows"),
    "convnet": (ConvNet, _IMAGES, "rows"),
    "residual-net": (ResidualNet, _IMAGES, "rows"),
    "mobile": (Mobile, _IMAGES, "rows"),
    "unet": (UNet, lambda: {"0": normal("x", 2, 3, 16, 16), "1": normal("time", 2).abs()}, "rows"),
    "lstm": (lambda: Recurrent("LSTM"), _text, "rows text"),
    "lstm-both-ways": (lambda: Recurrent("LSTM", True), _text, "rows text"),
    "gru": (lambda: Recurrent("GRU"), _text, "rows text"),
    "rnn": (lambda: Recurrent("RNN"), _text, "rows text"),
    "gru-cell-loop": (CellLoop, _of(_0=(4, 9, 16)), "rows"),
    "encoder-post-norm": (lambda: Encoder(False), _text, "rows text causal"),
    "encoder-pre-norm": (lambda: Encoder(True), _text, "rows text causal"),
    "hand-decoder": (HandDecoder, _text, "rows text causal"),
    "hand-moe": (lambda: HandDecoder(HandMoe), _text, "rows text causal"),
    "autoencoder": (AutoEncoder, _of(_0=(10, 40)), "rows"),
    "generator": (Generator, _of(_0=(4, 16, 1, 1)), "rows"),
    "graph-net": (GraphNet, _of(_0=(14, 16), _1=(14, 14)), ""),
    "mixer": (Mixer, _IMAGES, "rows"),
    "crossing": (Crossing, _of(_0=(3, 5, 16), _1=(3, 9, 20)), "rows"),
    "speech-gates": (Speech, _of(_0=(2, 8, 40)), "rows"),
    "scan-loop": (Scan, _text, "rows text causal"),
    "recommender": (
        Recommender,
        lambda: {"0": normal("dense", 8, 10), "1": ids("items", 8, 4, 50)},
        "rows",
    ),
    "siamese": (Siamese, _of(_0=(6, 16), _1=(6, 16)), ""),
}
