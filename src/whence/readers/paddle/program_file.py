"""Paddle's two program formats, read without Paddle: ProgramDesc protobuf (`.pdmodel`) and PIR JSON
(`.json`).

Both become one list of operators in the order of execution. Field numbers:
paddle/fluid/framework/framework.proto; PIR JSON version 4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from whence.errors import UnreadableRun
from whence.readers.encodings import protobuf
from whence.readers.encodings.protobuf import packed, signed, text

DTYPES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64",
    20: "uint8", 21: "int8", 22: "bfloat16", 23: "complex64", 24: "complex128", 32: "float8_e4m3fn",
    33: "float8_e5m2",
}  # fmt: skip
_PIR_DTYPES = {
    "t_bool": "bool", "t_i8": "int8", "t_ui8": "uint8", "t_i16": "int16", "t_i32": "int32",
    "t_i64": "int64", "t_f16": "float16", "t_bf16": "bfloat16", "t_f32": "float32",
    "t_f64": "float64", "t_c64": "complex64", "t_c128": "complex128", "t_f8e4m3": "float8_e4m3fn",
    "t_f8e4m3fn": "float8_e4m3fn", "t_f8e5m2": "float8_e5m2", "t_index": "int64",
}  # fmt: skip
_STACK = "op_callstack"
_UNTOLD = frozenset(
    {
        "op_role",
        "op_role_var",
        "op_namescope",
        "op_device",
        "with_quant_attr",
        _STACK,
        "struct_name",
        "stop_gradient",
        "use_mkldnn",
        "mkldnn_data_type",
        "onednn_data_type",
    }
)
_ONEDNN = "onednn_op."
_DEPTH = 64  # of blocks in blocks
_TEXT = 200  # characters of one attribute's text that are kept


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor of a program. shape: -1 where it is only known when the program runs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    persistable: bool = False


@dataclass(slots=True)
class Operator:
    """One operator. inputs, outputs: (slot, variable). attributes: without bookkeeping. inside:
    operators of its blocks.

    scope: of PIR the layer it was written in. constants: of PIR, inputs that are numbers written
    into the program. onednn: does a pass give it to a kernel of oneDNN?
    """

    op_type: str
    inputs: list[tuple[str, Variable]] = field(default_factory=list)
    outputs: list[tuple[str, Variable]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    scope: str = ""
    inside: list[Operator] = field(default_factory=list)
    onednn: bool = False


@dataclass(slots=True)
class Described:
    """A program: its operators, feeds and fetches left out, and its parameters by name. fetched: of
    PIR, variable by fetch name.
    """

    operators: list[Operator]
    parameters: dict[str, Variable]
    fetched: dict[str, str] = field(default_factory=dict)


# ---- .pdmodel


def legacy(message: bytes) -> Described:
    """Read a ProgramDesc. Raises ValueError or UnreadableRun for what is none."""
    blocks = [
        _Block(value)
        for number, kind, value in protobuf.fields(message)
        if number == 1 and kind == protobuf.BYTES
    ]
    if not blocks:
        raise UnreadableRun("it has no block of operators")
    parameters = {v.name: v for block in blocks for v in block.variables.values() if v.persistable}
    return Described(list(_operators(blocks, (0,), {0})), parameters)


class _Block:
    def __init__(self, message: memoryview) -> None:
        self.variables: dict[str, Variable] = {}
        self.operators: list[memoryview] = []
        for number, kind, value in protobuf.fields(message):
            if number == 3 and kind == protobuf.BYTES:
                found = _variable(value)
                self.variables[found.name] = found
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


def _operators(blocks: list[_Block], path: tuple[int, ...], taken: set[int]) -> Iterator[Operator]:
    """The operators of the block at the end of a path from the outermost. taken: blocks that some
    operator runs; each is one's.
    """
    variables: dict[str, Variable] = {}
    for above in path:
        variables |= blocks[above].variables
    for message in blocks[path[-1]].operators:
        made = Operator("")
        nested: list[int] = []
        for number, kind, value in protobuf.fields(message):
            if number in (1, 2) and kind == protobuf.BYTES:
                slot, names = _slot(value)
                many = len(names) > 1
                refs = [
                    (f"{slot}.{i}" if many else slot, variables.get(name) or Variable(name, "", ()))
                    for i, name in enumerate(names)
                    if name
                ]
                (made.inputs if number == 1 else made.outputs).extend(refs)
            elif number == 3 and kind == protobuf.BYTES:
                made.op_type = text(value)
            elif number == 4 and kind == protobuf.BYTES:
                name, found, inner = _attribute(value)
                nested += inner
                if name == _STACK and isinstance(found, list):
                    made.source = _place(found)
                made.onednn |= name == "use_mkldnn" and found is True
                if name not in _UNTOLD and not inner and not name.startswith("__"):
                    made.attributes[name] = found
        if made.op_type in ("feed", "fetch"):
            continue
        for inside in nested:
            if 0 < inside < len(blocks) and inside not in taken and len(path) < _DEPTH:
                taken.add(inside)
                made.inside += _operators(blocks, (*path, inside), taken)
        yield made


def _slot(message: memoryview) -> tuple[str, list[str]]:
    slot, names = "", []
    for number, kind, value in protobuf.fields(message):
        if kind == protobuf.BYTES and number == 1:
            slot = text(value)
        elif kind == protobuf.BYTES and number == 2:
            names.append(text(value))
    return slot, names


def _attribute(message: memoryview) -> tuple[str, Any, list[int]]:
    """(name, value, blocks it runs)."""
    name, kinds, listed = "", -1, False
    value: Any = None
    many: list[Any] = []
    blocks: list[int] = []
    for number, kind, found in protobuf.fields(message):
        if number == 1:
            name = text(found)
        elif number == 2:
            kinds = int(found)
        elif number in (3, 13):
            value = signed(found)
        elif number == 4:
            value = _short(struct.unpack("<f", found)[0])
        elif number == 19:
            value = struct.unpack("<d", found)[0]
        elif number in (5, 17):
            value = text(found)[:_TEXT]
        elif number == 10:
            value = bool(found)
        elif number in (6, 15, 11):
            listed = True
            many += [bool(n) for n in packed(kind, found)] if number == 11 else packed(kind, found)
        elif number == 7:
            listed = True
            many += [_short(x) for x in protobuf.floats(kind, found)]
        elif number == 16:
            listed = True
            many += [x for (x,) in struct.iter_unpack("<d", found)]
        elif number in (8, 18):
            listed = True
            many.append(text(found)[:_TEXT])
        elif number in (12, 14):
            blocks += packed(kind, found)
    if kinds in _LISTS:
        listed = True
    return name, many if listed else value, blocks


# INTS FLOATS STRINGS BOOLEANS LONGS FLOAT64S VARS: empty ones have no entry
_LISTS = {
    3,
    4,
    5,
    7,
    11,
    12,
    14,
}


def _short(value: float) -> float:
    """A float32 as the shortest decimal that is it."""
    return float(str(np.float32(value)))


def _place(stack: list[Any]) -> str:
    """The line of a Python call stack that wrote an operator: the innermost outside of Paddle, the
    file's name only.
    """
    found = ""
    for line in stack:
        parts = str(line).strip().split('"')
        if len(parts) >= 3 and "/paddle/" not in parts[1] and "line " in parts[2]:
            number = parts[2].partition("line ")[2].partition(",")[0]
            found = f"{parts[1].rpartition('/')[2]}:{number}"
    return found


# ---- PIR


def pir(data: bytes) -> Described:
    """Read a PIR program. Raises UnreadableRun for what is none."""
    try:
        tree = msgspec.json.decode(data)
        blocks = tree["program"]["regions"][0]["blocks"]
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise UnreadableRun(f"it is no PIR program: {type(error).__name__}: {error}") from error
    program = _PirProgram()
    operators = [operator for block in blocks for operator in program.block(block, 0)]
    return Described(operators, program.parameters, dict(_fetches(blocks)))


def _fetches(blocks: Any) -> Iterator[tuple[str, str]]:
    """(name under which a value is fetched, its variable)."""
    for op in (op for block in blocks for op in block["ops"]):
        if _pir_type(str(op.get("#", ""))) in ("fetch", "shadow_output"):
            attributes = _pir_attributes(op.get("A", ()))
            name = attributes.get("name", attributes.get("output_name"))
            for given in op.get("I", ()):
                if name and isinstance(given, dict) and "%" in given:
                    yield str(name), f"%{given['%']}"


class _PirProgram:
    """Values of a program as its blocks are read. lists: values that are lists of tensors, which
    `combine` makes and `split` and `slice` take apart.
    """

    def __init__(self) -> None:
        self.values: dict[int, Variable] = {}
        self.constants: dict[int, Any] = {}
        self.parameters: dict[str, Variable] = {}
        self.lists: dict[int, list[int]] = {}

    def block(self, block: Any, depth: int) -> list[Operator]:
        """The operators of a block."""
        operators: list[Operator] = []
        makers: dict[int, tuple[Operator, str]] = {}
        for i, value in enumerate(block.get("args") or []):
            if isinstance(value, dict) and "%" in value:
                self.values[value["%"]] = _pir_value(value, f"argument {i}")
        for op in block["ops"]:
            outputs = op.get("O")
            outputs = outputs if isinstance(outputs, list) else [outputs] if outputs else []
            if str(op.get("#", "")) == "p":
                self._parameter(op, outputs)
                continue
            attributes = _pir_attributes(op.get("A", ()))
            layer = attributes.pop("struct_name", "")
            if self._is_value(op, outputs, attributes, makers):
                continue
            operator = self._operator(op, outputs, attributes, makers)
            operator.scope = ".".join(part for part in str(layer).split("/") if part)
            for region in op.get("regions", ()):
                for inner in region.get("blocks", ()):
                    if depth < _DEPTH:
                        operator.inside += self.block(inner, depth + 1)
            operators.append(operator)
        return operators

    def _parameter(self, op: Any, outputs: list[Any]) -> None:
        if next(iter(op.get("OA") or ()), 1) == 0:
            # it is not saved: scratch of an operator, of which nobody knows what is in it
            return
        names = [a for a in op.get("A", ()) if isinstance(a, str)]
        for value in outputs:
            name = names[0] if names else f"parameter {value['%']}"
            variable = _pir_value(value, name, persistable=True)
            self.values[value["%"]] = self.parameters[variable.name] = variable

    def _is_value(
        self,
        op: Any,
        outputs: list[Any],
        attributes: dict[str, Any],
        makers: dict[int, tuple[Operator, str]],
    ) -> bool:
        """Does an operation only name, group or take apart values? They are noted then."""
        name, keys = str(op.get("#", "")), _keys(op)
        op_type = _pir_type(name)
        if name in ("0.combine", "builtin.combine") and len(outputs) == 1:
            self.lists[outputs[0]["%"]] = [key for key in keys if key is not None]
        elif (
            name in ("0.split", "builtin.split", "0.slice", "builtin.slice")
            and keys
            and keys[0] in makers
        ):
            maker, own = makers[keys[0]]
            first = attributes.get("index", 0) if name.endswith("slice") else 0
            for i, value in enumerate(outputs):
                self.values[value["%"]] = variable = _pir_value(value, f"%{value['%']}")
                maker.outputs = [pair for pair in maker.outputs if pair[0] != own]
                maker.outputs.append((f"{own}.{int(first) + i}", variable))
        elif op_type in ("full", "full_int_array") and len(outputs) == 1:
            self.constants[outputs[0]["%"]] = attributes.get("value")
        elif op_type in ("data", "feed"):
            shown = str(attributes.get("name", attributes.get("col", "input")))
            self.values.update((v["%"], _pir_value(v, shown)) for v in outputs)
        else:
            return op_type in ("fetch", "shadow_output")
        return True

    def _operator(
        self,
        op: Any,
        outputs: list[Any],
        attributes: dict[str, Any],
        makers: dict[int, tuple[Operator, str]],
    ) -> Operator:
        name = str(op.get("#", ""))
        operator = Operator(
            _pir_type(name),
            attributes={k: v for k, v in attributes.items() if k not in _UNTOLD},
            onednn=name.startswith(_ONEDNN),
        )
        values, constants = self.values, self.constants
        for slot, key in enumerate(_keys(op)):
            if key in constants:
                operator.attributes[f"input.{slot}"] = constants[key]
            elif key in self.lists:
                members = list(enumerate(self.lists[key]))
                operator.inputs += [(f"{slot}.{i}", values[m]) for i, m in members if m in values]
                operator.attributes |= {
                    f"input.{slot}.{i}": constants[m] for i, m in members if m in constants
                }
            elif key in values:
                operator.inputs.append((str(slot), values[key]))
        for slot, value in enumerate(outputs):
            if not isinstance(value, dict) or "%" not in value:
                continue
            values[value["%"]] = variable = _pir_value(value, f"%{value['%']}")
            operator.outputs.append((str(slot), variable))
            makers[value["%"]] = operator, str(slot)
        return operator


def _keys(op: Any) -> list[Any]:
    """Numbers of the values that go into an operation; None for what is no value."""
    return [value.get("%") if isinstance(value, dict) else None for value in op.get("I", ())]


def _pir_type(name: str) -> str:
    """`1.matmul` is pd_op's matmul, `onednn_op.matmul` too; other dialects that have no number are
    spelt out.
    """
    name = name.removeprefix(_ONEDNN)
    dialect, _, rest = name.partition(".")
    return (rest if dialect in ("0", "1", "pd_op") else name).removesuffix("_") or name


def _pir_value(value: Any, name: str, persistable: bool = False) -> Variable:
    tensor = (value.get("TT") or {}) if isinstance(value, dict) else {}
    described = tensor.get("D") or []
    if (
        "dtensor" not in str(tensor.get("#", ""))
        or len(described) < 2
        or not isinstance(described[0], dict)
    ):
        return Variable(name, str(tensor.get("#", "")).partition(".")[2], (), persistable)
    code = str(described[0].get("#", "")).partition(".")[2]
    shape = (
        tuple(n for n in described[1] if isinstance(n, int))
        if isinstance(described[1], list)
        else ()
    )
    return Variable(name, _PIR_DTYPES.get(code, code), shape, persistable)


def _pir_attributes(given: Any) -> dict[str, Any]:
    out = {}
    for one in given:
        if isinstance(one, dict) and "N" in one:
            out[str(one["N"])] = _plain(one.get("AT"), 0)
    return out


def _plain(value: Any, depth: int) -> Any:
    """An attribute without its types: {"#": "0.a_f32", "D": 0.5} is 0.5."""
    if isinstance(value, dict):
        inner = value.get("D")
        if isinstance(inner, float) and str(value.get("#", "")).endswith("a_f32"):
            return _short(inner)
        return _plain(inner, depth + 1) if depth < 8 else None
    if isinstance(value, list):
        return [_plain(one, depth + 1) for one in value] if depth < 8 else None
    return value[:_TEXT] if isinstance(value, str) else value
