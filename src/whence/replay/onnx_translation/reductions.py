"""Reductions along axes, and running sums."""

from __future__ import annotations

import math
from typing import Any

from whence.replay.onnx_translation.writer import Value, Writer, Writes

_AXES_ARE_AN_INPUT = {"ReduceSum": 13}  # of the others since opset 18


def _axes(w: Writer) -> list[int]:
    """The axes that are reduced; none of an operator that then does nothing but its elements."""
    rank = w.rank(0)
    since = _AXES_ARE_AN_INPUT.get(w.node.op_type, 18)
    axes = w.listed(1, "axes", since=since)
    if axes:
        return sorted({w.axis(a, rank) for a in axes})
    return [] if w.whole("noop_with_empty_axes", 0) else list(range(rank))


def _total(w: Writer, x: Value, axes: list[int], dtype: str, keep: bool) -> Value:
    if not axes:
        return x
    kwargs: dict[str, Any] = {} if w.is_float(0) else {"dtype": {"dtype": dtype}}
    return w.do("sum.dim_IntList", x, axes, keep, **kwargs)


def _of_squares(w: Writer, axes: list[int], keep: bool) -> Value:
    return _total(w, w.mul(w(0), w(0)), axes, w.dtype(0), keep)


def _root_of_squares(w: Writer, axes: list[int], keep: bool) -> Value:
    total = _of_squares(w, axes, keep)
    if w.is_float(0):
        return w.do("sqrt.default", total)
    return w.cast(w.do("sqrt.default", w.cast(total, "float64")), w.dtype(0))


def _mean(w: Writer, axes: list[int], keep: bool) -> Value:
    if w.is_float(0):
        return w.do("mean.dim", w(0), axes, keep) if axes else w(0)
    count = math.prod(w.extent(0, a) for a in axes)
    total = _total(w, w(0), axes, w.dtype(0), keep)
    return w.cast(w.do("div.Scalar_mode", total, count, rounding_mode="trunc"), w.dtype(0))


def _product(w: Writer, axes: list[int], keep: bool) -> Value:
    value = w(0)
    kwargs: dict[str, Any] = {} if w.is_float(0) else {"dtype": {"dtype": w.dtype(0)}}
    for axis in reversed(axes):
        value = w.do("prod.dim_int", value, axis, keep, **kwargs)
    return value


def _extreme(name: str, empty: str) -> Any:
    def reduced(w: Writer, axes: list[int], keep: bool) -> Value:
        if not axes:
            return w(0)
        if 0 in (w.extent(0, a) for a in axes):
            if not w.is_float(0):
                raise w.refuse("of no integers")
            shape = [1 if a in axes else n for a, n in enumerate(w.shape(0))]
            shape = shape if keep else [n for a, n in enumerate(shape) if a not in axes]
            return w.do("full.default", shape, {"float": empty}, dtype={"dtype": w.dtype(0)})
        return w.do(name, w(0), axes, keep)

    return reduced


def _log_sum_exp(w: Writer, axes: list[int], keep: bool) -> Value:
    _of_floats(w)
    return w.do("logsumexp.default", w(0), axes, keep) if axes else w(0)


def _log_sum(w: Writer, axes: list[int], keep: bool) -> Value:
    _of_floats(w)
    return w.do("log.default", _total(w, w(0), axes, w.dtype(0), keep))


def _of_floats(w: Writer) -> None:
    if not w.is_float(0):
        raise w.refuse("engines round logarithms of integers in several ways")


def _reduced(function: Any) -> Writes:
    def write(w: Writer) -> Value:
        value: Value = function(w, _axes(w), bool(w.whole("keepdims", 1)))
        return value

    return write


def _of_sizes(w: Writer, axes: list[int], keep: bool) -> Value:
    return _total(w, w.do("abs.default", w(0)), axes, w.dtype(0), keep)


def _sum(w: Writer, axes: list[int], keep: bool) -> Value:
    return _total(w, w(0), axes, w.dtype(0), keep)


def _place(name: str) -> Writes:
    """The number of the largest or smallest element, the first or the last of equal ones."""

    def write(w: Writer) -> Value:
        axis = w.axis(w.whole("axis", 0), w.rank(0))
        keep = bool(w.whole("keepdims", 1))
        if not w.whole("select_last_index", 0):
            return w.do(name, w(0), axis, keep)
        turned = w.do("flip.default", w(0), [axis])
        return w.do("rsub.Scalar", w.do(name, turned, axis, keep), w.extent(0, axis) - 1)

    return write


def _running(name: str, neutral: int) -> Writes:
    def write(w: Writer) -> Value:
        rank = w.rank(0)
        axis = w.axis(int(w.number_of(1)), rank)
        kwargs: dict[str, Any] = {} if w.is_float(0) else {"dtype": {"dtype": w.dtype(0)}}
        value = w(0)
        if backwards := w.whole("reverse", 0):
            value = w.do("flip.default", value, [axis])
        if w.whole("exclusive", 0):
            value = w.part(value, axis, 0, w.extent(0, axis) - 1)
            sides = [0, 0] * (rank - 1 - axis) + [1, 0]
            value = w.do("constant_pad_nd.default", value, sides, neutral)
        value = w.do(name, value, axis, **kwargs)
        return w.do("flip.default", value, [axis]) if backwards else value

    return write


KNOWN: dict[str, Writes] = {
    "ReduceSum": _reduced(_sum),
    "ReduceMean": _reduced(_mean),
    "ReduceMax": _reduced(_extreme("amax.default", "-inf")),
    "ReduceMin": _reduced(_extreme("amin.default", "inf")),
    "ReduceProd": _reduced(_product),
    "ReduceL1": _reduced(_of_sizes),
    "ReduceL2": _reduced(_root_of_squares),
    "ReduceSumSquare": _reduced(_of_squares),
    "ReduceLogSum": _reduced(_log_sum),
    "ReduceLogSumExp": _reduced(_log_sum_exp),
    "ArgMax": _place("argmax.default"),
    "ArgMin": _place("argmin.default"),
    "CumSum": _running("cumsum.default", 0),
    "CumProd": _running("cumprod.default", 1),
}
