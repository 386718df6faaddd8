"""Graphs that show a comparison: a copy of an ONNX model for Netron, data for Model Explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whence.errors import UnreadableRun, UsageError
from whence.frameworks import protobuf_fields as wire
from whence.frameworks.onnx_names import scope_of
from whence.readers.encodings import onnx_model, protobuf
from whence.readers.encodings.onnx_model import OnnxModel
from whence.workflows.saved import AnyComparison, AnyPath, as_comparison, write_file

_GRAPH, _NODE, _NODE_OUTPUT, _NODE_METADATA, _MODEL_METADATA = 7, 1, 2, 9, 14


def annotate_onnx(
    comparison: AnyComparison,
    model: AnyPath,
    copy: AnyPath,
    *,
    force: bool = False,
) -> int:
    """Copy an ONNX model, with the error and the verdict of each compared node in its metadata,
    which Netron shows, and return how many nodes have them.

    comparison: a folder that `compare` wrote, or what it returned, of runs of ONNX Runtime or
    OpenVINO. model: the reference's .onnx file. Weights in files beside it stay there: the copy
    has to lie beside them too. Raises UnreadableRun, UsageError, OutputExists, StoreFailed.
    """
    from whence.report.node_errors import node_errors
    from whence.report.own_files import MARK, check_replaceable

    check_replaceable(copy, force)
    errors = node_errors(as_comparison(comparison))
    parsed = _parsed(model)
    names = _nodes(parsed)
    if not errors.keys() & names:
        raise UsageError(
            f"none of the {len(names)} nodes of {model} is a call of the comparison; name the "
            "model that the reference ran"
        )
    _check_weights(parsed, Path(model), Path(copy))
    parts: list[bytes] = []
    for number, kind, value in protobuf.fields(Path(model).read_bytes()):
        if number == _GRAPH:
            value = b"".join(_annotated(part, errors) for part in protobuf.fields(value))
        parts.append(_encoded(number, kind, value))
    parts.append(wire.field(_MODEL_METADATA, wire.text(1, "whence") + wire.text(2, MARK)))
    write_file(copy, parts)
    return len(errors.keys() & names)


def model_explorer_data(
    comparison: AnyComparison,
    file: AnyPath,
    *,
    model: AnyPath | None = None,
    force: bool = False,
) -> None:
    """Write node data for Model Explorer: the error of each node.

    model: the reference's .onnx file, whose values name the nodes; None where the graph has the
    names of the calls. Raises UnreadableRun, OutputExists, StoreFailed.
    """
    from whence.report.model_explorer import model_explorer
    from whence.report.own_files import check_replaceable

    check_replaceable(file, force)
    keys = None if model is None else _nodes(_parsed(model))
    write_file(file, [model_explorer(as_comparison(comparison), keys).encode()])


def _parsed(model: AnyPath) -> OnnxModel:
    try:
        parsed = onnx_model.parse(Path(model).read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableRun(f"{model} cannot be read as an ONNX model: {error}") from error
    if not parsed.graph.nodes:
        raise UnreadableRun(f"{model} is not an ONNX model, or one without nodes")
    return parsed


def _nodes(model: OnnxModel) -> dict[str, str]:
    """The first output of each node, by the name that a capture gives the node."""
    outputs = (node.outputs[0] for node in model.graph.nodes if node.outputs)
    return {scope_of(output): output for output in outputs}


def _check_weights(parsed: OnnxModel, model: Path, copy: Path) -> None:
    is_split = any(tensor.external for tensor in parsed.graph.initializers.values())
    if is_split and copy.parent.resolve() != model.parent.resolve():
        raise UsageError(
            f"{model} has weights in files beside it, which the copy would not find; write the "
            f"copy beside it, as {model.with_suffix('.whence.onnx')}"
        )


def _annotated(part: tuple[int, int, Any], errors: dict[str, Any]) -> bytes:
    """Encode a field of a graph; for a node, its verdict and error are appended to its
    own fields.
    """
    number, kind, value = part
    if number != _NODE:
        return _encoded(number, kind, value)
    outputs = (v for n, _, v in protobuf.fields(value) if n == _NODE_OUTPUT)
    node = errors.get(scope_of(protobuf.text(next(outputs, b""))))
    if node is None:
        return _encoded(number, kind, value)
    words = {"whence.verdict": str(node.verdict)}
    if node.error is not None:
        words["whence.rel_l2"] = f"{node.error:.3g}"
    metadata = (
        wire.field(_NODE_METADATA, wire.text(1, key) + wire.text(2, word))
        for key, word in words.items()
    )
    return wire.field(number, bytes(value) + b"".join(metadata))


def _encoded(number: int, kind: int, value: Any) -> bytes:
    """Encode a field unchanged."""
    if kind == protobuf.VARINT:
        return wire.integer(number, value)
    if kind == protobuf.BYTES:
        return wire.field(number, bytes(value))
    return wire.varint(number << 3 | kind) + bytes(value)
