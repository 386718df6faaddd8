"""Kernels that are right, written as kernels are: in tiles, in one pass, wide inside."""

import numba
import numpy as np
import torch

TILE = 32


def tiled_rms_norm(x, w, eps):
    rows, cols = x.shape
    out, wide = torch.empty(x.shape, dtype=x.dtype), x.float()
    for row in range(rows):
        total = torch.zeros(())
        for start in range(0, cols, TILE):
            total = total + wide[row, start : start + TILE].square().sum()
        out[row] = (wide[row] * torch.rsqrt(total / cols + eps)).to(x.dtype) * w
    return out


def two_pass_layer_norm(x, w, eps):
    mean = x.float().mean(-1, keepdim=True)
    centred = x.float() - mean
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * w.float()).to(
        x.dtype
    )


def online_softmax(x):
    top = torch.full(x.shape[:1], float("-inf"))
    total = torch.zeros(x.shape[:1])
    for start in range(0, x.shape[1], TILE):
        tile = x[:, start : start + TILE]
        higher = torch.maximum(top, tile.amax(-1))
        scale = torch.where(higher == top, torch.ones(()), torch.exp(top - higher))
        total = total * scale + torch.exp(tile - higher[:, None]).sum(-1)
        top = higher
    return torch.exp(x - top[:, None]) / total[:, None]


@numba.njit(cache=False)
def _log_sum_exp(x, out):
    for row in range(x.shape[0]):
        top = -np.inf
        for col in range(x.shape[1]):
            top = x[row, col] if x[row, col] > top or np.isnan(x[row, col]) else top
            if np.isnan(top):
                break
        if np.isinf(top) or np.isnan(top):
            out[row] = top
            for col in range(x.shape[1]):
                if np.isnan(x[row, col]):
                    out[row] = np.nan
            continue
        total = 0.0
        for col in range(x.shape[1]):
            total += np.exp(x[row, col] - top)
        out[row] = top + np.log(total)


def numba_log_sum_exp(x):
    out = np.empty(x.shape[0], x.dtype)
    _log_sum_exp(x, out)
    return out


def tiled_product(a, b):
    out = torch.zeros(a.shape[0], b.shape[1])
    for row in range(0, a.shape[0], TILE):
        for col in range(0, b.shape[1], TILE):
            total = torch.zeros(a[row : row + TILE].shape[0], b[:, col : col + TILE].shape[1])
            for k in range(0, a.shape[1], TILE):
                total = (
                    total + a[row : row + TILE, k : k + TILE] @ b[k : k + TILE, col : col + TILE]
                )
            out[row : row + TILE, col : col + TILE] = total
    return out


@numba.njit(cache=False)
def _row_sum(x, out):
    for row in range(x.shape[0]):
        total = np.float32(0)
        for col in range(x.shape[1]):
            total += x[row, col]
        out[row] = total


def numba_row_sum(x):
    out = np.empty(x.shape[0], np.float32)
    _row_sum(x, out)
    return out


def halving_row_sum(x):
    parts = x.clone()
    if parts.shape[1] == 0:
        return parts.new_zeros(parts.shape[0])
    while parts.shape[1] > 1:
        half = (parts.shape[1] + 1) // 2
        folded = parts[:, :half].clone()
        folded[:, : parts.shape[1] - half] += parts[:, half:]
        parts = folded
    return parts[:, 0].clone()


def fused_gelu(x):
    return torch.nn.functional.gelu(x)


def fused_swiglu(x):
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def row_gather(table, index):
    return torch.index_select(table, 0, index)


def blocked_prefix_sum(x):
    out, carry = torch.empty_like(x), torch.zeros(x.shape[:1])
    for start in range(0, x.shape[1], TILE):
        tile = x[:, start : start + TILE].cumsum(-1) + carry[:, None]
        out[:, start : start + TILE] = tile
        carry = tile[:, -1]
    return out


def welford_variance(x):
    count, mean, spread = 0, torch.zeros(x.shape[:1]), torch.zeros(x.shape[:1])
    for col in range(x.shape[1]):
        count += 1
        step = x[:, col] - mean
        mean = mean + step / count
        spread = spread + step * (x[:, col] - mean)
    return spread / count if count else torch.full(x.shape[:1], float("nan"))


def flash_attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def half_rotary(x, angle):
    half = x.shape[-1] // 2
    first, second, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
    return torch.cat(
        (
            torch.addcmul(first * cos, second, sin, value=-1),
            torch.addcmul(second * cos, first, sin),
        ),
        -1,
    )


@numba.njit(cache=False)
def _axpy(x, y, a, out):
    for place in range(x.shape[0]):
        out[place] = np.float32(a) * x[place] + y[place]


def numba_axpy(x, y, a):
    out = np.empty(x.shape[0], np.float32)
    _axpy(x, y, a, out)
    return out


def picked_cross_entropy(x, target):
    return torch.nn.functional.cross_entropy(x, target, reduction="none")
