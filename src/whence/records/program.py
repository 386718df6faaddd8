"""The operators that a call ran, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from whence.display import Described

TENSOR_OPERANDS = frozenset(("in", "param", "const", "op"))
"""Kinds of operands that are tensors. The others are sizes ("dim", "mul"), dtypes and the like."""


GRADIENTS = "whence.gradients"
"""The operation of a backward pass. Its arguments are three lists of operands: results of the
forward pass, the gradient of each, and the inputs and params whose gradients it makes, in order.
"""


OPTIMIZER_STEP = "whence.optimizer_step"
"""The operation of an optimiser of torch on one parameter. Its arguments are the name of its class
("AdamW"), the parameter, its gradient, the names and the tensors of its state, and the names of the
state that it leaves; its hyper-parameters are named arguments. Its results are the parameter and
the state after the step.
"""


class Operand(NamedTuple):
    """A one-key object among the arguments of an operation: its key and its value."""

    kind: str
    value: Any


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operator of a program: overload name ("aten.addmm.default") and its arguments.

    Arguments are plain JSON values, lists of them, or one-key objects: {"in": k} input k of the
    program, {"param": slot}, {"op": [i, j]} output j of operation i, {"const": k} constant k,
    {"dtype": "float32"}, {"device": ""}, {"layout": name}, {"memory_format": name}, {"float": "inf"
    | "-inf" | "nan"}, {"complex": [re, im]}. guard: for an operator that returns a Python number,
    the number the recording saw; replay must see the same.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    guard: float | bool | None = None

    def operands(self) -> Iterator[Operand]:
        """Every operand of the arguments, in order."""
        yield from operands(self.args)
        yield from operands(list(self.kwargs.values()))

    def with_operands(self, function: Callable[[str, Any], Any]) -> Operation:
        """The operation with other operands, as `map_operands` replaces them."""
        args = tuple(map_operands(function, self.args))
        kwargs = {key: map_operands(function, value) for key, value in self.kwargs.items()}
        return Operation(self.name, args, kwargs, self.guard)


class ProgramDraw(msgspec.Struct, frozen=True):
    """Random numbers that are an input of a program.

    slot: of the tensor that was drawn. operator: what drew it ("aten.bernoulli_.float"), with these
    settings.
    """

    slot: str
    operator: str
    settings: dict[str, float | bool] = {}


class Program(
    Described, msgspec.Struct, frozen=True, tag="program", tag_field="t", omit_defaults=True
):
    """What one region ran: data, never code. Used only after it reproduced its own recorded
    outputs.

    inputs: slots of the call that feed {"in": k}. params: slots that feed {"param": slot}.
    constants: records of tensors made inside from Python data. outputs: (slot, operand). base: the
    floating dtype the region worked in, "" when it met none; a replay in another precision puts
    that one in its place. input_dtypes: by input. default_dtype: torch's default while recording.
    fixed: (input, axis, extent) the program only serves. equal: (input, axis, input, axis) whose
    extents were one at recording and must be on replay. inference: recorded under inference_mode,
    where composite operators arrive whole; grad: slots that required grad then (they choose by it).
    under_grad: recorded with gradients enabled, where one of its operators takes another kernel.
    detached: (operation, which of the tensors that it is given) where no gradient flows back
    although the tensor depends on one that has a gradient. draws: random numbers that the region
    drew; the tensors are among its inputs.
    notes: what was met ("in-place", "cast pinned", "guard"), for a reader.

    A call that calls others runs its own operators between them: outputs "k:input.x" are what its
    k-th child was given (from 0), inputs "k:output.x" and "k:mutated.x" what that child left.
    calls: (child, how many operations run before it). same: (slot, slot) that were one tensor, so
    that which of them was meant cannot be known. lost: (output, why it could not be followed). Of a
    compiled graph: names: the name of the node that each operation was ("addmm_3"). scopes: path of
    the module that each is in. picks: (name, operation, result) of nodes that pick one of several
    results. lines: where the user's code called each operation ("file:line", "" where that is not
    known), () when none is; call_lines: where it called each child, in the order of `calls`. Both
    are those of the first recording and no part of the id.
    """

    id: str
    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    params: tuple[str, ...] = ()
    constants: tuple[int, ...] = ()
    base: str = ""
    input_dtypes: tuple[str, ...] = ()
    default_dtype: str = "float32"
    fixed: tuple[tuple[int, int, int], ...] = ()
    equal: tuple[tuple[int, int, int, int], ...] = ()
    inference: bool = False
    grad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    scopes: tuple[str, ...] = ()
    picks: tuple[tuple[str, int, int], ...] = ()
    lines: tuple[str, ...] = ()
    call_lines: tuple[str, ...] = ()
    under_grad: bool = False
    detached: tuple[tuple[int, int], ...] = ()
    draws: tuple[ProgramDraw, ...] = ()


def inputs_of(program: Program, ends: Iterable[Any]) -> set[str]:
    """Returns the slots of the inputs of a program that these operands depend on."""
    slots, todo, visited = set[str](), list(operands(list(ends))), set[int]()
    while todo:
        kind, value = todo.pop()
        if kind in ("in", "dim"):
            slots.add(program.inputs[value if kind == "in" else value[0]])
        elif kind == "op" and value[0] not in visited:
            visited.add(value[0])
            todo += program.operations[value[0]].operands()
    return slots


def identified(program: Program) -> Program:
    """The program with the digest of its content as id; the lines of its code do not count."""
    content = msgspec.json.encode(msgspec.structs.replace(program, id="", lines=()), order="sorted")
    return msgspec.structs.replace(program, id=xxhash.xxh3_128_hexdigest(content))


def side_by_side(programs: Sequence[Program]) -> Program:
    """Returns one program that combines several with disjoint inputs and outputs."""
    operations: list[Operation] = []
    inputs: list[str] = []
    outputs: list[tuple[str, Any]] = []
    for program in programs:
        first, place = len(operations), len(inputs)

        def moved(kind: str, value: Any, first: int = first, place: int = place) -> Any:
            if kind == "op":
                return {"op": [value[0] + first, value[1]]}
            return {"in": value + place} if kind == "in" else {kind: value}

        operations += [operation.with_operands(moved) for operation in program.operations]
        outputs += [(slot, map_operands(moved, operand)) for slot, operand in program.outputs]
        inputs += program.inputs
    merged = msgspec.structs.replace(
        programs[0],
        operations=tuple(operations),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        input_dtypes=tuple(dtype for program in programs for dtype in program.input_dtypes),
        lines=(),
    )
    return identified(merged)


def operands(value: Any) -> Iterator[Operand]:
    """Yields every operand in an argument or in a list of arguments, in order. A product of sizes
    ("mul") is replaced by its factors.
    """
    if isinstance(value, dict):
        kind, content = next(iter(value.items()))
        if kind == "mul":
            yield from operands(content)
        else:
            yield Operand(kind, content)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)


def map_operands(function: Callable[[str, Any], Any], value: Any) -> Any:
    """Returns the argument with function(kind, value) in place of every operand; plain values stay.
    The factors of a product ("mul") are operands of their own, for the function to map.
    """
    if isinstance(value, (list, tuple)):
        return [map_operands(function, item) for item in value]
    if not isinstance(value, dict):
        return value
    return function(*next(iter(value.items())))
