"""Dims expressions: how a tensor of one run is made from tensors of the other. Read, shown, carried
out; never evaluated as code.

    x                                  the tensor itself
    x[..., 0:192]                      a part of it (integers, slices, ...)
    x.T                                all axes reversed
    t d -> 1 t d                       axes moved, merged, split, added, dropped, as in einops; "rearrange(x, 'b (h d) -> h b d', h=9)"
    take(x, [0, 2, 1], axis=0)         indices along an axis
    cat(q, k, v, axis=-1)              concatenated; "*ranks" stands for all tensors bound to that name
    a + b                              summed in float64 and rounded once; "sum(*ranks)" for many
    x / 2                              divided by a whole number, in float64 and rounded once
    pad(x, axis=-1, to=12, value=0)    filled up behind

They nest. An expression knows the shape it makes from shapes alone, so that a plan is made without
data.
"""  # noqa: E501

from whence.align.dims.expressions import (
    Bound,
    Cat,
    Cut,
    Name,
    Node,
    Pad,
    Rearrange,
    Reverse,
    Shape,
    Share,
    Star,
    Sum,
    Take,
    Unfit,
    keeps_order,
    names,
)
from whence.align.dims.parsing import parse, substituted

__all__ = [
    "Bound",
    "Cat",
    "Cut",
    "Name",
    "Node",
    "Pad",
    "Rearrange",
    "Reverse",
    "Shape",
    "Share",
    "Star",
    "Sum",
    "Take",
    "Unfit",
    "keeps_order",
    "names",
    "parse",
    "substituted",
]
