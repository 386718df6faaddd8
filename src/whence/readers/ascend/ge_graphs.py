"""Origins of the operators of a GE dump: which operators of the original program each one computes,
from the graph texts beside the dump.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from whence.errors import UnreadableRun
from whence.readers.ascend.graph_text import Graph, Node, graphs
from whence.records.fused_names import segments

_DYNAMO = re.compile(r"dynamo_(original|optimized)_graph_(\d+)_rank_(\d+)_")
_NAMED = re.compile(r"(dynamo_\w+|ge_proto_\w+)\.(txt|pbtxt)$")
# Operators that move elements or change their dtype: the output has the name of its producer.
MOVES = frozenset({"TransData", "Cast", "Transpose", "TransposeD", "Identity", "Reshape"})


def is_graph(name: str) -> bool:
    """Whether a file of this name may hold a graph."""
    return bool(_NAMED.match(name)) or name.endswith(".json")


def plain(name: str) -> str:
    """Returns an operator's name in the spelling of file names."""
    return re.sub(r"[/\\.]", "_", name)


class Origins:
    """Origins of the operators of one dumped graph.

    Origins are names of FX nodes where the graphs are stamped with them, else names of the original
    operators.
    """

    def __init__(self, unoptimised: Iterable[Graph], optimised: Iterable[Graph]) -> None:
        self._unoptimised, self._optimised = list(unoptimised), list(optimised)
        self._all = [*self._optimised, *self._unoptimised]
        self.of = functools.lru_cache(maxsize=1 << 17)(self._of)

    def _of(self, name: str, op_type: str, stated: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the origins of one operator, in order; () when none is known. stated: names in
        the dump itself.
        """
        plain_name = plain(name)
        nodes = [
            (graph, node)
            for graph in self._all
            if (node := _plain_names(graph).get(plain_name)) is not None
        ]
        members = self._members(plain_name, nodes)
        if members is None:
            members = tuple(dict.fromkeys(stated)) if op_type not in MOVES else ()
        named = (self._fx(member) for member in members)
        fx = tuple(dict.fromkeys(n for n in named if n))
        if fx or any(graph.fx_names for graph in self._all):
            return fx
        return () if members in ((name,), (plain_name,)) else members

    def _members(self, name: str, nodes: list[tuple[Graph, Node]]) -> tuple[str, ...] | None:
        for _, node in nodes:
            if node.origins is not None:
                return node.origins
        if nodes:
            return (nodes[0][1].name,)
        for graph in (*self._unoptimised, *self._optimised):
            names = _plain_names(graph)
            parts = segments(
                name,
                names,
                lambda a, b, g=graph, n=names: g.feeds(n[a].name, n[b].name),  # type: ignore[misc]
            )
            if parts:
                return tuple(names[part].name for part in parts)
        return None

    def _fx(self, name: str) -> str:
        plain_name = plain(name)
        for graph in (*self._unoptimised, *self._optimised):
            node = _plain_names(graph).get(plain_name)
            if node is not None and node.name in graph.fx_names:
                return graph.fx_names[node.name]
        return ""


@functools.lru_cache(maxsize=256)
def _plain_names(graph: Graph) -> dict[str, Node]:
    return {plain(name): node for name, node in graph.nodes.items()}


class Texts:
    """The graph files of a dump. wrong: name of each file that cannot be read -> reason."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.wrong: list[tuple[str, str]] = []
        self._read: list[tuple[str, int, int, Graph]] = []  # which, graph, rank
        for path in paths:
            named = _DYNAMO.match(path.name)
            kind, graph, rank = (named[1], int(named[2]), int(named[3])) if named else ("", -1, -1)
            try:
                self._read += [(kind, graph, rank, g) for g in graphs(path)]
            except UnreadableRun as error:
                if not path.name.endswith(".json"):  # any JSON may lie about
                    problem = f"{error}; names of fused operators are not known from it"
                    self.wrong.append((path.name, problem))

    def origins(self, graph: int, rank: int) -> Origins:
        """Returns the origins for the graph of this number on this rank; texts without a number
        apply to all.
        """

        def fits(text: tuple[str, int, int, Graph]) -> bool:
            return text[1] in (graph, -1) or graph < 0

        fitting = [text for text in self._read if fits(text)]
        of_rank = [text for text in fitting if text[2] in (rank, -1)] or fitting
        return Origins(
            (g for w, _, _, g in of_rank if w == "original"),
            (g for w, _, _, g in of_rank if w != "original"),
        )
