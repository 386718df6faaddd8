"""What a node of an ONNX graph is, and the program as it is written from one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Operation
from whence.records.slots import is_param

Value = dict[str, Any]
"""A tensor of the program, as an operand."""
Writes = Callable[["Writer"], "Value | Sequence[Value | None]"]
"""Writes one operator; gives its output, or its outputs by position."""

MOST_VALUES = 256
_MISSING: Any = object()
_UNSIGNED = ("uint16", "uint32", "uint64")
"""Dtypes that torch stores and hardly computes with: int64 takes their place in a program."""


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a node reads. slot: of the call, "input..." or "param...". value: gives its
    elements, None where they are not known; asked only if they decide what the node does.
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[], Array | None] = _unknown


def _finite(value: Any) -> Any:
    """A number as an argument, which JSON may not be able to hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    return value


def _plain(value: Array) -> list[int | float | bool]:
    """The elements as numbers of Python."""
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a node made. slot: of the call, "output..."."""

    slot: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph. opset: the version of the operators of its domain. inputs, outputs: by
    position, None where an optional one is absent.
    """

    op_type: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Sequence[Operand | None]
    outputs: Sequence[Result | None]


@dataclass(slots=True)
class Writer:
    """The program of a node as it is written. any_bits: is the result the same for integers whose
    highest bit is a sign?
    """

    node: Node
    any_bits: bool = False
    inputs: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    fixed: dict[tuple[int, int, int], None] = field(default_factory=dict)
    _converted: dict[int, Value] = field(default_factory=dict)
    _guarded: set[int] = field(default_factory=set)

    # ---- what the node reads

    @property
    def opset(self) -> int:
        return self.node.opset

    def refuse(self, reason: str) -> ReplayRefused:
        return ReplayRefused(f"{self.node.op_type}: {reason}")

    def has(self, place: int) -> bool:
        return place < len(self.node.inputs) and self.node.inputs[place] is not None

    def operand(self, place: int) -> Operand:
        operand = self.node.inputs[place] if place < len(self.node.inputs) else None
        if operand is None:
            raise self.refuse(f"its input {place} is not there")
        return operand

    @property
    def count(self) -> int:
        """How many inputs there are, absent ones too."""
        return len(self.node.inputs)

    def raw(self, place: int) -> Value:
        """The input as it is."""
        operand = self.operand(place)
        if operand.dtype not in dtypes.DTYPES:
            raise self.refuse(f"its input {place} is of type {operand.dtype[:40] or 'unknown'}")
        listed = self.params if is_param(operand.slot) else self.inputs
        if operand.slot not in listed:
            listed.append(operand.slot)
        if listed is self.params:
            return {"param": operand.slot}
        return {"in": listed.index(operand.slot)}

    def __call__(self, place: int) -> Value:
        """The input as operators take it: unsigned integers of several bytes as int64."""
        dtype = self.operand(place).dtype
        if dtype not in _UNSIGNED:
            return self.raw(place)
        if dtype == "uint64" and not self.any_bits:
            raise self.refuse("torch does not compute with uint64")
        if place not in self._converted:
            self._converted[place] = self.cast(self.raw(place), "int64")
        return self._converted[place]

    def optional(self, place: int) -> Value | None:
        return self(place) if self.has(place) else None

    def dtype(self, place: int) -> str:
        """The dtype in which the program has this input."""
        dtype = self.operand(place).dtype
        return "int64" if dtype in _UNSIGNED else dtype

    def is_float(self, place: int) -> bool:
        return dtypes.named(self.dtype(place)).is_floating

    def rank(self, place: int) -> int:
        return len(self.operand(place).shape)

    def shape(self, place: int) -> tuple[int, ...]:
        """The extents of an input, which become those that the program serves."""
        return tuple(self.extent(place, axis) for axis in range(self.rank(place)))

    def extent(self, place: int, axis: int) -> int:
        """One extent of an input, which becomes the one that the program serves."""
        operand = self.operand(place)
        axis = self.axis(axis, len(operand.shape))
        value = self.raw(place)
        if "in" in value:
            self.fixed[value["in"], axis, operand.shape[axis]] = None
        return operand.shape[axis]

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the first."""
        if not -rank <= axis < max(rank, 1):
            raise self.refuse(f"axis {axis} of {rank}")
        return axis % rank if rank else 0

    # ---- elements that decide the form of the program

    def elements(self, place: int) -> Array:
        """The elements of an input, which become those that the program serves: it reads them and
        compares.
        """
        operand = self.operand(place)
        count = math.prod(operand.shape)
        if count > MOST_VALUES:
            raise self.refuse(f"its input {place} has {count} elements that say what it does")
        value = operand.value()
        if value is None or value.shape != operand.shape:
            raise self.refuse(f"the elements of its input {place} are not known")
        if place not in self._guarded:
            self._guarded.add(place)
            self._guard(self(place), value)
        return value

    def _guard(self, tensor: Value, value: Array) -> None:
        flat = self.do("reshape.default", tensor, [value.size]) if value.ndim > 1 else tensor
        for i, element in enumerate(_plain(value)):
            if isinstance(element, float) and not np.isfinite(element):
                raise self.refuse("an element that says what it does is not finite")
            one = self.do("select.int", flat, 0, i) if value.ndim else flat
            self.do("item.default", one, guard=element)

    def integers_of(self, place: int) -> list[int]:
        return [int(element) for element in self.elements(place).reshape(-1)]

    def number_of(self, place: int) -> int | float | bool:
        """The one element of an input."""
        elements = _plain(self.elements(place))
        if len(elements) != 1:
            raise self.refuse(f"its input {place} has {len(elements)} elements, not one")
        return elements[0]

    # ---- attributes

    def attribute(self, name: str, default: Any = _MISSING) -> Any:
        value = self.node.attributes.get(name)
        if value is None:
            if default is _MISSING:
                raise self.refuse(f"its attribute {name} is not known")
            return default
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self.attribute(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(f"its attribute {name} is no number ({str(value)[:40]})")
        return float(value)

    def whole(self, name: str, default: Any = _MISSING) -> int:
        return int(self.number(name, default))

    def text(self, name: str, default: Any = _MISSING) -> str:
        return str(self.attribute(name, default))

    def integers(self, name: str, default: Any = _MISSING) -> list[int]:
        value = self.attribute(name, default)
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            raise self.refuse(f"its attribute {name} is no list of integers ({str(value)[:40]})")
        return list(value)

    def listed(self, place: int, name: str, *, since: int) -> list[int] | None:
        """Integers that are an attribute of this name and, since an opset, an input; None where
        neither is there.
        """
        if self.opset >= since:
            return self.integers_of(place) if self.has(place) else None
        return self.integers(name) if self.attribute(name, None) is not None else None

    # ---- what the node made

    def wants(self, place: int) -> bool:
        return place < len(self.node.outputs) and self.node.outputs[place] is not None

    def made(self, place: int = 0) -> Result:
        result = self.node.outputs[place] if place < len(self.node.outputs) else None
        if result is None:
            raise self.refuse(f"its output {place} is not known")
        return result

    # ---- operators

    def do(self, name: str, *args: Any, guard: float | bool | None = None, **kwargs: Any) -> Value:
        """One aten operation; the value is its first result."""
        args = tuple(map(_finite, args))
        self.operations.append(Operation(f"aten.{name}", args, kwargs, guard))
        return {"op": [len(self.operations) - 1, 0]}

    def several(self, name: str, count: int, *args: Any, **kwargs: Any) -> list[Value]:
        """One aten operation of several results."""
        self.do(name, *args, **kwargs)
        return [{"op": [len(self.operations) - 1, i]} for i in range(count)]

    def cast(self, value: Value, dtype: str) -> Value:
        return self.do("to.dtype", value, {"dtype": dtype})

    def add(self, a: Value, b: Value) -> Value:
        return self.do("add.Tensor", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.do("sub.Tensor", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.do("mul.Tensor", a, b)

    def div(self, a: Value, b: Value) -> Value:
        return self.do("div.Tensor", a, b)

    def times(self, value: Value, factor: float) -> Value:
        return value if factor == 1 else self.do("mul.Scalar", value, factor)

    def plus(self, value: Value, number: float) -> Value:
        return value if number == 0 else self.do("add.Scalar", value, number)

    def matmul(self, a: Value, b: Value) -> Value:
        return self.do("matmul.default", a, b)

    def reshape(self, value: Value, shape: Sequence[Any]) -> Value:
        return self.do("reshape.default", value, list(shape))

    def permute(self, value: Value, axes: Sequence[int]) -> Value:
        return self.do("permute.default", value, list(axes))

    def part(self, value: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
        return self.do("slice.Tensor", value, axis, start, end, step)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        return self.do("where.self", condition, a, b)

    def scalar(self, number: float, dtype: str) -> Value:
        return self.do("scalar_tensor.default", number, dtype={"dtype": dtype})

    def counted(self, count: int, dtype: str = "int64") -> Value:
        """0, 1, ... as a tensor."""
        return self.do("arange.default", count, dtype={"dtype": dtype})

    def along(self, value: Value, rank: int, axis: int) -> Value:
        """A vector laid along one of so many axes."""
        return self.reshape(value, [-1 if a == axis else 1 for a in range(rank)])
