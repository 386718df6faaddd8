"""Kernels that test_fuzz.py tries, sound and faulty."""

import numba
import numpy as np
import torch

TILE = 32
_KEPT: dict = {}


def total(x):
    return x.sum(-1)


def tiled_total(x):
    out = x.new_zeros(x.shape[0])
    for start in range(0, x.shape[1], TILE):
        out = out + x[:, start : start + TILE].sum(-1)
    return out


def total_without_tail(x):
    out = x.new_zeros(x.shape[0])
    for start in range(0, x.shape[1] - TILE + 1, TILE):
        out = out + x[:, start : start + TILE].sum(-1)
    return out + x[:, :TILE].sum(-1) * (x.shape[1] < TILE)


def softmax(x):
    return torch.softmax(x, -1)


def bare_softmax(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def scaled(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def scaled_once(x, w, eps):
    if x.shape not in _KEPT:
        _KEPT[x.shape] = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * _KEPT[x.shape] * w


def scaled_in_place(x, w, eps):
    x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
    return x.clone()


def total_of_memory(x):
    flat = (
        x.as_strided((x.numel(),), (1,), x.storage_offset())
        if x.is_contiguous()
        else x.t().reshape(-1)
    )
    return flat.reshape(x.shape).sum(-1)


def picky(x):
    if x.shape[-1] % 8:
        raise ValueError("the number of columns is a multiple of 8")
    return x.sum(-1)


def crashing(x):
    return x.sum(-1) / [1][min(x.shape[0], 1) ^ 1]


@numba.njit
def _maximum(x, out, start):
    for row in range(x.shape[0]):
        top = start
        for col in range(x.shape[1]):
            top = x[row, col] if x[row, col] > top or np.isnan(x[row, col]) else top
            if np.isnan(top):
                break
        out[row] = top


def maximum(x):
    return x.max(-1) if x.shape[-1] else np.full(x.shape[0], -np.inf)


def numba_maximum(x):
    out = np.empty(x.shape[0], x.dtype)
    _maximum(x, out, x.dtype.type(-np.inf))
    return out


def numba_maximum_from_zero(x):
    out = np.empty(x.shape[0], x.dtype)
    _maximum(x, out, x.dtype.type(0))
    return out


def doubled(x):
    return 2 * x


@torch.library.custom_op("whence_tests::doubled", mutates_args=())
def custom_doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


@torch.library.custom_op("whence_tests::doubled_in_half", mutates_args=())
def custom_doubled_in_half(x: torch.Tensor) -> torch.Tensor:
    return (x.half() * 2).to(x.dtype)
