"""Translates Paddle operators to programs of aten operators, so that a call of a Paddle run can be
replayed like any other.

The translation reads the operator's type, attributes and operands alone; Paddle is not needed.
Slots are those of the operator: "X", "Y" of a ProgramDesc, places "0", "1" of PIR. Semantics: the
operators' reference documentation; a fused operator is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whence import dtypes
from whence.errors import ReplayRefused
from whence.records import Program
from whence.records.marks import Mark, mark
from whence.replay.program_writing import ProgramWriter, Tensor

TRANSLATED = mark(Mark.TRANSLATED, "Paddle")
"""The note of a program that was not recorded but translated from the operator's description: it
uses other kernels, so it need not agree bit by bit.
"""

_MISSING = object()
_CODES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64",
    20: "uint8", 21: "int8", 22: "bfloat16", 23: "complex64", 24: "complex128",
}  # fmt: skip
_CHANNELS_FIRST = ("NCHW", "AnyLayout")
_NAMED = {"float": "float32", "double": "float64", "int": "int32", "half": "float16"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads. slot: of the call, "input..." or "param..."."""

    slot: str
    dtype: str
    shape: tuple[int, ...]


class _Writer(ProgramWriter):
    """The program while it is written. operands, output_shapes: by slot of the operator."""

    def __init__(
        self,
        op_type: str,
        attributes: Mapping[str, Any],
        operands: Mapping[str, Operand],
        output_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.op_type, self.attributes = op_type, attributes
        self.operands, self.output_shapes = operands, output_shapes

    def has(self, name: str, place: int) -> bool:
        """Whether there is an operand of this name (ProgramDesc) or at this place (PIR)."""
        return self._key(name, place) is not None

    def _key(self, name: str, place: int) -> str | None:
        return next((k for k in (name, name.lower(), str(place)) if k in self.operands), None)

    def operand(self, name: str, place: int) -> Operand:
        key = self._key(name, place)
        if key is None:
            raise ReplayRefused(f"{self.op_type}: its input {name} was not captured")
        return self.operands[key]

    def __call__(self, name: str, place: int) -> Tensor:
        """Returns the operand of this name (ProgramDesc) or at this place (PIR, where it may be a
        number in the program).
        """
        number = self.attributes.get(f"input.{place}") if self._key(name, place) is None else None
        if isinstance(number, (int, float)) and math.isfinite(number):
            like = next((o.dtype for o in self.operands.values()), "float32")
            return self.do("scalar_tensor", number, dtype=like)
        return self.tensor(self.operand(name, place))

    @property
    def x(self) -> Tensor:
        """The main operand: "X", or place 0."""
        return self("X", 0)

    def with_bias(self, value: Tensor, name: str = "Bias", place: int = 2) -> Tensor:
        """Returns the value plus an operand, where the operator has that operand."""
        return value + self(name, place) if self.has(name, place) else value

    def made_shape(self) -> Sequence[int]:
        """Returns the shape of the output. Raises ReplayRefused when it is not known."""
        shape = self.output_shapes.get("Out", self.output_shapes.get("0"))
        if shape is None:
            raise ReplayRefused(f"{self.op_type}: the shape of what it made is not known")
        return shape

    def is_set(self, *names: str) -> bool:
        """Whether a switch, off by default, is on."""
        return bool(self.attribute(*names, default=False))

    def tensor(self, operand: Operand) -> Tensor:
        return self.read(operand.slot, operand.dtype)

    def listed(self, name: str, place: int) -> list[Operand]:
        """Returns the operands of a slot that takes a list."""
        names = [
            self.operands[f"{key}.{i}"]
            for key in (name, name.lower(), str(place))
            for i in range(len(self.operands))
            if f"{key}.{i}" in self.operands
        ]
        return names or [self.operand(name, place)]

    def shape(self, name: str, place: int) -> tuple[int, ...]:
        return self.operand(name, place).shape

    def attribute(self, *names: str, default: Any = _MISSING) -> Any:
        """Returns the first of these attributes that is present. Raises ReplayRefused when none is
        and there is no default.
        """
        value = next(
            (self.attributes[n] for n in names if self.attributes.get(n) is not None), default
        )
        if value is _MISSING:
            raise ReplayRefused(f"{self.op_type}: its attribute {names[0]} is not known")
        return value

    def number(self, *names: str, default: Any = _MISSING) -> float:
        value = self.attribute(*names, default=default)
        try:
            return float(value[0] if isinstance(value, (list, tuple)) else value)
        except (TypeError, ValueError, IndexError):
            raise ReplayRefused(
                f"{self.op_type}: its attribute {names[0]} is not a number ({str(value)[:40]})"
            ) from None

    def whole(self, *names: str, default: Any = _MISSING) -> int:
        return int(self.number(*names, default=default))

    def integers(self, *names: str, default: Any = _MISSING) -> list[int]:
        value = self.attribute(*names, default=default)
        try:
            return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
        except (TypeError, ValueError):
            raise ReplayRefused(
                f"{self.op_type}: its attribute {names[0]} is not a list of integers "
                f"({str(value)[:40]})"
            ) from None


def program(
    op_type: str,
    attributes: Mapping[str, Any],
    operands: Mapping[str, Operand],
    outputs: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Program:
    """Returns the program that one call of a Paddle operator computes.

    op_type: without dialect ("matmul"). operands: by slot of the operator. outputs: slot of the
    operator -> slot of the call. shapes: of these outputs, by slot of the operator. Raises
    ReplayRefused for an unknown operator or an unsupported use of a known one.
    """
    write = _KNOWN.get(op_type)
    if write is None:
        raise ReplayRefused(f"operator {op_type} of Paddle is not known to whence")
    writer = _Writer(op_type, attributes, operands, shapes)
    try:
        results = write(writer)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ReplayRefused(
            f"{op_type}: its attributes make no sense ({type(error).__name__}: {error})"
        ) from error
    if isinstance(results, Tensor):
        results = dict.fromkeys(("Out", "out", "Output", "Y", "y", "0"), results)
    written = [(slot, results[key]) for key, slot in outputs.items() if key in results]
    if not written:
        raise ReplayRefused(
            f"{op_type}: of its outputs {', '.join(outputs)} none is known to whence"
        )
    return writer.written(written, {o.slot: o.dtype for o in operands.values()}, TRANSLATED)


def known() -> tuple[str, ...]:
    """Returns the operators whose calls can be replayed."""
    return tuple(_KNOWN)


# ---- products


def _swapped(value: Tensor, rank: int, swap: Any) -> Tensor:
    return value.transpose(-1, -2) if swap and rank > 1 else value


def _matmul(w: _Writer) -> Tensor:
    sides = []
    for place, name in enumerate("XY"):
        small = name.lower()
        swap = w.attribute(
            f"trans_{small}", f"transpose_{small}", f"transpose_{name}", default=False
        )
        sides.append(_swapped(w(name, place), len(w.shape(name, place)), swap))
    return sides[0] @ sides[1] * w.number("alpha", default=1.0)


def _reshaped(
    value: Tensor, shape: Sequence[int], to: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Paddle's reshape: 0 keeps an extent, -1 takes what is left."""
    filled = [
        shape[i] if n == 0 and 0 not in shape and i < len(shape) else n for i, n in enumerate(to)
    ]
    if -1 in filled:
        others = math.prod(n for n in filled if n != -1)
        filled[filled.index(-1)] = math.prod(shape) // others if others else 0
    return (value.reshape(filled), tuple(filled))


def _laid(
    w: _Writer, value: Tensor, shape: tuple[int, ...], side: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Applies the reshape and transpose that a fused matmul includes for one of its sides ("x",
    "y", "out"); returns (value, its shape).
    """
    reshape = w.integers(f"fused_reshape_{side}", f"fused_reshape_{side.capitalize()}", default=[])
    perm = w.integers(f"fused_transpose_{side}", f"fused_transpose_{side.capitalize()}", default=[])
    if side == "out":  # the other way round
        if perm:
            value, shape = (value.permute(perm), tuple(shape[p] for p in perm))
        return _reshaped(value, shape, reshape) if reshape else (value, shape)
    if reshape:
        value, shape = _reshaped(value, shape, reshape)
    return (value.permute(perm), tuple(shape[p] for p in perm)) if perm else (value, shape)


def _fused_matmul(w: _Writer) -> Tensor:
    _unscaled(w)
    sides, shapes = [], []
    for place, name in enumerate("XY"):
        value, shape = _laid(w, w(name, place), w.shape(name, place), name.lower())
        if w.is_set(f"trans_{name.lower()}", f"transpose_{name.lower()}") and len(shape) > 1:
            value, shape = value.transpose(-1, -2), (*shape[:-2], shape[-1], shape[-2])
        sides.append(value)
        shapes.append(shape)
    out = sides[0] @ sides[1] * w.number("matmul_alpha", "alpha", default=1.0)
    if min(map(len, shapes)) > 1:
        batch = max(shapes, key=len)[:-2]
        out, _ = _laid(w, out, (*batch, shapes[0][-2], shapes[1][-1]), "out")
    return _activated(w, w.with_bias(out, "ResidualData"), "fuse_activation")


def _unscaled(w: _Writer) -> None:
    """Raises ReplayRefused when a oneDNN operator has scales, that is, for its int8 form."""
    scales = (
        w.attribute(name, default=1.0) for name in ("scale_x", "scale_y", "scale_out", "scale_in")
    )
    if w.is_set("force_fp32_output") or any(s != 1.0 for s in scales):
        raise ReplayRefused(
            f"{w.op_type}: with scales of quantised tensors it is not known to whence"
        )


def _activated(w: _Writer, value: Tensor, *attributes: str) -> Tensor:
    """Applies the activation and then the output factor that are fused behind an operator. The
    first of these attributes that is not empty names the activation.
    """
    names = (str(w.attribute(name, default="")) for name in attributes)
    name = next((name for name in names if name), "")
    return _active(w, value, name) * w.number("fused_output_scale", default=1.0)


def _active(w: _Writer, value: Tensor, name: str) -> Tensor:
    alpha, beta = w.number("fuse_alpha", default=0.0), w.number("fuse_beta", default=0.0)
    if name in ("", "identity", "none"):
        return value
    if name in ("gelu", "gelu_erf", "gelu_tanh"):
        return value.gelu(approximate="tanh" if name == "gelu_tanh" else "none")
    if name in ("leaky_relu", "swish", "hard_sigmoid") and (alpha or beta):
        if name == "leaky_relu":
            return value.leaky_relu(alpha)
        inner = (value * alpha).sigmoid()
        if name == "swish":
            return value * inner
        raise ReplayRefused(f"{w.op_type}: fused hard_sigmoid is not known to whence")
    plain = {"relu", "silu", "tanh", "sigmoid", "mish", "relu6", "sqrt", "abs", "exp"} & {name}
    if name in ("swish", "silu"):
        return value.silu()
    if not plain:
        raise ReplayRefused(
            f"{w.op_type}: the activation {name[:40]} fused into it is not known to whence"
        )
    return w.do(f"{name}.default", value)


def _mul(w: _Writer) -> Tensor:
    x, y = w.shape("X", 0), w.shape("Y", 1)
    cut, cut_y = w.whole("x_num_col_dims", default=1), w.whole("y_num_col_dims", default=1)
    a = w.x.reshape([math.prod(x[:cut]), math.prod(x[cut:])])
    b = w("Y", 1).reshape([math.prod(y[:cut_y]), math.prod(y[cut_y:])])
    return (a @ b).reshape([*x[:cut], *y[cut_y:]])


def _fc(w: _Writer) -> Tensor:
    _unscaled(w)
    if w.is_set("padding_weights"):
        raise ReplayRefused("fc: padded weights are not known to whence")
    x = w.shape("Input", 0)
    cut = w.whole("in_num_col_dims", default=1)
    out = w("Input", 0).reshape([*x[:cut], math.prod(x[cut:])]) @ w("W", 1)
    out = _activated(w, w.with_bias(out), "activation_type", "fuse_activation")
    to = w.integers("fused_reshape2_shape", default=[])
    return _reshaped(out, (*x[:cut], w.shape("W", 1)[-1]), to)[0] if to else out


def _gemm_epilogue(w: _Writer) -> Tensor:
    a = _swapped(w.x, 2, w.is_set("trans_x"))
    b = _swapped(w("Y", 1), 2, w.is_set("trans_y"))
    return _activated(w, a @ b + w("Bias", 2), "activation")


def _linear(w: _Writer) -> Tensor:
    return w.with_bias(w.x @ w("W", 1))


def _addmm(w: _Writer) -> Tensor:
    product = w("X", 1) @ w("Y", 2)
    alpha, beta = w.number("alpha", "Alpha", default=1.0), w.number("beta", "Beta", default=1.0)
    return w("Input", 0) * beta + product * alpha


def _conv(w: _Writer) -> Tensor:
    if w.attribute("data_format", default="NCHW") not in _CHANNELS_FIRST:
        raise ReplayRefused(
            f"{w.op_type}: data_format {w.attribute('data_format')} is not known to whence"
        )
    _unscaled(w)
    x, kernel = w.shape("Input", 0), w.shape("Filter", 1)
    strides = w.integers("strides", default=[1, 1])
    dilations = w.integers("dilations", default=[1, 1])
    pads = w.integers("paddings", default=[0, 0])
    how = w.attribute("padding_algorithm", default="EXPLICIT")
    value = w("Input", 0)
    if how == "VALID":
        pads = [0, 0]
    elif how == "SAME":
        pads, dilations = [], [1] * len(strides)
        for n, k, s in zip(x[2:], kernel[2:], strides):
            total = max((-(-n // s) - 1) * s + k - n, 0)
            pads += [total // 2, total - total // 2]
    if len(pads) == 2 * len(strides):
        before, behind = pads[::2], pads[1::2]
        if before == behind:
            pads = before
        else:
            value, pads = value.padded(before, behind, 0.0), [0] * len(strides)
    has_bias = w.has("Bias", 2) and w.op_type in ("fused_conv2d", "fused_conv2d_add_act", "conv2d")
    bias = w("Bias", 2) if has_bias else None
    out = value.conv2d(w("Filter", 1), bias, strides, pads, dilations, w.whole("groups", default=1))
    return _activated(w, w.with_bias(out, "ResidualData", 3), "activation", "fuse_activation")


def _pool(w: _Writer) -> Tensor:
    x = w.shape("X", 0)
    kind = w.attribute("pooling_type")
    sizes = w.integers("ksize", "kernel_size", "input.1")
    strides = w.integers("strides", default=[1, 1])
    pads = w.integers("paddings", default=[0, 0])
    pads = pads[::2] if len(pads) == 4 and pads[::2] == pads[1::2] else pads
    layout = w.attribute("data_format", default="NCHW")
    how = w.attribute("padding_algorithm", default="EXPLICIT")
    if layout not in _CHANNELS_FIRST or len(pads) != 2 or how not in ("EXPLICIT", "VALID"):
        raise ReplayRefused("pool2d: its layout or padding is not known to whence")
    if w.is_set("global_pooling"):
        sizes, strides, pads = list(x[2:]), list(x[2:]), [0, 0]
    if w.is_set("adaptive"):
        if kind != "avg":
            raise ReplayRefused("pool2d: adaptive maxima are not known to whence")
        return w.x.adaptive_avg_pool2d(sizes)
    ceil = w.is_set("ceil_mode")
    if kind == "max":
        return w.x.max_pool2d(sizes, strides, pads, [1, 1], ceil)
    return w.x.avg_pool2d(sizes, strides, pads, ceil, not w.attribute("exclusive", default=True))


# ---- element by element


def _elementwise(name: str) -> Callable[[_Writer], Tensor]:
    def write(w: _Writer) -> Tensor:
        a, b = w.x, w("Y", 1)
        x, y = (
            w.shape(name, place) if w.has(name, place) else ()
            for name, place in (("X", 0), ("Y", 1))
        )
        axis = w.whole("axis", default=-1)
        if axis not in (-1, len(x) - len(y)) and 0 <= axis < len(x) and len(y) < len(x):
            b = b.reshape([*y, *[1] * (len(x) - axis - len(y))])
        scales = [
            w.number(key, default=1.0)
            for key in ("Scale_x", "Scale_y", "Scale_out", "scale_x", "scale_y", "scale_out")
        ]
        if any(s != 1.0 for s in scales):
            raise ReplayRefused(
                f"{w.op_type}: with scales of quantised tensors it is not known to whence"
            )
        return _activated(w, w.do(name, a, b), "fuse_activation")

    return write


def _unary(name: str, *args: Any, **kwargs: Any) -> Callable[[_Writer], Tensor]:
    return lambda w: w.do(f"{name}.default", w.x, *args, **kwargs)


def _scale(w: _Writer) -> Tensor:
    bias, is_behind = w.number("bias", default=0.0), w.attribute("bias_after_scale", default=True)
    factor: Tensor | float
    if w.has("ScaleTensor", 1):  # a tensor of one element
        factor = w("ScaleTensor", 1)
    else:
        factor = w.number("input.1", "scale", default=1.0)
    value = w.do("mul", w.x if is_behind else w.x + bias, factor)
    return value + bias if is_behind else value


def _pow(w: _Writer) -> Tensor:
    return w.x ** w.number("factor", "y", "input.1", default=1.0)


def _gelu(w: _Writer) -> Tensor:
    return w.x.gelu(approximate="tanh" if w.is_set("approximate") else "none")


def _swish(w: _Writer) -> Tensor:
    beta = w.number("beta", default=1.0)
    return w.x * (w.x * beta).sigmoid() if beta != 1.0 else w.x.silu()


def _clip(w: _Writer) -> Tensor:
    if w.has("Min", 1) or w.has("Max", 2):
        raise ReplayRefused("clip: limits that are tensors are not known to whence")
    return w.x.clamp(w.number("min", "input.1"), w.number("max", "input.2"))


def _hard_sigmoid(w: _Writer) -> Tensor:
    slope, offset = w.number("slope", default=0.2), w.number("offset", default=0.5)
    return (w.x * slope + offset).clamp(0.0, 1.0)


def _cast(w: _Writer) -> Tensor:
    return w.x.to(_dtype(w.attribute("out_dtype", "dtype")))


def _dtype(value: Any) -> str:
    name = (
        _CODES.get(value, "") if isinstance(value, int) else str(value).rpartition(".")[2].lower()
    )
    name = _NAMED.get(name, name)
    if name not in dtypes.DTYPES:
        raise ReplayRefused(f"the dtype {value!r} is not known to whence")
    return name


def _where(w: _Writer) -> Tensor:
    return w.do("where", w("Condition", 0), w("X", 1), w("Y", 2))


def _swiglu(w: _Writer) -> Tensor:
    if w.has("Y", 1):
        return w.x.silu() * w("Y", 1)
    half = w.shape("X", 0)[-1] // 2
    gate = w.x.slice(-1, 0, half)
    return gate.silu() * w.x.slice(-1, half, 2 * half)


# ---- along axes


def _softmax(name: str) -> Callable[[_Writer], Tensor]:
    return lambda w: w.do(f"{name}.int", w.x, w.whole("axis", default=-1))


def _reduced(name: str) -> Callable[[_Writer], Tensor]:
    def write(w: _Writer) -> Tensor:
        rank = len(w.shape("X", 0))
        axes = w.integers("dim", "axis", "input.1", default=[])
        if w.is_set("reduce_all") or not axes:
            axes = list(range(rank))
        keep = w.is_set("keep_dim", "keepdim")
        value, wide = w.x, w.attribute("dtype", "out_dtype", default=-1)
        # every other dtype that `sum` may name is that of its operand
        if name == "sum.dim_IntList" and wide in ("float64", 6):
            value = value.to("float64")
        return w.do(name, value, axes, keep)

    return write


def _layer_norm(w: _Writer) -> dict[str, Tensor]:
    x = w.shape("X", 0)
    cut = w.whole("begin_norm_axis", default=1)
    value, over = w.x, range(cut, len(x))
    out = value.layer_norm(x[cut:], None, None, w.number("epsilon", default=1e-5))
    for name, place, how in (("Scale", 1, "mul"), ("Bias", 2, "add")):
        if w.has(name, place):
            out = w.do(how, out, w(name, place).reshape(x[cut:]))
    results = dict.fromkeys(("Y", "0", "Out"), out)
    moments = value.mean(over, False), value.var(over, correction=0, keepdim=False)
    for place, (name, moment) in enumerate(zip(("Mean", "Variance"), moments), 1):
        shape = w.output_shapes.get(name, w.output_shapes.get(str(place), x[:cut]))
        results[name] = results[str(place)] = moment.reshape(shape)
    return results


def _rms_norm(w: _Writer) -> Tensor:
    """rms_norm(x, scale): over the axes of the scale, or from begin_norm_axis on."""
    if w.has("bias", 1) and w.has("residual", 2) and w.has("norm_weight", 3):
        raise ReplayRefused("rms_norm: with a residual it is not known to whence")
    x = w.shape("X", 0)
    # fused form: x, bias, residual, norm_weight, norm_bias
    name, place = ("scale", 1) if w.has("scale", 1) else ("norm_weight", 3)
    weight, rank = w(name, place), len(w.shape(name, place))
    cut = w.whole("begin_norm_axis", default=len(x) - rank) % len(x)
    square = (w.x * w.x).mean(range(cut, len(x)), True)
    return w.x * (square + w.number("epsilon", default=1e-6)).rsqrt() * weight


def _batch_norm(w: _Writer) -> Tensor:
    fixed = w.is_set("is_test") or w.is_set("use_global_stats")
    if not fixed:
        raise ReplayRefused(f"{w.op_type}: in training it is not known to whence")
    legacy = "X" in w.operands  # whose order of operands is another one
    slots = (("Scale", 3), ("Bias", 4), ("Mean", 1), ("Variance", 2))
    scale, bias, mean, variance = (w(name, -1 if legacy else place) for name, place in slots)
    if w.attribute("data_layout", "data_format", default="NCHW") not in (
        "NCHW",
        "AnyLayout",
        "NCDHW",
    ):
        raise ReplayRefused(f"{w.op_type}: channels last are not known to whence")
    return w.x.batch_norm(
        scale, bias, mean, variance, False, 0.1, w.number("epsilon", default=1e-5), False
    )


def _group_norm(w: _Writer) -> Tensor:
    scale = w("Scale", 1) if w.has("Scale", 1) else None
    bias = w("Bias", 2) if w.has("Bias", 2) else None
    return w.x.group_norm(w.whole("groups"), scale, bias, w.number("epsilon", default=1e-5), False)


def _cumsum(w: _Writer) -> Tensor:
    if any(w.attribute(name, default=False) for name in ("exclusive", "reverse")):
        raise ReplayRefused("cumsum: exclusive or reversed it is not known to whence")
    if w.is_set("flatten"):
        return w.x.reshape([-1]).cumsum(0)
    return w.x.cumsum(w.whole("axis", "input.1", default=-1))


def _argmax(name: str) -> Callable[[_Writer], Tensor]:
    def write(w: _Writer) -> Tensor:
        keep = w.is_set("keepdims")
        if not w.is_set("flatten"):
            return w.do(f"{name}.default", w.x, w.whole("axis", "input.1"), keep)
        index = w.do(f"{name}.default", w.x.reshape([-1]), 0, keep)
        return index.reshape([1] * len(w.shape("X", 0))) if keep else index

    return write


# ---- rows, shapes


def _embedding(w: _Writer) -> Tensor:
    legacy = "Ids" in w.operands
    ids, weight = (w("Ids", -1), w("W", -1)) if legacy else (w("Ids", 0), w("W", 1))
    rows = weight.embedding(ids)
    padding = w.whole("padding_idx", default=-1)
    if padding == -1:
        return rows
    unpadded = ids.ne(padding)
    return rows * unpadded.type_as(rows).unsqueeze(-1)


def _reshape(w: _Writer) -> Tensor:
    if w.has("ShapeTensor", 9) or w.has("Shape", 1):
        return _to_made(w)  # the shape was a tensor; what came out says it
    return _reshaped(w.x, w.shape("X", 0), w.integers("input.1", "shape"))[0]


def _to_made(w: _Writer) -> Tensor:
    """Reshapes the operand to the shape of the output, for operators that move no element."""
    return w.x.reshape(w.made_shape())


def _slice(w: _Writer) -> Tensor:
    value, shape = w("Input", 0), w.shape("Input", 0)
    axes = w.integers("axes")
    starts, ends = w.integers("starts", "input.1"), w.integers("ends", "input.2")
    steps = w.integers("strides", "input.3", default=[1] * len(axes))
    if not len(axes) == len(starts) == len(ends) == len(steps):
        raise ReplayRefused(f"{w.op_type}: its limits are tensors")
    for axis, start, end, step in zip(axes, starts, ends, steps):
        if step < 0:
            indices = range(shape[axis])[start : None if end < -shape[axis] else end : step]
            if len(indices):
                value = value.slice(axis, indices[-1], indices[0] + 1, -step).flip([axis])
                continue
            start, end, step = 0, 0, 1
        value = value.slice(axis, start, min(end, shape[axis]), step)
    for axis in sorted(w.integers("decrease_axis", default=[]), reverse=True):
        value = value.squeeze(axis)
    return value.clone()


def _concat(w: _Writer) -> Tensor:
    return w.do(
        "cat", [w.tensor(o) for o in w.listed("X", 0)], w.whole("axis", "input.1", default=0)
    )


def _stack(w: _Writer) -> Tensor:
    return w.do("stack", [w.tensor(o) for o in w.listed("X", 0)], w.whole("axis", default=0))


def _add_n(w: _Writer) -> Tensor:
    first, *others = [w.tensor(o) for o in w.listed("X", 0)]
    for term in others:
        first = first + term
    return first


def _split(w: _Writer) -> dict[str, Tensor]:
    place = 1 if "num" in w.attributes and w.op_type == "split_with_num" else 2
    axis = w.whole("axis", f"input.{place}", default=0)
    count = w.whole("num", default=0)
    extent = w.shape("X", 0)[axis]
    if count:
        sizes = [extent // count] * count
    else:
        sizes = w.integers("sections", "input.1")
        if -1 in sizes:
            sizes[sizes.index(-1)] = extent - sum(n for n in sizes if n != -1)
    parts = w.several("split_with_sizes", len(sizes), w.x, sizes, axis)
    return _listed(parts) if len(parts) > 1 else {"Out": parts[0], "0": parts[0]}


def _listed(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns several results in the slots of an output that is a list."""
    return {f"{slot}.{i}": part for slot in ("Out", "0") for i, part in enumerate(parts)}


def _unbind(w: _Writer) -> dict[str, Tensor]:
    name = "X" if "X" in w.operands else "input"
    shape, axis = w.shape(name, 0), w.whole("axis", default=0)
    axis %= len(shape)
    return _listed([w(name, 0).select(axis, i).clone() for i in range(shape[axis])])


def _gather(w: _Writer) -> Tensor:
    axis = w.whole("axis", "dim", "input.2", default=0)
    if not w.has("Index", 1):  # a number of the program
        picked = w.integers("input.1")
        parts = [w.x.slice(axis, number, number + 1) for number in picked]
        return w.do("cat", parts, axis)
    index = w.operand("Index", 1)
    read = w.tensor(index)
    if len(index.shape) != 1:
        read = read.reshape([math.prod(index.shape)])
    return w.x.index_select(axis, read)


def _tile(w: _Writer) -> Tensor:
    return w.x.repeat(w.integers("repeat_times", "input.1"))


def _diagonal(w: _Writer) -> tuple[Tensor, int]:
    return w.x, w.whole("diagonal", default=0)


def _dropout(w: _Writer) -> Tensor:
    if not w.is_set("is_test") and w.number("p", "dropout_prob", default=0.5):
        raise ReplayRefused("dropout draws random numbers")
    share = w.number("p", "dropout_prob", "input.2", default=0.5)
    mode = w.attribute("mode", "dropout_implementation", default="upscale_in_train")
    return w.do("mul", w.x, 1.0 - share if mode == "downgrade_in_infer" else 1.0)


# ---- attention


def _attention(
    w: _Writer,
    sides: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    scale: float,
    mask: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """softmax(scale q k + mask) v of (batch, head, token, channel), step by step; causal counts
    from the last token. scale: 0 for that of the channels.
    """
    (q, k, v), (_, heads, rows, channels), (_, groups, columns, _) = sides, *shapes[:2]
    if heads != groups:  # fewer heads of keys and values
        k, v = (side.repeat_interleave(heads // groups, 1) for side in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or channels**-0.5)
    if mask is not None:
        scores = scores + mask
    if causal:
        later = w.do("ones", [rows, columns], dtype="bool").triu(columns - rows + 1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def _flash(w: _Writer) -> Tensor:
    if w.number("dropout", "dropout_prob", default=0.0) and not w.is_set("is_test"):
        raise ReplayRefused(f"{w.op_type} draws random numbers")
    sides, shapes = [], []
    for place, name in enumerate("qkv"):
        sides.append(w(name, place).permute([0, 2, 1, 3]))
        batch, tokens, heads, channels = w.shape(name, place)
        shapes.append((batch, heads, tokens, channels))
    slot = ("attn_mask", 4) if w.op_type == "flash_attn" else ("bias", 3)
    mask = w(*slot) if w.has(*slot) else None
    scale = max(w.number("scale", "softmax_scale", default=0.0), 0.0)
    out = _attention(w, sides, shapes, scale, mask, causal=w.is_set("causal", "is_causal"))
    return out.permute([0, 2, 1, 3])


def _variable_length(w: _Writer) -> Tensor:
    """variable_length_memory_efficient_attention(query, key, value, seq_lens, kv_seq_lens, mask),
    of full lengths.
    """
    names = ("query", "key", "value")
    shapes = [w.shape(name, place) for place, name in enumerate(names)]
    if shapes[0][0] != 1 or w.whole("pre_cache_length", default=0):
        raise ReplayRefused(f"{w.op_type}: rows of several lengths are not known to whence")
    sides = [w(name, place) for place, name in enumerate(names)]
    mask = w("mask", 5) if w.has("mask", 5) else None
    scale = w.number("scale", default=0.0)
    return _attention(w, sides, shapes, scale, mask, causal=w.is_set("causal"))


_ELEMENTWISE = {
    "add": "add.Tensor", "sub": "sub.Tensor", "subtract": "sub.Tensor", "mul": "mul.Tensor",
    "multiply": "mul.Tensor", "div": "div.Tensor", "divide": "div.Tensor", "max": "maximum.default",
    "maximum": "maximum.default", "min": "minimum.default", "minimum": "minimum.default",
    "pow": "pow.Tensor_Tensor", "floordiv": "floor_divide.default",
    "floor_divide": "floor_divide.default", "mod": "remainder.Tensor",
    "remainder": "remainder.Tensor",
}  # fmt: skip
_COMPARED = {
    "equal": "eq.Tensor", "not_equal": "ne.Tensor", "less_than": "lt.Tensor",
    "less_equal": "le.Tensor", "greater_than": "gt.Tensor", "greater_equal": "ge.Tensor",
    "logical_and": "logical_and.default", "logical_or": "logical_or.default",
    "logical_xor": "logical_xor.default",
}  # fmt: skip
_UNARY = (
    "relu", "relu6", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "abs", "log",
    "log2", "log10", "log1p", "expm1", "erf", "mish", "floor", "ceil", "round", "sin", "cos",
    "tan", "reciprocal", "logical_not", "sign", "asin", "acos", "atan", "sinh", "cosh", "isnan",
    "isinf", "isfinite", "bitwise_not",
)  # fmt: skip
_AS_IT_IS = (
    "assign", "onednn_to_paddle_layout", "transfer_layout", "share_data", "memcpy", "memcpy_h2d",
    "memcpy_d2h", "contiguous",
)  # fmt: skip
_REDUCED = {
    "mean": "mean.dim", "sum": "sum.dim_IntList", "max": "amax.default", "min": "amin.default",
    "amax": "amax.default", "amin": "amin.default", "logsumexp": "logsumexp.default",
}  # fmt: skip


def _sum(w: _Writer) -> Tensor:
    """Translates `sum`: in a ProgramDesc it adds several tensors, in PIR it sums along axes."""
    return (
        _add_n(w)
        if any(key.partition(".")[0] == "X" for key in w.operands)
        else _reduced("sum.dim_IntList")(w)
    )


def _rnn(w: _Writer) -> Tensor:
    """Translates layers of LSTM, GRU or a plain recurrence. The operands list the weights of all
    cells first, then their biases; a cell is one direction of a layer.
    """
    if w.has("SequenceLength", 3):
        raise ReplayRefused(f"{w.op_type}: with lengths of sequences it is not known to whence")
    mode = str(w.attribute("mode"))
    if mode not in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU"):
        raise ReplayRefused(f"{w.op_type}: the mode {mode[:40]} is not known to whence")
    layers, bidirectional = w.whole("num_layers"), w.is_set("is_bidirec")
    if w.number("dropout_prob", default=0.0) and layers > 1 and not w.is_set("is_test"):
        raise ReplayRefused(f"{w.op_type}: it draws random numbers")
    weights = w.listed("WeightList", 2)
    cells = layers * (2 if bidirectional else 1)
    if len(weights) not in (2 * cells, 4 * cells):
        raise ReplayRefused(f"{w.op_type}: {len(weights)} weights for {cells} cells")
    biases = len(weights) == 4 * cells
    starts = (
        2 * cell + part for cell in range(cells) for part in ((0, 2 * cells) if biases else (0,))
    )
    params = [w.tensor(weights[start + i]) for start in starts for i in range(2)]
    sequence, extents = w("Input", 0), [cells, w.shape("Input", 0)[1], w.whole("hidden_size")]
    initial = [w.attribute(f"input.1.{i}", default=None) for i in range(2 if mode == "LSTM" else 1)]
    if None in initial:
        states = [w.tensor(state) for state in w.listed("PreState", 1)]
    else:  # numbers of the program
        states = [sequence.new_full(extents, float(value)) for value in initial]
    return w.do(
        f"{mode.lower()}.input",
        sequence,
        states if mode == "LSTM" else states[0],
        params,
        biases,
        layers,
        0.0,
        False,
        bidirectional,
        False,
    )


_KNOWN: dict[str, Callable[[_Writer], Any]] = {
    **{f"elementwise_{short}": _elementwise(name) for short, name in _ELEMENTWISE.items()},
    **{
        f"fused_elementwise_{short}": _elementwise(_ELEMENTWISE[short])
        for short in ("add", "sub", "mul", "div")
    },
    **{
        short: _elementwise(name)
        for short, name in _ELEMENTWISE.items()
        if short not in ("mul", "pow", "max", "min", "div", "sub", "mod")
    },
    **{name: _elementwise(aten) for name, aten in _COMPARED.items()},
    **{name: _unary(name) for name in _UNARY},
    **{name: _unary("clone") for name in _AS_IT_IS},
    **{name: _reduced(aten) for name, aten in _REDUCED.items()},
    **{f"reduce_{name}": _reduced(aten) for name, aten in _REDUCED.items()},
    **dict.fromkeys(("matmul", "matmul_v2", "bmm"), _matmul),
    **dict.fromkeys(("conv2d", "depthwise_conv2d", "fused_conv2d"), _conv),
    **dict.fromkeys(("batch_norm", "sync_batch_norm"), _batch_norm),
    **dict.fromkeys(("embedding", "lookup_table_v2", "lookup_table"), _embedding),
    **dict.fromkeys(("reshape", "reshape2"), _reshape),
    **dict.fromkeys(
        ("squeeze", "squeeze2", "unsqueeze", "unsqueeze2", "flatten", "flatten_contiguous_range"),
        _to_made,
    ),
    **dict.fromkeys(("slice", "strided_slice"), _slice),
    **dict.fromkeys(("split", "split_with_num"), _split),
    **dict.fromkeys(
        ("expand", "expand_v2", "expand_as", "expand_as_v2"),
        lambda w: w.x.expand(w.made_shape()).clone(),
    ),
    **dict.fromkeys(("gather", "index_select"), _gather),
    "unbind": _unbind,
    **dict.fromkeys(("flash_attn", "memory_efficient_attention"), _flash),
    "sum": _sum,
    "add_n": _add_n,
    "fused_matmul": _fused_matmul,
    "mul": _mul,
    "fc": _fc,
    "fused_gemm_epilogue": _gemm_epilogue,
    "linear": _linear,
    "linear_v2": _linear,
    "addmm": _addmm,
    "pool2d": _pool,
    "scale": _scale,
    "pow": _pow,
    "gelu": _gelu,
    "swish": _swish,
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
    "hardsigmoid": _hard_sigmoid,
    "hard_swish": _unary("hardswish"),
    "hardswish": _unary("hardswish"),
    "leaky_relu": lambda w: w.x.leaky_relu(w.number("alpha", "negative_slope")),
    "elu": lambda w: w.x.elu(w.number("alpha", default=1.0)),
    "softplus": lambda w: w.x.softplus(
        w.number("beta", default=1.0), w.number("threshold", default=20.0)
    ),
    "cast": _cast,
    "where": _where,
    "swiglu": _swiglu,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "cumsum": _cumsum,
    "argmax": _argmax("argmax"),
    "arg_max": _argmax("argmax"),
    "argmin": _argmax("argmin"),
    "arg_min": _argmax("argmin"),
    "concat": _concat,
    "stack": _stack,
    "transpose": lambda w: w.x.permute(w.integers("perm", "axis")).clone(),
    "transpose2": lambda w: w.x.permute(w.integers("axis", "perm")).clone(),
    "tile": _tile,
    "tril_triu": lambda w: w.do(
        "tril" if w.attribute("lower", default=True) else "triu", *_diagonal(w)
    ),
    "tril": lambda w: w.do("tril", *_diagonal(w)),
    "triu": lambda w: w.do("triu", *_diagonal(w)),
    "dropout": _dropout,
    "variable_length_memory_efficient_attention": _variable_length,
    "rnn": _rnn,
}
