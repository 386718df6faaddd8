"""The graph that a program had compiled, as plain nodes: what the frontend of a format made of the
user's file, before any pass of the runtime.

A frontend may make several nodes of one; these have names that count up from process to process
(`MVN_42`), and are called after the node of the user's that they lead to.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whence.frameworks.onnx_names import scope_of
from whence.instrument.openvino.values import dtype_of

_RANDOM = ("RandomUniform", "Multinomial")
_ENDS = ("Result", "Assign")
_CALLED = {"kernel": "kernel_shape"}  # a kernel is what computes
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class SourceNode:
    """One node of the source graph. reads: (place of the node, its output) by input. names, dtypes:
    of the outputs. owner: the node of the user's file that it belongs to, named by its result.
    is_own: whether it is that node itself. is_constant: whether it computes the same value at each
    step. has_bodies: whether it contains graphs, which are not read.
    """

    place: int
    op_type: str
    friendly: str
    attributes: dict[str, Any]
    reads: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    owner: str
    is_own: bool
    is_constant: bool
    has_bodies: bool


@dataclass(frozen=True, slots=True)
class SourceGraph:
    """The source graph of a model. nodes: in an executable order. opsets: number of nodes by
    operator set. variables: states kept between steps. draws: types of nodes that draw random
    numbers. ends: (node, output) of each output of the model.
    """

    nodes: tuple[SourceNode, ...]
    opsets: dict[str, int]
    variables: tuple[str, ...]
    draws: tuple[str, ...]
    ends: tuple[tuple[int, int], ...]


def source_graph(model: Any, first: Mapping[str, str]) -> SourceGraph:
    """The graph of a model that is not compiled. first: by value of the user's file the first one
    that the same node of it makes, as far as that is known.
    """
    operators = list(model.get_ordered_ops())
    places = {op.get_name(): place for place, op in enumerate(operators)}
    reads = [
        tuple(
            (places[source.get_node().get_name()], int(source.get_index()))
            for source in (port.get_source_output() for port in op.inputs())
        )
        for op in operators
    ]
    names_tensors = any(map(_is_named_as_tensor, operators))
    own = [_own_names(op, names_tensors=names_tensors) for op in operators]
    owners = [first.get(owner, owner) for owner in _owners(operators, reads, own)]
    nodes: list[SourceNode] = []
    taken: Counter[str] = Counter()
    for place, op in enumerate(operators):
        op_type = str(op.get_type_name())
        names = own[place] or _made_names(owners[place], op_type, len(op.outputs()), taken)
        nodes.append(
            SourceNode(
                place,
                op_type,
                str(op.get_friendly_name()),
                _attributes(op) if reads[place] else {},
                reads[place],
                tuple(names),
                tuple(dtype_of(port.get_element_type()) for port in op.outputs()),
                owners[place],
                bool(own[place]),
                _is_constant(op_type, reads[place], nodes),
                hasattr(op, "get_function"),
            )
        )
    kinds = Counter(str(op.get_type_info().version_id) for op in operators)
    variables = [
        n.attributes.get("variable_id", n.names[0]) for n in nodes if n.op_type == "ReadValue"
    ]
    return SourceGraph(
        tuple(nodes),
        dict(kinds),
        tuple(dict.fromkeys(map(str, variables))),
        tuple(dict.fromkeys(n.op_type for n in nodes if n.op_type in _RANDOM)),
        tuple(reads[places[op.get_name()]][0] for op in model.get_results()),
    )


def _is_named_as_tensor(op: Any) -> bool:
    """Whether a node has the name of its result, as in formats that name tensors."""
    inner = op.get_type_name() not in ("Parameter", "Constant", *_ENDS)
    friendly = str(op.get_friendly_name())
    return inner and any(friendly in port.get_names() for port in op.outputs())


def _own_names(op: Any, *, names_tensors: bool) -> list[str]:
    """What the outputs of a node are called in the user's file; [] where it is not in there.

    names_tensors: the file names tensors, so that a node without such a name is not in it.
    """
    friendly = str(op.get_friendly_name())
    named = [sorted(port.get_names(), key=lambda n: (len(n), n)) for port in op.outputs()]
    is_counted = re.fullmatch(rf"{re.escape(op.get_type_name())}_\d+", friendly)
    if not is_counted and (not names_tensors or op.get_type_name() in _ENDS):
        return [friendly if k == 0 else f"{friendly}.{k}" for k in range(len(named))]
    first = next((names[0] for names in named if names), "")
    if not first:
        return []
    # several outputs of one node may lack a name
    return [
        friendly if friendly in names else (names or [f"{first}.{k}"])[0]
        for k, names in enumerate(named)
    ]


def _owners(
    operators: Sequence[Any], reads: Sequence[tuple[tuple[int, int], ...]], own: list[list[str]]
) -> list[str]:
    """The user's node that each node belongs to: itself, or the first user's node that reads its
    result.
    """
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for place, sources in enumerate(reads):
        for source, _ in sources:
            readers[source].append(place)
    owners = [names[0] if names else "" for names in own]
    for place in reversed(range(len(operators))):
        if not owners[place]:
            behind = [r for r in readers[place] if operators[r].get_type_name() not in _ENDS]
            owners[place] = next((owners[r] for r in behind if owners[r]), "")
    return owners


def _made_names(owner: str, op_type: str, count: int, taken: Counter[str]) -> list[str]:
    name = f"{scope_of(owner)}.{op_type}" if owner else op_type
    taken[name] += 1
    if taken[name] > 1:
        name = f"{name}#{taken[name] - 1}"
    return [name if k == 0 else f"{name}.{k}" for k in range(count)]


def _is_constant(
    op_type: str, reads: tuple[tuple[int, int], ...], before: Sequence[SourceNode]
) -> bool:
    if op_type == "Constant":
        return True
    if not reads or op_type in _RANDOM or op_type in ("ReadValue", *_ENDS):
        return False
    return all(before[place].is_constant for place, _ in reads)


def _attributes(op: Any) -> dict[str, Any]:
    stated = {str(k): _attribute(v) for k, v in op.get_attributes().items()}
    return {_CALLED.get(name, name): value for name, value in stated.items()}


def _attribute(value: Any) -> Any:
    """An attribute as plain JSON."""
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"float": str(value)}
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        listed = value.tolist() if hasattr(value, "tolist") else value
        return [_attribute(v) for v in listed] if isinstance(listed, (list, tuple)) else listed
    return str(value)[:200]
