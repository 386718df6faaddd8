"""Paddle's older program format, ProgramDesc protobuf (`.pdmodel`), read without Paddle.

Field numbers: paddle/fluid/framework/framework.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.encodings import protobuf
from whence.readers.encodings.protobuf import packed, signed, text
from whence.readers.paddle.program import (
    BOOKKEEPING,
    CALL_STACK,
    MAX_DEPTH,
    MAX_TEXT,
    Operator,
    ProgramDescription,
    Variable,
    shortest,
)

DTYPES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64",
    20: "uint8", 21: "int8", 22: "bfloat16", 23: "complex64", 24: "complex128", 32: "float8_e4m3fn",
    33: "float8_e5m2",
}  # fmt: skip


def read(message: bytes) -> ProgramDescription:
    """Read a ProgramDesc. Raises ValueError or UnreadableRun for what is none."""
    blocks = [
        _Block(value)
        for number, kind, value in protobuf.fields(message)
        if number == 1 and kind == protobuf.BYTES
    ]
    if not blocks:
        raise UnreadableRun("it has no block of operators")
    parameters = {v.name: v for block in blocks for v in block.variables.values() if v.persistable}
    return ProgramDescription(list(_operators(blocks, (0,), {0})), parameters)


class _Block:
    def __init__(self, message: memoryview) -> None:
        self.variables: dict[str, Variable] = {}
        self.operators: list[memoryview] = []
        for number, kind, value in protobuf.fields(message):
            if number == 3 and kind == protobuf.BYTES:
                variable = _variable(value)
                self.variables[variable.name] = variable
            elif number == 4 and kind == protobuf.BYTES:
                self.operators.append(value)


def _variable(message: memoryview) -> Variable:
    name, dtype, persistable = "", "", False
    shape: tuple[int, ...] = ()
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind == protobuf.BYTES:
            name = text(value)
        elif number == 2 and kind == protobuf.BYTES:
            dtype, shape = _tensor(value)
        elif number in (3, 5) and kind == protobuf.VARINT:
            persistable |= bool(value)
    return Variable(name, dtype, shape, persistable and bool(dtype))


def _tensor(message: memoryview) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a VarType that is a tensor, ("", ()) of others (feed lists, scopes)."""
    for number, kind, value in protobuf.fields(message):
        if number == 3 and kind == protobuf.BYTES:
            inner = next(
                (v for n, k, v in protobuf.fields(value) if n == 1 and k == protobuf.BYTES), None
            )
            return description(inner) if inner is not None else ("", ())
    return "", ()


def description(message: bytes | memoryview) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a TensorDesc; a dtype code that is not known stays visible ("code 99")."""
    dtype = ""
    shape: list[int] = []
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind == protobuf.VARINT:
            dtype = DTYPES.get(value, f"code {value}")
        elif number == 2:
            shape += packed(kind, value)
    return dtype, tuple(shape)


def _operators(
    blocks: list[_Block], path: tuple[int, ...], claimed: set[int]
) -> Iterator[Operator]:
    """The operators of the block at the end of a path from the outermost. claimed: blocks that an
    operator runs already; no second one runs them.
    """
    variables: dict[str, Variable] = {}
    for outer in path:
        variables |= blocks[outer].variables
    for message in blocks[path[-1]].operators:
        operator, nested = _operator(message, variables)
        if operator.op_type in ("feed", "fetch"):
            continue
        for block in nested:
            if 0 < block < len(blocks) and block not in claimed and len(path) < MAX_DEPTH:
                claimed.add(block)
                operator.inside += _operators(blocks, (*path, block), claimed)
        yield operator


def _operator(message: memoryview, variables: dict[str, Variable]) -> tuple[Operator, list[int]]:
    """An operator, and the blocks it runs."""
    operator, nested = Operator(""), list[int]()
    for number, kind, value in protobuf.fields(message):
        if kind != protobuf.BYTES:
            continue
        if number in (1, 2):
            slot, names = _slot(value)
            has_several = len(names) > 1
            refs = [
                (
                    f"{slot}.{i}" if has_several else slot,
                    variables.get(name) or Variable(name, "", ()),
                )
                for i, name in enumerate(names)
                if name
            ]
            (operator.inputs if number == 1 else operator.outputs).extend(refs)
        elif number == 3:
            operator.op_type = text(value)
        elif number == 4:
            name, content, inner = _attribute(value)
            nested += inner
            if name == CALL_STACK and isinstance(content, list):
                operator.source = _source(content)
            operator.onednn |= name == "use_mkldnn" and content is True
            if name not in BOOKKEEPING and not inner and not name.startswith("__"):
                operator.attributes[name] = content
    return operator, nested


def _slot(message: memoryview) -> tuple[str, list[str]]:
    slot, names = "", []
    for number, kind, value in protobuf.fields(message):
        if kind == protobuf.BYTES and number == 1:
            slot = text(value)
        elif kind == protobuf.BYTES and number == 2:
            names.append(text(value))
    return slot, names


# by field number, how a value is read that an attribute has once, or a list of
_VALUES: dict[int, Callable[[Any], Any]] = {
    3: signed,
    13: signed,
    4: lambda data: shortest(struct.unpack("<f", data)[0]),
    19: lambda data: struct.unpack("<d", data)[0],
    5: lambda data: text(data)[:MAX_TEXT],
    17: lambda data: text(data)[:MAX_TEXT],
    10: bool,
}
_ELEMENTS: dict[int, Callable[[int, Any], Iterable[Any]]] = {
    6: packed,
    15: packed,
    11: lambda kind, data: map(bool, packed(kind, data)),
    7: lambda kind, data: map(shortest, protobuf.floats(kind, data)),
    16: lambda kind, data: (x for (x,) in struct.iter_unpack("<d", data)),
    8: lambda kind, data: [text(data)[:MAX_TEXT]],
    18: lambda kind, data: [text(data)[:MAX_TEXT]],
}
# INTS FLOATS STRINGS BOOLEANS LONGS FLOAT64S VARS: empty ones have no entry
_LIST_TYPES = {3, 4, 5, 7, 11, 12, 14}


def _attribute(message: memoryview) -> tuple[str, Any, list[int]]:
    """(name, value, blocks it runs)."""
    name, is_list = "", False
    value: Any = None
    elements: list[Any] = []
    blocks: list[int] = []
    attribute_type = -1
    for number, kind, data in protobuf.fields(message):
        if number == 1:
            name = text(data)
        elif number == 2:
            attribute_type = int(data)
        elif number in (12, 14):
            blocks += packed(kind, data)
        elif number in _VALUES:
            value = _VALUES[number](data)
        elif number in _ELEMENTS:
            is_list = True
            elements += _ELEMENTS[number](kind, data)
    return name, elements if is_list or attribute_type in _LIST_TYPES else value, blocks


def _source(stack: list[Any]) -> str:
    """The line of a Python call stack that wrote an operator: the innermost outside of Paddle, the
    file's name only.
    """
    source = ""
    for line in stack:
        parts = str(line).strip().split('"')
        if len(parts) >= 3 and "/paddle/" not in parts[1] and "line " in parts[2]:
            number = parts[2].partition("line ")[2].partition(",")[0]
            source = f"{parts[1].rpartition('/')[2]}:{number}"
    return source
