"""A run of modules as one list of operators below each model: what a graph is, to be held against
one.

Modules that call no other stay, and so do recorded operators; what a module computes between those
that it calls is one operator for each tensor that it hands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from whence.align.call_sites import selected
from whence.align.calls.facing_tensors import with_programs
from whence.align.derived_run import renumbered
from whence.records import Call, Program, Ref, Run, children
from whence.records.program import map_operands
from whence.records.slots import is_of_child, is_param, split_child

_OPERATORS = ("operator", "region")


def flat(run: Run) -> Run:
    """The run with every model as a call right above all that it computes."""
    chosen = selected(run.calls)
    if any(call.kind in _OPERATORS for call in chosen):
        parts = [c for c in chosen if c.kind in _OPERATORS]
        programs: dict[str, Program] = {}
    else:
        parts, programs = _cut(run, chosen)
    roots = {(c.rank, c.root, c.step, c.micro): c for c in chosen if c.parent == -1}
    below = []
    for part in parts:
        root = roots.get((part.rank, part.root, part.step, part.micro))
        if root is not None and part.id != root.id:
            below.append(msgspec.structs.replace(part, parent=root.id, leaf=True))
    begun = [msgspec.structs.replace(root, leaf=False) for root in roots.values()]
    ordered = sorted([*begun, *below], key=lambda c: (c.order, c.parent != -1))
    return with_programs(run, renumbered(ordered)[0], programs)


def _cut(run: Run, calls: Sequence[Call]) -> tuple[list[Call], dict[str, Program]]:
    """The innermost modules, and the stretches of the others; with the programs of these."""
    kids = children(run.calls)
    parts: list[Call] = []
    programs: dict[str, Program] = {}
    for call in calls:
        inside = [run.calls[k] for k in kids.get(call.id, ())]
        if not inside:
            parts.append(call)
            continue
        program = run.programs.get(call.program)
        for number, (slot, _) in enumerate(program.outputs if program is not None else ()):
            stretch = _stretch(call, inside, program, slot, len(run.calls) + 100_000 * call.id)
            if stretch is not None:
                part, own = stretch
                parts.append(msgspec.structs.replace(part, id=part.id + number))
                programs[own.id] = own
    return parts, programs


def _stretch(
    call: Call, inside: Sequence[Call], program: Program | None, slot: str, number: int
) -> tuple[Call, Program] | None:
    """What a module computes of one tensor that it hands on, as a call; None where it passes on
    what it was given. number: the least id that is free.
    """
    if program is None:
        return None
    own = _sliced(program, slot)
    made = _ref(call, inside, slot)
    if own is None or made is None:
        return None
    names: dict[str, str] = {}
    refs: list[Ref] = []
    for source in (*own.inputs, *own.params):
        ref = _ref(call, inside, source)
        if ref is None:
            return None
        names[source] = source if is_param(source) else f"input.{len(refs)}"
        refs.append(Ref(names[source], ref.record))
    own = msgspec.structs.replace(
        own,
        inputs=tuple(names[source] for source in own.inputs),
        outputs=(("output.0", own.outputs[0][1]),),
    )
    order = inside[split_child(slot)[0]].order if is_of_child(slot) else inside[-1].order
    return (
        msgspec.structs.replace(
            call,
            id=number,
            order=order,
            refs=(*refs, Ref("output.0", made.record)),
            op=slot,
            kind="operator",
            op_type=f"code of {call.op_type}",
            program=own.id,
            arguments={},
            leaf=True,
        ),
        own,
    )


def _ref(call: Call, inside: Sequence[Call], slot: str) -> Ref | None:
    """The tensor in a slot of a module's program."""
    of = call
    if is_of_child(slot):
        place, slot = split_child(slot)
        if place >= len(inside):
            return None
        of = inside[place]
    return next((ref for ref in of.refs if ref.slot == slot), None)


def _sliced(program: Program, slot: str) -> Program | None:
    """The part of a program that makes one of its outputs; None where it only passes it on."""
    operand = dict(program.outputs)[slot]
    if "op" not in operand:
        return None
    needed: set[int] = set()
    waiting = [operand["op"][0]]
    while waiting:
        place = waiting.pop()
        if place not in needed:
            needed.add(place)
            operands = program.operations[place].operands()
            waiting += [value[0] for kind, value in operands if kind == "op"]
    places = {old: new for new, old in enumerate(sorted(needed))}
    inputs: list[int] = []
    params: list[str] = []

    def renumbered_operand(kind: str, value: Any) -> Any:
        if kind == "op":
            return {"op": [places[value[0]], value[1]]}
        if kind in ("in", "dim"):
            number = value if kind == "in" else value[0]
            if number not in inputs:
                inputs.append(number)
            new = inputs.index(number)
            return {"in": new} if kind == "in" else {"dim": [new, value[1]]}
        if kind == "mul":
            return {"mul": map_operands(renumbered_operand, value)}
        if kind == "param" and value not in params:
            params.append(value)
        return {kind: value}

    operations = tuple(
        program.operations[old].with_operands(renumbered_operand) for old in sorted(needed)
    )
    output = map_operands(renumbered_operand, operand)
    return msgspec.structs.replace(
        program,
        id=f"{program.id} for {slot}",
        operations=operations,
        inputs=tuple(program.inputs[k] for k in inputs),
        outputs=((slot, output),),
        params=tuple(params),
        input_dtypes=tuple(program.input_dtypes[k] for k in inputs),
        fixed=tuple((inputs.index(k), a, n) for k, a, n in program.fixed if k in inputs),
        equal=(),
        calls=(),
        same=(),
        lost=(),
        names=(),
        scopes=(),
        picks=(),
        lines=(),
        call_lines=(),
    )
