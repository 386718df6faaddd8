"""Nets whose operators are no plain layers: Fourier transforms, complex numbers, packed rows,
sums over edges, bags, shared weights, branches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from _zoo.sides import ids, normal


class SpectralLayer(nn.Module):
    """Mixes channels at each of the lowest frequencies."""

    def __init__(self, width: int = 16, modes: int = 6) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.empty(modes, width, width, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float())[..., : self.modes]
        weight = torch.view_as_complex(self.weight.float())
        mixed = torch.einsum("bim,mio->bom", spectrum, weight)
        return torch.fft.irfft(mixed, n=x.shape[-1]).to(x.dtype)


class Spectral(nn.Module):
    """A Fourier neural operator in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 2, 1)
        self.layers = nn.ModuleList(SpectralLayer() for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = F.gelu(layer(x) + skip(x))
        return self.head(x)


class StateSpace(nn.Module):
    """A diagonal state-space layer whose states are complex, as one long convolution."""

    def __init__(self, width: int = 16, states: int = 4) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(width, states))
        self.angle = nn.Parameter(torch.empty(width, states))
        self.read = nn.Parameter(torch.empty(width, states, 2))

    def poles(self) -> tuple[Tensor, Tensor]:
        """What a step multiplies each state by, and how states are read."""
        size = torch.exp(-0.3 * torch.exp(self.log_rate.float()))
        return torch.polar(size, 2 * self.angle.float()), torch.view_as_complex(self.read.float())

    def kernel(self, length: int) -> Tensor:
        """What a step answers to 1 after each number of steps: [width, length]."""
        pole, read = self.poles()
        powers = pole[..., None] ** torch.arange(length)
        return 2 * (read[..., None] * powers).sum(1).real

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        spectrum = torch.fft.rfft(x.float(), n=2 * n) * torch.fft.rfft(self.kernel(n), n=2 * n)
        return torch.fft.irfft(spectrum, n=2 * n)[..., :n].to(x.dtype)


class StateSpaceNet(nn.Module):
    """Two such layers between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.layers = nn.ModuleList(StateSpace() for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, mix in zip(self.layers, self.mixes, strict=True):
            out = layer(x.transpose(1, 2)).transpose(1, 2)
            x = x + F.glu(mix(F.gelu(out)))
        return self.head(self.norm(x))


class Packed(nn.Module):
    """Rows of several lengths, packed for a recurrent layer, and the mean over each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(24, 7)
        self.rnn = nn.LSTM(16, 24, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], True, total_length=tokens.shape[1])
        return self.head(out.sum(1) / lengths[:, None])


class Messages(nn.Module):
    """Sends messages along edges, and takes the mean over each graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.update = nn.Linear(16, 16), nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def total(self, values: Tensor, index: Tensor, count: int) -> Tensor:
        """Sums of the rows that have the same index."""
        return values.new_zeros(count, values.shape[1]).index_add_(0, index, values)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        for _ in range(2):
            sent = F.relu(self.send(x[source]))
            x = F.relu(self.update(torch.cat([x, self.total(sent, target, len(x)) / degree], 1)))
        count = torch.bincount(graph, minlength=3)[:, None]
        return self.head(self.total(x, graph, 3) / count)


class Bags(nn.Module):
    """Bags of embeddings, one of means and one of weighted sums."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.EmbeddingBag(60, 16, mode="mean")
        self.sums = nn.EmbeddingBag(60, 16, mode="sum")
        self.top = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, items: Tensor, weights: Tensor) -> Tensor:
        parts = [self.means(items), self.sums(items, per_sample_weights=weights)]
        return self.top(torch.cat(parts, 1))


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 8)
        self.back = nn.Parameter(torch.empty(24))

    def forward(self, x: Tensor) -> Tensor:
        code = self.second(torch.tanh(self.first(x)))
        hidden = torch.tanh(F.linear(code, self.second.weight.t()))
        return F.linear(hidden, self.first.weight.t(), self.back)


class Pyramid(nn.Module):
    """Pools, upsamples in two ways, and resamples along a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.low = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.mix = nn.Conv2d(24, 12, 3, padding=1, groups=12)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(12, 6)
        self.near = nn.Upsample(scale_factor=2, mode="nearest")
        self.smooth = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.mean = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        low = F.silu(self.low(self.pool(x)))
        x = torch.cat([self.near(low), x], 1)
        x = self.smooth(self.mean(F.silu(self.mix(x))))
        turn = torch.tensor([[0.8, 0.3, 0.1], [-0.3, 0.8, 0.0]], dtype=x.dtype)
        grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """A convolution of three by three, one of one by one, and the input itself, summed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, width, 3, padding=1)
        self.narrow = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(x) + self.narrow(x) + x)


class BranchNet(nn.Module):
    """Blocks of branches, as they are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Branches(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Dropping(nn.Module):
    """A residual network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = 0.8
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def drop(self, x: Tensor) -> Tensor:
        """Dropout while training."""
        return F.dropout(x, 1 - self.keep, self.training)

    def branch(self, x: Tensor) -> Tensor:
        """What is added to the residual stream."""
        return self.drop(self.second(self.drop(F.relu(self.first(self.norm(x))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.branch(x))


def _graphs() -> dict[str, Tensor]:
    edges = torch.stack([ids("sources", 1, 40, 19)[0], ids("targets", 1, 40, 19)[0]]) - 5
    return {"0": normal("nodes", 14, 16), "1": edges, "2": torch.arange(14) // 5}


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "spectral": (Spectral, lambda: {"0": normal("series", 4, 3, 32)}, "rows"),
    "state-space": (StateSpaceNet, lambda: {"0": ids("tokens", 3, 12, 97)}, "rows text causal"),
    "packed": (
        Packed,
        lambda: {"0": ids("tokens", 5, 12, 97), "1": torch.tensor([12, 9, 7, 4, 11])},
        "rows",
    ),
    "messages": (Messages, _graphs, ""),
    "bags": (
        Bags,
        lambda: {"0": ids("items", 8, 5, 60), "1": normal("weights", 8, 5).abs()},
        "rows",
    ),
    "tied-autoencoder": (Tied, lambda: {"0": normal("x", 10, 24)}, "rows"),
    "pyramid": (Pyramid, lambda: {"0": normal("x", 3, 3, 16, 16)}, "rows"),
    "branches": (BranchNet, lambda: {"0": normal("x", 3, 3, 12, 12)}, "rows"),
    "dropping": (Dropping, lambda: {"0": normal("x", 12, 16)}, "rows"),
}
