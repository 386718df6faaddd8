"""Finds the codes and scales of a quantised weight: stored as such in a file, or as a grid on which
its values lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.error_structure import norm
from whence.judge.limits import U32, WEIGHT_GRID_VALUES, WEIGHT_UNRELATED
from whence.judge.policy import Scheme

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_FLOATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_GROUPS = (256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised weight. codes: float64, in groups as the scales require. scale, zero: broadcast
    over the codes. u: the scale's unit roundoff.

    shape: of the weight itself. scheme: read from shapes and values. where: the target's slots it
    was read from; () when read off the values of a floating weight. less: what zero points are
    stored less, 0 or 1.
    """

    shape: tuple[int, ...]
    codes: F64
    scale: F64
    zero: F64
    scheme: Scheme
    u: float
    where: tuple[str, ...] = ()
    less: int = 0

    def dequantised(self) -> F64:
        """(code - zero point) * scale, in the weight's shape."""
        out: F64 = ((self.codes - self.zero) * self.scale).reshape(self.shape)
        return out

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest code of the scheme."""
        if self.scheme.format != "int":
            top = 448.0 if self.scheme.format == "e4m3" else 57344.0
            return -top, top
        low = float(self.codes.min(initial=0.0))
        size = float((1 << self.scheme.bits) - 1)
        signed = low < 0
        return (-(size + 1) / 2, (size - 1) / 2) if signed else (0.0, size)


def stored(
    reference: Array, parameters: Mapping[str, Array], slot: str, *, axis: int = 0
) -> Stored | None:
    """The quantised form of the reference's parameter `slot`, found among the target's parameters
    of the same call; None without one.

    reference: the float weight, at least 2-D. parameters: the target's, by slot. axis: preferred
    axis of the scales, where two fit. Codes are integers or 8-bit floats, as many as weights (or
    packed two or four to a byte, or four to sixteen to a word of 32 bits, as GPTQ, AWQ and
    compressed-tensors do). Scales are floating: one for all, or one for each channel or for each
    group along the last axis; a parameter called g_idx names the group of each column.
    """
    prefix = slot + "."
    inner = {s: a for s, a in parameters.items() if s.startswith(prefix)}
    if inner or slot not in parameters or not _is_real(parameters[slot]):
        return _assemble(reference, inner or parameters, axis)
    return None


def _is_real(array: Array) -> bool:
    kind = dtypes.of(array)
    return kind.kind == "float" and kind.bits > 8


def _assemble(reference: Array, parameters: Mapping[str, Array], axis: int) -> Stored | None:
    best: tuple[tuple[bool, float], Stored] | None = None
    wide: F64 = np.asarray(reference, dtype=np.float64)
    names = {s: s.rpartition("param.")[2].lower() for s in parameters}
    group_of = _group_of_column(reference, parameters, names)
    size = max(norm(reference), 1e-300)
    for slot, array in parameters.items():
        kind = dtypes.of(array)
        if kind.kind in ("int", "uint") and kind.bits <= 32:
            form = "int"
        elif kind.name in _FLOATS:
            form = _FLOATS[kind.name]
        else:
            continue
        for codes, packed in _codes(reference, array, form):
            for name, scale in parameters.items():
                if (
                    name == slot
                    or not _is_real(scale)
                    or any(
                        w in names[name]
                        for w in ("input", "output", "act", "bias", "shift", "zero")
                    )
                ):
                    continue
                shaped = _shaped(codes, scale, axis, group_of)
                if shaped is None:
                    continue
                view, s, per, along, group = shaped
                zeros = [(*z, 0) for z in _zeros(parameters, names, (slot, name), scale, s)]
                if packed and array.dtype.itemsize == _WORD:
                    signed = bool((codes < 0).any())
                    words = _zeros_of_words(parameters, names, scale, packed, signed)
                    every = [(at, _shaped(codes, z, axis, group_of), n) for at, z, n in words]
                    zeros = [(at, form[1], n) for at, form, n in every if form] or zeros
                for zero_slot, zero, less in zeros:
                    bits = packed or (8 if form != "int" else _bits(codes))
                    stored = Stored(
                        reference.shape,
                        view,
                        s,
                        zero,
                        Scheme(bits, per, along, group, not zero.any(), form),
                        _u(scale),
                        tuple(x for x in (slot, name, zero_slot) if x),
                        less,
                    )
                    far = _distance(stored.dequantised(), wide, size)
                    if best is None or far < best[0]:
                        best = far, stored
    return best[1] if best is not None and best[0][1] < WEIGHT_UNRELATED else None


def _distance(values: F64, reference: F64, size: float) -> tuple[bool, float]:
    """(whether they are far, relative distance from the reference); of those that are far, once
    one factor is taken out: a wrong scale hides no codes.
    """
    far = norm(values - reference) / size
    if far < WEIGHT_UNRELATED:
        return False, far
    along = float(np.einsum("i,i->", values.reshape(-1), reference.reshape(-1)))
    factor = along / max(norm(values) ** 2, 1e-300)
    return True, norm(factor * values - reference) / size


def _codes(reference: Array, array: Array, form: str) -> Iterator[tuple[F64, int]]:
    """Yields (codes in the reference's shape, their bits if packed, else 0), for every order in
    which they may be stored.
    """
    if array.size == reference.size:
        wide: F64 = array.astype(np.float64)
        if (
            array.shape == reference.shape[::-1]
            and array.ndim == 2
            and array.shape != reference.shape
        ):
            yield np.ascontiguousarray(wide.T), 0
        else:
            yield wide.reshape(reference.shape), 0
        return
    if form == "int" and array.dtype.itemsize == _WORD and reference.ndim == 2:
        yield from _codes_of_words(reference.shape, array)
        return
    for bits in (4, 2):
        many = 8 // bits
        if form != "int" or array.dtype.itemsize != 1 or array.size * many != reference.size:
            continue
        raw = np.ascontiguousarray(array).view(np.uint8)
        parts = [((raw >> (bits * i)) & ((1 << bits) - 1)).astype(np.float64) for i in range(many)]
        half = float(1 << (bits - 1))
        for order in (parts, parts[::-1]):
            for joined in (np.concatenate(order, axis=0), np.stack(order, axis=-1)):
                codes = joined.reshape(reference.shape)
                yield codes, bits
                yield np.where(codes >= half, codes - 2 * half, codes), bits


_WORD = 4
"""Bytes of a word that codes are packed into."""
_IN_ORDER = tuple(range(8))
_INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
"""Places of the columns in a word of eight codes, as AWQ packs them."""


def _fields(words: Array, bits: int, axis: int, order: Sequence[int]) -> F64:
    """The numbers of `bits` bits in words of 32, side by side along an axis. order: which number of
    a word comes first, second, ...
    """
    raw = np.ascontiguousarray(words).view(np.uint32)
    many = 32 // bits
    places = order if len(order) == many else range(many)
    inverse = [list(places).index(k) for k in range(many)]
    parts = [(raw >> np.uint32(bits * k)) & np.uint32((1 << bits) - 1) for k in inverse]
    joined: F64 = np.stack(parts, axis=axis + 1).astype(np.float64)
    shape = list(words.shape)
    shape[axis] *= many
    return joined.reshape(shape)


def _codes_of_words(shape: tuple[int, ...], words: Array) -> Iterator[tuple[F64, int]]:
    """As `_codes`: packed along the rows (GPTQ) or the columns (compressed-tensors; interleaved,
    AWQ), of the weight or of its transpose; signed codes are stored with half their number added.
    """
    if words.ndim != 2 or not words.size:
        return
    bits = 32 * words.size // math.prod(shape)
    if bits not in (2, 4, 8) or words.size * (32 // bits) != math.prod(shape):
        return
    for axis, order in ((0, _IN_ORDER), (1, _IN_ORDER), (1, _INTERLEAVED)):
        codes = _fields(words, bits, axis, order)
        if order is _INTERLEAVED and bits != 4:
            continue
        for form in {codes.shape: codes, codes.shape[::-1]: codes.T}.items():
            if form[0] == shape:
                whole = np.ascontiguousarray(form[1])
                yield whole, bits
                yield whole - (1 << (bits - 1)), bits


def _zeros_of_words(
    parameters: Mapping[str, Array], names: Mapping[str, str], scale: Array, bits: int, signed: bool
) -> Iterator[tuple[str, F64, int]]:
    """Candidates (slot, zero points in the shape of the scale, what they are stored less) that are
    packed as codes are: as they stand, or stored less one, as GPTQ does. One weight cannot tell
    the two from a zero point that is off by one; the other weights of its file can.
    """
    for slot, array in parameters.items():
        is_word = array.dtype.kind in "iu" and array.dtype.itemsize == _WORD
        if "zero" not in names[slot] or not is_word or array.ndim != 2:
            continue
        if array.size * (32 // bits) != scale.size or scale.ndim != 2:
            continue
        for axis, order in ((0, _IN_ORDER), (1, _IN_ORDER), (1, _INTERLEAVED)):
            zeros = _fields(array, bits, axis, order)
            if zeros.shape != scale.shape:
                continue
            yield slot, zeros - (1 << (bits - 1)) if signed else zeros, 0
            if axis == 1 and not signed and order is _IN_ORDER:
                yield slot, zeros + 1, 1


def _group_of_column(
    reference: Array, parameters: Mapping[str, Array], names: Mapping[str, str]
) -> Array | None:
    """The number of the group of each column, where a parameter states it and groups are not
    contiguous.
    """
    for slot, array in parameters.items():
        if names[slot].endswith("g_idx") and array.shape == reference.shape[-1:]:
            group_of = array.astype(np.int64)
            if (np.diff(group_of) < 0).any() and group_of.min() >= 0:
                return group_of
    return None


def _shaped(
    codes: F64, scale: Array, axis: int, group_of: Array | None = None
) -> tuple[F64, F64, str, int, int] | None:
    """(codes, scale that broadcasts over them, per, axis, group); None when the scale fits no axis
    or group. group_of: of each column, where groups are not contiguous.
    """
    s: F64 = scale.astype(np.float64)
    rows, last = codes.shape[0], codes.shape[-1]
    if group_of is not None and s.ndim == 2 and rows in s.shape and s.size > rows:
        by_group = s if s.shape[1] == rows else s.T
        if group_of.max(initial=0) < len(by_group):
            each: F64 = np.ascontiguousarray(by_group[group_of].T)
            return codes, each, "group", 0, last // len(by_group)
    if s.size == 1:
        return codes, s.reshape((1,) * codes.ndim), "tensor", 0, 0
    fits = [a for a in (axis, *range(codes.ndim)) if a < codes.ndim and s.size == codes.shape[a]]
    # A scale that kept its axes of extent one shows the axis it is for.
    exact = [a for a in fits if s.ndim == codes.ndim and s.shape[a] == s.size]
    for along in exact or fits:
        return (
            codes,
            s.reshape([-1 if a == along else 1 for a in range(codes.ndim)]),
            "channel",
            along,
            0,
        )
    if (
        s.size % rows == 0
        and s.size > rows
        and (codes.size // rows) % (s.size // rows) == 0
        and codes.ndim == 2
    ):
        groups = s.size // rows
        if s.ndim == 2 and s.shape == (groups, rows) and groups != rows:
            s = np.ascontiguousarray(s.T)
        return (
            codes.reshape(rows, groups, last // groups),
            s.reshape(rows, groups, 1),
            "group",
            0,
            last // groups,
        )
    return None


def _zeros(
    parameters: Mapping[str, Array],
    names: Mapping[str, str],
    used_slots: Sequence[str],
    scale: Array,
    s: F64,
) -> Iterator[tuple[str, F64]]:
    """Yields candidates (slot, zero point in codes): none, or a parameter with the size of the
    scale; a floating one may also be in units of the weight.
    """
    named = [
        k
        for k, a in parameters.items()
        if k not in used_slots
        and a.size == scale.size
        and any(w in names[k] for w in ("zero", "shift", "zp"))
    ]
    if not named:
        yield "", np.zeros_like(s)
    for slot in named:
        array = parameters[slot]
        values = (
            array.T
            if array.shape == scale.shape
            and array.ndim == 2
            and s.size == array.size
            and s.ndim == 3
            and array.shape[0] != s.shape[0]
            else array
        )
        zero = np.asarray(values, dtype=np.float64).reshape(s.shape)
        yield slot, zero
        if _is_real(array):
            yield slot, zero / np.where(s == 0, 1.0, s)


def _bits(codes: F64) -> int:
    low, high = float(codes.min(initial=0.0)), float(codes.max(initial=0.0))
    span = max(high + 1, -low) * 2 if low < 0 else high + 1
    return max(2, math.ceil(math.log2(max(span, 2.0))))


def _u(scale: Array) -> float:
    return dtypes.of(scale).unit_roundoff or 0.0


def on_a_grid(weight: Array, *, axis: int = 0) -> Stored | None:
    """The codes of a floating weight whose values are multiples of one step per tensor, channel or
    group, with at most 256 levels; None for other weights.

    weight: at least 2-D, real, 32 bits or wider (rounding to 16 bits hides a grid). The step is the
    smallest difference of two values that share it, or a half, a third or a quarter of that.
    """
    kind = dtypes.of(weight)
    if weight.ndim < 2 or kind.kind != "float" or kind.bits < 32 or not np.isfinite(weight).all():
        return None
    wide: F64 = weight.astype(np.float64)
    # A few rows decide cheaply; where they have no grid, no more rows are read.
    few = np.moveaxis(wide, axis, 0)[:4]
    last = few.shape[-1]
    if _steps(few.reshape(few.shape[0], -1)) is None and not any(
        last % g == 0 and last > g and _steps(few.reshape(-1, g)) is not None for g in _GROUPS
    ):
        return None
    rows = np.moveaxis(wide, axis, 0).reshape(wide.shape[axis], -1)
    grid = _steps(rows)
    if grid is not None:
        multiples, steps = grid
        levels = _levels(multiples)
        per = (
            "tensor" if steps.size > 1 and np.ptp(steps) <= 1e-6 * float(steps.max()) else "channel"
        )
        codes = np.moveaxis(multiples.reshape(np.moveaxis(wide, axis, 0).shape), 0, axis)
        scale: F64 = steps.reshape([-1 if a == axis else 1 for a in range(wide.ndim)])
        if per == "tensor":
            scale = scale.mean(keepdims=True)
        scheme = Scheme(levels[0], per, axis if per == "channel" else 0, 0, levels[1])
        return Stored(weight.shape, codes, scale, np.zeros_like(scale), scheme, U32)
    for group in _GROUPS:
        if wide.ndim == 2 and last % group == 0 and last > group:
            grid = _steps(wide.reshape(-1, group))
            if grid is not None:
                multiples, steps = grid
                levels = _levels(multiples)
                shared = steps.reshape(wide.shape[0], -1, 1)
                split: F64 = multiples.reshape(wide.shape[0], -1, group)
                return Stored(
                    weight.shape,
                    split,
                    shared,
                    np.zeros_like(shared),
                    Scheme(levels[0], "group", 0, group, levels[1]),
                    U32,
                )
    return None


def _steps(rows: F64) -> tuple[F64, F64] | None:
    """(multiples, step of each row) when every row lies on a grid of at most 256 levels; else
    None.
    """
    if rows.shape[1] < WEIGHT_GRID_VALUES:
        return None
    largest = np.abs(rows).max(1)
    used = largest > 0
    if not used.any():
        return None
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    gaps[gaps <= 1e-4 * largest[:, None]] = np.inf
    first = gaps.min(1)
    first[~np.isfinite(first)] = largest[~np.isfinite(first)]
    first[~used] = 1.0
    steps, multiples = np.zeros(rows.shape[0]), np.zeros_like(rows)
    open_rows = np.ones(rows.shape[0], dtype=bool)
    for parts in (1, 2, 3, 4):
        step = first[open_rows] / parts
        some = rows[open_rows]
        whole = np.rint(some / step[:, None])
        # The smallest gap contains the rounding of two values; all values together give the step
        # much more precisely.
        power = (whole * whole).sum(1)
        step = np.where(power > 0, (some * whole).sum(1) / np.where(power > 0, power, 1.0), step)
        whole = np.rint(some / step[:, None])
        fits = (
            (np.abs(some / step[:, None] - whole).max(1) <= 1e-3)
            & (np.ptp(whole, axis=1) <= 255)
            & (np.abs(whole).max(1) <= 255)
        )
        rows_fitting = np.flatnonzero(open_rows)[fits]
        steps[rows_fitting], multiples[rows_fitting] = step[fits], whole[fits]
        open_rows[rows_fitting] = False
        if not open_rows.any():
            return multiples, steps
    return None


def _levels(multiples: F64) -> tuple[int, bool]:
    """(bits, symmetric) of a grid's multiples; asymmetric, with a zero point for each part, where
    that needs fewer bits.
    """
    low, high = float(multiples.min()), float(multiples.max())
    bits = next(
        (b for b in range(2, 10) if low >= -(1 << (b - 1)) and high <= (1 << (b - 1)) - 1), 10
    )
    span = max(2, math.ceil(math.log2(float(np.ptp(multiples, axis=-1).max()) + 1)))
    return (bits, True) if bits <= span else (span, False)
