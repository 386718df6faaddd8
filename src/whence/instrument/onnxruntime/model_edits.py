"""Adds outputs and nodes to a model file by appending to it: protobuf merges a message that occurs
twice. A model of any size is edited this way without changing its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whence.frameworks.protobuf_fields import field, integer, text
from whence.instrument.onnxruntime.nodes import BLOCKED

PLAIN = ".whence.plain"
"""Suffix of the name of a blocked value's copy in plain layout."""


def added(values: Sequence[str], blocked: Mapping[str, int]) -> bytes:
    """Bytes that, appended to a model, make these values outputs. blocked: values in blocks of
    channels, which a node of the runtime converts to plain layout.
    """
    graph = bytearray()
    for value in values:
        if value in blocked:
            graph += field(1, _reorder(value, blocked[value]))
        name = output_name(value, blocked)
        graph += field(12, text(1, name))
    return field(7, bytes(graph)) if graph else b""


def output_name(value: str, blocked: Mapping[str, int]) -> str:
    """The name of the output that shows a value."""
    return value + PLAIN if value in blocked else value


def one_reorder(channels: int) -> bytes:
    """A model of one node that brings [1, channels, 1, 2] into blocks."""
    of_float32 = 1  # TensorProto.FLOAT
    extents = b"".join(field(1, integer(1, n)) for n in (1, channels, 1, 2))
    form = field(2, field(1, integer(1, of_float32) + field(2, extents)))
    node = text(1, "x") + text(2, "y") + text(4, "ReorderInput") + text(7, BLOCKED)
    graph = field(1, node) + text(2, "g") + field(11, text(1, "x") + form)
    graph += field(12, text(1, "y") + form)
    opsets = field(8, integer(2, 17)) + field(8, text(1, BLOCKED) + integer(2, 1))
    return integer(1, 8) + field(7, graph) + opsets


def _reorder(value: str, channels: int) -> bytes:
    attributes = _attribute("channels", channels) + _attribute("channels_last", 0)
    names = text(1, value) + text(2, value + PLAIN) + text(3, value + PLAIN)
    return names + text(4, "ReorderOutput") + attributes + text(7, BLOCKED)


def _attribute(name: str, number: int) -> bytes:
    of_integer = 2  # AttributeProto.INT
    return field(5, text(1, name) + integer(3, number) + integer(20, of_integer))
