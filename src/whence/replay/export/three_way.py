"""The three-way check of one operator: as it was run, as plain eager code, and in float64 on the
CPU.

Written so that a script can hold a copy: each function and class here needs torch and the standard
library only, and `SOURCES` says which of them go together. The limits are those of `judge.limits`.
"""

from __future__ import annotations

import json
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

RHO, RHO_16, Z, Z_16 = 5.0, 2.0, 9.6, 6.8


def load(path, dtypes):  # type: ignore[no-untyped-def]
    """Tensors of a safetensors file by name, each laid out in memory as it was."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header, data = json.loads(file.read(size)), file.read()
    layouts = json.loads(header.pop("__metadata__", {}).get("layouts", "{}"))
    held = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[begin:end] or b"\0" * 16), dtype=torch.uint8)
        flat = flat.view(dtypes[entry["dtype"]])
        held[name] = (flat if end > begin else flat[:0]).reshape(entry["shape"])
    views = {
        name: held[memory].as_strided(shape, stride, at)
        for name, (memory, shape, stride, at) in layouts.items()
    }
    return held | views


class Wide(TorchDispatchMode):  # type: ignore[misc]
    """Every operator in float64: floating tensors, dtype arguments and results."""

    def __init__(self, dtype=torch.float64):  # type: ignore[no-untyped-def]
        super().__init__()
        self.real, self.complex = (
            dtype,
            torch.complex128 if dtype is torch.float64 else torch.complex64,
        )

    def widen(self, value):  # type: ignore[no-untyped-def]
        dtype = value.dtype if isinstance(value, torch.Tensor) else value
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
            return value
        wide = self.complex if dtype.is_complex else self.real
        return value.to(wide) if isinstance(value, torch.Tensor) else wide

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args, kwargs = tree_map(self.widen, (args, kwargs or {}))
        return tree_map(self.widen, func(*args, **kwargs))


def wide(function, inputs):  # type: ignore[no-untyped-def]
    """What `function` gives in float64 on the CPU, or in float32 where an operator has no float64
    kernel.
    """

    def run(mode):  # type: ignore[no-untyped-def]
        given = {name: mode.widen(tensor.detach().cpu().clone()) for name, tensor in inputs.items()}
        default = torch.get_default_dtype()  # of what is made from numbers alone
        torch.set_default_dtype(mode.real)
        try:
            with torch.no_grad(), mode:
                return function(**given)
        finally:
            torch.set_default_dtype(default)

    try:
        return run(Wide(torch.float64))  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return run(Wide(torch.float32))  # type: ignore[no-untyped-call]


def beyond_rounding(y, r, w, terms=1):  # type: ignore[no-untyped-def]
    """How far `y` is from `r`, in units of what rounding explains: above 1 it is not rounding. Also
    the figures, in words.

    r: in float64. w: the same in the dtype of y, its own noise. terms: how many numbers one element
    is summed from.
    """
    if tuple(y.shape) != tuple(r.shape):
        return math.inf, f"shape {tuple(y.shape)} where {tuple(r.shape)} is right"
    if not (y.is_floating_point() or y.is_complex()):
        wrong = int(((y != r) & (y != w)).sum())
        return (math.inf if wrong else 0.0), f"{wrong} of {y.numel()} elements differ"
    kind = torch.finfo(y.dtype)
    u, u_sum = kind.eps / 2, 2.0 ** (-53 if kind.bits == 64 else -24)
    y, r, w = (torch.view_as_real(t) if t.is_complex() else t for t in (y, r, w))
    y, r, w = (
        t.detach().cpu().double().reshape(-1, t.shape[-1] if t.dim() > 1 else max(1, t.numel()))
        for t in (y, r, w)
    )
    if not y.numel():
        return 0.0, "no elements"
    big = 0.9 * kind.max  # masks are filled with the largest number there is
    fine = (y.abs() < big) & (r.abs() < big) & (w.abs() < big)
    alike = [
        (y.isnan() & t.isnan()) | ((y.abs() >= big) & (t.abs() >= big) & (y.sign() == t.sign()))
        for t in (r, w)
    ]
    wrong = int((~fine & ~alike[0] & ~alike[1] & ~((y.abs() < big) & (r.abs() < big))).sum())
    if wrong:
        return math.inf, f"{wrong} of {y.numel()} elements are NaN or Inf on one side only"
    y, r, w = (torch.where(fine, t, 0.0) for t in (y, r, w))
    error, noise, size = y - r, w - r, float(r.norm())
    sums = 0.3 * terms**0.5 * u_sum  # over the size of what is summed
    floor = max(float(noise.norm()), 0.5 * u * size, sums * size)
    rho = float(error.norm()) / floor if floor else (math.inf if error.any() else 0.0)
    square = torch.maximum(noise.square(), (2.0 * sums * r).square() * (terms > 1))
    own = torch.maximum(square.mean(1, keepdim=True), square.mean(0, keepdim=True)).sqrt()
    # An element that w gives too is not a fault, however far it is from r.
    nearest = torch.minimum(error.abs(), (y - w).abs())
    ratio = nearest / (own + u * r.abs() + 1e-3 * u * size / r.numel() ** 0.5 + 1e-300)
    z, worst = float(ratio.max()), float(error.flatten()[ratio.argmax()])
    others = max(0.0, float(error.norm()) ** 2 - worst**2) ** 0.5
    outlying = z / max(1.0, others / floor) if floor else z
    score = max(rho / (RHO if u < 1e-5 else RHO_16), outlying / (Z if u < 1e-5 else Z_16))
    relative = float(error.norm()) / size if size else (math.inf if error.any() else 0.0)
    return (
        score,
        f"relative error {relative:.2g}, {rho:.3g} times the rounding of the operator; worst "
        f"element {z:.3g} times its row's",
    )


SOURCES = (load, Wide, wide, beyond_rounding)
