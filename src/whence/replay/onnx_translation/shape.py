"""Operators that make, cut, join, pad and lay out tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from whence import dtypes
from whence.replay.onnx_translation.elementwise import stored
from whence.replay.onnx_translation.writer import UNSIGNED, Writer, Writes
from whence.replay.program_writing import Tensor


def _reshape(w: Writer) -> Tensor:
    wanted = w.listed(1, "shape", since=5)
    if wanted is None:
        raise w.refuse("its shape is not known")
    keeps = not w.whole("allowzero", 0)
    extents = [w.extent(0, i) if n == 0 and keeps else n for i, n in enumerate(wanted)]
    if -1 in extents and 0 in extents:
        if keeps:
            extents[extents.index(-1)] = 0
        else:
            raise w.refuse("a shape with both 0 and -1")
    return w(0).reshape(extents)


def _flatten(w: Writer) -> Tensor:
    axis, rank = w.whole("axis", 1), w.rank(0)
    if axis != rank:
        axis = w.axis(axis, rank)
    shape = w.shape(0)
    return w(0).reshape([math.prod(shape[:axis]), math.prod(shape[axis:])])


def _squeeze(w: Writer) -> Tensor:
    axes, shape = w.listed(1, "axes", since=13), w.shape(0)
    if axes is None:
        return w(0).reshape([n for n in shape if n != 1])
    gone = {w.axis(a, len(shape)) for a in axes}
    if any(shape[a] != 1 for a in gone):
        raise w.refuse(f"axes {axes} of {shape} have more than one element")
    return w(0).reshape([n for a, n in enumerate(shape) if a not in gone])


def _unsqueeze(w: Writer) -> Tensor:
    axes = w.listed(1, "axes", since=13)
    if axes is None:
        raise w.refuse("its axes are not known")
    shape = iter(w.shape(0))
    rank = w.rank(0) + len(axes)
    new = {w.axis(a, rank) for a in axes}
    return w(0).reshape([1 if a in new else next(shape) for a in range(rank)])


def _transpose(w: Writer) -> Tensor:
    return w(0).permute(w.integers("perm", list(range(w.rank(0)))[::-1]))


def _expand(w: Writer) -> Tensor:
    shape = np.broadcast_shapes(w.shape(0), tuple(w.integers_of(1)))
    return w(0).expand(list(shape)).clone()


def _tile(w: Writer) -> Tensor:
    if w.opset < 6:
        repeats = [1] * w.rank(0)
        repeats[int(w.number_of(2))] = int(w.number_of(1))
    else:
        repeats = w.integers_of(1)
    return w(0).repeat(repeats)


def _concat(w: Writer) -> Tensor:
    axis = w.whole("axis", 1) if w.opset < 4 else w.whole("axis")
    parts = [w(place) for place in range(w.count)]
    return w.do("cat", parts, w.axis(axis, w.rank(0)))


def _split(w: Writer) -> list[Tensor | None]:
    axis = w.axis(w.whole("axis", 0), w.rank(0))
    extent, count = w.extent(0, axis), len(w.node.outputs)
    sizes = w.listed(1, "split", since=13)
    if w.opset < 2 and w.has(1):
        sizes = w.integers_of(1)
    if sizes is None:
        count = w.whole("num_outputs", count)
        each = -(-extent // count)
        if w.opset < 18 and extent % count:
            raise w.refuse(f"{extent} elements in {count} equal parts")
        sizes = [each] * (extent // each) if each else [0] * count
        sizes += [extent % each] if each and extent % each else []
    return [*w.several("split_with_sizes.default", len(sizes), w(0), sizes, axis)]


def _depth_to_space(w: Writer) -> Tensor:
    n, c, *rest = w.shape(0)
    height, width = rest
    b = w.whole("blocksize")
    inner = c // (b * b)
    if w.text("mode", "DCR") == "CRD":
        value = w(0).reshape([n, inner, b, b, height, width]).permute([0, 1, 4, 2, 5, 3])
    else:
        value = w(0).reshape([n, b, b, inner, height, width]).permute([0, 3, 4, 1, 5, 2])
    return value.reshape([n, inner, height * b, width * b])


def _space_to_depth(w: Writer) -> Tensor:
    n, c, height, width = w.shape(0)
    b = w.whole("blocksize")
    rows, columns = height // b, width // b
    if w.text("mode", "DCR") != "DCR":
        raise w.refuse("in this mode it is not known to whence")
    value = w(0).reshape([n, c, rows, b, columns, b]).permute([0, 3, 5, 1, 2, 4])
    return value.reshape([n, c * b * b, rows, columns])


def _extents(w: Writer, axes: Sequence[int]) -> list[Any]:
    """Returns extents as operands that the program reads off its input; as numbers for
    a parameter.
    """
    read = w.raw(0).operand
    if "in" in read:
        return [{"dim": [read["in"], axis]} for axis in axes]
    return [w.operand(0).shape[axis] for axis in axes]


def _shape(w: Writer) -> Tensor:
    rank = w.rank(0)
    start, end = w.whole("start", 0), w.whole("end", rank)
    axes = range(rank)[start:end]
    if not axes:
        w.raw(0)
        return w.do("zeros", [0], dtype="int64")
    return w.do("stack", [w.scalar(n, "int64") for n in _extents(w, axes)])


def _size(w: Writer) -> Tensor:
    value: Any = 1
    if rank := w.rank(0):
        if rank > 8:
            raise w.refuse("a tensor of more than 8 axes")
        value = {"mul": _extents(w, range(rank))}
    return w.scalar(value, "int64")


def _constant_of_shape(w: Writer) -> Tensor:
    filled = np.asarray(w.attribute("value", np.zeros(1, np.float32))).reshape(-1)
    return full(w, w.integers_of(0), filled)


def full(w: Writer, shape: Sequence[int], filled: Any) -> Tensor:
    """Returns a tensor filled with the one element of an array."""
    dtype = dtypes.of(filled).name
    number = filled.tolist()[0]
    dtype = "int64" if dtype in ("uint16", "uint32") else dtype
    if dtype == "uint64":
        raise w.refuse("torch does not compute with uint64")
    return w.do("full", list(shape), number, dtype=dtype)


def _constant(w: Writer) -> Tensor:
    """Returns the few numbers of an attribute as a tensor."""
    attributes = w.node.attributes
    if isinstance(attributes.get("value"), np.ndarray):
        array = attributes["value"]
    elif "value_float" in attributes or "value_floats" in attributes:
        numbers = attributes.get("value_floats", attributes.get("value_float"))
        array = np.asarray(numbers, np.float32)
    elif "value_int" in attributes or "value_ints" in attributes:
        array = np.asarray(attributes.get("value_ints", attributes.get("value_int")), np.int64)
    else:
        raise w.refuse("what it holds is not known")
    flat = array.reshape(-1)
    if flat.size > 4096:
        raise w.refuse("it holds more than 4,096 elements")
    if not flat.size:
        return w.do("zeros", list(array.shape), dtype=dtypes.of(array).name)
    if (flat == flat[0]).all():
        return full(w, array.shape, flat)
    return w.do("cat", [full(w, [1], e.reshape(1)) for e in flat]).reshape(array.shape)


def _range(w: Writer) -> Tensor:
    start, limit, delta = (w.elements(place).reshape(-1)[0] for place in range(3))
    count = max(0, math.ceil((limit - start).item() / delta.item()))
    if w.wants(0) and w.made().shape != (count,):
        raise w.refuse(f"it made {w.made().shape} elements, and says {count}")
    steps = w.counted(count)
    if w.is_float(0):
        steps = steps.to(w.dtype(0))
    return (w(0) + steps * w(2)).to(w.dtype(0))


def _eye_like(w: Writer) -> Tensor:
    rows, columns = w.shape(0)
    code = w.attribute("dtype", None)
    dtype = w.operand(0).dtype if code is None else stored(w, int(code))
    dtype = "int64" if dtype in UNSIGNED else dtype
    k = w.whole("k", 0)
    ones = w.do("ones", [rows, columns], dtype="bool")
    return ones.triu(k).tril(k).to(dtype)


def _trilu(w: Writer) -> Tensor:
    k = int(w.number_of(1)) if w.has(1) else 0
    k = max(-(1 << 31), min(k, (1 << 31) - 1))
    return w.do("triu.default" if w.whole("upper", 1) else "tril.default", w(0), k)


def _pads(w: Writer) -> tuple[list[int], list[int]]:
    """Returns the pads before and behind each axis."""
    rank = w.rank(0)
    if w.opset < 2:
        pads = w.integers("paddings")
    elif w.opset < 11 and w.node.domain in ("", "ai.onnx"):
        pads = w.integers("pads")
    else:
        pads = w.integers_of(1)
    axes = [w.axis(a, rank) for a in w.integers_of(3)] if w.has(3) else list(range(rank))
    if len(pads) != 2 * len(axes):
        raise w.refuse(f"{len(pads)} pads for {len(axes)} axes")
    before, behind = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        before[axis], behind[axis] = pads[i], pads[len(axes) + i]
    return before, behind


def _pad(w: Writer) -> Tensor:
    before, behind = _pads(w)
    mode = w.text("mode", "constant")
    if mode == "constant":
        number: Any = w.attribute("value", 0.0) if w.opset < 11 else 0
        if w.opset >= 11 and w.has(2):
            number = w.number_of(2)
        sides = [n for pair in reversed([*zip(before, behind)]) for n in pair]
        return w(0).constant_pad_nd(sides, number)
    if min([*before, *behind]) < 0:
        raise w.refuse(f"negative pads in mode {mode} are not known to whence")
    value = w(0)
    for axis, (first, last) in enumerate(zip(before, behind)):
        if first or last:
            places = _mirrored(w, mode, w.extent(0, axis), first, last)
            value = value.index_select(axis, places)
    return value


def _mirrored(w: Writer, mode: str, extent: int, first: int, last: int) -> Tensor:
    """Returns, for each element of the padded axis, the index of its source element."""
    if not extent:
        raise w.refuse("an empty axis")
    places = w.do("arange.start_step", -first, extent + last, 1, dtype="int64")
    if mode == "edge" or (mode == "reflect" and extent == 1):
        return places.clamp(0, extent - 1)
    if mode == "wrap":
        return places % extent
    if mode != "reflect":
        raise w.refuse(f"mode {mode[:40]} is not known to whence")
    end = extent - 1
    folded = places % (2 * end) - end
    return end - folded.abs()


def _center_crop_pad(w: Writer) -> Tensor:
    rank, wanted = w.rank(0), w.integers_of(1)
    axes = [w.axis(a, rank) for a in w.integers("axes", list(range(rank)))]
    value = w(0)
    for axis, extent in zip(axes, wanted):
        actual = w.extent(0, axis)
        if extent < actual:
            start = (actual - extent) // 2
            value = value.part(axis, start, start + extent)
        elif extent > actual:
            first = (extent - actual) // 2
            sides = [0, 0] * (rank - 1 - axis) + [first, extent - actual - first]
            value = value.constant_pad_nd(sides, 0)
    return value


def _reordered(w: Writer) -> Tensor:
    """Copies the tensor for a change of memory layout; axes move only where one side has channels
    last.
    """
    rank = w.rank(0)
    if not w.whole("channels_last", 0):
        value = w(0)
    elif w.node.op_type == "ReorderInput":
        value = w(0).channels_first(rank)
    else:
        value = w(0).channels_last(rank)
    return value.clone()


KNOWN: dict[str, Writes] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Shape": _shape,
    "Size": _size,
    "ConstantOfShape": _constant_of_shape,
    "Constant": _constant,
    "Range": _range,
    "EyeLike": _eye_like,
    "Trilu": _trilu,
    "com.microsoft.Trilu": _trilu,
    "Pad": _pad,
    "com.microsoft.Pad": _pad,
    "CenterCropPad": _center_crop_pad,
    "com.microsoft.nchwc.ReorderInput": _reordered,
    "com.microsoft.nchwc.ReorderOutput": _reordered,
}
ANY_BITS = frozenset({
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Concat", "Split",
    "DepthToSpace", "SpaceToDepth", "Shape", "Size", "Trilu", "CenterCropPad",
})  # fmt: skip
