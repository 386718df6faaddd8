"""A Comparison as node data for Model Explorer: the error of each node is its value, the verdict
its colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from whence.report.node_errors import NodeError, node_errors
from whence.results import GUILTY, Comparison, VerdictKind

NAME = "whence: relative error"
_UNEXPLAINED, _PASSED_ON, _ROUNDING, _EQUAL = "#e8a3a3", "#f3dcc3", "#c6ddf0", "#ececec"
_COLOURS = {
    VerdictKind.IDENTICAL: _EQUAL,
    VerdictKind.INHERITED: _PASSED_ON,
    VerdictKind.AMPLIFIED: _PASSED_ON,
    VerdictKind.NOISE: _ROUNDING,
    VerdictKind.PRECISION: _ROUNDING,
}


def model_explorer(result: Comparison, keys: Mapping[str, str] | None = None) -> str:
    """The whole file. keys: name of a call -> name of its node or output in the graph; None where
    the graph uses the names of the calls. Calls that were not measured have no node data.

    Node data that names no graph is that of the graph which is open.
    """
    nodes = {
        name if keys is None else keys[name]: _node(node)
        for name, node in node_errors(result).items()
        if node.error is not None and math.isfinite(node.error) and (keys is None or name in keys)
    }
    return msgspec.json.encode({"results": nodes, "name": NAME}).decode() + "\n"


def _node(node: NodeError) -> dict[str, Any]:
    colour = _UNEXPLAINED if node.verdict in GUILTY else _COLOURS.get(node.verdict)
    return {"value": node.error, **({"bgColor": colour} if colour else {})}
