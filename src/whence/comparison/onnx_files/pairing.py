"""Which nodes of two graphs are one: by what they compute from, by what is computed from them, and
last by their neighbours. Names of values say nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence.comparison.onnx_files import operator_sets as sets
from whence.comparison.onnx_files.graph import Graph, Node, Weight

_LARGE = 1 << 20  # elements of a weight that a key takes in full


@dataclass(slots=True)
class Pairs:
    """partner: of the reference's nodes, by identity. turned: of the target's. equal: values that
    hold the same, whatever node makes them: (reference's, target's).
    """

    reference: Graph
    target: Graph
    partner: dict[int, Node] = field(default_factory=dict)
    turned: dict[int, Node] = field(default_factory=dict)
    reference_keys: dict[str, Hashable] = field(default_factory=dict)
    target_keys: dict[str, Hashable] = field(default_factory=dict)
    reference_makers: dict[str, Node] = field(default_factory=dict)
    target_makers: dict[str, Node] = field(default_factory=dict)

    def add(self, a: Node, b: Node) -> None:
        self.partner[id(a)] = b
        self.turned[id(b)] = a

    def are_equal(self, value: str, other: str) -> bool:
        """Is a value of the reference the one of the target? Of weights this is asked elsewhere."""
        if not value or not other:
            return value == other
        a, b = self.reference_makers.get(value), self.target_makers.get(other)
        if a is None or b is None:
            own = self.reference_keys.get(value)
            return a is b and own is not None and own == self.target_keys.get(other)
        if self.partner.get(id(a)) is b and a.outputs.index(value) == b.outputs.index(other):
            return True
        return self.reference_keys.get(value) == self.target_keys.get(other)


def pair(reference: Graph, target: Graph) -> Pairs:
    """Pair the nodes of two graphs in normal form."""
    pairs = Pairs(reference, target)
    pairs.reference_makers, pairs.target_makers = reference.makers(), target.makers()
    inputs = _facing_inputs(reference, target)
    strong, weak = (
        [_Keys(graph, facing, True) for graph, facing in inputs],
        [_Keys(graph, facing, False) for graph, facing in inputs],
    )
    pairs.reference_keys, pairs.target_keys = strong[0].values, strong[1].values
    for keys in (strong, weak):
        a, b = keys
        for of in (
            lambda k: lambda n: (k.above[id(n)], k.below[id(n)]),
            lambda k: lambda n: k.above[id(n)],
            lambda k: lambda n: k.below[id(n)],
        ):
            _by_key(pairs, of(a), of(b))
    _by_neighbours(pairs)
    return pairs


def _facing_inputs(
    reference: Graph, target: Graph
) -> tuple[tuple[Graph, dict[str, str]], tuple[Graph, dict[str, str]]]:
    """What the inputs of both graphs are called for the comparison: by name where the names are
    the same, else by place.
    """
    if set(reference.inputs) == set(target.inputs):
        return tuple((g, {v: f"input {v}" for v in g.inputs}) for g in (reference, target))  # type: ignore[return-value]
    return tuple(  # type: ignore[return-value]
        (g, {v: f"input {k}" for k, v in enumerate(g.inputs)}) for g in (reference, target)
    )


class _Keys:
    """A key for each node of what it computes from (above), of what is computed from it (below),
    and for each value. strong: attributes and elements of weights are part of it.
    """

    def __init__(self, graph: Graph, inputs: dict[str, str], strong: bool) -> None:
        self.graph, self.strong = graph, strong
        self._digests: dict[str, str] = {}
        self.values: dict[str, Hashable] = dict(inputs)
        self.above: dict[int, str] = {}
        self.below: dict[int, str] = {}
        for node in graph.nodes:
            reads = tuple(self._of(v) for v in node.inputs)
            if node.op_type in ("Add", "Mul"):
                reads = tuple(sorted(reads))
            key = _hash((self._of_node(node), reads))
            self.above[id(node)] = key
            self.values.update((v, f"{key} {k}") for k, v in enumerate(node.outputs) if v)
        self._from_below()

    def _from_below(self) -> None:
        uses: dict[str, list[Any]] = defaultdict(list)
        for place, value in enumerate(self.graph.outputs):
            uses[value].append(f"output {place}")
        for node in reversed(self.graph.nodes):
            used = tuple(tuple(sorted(uses[v])) for v in node.outputs)
            key = self.below[id(node)] = _hash((self._of_node(node), used))
            commutes = node.op_type in ("Add", "Mul")
            for place, value in enumerate(node.inputs):
                uses[value].append(f"{key} {'' if commutes else place}")

    def _of_node(self, node: Node) -> tuple[Any, ...]:
        attributes = str(sorted(node.attributes.items())) if self.strong else ""
        params = tuple(self._of(v) for v in node.inputs if v in self.graph.weights)
        if node.op_type in ("Add", "Mul"):
            params = tuple(sorted(params))
        return node.op_type, len(node.outputs), attributes, params

    def _of(self, value: str) -> str:
        weight = self.graph.weights.get(value)
        if weight is None:
            return str(self.values.get(value, ""))
        if value not in self._digests:
            self._digests[value] = digest(weight) if self.strong else f"weight {weight.shape}"
        return self._digests[value]


def digest(weight: Weight) -> str:
    """The elements of a weight; of a large one, of every n-th."""
    array = weight.elements()
    if array is None:
        return f"weight {weight.shape}"
    flat = array.reshape(-1)[:: max(1, array.size // _LARGE)]
    if array.dtype.itemsize <= 4 and array.dtype.kind not in "iub":
        flat = flat.astype(np.float32)
    return _hash((weight.shape, np.ascontiguousarray(flat).tobytes()))


def _hash(key: Any) -> str:
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def _by_key(
    pairs: Pairs, of: Callable[[Node], Hashable], of_other: Callable[[Node], Hashable]
) -> None:
    """Pair what has one key and is equally often there on both sides, in order."""
    groups: dict[Hashable, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
    for node in pairs.reference.nodes:
        if id(node) not in pairs.partner:
            groups[of(node)][0].append(node)
    for node in pairs.target.nodes:
        if id(node) not in pairs.turned:
            groups[of_other(node)][1].append(node)
    for own, others in groups.values():
        if len(own) == len(others):
            for a, b in zip(own, others, strict=True):
                pairs.add(a, b)


def _by_neighbours(pairs: Pairs) -> None:
    """Pair what stands at the same place beside partners and is of one type, until nothing is
    left to pair.
    """
    readers = [_readers(graph) for graph in (pairs.reference, pairs.target)]
    waiting = [node for node in pairs.reference.nodes if id(node) in pairs.partner]
    outputs = zip(pairs.reference.outputs, pairs.target.outputs)
    for value, other in outputs:
        a, b = pairs.reference_makers.get(value), pairs.target_makers.get(other)
        if _fit(pairs, a, b) and a is not None and b is not None:
            pairs.add(a, b)
            waiting.append(a)
    while waiting:
        a = waiting.pop()
        b = pairs.partner[id(a)]
        for x, y in (*_makers_at(pairs, a, b), *_readers_at(pairs, a, b, readers)):
            if _fit(pairs, x, y):
                pairs.add(x, y)
                waiting.append(x)


def _fit(pairs: Pairs, a: Node | None, b: Node | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.op_type == b.op_type
        and id(a) not in pairs.partner
        and id(b) not in pairs.turned
    )


def _makers_at(pairs: Pairs, a: Node, b: Node) -> Iterable[tuple[Node, Node]]:
    for value, other in zip(a.inputs, b.inputs):
        x, y = pairs.reference_makers.get(value), pairs.target_makers.get(other)
        if x is not None and y is not None:
            yield x, y


def _readers_at(
    pairs: Pairs, a: Node, b: Node, readers: list[dict[str, list[tuple[Node, int]]]]
) -> Iterable[tuple[Node, Node]]:
    """Readers of the same output, where the type and the place are found once on each side."""
    for value, other in zip(a.outputs, b.outputs):
        sides = [
            [(n, k) for n, k in readers[0][value] if id(n) not in pairs.partner],
            [(n, k) for n, k in readers[1][other] if id(n) not in pairs.turned],
        ]
        counts = [Counter((n.op_type, k) for n, k in side) for side in sides]
        for node, place in sides[0]:
            key = (node.op_type, place)
            if counts[0][key] == counts[1][key] == 1:
                partner = next(n for n, k in sides[1] if (n.op_type, k) == key)
                yield node, partner


def _readers(graph: Graph) -> dict[str, list[tuple[Node, int]]]:
    readers: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in graph.nodes:
        for place, value in enumerate(node.inputs):
            readers[value].append((node, place))
    return readers


# ---- values that face each other


def facing_operands(pairs: Pairs, a: Node, b: Node) -> list[tuple[str, str]]:
    """Operands by place; of sums and products in the order that fits."""
    width = max(len(a.inputs), len(b.inputs))
    own, others = ([*n.inputs, *[""] * (width - len(n.inputs))] for n in (a, b))
    straight = list(zip(own, others))
    if a.op_type not in sets.COMMUTE or width != 2:
        return straight
    crossed = list(zip(own, reversed(others)))
    return max(straight, crossed, key=lambda way: sum(_fits(pairs, x, y) for x, y in way))


def _fits(pairs: Pairs, value: str, other: str) -> float:
    x, y = pairs.reference.weights.get(value), pairs.target.weights.get(other)
    if x is not None and y is not None:
        return 0.5 + 0.5 * (x.shape == y.shape)
    return 0.0 if x is not None or y is not None else float(pairs.are_equal(value, other))


def is_told(pairs: Pairs, value: str, other: str) -> bool:
    """Does one of the two come from a node without a partner, which is told of itself?"""
    a, b = pairs.reference_makers.get(value), pairs.target_makers.get(other)
    return (a is not None and id(a) not in pairs.partner) or (
        b is not None and id(b) not in pairs.turned
    )
