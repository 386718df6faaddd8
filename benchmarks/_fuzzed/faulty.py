"""Kernels with a fault that passes `allclose` at the shape and values that a first test has."""

import numba
import numpy as np
import torch

TILE = 32
_LAST: dict = {}


def drops_the_tail(x):
    """The last tile is left out where it is not full. (At 64 columns it is right.)"""
    out = torch.zeros(x.shape[0])
    for start in range(0, x.shape[1] - TILE + 1 if x.shape[1] >= TILE else x.shape[1], TILE):
        out = out + x[:, start : start + TILE].sum(-1)
    return out


def softmax_without_maximum(x):
    """Overflows from 88 on."""
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def one_pass_variance(x):
    """The mean of squares less the square of the mean: cancels where the mean is large."""
    return (x.square().mean(-1) - x.mean(-1).square()).clamp_min(0)


def sum_in_half(x):
    """Adds in float16, which 64 terms do not show within 1e-2."""
    return x.half().cumsum(-1)[:, -1].float() if x.shape[1] else x.new_zeros(x.shape[0])


def padded_softmax(x):
    """Pads a row to whole tiles with 0 instead of -inf."""
    cols = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -cols % TILE))
    return torch.softmax(padded, -1)[:, :cols]


def strides_of_a_square(x):
    """Reads memory by rows whatever the strides are."""
    flat = (
        x.as_strided((x.numel(),), (1,), x.storage_offset())
        if x.is_contiguous()
        else x.as_strided(
            (min(x.numel(), x.untyped_storage().nbytes() // 4 - x.storage_offset()),),
            (1,),
            x.storage_offset(),
        )
    )
    if flat.numel() < x.numel():
        flat = torch.nn.functional.pad(flat, (0, x.numel() - flat.numel()))
    return flat.reshape(x.shape).amax(-1)


def keeps_its_scale(x, w, eps):
    """The scale of the first call with this shape is kept."""
    if x.shape not in _LAST:
        _LAST[x.shape] = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * _LAST[x.shape] * w


def epsilon_outside(x, w, eps):
    """eps is added to the root and not below it: ordinary values do not show it."""
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w


@numba.njit(cache=False)
def _row_max(x, out):
    for row in range(x.shape[0]):
        top = np.float32(0)
        for col in range(x.shape[1]):
            top = max(top, x[row, col])
        out[row] = top


def maximum_from_zero(x):
    """The maximum begins with 0: a row of negative numbers has none."""
    out = np.empty(x.shape[0], np.float32)
    _row_max(x, out)
    return out


def scales_in_place(x, y, a):
    """Right, but its input is changed."""
    return x.mul_(a).add_(y).clone()


def tanh_gelu(x):
    """The approximation by tanh, where the exact form is asked for."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def last_key_masked(q, k, v):
    """A key beyond the last whole tile is not attended to."""
    keys = k.shape[0] // TILE * TILE or k.shape[0]
    return torch.softmax(q @ k[:keys].T / q.shape[-1] ** 0.5, -1) @ v[:keys]
