"""How far a device is from the CPU, in units of rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.replay.export.support.tensors import rounds

RHO, Z, RHO_16, Z_16 = 5.0, 9.6, 2.0, 6.8

_SENTINEL = 0.9


@dataclass
class Figures:
    """How far a result of the device is from the reference. local: worst error over its own noise
    floor; score > 1 fails.

    counts: elements whose absolute error exceeds 1e-1 .. 1e-8. where, why: the worst element, and
    what was found, in words.
    """

    numel: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    worst: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * 8)
    ulp: float = 0.0
    nan: int = 0
    inf: int = 0
    local: float = 0.0
    score: float = 0.0
    why: str = ""
    dtypes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def join(self, figures: Figures) -> None:
        """Takes in the figures of another result of the same call."""
        self.numel += figures.numel
        self.least, self.greatest = (
            min(self.least, figures.least),
            max(self.greatest, figures.greatest),
        )
        self.worst, self.ulp = max(self.worst, figures.worst), max(self.ulp, figures.ulp)
        self.counts = [a + b for a, b in zip(self.counts, figures.counts)]
        self.nan, self.inf = self.nan + figures.nan, self.inf + figures.inf
        if figures.score > self.score or not self.why:
            self.why = figures.why
        self.local, self.score = max(self.local, figures.local), max(self.score, figures.score)
        self.dtypes, self.shapes = self.dtypes + figures.dtypes, self.shapes + figures.shapes


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of rounding to nearest in a floating or complex dtype."""
    return float(torch.finfo(dtype).eps / 2)


def measure(output: Any, wide: Any, floors: Sequence[Any], *, length: int = 1) -> Figures:
    """Judge what a device made against the CPU.

    output: CPU tensor of any dtype. wide: the same computed in float64. floors: the same computed
    in output's own dtype, one or several right ways. length: largest number of terms that one
    element is summed from. All of one shape.
    Source: the error of the device over the largest error of the floors (2-norm), at least half a
    unit in the last place and 0.3 sqrt(length) u; and the worst element, by how far it is from the
    nearest of wide and floors, over the rounding of its row and column.
    """
    if output.numel() == 0:
        return Figures()
    if not rounds(output):
        return _exact(output, wide, floors)
    y, r, *ws = (_flat(t) for t in (output, wide, *floors))
    ws = ws or [r]
    figures = Figures(numel=output.numel())
    finite = r.isfinite()
    if bool(finite.any()):
        figures.least, figures.greatest = float(r[finite].min()), float(r[finite].max())
    fine, wrong = _fine_and_wrong(y, r, ws, _SENTINEL * float(torch.finfo(output.dtype).max))
    figures.nan = int((wrong & (y.isnan() | r.isnan())).sum())
    figures.inf = int(wrong.sum()) - figures.nan
    counted = y.isfinite() & r.isfinite() & ~wrong
    error = torch.where(counted, y - r, 0.0).abs()
    figures.worst = float(error.max())
    figures.counts = [int((error > 10.0**-k).sum()) for k in range(1, 9)]
    figures.ulp = _ulp(output, wide)
    compared = [torch.where(fine, t, 0.0) for t in (y, r, *ws)]
    rho, ratio, shares = _in_roundings(output, *compared, length=length)
    worst = int(ratio.argmax())
    z = float(ratio[worst])
    rho_limit, z_limit = (RHO_16, Z_16) if unit_roundoff(output.dtype) > 1e-5 else (RHO, Z)
    figures.local = rho
    mismatch = figures.nan + figures.inf
    others = math.sqrt(max(0.0, rho**2 - float(shares[worst]) ** 2))
    outlying = z / max(1.0, others)
    figures.score = math.inf if mismatch else max(rho / rho_limit, outlying / z_limit)
    if mismatch:
        worst = int(wrong.to(torch.uint8).argmax())
    index = _index(worst, output)
    example = f"at {index} device {float(y[worst]):.9g}, CPU {float(r[worst]):.9g}"
    figures.why = (
        f"{mismatch} elements are NaN or Inf on one side; {example}"
        if mismatch
        else f"error {rho:.3g} x its floor, worst element {z:.3g} x; {example}"
    )
    return figures


def _fine_and_wrong(y: Any, r: Any, ws: Sequence[Any], limit: float) -> tuple[Any, Any]:
    """(elements that are compared, elements that are NaN or Inf on one side only). y: output, r:
    wide, ws: floors. limit: beyond it a number stands for "masked".
    """
    fine = (y.abs() < limit) & (r.abs() < limit)
    for w in ws:
        fine &= w.abs() < limit
    # A NaN or Inf that the CPU makes too, in either dtype, is not a mismatch.
    wrong = ~fine & ~_same(y, r, limit) & ~((y.abs() < limit) & (r.abs() < limit))
    for w in ws:
        wrong &= ~_same(y, w, limit)
    # on both sides of the bound for great numbers
    wrong &= ~(y.isfinite() & ((y - r).abs() <= 0.01 * r.abs()))
    return fine, wrong


def _in_roundings(output: Any, y: Any, r: Any, *ws: Any, length: int) -> tuple[float, Any, Any]:
    """(the error of y over its floor in 2-norm, that of each element over the rounding of its row
    and column, and over the floor). output: as it is; y, r, ws: it, wide and floors as float64,
    flat, 0 where nothing is compared.
    """
    u, tiny = unit_roundoff(output.dtype), float(torch.finfo(output.dtype).tiny)
    # Beyond 1e150 a square overflows.
    scale = max(1.0, float(r.abs().max()) / 1e100, float(y.abs().max()) / 1e100)
    # An element that the CPU gives too in this dtype is not a fault, however far from the wide one.
    nearest = functools.reduce(torch.minimum, ((y - x).abs() for x in (r, *ws))) / scale
    e, fs, r = (y - r) / scale, [(w - r) / scale for w in ws], r / scale
    last = output.shape[-1] * (2 if output.is_complex() else 1) if output.dim() > 1 else y.numel()
    size, noise = float(r.norm()), max(float(f.norm()) for f in fs)
    accumulate = 2.0**-53 if output.dtype in (torch.float64, torch.complex128) else 2.0**-24
    smallest = 0.5 * tiny / scale * math.sqrt(y.numel())  # numbers below may be flushed to zero
    sums = 0.3 * math.sqrt(max(length, 1)) * accumulate  # over the size of what is summed
    floor = max(noise, 0.5 * u * size, sums * size, smallest)
    # One element of a sum in order comes twice as far.
    of_terms = (2.0 * sums * r) ** 2 if length > 1 else torch.zeros_like(r)
    spread = torch.zeros_like(r)
    for f in fs:
        square = torch.maximum(f * f, of_terms).reshape(-1, last)
        means = torch.maximum(square.mean(1, keepdim=True), square.mean(0, keepdim=True))
        spread = torch.maximum(spread, means.sqrt().reshape(-1))
    # The third of the floors holds for single elements too: the CPU may have hit a tensor exactly.
    rms = size / math.sqrt(r.numel())
    spread += u * r.abs() + 1e-3 * u * rms + tiny / scale
    return float(e.norm()) / floor, nearest / spread, e.abs() / floor


def _exact(output: Any, wide: Any, floors: Sequence[Any]) -> Figures:
    wrong = output != wide.to(output.dtype)
    for floor in floors:
        wrong &= output != floor.to(output.dtype)
    y, r = output.to(torch.float64), wide.to(torch.float64)
    error = torch.where(wrong, (y - r).abs(), 0.0)
    count = int(wrong.sum())
    figures = Figures(
        output.numel(),
        float(r.min()),
        float(r.max()),
        float(error.max()),
        [int((error > 10.0**-k).sum()) for k in range(1, 9)],
    )
    figures.local = figures.score = math.inf if count else 0.0
    if count:
        first = int(wrong.reshape(-1).to(torch.uint8).argmax())
        index = _index(first, output)
        figures.why = (
            f"{count} of {output.numel()} elements differ; at {index} device "
            f"{y.reshape(-1)[first]:.17g}, CPU {r.reshape(-1)[first]:.17g}"
        )
    return figures


def _flat(t: Any) -> Any:
    return (
        torch.view_as_real(t.resolve_conj().to(torch.complex128))
        if t.is_complex()
        else t.to(torch.float64)
    ).reshape(-1)


def _same(a: Any, b: Any, limit: float) -> Any:
    return ((a.abs() >= limit) & (b.abs() >= limit) & (a.signbit() == b.signbit())) | (
        a.isnan() & b.isnan()
    )


def _index(place: int, output: Any) -> list[int]:
    place = place // 2 if output.is_complex() else place
    return (
        [int(i) for i in torch.unravel_index(torch.tensor(place), output.shape)]
        if output.dim()
        else []
    )


_ORDERED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ulp(output: Any, wide: Any) -> float:
    """Largest distance in representable numbers between the output and the reference rounded to its
    dtype, where both are finite.
    """
    if output.is_complex():
        output, wide = (
            torch.view_as_real(output.resolve_conj()),
            torch.view_as_real(wide.resolve_conj().to(torch.complex128)),
        )
    a, b = output.contiguous().reshape(-1), wide.to(output.dtype).contiguous().reshape(-1)
    keep = a.to(torch.float64).isfinite() & b.to(torch.float64).isfinite()
    size = a.element_size()
    places = []
    for t in (a, b):
        bits = t.view(_ORDERED[size])[keep].to(torch.int64)
        places.append(torch.where(bits < 0, -(1 << (8 * size - 1)) - bits, bits))
    a_order, b_order = places
    if not a_order.numel():
        return 0.0
    # Of unlike signs the distance may not fit into int64.
    far = torch.where(
        (a_order < 0) == (b_order < 0),
        (a_order - b_order).to(torch.float64),
        a_order.to(torch.float64) - b_order.to(torch.float64),
    )
    return float(far.abs().max())


def kolmogorov_smirnov(a: Any, b: Any) -> float:
    """How far the distributions of two samples are apart, over what chance makes once in 10^9: 1
    and less is chance.

    Two-sample Kolmogorov-Smirnov statistic; its tail is 2 exp(-2 D^2 n m / (n + m)).
    """
    a, b = (_flat(t) for t in (a, b))
    if not a.numel():
        return 0.0
    a, b = a.sort().values, b.sort().values
    where = torch.cat((a, b))
    shares = [
        torch.searchsorted(t, where, right=True).to(torch.float64) / t.numel() for t in (a, b)
    ]
    distance = float((shares[0] - shares[1]).abs().max())
    return distance / math.sqrt(
        math.log(2e9) * (a.numel() + b.numel()) / (2.0 * a.numel() * b.numel())
    )
