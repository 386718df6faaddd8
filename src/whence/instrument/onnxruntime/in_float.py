"""Sessions in which chosen layers of a quantised graph compute in float.

The graph is edited before the session is made: the nodes that the float model (a run of it) has at
a place stand in for those that compute with codes there. Values keep their codes where another
quantised node makes or reads them, as they do where a quantiser leaves a layer out. Such a capture
changes the program on purpose (`--patch` with `--recompute`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whence import extras
from whence.frameworks.onnx_names import scope_of
from whence.instrument.patch_points import parse_point
from whence.instrument.session import Session
from whence.records import Call, Run
from whence.records.marks import Mark, has_mark, mark_values
from whence.records.slots import input_name, param_name

_QUANTIZE, _DEQUANTIZE, _DYNAMIC = "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"
_SCALES = {"QLinearConv": (6, 7), "QLinearMatMul": (6, 7), "QGemm": (7, 8)}
"""Fused nodes -> which of their inputs are the scale and the zero point of their result."""
_BETWEEN = frozenset(("Cast", "Mul", "Add", "MatMulInteger", "ConvInteger", "Reshape"))
"""Nodes between numbers that are quantised as they come and a layer's result."""
_LARGEST = 1 << 31
"""Bytes from which on protobuf does not write a model."""


class NotInFloat(Exception):
    """Why a layer cannot be brought to float; the message says it."""


class LayersInFloat:
    """Edits the models of a capture's sessions. points: as given to `--patch`; nodes that follow
    one another and are named together are one layer. reference: a run of the float model.
    """

    def __init__(self, session: Session, reference: Run, points: Sequence[str]) -> None:
        extras.needed("onnx", "layers in float")  # before the program makes a session
        self._session, self._reference = session, reference
        self._points = [parse_point(text) for text in points]
        self._pending: dict[str, str] = {}
        self._layers = list(self._chains())

    def _chains(self) -> Iterator[list[Call]]:
        """The first calls of the chosen nodes, each joined by those without parameters that read
        it: activations, which kernels fuse with it.
        """
        seen: set[str] = set()
        chain: list[Call] = []
        for call in self._reference.calls:
            if call.parent == -1 or call.scope in seen:
                continue
            if not any(point.fits_call(call) for point in self._points):
                continue
            seen.add(call.scope)
            self._pending[call.scope] = "no session has a node of this name"
            results = {ref.record for before in chain[-1:] for ref in before.slots("output")}
            reads_it = bool(results & {ref.record for ref in call.slots("input")})
            if chain and (has_mark(call, Mark.TAKES) or not reads_it):
                yield chain
                chain = []
            chain.append(call)
        if chain:
            yield chain

    def model(self, source: str | os.PathLike[str] | bytes) -> Any:
        """The model that a session is made of in place of `source`: its bytes with the layers in
        float, or `source` itself where it has none of them.
        """
        onnx = extras.needed("onnx", "layers in float")
        model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
        graph = _Graph(model.graph)
        changed = False
        for layer in self._layers:
            name = layer[0].scope
            try:
                place = graph.place(layer)
                if place is None:
                    continue
                graph.graft(place, self._reference)
            except NotInFloat as why:
                self._pending[name] = str(why)
                continue
            changed = True
            for call in layer:
                self._pending.pop(call.scope, None)
                self._session.note("patch", f"{call.scope}: computes in float", call.scope)
        if not changed:
            return source
        if model.ByteSize() >= _LARGEST:
            raise NotInFloat("the model is larger than what protobuf writes, 2 GiB")
        return model.SerializeToString()

    def finish(self) -> None:
        """Note the layers that no session computed in float."""
        for name, why in self._pending.items():
            self._session.note("patch-refused", f"{name} was not patched: {why}", name)


class _Place(NamedTuple):
    """Where a layer stands in a quantised graph.

    layer: the calls of the float graph that are computed with codes. node: the one that computes
    them, or the last of several. reads: values, in the order of the data that the float layer
    reads. makes: the value of the result. codes: (codes, scale, zero point) of the result, which
    must be made of it, () where it is a float itself.
    """

    layer: Sequence[Call]
    node: Any
    reads: tuple[str, ...]
    makes: str
    codes: tuple[str, ...] = ()


class _Graph:
    """A quantised graph that is edited in place."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._constants = {tensor.name for tensor in graph.initializer}
        self._outputs = {value.name for value in graph.output}
        self._grafted: set[str] = set()
        self._index()

    def _index(self) -> None:
        self._makers = {value: node for node in self._graph.node for value in node.output if value}
        self._readers: defaultdict[str, list[Any]] = defaultdict(list)
        for node in self._graph.node:
            for value in dict.fromkeys(node.input):
                self._readers[value].append(node)
        suffix = "_quantized"
        self._by_scope = {
            scope_of(value.removesuffix(suffix)) + suffix * value.endswith(suffix): value
            for value in self._makers
        }

    # ---- finding a layer

    def place(self, layer: Sequence[Call]) -> _Place | None:
        """Where a layer of the float graph is computed here; None where it is not. Raises
        NotInFloat.
        """
        for last, call in reversed(list(enumerate(layer, 1))):
            value = self._by_scope.get(call.scope) or self._by_scope.get(f"{call.scope}_quantized")
            if value is None:
                continue
            node, part = self._makers[value], layer[:last]
            while node.op_type in (_QUANTIZE, _DEQUANTIZE) and node.input[0] in self._makers:
                node = self._makers[node.input[0]]
            if node.op_type in _SCALES:
                scale, zero = (node.input[k] for k in _SCALES[node.op_type])
                codes = node.output[0]
                makes = f"{codes}.float"
                return _Place(part, node, tuple(node.input[:3]), makes, (codes, scale, zero))
            if any(self._is_weight(v) for v in node.input):
                data = tuple(v for v in node.input if v and not self._is_constant(v))
                return _Place(part, node, data, node.output[0])
            if node.op_type != call.op_type:
                return _Place(part, node, (self._quantised_as_it_comes(value, call),), value)
        return None

    def _quantised_as_it_comes(self, value: str, call: Call) -> str:
        """The float value that a layer with `DynamicQuantizeLinear` reads. Raises NotInFloat."""
        waiting, sources = [value], set[str]()
        while waiting:
            maker = self._makers.get(waiting.pop())
            if maker is None:
                continue
            if maker.op_type == _DYNAMIC:
                sources.add(maker.input[0])
            elif maker.op_type in _BETWEEN:
                waiting += maker.input
            else:
                sources.add("")
        if len(sources) != 1 or "" in sources:
            raise NotInFloat(
                f"{call.op_type} is not computed with codes here, or in an unknown way"
            )
        return sources.pop()

    def _is_weight(self, value: str) -> bool:
        """Whether a value is a constant that is stored as codes."""
        maker = self._makers.get(value)
        return maker is not None and maker.op_type == _DEQUANTIZE and self._is_constant(value)

    def _is_constant(self, value: str) -> bool:
        maker = self._makers.get(value)
        if maker is None:
            return value in self._constants
        return maker.op_type == _DEQUANTIZE and maker.input[0] in self._constants

    # ---- putting the float layer there

    def graft(self, place: _Place, reference: Run) -> None:
        """Put the nodes of the float layer in the place of what computes it here."""
        helper = extras.needed("onnx", "layers in float").helper
        codes, float_data = place.codes, place.reads
        nodes: list[Any] = []
        if codes:
            data = f"{codes[0]}.read.float"
            nodes.append(helper.make_node(_DEQUANTIZE, place.reads, [data]))
            float_data = (data,)
        else:
            float_data = tuple(self._released(value, place.node) for value in place.reads)
        nodes += self._float_nodes(place, reference, float_data)
        if codes:
            nodes.append(helper.make_node(_QUANTIZE, [place.makes, *codes[1:]], [codes[0]]))
        at = next(k for k, node in enumerate(self._graph.node) if node is place.node)
        kept = list(self._graph.node)
        del self._graph.node[:]
        self._graph.node.extend([*kept[:at], *nodes, *kept[at + 1 :]])
        self._grafted.add(place.makes)
        self._index()
        if not codes:
            self._release_result(place.makes)
            self._index()

    def _float_nodes(self, place: _Place, reference: Run, data: Sequence[str]) -> Iterator[Any]:
        onnx = extras.needed("onnx", "layers in float")
        values: dict[int, str] = {}
        operands = iter(data)
        for call in place.layer:
            inputs: dict[int, str] = {}
            records = {param_name(ref.slot): ref.record for ref in call.slots("param")}
            for words in mark_values(call, Mark.TAKES):
                name, _, number = words.rpartition(" as ")
                array = reference.array(records[name])
                inputs[int(number)] = f"{call.scope}.{name}.float"
                tensor = onnx.numpy_helper.from_array(array, inputs[int(number)])
                self._graph.initializer.append(tensor)
            for ref in call.slots("input"):
                number = input_name(ref.slot)
                if (
                    not number.isdecimal()
                    or (value := self._value(values, ref.record, operands)) is None
                ):
                    raise NotInFloat(f"{call.op_type} reads more than the quantised layer does")
                inputs[int(number)] = value
            (output,) = call.slots("output")
            makes = place.makes if call is place.layer[-1] else f"{call.scope}.float"
            values[output.record] = makes
            names = [inputs.get(k, "") for k in range(max(inputs) + 1)]
            yield onnx.helper.make_node(call.op_type, names, [makes], **call.arguments)

    @staticmethod
    def _value(values: dict[int, str], record: int, operands: Iterator[str]) -> str | None:
        if record not in values:
            value = next(operands, None)
            if value is None:
                return None
            values[record] = value
        return values[record]

    def _released(self, value: str, reader: Any) -> str:
        """The float value behind codes that no other quantised node makes or reads; the value
        itself where one does.
        """
        dequantize = self._makers.get(value)
        if dequantize is None or dequantize.op_type != _DEQUANTIZE:
            return value
        quantize = self._makers.get(dequantize.input[0])
        if quantize is None or quantize.op_type != _QUANTIZE:
            return value
        source: str = quantize.input[0]
        is_needed = self._is_quantised(self._makers.get(source)) or any(
            node is not reader and self._is_quantised(node)
            for behind in self._readers[quantize.output[0]]
            for node in self._readers[behind.output[0]]
        )
        return value if is_needed else source

    def _release_result(self, value: str) -> None:
        """Pass a result on as a float where no quantised node reads its codes."""
        for quantize in self._readers[value]:
            if quantize.op_type != _QUANTIZE:
                continue
            for behind in self._readers[quantize.output[0]]:
                shown = behind.output[0]
                if any(self._is_quantised(node) for node in self._readers[shown]):
                    continue
                if shown not in self._outputs:
                    for node in self._readers[shown]:
                        node.input[:] = [value if v == shown else v for v in node.input]
                    continue
                del behind.input[1:], behind.attribute[:]
                behind.op_type, behind.input[0] = "Identity", value

    def _is_quantised(self, node: Any) -> bool:
        """Whether a node computes with codes: it reads values behind codes, and its result becomes
        codes.
        """
        if node is None or node.output[0] in self._grafted:
            return False
        reads = (self._makers.get(v) for v in node.input)
        return any(maker is not None and maker.op_type == _DEQUANTIZE for maker in reads) and any(
            reader.op_type == _QUANTIZE for reader in self._readers[node.output[0]]
        )


def edited(layers: LayersInFloat, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments of `InferenceSession` with the model that has the layers in float."""
    if args:
        return (layers.model(_source(args[0])), *args[1:])
    if "path_or_bytes" in kwargs:
        kwargs["path_or_bytes"] = layers.model(_source(kwargs["path_or_bytes"]))
    return args


def _source(model: Any) -> Any:
    return model if isinstance(model, bytes) else str(Path(model))
