"""Binds operations to their overload and schema; finds which of them share memory and what the
outputs depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.errors import ReplayRefused
from whence.frameworks.operator_names import CHOOSES
from whence.frameworks.torch_schema import draws, schema_of, written
from whence.records import Operation, Program
from whence.records.program import GRADIENTS, OPTIMIZER_STEP, TENSOR_OPERANDS, Operand, operands
from whence.replay.allowed_operators import OperatorName

_NUMERIC: dict[str, tuple[type, ...]] = {
    "int": (int,), "SymInt": (int,), "float": (int, float), "number": (int, float, bool),
    "bool": (bool, int),
}  # fmt: skip
_TAGGED = {
    "Tensor": {"in", "param", "op", "const", "float", "complex"}, "int": {"dim", "mul"},
    "SymInt": {"dim", "mul"}, "float": {"float"}, "number": {"float", "complex", "dim", "mul"},
    "ScalarType": {"dtype"}, "Layout": {"layout"}, "Device": {"device"},
    "MemoryFormat": {"memory_format"},
}  # fmt: skip


_OWN = {GRADIENTS: "gradients", OPTIMIZER_STEP: "optimizer_step"}


@dataclass
class BoundOperation:
    """One operation bound to its overload.

    names: of its positional arguments. allocates: whether its result is new memory. writes: names
    of the arguments that it writes in place. chooses: whether it chooses among scores. last_use:
    places of the operations whose results nothing reads after this one.
    """

    operation: Operation
    func: Any
    base: str
    names: tuple[str, ...]
    allocates: bool
    writes: tuple[str, ...]
    pointwise: bool
    chooses: bool = False
    last_use: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BoundProgram:
    """A program ready to run.

    roots: for each operation, the roots of the memory that its result may share. written_roots:
    roots that some operation writes. boundaries: place -> children called before the operation at
    this place. differentiated: (kind, place) of the inputs and params whose gradients the program
    computes.
    """

    program: Program
    steps: Sequence[BoundOperation]
    roots: Sequence[set[Any]]
    written_roots: set[Any]
    boundaries: Mapping[int, Sequence[int]]
    differentiated: frozenset[Operand] = frozenset()

    @property
    def writes(self) -> bool:
        """Whether any operation writes in place."""
        return any(step.writes for step in self.steps)


@dataclass(frozen=True)
class Dependencies:
    """The operations, inputs and params that some outputs of a program depend on."""

    outputs: frozenset[str]
    operations: frozenset[int]
    inputs: frozenset[int]
    params: frozenset[str]


def _bind(operation: Operation, name: OperatorName | None) -> BoundOperation:
    if operation.name in _OWN:
        return BoundOperation(operation, None, _OWN[operation.name], (), True, (), False)
    if name is None:
        return BoundOperation(operation, None, "cast", (), False, (), False)
    namespace, base, overload = name
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), base), overload)
        schema = func._schema
    except (AttributeError, RuntimeError):
        raise ReplayRefused(
            f"operator {operation.name} does not exist in torch {torch.__version__}"
        ) from None
    _fits(operation, schema)
    positional = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    named = dict(zip(positional, operation.args)) | operation.kwargs
    if draws(schema_of(func), named):
        raise ReplayRefused(f"operator {operation.name} draws random numbers")
    writes = written(schema_of(func), named)
    view = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    # to, contiguous, reshape may alias or copy: a copy as large as their operand at most, so
    # nothing to bound.
    return BoundOperation(
        operation,
        func,
        base,
        positional,
        not view,
        writes,
        pointwise=torch.Tag.pointwise in func.tags,
        chooses=CHOOSES.get(base, len(schema.returns)) < len(schema.returns),
    )


def _fits(operation: Operation, schema: Any) -> None:
    """Raises ReplayRefused when the arguments do not fit the schema."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(operation.args) > len(positional):
        raise ReplayRefused(
            f"malformed program: {operation.name} takes {len(positional)} positional arguments, "
            f"has {len(operation.args)}"
        )
    arguments = {a.name: a for a in schema.arguments}
    pairs = list(zip(positional, operation.args))
    for name, value in operation.kwargs.items():
        if name not in arguments or any(a.name == name for a, _ in pairs):
            raise ReplayRefused(
                f"malformed program: {operation.name} takes no further argument {name!r}"
            )
        pairs.append((arguments[name], value))
    passed = {a.name for a, _ in pairs}
    for argument in schema.arguments:
        if argument.name not in passed and not argument.has_default_value():
            raise ReplayRefused(
                f"malformed program: {operation.name} lacks the argument {argument.name!r}"
            )
        if argument.is_out:
            raise ReplayRefused(
                f"operator {operation.name} is not on the list of replayable operators (it "
                "writes `out=`)"
            )
    for argument, value in pairs:
        if not _kind(str(argument.real_type), value):
            raise ReplayRefused(
                f"malformed program: {operation.name} takes {argument.real_type} as "
                f"{argument.name!r}, not {str(value)[:60]}"
            )


def _kind(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _kind(kind[9:-1], value)
    if kind.startswith("List["):
        inner = kind[5:-1]
        if isinstance(value, (list, tuple)):
            return all(_kind(inner, item) for item in value)
        return inner in ("int", "SymInt", "float") and _kind(inner, value)
    if isinstance(value, dict):
        return next(iter(value)) in _TAGGED.get(kind, ())
    if kind == "Tensor":  # a Python number in the place of a tensor
        return isinstance(value, (bool, int, float))
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, _NUMERIC.get(kind, ())) and value is not None


def bind_program(program: Program, names: Sequence[OperatorName | None]) -> BoundProgram:
    """Returns the program with every operation bound.

    names: as returned by `validate`. Raises ReplayRefused for an operation that cannot be run.
    """
    steps = [_bind(*pair) for pair in zip(program.operations, names, strict=True)]
    for place, uses in _last_uses(program).items():
        steps[place].last_use = uses
    boundaries: dict[int, list[int]] = {}
    for child, place in program.calls:
        boundaries.setdefault(place, []).append(child)
    differentiated = frozenset(
        wanted
        for operation in program.operations
        if operation.name == GRADIENTS
        for wanted in operands(operation.args[2])
    )
    return BoundProgram(program, steps, *_aliases(steps), boundaries, differentiated)


def _aliases(steps: Sequence[BoundOperation]) -> tuple[list[set[Any]], set[Any]]:
    """Returns (for each operation, the roots of the memory its result may share; all roots that
    some operation writes).
    """
    groups: list[set[Any]] = []
    written_roots: set[Any] = set()
    for place, step in enumerate(steps):
        group = {("op", place)} if step.allocates else set()
        if not step.allocates or step.writes:
            group |= _roots(step.operation.operands(), groups)
        groups.append(group)
        written_roots |= _roots(_written(step), groups)
    return groups, written_roots


def _roots(tensors: Iterable[Operand], groups: Sequence[set[Any]]) -> set[Any]:
    """Returns the roots of the memory that these operands may share.

    groups: for each earlier operation, the roots of its result.
    """
    roots: set[Any] = set()
    for kind, value in tensors:
        if kind in TENSOR_OPERANDS:
            roots |= groups[value[0]] if kind == "op" else {(kind, value)}
    return roots


def _written(step: BoundOperation) -> Iterator[Operand]:
    """Yields the operands that an operation writes in place."""
    named = dict(zip(step.names, step.operation.args)) | step.operation.kwargs
    return operands([named.get(name) for name in step.writes])


def dependencies(
    bound: BoundProgram, outputs: Collection[str], *, only_needed: bool = False
) -> Dependencies:
    """Returns what these outputs depend on.

    only_needed: follow only the in-place writes to memory that the outputs read, and ignore the
    guards of other outputs. Otherwise a program with an in-place write or a guard counts as needed
    in full, since either may affect any output.
    """
    program = bound.program
    operands = [operand for slot, operand in program.outputs if slot in outputs]
    tensors = [Operand(*pair) for operand in operands for pair in operand.items()]
    writers: dict[Any, list[int]] = {}
    todo = [o["op"][0] for o in operands if "op" in o]
    if only_needed:
        for place, step in enumerate(bound.steps):
            for root in _roots(_written(step), bound.roots):
                writers.setdefault(root, []).append(place)
        todo += [w for root in _roots(tensors, bound.roots) for w in writers.get(root, ())]
    elif bound.writes or any(op.guard is not None for op in program.operations):
        # An in-place write, or a number that a guard reads, may affect any output.
        todo = list(range(len(program.operations)))
    operations: set[int] = set()
    inputs = {o["in"] for o in operands if "in" in o}
    params = {o["param"] for o in operands if "param" in o}
    while todo:
        place = todo.pop()
        if place in operations:
            continue
        operations.add(place)
        for kind, value in program.operations[place].operands():
            if kind == "op":
                todo.append(value[0])
            elif kind == "param":
                params.add(value)
            elif kind in ("in", "dim"):
                inputs.add(value if kind == "in" else value[0])
            if writers and kind in TENSOR_OPERANDS:
                roots = _roots([Operand(kind, value)], bound.roots)
                todo += [w for root in roots for w in writers.get(root, ()) if w < place]
    return Dependencies(
        frozenset(outputs), frozenset(operations), frozenset(inputs), frozenset(params)
    )


def _last_uses(program: Program) -> dict[int, list[int]]:
    """Returns place of an operation -> places of the results that no later operation or output
    reads.
    """
    last: dict[int, int] = {}
    for place, operation in enumerate(program.operations):
        last[place] = place
        for kind, value in operation.operands():
            if kind == "op":
                last[value[0]] = place
    for _, operand in program.outputs:
        if "op" in operand:
            last.pop(operand["op"][0], None)
    table: dict[int, list[int]] = {}
    for result, place in last.items():
        table.setdefault(place, []).append(result)
    return table
