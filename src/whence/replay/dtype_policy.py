"""Decides the dtype of every tensor and dtype argument in a run and the memory layout of tensors;
converts parameters once for several runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host
from whence.replay.binding import BoundOperation

WORKING = ("recorded", "float64", "float32", "bfloat16", "float16")

HALF = (torch.bfloat16, torch.float16)
_RANGES = {"arange", "range", "linspace", "logspace"}
_CASTS = {"_to_copy", "to", "type_as", "convert_element_type"}
_DEFAULT_DTYPE = {
    "zeros", "ones", "empty", "eye", "linspace", "logspace", "hann_window", "hamming_window",
    "fft_fftfreq", "fft_rfftfreq",
}  # fmt: skip
_EITHER_DTYPE = {"full", "arange", "scalar_tensor", "range"}


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Parameters converted to one working dtype and layout, shared by several runs of one program.
    See `Loaded.hold`.
    """

    tensors: dict[str, Any]
    working: str


def hold(
    params: Mapping[str, Array] | HeldParameters,
    slots: Iterable[str],
    working: str,
    strides: Mapping[str, tuple[int, ...]],
    convert: Callable[[Any], Any],
) -> HeldParameters:
    """Returns the available parameters of these slots, converted; `HeldParameters` are returned
    unchanged. Raises ReplayRefused for parameters held for another working dtype.
    """
    if isinstance(params, HeldParameters):
        if params.working != working:
            raise ReplayRefused(f"parameters held for {params.working} given to a run in {working}")
        return params
    tensors = {
        slot: laid_out(convert(from_host(params[slot])), strides.get(slot))
        for slot in slots
        if slot in params
    }
    return HeldParameters(tensors, working)


def wide_dtype(working: str) -> Any:
    """Returns the dtype that every floating tensor has at least, None where there is none. Raises
    ReplayRefused for an unknown working dtype.
    """
    if working not in WORKING:
        raise ReplayRefused(f"working dtype {working!r} is not one of {', '.join(WORKING)}")
    return TORCH[working] if working in ("float64", "float32") else None


def widened(tensor: Any, wide: Any) -> Any:
    """Returns the tensor in this dtype, where it is a narrower one; None changes nothing."""
    if wide is torch.float64 and tensor.is_complex():
        return tensor.to(torch.complex128)
    if (
        wide is None
        or not tensor.is_floating_point()
        or (wide is torch.float32 and tensor.dtype not in HALF)
    ):
        return tensor
    return tensor.to(wide)


def floating_dtype(name: str) -> Any:
    """Returns the torch dtype of this name, which must be real and floating; None for ""."""
    if not name:
        return None
    dtype = TORCH.get(name)
    if dtype is None or not dtype.is_floating_point:
        raise ReplayRefused(f"malformed program: base or default dtype {name[:40]!r}")
    return dtype


class DtypePolicy:
    """The dtype of each tensor and dtype argument in one run. Raises ReplayRefused for an unknown
    working dtype.
    """

    def __init__(self, working: str, base: Any, default: Any) -> None:
        self._widest = wide_dtype(working)
        self.recorded = working == "recorded"
        self.base, self.default = base, default
        self.working: Any = None if self.recorded else TORCH[working]
        self.wide = working == "float64"

    def input(self, tensor: Any, recorded: str) -> Any:
        if self.recorded or self._widest is not None:
            return self.widened(tensor)
        is_base = recorded and TORCH[recorded] is self.base
        return tensor.to(self.working) if is_base and tensor.is_floating_point() else tensor

    def constant(self, tensor: Any) -> Any:
        if self.recorded or self._widest is not None:
            return self.widened(tensor)
        # One without elements is what something grows from (a cache), in the dtype of what follows.
        return (
            tensor.to(self.working) if tensor.numel() == 0 and tensor.dtype is self.base else tensor
        )

    def widened(self, tensor: Any) -> Any:
        """Returns the tensor in the wide working dtype; as it is in another one."""
        if self._widest is not None and self.base is tensor.dtype is torch.float64:
            return tensor.to(self._widest)
        return widened(tensor, self._widest)

    def argument(self, dtype: Any, step: BoundOperation, operand: Any) -> Any:
        """Returns the value of a dtype argument in this run.

        dtype: the value in the recording. operand: the first tensor the operator reads, None for a
        constructor.
        """
        if self.recorded or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        if self.wide:
            return torch.complex128 if dtype.is_complex else torch.float64
        if dtype is not self.base:
            return self.working if self.working is torch.float32 and dtype in HALF else dtype
        if self.working not in HALF or dtype in HALF:
            return self.working
        if step.base in _RANGES:
            return dtype
        if operand is None or step.base.startswith("new_") or step.base.endswith("_like"):
            return self.working
        if not operand.is_floating_point():
            return self.working if operand.dtype is torch.bool and step.base in _CASTS else dtype
        return (
            self.working
            if step.base in _CASTS
            else torch.promote_types(self.working, operand.dtype)
        )

    def constructed(self, step: BoundOperation, args: tuple[Any, ...]) -> Any:
        """Returns the dtype of a constructor called without one, which follows the default dtype of
        the recording instead of this process's; None for other operators.
        """
        if step.base in _EITHER_DTYPE:
            numbers = [a for a in args if isinstance(a, (bool, int, float, complex))]
            if not any(isinstance(a, float) for a in numbers) or any(
                isinstance(a, complex) for a in numbers
            ):
                return None
        elif step.base not in _DEFAULT_DTYPE:
            return None
        if self.wide:
            return torch.float64
        return (
            torch.promote_types(self.default, torch.float32)
            if self.working is torch.float32
            else self.default
        )

    def cast(self, tensor: Any, way: str) -> Any:
        """Applies a cast point: to float32, or back to the working dtype."""
        if self.recorded:
            return tensor.to(torch.float32)
        if self.working not in HALF:
            return tensor.to(self.working)
        return tensor.to(self.working) if way == "back" else tensor.to(torch.float32)


def laid_out(tensor: Any, strides: tuple[int, ...] | None) -> Any:
    """Returns the same values with these strides; contiguous when strides are not given, do not
    fit, or would need far more memory.
    """
    if (
        strides is None
        or len(strides) != tensor.dim()
        or tensor.numel() == 0
        or tuple(strides) == tuple(tensor.stride())
    ):
        return tensor
    axes = [a for a in range(tensor.dim()) if strides[a] != 0 and tensor.shape[a] > 1]
    expanded = [a for a in range(tensor.dim()) if strides[a] == 0 and tensor.shape[a] > 1]
    core = tensor
    for axis in expanded:
        first = core.narrow(axis, 0, 1)
        if not torch.equal(
            first.expand_as(core).contiguous().view(torch.uint8),
            core.contiguous().view(torch.uint8),
        ):
            return tensor  # this tensor is not constant along that axis
        core = first
    span, reach = 1, 1
    for axis in sorted(axes, key=lambda a: strides[a]):
        if strides[axis] < span:
            return tensor  # windows that overlap
        reach += (core.shape[axis] - 1) * strides[axis]
        span = strides[axis] * core.shape[axis]
    if any(s < 0 for s in strides) or reach > 64 * core.numel() + 1024:
        return tensor
    out = torch.empty_strided(core.shape, strides, dtype=core.dtype)
    out.copy_(core)
    return out.as_strided(tensor.shape, strides) if expanded else out
