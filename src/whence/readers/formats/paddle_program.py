"""Reads Paddle programs as a run: `.pdmodel` (ProgramDesc) and PIR `.json`. The run has operators,
attributes and data flow, but no values.
"""

from __future__ import annotations

from collections import Counter

from whence.errors import UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits, protobuf
from whence.readers.paddle import pir_json, program_desc
from whence.readers.paddle.program import Operator, ProgramDescription, Variable
from whence.readers.source import Place
from whence.records import Run
from whence.records.marks import Mark, mark

LOOKS_LIKE = "a Paddle program, .pdmodel or PIR .json"
ORDER = 30
HOLDS_TENSORS = False
KIND = "paddle program"
NO_VALUES = "a program has no values"


def sniff(place: Place) -> bool:
    """Whether the file has a PIR magic word, or is a protobuf message whose first field is a block
    of operators.
    """
    if place.is_folder or not place.size:
        return False
    if b'"magic":"pir"' in place.head[:4096].replace(b" ", b"").replace(b"\n", b""):
        return True
    return place.suffix == ".pdmodel" or (place.size > 4 and _is_block(place.head))


def _is_block(head: bytes) -> bool:
    """Whether a ProgramDesc begins here: field 1, a message that begins with idx 0 and
    parent -1.
    """
    if head[:1] != b"\x0a":
        return False
    _, place = protobuf.varint(head, 1)
    return head[place : place + 13] == b"\x08\x00\x10" + b"\xff" * 9 + b"\x01"


def described(place: Place) -> ProgramDescription:
    """Returns the program of a file. Raises UnreadableRun, ValueError."""
    if place.size > limits.JSON_BYTES:
        raise UnreadableRun(
            f"it has {place.size} bytes; programs have no weights in them and stay below "
            f"{limits.JSON_BYTES}"
        )
    data = place.path.read_bytes()
    return pir_json.read(data) if data[:64].lstrip()[:1] == b"{" else program_desc.read(data)


def open_run(place: Place) -> Run:
    """Returns calls in execution order, named by the variable they write; in PIR, which has no
    variable names, by layer, operator and position.
    """
    program = described(place)
    building = Building(place.path, KIND)
    parameters = {
        name: _tensor(building, variable) for name, variable in program.parameters.items()
    }
    _calls(building, program.operators, parameters, {}, Counter(), -1)
    return building.run()


def _tensor(building: Building, variable: Variable) -> int:
    return building.tensor(variable.dtype, variable.shape, why=NO_VALUES)


def _calls(
    building: Building,
    operators: list[Operator],
    parameters: dict[str, int],
    records: dict[str, int],
    counts: Counter[str],
    parent: int,
) -> None:
    for operator in operators:
        params, inputs = {}, {}
        parameter_notes = []
        for slot, variable in operator.inputs:
            if variable.name in parameters:
                params[variable.name] = parameters[variable.name]
                parameter_notes.append(mark(Mark.TAKES, f"{variable.name} as {slot}"))
                continue
            if variable.name not in records:
                records[variable.name] = _tensor(building, variable)
            inputs[slot] = records[variable.name]
        outputs = {}
        for slot, variable in operator.outputs:
            records[variable.name] = outputs[slot] = _tensor(building, variable)
        first = operator.outputs[0][1].name if operator.outputs else ""
        if not first or first.startswith("%"):
            first = ".".join(
                part
                for part in (operator.scope, f"{operator.op_type}_{counts[operator.op_type]}")
                if part
            )
        counts[operator.op_type] += 1
        names = [
            variable.name for _, variable in operator.outputs if not variable.name.startswith("%")
        ]
        call = building.call(
            first,
            op_type=operator.op_type,
            inputs=inputs,
            outputs=outputs,
            params=params,
            parent=parent,
            source=operator.source,
            arguments=operator.attributes,
            notes=(
                *(mark(Mark.WRITES, name) for name in names[1:]),
                *parameter_notes,
                *((mark(Mark.ONEDNN),) if operator.onednn else ()),
            ),
        )
        if operator.inside:
            _calls(building, operator.inside, parameters, records, counts, call)
