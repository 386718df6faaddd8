"""One compiled graph, and one execution of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from whence.frameworks.torch_schema import schema_of
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled.collected import Collected, new_key
from whence.records import Placement, Ref


class RunsGraphs(Protocol):
    """Runs graphs, and records what they compute while it is active."""

    @property
    def active(self) -> bool: ...

    def run(self, graph: Graph, inputs: Any) -> Any:
        """Run a graph and record what it computes."""

    def take(self, graph: Graph, name: str, value: Any) -> None:
        """Record a tensor that compiled code shows."""

    def take_node(
        self, graph: Graph, node: Any, args: Any, kwargs: Any, out: Any, value: Any
    ) -> None:
        """Record a node that ran eagerly."""


class Graph:
    """One compiled graph. It lives as long as the compiled code; without a listener it only runs
    the code.

    name: torch's name ("model__0_forward_1"). id: "0/0", its frame and compile counted within the
    run; torch_id: as torch counts. phase: "forward" or "backward". code: by mode, called with the
    list of inputs. modules: variable -> path of the module that it held.
    """

    def __init__(
        self,
        owner: RunsGraphs,
        mode: str,
        name: str,
        ids: tuple[str, str],
        backward: bool,
        modules: dict[str, str],
    ) -> None:
        self._owner = weakref.ref(owner)
        self._boxed_call = True  # of the object itself: torch wraps it and copies what it holds
        self.name, (self.id, self.torch_id), self.phase, self.modules = (
            name,
            ids,
            "backward" if backward else "forward",
            modules,
        )
        self.key = new_key(self)
        self.mode = mode
        self.code: dict[str, Callable[[Any], Any]] = {}
        self.learned: dict[str, Collected] = {}
        self.module: Any = None
        self.inputs: list[str] = []
        self.mutated: tuple[int, ...] = ()
        self.examined = False
        self.expected: list[Any] | None = None
        self.slots: list[str] = []
        self.places: dict[int, int] = {}
        self.first: dict[int, str] = {}
        self.moved: tuple[str, str] = ("", "")
        self.programs: dict[Any, tuple[str, str]] = {}

    @property
    def words(self) -> str:
        return f"graph {self.id}" + (f" ({self.phase})" if self.phase == "backward" else "")

    def learn(self, collected: Collected) -> None:
        self.learned[collected.mode] = collected
        if self.module is None and collected.graph is not None:
            self.module = collected.graph
            self.inputs = nodes.inputs_of(self.module)
            self.mutated = _mutated(self.module)

    def __call__(self, inputs: Any) -> Any:
        owner = self._owner()
        if owner is None or not owner.active or self.module is None:
            return self.code[self.mode](inputs)
        return owner.run(self, inputs)

    def seen(self, name: str, value: Any) -> None:
        """Called by compiled code when a tensor inside is computed."""
        owner = self._owner()
        if owner is not None and owner.active:
            owner.take(self, name, value)

    def ran(self, node: Any, args: Any, kwargs: Any, out: Any, value: Any) -> None:
        """Called after an operator of the graph when it runs node by node."""
        owner = self._owner()
        if owner is not None and owner.active and nodes.is_value(node):
            owner.take_node(self, node, args, kwargs, out, value)

    def scope(self, name: nodes.Named) -> str:
        """The path of the module that a node belongs to in this execution: one graph may serve
        several modules.
        """
        if not name.local and not name.scope:
            path = self.modules.get("", "")
        else:
            path = ".".join(
                filter(None, (self.modules.get(name.local, self.modules.get("", "")), name.scope))
            )
        old, new = self.moved
        if not old and new:
            return f"{new}.{path}".rstrip(".")
        if old != new and (path == old or path.startswith(old + ".")):
            path = new + path[len(old) :]
        return path


class Execution:
    """One execution of a graph; also the `Sighter` of its tensors."""

    __slots__ = (
        "above", "counts", "graph", "keep", "micro", "mutated", "number", "numbers", "op_type",
        "operators", "order", "phase", "place", "placements", "program", "records", "refs", "root",
        "scope", "selected", "step", "training",
    )  # fmt: skip
    graph: Graph
    program: tuple[str, str]

    def __init__(self, graph: Graph, above: Any, order: int) -> None:
        self.graph, self.above, self.order = graph, above, order
        self.operators = 0
        self.op_type, self.phase = "graph", graph.phase
        self.root, self.step, self.micro, self.counts = (
            above.root,
            above.step,
            above.micro,
            above.counts,
        )
        self.training, self.selected, self.keep = above.training, above.selected, False
        above.operators += 1
        self.place = above.operators
        self.number = f"op{self.place}" if above.number == "0" else f"{above.number}_op{self.place}"
        self.scope = above.scope
        self.refs: list[Ref] = []
        self.placements: dict[str, Placement] = {}
        self.records: dict[str, tuple[Any, str]] = {}
        self.mutated: list[tuple[str, Any]] = []
        self.numbers: dict[str, Any] = {}
        self.program = "", ""


def _mutated(gm: Any) -> tuple[int, ...]:
    """Indices of the inputs that the graph writes."""
    places = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    positions: set[int] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        facts = schema_of(node.target)
        for name in facts.writes:
            value = (dict(zip(facts.positional, node.args)) | node.kwargs).get(name)
            for entry in nodes.flat(value):
                while (
                    isinstance(entry, torch.fx.Node)
                    and entry.op == "call_function"
                    and entry.args
                    and not nodes.is_value(entry)
                ):
                    entry = entry.args[0]
                if entry in places:
                    positions.add(places[entry])
    return tuple(sorted(positions))
