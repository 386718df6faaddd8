"""Lays what a predictor runs beside the program it runs: which operator a hook speaks of, and in
which order it reads its operands.

Hooks name tensors, in no order, and show no lists of tensors; the program has the order, the
attributes and what a list is made of. Variables of PIR have numbers here and others there, but both
count in the order of the program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Protocol

FOLDED = "constant_folding@"
"""How the names of constants begin that Paddle made of others when it loaded the program."""

UNKNOWN = -1
"""The number of a block of an operator, where it is one of several and nobody knows which."""

DRAWS = (
    "uniform", "gaussian", "randint", "randperm", "bernoulli", "truncated_gaussian_random",
    "seed", "uniform_random", "gaussian_random",
)  # fmt: skip
"""Operators that make another constant each time."""

_NUMBER = re.compile(r"(\d+)")
_VALUE = re.compile(r"%(-?\d+)")


class Variable(Protocol):
    """A tensor of a program."""

    name: str
    dtype: str
    persistable: bool


class Operator(Protocol):
    """An operator of a program, as the reader of Paddle's programs has it."""

    op_type: str
    inputs: list[tuple[str, Any]]
    outputs: list[tuple[str, Any]]
    attributes: dict[str, Any]
    source: str
    scope: str
    inside: list[Any]


class Described(Protocol):
    """A program: its operators, its parameters by name, and the names under which results are
    fetched (name -> variable).
    """

    operators: list[Any]
    parameters: dict[str, Any]
    fetched: dict[str, str]


class Matched(NamedTuple):
    """What the program says of an operator that ran.

    inputs: for each place that is not a parameter, the hooks' name of its tensor, or "" and the
    operator that made it in `makers`. makers: (place, operator) of operands that no hook shows
    under a known name. owners: hooks' name -> operator that made it.
    """

    operator: Any
    inputs: tuple[str, ...]
    makers: tuple[tuple[int, Any], ...]
    owners: dict[str, Any]


@functools.lru_cache(maxsize=1 << 16)
def natural(name: str) -> tuple[Any, ...]:
    """Sorts names with numbers in them by number; what stands before `inner_var_` is another in
    each block and each process.
    """
    name = name[max(name.rfind("inner_var_"), 0) :]
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in _NUMBER.split(name)
    )


class Program:
    """One program of one predictor; learns the hooks' names of its variables as operators run.

    plain: a hook's name or type without what changes from process to process.
    """

    def __init__(self, described: Described, plain_type: Any) -> None:
        self._plain = plain_type
        self._described = described
        self.parameters = set(described.parameters)
        """Raw names of its parameters and constants."""
        self.named = self._legacy = not any(
            _VALUE.fullmatch(v.name) for op in described.operators for _, v in op.outputs
        )
        self._names: dict[str, str] = {
            variable: name for name, variable in described.fetched.items()
        }
        self._makers: dict[str, Any] = {}
        self._writers: dict[str, list[Any]] = {}
        for op in _walk(described.operators):
            for _, variable in op.outputs:
                self._makers[variable.name] = op
                self._writers.setdefault(variable.name, []).append(op)
        self._places: dict[Any, int] = {}
        self._constant = _of_constants(described.operators, set())
        self._computed = _of_constants(described.operators, self.parameters) - self._constant
        self._ran: set[int] = set()
        self._renamed: dict[str, str] = {}

    def operator(
        self,
        block: Any,
        key: tuple[Any, int | None],
        op_type: str,
        parameters: Iterable[str] | None,
        outputs: Sequence[str],
        *,
        inputs: Iterable[str] = (),
        folded: bool = False,
    ) -> Any:
        """The operator that a hook speaks of, None where the program has none: passes that come
        later put operators in.

        block: the operator whose block it runs in, None for the outermost; key: of that block, for
        the place in it, and which of the operator's blocks it is, None where it has one.
        parameters: raw names of those it read, None where hooks show more than it reads itself.
        folded: what depends on constants alone does not run: Paddle folds it after it has saved the
        program. inputs: the hooks' names of what it read and is not a parameter: an operator that
        reads something else is another one, be it of the same type (passes that come later put
        changes of layout in). Operators are asked for in the order of execution.
        """
        if self._legacy:
            writers = [
                op
                for name in outputs
                for op in self._writers.get(name, ())
                if self._plain(op.op_type) == op_type
            ]
            return writers[0] if writers else None
        operators = self._described.operators if block is None else _block(block, key[1])
        wanted = (
            None if parameters is None else {name for name in parameters if name in self.parameters}
        )
        inputs_now, passed = {self._renamed.get(name, name) for name in inputs}, False
        for place in range(self._places.get(key, 0), len(operators)):
            op = operators[place]
            if self._plain(op.op_type) != op_type or (folded and self._is_folded(op)):
                continue
            inputs_of_op = self._known(op) if inputs_now else set()
            if not inputs_of_op <= inputs_now or (passed and not inputs_of_op):
                passed = True
                continue
            if (
                wanted is None
                or {v.name for slot, v in op.inputs if v.persistable and "." not in slot} == wanted
            ):
                self._places[key] = place + 1
                self._ran.add(id(op))
                return op
        return None

    def _is_folded(self, op: Any) -> bool:
        """Does what Paddle folds when it loads the program take this operator along? Of one that
        reads parameters its hooks would tell.
        """
        if id(op) in self._constant:
            return True
        makers = {id(self._makers.get(v.name)) for _, v in op.inputs if not v.persistable}
        return id(op) in self._computed and bool(makers) and not makers & self._ran

    def _was_folded(self, name: str) -> bool:
        """Is a variable the result of constants whose operators did not run? Hooks show it as a
        constant, not as an input.
        """
        maker = id(self._makers.get(name))
        return maker in self._constant | self._computed and maker not in self._ran

    def moved(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """An operator that the program does not have ran; where it has one input and one output, it
        changed the layout.
        """
        if len(inputs) == len(outputs) == 1:
            self._renamed[outputs[0]] = self._renamed.get(inputs[0], inputs[0])

    def _known(self, op: Any) -> set[str]:
        """The hooks' names of what an operator reads, as far as they are known; of lists hooks show
        nothing.
        """
        operands = [v.name for slot, v in op.inputs if not v.persistable and "." not in slot]
        return {
            self._names.get(name, name)
            for name in operands
            if name in self._names or not name.startswith("%")
        }

    def listed(self, op: Any) -> int:
        """How many tensors are in the list that an operator makes, 0 when it makes none."""
        return sum("." in slot for slot, _ in op.outputs) if not self._legacy else 0

    def held(self, op: Any) -> tuple[str, ...]:
        """Parameters that an operator is given in lists, which no hook shows: the weights of an
        LSTM.
        """
        return (
            tuple(v.name for slot, v in op.inputs if v.persistable and "." in slot)
            if not self._legacy
            else ()
        )

    def held_by_any(self) -> set[str]:
        """Parameters that any operator is given in lists."""
        return {name for op in _walk(self._described.operators) for name in self.held(op)}

    def writes(self, name: str) -> bool:
        """Is this the name of something an operator writes?"""
        return name in self._writers

    def matched(self, op: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Matched:
        """Operands in order. inputs: the hooks' names of what it read and is not a parameter;
        outputs: of what it wrote.
        """
        self.wrote(op, outputs)
        operands = [
            v.name for _, v in op.inputs if not v.persistable and not self._was_folded(v.name)
        ]
        self._learn(operands, inputs)
        matched_names = {self._names.get(operand, operand) for operand in operands}
        unmatched = [name for name in inputs if name not in matched_names]
        unnamed = [
            operand
            for operand in operands
            if operand not in self._names and _VALUE.fullmatch(operand)
        ]
        # one that Paddle computes once where the program has it twice
        if len(unmatched) == len(unnamed) == 1:
            self._names[unnamed[0]] = unmatched[0]
        placed = tuple(
            name
            if (name := self._names.get(operand, operand if self._legacy else ""))
            or operand.startswith("%")
            else operand
            for operand in operands
        )
        # the operand in another layout
        moved = {self._renamed[name]: name for name in inputs if name in self._renamed}
        placed = tuple(moved.get(name, name) for name in placed)
        back = {self._names[operand]: operand for operand in operands if operand in self._names}
        return Matched(
            op,
            placed,
            tuple(
                (k, self._makers.get(operand))
                for k, operand in enumerate(operands)
                if not placed[k]
            ),
            {
                name: maker
                for name, operand in back.items()
                if (maker := self._makers.get(operand)) is not None
            },
        )

    def wrote(self, op: Any, outputs: Sequence[str]) -> None:
        """The hooks' names of what an operator wrote."""
        self._learn([v.name for _, v in op.outputs], outputs)

    def _learn(self, variables: Sequence[str], names: Sequence[str]) -> None:
        """Both count in the order of the program, so what is left of both when known names are
        taken out stands in one order.
        """
        if self._legacy:
            return
        matched_names = set(self._names.values())
        ids = sorted(
            {v for v in variables if v not in self._names and _VALUE.fullmatch(v)},
            key=lambda v: int(v[1:]),
        )
        free = sorted(
            (n for n in names if n not in matched_names and n not in variables), key=natural
        )
        if len(ids) == len(free):
            self._names.update(zip(ids, free))


def _of_constants(operators: Iterable[Any], constants: Set[str]) -> set[int]:
    """Ids of the outermost operators that depend on constants of the program alone, and on what is
    given.
    """
    folded: set[int] = set()
    names = set(constants)
    for op in operators:
        if (
            not op.inside
            and op.op_type not in DRAWS
            and all(variable.name in names for _, variable in op.inputs)
        ):
            folded.add(id(op))
            names.update(variable.name for _, variable in op.outputs)
    return folded


def _block(operator: Any, number: int | None) -> list[Any]:
    """What one block of an operator holds; each of several ends with what it hands on. Nothing
    where it is not known which one.
    """
    blocks: list[list[Any]] = [[]]
    for op in operator.inside:
        blocks[-1].append(op)
        if op.op_type.endswith("yield"):
            blocks.append([])
    blocks = [block for block in blocks if block]
    if len(blocks) <= 1 or number is None:
        return list(operator.inside)
    return blocks[number] if 0 <= number < len(blocks) else []


def _walk(operators: Iterable[Any]) -> Iterator[Any]:
    for op in operators:
        yield op
        yield from _walk(op.inside)
