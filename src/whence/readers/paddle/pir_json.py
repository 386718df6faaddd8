"""Paddle's newer program format, PIR JSON (`.json`) of version 4, read without Paddle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from whence.errors import UnreadableRun
from whence.readers.paddle.program import (
    BOOKKEEPING,
    MAX_DEPTH,
    MAX_TEXT,
    Operator,
    ProgramDescription,
    Variable,
    shortest,
)

_DTYPES = {
    "t_bool": "bool", "t_i8": "int8", "t_ui8": "uint8", "t_i16": "int16", "t_i32": "int32",
    "t_i64": "int64", "t_f16": "float16", "t_bf16": "bfloat16", "t_f32": "float32",
    "t_f64": "float64", "t_c64": "complex64", "t_c128": "complex128", "t_f8e4m3": "float8_e4m3fn",
    "t_f8e4m3fn": "float8_e4m3fn", "t_f8e5m2": "float8_e5m2", "t_index": "int64",
}  # fmt: skip
_ONEDNN = "onednn_op."


def read(data: bytes) -> ProgramDescription:
    """Reads a PIR program. Raises UnreadableRun for any other content."""
    try:
        tree = msgspec.json.decode(data)
        blocks = tree["program"]["regions"][0]["blocks"]
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise UnreadableRun(f"it is not a PIR program: {type(error).__name__}: {error}") from error
    program = _ValueTable()
    operators = [operator for block in blocks for operator in program.block(block, 0)]
    return ProgramDescription(operators, program.parameters, dict(_fetches(blocks)))


def _fetches(blocks: Any) -> Iterator[tuple[str, str]]:
    """Yields (name under which a value is fetched, its variable)."""
    for op in (op for block in blocks for op in block["ops"]):
        if _op_type(str(op.get("#", ""))) in ("fetch", "shadow_output"):
            attributes = _attributes(op.get("A", ()))
            name = attributes.get("name", attributes.get("output_name"))
            for operand in op.get("I", ()):
                if name and isinstance(operand, dict) and "%" in operand:
                    yield str(name), f"%{operand['%']}"


class _ValueTable:
    """Values of a program, filled while its blocks are read. lists: values that are lists of
    tensors, which `combine` builds and `split` and `slice` take apart.
    """

    def __init__(self) -> None:
        self.values: dict[int, Variable] = {}
        self.constants: dict[int, Any] = {}
        self.parameters: dict[str, Variable] = {}
        self.lists: dict[int, list[int]] = {}

    def block(self, block: Any, depth: int) -> list[Operator]:
        """Returns the operators of a block."""
        operators: list[Operator] = []
        makers: dict[int, tuple[Operator, str]] = {}
        for i, value in enumerate(block.get("args") or []):
            if isinstance(value, dict) and "%" in value:
                self.values[value["%"]] = _variable(value, f"argument {i}")
        for op in block["ops"]:
            outputs = op.get("O")
            outputs = outputs if isinstance(outputs, list) else [outputs] if outputs else []
            if str(op.get("#", "")) == "p":
                self._parameter(op, outputs)
                continue
            attributes = _attributes(op.get("A", ()))
            layer = attributes.pop("struct_name", "")
            if self._is_value(op, outputs, attributes, makers):
                continue
            operator = self._operator(op, outputs, attributes, makers)
            operator.scope = ".".join(part for part in str(layer).split("/") if part)
            for region in op.get("regions", ()):
                for inner in region.get("blocks", ()):
                    if depth < MAX_DEPTH:
                        operator.inside += self.block(inner, depth + 1)
            operators.append(operator)
        return operators

    def _parameter(self, op: Any, outputs: list[Any]) -> None:
        if next(iter(op.get("OA") or ()), 1) == 0:
            # it is not saved: scratch memory of an operator with undefined content
            return
        names = [a for a in op.get("A", ()) if isinstance(a, str)]
        for value in outputs:
            name = names[0] if names else f"parameter {value['%']}"
            variable = _variable(value, name, persistable=True)
            self.values[value["%"]] = self.parameters[variable.name] = variable

    def _is_value(
        self,
        op: Any,
        outputs: list[Any],
        attributes: dict[str, Any],
        makers: dict[int, tuple[Operator, str]],
    ) -> bool:
        """Whether an operation only names, groups or splits values; these are then recorded in the
        table.
        """
        name, keys = str(op.get("#", "")), _keys(op)
        op_type = _op_type(name)
        if name in ("0.combine", "builtin.combine") and len(outputs) == 1:
            self.lists[outputs[0]["%"]] = [key for key in keys if key is not None]
        elif (
            name in ("0.split", "builtin.split", "0.slice", "builtin.slice")
            and keys
            and keys[0] in makers
        ):
            maker, slot = makers[keys[0]]
            first = attributes.get("index", 0) if name.endswith("slice") else 0
            for i, value in enumerate(outputs):
                self.values[value["%"]] = variable = _variable(value, f"%{value['%']}")
                maker.outputs = [pair for pair in maker.outputs if pair[0] != slot]
                maker.outputs.append((f"{slot}.{int(first) + i}", variable))
        elif op_type in ("full", "full_int_array") and len(outputs) == 1:
            self.constants[outputs[0]["%"]] = attributes.get("value")
        elif op_type in ("data", "feed"):
            variable_name = str(attributes.get("name", attributes.get("col", "input")))
            self.values.update((v["%"], _variable(v, variable_name)) for v in outputs)
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
            _op_type(name),
            attributes={k: v for k, v in attributes.items() if k not in BOOKKEEPING},
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
            values[value["%"]] = variable = _variable(value, f"%{value['%']}")
            operator.outputs.append((str(slot), variable))
            makers[value["%"]] = operator, str(slot)
        return operator


def _keys(op: Any) -> list[Any]:
    """Returns the numbers of the values that an operation reads; None for an operand that is not a
    value.
    """
    return [value.get("%") if isinstance(value, dict) else None for value in op.get("I", ())]


def _op_type(name: str) -> str:
    """Returns the type without dialect: `1.matmul` is pd_op's matmul, so is `onednn_op.matmul`;
    other dialects without a number are spelt out.
    """
    name = name.removeprefix(_ONEDNN)
    dialect, _, plain = name.partition(".")
    return (plain if dialect in ("0", "1", "pd_op") else name).removesuffix("_") or name


def _variable(value: Any, name: str, persistable: bool = False) -> Variable:
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
    return Variable(name, _DTYPES.get(code, code), shape, persistable)


def _attributes(entries: Any) -> dict[str, Any]:
    out = {}
    for entry in entries:
        if isinstance(entry, dict) and "N" in entry:
            out[str(entry["N"])] = _plain(entry.get("AT"), 0)
    return out


def _plain(value: Any, depth: int) -> Any:
    """Returns an attribute without its types: 0.5 for {"#": "0.a_f32", "D": 0.5}."""
    if isinstance(value, dict):
        inner = value.get("D")
        if isinstance(inner, float) and str(value.get("#", "")).endswith("a_f32"):
            return shortest(inner)
        return _plain(inner, depth + 1) if depth < 8 else None
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value] if depth < 8 else None
    return value[:MAX_TEXT] if isinstance(value, str) else value
