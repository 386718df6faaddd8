"""Compiles a part of the graphs that dynamo traces, and runs their other operators as torch does.

Which part, a cut says. Its numbers count the operators of all graphs of a process, in the order in
which they are compiled; the results that a tuple consists of belong to the operator that gives it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.host import digest
from whence.frameworks.torch_arrays import to_host
from whence.instrument.torch.compiled.fx_nodes import source_of
from whence.results import GraphOperator

VARIABLE = "WHENCE_CUT"
"""Variable of the environment in which a process finds its cut, as JSON."""

_CALLS = ("call_function", "call_method", "call_module")


class Cut(msgspec.Struct, frozen=True):
    """The operators from `first` up to `last` (None: all) are compiled, except those in `without`.

    values: compile nothing, and note the digest of everything that a graph reads and computes.
    """

    first: int = 0
    last: int | None = None
    without: tuple[int, ...] = ()
    values: bool = False

    @staticmethod
    def of_environment() -> Cut | None:
        """The cut of this process, None for none."""
        text = os.environ.get(VARIABLE)
        return msgspec.json.decode(text, type=Cut) if text else None

    def variables(self) -> dict[str, str]:
        """The environment of a process with this cut."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


class CutBackend:
    """A backend of torch.compile that gives `backend` only the operators of a cut. operators,
    values: of all graphs of this process, to which it adds.
    """

    def __init__(
        self,
        backend: Callable[..., Any],
        cut: Cut,
        operators: list[GraphOperator],
        values: list[str],
    ) -> None:
        self._backend, self._cut = backend, cut
        self._operators, self._values = operators, values

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Compile a graph of dynamo."""
        units = _units(graph.graph)
        start = len(self._operators)
        self._operators += [_described(unit[0]) for unit in units]
        if self._cut.values:
            return self._noting(graph.forward)
        last = self._cut.last if self._cut.last is not None else len(self._operators)
        inside = {
            node
            for number, unit in enumerate(units, start)
            if self._cut.first <= number < last and number not in self._cut.without
            for node in unit
        }
        return _cut(graph, inputs, inside, self._backend) if inside else graph.forward

    def _noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._values += _digests(args)
            with _Values(self._values):
                return forward(*args)

        return run


class _Values(TorchDispatchMode):  # type: ignore[misc]
    """Notes the digests of all results of operators."""

    supports_higher_order_operators = True

    def __init__(self, values: list[str]) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(
        self, called: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = called(*args, **(kwargs or {}))
        self._values += _digests(result)
        return result


def _digests(values: Any) -> list[str]:
    """The hash that a record of each tensor has."""
    leaves = torch.utils._pytree.tree_leaves(values)
    arrays = [to_host(leaf.detach()) for leaf in leaves if type(leaf) is torch.Tensor]
    return [digest(array.reshape(-1).view("u1")).hex() for array in arrays]


def _units(graph: Any) -> list[list[Any]]:
    """The operators of a graph in order, each with the parts of the tuple that it gives."""
    units: list[list[Any]] = []
    owner: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        if node.op not in _CALLS:
            continue
        whole = node.args[0] if node.target is operator.getitem else None
        if whole in owner and not isinstance(_example(whole), torch.Tensor):
            owner[node] = owner[whole]
            owner[node].append(node)
        else:
            owner[node] = [node]
            units.append(owner[node])
    return units


def _described(node: Any) -> GraphOperator:
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    lines = (node.meta.get("stack_trace") or "").splitlines()
    source = source_of(node)
    file, _, number = source.rpartition(":")
    code = ""
    for place, line in enumerate(lines[:-1]):
        if f'"{file}", line {number},' in line:
            code = lines[place + 1].strip()
    return GraphOperator(node.name, called or re.sub(r"_\d+$", "", node.name), source, code)


def _example(node: Any) -> Any:
    """What stands for the value of a node while the graph is compiled."""
    return node.meta.get("example_value")


def _cut(
    graph: Any, inputs: Sequence[Any], inside: set[Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """A function as `graph`, whose nodes `inside` are compiled as one graph. Raises KeyError where
    one of them needs a node that runs behind them.
    """
    nodes = list(graph.graph.nodes)
    given = dict(zip((n for n in nodes if n.op == "placeholder"), inputs))
    read = {m for n in inside for m in n.all_input_nodes if m not in inside}
    # numbers that stand for sizes go in even where the piece reads only tensors of these sizes
    enters = [
        n
        for n in nodes
        if n.op != "get_attr" and (n in read or isinstance(given.get(n), torch.SymInt))
    ]
    leaves = [n for n in nodes if n in inside and any(user not in inside for user in n.users)]
    piece = fx.Graph()
    copies: dict[Any, Any] = {}
    for node in enters:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node in inside or (node in read and node.op == "get_attr"):
            copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(tuple(copies[n] for n in leaves))
    examples = [given[n] if n in given else _example(n) for n in enters]
    compiled = backend(fx.GraphModule(graph, piece), examples)

    def run_piece(*args: Any) -> Any:
        return compiled(*args)

    before, behind = _beside(nodes, inside)
    outer = fx.Graph()
    copies = {}
    for node in before:
        copies[node] = outer.node_copy(node, copies.__getitem__)
    results = outer.call_function(run_piece, tuple(copies[n] for n in enters))
    for number, node in enumerate(leaves):
        copies[node] = outer.call_function(operator.getitem, (results, number))
    for node in behind:
        copies[node] = outer.node_copy(node, copies.__getitem__)
    whole: Callable[..., Any] = fx.GraphModule(graph, outer).forward
    return whole


def _beside(nodes: Sequence[Any], inside: set[Any]) -> tuple[list[Any], list[Any]]:
    """(nodes that run before those inside, nodes that run behind them); between two of them, only
    what needs their results runs behind.
    """
    before: list[Any] = []
    behind: dict[Any, None] = {}
    left = len(inside)
    for node in nodes:
        if node in inside:
            left -= 1
        elif not left or any(n in inside or n in behind for n in node.all_input_nodes):
            behind[node] = None
        else:
            before.append(node)
    return before, list(behind)
