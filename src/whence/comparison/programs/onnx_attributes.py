"""Calls of a run of an ONNX graph with programs of aten operators, which can be replayed.

Made of what each node says (`replay/onnx_translation`), not recorded; like every program it is
believed only where it reproduces what the run holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.quantised.operands import domain_of, operands
from whence.comparison.programs.paddle_attributes import like
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Over, Program, Ref, Run
from whence.records.marks import Mark, has_mark, mark_value, taken_parameters
from whence.records.slots import split_slot
from whence.replay.onnx_translation.translation import program
from whence.replay.onnx_translation.writer import Node, Operand, Result
from whence.store import StoredRun

_SESSION = '"onnxruntime"'
"""What the settings of a session of ONNX Runtime hold, and those of no other model."""


def with_node_programs(run: Run) -> Run:
    """The run with programs of its calls that are nodes of an ONNX graph; the run itself where it
    has none.
    """
    # A capture says so before any of its calls is decoded.
    has_session = any(note.kind == "settings" and _SESSION in note.text for note in run.notes)
    if isinstance(run, StoredRun) and not has_session:
        return run
    programs: dict[str, Program] = dict(run.programs)
    changed: dict[int, Call] = {}
    for call in run.calls:
        if not call.leaf or call.program or not has_mark(call, Mark.OPSET):
            continue
        try:
            written = program(_node(run, call))
            programs[written.id] = written
            changed[call.id] = replace(call, program=written.id, no_program="")
        except ReplayRefused as refused:
            changed[call.id] = replace(call, no_program=str(refused))
    if not changed:
        return run
    out = Over(run, [changed.get(call.id, call) for call in run.calls])
    out.programs = programs
    return like(run, out)


def _node(run: Run, call: Call) -> Node:
    """The node that a call is. Raises ReplayRefused where its operands are not known."""
    domain = domain_of(call.op_type)
    reads, slots = operands(call), {ref.slot for ref in call.refs}
    params = (f"param.{name}" for name, place in taken_parameters(call) if place.isdigit())
    lost = next((slot for slot in params if slot not in slots), "")
    if lost:
        raise ReplayRefused(f"what {call.op_type} reads as {lost} was not captured")
    makes = {int(split_slot(r.slot)[1]): r for r in call.slots("output")}
    opset = mark_value(call, Mark.OPSET)
    if not opset.isdigit() or max([*reads, *makes, 0]) > 10_000:
        raise ReplayRefused(f"{call.op_type}: what it says makes no sense")
    inputs = [
        _operand(run, reads[k]) if k in reads else None for k in range(max(reads, default=-1) + 1)
    ]
    outputs = [
        _result(run, makes[k].slot, makes[k].record) if k in makes else None
        for k in range(max(makes, default=-1) + 1)
    ]
    attributes = {name: _attribute(value) for name, value in call.arguments.items()}
    op_type = call.op_type.removeprefix(f"{domain}.")
    return Node(op_type, domain, int(opset), attributes, inputs, outputs)


def _operand(run: Run, ref: Ref) -> Operand:
    def value() -> Array | None:
        try:
            return run.array(ref.record)
        except ElementsMissing:
            return None

    tensor = run.records[ref.record]
    return Operand(ref.slot, tensor.dtype, tensor.shape, value)


def _result(run: Run, slot: str, record: int) -> Result | None:
    """An output; None where nothing is known of it."""
    tensor = run.records[record]
    return Result(slot, tensor.dtype, tensor.shape) if tensor.dtype in dtypes.DTYPES else None


def _attribute(value: Any) -> Any:
    """An attribute as it was before it became JSON."""
    if isinstance(value, (list, tuple)):
        return [_attribute(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"float"}:
        return float(value["float"])
    if {"dtype", "shape", "values"} <= set(value) and value["dtype"] in dtypes.DTYPES:
        numbers = [_attribute(item) for item in value["values"]]
        kind = dtypes.named(value["dtype"]).numpy
        return np.asarray(numbers).astype(kind).reshape([int(n) for n in value["shape"]])
    return value
