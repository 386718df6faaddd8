"""Declared semantics: how a replay changes its arithmetic for a declared, allowed difference.
Values are numpy arrays; programs are edited as data.

Quantised numbers are simulated ("fake quantisation"): a value is encoded, and the value that its
code represents is passed on, (code - zero point) x scale, rounded half to even. Source: Jacob et
al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
2018, eq. 1; fp8: OCP 8-bit Floating Point Specification, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.records.program import map_operands

F64 = npt.NDArray[np.float64]
_FLOATS: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# The smallest scale: an all-zero row would otherwise divide by zero.
_LEAST = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True)
class Grid:
    """A quantised number format and the elements that share one scale.

    bits: 2 to 8, for format "int"; "e4m3" and "e5m2" are 8-bit floats. per: "tensor", "channel"
    (one scale for each index along `axis`), "group" (`group` neighbours along the last axis) or
    "token" (each vector along the last axis). span: how a symmetric scale is chosen, "narrow"
    max|x| / (2^(bits-1) - 1) or "full" max|x| / ((2^bits - 1) / 2); both are in use.
    """

    bits: int = 8
    per: str = "tensor"
    axis: int = 0
    group: int = 0
    symmetric: bool = True
    format: str = "int"
    span: str = "narrow"

    @property
    def codes(self) -> tuple[int, int]:
        """Returns the smallest and largest integer code, two's complement."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1


def blocks(x: Array, grid: Grid) -> tuple[F64, tuple[int, ...]]:
    """Returns x in float64, reshaped so that the elements that share a scale lie along the returned
    axes. Raises ReplayRefused when the grid does not fit x.
    """
    wide: F64 = np.asarray(x, dtype=np.float64)
    if grid.per == "group":
        if wide.ndim == 0 or wide.shape[-1] % grid.group:
            raise ReplayRefused(
                f"a shape {list(wide.shape)} has no groups of {grid.group} along its last axis"
            )
        wide = wide.reshape(*wide.shape[:-1], wide.shape[-1] // grid.group, grid.group)
        return wide, (wide.ndim - 1,)
    if grid.per == "token":
        return wide, (wide.ndim - 1,) if wide.ndim else ()
    if grid.per == "channel":
        if grid.axis >= wide.ndim:
            raise ReplayRefused(f"a shape {list(wide.shape)} has no axis {grid.axis}")
        return wide, tuple(a for a in range(wide.ndim) if a != grid.axis)
    return wide, tuple(range(wide.ndim))


def scales(x: Array, grid: Grid) -> tuple[F64, F64]:
    """Returns (scale, zero point) of x from its minimum and maximum, shaped to broadcast over
    `blocks(x, grid)`. Zero points are 0 for a symmetric grid.
    """
    view, axes = blocks(x, grid)
    low, high = grid.codes
    if not view.size:
        return np.ones((1,) * view.ndim), np.zeros((1,) * view.ndim)
    if grid.symmetric or grid.format != "int":
        largest = np.abs(view).max(axes, keepdims=True)
        top = (
            float(ml_dtypes.finfo(_FLOATS[grid.format]).max)
            if grid.format != "int"
            else float(high)
            if grid.span == "narrow"
            else (high - low) / 2
        )
        scale = np.maximum(largest / top, _LEAST)
        return scale, np.zeros_like(scale)
    # The range includes zero, so that zero has a code of its own.
    least, largest = (
        np.minimum(view.min(axes, keepdims=True), 0.0),
        np.maximum(view.max(axes, keepdims=True), 0.0),
    )
    scale = np.maximum((largest - least) / (high - low), _LEAST)
    return scale, np.clip(low - np.rint(least / scale), low, high)


@dataclass(slots=True)
class Ties:
    """Counts codes within `within` * max(|code|, 1) of a tie.

    per_vector: the largest count in one vector along the last axis, set by `fake_quantise`.
    """

    within: float
    per_vector: int = 0


def fake_quantise(
    x: Array,
    grid: Grid,
    scale: Array | None = None,
    *,
    working: str = "float64",
    ties: Ties | None = None,
    flips: Collection[int] = (),
) -> F64:
    """Returns x after quantisation on the grid, in float64 and of x's shape.

    scale: a given (static) one, broadcastable; else computed from x. working: dtype in which scale
    and codes are computed ("float32" and "bfloat16" round like a target that uses that precision).
    ties: its `per_vector` is set to the count of codes so near a tie that a correct target may
    round them either way. flips: for each vector along the last axis, which of its ties (0 the
    nearest) are rounded the other way.
    """
    view, _ = blocks(x, grid)
    if scale is None:
        s, zero = scales(x, grid)
    else:
        s, zero = np.asarray(scale, dtype=np.float64), np.zeros(())
    kind = dtypes.named(working).numpy

    def rounded(value: Any) -> F64:
        out: F64 = np.asarray(value, dtype=np.float64).astype(kind).astype(np.float64)
        return out

    s = rounded(s)
    if grid.format != "int":
        top = float(ml_dtypes.finfo(_FLOATS[grid.format]).max)
        small = (
            np.clip(rounded(view / s), -top, top).astype(_FLOATS[grid.format]).astype(np.float64)
        )
        return (small * s).reshape(np.shape(x))
    low, high = grid.codes
    exact = rounded(view / s)
    code = np.rint(exact)
    if ties is not None:
        away = 0.5 - np.abs(exact - code)
        # Beyond the ends both ways are clipped to one.
        flipped = np.clip(np.where(exact >= code, code + 1, code - 1) + zero, low, high) - zero
        near = (away <= ties.within * np.maximum(np.abs(exact), 1.0)) & (
            flipped != np.clip(code + zero, low, high) - zero
        )
        ties.per_vector = int(near.sum(-1).max(initial=0)) if near.ndim else int(near)
        if flips and near.ndim:
            rows = near.any(-1)
            rank = np.argsort(
                np.argsort(np.where(near[rows], away[rows], np.inf), axis=-1), axis=-1
            )
            code[rows] = np.where(
                near[rows] & np.isin(rank, list(flips)), flipped[rows], code[rows]
            )
    code = np.clip(code + zero, low, high)
    return ((code - zero) * s).reshape(np.shape(x))


def round_mantissa(x: Array, how: str = "even") -> F64:
    """Returns x with 10 explicit bits of mantissa (TF32), in float64. how: "even" (ties to even),
    "away" (ties away from zero), "truncate".
    """
    mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    scaled = mantissa * 2048.0
    if how == "even":
        scaled = np.rint(scaled)
    elif how == "away":
        scaled = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    else:
        scaled = np.trunc(scaled)
    out: F64 = np.ldexp(scaled / 2048.0, exponent)
    return out


# ---- programs

# Which positional arguments of an operator are multiplied with each other.
_OPERANDS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "linear": (0, 1), "mv": (0, 1), "dot": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2), "convolution": (0, 1),
    "_convolution": (0, 1), "conv1d": (0, 1), "conv2d": (0, 1), "conv3d": (0, 1),
    "conv_transpose1d": (0, 1), "conv_transpose2d": (0, 1), "conv_transpose3d": (0, 1),
    "mkldnn_convolution": (0, 1),
}  # fmt: skip


def _base(operation: Operation) -> str:
    parts = operation.name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else ""


def with_tf32(program: Program, how: str) -> Program | None:
    """Returns the program with both operands of every matrix product and convolution rounded to 10
    bits of mantissa; None when the program has neither.

    how: as in `round_mantissa`. The sums stay in the working dtype.
    """
    out: list[Operation] = []
    moved: dict[int, int] = {}
    changed = False

    def renumbered(kind: str, value: Any) -> Any:
        """Returns an operation result by its new place."""
        return {kind: [moved[value[0]], value[1]]} if kind == "op" else {kind: value}

    for place, operation in enumerate(program.operations):
        operation = operation.with_operands(renumbered)
        args = operation.args
        for position in _OPERANDS.get(_base(operation), ()):
            if position < len(args) and isinstance(args[position], dict):
                changed = True
                steps = _rounding(args[position], how, len(out))
                out += steps
                args = (*args[:position], {"op": [len(out) - 1, 0]}, *args[position + 1 :])
        moved[place] = len(out)
        out.append(msgspec.structs.replace(operation, args=args))
    if not changed:
        return None
    outputs = tuple((slot, map_operands(renumbered, operand)) for slot, operand in program.outputs)
    return msgspec.structs.replace(
        program, id=f"{program.id}+tf32-{how}", operations=tuple(out), outputs=outputs
    )


def _rounding(operand: Any, how: str, start: int) -> list[Operation]:
    steps = [
        Operation("aten.frexp.Tensor", (operand,)),
        Operation("aten.mul.Tensor", ({"op": [start, 0]}, 2048.0)),
    ]
    if how == "even":
        steps.append(Operation("aten.round.default", ({"op": [start + 1, 0]},)))
    else:
        inner = {"op": [start + 1, 0]}
        if how == "away":
            steps += [
                Operation("aten.sign.default", (inner,)),
                Operation("aten.mul.Tensor", ({"op": [start + 2, 0]}, 0.5)),
                Operation("aten.add.Tensor", (inner, {"op": [start + 3, 0]})),
            ]
            inner = {"op": [start + 4, 0]}
        steps.append(Operation("aten.trunc.default", (inner,)))
    last = start + len(steps) - 1
    steps.append(Operation("aten.mul.Tensor", ({"op": [last, 0]}, 2.0**-11)))
    steps.append(Operation("aten.ldexp.Tensor", ({"op": [last + 1, 0]}, {"op": [start, 1]})))
    return steps


def gelu_program(program: Program, form: str) -> Program:
    """Returns a program of the same single input and output that computes this form of GELU: "erf",
    "tanh" or "sigmoid" (x sigmoid(1.702 x)).

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, sec. 2.
    """
    x = {"in": 0}
    if form == "sigmoid":
        operations: tuple[Operation, ...] = (
            Operation("aten.mul.Tensor", (x, 1.702)),
            Operation("aten.sigmoid.default", ({"op": [0, 0]},)),
            Operation("aten.mul.Tensor", (x, {"op": [1, 0]})),
        )
    else:
        operations = (
            Operation(
                "aten.gelu.default", (x,), {"approximate": "tanh" if form == "tanh" else "none"}
            ),
        )
    outputs = ((program.outputs[0][0], {"op": [len(operations) - 1, 0]}),)
    return msgspec.structs.replace(
        program,
        id=f"{program.id}+gelu-{form}",
        operations=operations,
        outputs=outputs,
        params=(),
        constants=(),
        grad=(),
    )


def with_gelu(program: Program, form: str) -> Program | None:
    """Returns the program with every GELU operator of the other form ("erf" or "tanh") converted to
    this one; None when that changes nothing.
    """
    approximation = "tanh" if form == "tanh" else "none"
    changed = False
    out: list[Operation] = []
    for operation in program.operations:
        if (
            form != "sigmoid"
            and _base(operation) in ("gelu", "gelu_")
            and operation.kwargs.get("approximate", "none") != approximation
        ):
            operation = msgspec.structs.replace(
                operation, kwargs={**operation.kwargs, "approximate": approximation}
            )
            changed = True
        out.append(operation)
    return (
        msgspec.structs.replace(program, id=f"{program.id}+gelu-{form}", operations=tuple(out))
        if changed
        else None
    )


def computes_gelu(
    program: Program, form: str, run: Callable[[Program], Mapping[str, Array]]
) -> bool:
    """Whether this whole program (one input, one output, no parameters) is a GELU of this form, by
    whatever operators.

    run: executes a program in float64 on the inputs at hand.
    """
    if len(program.inputs) != 1 or len(program.outputs) != 1 or program.params:
        return False
    slot = program.outputs[0][0]
    own_result, pure = (
        run(program)[slot].astype(np.float64),
        run(gelu_program(program, form))[slot].astype(np.float64),
    )
    return own_result.shape == pure.shape and bool(
        np.allclose(own_result, pure, rtol=1e-5, atol=1e-7)
    )
