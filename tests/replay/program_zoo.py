"""A small zoo of leaf modules: what each one shows is in its name."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class LlamaNorm(nn.Module):
    """As in transformers: float32 inside by `.to(torch.float32)`, back by `.to(input_dtype)`."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(dim) + 0.5), eps

    def forward(self, x):
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(input_dtype)


class FloatNorm(nn.Module):
    """`.float()` up, `.type_as(x)` back."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Rotary(nn.Module):
    """Angles in float32 from a plain tensor attribute; cos and sin in the dtype of x."""

    def __init__(self, dim):
        super().__init__()
        self.inv = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def forward(self, x, positions):
        angles = positions[:, None].float() * self.inv.float()
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Softmax32(nn.Module):
    def forward(self, x):
        return F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


class WeightDtype(nn.Module):
    """`.to(self.weight.dtype)`: a cast that stays at the working dtype in every run."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x):
        return F.linear(torch.sin(x).to(self.weight.dtype), self.weight)


class Masked(nn.Module):
    """A boolean mask cast to the dtype of x."""

    def forward(self, x, mask):
        return torch.tanh(x * mask.to(x.dtype)) * 0.3 + x


class Attention(nn.Module):
    def __init__(self, causal=False, gqa=False, dropout=0.0):
        super().__init__()
        self.causal, self.gqa, self.dropout = causal, gqa, dropout

    def forward(self, q, k, v, mask=None):
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.gqa, dropout_p=p
        )


class Item(nn.Module):
    def forward(self, x):
        return x / x.abs().max().item()


class Branch(nn.Module):
    """A branch on data: the same branch is taken on any positive sum."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3


class FromData(nn.Module):
    def forward(self, x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor(0.5)


class FromDataAfterItem(nn.Module):
    def forward(self, x):
        return x * torch.tensor([x.max().item(), 1.0, 1.0, 1.0])


class Listed(nn.Module):
    """Numbers leave through `tolist`, which no operator shows."""

    def forward(self, x):
        return x * torch.tensor(x[0].tolist())


class ListedPlaces(nn.Module):
    """Python code makes whole numbers of a list of whole numbers, and a tensor of these."""

    def forward(self, x, ids):
        return x * torch.tensor([2 * k for k in ids.tolist()])


class Foreign(nn.Module):
    """Reads a tensor that belongs to nobody the region knows."""

    def __init__(self):
        super().__init__()
        ones = torch.ones(4)
        self.hide = lambda: ones

    def forward(self, x):
        return x + self.hide()


class ThroughNumpy(nn.Module):
    """Changes a tensor behind torch's back."""

    def forward(self, x):
        y = torch.empty_like(x)
        memoryview_of(y)[:] = 3.0
        return x + y


def memoryview_of(tensor):
    """The memory of a tensor without any watched call."""
    import ctypes

    import numpy as np

    address = torch._C.TensorBase.untyped_storage(tensor)._cdata
    del address
    with torch._C.DisableTorchFunction():
        pointer = tensor.data_ptr()
    return np.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(pointer))


class OldView(nn.Module):
    """Reads a view taken before the in-place write through another alias."""

    def forward(self, x):
        y = x * 1.5
        view = y[:, :2]
        y.relu_()
        return view * 2


class InPlaceOnInput(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x[:, 1:] * 2


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x).conj() * 1j, n=x.shape[-1])


class Cache(nn.Module):
    """Functional cache: longer at each step."""

    def forward(self, cache, new):
        return torch.cat([cache, new], 2)


class DecodeAttention(nn.Module):
    """Eager attention over a growing cache: its sizes follow the inputs."""

    def forward(self, q, k, v):
        b, h, _, d = q.shape
        length = k.shape[2]
        k = k[:, :, None].expand(b, k.shape[1], h // k.shape[1], length, d).reshape(b, h, length, d)
        v = v[:, :, None].expand(b, v.shape[1], h // v.shape[1], length, d).reshape(b, h, length, d)
        s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d)
        return torch.matmul(torch.softmax(s, -1), v)


class MeanBySize(nn.Module):
    """A Python number that came from a shape."""

    def forward(self, x):
        return x.sum(1) / x.shape[1]


class Counts(nn.Module):
    """A size that depends on data, and a Python number made of it."""

    def forward(self, x):
        return x.sum() / torch.nonzero(x > 0).shape[0]


class Empty(nn.Module):
    """Fills what `empty` gave."""

    def forward(self, x):
        y = torch.empty(x.shape[0], 2)
        y[:, :1] = x[:, :1]
        y[:, 1:] = x[:, 1:2]
        return y


class Prints(nn.Module):
    def forward(self, x):
        assert str(x) and f"{x}"
        return x + 1


class SelfMetadata(nn.Module):
    def forward(self, x):
        y = (x * 2).clone()
        y.t_().unsqueeze_(0)
        return y + 1


def g(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(seed=0, b=2, h=4, t=6, d=8):
    return g(b, h, t, d, seed=seed)


# name: (module, inputs). Every one of these must be recorded, replay bitwise and run in float64 and
# bfloat16.
class Bits(nn.Module):
    """Masks joined by Python's operators: under inference_mode these arrive as `__and__`."""

    def forward(self, x, a, b):
        return x.masked_fill(~((a & b) | (a ^ b)), 0)


USABLE = {
    "bits": lambda: (Bits(), (g(3, 4), g(3, 4) > 0, g(3, 4) > 0)),
    "linear": lambda: (nn.Linear(8, 5), (g(2, 3, 8),)),
    "linear without bias": lambda: (nn.Linear(8, 5, bias=False), (g(4, 8),)),
    "conv2d": lambda: (nn.Conv2d(3, 6, 3, 2, 1), (g(2, 3, 9, 9),)),
    "conv2d channels_last": lambda: (
        nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last),
        (g(2, 3, 9, 9).to(memory_format=torch.channels_last),),
    ),
    "conv1d groups": lambda: (nn.Conv1d(4, 8, 3, groups=2, padding="same"), (g(2, 4, 10),)),
    "conv transpose": lambda: (nn.ConvTranspose2d(4, 3, 3, 2), (g(2, 4, 5, 5),)),
    "layer norm": lambda: (nn.LayerNorm(8), (g(2, 3, 8),)),
    "rms norm": lambda: (nn.RMSNorm(8), (g(2, 3, 8),)),
    "group norm": lambda: (nn.GroupNorm(2, 4), (g(2, 4, 5),)),
    "instance norm": lambda: (nn.InstanceNorm1d(4), (g(2, 4, 5),)),
    "llama norm": lambda: (LlamaNorm(8), (g(2, 3, 8),)),
    "float norm": lambda: (FloatNorm(8), (g(2, 3, 8),)),
    "embedding": lambda: (nn.Embedding(10, 4), (torch.tensor([[1, 2], [3, 9]]),)),
    "embedding bag": lambda: (nn.EmbeddingBag(10, 4), (torch.tensor([[1, 2], [3, 9]]),)),
    "batch norm eval": lambda: (nn.BatchNorm2d(3).eval(), (g(4, 3, 5, 5),)),
    "batch norm train": lambda: (nn.BatchNorm2d(3), (g(4, 3, 5, 5),)),
    "batch norm cumulative": lambda: (nn.BatchNorm1d(3, momentum=0.2), (g(8, 3),)),
    "gelu": lambda: (nn.GELU("tanh"), (g(5, 7),)),
    "silu in place": lambda: (nn.SiLU(inplace=True), (g(5, 7),)),
    "relu in place": lambda: (nn.ReLU(inplace=True), (g(5, 7),)),
    "softmax": lambda: (nn.Softmax(-1), (g(5, 7),)),
    "softmax in float32": lambda: (Softmax32(), (g(5, 7),)),
    "max pool": lambda: (nn.MaxPool2d(3, 2, 1), (g(2, 3, 9, 9),)),
    "adaptive pool": lambda: (nn.AdaptiveAvgPool2d(3), (g(2, 3, 9, 9),)),
    "upsample": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), (g(2, 3, 4, 4),)),
    "pixel shuffle": lambda: (nn.PixelShuffle(2), (g(2, 8, 4, 4),)),
    "pad": lambda: (nn.ReflectionPad2d(1), (g(2, 3, 4, 4),)),
    "flatten": lambda: (nn.Flatten(), (g(2, 3, 4),)),
    "unfold": lambda: (nn.Unfold(2), (g(2, 3, 4, 4),)),
    "attention module": lambda: (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        (g(2, 5, 8), g(2, 5, 8), g(2, 5, 8)),
    ),
    "lstm": lambda: (
        nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
        (g(2, 5, 4),),
    ),
    "gru": lambda: (nn.GRU(4, 6), (g(5, 2, 4),)),
    "rnn": lambda: (nn.RNN(4, 6), (g(5, 2, 4),)),
    "lstm cell": lambda: (nn.LSTMCell(4, 6), (g(3, 4), (g(3, 6), g(3, 6, seed=1)))),
    "sdpa": lambda: (Attention(), (heads(0), heads(1), heads(2))),
    "sdpa causal": lambda: (Attention(causal=True), (heads(0), heads(1), heads(2))),
    "sdpa mask": lambda: (
        Attention(),
        (heads(0), heads(1), heads(2), g(1, 1, 6, 6).ge(-0.5) | torch.eye(6, dtype=torch.bool)),
    ),
    "sdpa additive mask": lambda: (Attention(), (heads(0), heads(1), heads(2), g(1, 1, 6, 6))),
    "sdpa grouped": lambda: (Attention(gqa=True), (heads(0), heads(1, h=2), heads(2, h=2))),
    "sdpa dropout in eval": lambda: (Attention(dropout=0.5).eval(), (heads(0), heads(1), heads(2))),
    "rotary": lambda: (Rotary(8), (g(2, 6, 8), torch.arange(6))),
    "weight dtype": lambda: (WeightDtype(8), (g(2, 8),)),
    "masked": lambda: (Masked(), (g(3, 8), g(3, 8) > 0)),
    "constant from data": lambda: (FromData(), (g(3, 4),)),
    "dropout in eval": lambda: (nn.Dropout(0.5).eval(), (g(3, 4),)),
    "dropout of nothing": lambda: (nn.Dropout(0.0), (g(3, 4),)),
    "old view": lambda: (OldView(), (g(3, 4),)),
    "in place on the input": lambda: (InPlaceOnInput(), (g(3, 4),)),
    "spectrum": lambda: (Spectrum(), (g(3, 8),)),
    "cache": lambda: (Cache(), (heads(0), heads(1, t=1))),
    "decode attention": lambda: (
        DecodeAttention(),
        (heads(0, t=1), heads(1, h=2, t=7), heads(2, h=2, t=7)),
    ),
    "mean by size": lambda: (MeanBySize(), (g(3, 7),)),
    "empty, filled": lambda: (Empty(), (g(3, 4),)),
    "prints": lambda: (Prints(), (g(3, 4),)),
    "metadata in place": lambda: (SelfMetadata(), (g(3, 4),)),
    "branch": lambda: (Branch(), (g(3, 4).abs(),)),
    "list": lambda: (ListedPlaces(), (g(3, 4), torch.tensor([1, 2, 2, 5]))),
    "identity": lambda: (nn.Identity(), (g(3, 4),)),
    "prelu": lambda: (nn.PReLU(), (g(3, 4),)),
    "bilinear": lambda: (nn.Bilinear(3, 4, 5), (g(2, 3), g(2, 4))),
    "cross entropy": lambda: (nn.CrossEntropyLoss(), (g(6, 4), torch.tensor([0, 1, 2, 3, 1, 2]))),
}

# name: (module, inputs, part of the reason).
REFUSED = {
    "dropout in training": lambda: (nn.Dropout(0.5), (g(3, 4),), "draws random numbers"),
    "attention dropout in training": lambda: (
        Attention(dropout=0.5),
        (heads(0), heads(1), heads(2)),
        "draws random numbers",
    ),
    "foreign tensor": lambda: (
        Foreign(),
        (g(3, 4),),
        "neither an input, a parameter nor made inside (torch.float32 (4,))",
    ),
    "tensor from data after item": lambda: (
        FromDataAfterItem(),
        (g(3, 4),),
        "after reading a number that rounding moves",
    ),
    "list of floats": lambda: (Listed(), (g(3, 4),), "after reading a number that rounding moves"),
    "written behind torch's back": lambda: (
        ThroughNumpy(),
        (g(3, 4),),
        "a tensor changed without an operator that wrote it",
    ),
}
