"""Tensors that a run made and nothing read: attention weights that are returned and dropped. A target may be right not to make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whence.records import Call, Program, Run, children


def unread(run: Run) -> set[int]:
    """Records that a call returned or changed in place and that no call was given, no container's own operators read, and no root left.

    What a container without a program did with a tensor is not known: that one counts as read.
    """
    made: set[int] = set()
    read: set[int] = set()
    below = children(run.calls)
    for call in run.calls:
        left = _left(call)
        made.update(left.values())
        read.update(r.record for r in call.slots("input"))
        if call.parent == -1:
            read.update(left.values())
        kids = [run.calls[k] for k in below.get(call.id, ())]
        inside = {f"{k}:{slot}": record for k, kid in enumerate(kids) for slot, record in _left(kid).items()}
        program = run.programs.get(call.program)
        if program is None:
            read.update(inside.values())
            continue
        used = _used(program)
        # Handed on as it is, a tensor has its fate decided further up; unless it goes there as another record.
        own = left | {f"{k}:{r.slot}": r.record for k, kid in enumerate(kids) for r in kid.slots("input")}
        for slot, operand in program.outputs:
            source = program.inputs[operand["in"]] if "in" in operand else ""
            if source in inside and own.get(slot) != inside[source]:
                used.add(source)
        read.update(record for slot, record in inside.items() if slot in used)
    return made - read


def _left(call: Call) -> dict[str, int]:
    return {r.slot: r.record for kind in ("output", "mutated") for r in call.slots(kind)}


def _used(program: Program) -> set[str]:
    """The inputs that operations of a program take."""
    return {program.inputs[k] for op in program.operations for k in _inputs([*op.args, *op.kwargs.values()])}


def _inputs(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if "in" in value:
            yield value["in"]
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inputs(item)
