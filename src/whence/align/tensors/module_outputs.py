"""Finds the outputs of modules in the program of a graph: values that are used outside their
module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from whence.align.calls.graph_nodes import places_of
from whence.records import Call, Program
from whence.records.program import operands

_MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select",
    "unsqueeze", "squeeze", "alias", "detach", "split", "split_with_sizes", "chunk", "unbind",
    "as_strided", "unflatten", "narrow",
))  # fmt: skip


_TURNS = frozenset(("transpose", "permute", "t"))


ValueKey = tuple[int, int]  # operation, result


class ModuleOutput(NamedTuple):
    """A module's output in a graph. plain: whether the axes are in their original order where it is
    used.
    """

    scope: str
    call: Call
    plain: bool


def module_outputs(
    program: Program, kids: Mapping[str, Call]
) -> dict[str, list[ModuleOutput | None]]:
    """By module path, the outputs of the module in order; None for nodes that the run did not
    record.
    """
    names = {place: name for name, place in places_of(program).items()}
    users, turns = _users(program)
    out: dict[str, list[ModuleOutput | None]] = defaultdict(list)
    for place in sorted(users):
        scope, kid = program.scopes[place[0]], kids.get(names.get(place, ""))
        while scope:
            if not all(is_within(user, scope) for user in users[place]):
                plain = not any(is_within(turn, scope) for turn in turns[place])
                out[scope].append(ModuleOutput(scope, kid, plain) if kid is not None else None)
            scope = scope.rpartition(".")[0]
    return out


def is_move(name: str) -> bool:
    """Whether an operator only changes how a tensor's elements are addressed."""
    return name.split(".")[1] in _MOVES


def is_within(scope: str, above: str) -> bool:
    return scope == above or scope.startswith(above + ".")


def _users(program: Program) -> tuple[dict[ValueKey, set[str]], dict[ValueKey, set[str]]]:
    """By value: the modules that use it ("": the graph returns it), and the modules that permute
    its axes first.
    """
    sources: dict[ValueKey, tuple[ValueKey | None, frozenset[str]]] = {}
    users: dict[ValueKey, set[str]] = defaultdict(set)
    turns: dict[ValueKey, set[str]] = defaultdict(set)

    def source(place: ValueKey) -> tuple[ValueKey | None, frozenset[str]]:
        if not is_move(program.operations[place[0]].name):
            return place, frozenset()
        return sources.get((place[0], 0), (None, frozenset()))

    def use(value: Any, user: str) -> None:
        for place in _places(value):
            origin, turned = source(place)
            if origin is not None:
                users[origin].add(user)
                turns[origin] |= turned

    for i, op in enumerate(program.operations):
        if is_move(op.name):
            origin, turned = next((source(p) for p in _places(op.args)), (None, frozenset()))
            sources[i, 0] = (
                origin,
                turned | {program.scopes[i]} if op.name.split(".")[1] in _TURNS else turned,
            )
        else:
            use([*op.args, *op.kwargs.values()], program.scopes[i])
    for _, operand in program.outputs:
        use(operand, "")
    return users, turns


def _places(value: Any) -> Iterable[ValueKey]:
    return (tuple(key) for kind, key in operands(value) if kind == "op")
