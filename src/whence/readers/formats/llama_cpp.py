"""What llama.cpp prints with `llama-eval-callback`: a line for every node of the graph, then some
of its values.

    ggml_debug:   norm-0 = (f32)   RMS_NORM(inp_embd{2048, 4, 1, 1}, }) = {2048, 4, 1, 1}
                                     [
                                      [
                                       [      0.1234,      -0.5678,       0.0012, ...,       0.3456],
    ...
                                     sum = 12.345678

Of each axis the first and the last three are printed, of older versions the first three, with four
digits behind the point; extents are written fastest first. Weights are named and not printed.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits
from whence.readers.source import Place
from whence.records import Run
from whence.records.marks import Mark, mark

LOOKS_LIKE = "a text with lines as llama-eval-callback prints them (ggml_debug: ...)"
ORDER = 15
ALONE = "a log with printed tensors"

_NODE = re.compile(
    r"\s*(?:\S+\s+)?(?:ggml_debug|common_debug_cb_eval|cb_eval): +(?P<name>\S.*?) = "
    r"\((?P<type>\w+)\) +(?P<op>\w+)\((?P<of>.*)\) = "
    r"\{(?P<ne>[\d, ]+)\}\s*"
)
_SOURCE = re.compile(r"([^{},\s][^{},]*)\{([\d, ]+)\}")
_COPY = re.compile(r"[^#]+#(.+)#\d+")  # of a tensor on another device
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)", re.IGNORECASE)
_LINE = 2000  # characters of a line that can be a node
_TYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64",
}  # fmt: skip


def sniff(place: Place) -> bool:
    head = place.head.decode("utf-8", "replace")
    return "ggml_debug:" in head or "cb_eval:" in head


def open_run(place: Place) -> Run:
    """Reads the whole text once and keeps the printed values of each tensor."""
    building = Building(place.path, "llama.cpp")
    records: dict[str, int] = {}
    first, step = "", 0
    for node in _nodes(place):
        if not first:
            first = node.name
        elif node.name == first:  # the graph begins anew
            step, records = step + 1, {}
        names = [name.strip() for name, _ in node.sources]
        sources = [match[1] if (match := _COPY.fullmatch(n)) else n for n in names]
        shapes = [list(_shape(ne)) for _, ne in node.sources]
        record = _record(building, node)
        inputs = {str(i): records[name] for i, name in enumerate(sources) if name in records}
        building.call(
            node.name,
            op_type=node.op,
            step=step,
            inputs=inputs,
            outputs=[record],
            origins=(),
            notes=()
            if inputs
            else (mark(Mark.INPUTS_UNKNOWN),),  # a cache, which nodes before have written
            arguments={
                f"input.{i}": f"{name} {shapes[i]}"
                for i, name in enumerate(sources)
                if name not in records
            },
        )
        records[node.name] = record
    return building.run()


class _Node(NamedTuple):
    """One node as printed. lines: the value lines that follow it, up to the next node."""

    name: str
    dtype: str
    op: str
    sources: list[tuple[str, str]]
    extents: str
    lines: list[str]


def _nodes(place: Place) -> Iterator[_Node]:
    node: _Node | None = None
    with place.path.open(encoding="utf-8", errors="replace", newline=None) as file:
        while line := file.readline(1 << 16):
            match = (
                _NODE.fullmatch(line.rstrip("\n"))
                if len(line) <= _LINE and ") = {" in line
                else None
            )
            if match is not None:
                if node is not None:
                    yield node
                node = _Node(
                    match["name"].strip(),
                    match["type"],
                    match["op"],
                    _SOURCE.findall(match["of"]),
                    match["ne"],
                    [],
                )
            elif node is not None and (text := line.strip())[:1] in ("[", "]", ".", "s"):
                node.lines.append(text)
    if node is not None:
        yield node


def _shape(extents: str) -> tuple[int, ...]:
    """Returns the logical shape, slowest axis first, without leading ones beyond two axes."""
    shape = [int(n) for n in extents.replace(" ", "").split(",") if n and len(n) < 19][::-1]
    while len(shape) > 2 and shape[0] == 1:
        shape.pop(0)
    return tuple(shape)


def _record(building: Building, node: _Node) -> int:
    dtype = _TYPES.get(node.dtype.lower(), node.dtype.lower())
    whole = limits.extents(_shape(node.extents), node.name)
    sums = [
        float(numbers[0])
        for text in node.lines
        if text.startswith("sum") and (numbers := _NUMBER.findall(text[3:]))
    ]
    columns = {"sum": sums[-1]} if sums else {}
    rows = [text for text in node.lines if not text.startswith("sum")]
    if dtype not in dtypes.DTYPES or not rows:
        return building.tensor(dtype, whole, why="its values are not printed", columns=columns)
    read = _values(rows)
    if isinstance(read, str):
        return building.tensor(dtype, whole, why=read, columns=columns)
    values, digits = read
    axes = max(len(whole), 1)
    if values.ndim > axes and limits.count(values.shape[: values.ndim - axes]) == 1:
        values = values.reshape(values.shape[values.ndim - axes :])
    if values.ndim != axes or any(a > b for a, b in zip(values.shape, whole)):
        return building.tensor(
            dtype,
            whole,
            why=f"prints {list(values.shape)} values of a tensor of {list(whole)}",
            columns=columns,
        )
    is_whole = values.shape == whole
    with np.errstate(over="ignore", invalid="ignore"):
        array: Array = values.astype(dtypes.named(dtype).numpy)
    quantum = 10.0**-digits if dtypes.named(dtype).is_floating else 0.0
    return building.array(array, quantum=quantum, whole=() if is_whole else whole, columns=columns)


def _values(lines: list[str]) -> tuple[np.ndarray[Any, np.dtype[np.float64]], int] | str:
    """Returns (the printed values as (blocks, planes, rows, columns), digits after the decimal
    point), or why they cannot be read.
    """
    rows: list[list[float]] = []
    planes: list[int] = []  # rows in each
    blocks: list[int] = []  # planes in each
    digits, depth, row, plane = 0, 0, 0, 0
    for text in lines:
        if text.startswith("[") and len(text.rstrip(" ,")) > 1:
            numbers = _NUMBER.findall(text)
            digits = max([digits, *(len(n.partition(".")[2]) for n in numbers)])
            rows.append([float(n) for n in numbers])
            row += 1
        elif text.startswith("["):
            depth += 1
            row, plane = (0, plane) if depth == 2 else (row, 0)
        elif text.startswith("]"):
            if depth == 2:
                planes.append(row)
                plane += 1
            else:
                blocks.append(plane)
            depth -= 1
        elif not text.startswith("."):
            return "its values are damaged: a line without values"
        if not 0 <= depth <= 2:
            return "its values are damaged: brackets do not match"
    if depth or not rows:
        return "the text ends within its values"
    counts = {len(line) for line in rows}, set(planes), set(blocks)
    if any(len(lengths) != 1 for lengths in counts):
        return "its values are damaged: rows of different lengths"
    shape = (len(blocks), blocks[0], planes[0], len(rows[0]))
    if limits.count(shape) != sum(map(len, rows)):
        return "its values are damaged: values are missing"
    return np.asarray(rows, np.float64).reshape(shape), digits
