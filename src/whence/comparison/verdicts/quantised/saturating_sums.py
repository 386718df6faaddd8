"""Products of codes as processors without VNNI add them: pairs of an unsigned and a signed code,
whose sum is cut off at 16 bits.

`vpmaddubsw` of AVX2 and SSE multiplies 8-bit codes and adds two neighbours in a saturating int16;
255 * 127 * 2 does not fit. Kernels that use it (MLAS, oneDNN) need weights of 7 bits there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.judge.limits import CODES_AT_TIES
from whence.records.quantised import Member, measured

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
WORDS = (
    "it adds pairs of products in 16 bits, where they saturate on the processor that ran it: cut "
    "off so, the sums give what it made; quantise with reduce_range=True (weights of 7 bits) or "
    "with unsigned weights"
)
_MOST_ROWS = 512
_PADS = "pads"


class _Product(NamedTuple):
    """A product of quantised matrices. rows: codes (row, term); columns: codes (term, column).
    expected: the recorded result, (row, column). low, high: zero points. scale: of the sums over
    that of the result. bias: of each column. zero: zero point of the result; ends: range of its
    codes, None if the result is in float.
    """

    rows: I32
    columns: I32
    expected: F64
    low: F64
    high: F64
    scale: F64
    bias: F64
    zero: float
    ends: tuple[float, float] | None


def explains(member: Member, array: Callable[[int], Array]) -> bool:
    """Whether sums of pairs that saturate at 16 bits give a node's result and exact sums do not.
    array: record -> its elements. At most 512 rows, those with the largest sums, are computed.
    """
    products = _PRODUCTS.get(member.kind)
    if products is None:
        return False
    read = {place: array(record) for place, record in member.reads.items()}
    for product in products(member, read, array(member.makes[0])):
        chosen = _largest(product)
        if _fits(chosen, _sums(chosen, 1 << 15)) and not _fits(chosen, _sums(chosen, 1 << 30)):
            return True
    return False


def _largest(product: _Product) -> _Product:
    """The product restricted to the rows with the largest sums of codes."""
    order = np.argsort(-product.rows.sum(1), kind="stable")[:_MOST_ROWS]
    return product._replace(rows=product.rows[order], expected=product.expected[order])


def _sums(product: _Product, end: int) -> F64:
    """Sums of products, in which each sum of a pair is clipped to [-end, end - 1]."""
    rows, columns = product.rows, product.columns
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
        columns = np.pad(columns, ((0, 1), (0, 0)))
    total = np.zeros((rows.shape[0], columns.shape[1]), np.int64)
    for k in range(0, rows.shape[1], 2):
        pair = np.outer(rows[:, k], columns[k]) + np.outer(rows[:, k + 1], columns[k + 1])
        total += np.clip(pair, -end, end - 1)
    return total.astype(np.float64)


def _fits(product: _Product, sums: F64) -> bool:
    """Whether these sums lead to the recorded result."""
    rows, columns = product.rows.astype(np.float64), product.columns.astype(np.float64)
    sums = sums - product.low * columns.sum(0) - product.high * rows.sum(1, keepdims=True)
    sums = sums + product.low * product.high * rows.shape[1] + product.bias
    right = sums * product.scale
    if product.ends is None:
        limit = 1e-5 * float(np.abs(right).max(initial=0.0))
        return bool((np.abs(product.expected - right) <= limit).all())
    codes = np.clip(np.rint(right + product.zero), *product.ends)
    off = np.abs(codes - product.expected)
    few = max(1, int(CODES_AT_TIES * off.size))
    return bool((off <= 1).all()) and int(np.count_nonzero(off)) <= few


def _are_mixed(x: Array, weight: Array) -> bool:
    """Whether unsigned codes are multiplied by signed ones; only these are summed in 16-bit
    pairs.
    """
    return bool(x.dtype == np.uint8 and weight.dtype == np.int8)


def _ends(result: Array) -> tuple[float, float] | None:
    if result.dtype.kind == "f":
        return None
    info: Any = np.iinfo(result.dtype)
    return float(info.min), float(info.max)


def _number(read: Mapping[int, Array], place: int) -> float:
    return float(read[place].reshape(-1)[0]) if place in read else 0.0


def _row(read: Mapping[int, Array], place: int) -> F64:
    if place not in read:
        return np.zeros(1)
    out: F64 = read[place].astype(np.float64).reshape(-1)
    return out


def _matmul(places: tuple[int, ...], made: tuple[int, int] | None) -> _Products:
    """places: of codes, scale and zero point of both factors. made: of the result."""

    def products(_: Member, read: Mapping[int, Array], result: Array) -> list[_Product]:
        a, sa, za, b, sb, zb = places
        if read[b].ndim != 2 or not _are_mixed(read[a], read[b]):
            return []
        scale = _number(read, sa) * _row(read, sb)
        zero = 0.0
        if made is not None:
            scale, zero = scale / _number(read, made[0]), _number(read, made[1])
        columns = read[b].astype(np.int32)
        rows = read[a].reshape(-1, columns.shape[0]).astype(np.int32)
        expected = result.astype(np.float64).reshape(len(rows), -1)
        bias = np.zeros(1)
        if made is None and 6 in read:
            bias = _row(read, 6) / scale
        low, high = np.asarray(_number(read, za)), _row(read, zb)
        return [_Product(rows, columns, expected, low, high, scale, bias, zero, _ends(result))]

    return products


def _measured(member: Member, read: Mapping[int, Array], result: Array) -> list[_Product]:
    """The product of a node that quantises its input itself, by the input's own range."""
    codes, scale, zero = measured(read[0])
    as_fused: dict[int, Array] = {
        0: codes.astype(np.uint8), 2: np.asarray(scale), 4: np.asarray(zero)
    }  # fmt: skip
    for place, own in ((1, 1), (3, 2), (5, 3), (6, 4)):
        if own in read:
            as_fused[place] = read[own]
    return _matmul((0, 2, 4, 1, 3, 5), None)(member, as_fused, result)


def _convolution(member: Member, read: Mapping[int, Array], result: Array) -> list[_Product]:
    """A product for each order in which a kernel may lay out the terms of a window."""
    stated = member.attributes
    x, weight = read[0], read[3]
    if stated.get("channels_last"):
        x, result = np.moveaxis(x, -1, 1), np.moveaxis(result, -1, 1)
    group, rank = int(stated.get("group", 1)), weight.ndim - 2
    if not _are_mixed(x, weight):
        return []
    if group != 1 or rank != 2 or stated.get("auto_pad", "NOTSET") not in ("", "NOTSET"):
        return []
    pads = stated.get(_PADS) or [0] * (2 * rank)
    strides = stated.get("strides") or [1] * rank
    dilations = stated.get("dilations") or [1] * rank
    around = [(0, 0), (0, 0), *((pads[k], pads[k + rank]) for k in range(rank))]
    padded = np.pad(x.astype(np.int32), around, constant_values=int(_number(read, 2)))
    spans = [(n - 1) * d + 1 for n, d in zip(weight.shape[2:], dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    expected = np.moveaxis(result, 1, -1).astype(np.float64).reshape(-1, weight.shape[0])
    scale = _number(read, 1) * _row(read, 4) / _number(read, 6)
    out = []
    for of_window, of_weight in (
        ((0, 2, 3, 4, 5, 1), (2, 3, 1, 0)),
        ((0, 2, 3, 1, 4, 5), (1, 2, 3, 0)),
    ):
        rows = windows.transpose(of_window).reshape(len(expected), -1)
        columns = weight.astype(np.int32).transpose(of_weight).reshape(-1, weight.shape[0])
        low, high = np.asarray(_number(read, 2)), _row(read, 5)
        bias, zero = _row(read, 8), _number(read, 7)
        out.append(_Product(rows, columns, expected, low, high, scale, bias, zero, _ends(result)))
    return out


_Products = Callable[[Member, Mapping[int, Array], Array], list[_Product]]
_PRODUCTS: Mapping[str, _Products] = {
    "QLinearConv": _convolution,
    "QLinearMatMul": _matmul((0, 1, 2, 3, 4, 5), (6, 7)),
    "MatMulIntegerToFloat": _matmul((0, 2, 4, 1, 3, 5), None),
    "DynamicQuantizeMatMul": _measured,
}
