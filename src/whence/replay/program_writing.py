"""Writes programs operator by operator: a method call on a `Tensor` appends to the program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from whence import dtypes
from whence.records import Operation, Program
from whence.records.program import identified
from whence.records.slots import is_param
from whence.replay.program_parts import ProgramBuilder

_OVERLOADS = {
    "flatten": "using_ints", "index": "Tensor", "log_softmax": "int", "masked_fill": "Scalar",
    "mean": "dim", "pow": "Tensor_Tensor", "prod": "dim_int", "repeat_interleave": "self_int",
    "scatter": "src", "scatter_reduce": "two", "select": "int", "slice": "Tensor",
    "softmax": "int", "sort": "stable", "squeeze": "dim", "sum": "dim_IntList", "to": "dtype",
    "transpose": "int", "var": "correction", "where": "self",
}  # fmt: skip
_OF_TWO = frozenset(
    (
        "add",
        "bitwise_and",
        "div",
        "eq",
        "fmod",
        "ge",
        "gt",
        "le",
        "lt",
        "mul",
        "ne",
        "remainder",
        "sub",
    )
)
"""Operators of a tensor and a second tensor or a number."""


class Tensor:
    """A tensor of a program that is being written, with the operators of aten as methods. operand:
    its operand in the program.
    """

    __slots__ = ("operand", "writer")

    def __init__(self, writer: ProgramWriter, operand: dict[str, Any]) -> None:
        self.writer, self.operand = writer, operand

    def __getattr__(self, operator: str) -> Callable[..., Tensor]:
        return functools.partial(self.writer.do, operator, self)

    def to(self, dtype: str) -> Tensor:
        """Returns the tensor cast to another dtype."""
        return self.writer.do("to", self, {"dtype": dtype})

    def part(self, axis: int, start: int, end: int, step: int = 1) -> Tensor:
        """Returns every step-th element of an axis, from `start` to before `end`."""
        return self.writer.do("slice", self, axis, start, end, step)

    def along(self, rank: int, axis: int) -> Tensor:
        """Reshapes a vector to `rank` axes, with its elements along `axis`."""
        return self.reshape([-1 if a == axis else 1 for a in range(rank)])

    def padded(self, before: Sequence[int], behind: Sequence[int], filled: float = 0) -> Tensor:
        """Returns the tensor padded along its last axes; negative numbers cut off."""
        if not any([*before, *behind]):
            return self
        sides = [n for pair in reversed([*zip(before, behind)]) for n in pair]
        return self.constant_pad_nd(sides, filled)

    def channels_first(self, rank: int) -> Tensor:
        """Returns the tensor with its last axis moved to the second place."""
        return self.permute([0, rank - 1, *range(1, rank - 1)])

    def channels_last(self, rank: int) -> Tensor:
        """Returns the tensor with its second axis moved to the end."""
        return self.permute([0, *range(2, rank), 1])

    def __add__(self, other: Tensor | float) -> Tensor:
        return self if _is(other, 0) else self.writer.do("add", self, other)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("sub", self, other) if isinstance(other, Tensor) else self + -other

    def __rsub__(self, number: float) -> Tensor:
        return self.writer.do("rsub.Scalar", self, number)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return self if _is(other, 1) else self.writer.do("mul", self, other)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("div", self, other)

    def __mod__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("remainder", self, other)

    def __pow__(self, number: float) -> Tensor:
        return self.writer.do("pow.Tensor_Scalar", self, number)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.writer.do("matmul", self, other)

    def __neg__(self) -> Tensor:
        return self.writer.do("neg", self)

    def __invert__(self) -> Tensor:
        return self.writer.do("logical_not", self)

    def __and__(self, other: Tensor) -> Tensor:
        return self.writer.do("logical_and", self, other)

    def __lt__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("lt", self, other)

    def __le__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("le", self, other)

    def __gt__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("gt", self, other)

    def __ge__(self, other: Tensor | float) -> Tensor:
        return self.writer.do("ge", self, other)


def _is(value: Tensor | float, number: int) -> bool:
    return not isinstance(value, Tensor) and value == number


class ProgramWriter(ProgramBuilder):
    """Appends operators one after the other."""

    def read(self, slot: str, dtype: str) -> Tensor:
        """Returns an input or param of the program."""
        return Tensor(self, self.param(slot) if is_param(slot) else self.input(slot, dtype))

    def do(self, name: str, *args: Any, guard: float | bool | None = None, **kwargs: Any) -> Tensor:
        """Appends one operator of aten and returns its first result.

        name: with the overload where that does not follow from the arguments. A dtype is given by
        its name.
        """
        if "." not in name:
            name = f"{name}.{_overload(name, args, kwargs)}"
        named = {k: {"dtype": v} if k == "dtype" else _plain(v) for k, v in kwargs.items()}
        self.append(Operation(f"aten.{name}", tuple(map(_plain, args)), named, guard))
        return self._result(0)

    def several(self, name: str, count: int, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Appends one operator that has several results and returns these."""
        self.do(name, *args, **kwargs)
        return [self._result(place) for place in range(count)]

    def _result(self, place: int) -> Tensor:
        return Tensor(self, {"op": [self.length - 1, place]})

    def written(
        self,
        outputs: Iterable[tuple[str, Tensor]],
        operands: Mapping[str, str],
        note: str,
        fixed: Iterable[tuple[int, int, int]] = (),
    ) -> Program:
        """Returns the program.

        outputs: (slot, tensor). operands: slot -> dtype of every tensor that the program could
        read. fixed: as `Program.fixed`.
        """
        program = self.program([(slot, tensor.operand) for slot, tensor in outputs])
        slots = [
            slot for read in (program.params, program.inputs) for slot in operands if slot in read
        ]
        floating = (operands[slot] for slot in slots if dtypes.named(operands[slot]).is_floating)
        return identified(
            msgspec.structs.replace(
                program,
                base=next(floating, ""),
                fixed=tuple(fixed),
                inference=True,
                notes=(note,),
            )
        )


def _overload(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if name not in _OF_TWO:
        return _OVERLOADS.get(name, "default")
    kind = "Tensor" if isinstance(args[1], Tensor) else "Scalar"
    return f"{kind}_mode" if "rounding_mode" in kwargs else kind


def _plain(value: Any) -> Any:
    """Returns an argument in the form that programs use."""
    if isinstance(value, Tensor):
        return value.operand
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value
