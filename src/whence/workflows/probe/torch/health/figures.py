"""What one operator loses: its result is compared with the same operator in float64, and with
results of inputs that are rounded differently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from whence.workflows.probe.torch.health.operands import ATTENTION, DRAWS, Operands

_NEAR_END = 0.25
"""Share of the largest finite number from which a magnitude counts as at the end of the range: 2
bits.
"""
_ELEMENTS = 1 << 16
"""Number of elements from which a median is taken."""
_QUERIES = 64
"""Number of queries of an attention that are examined."""
_MASKED = 9000.0
"""How far below the largest score of its row a masked-out score lies.

Masks add -10000, -65504 or the smallest numbers of the dtypes. In float64 a probability is 0 from
746 below on.
"""
_JUMPS = ("floor", "ceil", "round", "trunc", "frac", "sign", "remainder", "fmod", "histc")
"""Operators with jumps: near a jump, rounding an input differently says nothing."""
_BOUNDED = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
_SOFTMAX = ("_softmax", "_safe_softmax", "softmax")


class Figures(NamedTuple):
    """The loss of one operator.

    born: number of elements that are NaN or Inf although the inputs are finite. at_end: number of
    elements at the end of the range although no input is. underflow: number of elements too small
    for the dtype. amplification: as in `HealthFinding`. saturated: out of the rows or elements that
    can saturate. largest: magnitude of the finite results. looked_at: whether it could be run in
    float64.
    """

    dtype: str
    unit: float
    elements: int
    largest: float
    born: int = 0
    at_end: int = 0
    underflow: int = 0
    amplification: float = 0.0
    saturated: int = 0
    saturable: int = 0
    looked_at: bool = True


def figures(read: Operands, results: list[Any]) -> Figures:
    """Measure what one operator loses. results: its floating-point outputs."""
    result = results[0]
    info = torch.finfo(result.dtype)
    magnitudes = result.abs()
    finite = magnitudes.isfinite()
    whole = bool(finite.all())
    largest = float((magnitudes if whole else magnitudes.masked_fill(~finite, 0)).max())
    units = [torch.finfo(t.dtype).eps / 2 for t in (*read.tensors, result)]
    name = str(result.dtype).removeprefix("torch.")
    out = Figures(name, max(units), result.numel(), largest)
    if not whole:
        out = out._replace(born=int((~finite).sum()) if inputs_within(read, 1.0) else 0)
    elif largest >= _NEAR_END * info.max and inputs_within(read, _NEAR_END):
        out = out._replace(at_end=int((magnitudes >= _NEAR_END * info.max).sum()))
    try:
        exact = read.in_float64()[0]
        out = out._replace(
            underflow=_underflow(magnitudes, exact, info),
            amplification=_amplification(read, exact),
        )
    except Exception:  # noqa: BLE001 - an operator that has no float64
        return out._replace(looked_at=False)
    saturated, saturable = _saturated(read, result)
    return out._replace(saturated=saturated, saturable=saturable)


def inputs_within(read: Operands, part: float) -> bool:
    """Whether all inputs are finite and below this share of the largest number of their dtype."""
    limits = [torch.finfo(t.dtype).max for t in read.tensors]
    if any(n >= part * min(limits) and (part < 1 or n > min(limits)) for n in read.numbers()):
        return False
    for tensor, limit in zip(read.tensors, limits):
        if not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.detach())
        most = max(-float(low), float(high))
        if not most < part * limit and not (part == 1.0 and most == limit):
            return False
    return True


def _underflow(magnitudes: torch.Tensor, exact: torch.Tensor, info: Any) -> int:
    """Number of elements below the smallest normal number that are not 0 in float64."""
    if exact.shape != magnitudes.shape:
        return 0
    small = magnitudes < info.smallest_normal
    return int((small & (exact != 0)).sum()) if bool(small.any()) else 0


def _amplification(read: Operands, exact: torch.Tensor) -> float:
    """The larger of two amplifications: by root mean squares over the tensor, and of the median
    element.
    """
    name = read.func._schema.name.partition("::")[2]
    if name.rstrip("_").startswith(_JUMPS) or str(read.func).endswith("Tensor_mode"):
        return 0.0
    unit = max(torch.finfo(t.dtype).eps / 2 for t in read.tensors)
    roundings = unit / 3**0.5  # root mean square of a number that is uniform in -u..u
    finite = exact.isfinite()
    size = float(exact[finite].square().mean().sqrt())
    if not size > 0:
        return 0.0
    exact, most = exact[finite], 0.0
    for draw in range(1, DRAWS + 1):
        moved = (read.in_float64(draw)[0][finite] - exact).abs()
        whole = float(moved.square().mean().sqrt()) / size
        step = -(-exact.numel() // _ELEMENTS)
        own = (moved[::step] / exact[::step].abs()).nan_to_num(0.0, 0.0, 0.0)
        most = max(most, whole / roundings, float(own.median()) / roundings)
    return most if most < float("inf") else 0.0


# ---- saturation


def _saturated(read: Operands, result: torch.Tensor) -> tuple[int, int]:
    """(number saturated, number examined) of softmax rows or elements of a bounded function."""
    name = read.func._schema.name.partition("::")[2].rstrip("_")
    if name in _SOFTMAX:
        named = read.named()
        return _rows_at_one(named["self"], result, int(named["dim"]))
    if name.startswith(ATTENTION):
        found = _scores(read.named())
        if found is None:
            return 0, 0
        return _rows_at_one(found, found.softmax(-1).to(result.dtype), -1)
    if name in _BOUNDED:
        low, high = _BOUNDED[name]
        given = read.tensors[0].isfinite()  # of an infinite one the bound is exact
        at_bound = ((result <= low) | (result >= high)) & given
        return int(at_bound.sum()), int(given.sum())
    return 0, 0


def _rows_at_one(scores: torch.Tensor, result: torch.Tensor, dim: int) -> tuple[int, int]:
    """Number of rows whose largest probability is 1 in the dtype.

    Only rows with two or more scores that no mask removes count.
    """
    top = scores.amax(dim, keepdim=True)
    counted = (scores > top - _MASKED).sum(dim) >= 2  # a NaN counts as masked
    return int(((result.amax(dim) == 1) & counted).sum()), int(counted.sum())


def _scores(named: dict[str, Any]) -> torch.Tensor | None:
    """The scores of a fused attention in float64, for some queries; None for other forms of
    attention.
    """
    query, key = named.get("query"), named.get("key")
    if query is None or key is None or query.dim() != 4 or key.dim() != 4:
        return None
    length, seen = query.shape[-2], key.shape[-2]
    chosen = torch.arange(0, length, max(1, length // _QUERIES), device=query.device)
    query, key = query[..., chosen, :].double(), key.double()
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = named.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if named.get("is_causal"):
        allowed = torch.arange(seen, device=query.device) <= chosen[:, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], length, mask.shape[-1])[..., chosen, :]
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, -torch.inf)
        scores = scores + mask
    return scores
