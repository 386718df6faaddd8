"""The graph of a model as calls of it will be written: one for each node that the device executes,
with the nodes of the source that it was fused from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from whence.frameworks.onnx_names import scope_of
from whence.instrument.engines.watched import NodeForm
from whence.instrument.openvino.executed import Executed, Execution
from whence.instrument.openvino.source_graph import SourceGraph, SourceNode
from whence.records.marks import Mark, mark

_COUNTS = ("int32", "int64")
_SHOWN = 4  # types of nodes in the type of a fused one
_INPUTS = ("Parameter", "ReadValue")


class GraphPlan(NamedTuple):
    """nodes: in the order in which they run. places: (node of the source, output) of each value.
    constants: place of each parameter.
    """

    nodes: tuple[NodeForm, ...]
    places: dict[str, tuple[int, int]]
    constants: dict[str, int]


class _Group(NamedTuple):
    """Nodes of the source that one executed node carries out. reads: (node, output)."""

    members: tuple[SourceNode, ...]
    reads: tuple[tuple[int, int], ...]
    constants: tuple[SourceNode, ...]


def planned(source: SourceGraph, executed: Executed) -> GraphPlan:
    """The calls of a graph, given what the device executes of it."""
    nodes = source.nodes
    constant = {
        n.place
        for n in nodes
        if n.is_constant or (n.reads and n.friendly in executed.constants and not _counts(n))
    }
    runs = _materialised(source, executed, constant)
    used = {read for n in nodes for read in n.reads}
    places: dict[str, tuple[int, int]] = {
        name: (n.place, port) for n in nodes for port, name in enumerate(n.names)
    }
    groups = _groups(source, runs, constant)
    forms = [_form(source, groups[place], runs[place], used) for place in sorted(runs)]
    constants = {n.names[0]: n.place for group in groups.values() for n in group.constants}
    return GraphPlan(tuple(forms), places, constants)


def _materialised(
    source: SourceGraph, executed: Executed, constant: set[int]
) -> dict[int, Execution | None]:
    """The source nodes whose results the device holds in memory, with what executes each: the last
    one of an executed node, and what makes outputs and states; and nodes of the user's that count:
    shapes, positions, indices. The runtime computes these on the side or not at all.
    """
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for node in source.nodes:
        by_name[node.friendly].append(node.place)
    runs: dict[int, Execution | None] = {}
    for execution in executed.nodes:
        known = [p for name in execution.originals for p in by_name[name] if p not in constant]
        last = max(known, default=-1)
        if last >= 0 and _is_shown(source.nodes[last]):
            runs[last] = execution
    for place, _ in source.ends:
        if place not in constant and source.nodes[place].op_type != "Parameter":
            runs.setdefault(place, None)
    for node in source.nodes:
        if node.op_type == "ReadValue" or _counts(node):
            runs.setdefault(node.place, None)
    return runs


def _counts(node: SourceNode) -> bool:
    """Is it a node of the user's that computes shapes, positions or indices?"""
    inner = bool(node.reads) and not node.is_constant and not node.has_bodies
    return inner and node.is_own and all(name in _COUNTS for name in node.dtypes)


def _is_shown(node: SourceNode) -> bool:
    """What a frontend put between nodes of the user's is a part of the one that it leads to."""
    return node.is_own and node.op_type not in ("Parameter", "Result", "Assign")


def _groups(
    source: SourceGraph, runs: dict[int, Execution | None], constant: set[int]
) -> dict[int, _Group]:
    """The group of each node in `runs`, which gains nodes of the user's that several groups would
    need: what the device left out as it changes nothing, or computes more than once.
    """
    while True:
        groups = {place: _group(source, place, runs, constant) for place in runs}
        needed = Counter(
            m.place for place, g in groups.items() for m in g.members if m.place != place
        )
        shared = [p for p, count in needed.items() if count > 1 and source.nodes[p].is_own]
        if not shared:
            return groups
        # the last of them first: what is before it may then be needed by it alone
        runs[max(shared)] = None


def _group(source: SourceGraph, place: int, runs: Mapping[int, Any], constant: set[int]) -> _Group:
    """What is computed between a node and the ones before it whose results are in memory."""
    members, reads, constants = {place: None}, dict[tuple[int, int], None](), dict[int, None]()
    waiting = [place] if source.nodes[place].op_type not in _INPUTS else []
    while waiting:
        for read in source.nodes[waiting.pop()].reads:
            before = source.nodes[read[0]]
            if before.place in constant:
                constants.update(dict.fromkeys(_leaves(source, before.place)))
            elif before.place in runs or before.op_type in _INPUTS:
                reads[read] = None
            elif before.place not in members:
                members[before.place] = None
                waiting.append(before.place)
    in_order = [source.nodes[m] for m in sorted(members)]
    read_order = {r: k for k, r in enumerate(r for n in in_order for r in n.reads)}
    return _Group(
        tuple(in_order),
        tuple(sorted(reads, key=lambda r: read_order[r])),
        tuple(source.nodes[c] for c in sorted(constants) if source.nodes[c].is_own),
    )


def _leaves(source: SourceGraph, place: int) -> list[int]:
    """The constants of the file that a constant value is computed from."""
    leaves, waiting, visited = [], [place], set[int]()
    while waiting:
        node = source.nodes[waiting.pop()]
        if node.place in visited:
            continue
        visited.add(node.place)
        if node.op_type == "Constant":
            leaves.append(node.place)
        # what only the shapes of this model fix is no constant of the file
        waiting += [p for p, _ in node.reads if source.nodes[p].is_constant]
    return leaves


def _form(
    source: SourceGraph,
    group: _Group,
    execution: Execution | None,
    used: set[tuple[int, int]],
) -> NodeForm:
    last = group.members[-1]
    outputs = [
        (f"output.{port}", name)
        for port, name in enumerate(last.names)
        if (last.place, port) in used or port == 0
    ]
    scope = scope_of(last.names[0])
    owners = tuple(dict.fromkeys(scope_of(m.owner) for m in group.members if m.owner))
    params = tuple((f"param.{c.names[0]}", c.names[0]) for c in group.constants)
    return NodeForm(
        _op_type(group.members),
        scope,
        "",
        _arguments(group.members),
        _notes(source, group, execution),
        () if owners == (scope,) else owners,
        tuple(
            (f"input.{k}", source.nodes[place].names[port])
            for k, (place, port) in _positions(group)
        ),
        params,
        tuple(outputs),
        _shape_slot(source, group),
    )


def _positions(group: _Group) -> list[tuple[int, tuple[int, int]]]:
    """(position, value) of what a group reads: by the operator's own inputs where it is one."""
    if len(group.members) > 1:
        return list(enumerate(group.reads))
    return [(k, read) for k, read in enumerate(group.members[0].reads) if read in group.reads]


def _op_type(members: tuple[SourceNode, ...]) -> str:
    kinds = [m.op_type for m in members]
    if len(kinds) > _SHOWN:
        kinds = [*kinds[: _SHOWN - 2], f"{len(kinds) - _SHOWN + 1} more", kinds[-1]]
    return "+".join(kinds)


def _arguments(members: tuple[SourceNode, ...]) -> dict[str, Any]:
    """Attributes; of several nodes with the type of each before them."""
    if len(members) == 1:
        return dict(members[0].attributes)
    arguments: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    for member in members:
        kinds[member.op_type] += 1
        number = kinds[member.op_type]
        prefix = member.op_type if number == 1 else f"{member.op_type}#{number - 1}"
        arguments |= {f"{prefix}.{name}": value for name, value in member.attributes.items()}
    return arguments


def _notes(source: SourceGraph, group: _Group, execution: Execution | None) -> tuple[str, ...]:
    notes = [mark(Mark.HIDDEN, f"{m.op_type}: ") for m in group.members if m.has_bodies]
    if execution is not None:
        notes.append(mark(Mark.EXECUTED_IN, execution.precision))
        notes.append(f"by {execution.kernel} of {execution.kind}, stored in {execution.stored}")
    if len(group.members) == 1:
        places = {place: k for k, (place, _) in enumerate(group.members[0].reads)}
        notes += [
            mark(Mark.TAKES, f"{c.names[0]} as {places[c.place]}")
            for c in group.constants
            if c.place in places
        ]
    return tuple(notes)


def _shape_slot(source: SourceGraph, group: _Group) -> str:
    """A shape can be written in several ways (-1, 0); recorded is what it came to."""
    last = group.members[-1]
    if last.op_type != "Reshape" or len(last.reads) < 2:
        return ""
    shape = source.nodes[last.reads[1][0]]
    return f"param.{shape.names[0]}" if shape in group.constants else ""
