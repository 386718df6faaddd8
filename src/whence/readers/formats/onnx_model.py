"""ONNX models as a run: the nodes of the graph with their attributes and parameters; no values.

Pure Python, nothing of onnx is imported and nothing is run. A model whose graph cannot be read, or
that has no nodes, is left to `onnx_tensors`, which takes its initializers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from whence.errors import ElementsMissing, UnreadableRun
from whence.frameworks.onnx_names import scope_of
from whence.readers.assembly.builder import Building
from whence.readers.encodings import onnx_model
from whence.readers.encodings.archive import File
from whence.readers.encodings.onnx_model import OnnxModel, OnnxNode
from whence.readers.encodings.onnx_tensor import OnnxTensor
from whence.readers.source import Place
from whence.records import Run
from whence.records.marks import Mark, mark

LOOKS_LIKE = "an .onnx model"
ORDER = 59
ALONE = "a model"
KIND = "onnx program"
NO_VALUES = "a model file has no values"
_LARGEST = 256  # elements of an attribute that are shown


def sniff(place: Place) -> bool:
    if place.is_folder or place.suffix != ".onnx":
        return False
    try:
        return bool(described(place).graph.nodes)
    except (ValueError, UnreadableRun):
        return False


def described(place: Place) -> OnnxModel:
    """Returns the model of a file. Raises UnreadableRun, ValueError."""
    file = File(place.path)
    if not file.size:
        raise UnreadableRun(f"{file.name} is empty")
    whole: Any = file.part(0, file.size)
    return onnx_model.parse(memoryview(whole))


def open_run(place: Place) -> Run:
    """Returns a call for each node except constants, in the order of the file, below one call for
    the model; that one holds the initializers that no node reads.
    """
    model = described(place)
    graph = model.graph
    settings = {
        "opsets": {domain or "ai.onnx": version for domain, version in model.opsets.items()},
        "producer": model.producer,
        "ir_version": model.ir_version,
    }
    building = Building(place.path, KIND, settings=settings)
    params = {name: _parameter(building, place, t) for name, t in graph.initializers.items()}
    params |= {name: building.tensor("undefined", (), why="it is sparse") for name in graph.sparse}
    for node in graph.nodes:
        constant = constant_of(node)
        if constant is not None:
            params[node.outputs[0]] = _parameter(building, place, constant)
    records: dict[str, int] = {}

    def value(name: str) -> int:
        if name not in records:
            dtype, shape = graph.dtypes.get(name, "undefined"), graph.shapes.get(name, ())
            records[name] = building.tensor(dtype, shape, why=NO_VALUES)
        return records[name]

    given = [name for name in graph.inputs if name not in params]
    root = building.call("", kind="module", inputs={name: value(name) for name in given})
    unread = dict(params)
    for node in graph.nodes:
        if constant_of(node) is None:
            _call(building, model, node, params, value, root)
            for name in node.inputs:
                unread.pop(name, None)
    building.fill(root, params=unread, outputs=[value(n) for n in graph.outputs if n not in params])
    return building.run()


def constant_of(node: OnnxNode) -> OnnxTensor | None:
    """Returns the tensor of a Constant node; None for any other node, or one that holds plain
    numbers.
    """
    if node.op_type != "Constant" or node.domain or not node.outputs:
        return None
    value = node.attributes.get("value")
    return value if isinstance(value, OnnxTensor) else None


def _parameter(building: Building, place: Place, tensor: OnnxTensor) -> int:
    why = tensor.why()
    load = None if why else partial(tensor.array, place.inside)
    return building.tensor(tensor.dtype, tensor.shape, load, why=why)


def _call(
    building: Building,
    model: OnnxModel,
    node: OnnxNode,
    params: Mapping[str, int],
    value: Any,
    root: int,
) -> None:
    takes = [(k, v) for k, v in enumerate(node.inputs) if v in params]
    version = model.opsets.get(node.domain)
    outputs = [v for v in node.outputs if v]
    arguments: dict[str, Any] = {name: plain(v) for name, v in node.attributes.items()}
    arguments |= {name: {"graph": True} for name in node.graphs}
    building.call(
        scope_of(outputs[0]) if outputs else node.name or node.op_type,
        op_type=f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
        inputs={str(k): value(v) for k, v in enumerate(node.inputs) if v and v not in params},
        params={v: params[v] for _, v in takes},
        outputs=[value(v) for v in outputs],
        parent=root,
        arguments=arguments,
        notes=(
            *((mark(Mark.OPSET, version),) if version else ()),
            *(mark(Mark.TAKES, f"{v} as {k}") for k, v in takes),
        ),
    )


def plain(value: Any) -> Any:
    """Returns an attribute as plain JSON; a large tensor as its dtype and shape only."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, OnnxTensor):
        return value
    form: dict[str, Any] = {"dtype": value.dtype, "shape": list(value.shape)}
    try:
        array = value.array(_nowhere)
    except ElementsMissing:
        return form
    return form | {"values": array.reshape(-1).tolist()} if array.size <= _LARGEST else form


def _nowhere(name: str) -> Any:
    raise ElementsMissing(f"an attribute says that it lies in a file: {name[:80]}")
