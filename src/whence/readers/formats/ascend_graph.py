"""Reads graphs of Ascend without dumps, as programs: GE's texts, models as JSON (OM), topologies of
ATB, trees of modules.

The run has operators, attributes and data flow, but no values. Beside a dump, the reader of the
dump uses these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.ascend import atb_topology, graph_text
from whence.readers.ascend.atb_topology import Operation
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits
from whence.readers.encodings.json_file import object_of
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = (
    "a graph such as ge_proto_00000001_Build.txt, an OM model as JSON, a topology of "
    "ATB, or a folder of them"
)
ORDER = 50
HOLDS_TENSORS = False
KIND = "ascend program"
_NO_VALUES = "a graph has no values"
_SAMPLE = 1 << 12
_FILES = 1000
_DEPTH = 32
_DIGITS = 40  # of a number
_DTYPES = {"float": "float32", "double": "float64", "bf16": "bfloat16"}
# Attributes that each build sets anew, or that are addresses in memory.
_BOOKKEEPING = frozenset({
    "OwnerGraphIsUnknown", "OUTPUT_IS_VAR", "INPUT_IS_VAR", "NodeSqeNum", "LxFusionOptimized",
    "op_para_size",
})  # fmt: skip


def sniff(place: Place) -> bool:
    """Whether the file, or one of the folder's, begins like a graph, with no other kind of file
    beside it.
    """
    if not place.is_folder:
        return _is_graph(place.path.name, place.head)
    files = [name for name in place.names if name.endswith((".txt", ".pbtxt", ".json"))]
    return 0 < len(files) == len(place.names) <= _FILES and any(
        map(place_is_graph, map(place.within, files))
    )


def place_is_graph(place: Place) -> bool:
    """Whether this is one file with a graph."""
    return not place.is_folder and _is_graph(place.path.name, place.head)


def _is_graph(name: str, head: bytes) -> bool:
    words = b"".join(head.split())
    if name.endswith(".json"):
        topology = b'"nodes":[' in words and (
            b'"modelName"' in words or b'"opName"' in words or b'"inTensors"' in words
        )
        model = words[:1] == b"{" and b'{"key":' in words[:_SAMPLE] and (b'"value":' in words)
        tree = (
            words[:_SAMPLE].startswith(b'{"name":"')
            and b'"type":"' in words[:_SAMPLE]
            and b'"children":[' in words[:_SAMPLE]
        )
        return topology or model or tree
    return name.endswith((".txt", ".pbtxt")) and words.startswith(
        (b"graph{name:", b"graph{op{", b"op{name:")
    )


def open_run(place: Place) -> Run:
    """Returns a run with a root for every graph. Files that cannot be read are noted; raises
    UnreadableRun when none can.
    """
    building = Building(place.path, KIND)
    paths = [place.inside(name) for name in place.names] if place.is_folder else [place.path]
    failed: list[str] = []
    for path in paths:
        try:
            _add(building, path)
        except UnreadableRun as error:
            failed.append(f"{path.name}: {error}")
            building.lacks(Lack.DAMAGED, path.name, f"{path.name} cannot be read: {error}")
    if len(failed) == len(paths):
        raise UnreadableRun(failed[0])
    return building.run()


def _add(building: Building, path: Path) -> None:
    if path.suffix == ".json":
        tree = object_of(path, "it", limit=limits.JSON_BYTES // 16)
        if isinstance(tree.get("children"), list):
            _module(building, tree, path.stem, -1, 0)
            return
        topology = atb_topology.read(path)
        if topology is not None:
            _operations(building, topology.nodes, path.stem, "", -1, {})
            return
    graphs = graph_text.messages(path)
    if not graphs:
        raise UnreadableRun("there is no operator in it")
    for name, operators in graphs:
        _graph(building, name if len(graphs) > 1 and name else path.stem, operators)


# ---- graphs of GE


def _graph(building: Building, root: str, operators: Sequence[Mapping[str, Any]]) -> None:
    by_name = {graph_text.text_of(graph_text.one(op, "name")): op for op in operators}
    records: dict[tuple[str, int], int] = {}

    def tensor(producer: str, output: int) -> int:
        key = (producer, output)
        if key not in records:
            described = graph_text.many(by_name.get(producer), "output_desc")
            records[key] = _described(
                building, described[output] if output < len(described) else None
            )
        return records[key]

    graph = graph_text.Graph(root, map(graph_text.node, operators))
    for node in graph.in_order():
        op = by_name[node.name]
        outputs = [tensor(node.name, i) for i in range(len(graph_text.many(op, "output_desc")))]
        inputs = {str(i): tensor(*source) for i, source in enumerate(node.inputs) if source[0]}
        building.call(
            node.name,
            op_type=node.type,
            inputs=inputs,
            outputs=outputs,
            root=root,
            arguments=_attributes(op),
            origins=node.origins or (),
        )


def _described(building: Building, tensor: Any) -> int:
    name = str(graph_text.one(tensor, "dtype") or "undefined").lower().removeprefix("dt_")
    extents = (
        _number(n, int)
        for n in graph_text.many(graph_text.one(tensor, "shape"), "dim")[: limits.RANK]
    )
    shape = tuple(n if isinstance(n, int) and 0 <= n < 1 << 62 else -1 for n in extents)
    return building.tensor(_DTYPES.get(name, name), shape, why=_NO_VALUES)


def _attributes(op: Any) -> dict[str, Any]:
    """Returns the settings of an operator, without those that builds add (names that start with _,
    of kernels, of memory).
    """
    name = graph_text.text_of(graph_text.one(op, "name"))
    settings = {
        key: value
        for key, value in graph_text.attributes_of(op).items()
        if not key.startswith(("_", f"{name}_")) and key not in _BOOKKEEPING and "tvm_" not in key
    }
    return {key: _plain(value, 0) for key, value in settings.items()}


def _plain(value: Any, depth: int) -> Any:
    """Returns an attribute's value without its type tag."""
    if not isinstance(value, Mapping) or depth > _DEPTH:
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)[:200]
    for field in ("s", "dt", "i", "f"):
        if field in value:
            return (
                _number(graph_text.one(value, field), float if field == "f" else int)
                if field in "if"
                else graph_text.one(value, field)
            )
    if "b" in value:
        return str(graph_text.one(value, "b")).lower() == "true"
    items = graph_text.one(value, "list")
    if isinstance(items, Mapping):
        return [
            _plain({field: v}, depth + 1)
            for field in items
            if field != "val_type"
            for v in graph_text.many(items, field)
        ]
    return json.dumps(value, sort_keys=True, default=str)[:500]


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """Returns the number that a text holds; the text where it holds none."""
    try:
        return kind(value) if len(str(value)) < _DIGITS else value
    except (TypeError, ValueError, OverflowError):
        return value


# ---- topologies and trees


def _operations(
    building: Building,
    nodes: Iterable[Operation],
    root: str,
    scope: str,
    parent: int,
    records: dict[str, int],
) -> None:
    def tensor(name: str) -> int:
        if name not in records:
            records[name] = building.tensor("undefined", (), why=_NO_VALUES)
        return records[name]

    for place, node in enumerate(nodes):
        name = ".".join(part for part in (scope, node.name or f"{place}_{node.type}") if part)
        call = building.call(
            name,
            op_type=node.type,
            inputs=[tensor(n) for n in node.inputs],
            outputs=[tensor(n) for n in node.outputs],
            root=root,
            parent=parent,
            arguments=node.param,
        )
        _operations(building, node.nodes, root, name, call, {} if node.nodes else records)


def _module(
    building: Building, node: Mapping[str, Any], root: str, parent: int, depth: int
) -> None:
    if depth > _DEPTH:
        raise UnreadableRun(f"modules nest deeper than {_DEPTH}")
    name = str(node.get("name", "")).removeprefix("root").removeprefix(".")
    call = building.call(
        name, op_type=str(node.get("type", "")), kind="module", root=root, parent=parent
    )
    children = node.get("children")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            _module(building, child, root, call, depth + 1)
