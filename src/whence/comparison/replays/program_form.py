"""What a program computes, apart from dtypes: its operators without casts, and its numbers without
what a dtype makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.comparison.replays.program_difference import CASTS
from whence.frameworks.operator_names import base_name
from whence.records import Operation, Program
from whence.records.marks import Mark, has_mark
from whence.records.program import TENSOR_OPERANDS, map_operands

_JUMPS = frozenset((
    "round", "floor", "ceil", "trunc", "fix", "frac", "sign", "sgn", "floor_divide", "remainder",
    "fmod", "bucketize", "searchsorted", "heaviside", "nonzero", "multinomial", "bernoulli",
    "unique", "_unique2", "histc", "bincount",
))  # fmt: skip
"""Operators whose result jumps: a last bit before them may be a whole step behind them."""


def with_reference_constants(reference: Program, target: Program) -> Program:
    """The target's program with the reference's numbers in the place of those that are the same
    but for a dtype: rounded to the program's, or following from a dtype, as its epsilon does.
    """
    theirs, ours = set(_floats(target)), set(_floats(reference))
    other_name = {
        number: match
        for number in theirs - ours
        if (match := next((n for n in ours - theirs if _is_rounded(n, number, target)), None))
        is not None
    }
    if not other_name:
        return target

    def put_back(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [put_back(item) for item in value]
        return other_name.get(value, value) if isinstance(value, float) else value

    operations = tuple(
        msgspec.structs.replace(
            op,
            args=tuple(put_back(op.args)),
            kwargs={key: put_back(value) for key, value in op.kwargs.items()},
        )
        for op in target.operations
    )
    return msgspec.structs.replace(
        target, id=f"{target.id} with constants of {reference.id}", operations=operations
    )


def _is_rounded(number: float, theirs: float, target: Program) -> bool:
    """Is `theirs` what a dtype makes of `number`: rounded to it, or the same limit of another?"""
    if target.base and float(np.asarray(number, dtypes.named(target.base).numpy)) == theirs:
        return True
    return bool(_limits_of_dtypes().get(number, set()) & _limits_of_dtypes().get(theirs, set()))


@functools.cache
def _limits_of_dtypes() -> dict[float, set[str]]:
    """Which limits of floating dtypes a number is: their epsilon, smallest and largest number."""
    import ml_dtypes

    names: dict[float, set[str]] = {}
    for name in ("float64", "float32", "float16", "bfloat16"):
        limits = ml_dtypes.finfo(dtypes.named(name).numpy)
        for limit in ("eps", "tiny", "min", "max", "smallest_subnormal"):
            names.setdefault(float(getattr(limits, limit)), set()).add(limit)
    return names


def is_smooth(program: Program) -> bool:
    """May two programs like this be compared in float64: does no value decide what runs, no result
    jump, and is it what the code ran?
    """
    return not (
        has_mark(program, Mark.TRANSLATED)
        or has_mark(program, Mark.COMPOSED)
        or any(op.guard is not None or _jumps(op) for op in program.operations)
    )


def _jumps(op: Operation) -> bool:
    """Does the result of an operator jump, by what it is, by how it rounds a quotient, or because
    it makes whole numbers?
    """
    to_integer = op.name.startswith(CASTS) and any(
        kind == "dtype" and str(value).startswith(("int", "uint")) for kind, value in op.operands()
    )
    by_rounding = op.kwargs.get("rounding_mode") is not None
    return to_integer or by_rounding or base_name(op.name).removesuffix("_") in _JUMPS


def _floats(program: Program) -> Iterator[float]:
    """The numbers with a fraction among the arguments of a program."""

    def numbers(value: Any) -> Iterator[float]:
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from numbers(item)

    for op in program.operations:
        yield from numbers((*op.args, *op.kwargs.values()))


def normal_form(program: Program, name: Callable[[str], str]) -> Iterator[tuple[str, Any, Any]]:
    """The operators of a program and what they are given, without casts, and without dtypes; the
    last entries are the outputs. name: of a slot. Equal for equal functions; the reverse does not
    hold.
    """
    number: dict[int, Any] = {}

    def renamed(kind: str, value: Any) -> Any:
        if kind == "in":
            return "in", name(program.inputs[value])
        if kind == "param":
            return "param", name(value)
        if kind == "op":
            place, result = value
            return (number[place], result) if isinstance(number[place], int) else number[place]
        return None if kind in ("dtype", "device", "layout", "memory_format") else (kind, value)

    kept = 0
    for place, op in enumerate(program.operations):
        source = map_operands(renamed, op.args[0]) if op.args else None
        if op.name.startswith(CASTS) and _is_tensor(op):
            number[place] = source
            continue
        number[place], kept = kept, kept + 1
        kwargs = {
            key: value
            for key, item in sorted(op.kwargs.items())
            if (value := map_operands(renamed, item)) is not None
        }
        yield op.name, tuple(map_operands(renamed, op.args)), kwargs
    for slot, operand in sorted(program.outputs, key=lambda output: name(output[0])):
        yield "output", name(slot), map_operands(renamed, operand)


def _is_tensor(op: Operation) -> bool:
    """Is the first argument of an operation a tensor?"""
    first = op.args[0] if op.args else None
    return isinstance(first, dict) and next(iter(first)) in TENSOR_OPERANDS


def without_floats(form: Any) -> Any:
    """A normal form with every number that has a fraction blotted out."""
    if isinstance(form, float):
        return 0.0
    if isinstance(form, dict):
        return {key: without_floats(value) for key, value in form.items()}
    if isinstance(form, (list, tuple)):
        return [without_floats(item) for item in form]
    return form
