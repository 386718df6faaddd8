"""Reductions along axes, and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor

_AXES_ARE_AN_INPUT = {"ReduceSum": 13}  # of the others since opset 18


def _axes(w: Writer) -> list[int]:
    """Returns the axes that are reduced; [] when the node has none and its attribute makes it a
    no-op on empty axes.
    """
    rank = w.rank(0)
    since = _AXES_ARE_AN_INPUT.get(w.node.op_type, 18)
    axes = w.listed(1, "axes", since=since)
    if axes:
        return sorted({w.axis(a, rank) for a in axes})
    return [] if w.whole("noop_with_empty_axes", 0) else list(range(rank))


def _exact(w: Writer) -> dict[str, Any]:
    """Returns the keyword that keeps sums of integers in their dtype."""
    return {} if w.is_float(0) else {"dtype": w.dtype(0)}


def _total(w: Writer, x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keep, **_exact(w)) if axes else x


def _root(w: Writer, total: Tensor) -> Tensor:
    return total.sqrt() if w.is_float(0) else total.to("float64").sqrt().to(w.dtype(0))


def _mean(w: Writer, axes: list[int], keep: bool) -> Tensor:
    if w.is_float(0):
        return w(0).mean(axes, keep) if axes else w(0)
    count = math.prod(w.extent(0, a) for a in axes)
    return _total(w, w(0), axes, keep).div(count, rounding_mode="trunc").to(w.dtype(0))


def _product(w: Writer, axes: list[int], keep: bool) -> Tensor:
    value = w(0)
    for axis in reversed(axes):
        value = value.prod(axis, keep, **_exact(w))
    return value


def _extreme(name: str, empty: float) -> Any:
    def reduced(w: Writer, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return w(0)
        if 0 in (w.extent(0, a) for a in axes):
            if not w.is_float(0):
                raise w.refuse("of no integers")
            shape = [1 if a in axes else n for a, n in enumerate(w.shape(0))]
            shape = shape if keep else [n for a, n in enumerate(shape) if a not in axes]
            return w.do("full", shape, empty, dtype=w.dtype(0))
        return w.do(name, w(0), axes, keep)

    return reduced


def _log_sum_exp(w: Writer, axes: list[int], keep: bool) -> Tensor:
    _of_floats(w)
    return w(0).logsumexp(axes, keep) if axes else w(0)


def _of_floats(w: Writer) -> None:
    if not w.is_float(0):
        raise w.refuse("engines round logarithms of integers in several ways")


def _log(w: Writer, total: Tensor) -> Tensor:
    _of_floats(w)
    return total.log()


def _reduced(function: Callable[[Writer, list[int], bool], Tensor]) -> Writes:
    return lambda w: function(w, _axes(w), bool(w.whole("keepdims", 1)))


def _sum(
    of: Callable[[Tensor], Tensor], then: Callable[[Writer, Tensor], Tensor] | None = None
) -> Writes:
    """Writes then(sum of of(x)): a function of the sum of a function of each element."""

    def reduced(w: Writer, axes: list[int], keep: bool) -> Tensor:
        total = _total(w, of(w(0)), axes, keep)
        return then(w, total) if then is not None else total

    return _reduced(reduced)


def _place(name: str) -> Writes:
    """Returns the index of the largest or smallest element; of equal ones, the first or
    the last.
    """

    def write(w: Writer) -> Tensor:
        axis = w.axis(w.whole("axis", 0), w.rank(0))
        keep = bool(w.whole("keepdims", 1))
        if not w.whole("select_last_index", 0):
            return w.do(name, w(0), axis, keep)
        turned = w(0).flip([axis])
        return w.extent(0, axis) - 1 - w.do(name, turned, axis, keep)

    return write


def _running(name: str, neutral: int) -> Writes:
    def write(w: Writer) -> Tensor:
        rank = w.rank(0)
        axis = w.axis(int(w.number_of(1)), rank)
        value = w(0)
        if backwards := w.whole("reverse", 0):
            value = value.flip([axis])
        if w.whole("exclusive", 0):
            value = value.part(axis, 0, w.extent(0, axis) - 1)
            sides = [0, 0] * (rank - 1 - axis) + [1, 0]
            value = value.constant_pad_nd(sides, neutral)
        value = w.do(name, value, axis, **_exact(w))
        return value.flip([axis]) if backwards else value

    return write


KNOWN: dict[str, Writes] = {
    "ReduceSum": _sum(lambda x: x),
    "ReduceMean": _reduced(_mean),
    "ReduceMax": _reduced(_extreme("amax.default", -math.inf)),
    "ReduceMin": _reduced(_extreme("amin.default", math.inf)),
    "ReduceProd": _reduced(_product),
    "ReduceL1": _sum(lambda x: x.abs()),
    "ReduceL2": _sum(lambda x: x * x, _root),
    "ReduceSumSquare": _sum(lambda x: x * x),
    "ReduceLogSum": _sum(lambda x: x, _log),
    "ReduceLogSumExp": _reduced(_log_sum_exp),
    "ArgMax": _place("argmax.default"),
    "ArgMin": _place("argmin.default"),
    "CumSum": _running("cumsum.default", 0),
    "CumProd": _running("cumprod.default", 1),
}
