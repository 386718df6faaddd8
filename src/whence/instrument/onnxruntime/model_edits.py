"""Adds outputs and nodes to a model file by what protobuf does with a message that stands twice: it
merges both. So a model of any size is edited by writing behind it, and nothing in it is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whence.instrument.onnxruntime.nodes import BLOCKED

PLAIN = ".whence.plain"
"""Behind the name of a value in blocks of channels: the same, as its shape says."""


def added(values: Sequence[str], blocked: Mapping[str, int]) -> bytes:
    """What, behind a model, makes these values outputs of it. blocked: those that lie in blocks of
    channels, of which a node of the runtime's own makes plain ones.
    """
    graph = bytearray()
    for value in values:
        if value in blocked:
            graph += _field(1, _reorder(value, blocked[value]))
        name = output_name(value, blocked)
        graph += _field(12, _text(1, name))
    return _field(7, bytes(graph)) if graph else b""


def output_name(value: str, blocked: Mapping[str, int]) -> str:
    """The name of the output that shows a value."""
    return value + PLAIN if value in blocked else value


def one_reorder(channels: int) -> bytes:
    """A model of one node that brings [1, channels, 1, 2] into blocks."""
    float32 = 1
    extents = b"".join(_field(1, _number(1, n)) for n in (1, channels, 1, 2))
    form = _field(2, _field(1, _number(1, float32) + _field(2, extents)))
    node = _text(1, "x") + _text(2, "y") + _text(4, "ReorderInput") + _text(7, BLOCKED)
    graph = _field(1, node) + _text(2, "g") + _field(11, _text(1, "x") + form)
    graph += _field(12, _text(1, "y") + form)
    opsets = _field(8, _number(2, 17)) + _field(8, _text(1, BLOCKED) + _number(2, 1))
    return _number(1, 8) + _field(7, graph) + opsets


def _reorder(value: str, channels: int) -> bytes:
    attributes = _attribute("channels", channels) + _attribute("channels_last", 0)
    names = _text(1, value) + _text(2, value + PLAIN) + _text(3, value + PLAIN)
    return names + _text(4, "ReorderOutput") + attributes + _text(7, BLOCKED)


def _attribute(name: str, number: int) -> bytes:
    integer = 2  # AttributeProto.INT
    return _field(5, _text(1, name) + _number(3, number) + _number(20, integer))


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode("utf-8", "surrogateescape"))


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
