"""What a compiled model executes, as its runtime model says: which nodes of the source became one,
and in which precision each ran.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from whence.instrument.openvino.values import dtype_of

_CONSTANT = "Const"
_ENDS = ("Input", "Output", "MemoryOutput")


class Execution(NamedTuple):
    """One executed node. originals: friendly names of the source nodes that it carries out. kind:
    the type of the runtime. precision: the dtype that it computed in; stored: that of its result.
    kernel: what computed it.
    """

    originals: tuple[str, ...]
    kind: str
    precision: str
    stored: str
    kernel: str


class Executed(NamedTuple):
    """constants: friendly names of source nodes that were computed when the model was compiled."""

    nodes: tuple[Execution, ...]
    constants: frozenset[str]


def executed(runtime_model: Any, known: Collection[str]) -> Executed:
    """What a runtime model executes. known: friendly names of the source; others that the runtime
    put in, such as changes of layout, are left out.
    """
    nodes: list[Execution] = []
    constants: set[str] = set()
    for op in runtime_model.get_ordered_ops():
        stated = {name: _text(value) for name, value in op.get_rt_info().items()}
        originals = names_in(stated.get("originalLayersNames", ""), known)
        kind = stated.get("layerType", "")
        if kind == _CONSTANT:
            constants.update(originals)
        elif originals and kind not in _ENDS:
            precision = dtype_of(stated.get("runtimePrecision", ""))
            stored = dtype_of(stated.get("outputPrecisions", "").partition(",")[0])
            kernel = stated.get("primitiveType", "")
            nodes.append(Execution(originals, kind, precision, stored, kernel))
    return Executed(tuple(nodes), frozenset(constants))


def names_in(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The known names in a text that lists names between commas, which names may hold too."""
    pieces, names, start = text.split(","), [], 0
    while start < len(pieces):
        ends = range(len(pieces), start, -1)
        end = next((e for e in ends if ",".join(pieces[start:e]) in known), 0)
        if end:
            names.append(",".join(pieces[start:end]))
        start = end or start + 1
    return tuple(names)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
