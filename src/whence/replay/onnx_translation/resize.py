"""Resizing, and sampling at given places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor

_MODES = ("nearest", "linear", "cubic")


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis that is resized. scale: output extent / input extent."""

    axis: int
    extent: int
    made: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Coordinates:
    """Input coordinates of the output elements along one axis: as computed by the program
    (`value`), and as numbers in float32 (`coarse`) and float64 (`fine`).
    """

    value: Tensor
    coarse: npt.NDArray[np.float64]
    fine: npt.NDArray[np.float64]


def _coordinates(w: Writer, mode: str, a: _Axis, dtype: str) -> _Coordinates:
    """Returns the input coordinates of the output elements. dtype: in which the program computes
    them.
    """
    factor, shift = _line(w, mode, a)
    begin = 0.5 if mode in _FROM_CENTRES and factor != 0 else 0.0
    value = w.counted(a.made).to(dtype) + begin
    if factor < 0:  # asymmetric and its like divide by the scale
        value = value / -factor + shift
    else:
        value = value * factor + shift
    numbers: list[npt.NDArray[np.float64]] = []
    kinds: tuple[Any, ...] = (np.float32, np.float64)
    for kind in kinds:
        places: Any = np.arange(a.made, dtype=kind) + kind(begin)
        places = places / kind(-factor) if factor < 0 else places * kind(factor)
        numbers.append((places + kind(shift)).astype(np.float64))
    return _Coordinates(value, numbers[0], numbers[1])


def _line(w: Writer, mode: str, a: _Axis) -> tuple[float, float]:
    """Returns (factor, shift) of the linear map to coordinates; a negative factor means division by
    its magnitude.
    """
    single = a.made <= 1
    if mode == "asymmetric":
        return -a.scale, 0.0
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and not single):
        return -a.scale, -0.5
    if mode == "tf_half_pixel_for_nn":
        return -a.scale, 0.0
    if mode == "half_pixel_symmetric":
        whole = a.scale * a.extent
        return -a.scale, a.extent / 2 * (1 - a.made / whole) - 0.5
    if mode in ("align_corners", "pytorch_half_pixel") and single:
        return 0.0, 0.0
    if mode == "align_corners":
        if abs(a.scale * a.extent - a.made) > 1e-3:
            raise w.refuse("corners aligned at a fraction of an element mean several things")
        return (a.extent - 1) / (a.made - 1), 0.0
    if mode == "tf_crop_and_resize":
        raise w.refuse("engines differ in what they crop")
    raise w.refuse(f"coordinate_transformation_mode {mode[:40]} is not known to whence")


_FROM_CENTRES = (
    "half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "half_pixel_symmetric",
)  # fmt: skip
_ROUNDED: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _rounded(w: Writer, x: _Coordinates, how: str) -> Tensor:
    """Rounds coordinates to indices. Raises ReplayRefused where rounding errors decide which index
    is nearest.
    """
    if how not in _ROUNDED:
        raise w.refuse(f"nearest_mode {how[:40]} is not known to whence")
    slack = 4e-6 * (1 + np.abs(x.fine))
    low, high = (_ROUNDED[how](x.fine + sign * slack) for sign in (-1, 1))
    exact = (x.fine * 4096 == np.round(x.fine * 4096)) & (x.fine == x.coarse)
    if ((low != high) & ~exact).any():
        raise w.refuse("which element is nearest is decided by rounding")
    if how == "round_prefer_floor":
        return (x.value - 0.5).ceil()
    if how == "round_prefer_ceil":
        return (x.value + 0.5).floor()
    return w.do(f"{how}.default", x.value)


def _picked(value: Tensor, a: _Axis, places: Tensor) -> Tensor:
    inside = places.to("int64").clamp(0, a.extent - 1)
    return value.index_select(a.axis, inside)


def _taps(w: Writer, kind: str, x: Tensor) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Returns (index of the element before each coordinate, (offset from it, weight) of each
    neighbour).
    """
    low = x.floor()
    t = x - low
    if kind == "linear":
        return (low, [(0, 1 - t), (1, t)])
    a = w.number("cubic_coeff_a", -0.75)

    def power(factors: Sequence[float], s: Tensor) -> Tensor:
        total = s * factors[0] + factors[1]
        for factor in factors[2:]:
            total = total * s + factor
        return total

    near, far = (a + 2, -(a + 3), 0, 1), (a, -5 * a, 8 * a, -4 * a)
    rest = 1 - t
    return (
        low,
        [
            (-1, power(far, t + 1)),
            (0, power(near, t)),
            (1, power(near, rest)),
            (2, power(far, rest + 1)),
        ],
    )


def _blended(w: Writer, value: Tensor, a: _Axis, x: Tensor, kind: str, rank: int) -> Tensor:
    """Returns the weighted sum of neighbours along one axis."""
    exclude = w.whole("exclude_outside", 0)
    if kind == "linear":
        x = x.clamp(0, a.extent - 1)
    low, taps = _taps(w, kind, x)
    weights = []
    for step, weight in taps:
        place = low + step
        if exclude:
            inside = (place >= 0) & (place <= a.extent - 1)
            weight = w.where(inside, weight, weight.zeros_like())
        weights.append((place, weight))
    if exclude:
        total = weights[0][1]
        for _, weight in weights[1:]:
            total = total + weight
        weights = [(place, weight / total) for place, weight in weights]
    out: Tensor | None = None
    for place, weight in weights:
        term = _picked(value, a, place) * weight.along(rank, a.axis)
        out = term if out is None else out + term
    assert out is not None
    return out


def _resized(w: Writer, axes: Sequence[_Axis], kind: str, mode: str, nearest: str) -> Tensor:
    if kind not in _MODES:
        raise w.refuse(f"mode {kind[:40]} is not known to whence")
    if kind != "nearest" and not w.is_float(0):
        raise w.refuse("of integers it rounds in a way that is not known to whence")
    rank, value = w.rank(0), w(0)
    dtype = w.dtype(0) if kind != "nearest" and w.dtype(0) == "float64" else "float32"
    for a in axes:
        if a.scale == 1 and a.extent == a.made:
            continue
        x = _coordinates(w, mode, a, dtype)
        if kind == "nearest":
            value = _picked(value, a, _rounded(w, x, nearest))
        else:
            value = _blended(w, value, a, _as(w, x.value, dtype), kind, rank)
    return value.clone()


def _as(w: Writer, x: Tensor, dtype: str) -> Tensor:
    return x if w.dtype(0) == dtype else x.to(w.dtype(0))


def _sizes(w: Writer) -> list[_Axis]:
    """Returns the axes that a Resize changes, with their scales."""
    rank = w.rank(0)
    axes = [w.axis(a, rank) for a in w.integers("axes", list(range(rank)))]
    places = (1, 1, 1) if w.opset < 11 else (1, 2, 3)
    extents = [w.extent(0, a) for a in axes]
    by_size = w.opset >= 11 and w.has(places[2]) and math.prod(w.operand(places[2]).shape) > 0
    if by_size:
        sizes = w.integers_of(places[2])
        scales = [float(np.float32(m) / np.float32(n)) for m, n in zip(sizes, extents)]
        policy = w.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            scale = (min if policy == "not_larger" else max)(scales)
            sizes = [math.floor(scale * n + 0.5) for n in extents]
            scales = [scale] * len(axes)
    else:
        scales = [float(s) for s in w.elements(places[1]).reshape(-1)]
        sizes = [math.floor(np.float32(n) * np.float32(s)) for n, s in zip(extents, scales)]
    if len(scales) != len(axes):
        raise w.refuse(f"{len(scales)} scales for {len(axes)} axes")
    if w.made().shape != tuple(
        sizes[axes.index(a)] if a in axes else n for a, n in enumerate(w.shape(0))
    ):
        raise w.refuse(f"it made a tensor of shape {w.made().shape}, and says another")
    return [_Axis(a, n, m, s) for a, n, m, s in zip(axes, extents, sizes, scales)]


def _asymmetric(w: Writer, axes: Sequence[_Axis], kind: str) -> Tensor:
    """Resizes as opsets before 11 do."""
    if kind == "nearest" and any(a.scale < 1 for a in axes):
        raise w.refuse("before opset 11 it is open which elements it leaves out")
    return _resized(w, axes, kind, "asymmetric", "floor")


def _resize(w: Writer) -> Tensor:
    if w.whole("antialias", 0):
        raise w.refuse("with antialias it is not known to whence")
    kind = w.text("mode", "nearest")
    if w.opset < 11:
        return _asymmetric(w, _sizes(w), kind)
    mode = w.text("coordinate_transformation_mode", "half_pixel")
    return _resized(w, _sizes(w), kind, mode, w.text("nearest_mode", "round_prefer_floor"))


def _upsample(w: Writer) -> Tensor:
    if w.opset < 9:
        scales = [float(s) for s in w.attribute("scales")]
    else:
        scales = [float(s) for s in w.elements(1).reshape(-1)]
    axes = [
        _Axis(i, n, math.floor(np.float32(n) * np.float32(s)), s)
        for i, (n, s) in enumerate(zip(w.shape(0), scales, strict=True))
    ]
    return _asymmetric(w, axes, w.text("mode", "nearest"))


def _blocked_upsample(w: Writer) -> Tensor:
    """Upsamples blocks of channels by integer factors."""
    axes = [
        _Axis(i, n, n * scale, float(scale))
        for i, (n, scale) in enumerate(zip(w.shape(0), w.integers("scales"), strict=True))
    ]
    kind = w.text("mode", "nearest")
    mode = w.text("coordinate_transformation_mode", "half_pixel")
    return _resized(w, axes, kind, "asymmetric" if kind == "nearest" else mode, "floor")


def _grid_sample(w: Writer) -> Tensor:
    names = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
    kind = names[w.text("mode", "linear" if w.opset >= 20 else "bilinear")]
    padding = {"zeros": 0, "border": 1, "reflection": 2}[w.text("padding_mode", "zeros")]
    corners = bool(w.whole("align_corners", 0))
    if w.rank(0) not in (4, 5) or (w.rank(0) == 5 and kind == 2):
        raise w.refuse("over these axes it is not known to whence")
    return w(0).grid_sampler(w(1), kind, padding, corners)


def _affine_grid(w: Writer) -> Tensor:
    corners = bool(w.whole("align_corners", 0))
    return w(0).affine_grid_generator(w.integers_of(1), corners)


KNOWN: dict[str, Writes] = {
    "Resize": _resize,
    "Upsample": _upsample,
    "com.microsoft.nchwc.Upsample": _blocked_upsample,
    "GridSample": _grid_sample,
    "com.microsoft.GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
}
