"""Paddle's older program format, ProgramDesc protobuf (`.pdmodel`), read without Paddle.

Field numbers: paddle/fluid/framework/framework.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from whence.errors import UnreadableRun
from whence.readers.encodings import protobuf
from whence.readers.encodings.protobuf import (
    Message,
    Schema,
    integers,
    messages,
    packed,
    raw,
    texts,
)
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


_SLOT = messages({1: ("slot", texts), 2: ("names", texts)})
_DESCRIPTION: Schema = {1: ("dtype", integers), 2: ("shape", packed)}
_VARIABLE: Schema = {
    1: ("name", texts), 3: ("persistable", integers), 5: ("persistable", integers),
    2: ("types", messages({3: ("tensors", messages({1: ("descriptions", raw)}))})),
}  # fmt: skip


def _floats(kind: int, value: Any) -> list[float]:
    return list(map(shortest, protobuf.floats(kind, value)))


def _doubles(kind: int, value: Any) -> list[float]:
    return [number for (number,) in struct.iter_unpack("<d", value)]


def _truths(kind: int, value: Any) -> list[bool]:
    return list(map(bool, packed(kind, value)))


def _short(kind: int, value: Any) -> list[str]:
    return [text[:MAX_TEXT] for text in texts(kind, value)]


# attribute types of one value, and of a list of values
_ATTRIBUTE: Schema = {
    1: ("name", texts), 2: ("type", integers), 12: ("blocks", packed), 14: ("blocks", packed),
    3: ("value", integers), 13: ("value", integers), 4: ("value", _floats), 19: ("value", _doubles),
    5: ("value", _short), 17: ("value", _short), 10: ("value", _truths),
    6: ("list", packed), 15: ("list", packed), 11: ("list", _truths), 7: ("list", _floats),
    16: ("list", _doubles), 8: ("list", _short), 18: ("list", _short),
}  # fmt: skip
# INTS FLOATS STRINGS BOOLEANS LONGS FLOAT64S VARS: empty ones have no entry
_LIST_TYPES = {3, 4, 5, 7, 11, 12, 14}
_OPERATOR: Schema = {
    1: ("inputs", _SLOT), 2: ("outputs", _SLOT), 3: ("type", texts),
    4: ("attributes", messages(_ATTRIBUTE)),
}  # fmt: skip
_PROGRAM: Schema = {
    1: ("blocks", messages({3: ("variables", messages(_VARIABLE)), 4: ("operators", raw)}))
}


def read(message: bytes) -> ProgramDescription:
    """Reads a ProgramDesc. Raises ValueError or UnreadableRun for any other content."""
    blocks = [
        _Block({v.name: v for v in map(_variable, block["variables"])}, block["operators"])
        for block in protobuf.read(message, _PROGRAM)["blocks"]
    ]
    if not blocks:
        raise UnreadableRun("it has no block of operators")
    parameters = {v.name: v for block in blocks for v in block.variables.values() if v.persistable}
    return ProgramDescription(list(_operators(blocks, (0,), {0})), parameters)


class _Block(NamedTuple):
    """A block. operators: as stored in the file."""

    variables: dict[str, Variable]
    operators: list[memoryview]


def _variable(fields: Message) -> Variable:
    """Returns a variable; without dtype and shape when it is not a tensor (feed lists, scopes)."""
    tensors = [tensor for kind in fields["types"] for tensor in kind["tensors"]]
    descriptions = [description(d) for tensor in tensors for d in tensor["descriptions"]]
    dtype, shape = next(iter(descriptions), ("", ()))
    return Variable(fields.last("name"), dtype, shape, any(fields["persistable"]) and bool(dtype))


def description(message: bytes | memoryview) -> tuple[str, tuple[int, ...]]:
    """Returns (dtype, shape) of a TensorDesc; an unknown dtype code stays visible ("code 99")."""
    fields = protobuf.read(message, _DESCRIPTION)
    dtypes = [DTYPES.get(code, f"code {code}") for code in fields["dtype"]]
    return (dtypes or [""])[-1], tuple(fields["shape"])


def _operators(
    blocks: list[_Block], path: tuple[int, ...], claimed: set[int]
) -> Iterator[Operator]:
    """Returns the operators of the last block in a path from the outermost. claimed: blocks that an
    operator already runs; no second one may run them.
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
    """Returns an operator with the blocks it runs."""
    fields = protobuf.read(message, _OPERATOR)
    inputs, outputs = (
        [
            (
                f"{slot.last('slot')}.{i}" if len(slot["names"]) > 1 else slot.last("slot"),
                variables.get(name) or Variable(name, "", ()),
            )
            for slot in fields[side]
            for i, name in enumerate(slot["names"])
            if name
        ]
        for side in ("inputs", "outputs")
    )
    operator, nested = Operator(fields.last("type"), inputs, outputs), list[int]()
    for attribute in fields["attributes"]:
        name, inner = attribute.last("name"), attribute["blocks"]
        is_list = attribute["list"] or attribute.last("type", -1) in _LIST_TYPES
        content = attribute["list"] if is_list else attribute.last("value", None)
        nested += inner
        if name == CALL_STACK and isinstance(content, list):
            operator.source = _source(content)
        operator.onednn |= name == "use_mkldnn" and content is True
        if name not in BOOKKEEPING and not inner and not name.startswith("__"):
            operator.attributes[name] = content
    return operator, nested


def _source(stack: list[Any]) -> str:
    """Returns the line of a Python call stack that wrote an operator: the innermost outside of
    Paddle, with the name of the file only.
    """
    source = ""
    for line in stack:
        parts = str(line).strip().split('"')
        if len(parts) >= 3 and "/paddle/" not in parts[1] and "line " in parts[2]:
            number = parts[2].partition("line ")[2].partition(",")[0]
            source = f"{parts[1].rpartition('/')[2]}:{number}"
    return source
