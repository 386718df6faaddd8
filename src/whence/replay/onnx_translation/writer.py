"""A node of an ONNX graph, and the writer of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.replay.program_writing import ProgramWriter, Tensor

Writes = Callable[["Writer"], "Tensor | Sequence[Tensor | None]"]
"""Translates one operator; returns its output, or its outputs by position."""

MOST_VALUES = 256
_MISSING: Any = object()
UNSIGNED = ("uint16", "uint32", "uint64")
"""Dtypes that torch can store but supports in few operators; programs compute with
int64 instead.
"""


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a node reads.

    slot: of the call, "input..." or "param...". value: returns its elements, None where they are
    not known; called only if they decide what the node does.
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[], Array | None] = _unknown


def _plain(value: Array) -> list[int | float | bool]:
    """Returns the elements as Python numbers."""
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a node computes. slot: of the call, "output..."."""

    slot: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph. opset: the version of its domain's operators. inputs, outputs: by
    position, None where an optional one is absent.
    """

    op_type: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Sequence[Operand | None]
    outputs: Sequence[Result | None]


class Writer(ProgramWriter):
    """The program of a node while it is written.

    any_bits: whether the result is the same when the highest bit of an integer is read as its sign.
    fixed: as `Program.fixed`.
    """

    def __init__(self, node: Node, *, any_bits: bool = False) -> None:
        super().__init__()
        self.node, self.any_bits = node, any_bits
        self.fixed: dict[tuple[int, int, int], None] = {}
        self._converted: dict[int, Tensor] = {}
        self._guarded: set[int] = set()

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
        """The number of inputs, including absent ones."""
        return len(self.node.inputs)

    def raw(self, place: int) -> Tensor:
        """Returns the input without conversion."""
        operand = self.operand(place)
        if operand.dtype not in dtypes.DTYPES:
            raise self.refuse(f"its input {place} is of type {operand.dtype[:40] or 'unknown'}")
        return self.read(operand.slot, operand.dtype)

    def __call__(self, place: int) -> Tensor:
        """Returns the input as operators take it: unsigned integers of several bytes as int64."""
        dtype = self.operand(place).dtype
        if dtype not in UNSIGNED:
            return self.raw(place)
        if dtype == "uint64" and not self.any_bits:
            raise self.refuse("torch does not compute with uint64")
        if place not in self._converted:
            self._converted[place] = self.raw(place).to("int64")
        return self._converted[place]

    def optional(self, place: int) -> Tensor | None:
        return self(place) if self.has(place) else None

    def dtype(self, place: int) -> str:
        """Returns the dtype in which the program has this input."""
        dtype = self.operand(place).dtype
        return "int64" if dtype in UNSIGNED else dtype

    def is_float(self, place: int) -> bool:
        return dtypes.named(self.dtype(place)).is_floating

    def rank(self, place: int) -> int:
        return len(self.operand(place).shape)

    def shape(self, place: int) -> tuple[int, ...]:
        """Returns the extents of an input and restricts the program to them."""
        return tuple(self.extent(place, axis) for axis in range(self.rank(place)))

    def extent(self, place: int, axis: int) -> int:
        """Returns one extent of an input and restricts the program to it."""
        operand = self.operand(place)
        axis = self.axis(axis, len(operand.shape))
        read = self.raw(place).operand
        if "in" in read:
            self.fixed[read["in"], axis, operand.shape[axis]] = None
        return operand.shape[axis]

    def axis(self, axis: int, rank: int) -> int:
        """Returns an axis counted from the first."""
        if not -rank <= axis < max(rank, 1):
            raise self.refuse(f"axis {axis} of {rank}")
        return axis % rank if rank else 0

    # ---- elements that decide the operations of the program

    def elements(self, place: int) -> Array:
        """Returns the elements of an input and restricts the program to them: the program compares
        the input with them. Raises ReplayRefused when they are not known or too many.
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

    def _guard(self, tensor: Tensor, value: Array) -> None:
        flat = tensor.reshape([value.size]) if value.ndim > 1 else tensor
        for i, element in enumerate(_plain(value)):
            if isinstance(element, float) and not np.isfinite(element):
                raise self.refuse("an element that says what it does is not finite")
            (flat.select(0, i) if value.ndim else flat).item(guard=element)

    def integers_of(self, place: int) -> list[int]:
        return [int(element) for element in self.elements(place).reshape(-1)]

    def number_of(self, place: int) -> int | float | bool:
        """Returns the only element of an input, as in `elements`."""
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
            raise self.refuse(f"its attribute {name} is not a number ({str(value)[:40]})")
        return float(value)

    def whole(self, name: str, default: Any = _MISSING) -> int:
        return int(self.number(name, default))

    def text(self, name: str, default: Any = _MISSING) -> str:
        return str(self.attribute(name, default))

    def integers(self, name: str, default: Any = _MISSING) -> list[int]:
        value = self.attribute(name, default)
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            raise self.refuse(f"its attribute {name} is not a list of integers ({str(value)[:40]})")
        return list(value)

    def listed(self, place: int, name: str, *, since: int) -> list[int] | None:
        """Returns integers that are an attribute of this name or, since an opset, an input; None
        where neither is present.
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

    # ---- tensors

    def plus(self, value: Tensor, *places: int) -> Tensor:
        """Returns the value plus those of these inputs that are present."""
        for place in places:
            value = value + self(place) if self.has(place) else value
        return value

    def where(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.do("where", condition, a, b)

    def scalar(self, number: Any, dtype: str) -> Tensor:
        return self.do("scalar_tensor", number, dtype=dtype)

    def counted(self, count: int, dtype: str = "int64") -> Tensor:
        """Returns the tensor [0, 1, ..., count - 1]."""
        return self.do("arange", count, dtype=dtype)
