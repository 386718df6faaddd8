"""Combines operators that a run recorded as calls of their own into one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whence.records import Call, Program
from whence.records.slots import is_written

if TYPE_CHECKING:
    from whence.comparison.replays.side import ReplaySource
    from whence.replay.export.trace import Trace
    from whence.replay.flatten import Flat


def gathered_program(
    source: ReplaySource, call: Call, program_of: Callable[[Call], Program]
) -> Flat | None:
    """The operators below a call without a program, when the run recorded them as calls;
    else None.
    """
    from whence.replay.flatten import Node, gather

    calls = source.run.calls
    below, todo = [], list(source.children(call.id))
    while todo:
        below.append(inner := calls[todo.pop()])
        todo += source.children(inner.id)
    operators = sorted(
        (c for c in below if c.kind == "operator" and c.phase == call.phase),
        key=lambda c: c.order,
    )
    if call.program or not operators:
        return None
    origins: dict[int, tuple[int, str]] = {}
    for module in (call, *(c for c in below if c.kind == "module")):
        for ref in (*module.slots("param"), *module.slots("input")):
            origins.setdefault(ref.record, (module.id, ref.slot))
    records = {c.id: {r.slot: r.record for r in c.refs} for c in operators}
    nodes = []
    for c in operators:
        shapes = {slot: source.run.records[record].shape for slot, record in records[c.id].items()}
        nodes.append(Node(c.id, program_of(c), (), frozenset(), shapes))
    outputs = {r.slot: r.record for r in call.refs if is_written(r.slot)}
    return gather(nodes, records.__getitem__, origins, outputs)


def tensor_number(trace: Trace, program: Program, slot: str) -> int | None:
    """The number, in a trace, of the tensor that its program returns as `slot`."""
    kind, where = next(iter(dict(program.outputs)[slot].items()))
    if kind == "op":
        results = trace.by_place.get(where[0], [])
        return results[where[1]] if where[1] < len(results) else None
    name = program.inputs[where] if kind == "in" else where
    return trace.slots.get(name) if kind in ("in", "param") else None
