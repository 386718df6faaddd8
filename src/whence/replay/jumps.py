"""Operators whose result jumps (round, floor, sign, a comparison, a cast to integers): records how
near their arguments are to a jump, and replays a run in which chosen elements fall on a prescribed
side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from whence.frameworks.torch_arrays import NAMES

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Place = tuple[int, int]
"""(call, or -1 for the only one; place of an operator in its program)."""

_COMPARISONS = frozenset(("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal"))
_QUOTIENTS = {"floor_divide": "floor", "remainder": "floor", "fmod": "trunc"}
_CASTS = frozenset(("_to_copy", "to", "convert_element_type"))
_FAKE = frozenset((
    "fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine", "fake_quantize_per_channel_affine_cachemask",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class SeenJump:
    """What one run recorded for an operator that jumps, elementwise.

    argument: the value that decides. size: magnitude of the operands it was computed from.
    distance: to the nearest jump. level: the side that was taken. dtype: of the argument. length:
    terms of the longest sum before the operator.
    """

    operator: str
    argument: F64
    size: F64
    distance: F64
    level: F64
    dtype: str
    length: int


@dataclass(frozen=True, slots=True)
class _Jump:
    """An operator about to run, elementwise.

    level: the operator's own side. other: the nearest other side. unit: the change of the result
    for one level, None where the result is the level (true or false).
    """

    operator: str
    argument: Any
    size: Any
    distance: Any
    level: Any
    other: Any
    unit: Any
    dtype: str


@dataclass
class Jumps:
    """Records every operator that jumps in one run, of one program or of several.

    flipped: indices into the flattened argument of elements that fall on the nearest other side.
    levels: the sides that another run took, imposed on this one.
    """

    flipped: Mapping[Place, I64] = field(default_factory=dict)
    levels: Mapping[Place, F64] = field(default_factory=dict)
    seen: dict[Place, SeenJump] = field(default_factory=dict)

    def of(self, call: int = -1) -> CallJumps:
        """Returns the view of one call's program."""
        return CallJumps(self, call)


@dataclass(frozen=True, slots=True)
class CallJumps:
    """The jumps of the program of one call."""

    jumps: Jumps
    call: int

    def before(self, base: str, named: Mapping[str, Any]) -> _Jump | None:
        """Returns how an operator that is about to run jumps; None for one that does not."""
        return _jump(base, named)

    def made(self, place: int, jump: _Jump, out: Any, length: int) -> Any:
        """Returns the results of an operator with the prescribed sides."""
        key = self.call, place
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        if results[0].shape != jump.argument.shape:
            return out
        level = jump.level
        if (levels := self.jumps.levels.get(key)) is not None and levels.shape == level.shape:
            level = torch.from_numpy(levels)
        elif (flipped := self.jumps.flipped.get(key)) is not None:
            level = level.flatten().clone()
            index = torch.from_numpy(flipped)
            level[index] = jump.other.flatten()[index]
            level = level.reshape(jump.level.shape)
        self.jumps.seen[key] = SeenJump(
            jump.operator,
            jump.argument.numpy(),
            jump.size.numpy(),
            jump.distance.numpy(),
            level.numpy(),
            jump.dtype,
            length,
        )
        if torch.equal(level, jump.level):
            return out
        if jump.unit is None:
            results[0] = level.to(results[0].dtype)
        else:
            results[0] = results[0] + ((level - jump.level) * jump.unit).to(results[0].dtype)
        return tuple(results) if isinstance(out, (tuple, list)) else results[0]


def jumps(base: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator may jump."""
    base = base.removesuffix("_")
    return (
        base in _UNARY
        or base in _COMPARISONS
        or base in _QUOTIENTS
        or base in _FAKE
        or (base == "div" and kwargs.get("rounding_mode") is not None)
        or (base in _CASTS and "int" in str(kwargs.get("dtype")))
    )


def _jump(base: str, named: Mapping[str, Any]) -> _Jump | None:
    base = base if base in _CASTS else base.removesuffix("_")
    x = named.get("self", named.get("a"))
    if not isinstance(x, torch.Tensor) or x.is_complex() or not x.numel():
        return None
    rounding = _QUOTIENTS.get(base) or (named.get("rounding_mode") if base == "div" else None)
    is_pair = base in _COMPARISONS or rounding is not None
    other = named.get("other") if is_pair else None
    is_floating = x.is_floating_point() or (
        isinstance(other, torch.Tensor) and other.is_floating_point()
    )
    if not is_floating or (is_pair and other is None) or named.get("decimals"):
        return None
    a = x.detach().to(torch.float64, copy=True)
    b = other.detach().to(torch.float64) if isinstance(other, torch.Tensor) else other
    dtype = NAMES[(x if x.is_floating_point() or other is None else other).dtype]
    if base in _COMPARISONS:
        return _compared(base, a, torch.as_tensor(b, dtype=torch.float64), dtype)
    if rounding is not None:
        quotient = a / b
        level, step, distance = _STEPS[rounding](quotient)
        unit = -torch.as_tensor(b) if base in ("remainder", "fmod") else 1.0
        return _Jump(base, quotient, quotient.abs(), distance, level, level + step, unit, dtype)
    if base in _FAKE:
        return _fake_quantised(base, a, named, dtype)
    if base in _CASTS:
        to = named.get("dtype")
        if to is None or to.is_floating_point or to.is_complex or to is torch.bool:
            return None
        base, kind = f"cast to {NAMES[to]}", "trunc"
    elif base in _UNARY:
        kind = _UNARY[base]
    else:
        return None
    level, step, distance = _STEPS[kind](a)
    return _Jump(base, a, a.abs(), distance, level, level + step, 1.0, dtype)


def _compared(base: str, a: Any, b: Any, dtype: str) -> _Jump:
    a, b = torch.broadcast_tensors(a, b)
    difference = torch.nan_to_num(a - b)
    holds = {"g": difference > 0, "l": difference < 0}[base[0]]
    if base in ("ge", "le", "greater_equal", "less_equal"):
        holds = holds | (difference == 0)
    level = holds.to(torch.float64)
    size = torch.maximum(a.abs(), b.abs())
    finite = torch.isfinite(a) & torch.isfinite(b)
    distance = torch.where(finite, difference.abs(), torch.inf)
    return _Jump(
        base, difference, torch.nan_to_num(size), distance, level, 1.0 - level, None, dtype
    )


def _fake_quantised(base: str, x: Any, named: Mapping[str, Any], dtype: str) -> _Jump | None:
    scale, zero = (torch.as_tensor(named.get(k)).to(torch.float64) for k in ("scale", "zero_point"))
    if "channel" in base:
        form = [1] * x.dim()
        form[named["axis"]] = -1
        scale, zero = scale.reshape(form), zero.reshape(form)
    argument = x / scale + zero
    level, step, distance = _round(argument)
    ends = named["quant_min"], named["quant_max"]
    unit = scale.expand_as(x) if scale.dim() else scale
    return _Jump(
        base,
        argument,
        (x / scale).abs(),
        distance,
        level.clamp(*ends),
        (level + step).clamp(*ends),
        unit,
        dtype,
    )


# ---- each returns (level, step to the nearest other level, distance to the jump between them)


def _round(x: Any) -> tuple[Any, Any, Any]:
    level = x.round()
    step = torch.where(x >= level, 1.0, -1.0)
    return level, step, 0.5 - (x - level).abs()


def _floor(x: Any) -> tuple[Any, Any, Any]:
    level = x.floor()
    above = x - level
    return level, torch.where(above < 0.5, -1.0, 1.0), torch.minimum(above, 1 - above)


def _ceil(x: Any) -> tuple[Any, Any, Any]:
    level, step, distance = _floor(-x)
    return -level, -step, distance


def _trunc(x: Any) -> tuple[Any, Any, Any]:
    level, step, distance = _floor(x.abs())
    away = level == 0  # there is no jump at zero
    sign = torch.where(x < 0, -1.0, 1.0)
    step = torch.where(away, 1.0, step)
    distance = torch.where(away, 1 - x.abs(), distance)
    return level * sign, step * sign, distance


def _sign(x: Any) -> tuple[Any, Any, Any]:
    level = x.sign()
    return level, torch.where(level > 0, -2.0, torch.where(level < 0, 2.0, 1.0)), x.abs()


_STEPS: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    "round": _round, "floor": _floor, "ceil": _ceil, "trunc": _trunc, "sign": _sign,
}  # fmt: skip
_UNARY = {
    "round": "round", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "fix": "trunc",
    "sign": "sign", "sgn": "sign",
}  # fmt: skip
