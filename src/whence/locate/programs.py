"""What differs between the recorded programs of two calls, in words."""

from __future__ import annotations

from typing import Any

from whence.records import Operation, Program

_DEFAULT = "its default"
_CASTS = ("whence.cast", "aten._to_copy", "aten.to.", "aten.detach", "aten.lift_fresh")


def difference(reference: Program, target: Program) -> str:
    """One clause naming the first operator or argument in which two programs differ, "" when they do the same.

    Casts are passed over: a run in another precision has other casts and computes the same.
    """
    left, right = _steps(reference), _steps(target)
    for a, b in zip(left, right):
        if a.name != b.name:
            return f"the reference runs {_short(a.name)} where the target runs {_short(b.name)}"
        what = _arguments(a, b)
        if what:
            return f"{_short(a.name)} is called with {what}"
    if len(left) != len(right):
        longer, side = (left, "reference") if len(left) > len(right) else (right, "target")
        return f"only the {side} runs {_short(longer[min(len(left), len(right))].name)}"
    return ""


def _steps(program: Program) -> list[Operation]:
    return [op for op in program.operations if not op.name.startswith(_CASTS)]


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _arguments(a: Operation, b: Operation) -> str:
    if len(a.args) != len(b.args):
        return f"{len(a.args)} arguments against {len(b.args)}"
    for i, (x, y) in enumerate(zip(a.args, b.args)):
        if _literal(x) and _literal(y) and x != y:
            return f"argument {i} {x} against {y}"
    for key in sorted(set(a.kwargs) | set(b.kwargs)):
        x, y = a.kwargs.get(key, _DEFAULT), b.kwargs.get(key, _DEFAULT)
        if _literal(x) and _literal(y) and x != y:
            return f"{key} {x} against {y}"
    return ""


def _literal(value: Any) -> bool:
    """A number, string or None: what a user would recognise. Operands, dtypes and shapes follow the tensors."""
    return isinstance(value, (int, float, str, bool)) or value is None
