"""What nodes of ONNX graphs are called, and read from around them, whoever reads the graphs. Needs
nothing.
"""

from __future__ import annotations

import re
from typing import Any

_EXPORTED = re.compile(r"/(.+)_output_\d+")  # what torch's TorchScript exporter calls values


def scope_of(value: str) -> str:
    """The name of the node that makes a value: "/encoder/layer.0/MatMul_output_0" is
    encoder.layer.0.MatMul, others stay.
    """
    exported = _EXPORTED.fullmatch(value)
    return exported[1].replace("/", ".") if exported else value


def outer_values(node: Any) -> list[str]:
    """Values from outside that the subgraphs of a node read."""
    outer: dict[str, None] = {}
    for graphs in node.graphs.values():
        for graph in graphs:
            own = {*graph.inputs, *graph.initializers, *graph.sparse}
            for inner in graph.nodes:
                outer.update(
                    dict.fromkeys(
                        v for v in (*inner.inputs, *outer_values(inner)) if v and v not in own
                    )
                )
                own.update(inner.outputs)
            outer.update(dict.fromkeys(v for v in graph.outputs if v and v not in own))
    return list(outer)
