"""Nodes of two paired graphs without a partner: one side only, other ones at the same place, or
several for several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from whence.comparison.onnx_files.graph import Graph, Node
from whence.comparison.onnx_files.pairing import Pairs, facing_operands

MAY_BE_NOTHING = frozenset((
    "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Flatten", "Tile", "Slice",
    "Pad", "Dropout", "Shape", "Where", "QuantizeLinear", "DequantizeLinear",
))  # fmt: skip
"""Operators that hand on what they read, perhaps in another form."""
_UNLIKE = (
    frozenset((
        "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Gelu", "Elu", "Selu", "Celu", "HardSigmoid",
        "HardSwish", "Softplus", "Softsign", "Mish", "Erf", "Exp", "Log", "Sqrt", "Abs", "Neg",
        "Sin", "Cos", "Floor", "Ceil", "Round", "Sign", "Identity",
    )),
    frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod", "PRelu")),
    frozenset((
        "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
        "ReduceLogSumExp", "ArgMax", "ArgMin",
    )),
    frozenset(("Softmax", "LogSoftmax", "Hardmax")),
    frozenset(("MaxPool", "AveragePool")),
    frozenset(("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")),
)  # fmt: skip
"""Operators of one form that compute different things, whatever they are given."""


class Kind(StrEnum):
    ATTRIBUTE = "attribute"
    WEIGHT = "weight"
    WIRING = "wiring"
    REPLACED = "replaced"
    REMOVED = "removed"
    INSERTED = "inserted"
    REWRITTEN = "rewritten"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Difference:
    """Something two graphs do not share. node: of the reference, of the target where only that has
    it. words: a clause. proves: do the two compute something else, whatever else is the same?
    weight: the initialiser.
    """

    kind: Kind
    node: Node
    words: str
    proves: bool
    in_reference: bool = True
    weight: str = ""


def merged_nodes(pairs: Pairs) -> set[int]:
    """Nodes without a partner that nobody reads, or that compute what another node of their graph
    does.
    """
    merged: set[int] = set()
    for graph, partner, keys in (
        (pairs.reference, pairs.partner, pairs.reference_keys),
        (pairs.target, pairs.turned, pairs.target_keys),
    ):
        living = graph.living()
        kept = {keys.get(v) for n in graph.nodes if id(n) in partner for v in n.outputs[:1]}
        merged |= {
            id(n)
            for n in graph.nodes
            if id(n) not in partner
            and (id(n) not in living or (n.outputs and keys.get(n.outputs[0]) in kept))
        }
    return merged


def loose_nodes(pairs: Pairs, merged: set[int]) -> list[Difference]:
    """Nodes without a partner, by the regions that they form."""
    out: list[Difference] = []
    for own, others in _regions(pairs, merged):
        if own and others:
            if len(own) == len(others) == 1 and _are_unlike(own[0], others[0]):
                words = f"it is {own[0].said} in the reference, {others[0].said} in the target"
                proves = [own[0].op_type, *own[0].inputs] != [others[0].op_type, *others[0].inputs]
                out.append(Difference(Kind.REPLACED, own[0], words, proves))
                continue
            words = f"{_types(own)} of the reference are {_types(others)} in the target"
            out.append(Difference(Kind.REWRITTEN, own[-1], words, False))
            continue
        if not others and _is_in_codes(pairs, own):
            continue
        passed = _is_passed(pairs, own or others, bool(own))
        kind, only = (Kind.REMOVED, "reference") if own else (Kind.INSERTED, "target")
        of_shapes = _extents(pairs.reference if own else pairs.target)
        for node in own or others:
            is_free = node.op_type in MAY_BE_NOTHING or of_shapes.issuperset(node.outputs)
            proves = passed and not is_free and not _is_fused(node)
            out.append(Difference(kind, node, f"only the {only} has it", proves, bool(own)))
    return out


def _is_in_codes(pairs: Pairs, nodes: list[Node]) -> bool:
    """Is this a Relu or a Clip whose bounds the target's codes keep, too?"""
    if len(nodes) != 1 or nodes[0].op_type not in ("Relu", "Clip"):
        return False
    at = {"min": [0.0]} if nodes[0].op_type == "Relu" else nodes[0].attributes
    low, high = (float(at.get(k, [v])[0]) for k, v in (("min", -math.inf), ("max", math.inf)))
    # by half a step of 8 bits
    kept = [
        value for value, (least, largest) in pairs.target.ranges.items()
        if max(low - least, largest - high) <= (largest - least) / 510
    ]  # fmt: skip
    return any(pairs.are_equal(nodes[0].inputs[0], value) for value in kept)


def _are_unlike(a: Node, b: Node) -> bool:
    return any(a.op_type in group and b.op_type in group for group in _UNLIKE)


def _is_passed(pairs: Pairs, nodes: list[Node], in_reference: bool) -> bool:
    """Does the other graph read what these nodes read, wherever this one reads what they make?"""
    inside = {id(n) for n in nodes}
    makers = pairs.reference_makers if in_reference else pairs.target_makers
    outputs = {v for n in nodes for v in n.outputs if v}
    read = {
        v for n in nodes for v in n.inputs
        if v and id(makers.get(v)) not in inside
        and v not in (pairs.reference if in_reference else pairs.target).weights
    }  # fmt: skip
    places = list(zip(pairs.reference.outputs, pairs.target.outputs))
    for a in pairs.reference.nodes:
        if id(a) in pairs.partner:
            places += facing_operands(pairs, a, pairs.partner[id(a)])
    if not in_reference:
        places = [(other, value) for value, other in places]
    faced = [other for value, other in places if value in outputs]
    return bool(faced) and all(
        any(pairs.are_equal(v, w) if in_reference else pairs.are_equal(w, v) for v in read)
        for w in faced
    )


def _extents(graph: Graph) -> set[str]:
    """Values computed from shapes and constants alone, which can be written in many ways."""
    extents = set[str]()
    for node in graph.nodes:
        read = set(filter(None, node.inputs)) - graph.weights.keys()
        if node.op_type in ("Shape", "Size") or (read and read <= extents):
            extents.update(node.outputs)
    return extents


def _is_fused(node: Node) -> bool:
    return "." in node.op_type


def _types(nodes: list[Node]) -> str:
    listed = " + ".join(n.said for n in nodes[:6]) + (" + ..." if len(nodes) > 6 else "")
    return f"{listed} ({nodes[-1].name})"


def _regions(pairs: Pairs, merged: set[int]) -> Iterable[tuple[list[Node], list[Node]]]:
    """Nodes without a partner that stand beside each other, on both sides: joined by values, and
    by partners that read or make what they make or read.
    """
    places: dict[int, int] = {}
    members: list[tuple[list[Node], list[Node]]] = []
    group: dict[Any, Any] = {}

    def root(key: Any) -> Any:
        while group.setdefault(key, key) != key:
            key = group[key]
        return key

    loose: list[tuple[int, Node]] = []
    for side, graph, partner, makers in (
        (0, pairs.reference, pairs.partner, pairs.reference_makers),
        (1, pairs.target, pairs.turned, pairs.target_makers),
    ):
        for node in graph.nodes:
            is_loose = id(node) not in partner
            if is_loose and id(node) not in merged:
                loose.append((side, node))
            for value in node.inputs:
                maker = makers.get(value)
                if maker is None or id(maker) in partner or id(maker) in merged:
                    continue
                # a loose maker: joined to its loose reader, or to the place where a partner reads
                a = node if side == 0 or is_loose else pairs.turned[id(node)]
                reader = id(node) if is_loose else ("reads", id(a))
                group[root(id(maker))] = root(reader)
        for place, value in enumerate(graph.outputs):
            maker = makers.get(value)
            if maker is not None and id(maker) not in partner and id(maker) not in merged:
                group[root(id(maker))] = root(("output", place))
    for side, node in loose:
        key = root(id(node))
        if key not in places:
            places[key] = len(members)
            members.append(([], []))
        members[places[key]][side].append(node)
    return members
