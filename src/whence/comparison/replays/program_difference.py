"""What differs between the recorded programs of two calls, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Protocol

import numpy as np

from whence import extras
from whence.align.calls.sequence_alignment import blocks
from whence.dtypes import Array
from whence.errors import UsageError
from whence.frameworks.operator_names import base_name, words
from whence.records import Call, Operation, Program
from whence.records.program import OPTIMIZER_STEP

_DEFAULT = "its default"
_OPTIMIZER = "optimiser"
_LARGEST = float(np.finfo(np.float32).max)
_MOVES = (
    "aten.view.", "aten._unsafe_view.", "aten.reshape.", "aten.transpose.", "aten.permute.",
    "aten.expand.", "aten.slice.", "aten.select.", "aten.unsqueeze.", "aten.squeeze.",
    "aten.t.", "aten.contiguous.", "aten.clone.", "aten.alias.", "aten.split", "aten.chunk.",
    "aten.unbind.", "aten.as_strided.", "aten.narrow.", "aten.flatten.", "aten.empty",
    "aten.unflatten.",
)  # fmt: skip
CASTS = ("whence.cast", "aten._to_copy", "aten.to.", "aten.detach", "aten.lift_fresh")


_ANEW, _LEAST = (
    0.5,
    8,
    # share of operators in the same order, below which programs of so many are not compared one by
    # one
)
# Operators that distinguish formulas, however the rest is written.
_FUNCTIONS = frozenset((
    "gelu", "silu", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "mish", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "tanh", "sigmoid", "exp", "expm1", "log", "log1p",
    "log_sigmoid_forward", "_softmax", "_log_softmax", "softmax", "rsqrt", "sqrt", "erf", "sin",
    "cos", "topk", "sort", "clamp", "cumsum", "glu", "prelu_kernel", "_prelu_kernel",
))  # fmt: skip


# Lists of numbers that are settings of an operator; others are shapes.
_SETTINGS = frozenset(
    words("""
    stride padding dilation output_padding kernel_size dim betas etas step_sizes ns_coefficients
""")
)


class _Step(Protocol):
    """An operator with its arguments."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> Sequence[Any]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...


class Parting(NamedTuple):
    """The first operator in which two programs differ, in words. place: its number in the target's
    program, -1 if it is missing there or not determined. on_one_side: whether only one program runs
    it at this point.
    """

    operator: str = ""
    words: str = ""
    place: int = -1
    on_one_side: bool = False

    def after(self, first: Parting) -> str:
        """The words of `first` (from `difference`), followed by these unless they repeat them."""
        if first.on_one_side and self.on_one_side and first.operator == self.operator:
            return self.words
        return "; ".join(words for words in (first.words, self.words) if words)

    def reason(self, first: Parting) -> str:
        """The change alone, without places and sizes, which differ from call to call."""
        return first.words if first.words and not first.on_one_side else self.after(first)


def difference(reference: Program, target: Program) -> Parting:
    """The first operator or argument in which two programs differ, in one clause; an empty one if
    they do not differ.

    Casts are ignored: a run in another precision has other casts and computes the same.
    """
    reference_steps, target_steps = _steps(reference), _steps(target)
    for a, b in zip(reference_steps, target_steps):
        if a.name != b.name:
            words = f"the reference runs {_short(a.name)} where the target runs {_short(b.name)}"
            return Parting(b.name, words, on_one_side=True)
        if clauses := differing_arguments(a, b):
            return Parting(b.name, f"{_called(a)}: {', and '.join(clauses)}")
    common = min(len(reference_steps), len(target_steps))
    for side, steps in (("reference", reference_steps), ("target", target_steps)):
        if len(steps) > common:
            name = steps[common].name
            return Parting(name, f"only the {side} runs {_short(name)}", on_one_side=True)
    return Parting()


def written_anew(reference: Program, target: Program) -> bool:
    """Whether two programs share too few operators, in order, to be compared one by one."""
    reference_names, target_names = (
        [op.name for op in p.operations if _is_compared(op)] for p in (reference, target)
    )
    if (
        not reference_names
        or not target_names
        or max(len(reference_names), len(target_names)) < _LEAST
    ):
        return False
    return bool(
        SequenceMatcher(None, reference_names, target_names, autojunk=False).ratio() < _ANEW
    )


def other_function(reference: Program, target: Program) -> Parting:
    """For rewritten code, the function (such as gelu) that only the target computes, and the one of
    the reference that it replaces.
    """
    reference_functions, target_functions = (
        {base_name(op.name) for op in p.operations} & _FUNCTIONS for p in (reference, target)
    )
    only, missing = (
        sorted(target_functions - reference_functions),
        sorted(reference_functions - target_functions),
    )
    if len(only) != 1 or len(missing) > 1:
        return Parting(words="its code is written differently, so no operator of it can be named")
    place = next(i for i, op in enumerate(target.operations) if base_name(op.name) == only[0])
    name = target.operations[place].name
    instead = f" in place of {missing[0].lstrip('_')}" if missing else ""
    return Parting(
        name,
        f"its code is written differently, and {_short(name)} runs only in the target{instead}",
        place,
    )


def first_parting(
    reference: Program,
    target: Program,
    reference_results: Mapping[int, Array],
    target_results: Mapping[int, Array],
    tolerance: float,
) -> Parting:
    """The first operator of the target whose result differs from the reference's, or an operator of
    the reference that the target lacks.

    reference_results, target_results: first result of each operation, by number, of both programs
    run on the same inputs in wide arithmetic. tolerance: relative 2-norm up to which two results
    count as equal. Operators that only move elements are ignored: their effect shows in the next.
    """
    reference_places = [
        i
        for i, op in enumerate(reference.operations)
        if _is_compared(op) and i in reference_results
    ]
    target_places = [
        i for i, op in enumerate(target.operations) if _is_compared(op) and i in target_results
    ]
    operations = [
        [p.operations[i] for i in places]
        for p, places in ((reference, reference_places), (target, target_places))
    ]
    for a0, a1, b0, b1, equal in _partners(*operations):
        if equal:
            for a, b in zip(reference_places[a0:a1], target_places[b0:b1]):
                error = _distance(reference_results[a], target_results[b])
                if error > tolerance:
                    name = target.operations[b].name
                    if len(target.operations) == 1:
                        return Parting(name, place=b)
                    size = (
                        f"differs (relative error {error:.2g})"
                        if error < np.inf
                        else "has another shape"
                    )
                    words = f"{_numbered(target, b)} is the first whose result {size}"
                    return Parting(name, words, b)
        elif b1 > b0:
            name = target.operations[target_places[b0]].name
            instead = f" in place of {_short(operations[0][a0].name)}" if a1 > a0 else ""
            words = f"{_numbered(target, target_places[b0])} runs only in the target{instead}"
            return Parting(name, words, target_places[b0], on_one_side=True)
        else:
            name = reference.operations[reference_places[a0]].name
            words = (
                f"{_short(name)} (operator {reference_places[a0] + 1} of the reference's "
                f"{len(reference.operations)}) is missing in the target"
            )
            return Parting(name, words, on_one_side=True)
    return Parting()


def _partners(
    reference: Sequence[Operation], target: Sequence[Operation]
) -> Iterator[tuple[int, int, int, int, bool]]:
    """`blocks` of operators by name; among operators of one name, those with equal kinds of
    arguments are partners first, so that an inserted one is told from that beside it.
    """
    sides = reference, target
    for a0, a1, b0, b1, equal in operator_blocks(*([_form(op) for op in ops] for ops in sides)):
        if equal:
            yield a0, a1, b0, b1, equal
            continue
        names = [op.name for op in reference[a0:a1]], [op.name for op in target[b0:b1]]
        for i0, i1, j0, j1, alike in operator_blocks(*names):
            yield a0 + i0, a0 + i1, b0 + j0, b0 + j1, alike


def _form(operation: Operation) -> str:
    """The name of an operator with the kinds of its arguments: slots, results, plain values."""

    def form(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{' '.join(map(form, value))}]"
        if not isinstance(value, dict):
            return type(value).__name__
        kind, operand = next(iter(value.items()))
        return f"{kind} {operand}" if kind in ("in", "param") else kind

    return f"{operation.name} {form(operation.args)}"


def operator_blocks(
    reference: Sequence[str], target: Sequence[str]
) -> list[tuple[int, int, int, int, bool]]:
    """`blocks` of operator names; one differing block if the programs share too few operators."""
    try:
        return blocks(reference, target)
    except UsageError:
        return [(0, len(reference), 0, len(target), False)]


def _numbered(program: Program, place: int) -> str:
    """An operator with its place in a program that runs several."""
    count, name = len(program.operations), _short(program.operations[place].name)
    return f"{name} (operator {place + 1} of {count})" if count > 1 else name


def only_operator(program: Program) -> str:
    """The only operator of a program apart from casts and moves; "" if there are several."""
    names = [op.name for op in program.operations if _is_compared(op)]
    return names[0] if len(names) == 1 else ""


def _distance(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return float(np.inf) if a.size != b.size else _distance(a.reshape(-1), b.reshape(-1))
    if a.dtype.kind in "biu":
        return float(not np.array_equal(a, b))
    x, y = (
        a.astype(np.complex128 if a.dtype.kind == "c" else np.float64),
        b.astype(np.complex128 if b.dtype.kind == "c" else np.float64),
    )
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(np.isnan(x), np.isnan(y)):
        return float(np.inf)
    size = float(np.linalg.norm(x[finite]))
    return float(np.linalg.norm(x[finite] - y[finite])) / size if size else float(np.any(y[finite]))


def _steps(program: Program) -> list[Operation]:
    passed_over = (*CASTS, "aten.empty.", "aten.new_empty.", "aten.empty_like.")
    return [
        op for op in program.operations if not op.name.startswith(passed_over) and not _counts(op)
    ]


def _counts(operation: Operation) -> bool:
    """Whether an operation only counts the batches of a norm, on which no output depends."""
    first = operation.args[0] if operation.args else None
    slot = first.get("param", "") if isinstance(first, dict) else ""
    return isinstance(slot, str) and slot.endswith("num_batches_tracked")


def _is_compared(operation: Operation) -> bool:
    """Whether an operation computes something: it is no cast, move of elements or counter."""
    return not operation.name.startswith((*CASTS, *_MOVES)) and not _counts(operation)


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _called(operation: Operation) -> str:
    """The name of an operation for display; an optimiser's step is named by its class."""
    is_step = operation.name == OPTIMIZER_STEP
    return str(operation.args[0]) if is_step else _short(operation.name)


def differing_arguments(reference: _Step, target: _Step) -> list[str]:
    """A clause for each argument in which two steps of one operator differ: its name (its position
    if torch is not installed) and both values.

    Numbers, strings, None and lists of settings are compared; operands, dtypes and shapes are not,
    since they follow the tensors.
    """
    of_reference, of_target = _by_name(reference), _by_name(target)
    clauses = []
    keys = dict.fromkeys((*of_reference, *of_target))
    if of_reference.get(_OPTIMIZER) != of_target.get(_OPTIMIZER):
        # Arguments that only one of two optimisers has are not listed.
        keys = {key: None for key in keys if key in of_reference and key in of_target}
    for key in keys:
        a, b = (_number(of.get(key, _DEFAULT)) for of in (of_reference, of_target))
        if a != b and _is_setting(key, a) and _is_setting(key, b):
            clauses.append(f"{key} is {a} in the reference, {b} in the target")
    return clauses


def differing_sizes(reference: _Step, target: _Step) -> list[str]:
    """A clause for each list of integers (sizes) in which two steps of one operator differ."""
    of_reference, of_target = _by_name(reference), _by_name(target)
    pairs = ((key, a, of_target.get(key, a)) for key, a in of_reference.items())
    return [
        f"{key} is {a} in the reference, {b} in the target"
        for key, a, b in pairs
        if _is_sizes(a) and _is_sizes(b) and list(a) != list(b)
    ]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(number) is int for number in value)


def _by_name(step: _Step) -> dict[str, Any]:
    """The arguments of a step by name, defaults included."""
    if step.name == OPTIMIZER_STEP:
        return {_OPTIMIZER: step.args[0], **step.kwargs}
    schema = None
    if extras.is_here("torch"):
        from whence.frameworks.torch_schema import schema_named

        schema = schema_named(step.name)
    if schema is None:
        return {f"argument {i}": value for i, value in enumerate(step.args)} | dict(step.kwargs)
    return {**schema.defaults, **dict(zip(schema.positional, step.args)), **step.kwargs}


def _number(value: Any) -> Any:
    """The argument, with infinities and NaN as floats. A float32 value becomes the shortest decimal
    that rounds to it: 0.01, not 0.009999999776482582.
    """
    value = float(value["float"]) if isinstance(value, dict) and "float" in value else value
    if isinstance(value, float) and np.isfinite(value) and abs(value) <= _LARGEST:
        single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return name in _SETTINGS and all(map(_literal, value))
    return _literal(value)


def _literal(value: Any) -> bool:
    """Whether the value is a number, string or None, which a user would recognise."""
    return isinstance(value, (int, float, str, bool)) or value is None


def source_line(call: Call, program: Program, place: int) -> str:
    """The line ("file:line") at which a call's code runs an operation; "" if it is not known.

    A module of torch has no line in the user's code, and shares its program with others.
    """
    if call.source.startswith("torch.") or not 0 <= place < len(program.lines):
        return ""
    return program.lines[place]
