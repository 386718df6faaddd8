"""The user's graph, to find the nodes of it that a node of the optimised graph was made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from whence.frameworks.onnx_names import outer_values, scope_of
from whence.instrument.onnxruntime.nodes import (
    is_random,
    source_of,
)

_MOST_MEMBERS = 256
_LARGEST = 4096  # bytes of an attribute that is compared


class OriginalGraph:
    """The user's graph. makers: value -> the node that makes it."""

    def __init__(self, model: Any) -> None:
        graph = model.graph
        self.makers = {value: node for node in graph.nodes for value in node.outputs if value}
        constants = {
            node.outputs[0]: node.attributes["value"]
            for node in graph.nodes
            if node.op_type == "Constant" and "value" in node.attributes
        }
        self._shapes = {k: t.shape for k, t in {**graph.initializers, **constants}.items()}
        self._places = {id(node): place for place, node in enumerate(graph.nodes)}
        self._outputs = set(graph.outputs)
        self._same = _same_values(graph)
        self._readers: defaultdict[str, list[Any]] = defaultdict(list)
        self._constant = {*graph.initializers, *graph.sparse} - set(graph.inputs)
        for node in graph.nodes:
            reads = [v for v in (*node.inputs, *outer_values(node)) if v]
            for value in dict.fromkeys(reads):
                self._readers[value].append(node)
            if all(v in self._constant for v in reads) and not is_random(node):
                self._constant.update(node.outputs)

    def members(self, makes: Sequence[str], reads: Collection[str]) -> list[Any]:
        """The nodes that an optimised node was fused from, in order; [] where unknown. makes,
        reads: its results and inputs, by their names in this graph.
        """
        behind = self._behind(makes, reads)
        ends = {id(self.makers[v]) for v in makes if v in self.makers}
        by_id = {id(n): n for n in behind}
        while shared := [n for n in by_id.values() if self._is_shared(n, by_id, ends)]:
            for node in shared:
                del by_id[id(node)]
        return list(by_id.values())

    def _is_shared(self, node: Any, found: Collection[int], ends: Collection[int]) -> bool:
        """Whether a result of the node is read by other nodes too. Such a node was not fused into
        this one alone.
        """
        return id(node) not in ends and any(
            value in self._outputs or any(id(r) not in found for r in self._readers[value])
            for value in node.outputs
        )

    def source(self, makes: Sequence[str], members: Sequence[Any]) -> str:
        """The source line or module that an exporter wrote into the node that makes a value, or
        else into an earlier node fused with it.
        """
        maker = next((self.makers[v] for v in makes if v in self.makers), None)
        nodes = [*([maker] if maker is not None else []), *reversed(members)]
        return next((text for node in nodes if (text := source_of(node))), "")

    def _behind(self, makes: Sequence[str], reads: Collection[str]) -> list[Any]:
        """The nodes between the values `reads` and `makes`; [] where a value has another origin."""
        stops = {self._same.get(v, v) for v in reads}
        waiting = [v for v in makes if v in self.makers]
        by_id: dict[int, Any] = {}
        while waiting:
            value = waiting.pop()
            if not value or self._same.get(value, value) in stops or value in self._constant:
                continue
            maker = self.makers.get(value)
            if maker is None or len(by_id) > _MOST_MEMBERS:
                return []
            if id(maker) not in by_id:
                by_id[id(maker)] = maker
                waiting += [*maker.inputs, *outer_values(maker)]
        return sorted(by_id.values(), key=lambda n: self._places[id(n)])

    def next_value(self, value: str, op_types: Collection[str]) -> str:
        """The result of the only node that reads a value, if that node is of one of these types;
        else "".
        """
        readers = self._readers.get(value, [])
        if len(readers) != 1 or readers[0].op_type not in op_types or value in self._outputs:
            return ""
        return str(readers[0].outputs[0])

    def channels(self, value: str) -> tuple[int, int]:
        """Numbers of output and input channels of the convolution that makes a value, directly or
        followed by a norm, a sum and an activation; zeros where unknown.
        """
        for _ in range(4):
            maker = self.makers.get(value)
            if maker is None or not maker.inputs:
                break
            if maker.op_type == "Conv":
                return self._weight(maker)
            value = maker.inputs[0]
        return 0, 0

    def _weight(self, convolution: Any) -> tuple[int, int]:
        name = convolution.inputs[1]
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            name = maker.inputs[0]
        return channels_of(self._shapes.get(name, ()), convolution)


def channels_of(shape: Sequence[int], convolution: Any) -> tuple[int, int]:
    """Numbers of output and input channels of a convolution by the shape of its weight, which may
    be quantised; zeros where unknown.
    """
    group = int(convolution.attributes.get("group", 1))
    return (int(shape[0]), int(shape[1]) * group) if len(shape) > 1 else (0, 0)


def names_of(members: Sequence[Any]) -> tuple[str, ...]:
    """The names of nodes as used for their calls."""
    return tuple(scope_of(next(filter(None, m.outputs), m.name)) for m in members)


def _same_values(graph: Any) -> dict[str, str]:
    """Maps each value to the first one computed by the same operator from the same inputs: the
    runtime computes such values once.
    """
    same: dict[str, str] = {}
    first: dict[Any, Any] = {}
    for node in graph.nodes:
        if is_random(node) or node.graphs:
            continue
        stated = tuple((name, _key(v)) for name, v in sorted(node.attributes.items()))
        reads = tuple(same.get(v, v) for v in node.inputs)
        maker = first.setdefault((node.domain, node.op_type, stated, reads), node)
        same.update((a, b) for a, b in zip(node.outputs, maker.outputs) if a and b)
    return same


def _key(value: Any) -> Any:
    """A comparable form of an attribute. A large tensor equals only itself."""
    raw = getattr(value, "raw", None)
    if raw is not None and len(raw) <= _LARGEST:
        return value.dtype, value.shape, bytes(raw)
    return id(value) if hasattr(value, "raw") else str(value)
