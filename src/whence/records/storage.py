"""Where the elements of a record are stored, and what is known of them without reading them."""

from __future__ import annotations

import msgspec


class Statistics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of one tensor, taken in float64 over its finite elements (of |z| for complex).

    count: all elements. min, max, mean, std, norm: None when no element is finite. std is the
    population one (ddof 0); norm is the 2-norm. nan, inf, zero: how many elements are NaN, +-Inf,
    exactly zero.
    """

    count: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    nan: int
    inf: int
    zero: int


class Sketch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few numbers that do not change when the elements are permuted, to recognise a tensor under
    another name or layout.

    checksum: 64-bit sum over the mixed bit patterns, equal for equal multisets of elements (exact).
    abs_sum, cube_sum, fourth_sum: sums of |x|, x^3, x^4 over finite elements in float64
    (approximate; survive rounding); None when they overflow.
    """

    checksum: int
    abs_sum: float | None
    cube_sum: float | None
    fourth_sum: float | None


class Kept(msgspec.Struct, frozen=True, tag="kept", tag_field="in", gc=False):
    """Elements lie in a shard of this run: bytes [offset, offset + nbytes) of its data area,
    canonical (C) order, little endian.
    """

    shard: int
    offset: int
    nbytes: int


class Increment(msgspec.Struct, frozen=True, tag="increment", tag_field="in"):
    """Elements are those of record `base` followed along `axis` by the elements stored at
    shard/offset/nbytes.
    """

    base: int
    axis: int
    shard: int
    offset: int
    nbytes: int


class External(msgspec.Struct, frozen=True, tag="external", tag_field="in"):
    """Elements are byte-equal in a file of the user's (a safetensors or GGUF checkpoint); the
    `hash` of the record verifies them.
    """

    file: str
    offset: int
    nbytes: int


class Dumped(msgspec.Struct, frozen=True, tag="dumped", tag_field="in"):
    """Elements are in a foreign dump. file: relative to it, with forward slashes, "" for the dump
    itself; a position in that file may follow a comma ("Add.Add_1.4.6.1706596912161941,inputs,0").
    stored: the dtype of the stored elements, "" when it is the record's.
    """

    file: str
    stored: str = ""


Elements = Kept | Increment | External
