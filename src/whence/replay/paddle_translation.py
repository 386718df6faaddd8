"""Operators of Paddle as programs of aten operators, so that a call of a Paddle run can be replayed
like any other.

Read from the operator's type, attributes and operands alone; Paddle is not needed. Slots are those
of the operator: "X", "Y" of a ProgramDesc, places "0", "1" of PIR. Semantics: the operators'
reference documentation; a fused operator is written out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from whence import dtypes
from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.records.marks import Mark, mark
from whence.records.slots import is_param

TRANSLATED = mark(Mark.TRANSLATED, "Paddle")
"""The note of a program that was not recorded but made of what the operator says: other kernels, so
it need not agree bit by bit.
"""

_Value = dict[str, Any]
_MISSING = object()
_CODES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64",
    20: "uint8", 21: "int8", 22: "bfloat16", 23: "complex64", 24: "complex128",
}  # fmt: skip
_NAMED = {"float": "float32", "double": "float64", "int": "int32", "half": "float16"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads. slot: of the call, "input..." or "param..."."""

    slot: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Writer:
    """The program as it is written. operands, output_shapes: by slot of the operator."""

    op_type: str
    attributes: Mapping[str, Any]
    operands: Mapping[str, Operand]
    output_shapes: Mapping[str, tuple[int, ...]]
    inputs: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def has(self, name: str, place: int) -> bool:
        """Is there an operand of this name, or at this place in PIR?"""
        return self._key(name, place) is not None

    def _key(self, name: str, place: int) -> str | None:
        return next((k for k in (name, name.lower(), str(place)) if k in self.operands), None)

    def operand(self, name: str, place: int) -> Operand:
        key = self._key(name, place)
        if key is None:
            raise ReplayRefused(f"{self.op_type}: its input {name} was not captured")
        return self.operands[key]

    def read(self, operand: Operand) -> _Value:
        """The operand as an argument."""
        listed = self.params if is_param(operand.slot) else self.inputs
        if operand.slot not in listed:
            listed.append(operand.slot)
            if listed is self.inputs:
                self.dtypes.append(operand.dtype)
        return (
            {"param": operand.slot} if listed is self.params else {"in": listed.index(operand.slot)}
        )

    def __call__(self, name: str, place: int) -> _Value:
        """The operand of this name, or at this place in PIR, where it may be a number of the
        program.
        """
        number = self.attributes.get(f"input.{place}") if self._key(name, place) is None else None
        if isinstance(number, (int, float)) and math.isfinite(number):
            like = next((o.dtype for o in self.operands.values()), "float32")
            return self.do("scalar_tensor.default", number, dtype={"dtype": like})
        return self.read(self.operand(name, place))

    def several(self, name: str, place: int) -> list[Operand]:
        """The operands of a slot that takes a list."""
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
        """The first of these attributes that there is. Raises ReplayRefused without one and without
        a default.
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
                f"{self.op_type}: its attribute {names[0]} is no number ({str(value)[:40]})"
            ) from None

    def whole(self, *names: str, default: Any = _MISSING) -> int:
        return int(self.number(*names, default=default))

    def integers(self, *names: str, default: Any = _MISSING) -> list[int]:
        value = self.attribute(*names, default=default)
        try:
            return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
        except (TypeError, ValueError):
            raise ReplayRefused(
                f"{self.op_type}: its attribute {names[0]} is no list of integers "
                f"({str(value)[:40]})"
            ) from None

    def do(self, name: str, *args: Any, **kwargs: Any) -> _Value:
        """One aten operation; the value is its first result."""
        self.operations.append(Operation(f"aten.{name}", args, kwargs))
        return {"op": [len(self.operations) - 1, 0]}


def program(
    op_type: str,
    attributes: Mapping[str, Any],
    operands: Mapping[str, Operand],
    outputs: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Program:
    """What one call of a Paddle operator computes.

    op_type: without dialect ("matmul"). operands: by slot of the operator. outputs: slot of the
    operator -> slot of the call; shapes: of these outputs, by slot of the operator. Raises
    ReplayRefused for an operator that is not known here, or used in a way that is not.
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
    named = (
        results
        if "op" not in results
        else dict.fromkeys(("Out", "out", "Output", "Y", "y", "0"), results)
    )
    program_outputs = tuple((slot, named[key]) for key, slot in outputs.items() if key in named)
    if not program_outputs:
        raise ReplayRefused(
            f"{op_type}: of its outputs {', '.join(outputs)} none is known to whence"
        )
    read = [
        *(o for o in operands.values() if o.slot in writer.params),
        *(o for o in operands.values() if o.slot in writer.inputs),
    ]
    base = next((o.dtype for o in read if dtypes.named(o.dtype).is_floating), "")
    body = (
        tuple(writer.operations),
        tuple(writer.inputs),
        program_outputs,
        tuple(writer.params),
        base,
        tuple(writer.dtypes),
    )
    digest = hashlib.sha256(msgspec.json.encode(body)).hexdigest()[:32]
    return Program(
        digest,
        body[0],
        body[1],
        body[2],
        body[3],
        base=base,
        input_dtypes=body[5],
        inference=True,
        notes=(TRANSLATED,),
    )


def known() -> tuple[str, ...]:
    """Operators whose calls can be replayed."""
    return tuple(_KNOWN)


# ---- products


def _swapped(w: _Writer, value: _Value, rank: int, swap: Any) -> _Value:
    return w.do("transpose.int", value, -1, -2) if swap and rank > 1 else value


def _matmul(w: _Writer) -> _Value:
    a, b = w("X", 0), w("Y", 1)
    a = _swapped(
        w,
        a,
        len(w.shape("X", 0)),
        w.attribute("trans_x", "transpose_x", "transpose_X", default=False),
    )
    b = _swapped(
        w,
        b,
        len(w.shape("Y", 1)),
        w.attribute("trans_y", "transpose_y", "transpose_Y", default=False),
    )
    return _times(w, w.do("matmul.default", a, b), w.number("alpha", default=1.0))


def _times(w: _Writer, value: _Value, factor: float) -> _Value:
    return value if factor == 1.0 else w.do("mul.Scalar", value, factor)


def _reshaped(
    w: _Writer, value: _Value, shape: Sequence[int], to: Sequence[int]
) -> tuple[_Value, tuple[int, ...]]:
    """Paddle's reshape: 0 keeps an extent, -1 takes what is left."""
    filled = [
        shape[i] if n == 0 and 0 not in shape and i < len(shape) else n for i, n in enumerate(to)
    ]
    if -1 in filled:
        others = math.prod(n for n in filled if n != -1)
        filled[filled.index(-1)] = math.prod(shape) // others if others else 0
    return w.do("reshape.default", value, filled), tuple(filled)


def _laid(
    w: _Writer, value: _Value, shape: tuple[int, ...], side: str
) -> tuple[_Value, tuple[int, ...]]:
    """A value through the reshape and transpose that a fused matmul does to one of its sides ("x",
    "y", "out").
    """
    reshape = w.integers(f"fused_reshape_{side}", f"fused_reshape_{side.capitalize()}", default=[])
    perm = w.integers(f"fused_transpose_{side}", f"fused_transpose_{side.capitalize()}", default=[])
    if side == "out":  # the other way round
        if perm:
            value, shape = w.do("permute.default", value, perm), tuple(shape[p] for p in perm)
        return _reshaped(w, value, shape, reshape) if reshape else (value, shape)
    if reshape:
        value, shape = _reshaped(w, value, shape, reshape)
    return (
        (w.do("permute.default", value, perm), tuple(shape[p] for p in perm))
        if perm
        else (value, shape)
    )


def _fused_matmul(w: _Writer) -> _Value:
    _unscaled(w)
    a, x_shape = _laid(w, w("X", 0), w.shape("X", 0), "x")
    b, y_shape = _laid(w, w("Y", 1), w.shape("Y", 1), "y")
    swap_a, swap_b = (w.attribute(f"trans_{s}", f"transpose_{s}", default=False) for s in "xy")
    a, b = _swapped(w, a, len(x_shape), swap_a), _swapped(w, b, len(y_shape), swap_b)
    out = _times(w, w.do("matmul.default", a, b), w.number("matmul_alpha", "alpha", default=1.0))
    x_shape = (*x_shape[:-2], x_shape[-1], x_shape[-2]) if swap_a and len(x_shape) > 1 else x_shape
    y_shape = (*y_shape[:-2], y_shape[-1], y_shape[-2]) if swap_b and len(y_shape) > 1 else y_shape
    if len(x_shape) > 1 and len(y_shape) > 1:
        batch = x_shape[:-2] if len(x_shape) >= len(y_shape) else y_shape[:-2]
        out, _ = _laid(w, out, (*batch, x_shape[-2], y_shape[-1]), "out")
    if w.has("ResidualData", 2):
        out = w.do("add.Tensor", out, w("ResidualData", 2))
    return _activated(w, out, str(w.attribute("fuse_activation", default="")))


def _unscaled(w: _Writer) -> None:
    """Raises ReplayRefused for the int8 form of an operator of oneDNN."""
    scales = (
        w.attribute(name, default=1.0) for name in ("scale_x", "scale_y", "scale_out", "scale_in")
    )
    if w.attribute("force_fp32_output", default=False) or any(s != 1.0 for s in scales):
        raise ReplayRefused(
            f"{w.op_type}: with scales of quantised tensors it is not known to whence"
        )


def _activated(w: _Writer, value: _Value, name: str) -> _Value:
    """A value through the activation that was fused behind it, and the factor behind that."""
    return _times(w, _active(w, value, name), w.number("fused_output_scale", default=1.0))


def _active(w: _Writer, value: _Value, name: str) -> _Value:
    alpha, beta = w.number("fuse_alpha", default=0.0), w.number("fuse_beta", default=0.0)
    if name in ("", "identity", "none"):
        return value
    if name in ("gelu", "gelu_erf", "gelu_tanh"):
        return w.do("gelu.default", value, approximate="tanh" if name == "gelu_tanh" else "none")
    if name in ("leaky_relu", "swish", "hard_sigmoid") and (alpha or beta):
        if name == "leaky_relu":
            return w.do("leaky_relu.default", value, alpha)
        inner = w.do("sigmoid.default", _times(w, value, alpha))
        if name == "swish":
            return w.do("mul.Tensor", value, inner)
        raise ReplayRefused(f"{w.op_type}: fused hard_sigmoid is not known to whence")
    plain = {"relu", "silu", "tanh", "sigmoid", "mish", "relu6", "sqrt", "abs", "exp"} & {name}
    if name in ("swish", "silu"):
        return w.do("silu.default", value)
    if not plain:
        raise ReplayRefused(
            f"{w.op_type}: the activation {name[:40]} fused into it is not known to whence"
        )
    return w.do(f"{name}.default", value)


def _mul(w: _Writer) -> _Value:
    x, y = w.shape("X", 0), w.shape("Y", 1)
    cut, cut_y = w.whole("x_num_col_dims", default=1), w.whole("y_num_col_dims", default=1)
    a = w.do("reshape.default", w("X", 0), [math.prod(x[:cut]), math.prod(x[cut:])])
    b = w.do("reshape.default", w("Y", 1), [math.prod(y[:cut_y]), math.prod(y[cut_y:])])
    return w.do("reshape.default", w.do("matmul.default", a, b), [*x[:cut], *y[cut_y:]])


def _fc(w: _Writer) -> _Value:
    _unscaled(w)
    if w.attribute("padding_weights", default=False):
        raise ReplayRefused("fc: padded weights are not known to whence")
    x = w.shape("Input", 0)
    cut = w.whole("in_num_col_dims", default=1)
    a = w.do("reshape.default", w("Input", 0), [*x[:cut], math.prod(x[cut:])])
    out = w.do("matmul.default", a, w("W", 1))
    if w.has("Bias", 2):
        out = w.do("add.Tensor", out, w("Bias", 2))
    named = str(w.attribute("activation_type", default="")) or str(
        w.attribute("fuse_activation", default="")
    )
    to = w.integers("fused_reshape2_shape", default=[])
    out = _activated(w, out, named)
    return _reshaped(w, out, (*x[:cut], w.shape("W", 1)[-1]), to)[0] if to else out


def _gemm_epilogue(w: _Writer) -> _Value:
    a = _swapped(w, w("X", 0), 2, w.attribute("trans_x", default=False))
    b = _swapped(w, w("Y", 1), 2, w.attribute("trans_y", default=False))
    out = w.do("add.Tensor", w.do("matmul.default", a, b), w("Bias", 2))
    return _activated(w, out, str(w.attribute("activation", default="none")))


def _linear(w: _Writer) -> _Value:
    out = w.do("matmul.default", w("X", 0), w("W", 1))
    return w.do("add.Tensor", out, w("Bias", 2)) if w.has("Bias", 2) else out


def _addmm(w: _Writer) -> _Value:
    product = w.do("matmul.default", w("X", 1), w("Y", 2))
    alpha, beta = w.number("alpha", "Alpha", default=1.0), w.number("beta", "Beta", default=1.0)
    return w.do("add.Tensor", _times(w, w("Input", 0), beta), _times(w, product, alpha))


def _conv(w: _Writer) -> _Value:
    if w.attribute("data_format", default="NCHW") not in ("NCHW", "AnyLayout"):
        raise ReplayRefused(
            f"{w.op_type}: data_format {w.attribute('data_format')} is not known to whence"
        )
    _unscaled(w)
    x, kernel = w.shape("Input", 0), w.shape("Filter", 1)
    strides, dilations = (
        w.integers("strides", default=[1, 1]),
        w.integers("dilations", default=[1, 1]),
    )
    pads, how = (
        w.integers("paddings", default=[0, 0]),
        w.attribute("padding_algorithm", default="EXPLICIT"),
    )
    value = w("Input", 0)
    if how == "VALID":
        pads = [0, 0]
    elif how == "SAME":
        pads, dilations = [], [1] * len(strides)
        for n, k, s in zip(x[2:], kernel[2:], strides):
            total = max((-(-n // s) - 1) * s + k - n, 0)
            pads += [total // 2, total - total // 2]
    if len(pads) == 2 * len(strides):
        if pads[::2] == pads[1::2]:
            pads = pads[::2]
        else:
            value = w.do(
                "constant_pad_nd.default",
                value,
                [p for i in reversed(range(len(strides))) for p in pads[2 * i : 2 * i + 2]],
                0.0,
            )
            pads = [0] * len(strides)
    bias = (
        w("Bias", 2)
        if w.has("Bias", 2) and w.op_type in ("fused_conv2d", "fused_conv2d_add_act", "conv2d")
        else None
    )
    out = w.do(
        "conv2d.default",
        value,
        w("Filter", 1),
        bias,
        strides,
        pads,
        dilations,
        w.whole("groups", default=1),
    )
    if w.has("ResidualData", 3):
        out = w.do("add.Tensor", out, w("ResidualData", 3))
    name = str(w.attribute("activation", default="")) or str(
        w.attribute("fuse_activation", default="")
    )
    return _activated(w, out, name)


def _pool(w: _Writer) -> _Value:
    x = w.shape("X", 0)
    kind = w.attribute("pooling_type")
    sizes, strides = (
        w.integers("ksize", "kernel_size", "input.1"),
        w.integers("strides", default=[1, 1]),
    )
    pads = w.integers("paddings", default=[0, 0])
    pads = pads[::2] if len(pads) == 4 and pads[::2] == pads[1::2] else pads
    plain = w.attribute("data_format", default="NCHW") in ("NCHW", "AnyLayout") and len(pads) == 2
    if not plain or w.attribute("padding_algorithm", default="EXPLICIT") not in (
        "EXPLICIT",
        "VALID",
    ):
        raise ReplayRefused("pool2d: its layout or padding is not known to whence")
    if w.attribute("global_pooling", default=False):
        sizes, strides, pads = list(x[2:]), list(x[2:]), [0, 0]
    if w.attribute("adaptive", default=False):
        if kind != "avg":
            raise ReplayRefused("pool2d: adaptive maxima are not known to whence")
        return w.do("adaptive_avg_pool2d.default", w("X", 0), sizes)
    ceil = bool(w.attribute("ceil_mode", default=False))
    if kind == "max":
        return w.do("max_pool2d.default", w("X", 0), sizes, strides, pads, [1, 1], ceil)
    return w.do(
        "avg_pool2d.default",
        w("X", 0),
        sizes,
        strides,
        pads,
        ceil,
        not w.attribute("exclusive", default=True),
    )


# ---- element by element


def _elementwise(name: str) -> Callable[[_Writer], _Value]:
    def write(w: _Writer) -> _Value:
        a, b = w("X", 0), w("Y", 1)
        x, y = (
            w.shape(name, place) if w.has(name, place) else ()
            for name, place in (("X", 0), ("Y", 1))
        )
        axis = w.whole("axis", default=-1)
        if axis not in (-1, len(x) - len(y)) and 0 <= axis < len(x) and len(y) < len(x):
            b = w.do("reshape.default", b, [*y, *[1] * (len(x) - axis - len(y))])
        scales = [
            w.number(key, default=1.0)
            for key in ("Scale_x", "Scale_y", "Scale_out", "scale_x", "scale_y", "scale_out")
        ]
        if any(s != 1.0 for s in scales):
            raise ReplayRefused(
                f"{w.op_type}: with scales of quantised tensors it is not known to whence"
            )
        return _activated(w, w.do(name, a, b), str(w.attribute("fuse_activation", default="")))

    return write


def _unary(name: str, *args: Any, **kwargs: Any) -> Callable[[_Writer], _Value]:
    return lambda w: w.do(f"{name}.default", w("X", 0), *args, **kwargs)


def _scale(w: _Writer) -> _Value:
    bias, bias_last = w.number("bias", default=0.0), w.attribute("bias_after_scale", default=True)
    if w.has("ScaleTensor", 1):  # a tensor of one element
        factor = w("ScaleTensor", 1)
        value = w("X", 0) if bias_last or not bias else w.do("add.Scalar", w("X", 0), bias)
        value = w.do("mul.Tensor", value, factor)
    else:
        factor_ = w.number("input.1", "scale", default=1.0)
        value = w("X", 0) if bias_last or not bias else w.do("add.Scalar", w("X", 0), bias)
        value = w.do("mul.Scalar", value, factor_)
    return w.do("add.Scalar", value, bias) if bias_last and bias else value


def _pow(w: _Writer) -> _Value:
    return w.do("pow.Tensor_Scalar", w("X", 0), w.number("factor", "y", "input.1", default=1.0))


def _gelu(w: _Writer) -> _Value:
    return w.do(
        "gelu.default",
        w("X", 0),
        approximate="tanh" if w.attribute("approximate", default=False) else "none",
    )


def _swish(w: _Writer) -> _Value:
    beta = w.number("beta", default=1.0)
    return (
        w.do("mul.Tensor", w("X", 0), w.do("sigmoid.default", _times(w, w("X", 0), beta)))
        if beta != 1.0
        else w.do("silu.default", w("X", 0))
    )


def _clip(w: _Writer) -> _Value:
    if w.has("Min", 1) or w.has("Max", 2):
        raise ReplayRefused("clip: limits that are tensors are not known to whence")
    return w.do("clamp.default", w("X", 0), w.number("min", "input.1"), w.number("max", "input.2"))


def _hard_sigmoid(w: _Writer) -> _Value:
    slope, offset = w.number("slope", default=0.2), w.number("offset", default=0.5)
    return w.do(
        "clamp.default", w.do("add.Scalar", w.do("mul.Scalar", w("X", 0), slope), offset), 0.0, 1.0
    )


def _cast(w: _Writer) -> _Value:
    return w.do("to.dtype", w("X", 0), {"dtype": _dtype(w.attribute("out_dtype", "dtype"))})


def _dtype(value: Any) -> str:
    name = (
        _CODES.get(value, "") if isinstance(value, int) else str(value).rpartition(".")[2].lower()
    )
    name = _NAMED.get(name, name)
    if name not in dtypes.DTYPES:
        raise ReplayRefused(f"the dtype {value!r} is not known to whence")
    return name


def _where(w: _Writer) -> _Value:
    return w.do("where.self", w("Condition", 0), w("X", 1), w("Y", 2))


def _swiglu(w: _Writer) -> _Value:
    if w.has("Y", 1):
        return w.do("mul.Tensor", w.do("silu.default", w("X", 0)), w("Y", 1))
    half = w.shape("X", 0)[-1] // 2
    gate = w.do("slice.Tensor", w("X", 0), -1, 0, half)
    return w.do(
        "mul.Tensor",
        w.do("silu.default", gate),
        w.do("slice.Tensor", w("X", 0), -1, half, 2 * half),
    )


# ---- along axes


def _softmax(name: str) -> Callable[[_Writer], _Value]:
    return lambda w: w.do(f"{name}.int", w("X", 0), w.whole("axis", default=-1))


def _reduced(name: str) -> Callable[[_Writer], _Value]:
    def write(w: _Writer) -> _Value:
        rank = len(w.shape("X", 0))
        axes = w.integers("dim", "axis", "input.1", default=[])
        if w.attribute("reduce_all", default=False) or not axes:
            axes = list(range(rank))
        keep = bool(w.attribute("keep_dim", "keepdim", default=False))
        value, wide = w("X", 0), w.attribute("dtype", "out_dtype", default=-1)
        # the others it takes are those of what it reads
        if name == "sum.dim_IntList" and wide in ("float64", 6):
            value = w.do("to.dtype", value, {"dtype": "float64"})
        return w.do(name, value, axes, keep)

    return write


def _layer_norm(w: _Writer) -> dict[str, _Value]:
    x = w.shape("X", 0)
    cut = w.whole("begin_norm_axis", default=1)
    value, over = w("X", 0), list(range(cut, len(x)))
    out = w.do(
        "layer_norm.default", value, list(x[cut:]), None, None, w.number("epsilon", default=1e-5)
    )
    for name, place, how in (("Scale", 1, "mul.Tensor"), ("Bias", 2, "add.Tensor")):
        if w.has(name, place):
            out = w.do(how, out, w.do("reshape.default", w(name, place), list(x[cut:])))
    mean = w.do(
        "reshape.default",
        w.do("mean.dim", value, over, False),
        list(w.output_shapes.get("Mean", w.output_shapes.get("1", x[:cut]))),
    )
    spread = w.do("var.correction", value, over, correction=0, keepdim=False)
    spread = w.do(
        "reshape.default",
        spread,
        list(w.output_shapes.get("Variance", w.output_shapes.get("2", x[:cut]))),
    )
    return {
        "Y": out,
        "0": out,
        "Out": out,
        "Mean": mean,
        "1": mean,
        "Variance": spread,
        "2": spread,
    }


def _scaled_by_rms(w: _Writer, value: _Value, over: list[int]) -> _Value:
    square = w.do("mean.dim", w.do("mul.Tensor", value, value), over, True)
    return w.do(
        "mul.Tensor",
        value,
        w.do("rsqrt.default", w.do("add.Scalar", square, w.number("epsilon", default=1e-6))),
    )


def _rms_norm(w: _Writer) -> _Value:
    """rms_norm(x, scale): over the axes of the scale, or from begin_norm_axis on."""
    if w.has("bias", 1) and w.has("residual", 2) and w.has("norm_weight", 3):
        raise ReplayRefused("rms_norm: with a residual it is not known to whence")
    x = w.shape("X", 0)
    place = 1 if w.has("scale", 1) else 3  # fused form: x, bias, residual, norm_weight, norm_bias
    weight = w("norm_weight" if place == 3 else "scale", place)
    rank = len(w.shape("norm_weight" if place == 3 else "scale", place))
    cut = w.whole("begin_norm_axis", default=len(x) - rank) % len(x)
    return w.do("mul.Tensor", _scaled_by_rms(w, w("X", 0), list(range(cut, len(x)))), weight)


def _batch_norm(w: _Writer) -> _Value:
    fixed = w.attribute("is_test", default=False) or w.attribute("use_global_stats", default=False)
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
    return w.do(
        "batch_norm.default",
        w("X", 0),
        scale,
        bias,
        mean,
        variance,
        False,
        0.1,
        w.number("epsilon", default=1e-5),
        False,
    )


def _group_norm(w: _Writer) -> _Value:
    scale = w("Scale", 1) if w.has("Scale", 1) else None
    bias = w("Bias", 2) if w.has("Bias", 2) else None
    return w.do(
        "group_norm.default",
        w("X", 0),
        w.whole("groups"),
        scale,
        bias,
        w.number("epsilon", default=1e-5),
        False,
    )


def _cumsum(w: _Writer) -> _Value:
    if any(w.attribute(name, default=False) for name in ("exclusive", "reverse")):
        raise ReplayRefused("cumsum: exclusive or reversed it is not known to whence")
    if w.attribute("flatten", default=False):
        return w.do("cumsum.default", w.do("reshape.default", w("X", 0), [-1]), 0)
    return w.do("cumsum.default", w("X", 0), w.whole("axis", "input.1", default=-1))


def _argmax(name: str) -> Callable[[_Writer], _Value]:
    def write(w: _Writer) -> _Value:
        keep = bool(w.attribute("keepdims", default=False))
        if not w.attribute("flatten", default=False):
            return w.do(f"{name}.default", w("X", 0), w.whole("axis", "input.1"), keep)
        index = w.do(f"{name}.default", w.do("reshape.default", w("X", 0), [-1]), 0, keep)
        return w.do("reshape.default", index, [1] * len(w.shape("X", 0))) if keep else index

    return write


# ---- rows, shapes


def _embedding(w: _Writer) -> _Value:
    legacy = "Ids" in w.operands
    ids, weight = (w("Ids", -1), w("W", -1)) if legacy else (w("Ids", 0), w("W", 1))
    rows = w.do("embedding.default", weight, ids)
    padding = w.whole("padding_idx", default=-1)
    if padding == -1:
        return rows
    unpadded = w.do("ne.Scalar", ids, padding)
    return w.do(
        "mul.Tensor", rows, w.do("unsqueeze.default", w.do("type_as.default", unpadded, rows), -1)
    )


def _reshape(w: _Writer) -> _Value:
    if w.has("ShapeTensor", 9) or w.has("Shape", 1):
        # the shape was a tensor; what came out says it
        shape = w.output_shapes.get("Out", w.output_shapes.get("0"))
        if shape is None:
            raise ReplayRefused(f"{w.op_type}: its shape is a tensor")
        return w.do("reshape.default", w("X", 0), list(shape))
    return _reshaped(w, w("X", 0), w.shape("X", 0), w.integers("input.1", "shape"))[0]


def _to_made(w: _Writer) -> _Value:
    """An operator that only gives its elements another shape, which what it made has."""
    shape = w.output_shapes.get("Out", w.output_shapes.get("0"))
    if shape is None:
        raise ReplayRefused(f"{w.op_type}: the shape of what it made is not known")
    return w.do("reshape.default", w("X", 0), list(shape))


def _expand(w: _Writer) -> _Value:
    shape = w.output_shapes.get("Out", w.output_shapes.get("0"))
    if shape is None:
        raise ReplayRefused(f"{w.op_type}: the shape of what it made is not known")
    return w.do("clone.default", w.do("expand.default", w("X", 0), list(shape)))


def _slice(w: _Writer) -> _Value:
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
                value = w.do(
                    "flip.default",
                    w.do("slice.Tensor", value, axis, indices[-1], indices[0] + 1, -step),
                    [axis],
                )
                continue
            start, end, step = 0, 0, 1
        value = w.do("slice.Tensor", value, axis, start, min(end, shape[axis]), step)
    for axis in sorted(w.integers("decrease_axis", default=[]), reverse=True):
        value = w.do("squeeze.dim", value, axis)
    return w.do("clone.default", value)


def _concat(w: _Writer) -> _Value:
    return w.do(
        "cat.default", [w.read(o) for o in w.several("X", 0)], w.whole("axis", "input.1", default=0)
    )


def _stack(w: _Writer) -> _Value:
    return w.do("stack.default", [w.read(o) for o in w.several("X", 0)], w.whole("axis", default=0))


def _add_n(w: _Writer) -> _Value:
    first, *others = [w.read(o) for o in w.several("X", 0)]
    for term in others:
        first = w.do("add.Tensor", first, term)
    return first


def _split(w: _Writer) -> dict[str, _Value]:
    axis = w.whole(
        "axis",
        *(
            ("input.1",)
            if "num" in w.attributes and w.op_type == "split_with_num"
            else ("input.2",)
        ),
        default=0,
    )
    count = w.whole("num", default=0)
    extent = w.shape("X", 0)[axis]
    if count:
        sizes = [extent // count] * count
    else:
        sizes = w.integers("sections", "input.1")
        if -1 in sizes:
            sizes[sizes.index(-1)] = extent - sum(n for n in sizes if n != -1)
    w.do("split_with_sizes.default", w("X", 0), sizes, axis)
    place = len(w.operations) - 1
    many = {f"{slot}.{i}": {"op": [place, i]} for slot in ("Out", "0") for i in range(len(sizes))}
    return many if len(sizes) > 1 else {"Out": {"op": [place, 0]}, "0": {"op": [place, 0]}}


def _unbind(w: _Writer) -> dict[str, _Value]:
    axis, shape = w.whole("axis", default=0), w.shape("X" if "X" in w.operands else "input", 0)
    dim = axis % len(shape)
    parts = [
        w.do(
            "clone.default", w.do("select.int", w("X" if "X" in w.operands else "input", 0), dim, i)
        )
        for i in range(shape[dim])
    ]
    return {f"{slot}.{i}": part for slot in ("Out", "0") for i, part in enumerate(parts)}


def _gather(w: _Writer) -> _Value:
    axis = w.whole("axis", "dim", "input.2", default=0)
    if not w.has("Index", 1):  # a number of the program
        picked = w.integers("input.1")
        parts = [w.do("slice.Tensor", w("X", 0), axis, number, number + 1) for number in picked]
        return w.do("cat.default", parts, axis)
    index = w.operand("Index", 1)
    read = w.read(index)
    if len(index.shape) != 1:
        read = w.do("reshape.default", read, [math.prod(index.shape)])
    return w.do("index_select.default", w("X", 0), axis, read)


def _tile(w: _Writer) -> _Value:
    return w.do("repeat.default", w("X", 0), w.integers("repeat_times", "input.1"))


def _tril_triu(w: _Writer) -> _Value:
    return w.do(
        "tril.default" if w.attribute("lower", default=True) else "triu.default",
        w("X", 0),
        w.whole("diagonal", default=0),
    )


def _triangle(name: str) -> Callable[[_Writer], _Value]:
    return lambda w: w.do(name, w("X", 0), w.whole("diagonal", default=0))


def _dropout(w: _Writer) -> _Value:
    if not w.attribute("is_test", default=False) and w.number("p", "dropout_prob", default=0.5):
        raise ReplayRefused("dropout draws random numbers")
    share = w.number("p", "dropout_prob", "input.2", default=0.5)
    factor = (
        1.0 - share
        if w.attribute("mode", "dropout_implementation", default="upscale_in_train")
        == "downgrade_in_infer"
        else 1.0
    )
    return w.do("mul.Scalar", w("X", 0), factor)


# ---- attention


def _attention(
    w: _Writer,
    q: _Value,
    k: _Value,
    v: _Value,
    scale: float,
    mask: _Value | None,
    causal: bool,
    shapes: Any,
) -> _Value:
    """softmax(scale q k + mask) v of (batch, head, token, channel), step by step; causal counts
    from the last token.
    """
    if shapes[0][1] != shapes[1][1]:  # fewer heads of keys and values
        times = shapes[0][1] // shapes[1][1]
        k, v = (w.do("repeat_interleave.self_int", heads, times, 1) for heads in (k, v))
    scores = w.do("mul.Scalar", w.do("matmul.default", q, w.do("transpose.int", k, -1, -2)), scale)
    if mask is not None:
        scores = w.do("add.Tensor", scores, mask)
    if causal:
        rows, columns = shapes[0][2], shapes[1][2]
        ones = w.do("ones.default", [rows, columns], dtype={"dtype": "bool"})
        scores = w.do(
            "masked_fill.Scalar",
            scores,
            w.do("triu.default", ones, columns - rows + 1),
            {"float": "-inf"},
        )
    return w.do("matmul.default", w.do("softmax.int", scores, -1), v)


def _flash(w: _Writer) -> _Value:
    if w.number("dropout", "dropout_prob", default=0.0) and not w.attribute(
        "is_test", default=False
    ):
        raise ReplayRefused(f"{w.op_type} draws random numbers")
    turned, shapes = [], []
    for name, place in (("q", 0), ("k", 1), ("v", 2)):
        turned.append(w.do("permute.default", w(name, place), [0, 2, 1, 3]))
        shape = w.shape(name, place)
        shapes.append((shape[0], shape[2], shape[1], shape[3]))
    mask = None
    if w.op_type == "flash_attn" and w.has("attn_mask", 4):
        mask = w("attn_mask", 4)
    elif w.op_type == "memory_efficient_attention" and w.has("bias", 3):
        mask = w("bias", 3)
    scale = w.number("scale", "softmax_scale", default=0.0)
    scale = scale if scale > 0 else shapes[0][3] ** -0.5
    causal = bool(w.attribute("causal", "is_causal", default=False))
    return w.do(
        "permute.default",
        _attention(w, turned[0], turned[1], turned[2], scale, mask, causal, shapes),
        [0, 2, 1, 3],
    )


def _variable_length(w: _Writer) -> _Value:
    """variable_length_memory_efficient_attention(query, key, value, seq_lens, kv_seq_lens, mask),
    of full lengths.
    """
    lengths = [n for n in ("seq_lens", "kv_seq_lens") if w.has(n, 3 if n == "seq_lens" else 4)]
    shapes = [w.shape(n, i) for i, n in enumerate(("query", "key", "value"))]
    if shapes[0][0] != 1 or w.whole("pre_cache_length", default=0) or len(lengths) > 2:
        raise ReplayRefused(f"{w.op_type}: rows of several lengths are not known to whence")
    q, k, v = (w(n, i) for i, n in enumerate(("query", "key", "value")))
    mask = w("mask", 5) if w.has("mask", 5) else None
    scale = w.number("scale", default=0.0) or shapes[0][3] ** -0.5
    return _attention(w, q, k, v, scale, mask, bool(w.attribute("causal", default=False)), shapes)


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


def _sum(w: _Writer) -> _Value:
    """`sum`: of a ProgramDesc the sum of several tensors, of PIR along axes."""
    return (
        _add_n(w)
        if any(key.partition(".")[0] == "X" for key in w.operands)
        else _reduced("sum.dim_IntList")(w)
    )


def _rnn(w: _Writer) -> _Value:
    """Layers of LSTM, GRU or a plain recurrence: weights of all cells first, then biases; a cell is
    a direction of a layer.
    """
    if w.has("SequenceLength", 3):
        raise ReplayRefused(f"{w.op_type}: with lengths of sequences it is not known to whence")
    mode = str(w.attribute("mode"))
    kind = {
        "LSTM": "lstm.input",
        "GRU": "gru.input",
        "RNN_TANH": "rnn_tanh.input",
        "RNN_RELU": "rnn_relu.input",
    }[mode]
    layers, bidirectional = w.whole("num_layers"), bool(w.attribute("is_bidirec", default=False))
    if (
        w.number("dropout_prob", default=0.0)
        and layers > 1
        and not w.attribute("is_test", default=False)
    ):
        raise ReplayRefused(f"{w.op_type}: it draws random numbers")
    weights = w.several("WeightList", 2)
    cells = layers * (2 if bidirectional else 1)
    if len(weights) not in (2 * cells, 4 * cells):
        raise ReplayRefused(f"{w.op_type}: {len(weights)} weights for {cells} cells")
    biases = len(weights) == 4 * cells
    starts = (
        2 * cell + part for cell in range(cells) for part in ((0, 2 * cells) if biases else (0,))
    )
    params = [w.read(weights[start + i]) for start in starts for i in range(2)]
    sequence, extents = w("Input", 0), [cells, w.shape("Input", 0)[1], w.whole("hidden_size")]
    initial = [w.attribute(f"input.1.{i}", default=None) for i in range(2 if mode == "LSTM" else 1)]
    if None in initial:
        states = [w.read(state) for state in w.several("PreState", 1)]
    else:  # numbers of the program
        states = [w.do("new_full.default", sequence, extents, float(value)) for value in initial]
    return w.do(
        kind,
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
    **dict.fromkeys(("expand", "expand_v2", "expand_as", "expand_as_v2"), _expand),
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
    "leaky_relu": lambda w: w.do(
        "leaky_relu.default", w("X", 0), w.number("alpha", "negative_slope")
    ),
    "elu": lambda w: w.do("elu.default", w("X", 0), w.number("alpha", default=1.0)),
    "softplus": lambda w: w.do(
        "softplus.default",
        w("X", 0),
        w.number("beta", default=1.0),
        w.number("threshold", default=20.0),
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
    "transpose": lambda w: w.do(
        "clone.default", w.do("permute.default", w("X", 0), w.integers("perm", "axis"))
    ),
    "transpose2": lambda w: w.do(
        "clone.default", w.do("permute.default", w("X", 0), w.integers("axis", "perm"))
    ),
    "tile": _tile,
    "tril_triu": _tril_triu,
    "tril": _triangle("tril.default"),
    "triu": _triangle("triu.default"),
    "dropout": _dropout,
    "variable_length_memory_efficient_attention": _variable_length,
    "rnn": _rnn,
}
