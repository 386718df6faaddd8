"""Questions about one node of an ONNX graph, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

BLOCKED = "com.microsoft.nchwc"
"""Domain of nodes whose tensors lie in blocks of channels."""

_DRAWS = frozenset((
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
    "Bernoulli", "Sampling", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout",
))  # fmt: skip
_TRACE = re.compile(r'File "([^"]+)", line (\d+)')
_DOC = re.compile(r"^(\S[^\n]*\.py)\((\d+)\)", re.MULTILINE)
_SCOPES = "pkg.torch.onnx.name_scopes"
_QUOTED = re.compile("'([^']*)'")
_EXPORTED = re.compile(r"/(.+)/[^/]+_output_\d+")
"""What torch's TorchScript exporter calls a value: "/blocks/blocks.0/norm1/Add_output_0"."""
_MODULES = (_SCOPES, "namespace", "pkg.torch.onnx.namespace")


def in_user_graph(value: str) -> str:
    """A value's name without what the runtime puts before it where it computes in float32 what the
    user's graph computes in float16.
    """
    return value.removeprefix("InsertedPrecisionFreeCast_")


def op_type_of(node: Any) -> str:
    """The type with its domain, which is left out where it is ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def all_nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph and of the graphs in it."""
    for node in graph.nodes:
        yield node
        for graphs in node.graphs.values():
            for inner in graphs:
                yield from all_nodes(inner)


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers. Dropout counts where it may be in training mode."""
    trains = node.op_type == "Dropout" and len(node.inputs) > 2 and bool(node.inputs[2])
    return node.op_type in _DRAWS or trains


def source_of(node: Any) -> str:
    """The line of the user's code, or the module, that an exporter wrote into a node."""
    lines = _TRACE.findall(node.metadata.get("pkg.torch.onnx.stack_trace", ""))
    # the innermost line outside of torch, as the user wrote it
    own = [line for line in lines if "/torch/" not in line[0].replace("\\", "/")] or lines
    if own:
        return ":".join(own[-1])
    documented = _DOC.search(node.doc)
    if documented:
        return f"{documented[1]}:{documented[2]}"
    return next((node.metadata[key] for key in _MODULES if node.metadata.get(key)), "")[:200]


def module_of(node: Any) -> str:
    """The path of the torch module that an exporter made a node of, "" where that is not told.

    Of torch.export it is written into the node, "['', 'blocks.0', 'blocks.0.norm1', 'layer_norm']";
    of TorchScript it is in the name of what the node makes.
    """
    scopes = _QUOTED.findall(node.metadata.get(_SCOPES, ""))
    if len(scopes) > 1:
        return str(scopes[-2])
    exported = _EXPORTED.fullmatch(node.outputs[0]) if node.outputs else None
    parts = exported[1].split("/") if exported else []
    # A list of modules is named before each of its members: "/blocks/blocks.0".
    return ".".join(p for p, then in zip(parts, [*parts[1:], ""]) if not then.startswith(f"{p}."))
