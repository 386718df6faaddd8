"""The topology files of ATB: the operators of a model or a layer, and the tensors that connect
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from whence.errors import UnreadableRun
from whence.readers.encodings.json_file import object_of

_BYTES = 256 << 20
_DEPTH = 32
_LAST_NUMBER = re.compile(r"_(\d{1,9})$")


class Operation(NamedTuple):
    """A node. name: opName. param: its settings. inputs, outputs: names of tensors. nodes: the
    nodes that it consists of.
    """

    name: str
    type: str
    param: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Operation, ...]


class Model(NamedTuple):
    """A topology file. first: index of its first node in names of folders."""

    name: str
    nodes: tuple[Operation, ...]
    first: int

    def at(self, path: tuple[tuple[int, str], ...]) -> Operation | None:
        """Returns the node at a path of folders ((3, "BloomLayer"), (0, "LayerNormOperation"));
        None when there is none of that type.
        """
        nodes, first = self.nodes, self.first
        node: Operation | None = None
        for index, kind in path:
            place = index - first
            node = nodes[place] if 0 <= place < len(nodes) else None
            if node is None or node.type != kind:
                return None
            nodes, first = node.nodes, 0
        return node


def read(path: Path) -> Model | None:
    """Reads a topology file; returns None for any other file."""
    try:
        tree = object_of(path, path.name, limit=_BYTES)
    except UnreadableRun:
        return None
    nodes = tuple(_operations(tree.get("nodes"), 0))
    if not nodes:
        return None
    number = _LAST_NUMBER.search(nodes[0].name)
    first = int(number[1]) if number else 0
    if (path.parent / "TransdataOperation_0.json").exists():
        first += 1
    return Model(str(tree.get("modelName", path.stem)), nodes, first)


def _operations(nodes: Any, depth: int) -> Iterator[Operation]:
    for node in nodes if isinstance(nodes, list) and depth < _DEPTH else ():
        if isinstance(node, dict):
            param = node.get("param")
            yield Operation(
                str(node.get("opName", "")),
                str(node.get("opType", "")),
                param if isinstance(param, dict) else {},
                _names(node.get("inTensors")),
                _names(node.get("outTensors")),
                tuple(_operations(node.get("nodes"), depth + 1)),
            )


def _names(names: Any) -> tuple[str, ...]:
    return tuple(map(str, names)) if isinstance(names, list) else ()
