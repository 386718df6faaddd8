"""Networks of torch alone that read sequences: recurrent ones, convolutions along time, spectra,
encoders and decoders of torch's own layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Lstm(nn.Module):
    """Two layers of LSTM, whose states are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(40, 16), nn.LSTM(16, 20, 2, batch_first=True)
        self.head = nn.Linear(20, 5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (hidden, cell) = self.rnn(self.embed(ids))
        return self.head(y), hidden, cell


class BiLstm(nn.Module):
    """A bidirectional LSTM that tags tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.rnn = nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.rnn(self.embed(ids))
        return self.head(self.norm(y))


class StreamingLstm(nn.Module):
    """An LSTM whose states are given and returned: they are carried from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 16, 3, padding=1), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(self.conv(x)).transpose(1, 2)
        y, (hidden, cell) = self.rnn(x, (hidden, cell))
        return torch.sigmoid(self.head(y)), hidden, cell


class Gru(nn.Module):
    """A GRU behind a convolution, with attention over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 16, 3, padding=1), nn.GRU(16, 24, batch_first=True)
        self.score, self.head = nn.Linear(24, 1), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(F.elu(self.conv(x)).transpose(1, 2))
        weight = self.score(torch.tanh(y)).softmax(1)
        return self.head((weight * y).sum(1))


class Causal(nn.Module):
    """A dilated convolution that sees no future, with a gate."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.out, self.norm = nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.conv(F.pad(x, (self.reach, 0))), 1)
        return x + self.norm(self.out(y))


class Tcn(nn.Module):
    """A temporal convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 16, 1)
        self.blocks = nn.Sequential(*(Causal(16, 2**i) for i in range(3)))
        self.head = nn.Conv1d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.blocks(torch.tanh(self.stem(x)))))


class Spectral(nn.Module):
    """Power spectra of overlapping frames, mel-like bands, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("bands", torch.rand(33, 12))
        self.conv = nn.Conv1d(12, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 64, 32, window=self.window, center=False, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(-1)
        bands = torch.log(power.transpose(1, 2) @ self.bands + 1e-4).transpose(1, 2)
        return self.head(F.gelu(self.conv(bands)).amax(-1))


class Translator(nn.Module):
    """An encoder and a decoder of torch's own transformer layers, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.words = nn.Embedding(30, 24), nn.Embedding(30, 24)
        self.position = nn.Parameter(0.3 * torch.randn(12, 24))
        self.encoder = nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(24, 3, 48, 0.0, batch_first=True)
        self.head = nn.Linear(24, 30)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        memory = self.encoder(self.source(source) + self.position[: source.shape[1]])
        x = self.words(words) + self.position[: words.shape[1]]
        return self.head(self.decoder(x, memory, tgt_mask=self.mask))


class Rms(nn.Module):
    """A root-mean-square norm written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Gated(nn.Module):
    """Attention with a sliding window written out, a gated perceptron, norms of two makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = Rms(24), nn.RMSNorm(24), Rms(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.gate, self.up, self.down = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)
        self.head = nn.Linear(24, 4)
        near = torch.ones(10, 10).tril().triu(-3).bool()
        self.register_buffer("mask", torch.zeros(10, 10).masked_fill(~near, float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, 3, 8).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / 8**0.5 + self.mask).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return F.log_softmax(self.head(self.norm3(x)), -1)
