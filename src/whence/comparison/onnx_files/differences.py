"""What two paired graphs do not share, node by node, and how sure each is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.onnx_files import operator_sets as sets
from whence.comparison.onnx_files import weights
from whence.comparison.onnx_files.graph import Graph, Node, Weight
from whence.comparison.onnx_files.pairing import Pairs, digest, facing_operands, is_told
from whence.comparison.onnx_files.regions import (
    MAY_BE_NOTHING,
    Difference,
    Kind,
    loose_nodes,
    merged_nodes,
)
from whence.comparison.onnx_files.weights import Compared, State
from whence.readers.encodings.onnx_model import OnnxGraph
from whence.readers.encodings.onnx_tensor import OnnxTensor

_LONGEST = 60  # characters of an attribute
_ABSENT = "absent"
_ROUNDED = frozenset(("min", "max", "value"))
"""Attributes that are inputs in newer versions, and then have the type of the model."""


@dataclass(slots=True)
class Differences:
    """found: in the reference's order. attributes: how many were compared. equal, rounded, codes,
    folded: weights of the target by what they are of the reference's. rounding: of the weight that
    its copy is farthest from, relative. is_narrowed: are most weights of the target stored wider
    than the numbers that they hold?
    """

    found: list[Difference] = field(default_factory=list)
    attributes: int = 0
    states: Counter[State] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    rounding: float = 0.0
    is_narrowed: bool = False


def differences(pairs: Pairs) -> Differences:
    """Compare the partners, then tell what has none."""
    out = Differences()
    loose = loose_nodes(pairs, merged_nodes(pairs))
    rewritten = any(d.kind == Kind.REWRITTEN for d in loose)
    order = {id(n): k for k, n in enumerate(pairs.reference.nodes)}
    target_order = {id(n): k for k, n in enumerate(pairs.target.nodes)}
    living = pairs.reference.living(), pairs.target.living()
    of_pair = _Partners(pairs, out, rewritten)
    for a in pairs.reference.nodes:
        b = pairs.partner.get(id(a))
        if b is not None and (id(a) in living[0] or id(b) in living[1]):
            out.found += of_pair.differ(a, b)
    out.found += of_pair.narrowed()
    out.found += loose
    out.found += _outputs(pairs, rewritten)
    out.found.sort(
        key=lambda d: order[id(d.node)] if d.in_reference else target_order.get(id(d.node), 0) + 0.5
    )
    return out


# ---- partners


class _Partners:
    """Tells what two partners differ in, and counts what was compared. rewritten: do the graphs
    have parts that are not held against each other, so that what lies beside them may be paired by
    chance?
    """

    def __init__(self, pairs: Pairs, out: Differences, rewritten: bool) -> None:
        self.pairs, self.out, self.rewritten = pairs, out, rewritten
        self._seen: dict[tuple[str, str], Compared] = {}
        self._widened: list[tuple[Compared, Difference]] = []
        self._alike: list[Weight] = []
        held = pairs.reference.weights.values() if rewritten else ()
        self._elsewhere = {digest(weight) for weight in held}

    def differ(self, a: Node, b: Node) -> Iterator[Difference]:
        inside = list(_inner(a, b)) if a.inner or b.inner else []
        anchored = not inside and (not self.rewritten or _is_anchored(self.pairs, a, b))
        versions = a.opset, b.opset
        if all(versions) and self._meanings(a, b) > 1:
            words = f"opset {a.opset} and opset {b.opset} give it another meaning"
            yield Difference(Kind.UNKNOWN, a, words, False)
        names = list(dict.fromkeys((*a.attributes, *b.attributes)))
        self.out.attributes += len(names)
        for name in names:
            x, y = a.attributes.get(name, _ABSENT), b.attributes.get(name, _ABSENT)
            state = _attribute(self.pairs, a, b, name)
            if state is not None:
                words = f"{name} is {shown(x)} in the reference, {shown(y)} in the target"
                # code written otherwise may take a tensor in another form, as a fused node a mask
                is_form = self.rewritten and a.op_type in MAY_BE_NOTHING
                yield Difference(Kind.ATTRIBUTE, a, words, state and anchored and not is_form)
        yield from inside
        for place, (value, other) in enumerate(facing_operands(self.pairs, a, b)):
            if not is_told(self.pairs, value, other):
                yield from self._operand(a, place, value, other, anchored)

    def narrowed(self) -> list[Difference]:
        """Weights that hold numbers of 16 bits in 32: nothing where most do, for then the file was
        reduced; else each is a difference.
        """
        wide = sum(bool(self._widened) and weights.is_wide(weight) for weight in self._alike)
        self.out.is_narrowed = len(self._widened) > wide
        if not self.out.is_narrowed:
            return [difference for _, difference in self._widened]
        for copy, _ in self._widened:
            self._count(copy)
        return []

    def _count(self, compared: Compared) -> None:
        self.out.states[compared.state] += 1
        if compared.state in (State.ROUNDED, State.CODES, State.RECOMPUTED):
            self.out.copies[compared.words] += 1
            self.out.rounding = max(self.out.rounding, compared.rel_l2)

    def _meanings(self, a: Node, b: Node) -> int:
        """How many meanings two nodes have. To flatten behind the last axis changes nothing."""
        rank, axes = _rank(self.pairs, a, b), [n.attributes.get("axis") for n in (a, b)]
        if (
            "Softmax" in a.op_type
            and rank
            and {_from_start(x, rank)[0] for x in axes} == {rank - 1}
        ):
            return 1
        return len({sets.meaning(n.op_type, n.opset, n.attributes) for n in (a, b)})

    def _operand(
        self, a: Node, place: int, value: str, other: str, anchored: bool
    ) -> Iterator[Difference]:
        pairs = self.pairs
        x, y = pairs.reference.weights.get(value), pairs.target.weights.get(other)
        if x is not None and y is not None:
            if (value, other) not in self._seen:
                compared = self._seen[value, other] = weights.compare(x, y)
                name = x.name if x.name == y.name else f"{x.name} ({y.name} in the target)"
                # it is a weight of another node: pairs beside what was rewritten are off
                moved = self.rewritten and digest(y) in self._elsewhere
                words = f"weight {name}: {compared.words}"
                certain = compared.state != State.UNKNOWN and anchored and not moved
                difference = Difference(Kind.WEIGHT, a, words, certain, weight=x.name)
                if compared.is_widened:
                    self._widened.append((compared, difference))
                    return
                self._count(compared)
                self._alike.append(y)
                if compared.state in (State.DIFFERS, State.UNKNOWN):
                    yield difference
        elif x is not None or y is not None or not pairs.are_equal(value, other):
            words = (
                f"its input {place} is {_said(pairs.reference, pairs.reference_makers, value)} in "
                f"the reference, {_said(pairs.target, pairs.target_makers, other)} in the target"
            )
            certain = anchored and (not self.rewritten or (x is None and y is None))
            yield Difference(Kind.WIRING, a, words, certain)


def _attribute(pairs: Pairs, a: Node, b: Node, name: str) -> bool | None:
    """None where an attribute is the same, else: is that certain?"""
    x, y = a.attributes.get(name, _ABSENT), b.attributes.get(name, _ABSENT)
    if x == y:
        return None
    if _ABSENT in (x, y):
        return False
    if name in sets.AXES:
        rank = _rank(pairs, a, b)
        if rank:
            return None if _from_start(x, rank) == _from_start(y, rank) else True
        signs = [any(n < 0 for n in _listed(v)) for v in (x, y)]
        return signs[0] == signs[1]
    if _are_constants_of_floats(x, y):
        x, y = x["values"], y["values"]
    if not isinstance(x, list) or not isinstance(y, list):
        return None if _single(x) == _single(y) else True
    if name == "shape":
        return _extents(x, y)
    if len(x) != len(y):
        return False  # of tensors of another rank: something was put elsewhere
    if name in _ROUNDED:
        stored = {pairs.reference.precision(), pairs.target.precision()} - {"float32", "float64"}
        if any(_as(x, dtype) == _as(y, dtype) for dtype in stored if dtype):
            return None
    return None if list(map(_single, x)) == list(map(_single, y)) else True


def _are_constants_of_floats(x: Any, y: Any) -> bool:
    """Whether both are tensors, whose type follows that of the model."""
    stored = [v.get("dtype", "") if isinstance(v, Mapping) else "" for v in (x, y)]
    return all(d in dtypes.DTYPES and dtypes.named(d).is_floating for d in stored)


def _as(values: list[Any], dtype: str) -> list[float]:
    kind = dtypes.named(dtype).numpy
    with np.errstate(over="ignore"):
        return [float(v) for v in np.asarray(values, np.float64).astype(kind).astype(np.float64)]


def _single(value: Any) -> Any:
    """A number as attributes hold it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value)) if isinstance(value, float) else value


def _rank(pairs: Pairs, a: Node, b: Node) -> int | None:
    of_output = a.op_type in sets.OF_OUTPUT
    for graph, node in ((pairs.reference, a), (pairs.target, b)):
        values = node.outputs if of_output else node.inputs
        rank = graph.rank(values[0]) if values else None
        if rank is None and a.op_type in sets.KEEPS_RANK and node.outputs:
            rank = graph.rank(node.outputs[0])
        if rank is not None:
            return rank
    return None


def _listed(value: Any) -> list[int]:
    return [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]


def _from_start(value: Any, rank: int) -> list[int]:
    return sorted(n + rank if n < 0 else n for n in _listed(value))


def _extents(x: list[Any], y: list[Any]) -> bool | None:
    """Shapes that Reshape is told: 0 and -1 stand for what the input has."""
    if len(x) != len(y):
        return False
    stated = [(m, n) for m, n in zip(x, y) if m > 0 and n > 0]
    if any(m != n for m, n in stated):
        return True
    return None if sum(m != n for m, n in zip(x, y)) <= 1 or -1 in x or -1 in y else False


def _inner(a: Node, b: Node) -> Iterator[Difference]:
    """Graphs inside of a node, as a whole."""
    for name in dict.fromkeys((*a.inner, *b.inner)):
        if repr(_plain(a.inner.get(name))) != repr(_plain(b.inner.get(name))):
            words = f"the graph inside, {name}, is another one, which is not looked into"
            yield Difference(Kind.UNKNOWN, a, words, False)


def _plain(value: Any) -> Any:
    """What a graph inside of a node holds, as text tells it apart."""
    if isinstance(value, OnnxTensor):
        return value.shape, value.number, bytes(value.raw or b""), value.typed, value.external
    if isinstance(value, OnnxGraph):
        nodes = [(n.op_type, n.inputs, n.outputs, n.attributes, n.graphs) for n in value.nodes]
        return _plain([nodes, value.initializers, value.outputs])
    if isinstance(value, Mapping):
        return [(key, _plain(item)) for key, item in value.items()]
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _said(graph: Graph, makers: dict[str, Node], value: str) -> str:
    if not value:
        return _ABSENT
    if value in graph.weights:
        return f"the weight {graph.weights[value].name}"
    maker = makers.get(value)
    return f"what {maker.name} ({maker.said}) makes" if maker is not None else f"the input {value}"


def _is_anchored(pairs: Pairs, a: Node, b: Node) -> bool:
    """Are two nodes partners beyond their neighbours: do they read the same?"""
    reads = [
        (v, w)
        for v, w in facing_operands(pairs, a, b)
        if v not in pairs.reference.weights and w not in pairs.target.weights
    ]
    return bool(reads) and all(pairs.are_equal(v, w) for v, w in reads)


def _outputs(pairs: Pairs, rewritten: bool) -> Iterator[Difference]:
    own, others = pairs.reference.outputs, pairs.target.outputs
    last = pairs.reference.nodes[-1] if pairs.reference.nodes else Node("", "", [], [])
    if len(own) != len(others):
        words = f"the graph has {len(own)} outputs in the reference, {len(others)} in the target"
        yield Difference(Kind.UNKNOWN, last, words, False)
        return
    for place, (value, other) in enumerate(zip(own, others)):
        if not pairs.are_equal(value, other) and not is_told(pairs, value, other):
            a = pairs.reference_makers.get(value, last)
            words = (
                f"output {place} of the graph is "
                f"{_said(pairs.reference, pairs.reference_makers, value)} in the reference, "
                f"{_said(pairs.target, pairs.target_makers, other)} in the target"
            )
            yield Difference(Kind.WIRING, a, words, not rewritten)


def shown(value: Any) -> str:
    """An attribute for a sentence."""
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, list) and any(isinstance(v, float) for v in value):
        text = f"[{', '.join(shown(v) for v in value)}]"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
