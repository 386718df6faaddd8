"""Tensors that are stored as codes: the numbers that codes represent, and the tensors that a fused
layer of a quantised graph reads, computes and holds.

A code c with scale s and zero point z represents (c - z) s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array

F64 = npt.NDArray[np.float64]


class Packed(msgspec.Struct, frozen=True):
    """How a weight [columns, rows] lies in bytes: codes of `bits` bits, the lowest first, in blocks
    of `block` along each row, the last of which may be longer than what is left of the row.
    """

    bits: int
    block: int
    rows: int
    columns: int

    def codes(self, packed: Array) -> Array:
        """Codes [rows, blocks, block] of bytes; behind the columns, what the bytes hold."""
        return self._fields(packed).reshape(self.rows, -1, self.block)

    def each(self, values: Array) -> F64:
        """Scales or zero points [rows, blocks, 1], the latter floats or packed as the codes are."""
        if values.dtype.kind == "u":
            values = self._fields(values.reshape(self.rows, -1))
        blocks = -(-self.columns // self.block)
        return values.reshape(self.rows, -1)[:, :blocks, None].astype(np.float64)

    def plain(self, values: Array) -> Array:
        """[columns, rows] of what lies as the codes do."""
        return values.reshape(self.rows, -1)[:, : self.columns].T

    def blocks(self, weight: Array) -> F64:
        """A weight [columns, rows] as its codes lie; behind the columns the last byte again."""
        last = 2 - self.columns % 2
        behind = self.columns - last + np.arange(-self.columns % self.block) % last
        rows = weight.T.astype(np.float64)
        return np.concatenate([rows, rows[:, behind]], 1).reshape(self.rows, -1, self.block)

    def _fields(self, packed: Array) -> Array:
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        mask = np.uint8((1 << self.bits) - 1)
        parts = (packed.view(np.uint8)[..., None] >> shifts) & mask
        return parts.reshape(*packed.shape[:-1], -1)


class Grid(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbers that codes of one tensor can represent.

    dtype: of the codes. scale: records of factors whose product is the scale, one number each or
    one for each element of `axis`. zero: record of the zero point, -1 without one. channels_last:
    the codes have their second axis at the end. packed: of a weight in blocks. is_turned: whether
    the float operator has the last two axes in the other order.
    """

    dtype: str
    scale: tuple[int, ...]
    zero: int = -1
    axis: int = 0
    channels_last: bool = False
    packed: Packed | None = None
    is_turned: bool = False

    def codes(self, stored: Array) -> Array:
        """The codes that are stored, each an element."""
        return self.packed.codes(stored) if self.packed is not None else stored

    def decoded(self, array: Callable[[int], Array], record: int) -> Array:
        """The numbers that a record of codes stands for, in the axes of the float operator."""
        codes = self.codes(array(record))
        return self.plain(numbers(codes, *self.steps(array, codes.ndim)))

    def plain(self, values: Array) -> Array:
        """What lies as the codes do, in the axes of the float operator."""
        if self.packed is not None:
            return self.packed.plain(values)
        return np.swapaxes(values, -1, -2) if self.is_turned else values

    def placed(self, weight: Array) -> Array:
        """A float weight in the axes of its codes."""
        if self.packed is not None:
            return self.packed.blocks(weight)
        return np.swapaxes(weight, -1, -2) if self.is_turned else weight

    def steps(self, array: Callable[[int], Array], rank: int) -> tuple[F64, F64]:
        """Returns (scale, zero point) in float64, shaped to broadcast over a tensor of this rank.
        array: returns the elements of a record.
        """
        if self.packed is not None:
            middle = np.full((1, 1, 1), 2.0 ** (self.packed.bits - 1))
            zero = self.packed.each(array(self.zero)) if self.zero >= 0 else middle
            return self.packed.each(array(self.scale[0])), zero
        scale = np.ones((), np.float64)
        for record in self.scale:
            scale = scale * _along(array(record), self.axis, rank)
        if self.zero < 0:
            return scale, np.zeros((), np.float64)
        return scale, _along(array(self.zero), self.axis, rank)

    def rounded(self, array: Callable[[int], Array], values: Array) -> F64:
        """Rounds numbers to the nearest representable ones, in ONNX's order of axes."""
        scale, zero = self.steps(array, values.ndim)
        codes = np.clip(np.rint(values.astype(np.float64) / scale + zero), *self.ends)
        out: F64 = (codes - zero) * scale
        return out

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the smallest and the largest code."""
        kind = dtypes.named(self.dtype)
        if kind.kind == "int":
            return -(2.0 ** (kind.bits - 1)), 2.0 ** (kind.bits - 1) - 1
        return 0.0, 2.0**kind.bits - 1


class Coded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor of a layer on a grid.

    record: the numbers, as floats. codes: the codes, -1 where the run has none. grid: None for a
    tensor that is not stored as codes. of: the record that was rounded to it at the input of the
    layer, -1 without one. is_measured: whether the layer quantises the numbers itself, by their own
    range.
    """

    record: int
    codes: int = -1
    grid: Grid | None = None
    of: int = -1
    is_measured: bool = False


class CodedWeight(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter that is stored as codes.

    facing: the slot of the corresponding parameter of the reference, "" where none is known.
    factors: for the bias of a product, the records of the scales of both factors, whose product its
    scale should be.
    """

    name: str
    coded: Coded
    facing: str = ""
    factors: tuple[int, ...] = ()


class Reread(msgspec.Struct, frozen=True):
    """Codes that are read with another grid than the one they were written with."""

    name: str
    made: Grid
    read: Grid


class Member(msgspec.Struct, frozen=True):
    """A node of a layer. program: what it computes, "" where that is not known. slots: the records
    of its tensors. kind: its operator, without a domain. reads: records of its operands.
    """

    name: str
    program: str
    slots: dict[str, int]
    kind: str
    reads: tuple[int, ...]


class QuantisedLayer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The nodes between two values of a quantised graph.

    reads, makes: inputs and outputs by place. own: the records of its inputs, outputs and
    parameters as they are. inner: records of codes that it both computes and reads. floats: records
    of parameters of several numbers that are not codes.
    """

    reads: tuple[Coded, ...]
    makes: tuple[Coded, ...]
    weights: tuple[CodedWeight, ...] = ()
    rereads: tuple[Reread, ...] = ()
    own: dict[str, int] = {}
    members: tuple[Member, ...] = ()
    inner: tuple[Coded, ...] = ()
    floats: tuple[int, ...] = ()


def numbers(codes: Array, scale: F64, zero: F64) -> npt.NDArray[np.float32]:
    """Returns the numbers that codes represent, rounded once to float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ((codes.astype(np.float64) - zero) * scale).astype(np.float32)


class Measured(NamedTuple):
    """Numbers as codes of eight bits for their own range, zero included."""

    codes: F64
    scale: np.float32
    zero: np.float32


def measured(values: Array) -> Measured:
    """Quantises numbers with the float32 arithmetic of ONNX's `DynamicQuantizeLinear`. The range is
    that of the finite numbers.
    """
    x = values.astype(np.float32)
    finite = x[np.isfinite(x)]
    low, high = finite.min(initial=np.float32(0)), finite.max(initial=np.float32(0))
    scale = np.float32((high - low) / np.float32(255)) or np.float32(1)
    zero = np.float32(np.clip(np.rint(-low / scale), 0, 255))
    codes = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.float64)
    return Measured(codes, scale, zero)


def _along(values: Array, axis: int, rank: int) -> F64:
    wide: F64 = values.astype(np.float64)
    if wide.size == 1:
        return wide.reshape(())
    if wide.ndim > 1 and wide.ndim <= rank:  # of a first and a last axis
        return wide.reshape(*wide.shape[:-1], *(1,) * (rank - wide.ndim), wide.shape[-1])
    shape = [1] * rank
    shape[axis % rank if rank else 0] = wide.size
    return wide.reshape(shape)
