"""Rewrites a run of modules as a flat list of operators below each model, so that it can be
compared with a graph.

Modules without child modules and recorded operators stay as they are. What a module computes
between its children becomes one operator for each tensor that it passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from whence.align.call_sites import selected
from whence.align.calls.facing_tensors import with_programs
from whence.align.calls.graph_nodes import program_piece
from whence.align.derived_run import renumbered
from whence.align.values.value_graph import ATEN_MOVES
from whence.records import Call, Program, Record, Ref, Run, children
from whence.records.program import identified
from whence.records.slots import is_of_child, is_output, is_param, split_child

_OPERATORS = ("operator", "region")
_FLAT = "what it computes between the calls inside is replayed as calls of their own"


class _Part(NamedTuple):
    """A call of the flat run. place: its sort key among the others."""

    place: tuple[int, int, int]
    call: Call


def flat(run: Run) -> Run:
    """The run with all calls of a model directly below the model's call."""
    chosen = selected(run.calls)
    programs: dict[str, Program] = {}
    if any(call.kind in _OPERATORS for call in chosen):
        parts = [_Part((c.order, 1, 0), c) for c in chosen if c.kind in _OPERATORS]
    else:
        parts = _cut(run, chosen, programs)
    roots = {(c.rank, c.root, c.step, c.micro): c for c in chosen if c.parent == -1}
    parts = [part for part in parts if _computes(part.call)]
    read = _read(parts, {ref.record for root in roots.values() for ref in root.slots("output")})
    begun = [
        _Part(
            (root.order, -1, 0),
            replace(root, leaf=False, program="", no_program=_FLAT),
        )
        for root in roots.values()
    ]
    for place, call in parts:
        root = roots.get((call.rank, call.root, call.step, call.micro))
        refs = tuple(r for r in call.refs if r.record in read or not is_output(r.slot))
        is_read = any(is_output(ref.slot) for ref in refs)
        if root is not None and call.id != root.id and is_read:
            call = replace(call, parent=root.id, leaf=True, refs=refs)
            begun.append(_Part(place, call))
    ordered = [part.call for part in sorted(begun, key=lambda part: part.place)]
    return with_programs(run, renumbered(ordered)[0], programs)


def _computes(call: Call) -> bool:
    """Whether a call makes a tensor other than those it was given."""
    given = {ref.record for ref in call.slots("input")}
    return any(ref.record not in given for ref in call.slots("output"))


def _read(parts: Sequence[_Part], ends: set[int]) -> set[int]:
    """The records on which the model's outputs depend."""
    makers: dict[int, Call] = {}
    for part in sorted(parts, key=lambda part: part.place):
        for ref in part.call.slots("output"):
            makers.setdefault(ref.record, part.call)
    read, waiting = set(ends), list(ends)
    while waiting:
        maker = makers.get(waiting.pop())
        for ref in maker.refs if maker is not None else ():
            if not is_output(ref.slot) and ref.record not in read:
                read.add(ref.record)
                waiting.append(ref.record)
    return read


def _cut(run: Run, calls: Sequence[Call], programs: dict[str, Program]) -> list[_Part]:
    """The leaf modules, and the code of the other modules cut at its children; adds the programs of
    these pieces.
    """
    kids = children(run.calls)
    parts: list[_Part] = []
    number = len(run.calls)
    for call in calls:
        inside = [run.calls[k] for k in kids.get(call.id, ())]
        if not inside:
            parts.append(_Part((call.order, 1, 0), call))
            continue
        program = run.programs.get(call.program)
        for slot, _ in program.outputs if program is not None else ():
            stretch = _stretch(run.records, call, inside, program, slot, number)
            if stretch is not None:
                part, own = stretch
                if is_of_child(slot):
                    place = (inside[split_child(slot)[0]].order, 0, 0)
                else:  # after everything inside, before what encloses it
                    place = (_last_order(run, kids, call), 2, -call.number.count("_"))
                parts.append(_Part(place, part))
                programs[own.id] = own
                number += 1
    return parts


def _last_order(run: Run, kids: Mapping[int, Sequence[int]], call: Call) -> int:
    while below := kids.get(call.id):
        call = run.calls[below[-1]]
    return call.order


def _stretch(
    records: Sequence[Record],
    call: Call,
    inside: Sequence[Call],
    program: Program | None,
    slot: str,
    number: int,
) -> tuple[Call, Program] | None:
    """A call for the computation of one tensor that a module passes on; None where the tensor is
    one of its inputs. number: a free id.
    """
    if program is None:
        return None

    def shape(source: str) -> tuple[int, ...]:
        ref = _ref(call, inside, source)
        return records[ref.record].shape if ref is not None else ()

    own = _sliced(program, slot, shape)
    output = _ref(call, inside, slot)
    if own is None or output is None:
        return None
    names: dict[str, str] = {}
    refs: list[Ref] = []
    for source in (*own.inputs, *own.params):
        ref = _ref(call, inside, source)
        if ref is None:
            return None
        names[source] = source if is_param(source) else f"input.{len(refs)}"
        refs.append(Ref(names[source], ref.record))
    own = replace(
        own,
        inputs=tuple(names[source] for source in own.inputs),
        outputs=(("output.0", own.outputs[0][1]),),
    )
    return (
        replace(
            call,
            id=number,
            refs=(*refs, Ref("output.0", output.record)),
            op=slot,
            kind="operator",
            op_type=_only_operator(own) or f"code of {call.op_type}",
            program=own.id,
            arguments={},
            leaf=True,
        ),
        own,
    )


def _only_operator(program: Program) -> str:
    """The operator of a program that has only one apart from moves; "" for other programs."""
    names = [operation.name.removeprefix("aten.").split(".")[0] for operation in program.operations]
    names = [name for name in names if name not in ATEN_MOVES]
    return names[0] if len(names) == 1 else ""


def _ref(call: Call, inside: Sequence[Call], slot: str) -> Ref | None:
    """The tensor in a slot of a module's program."""
    of = call
    if is_of_child(slot):
        place, slot = split_child(slot)
        if place >= len(inside):
            return None
        of = inside[place]
    return next((ref for ref in of.refs if ref.slot == slot), None)


def _sliced(program: Program, slot: str, shape: Callable[[str], tuple[int, ...]]) -> Program | None:
    """The part of a program that computes one of its outputs; None where that is an input. shape:
    gives the shape of the tensor in a slot, () where unknown.
    """
    operand = dict(program.outputs)[slot]
    if "op" not in operand:
        return None
    kinds = dict(zip(program.inputs, program.input_dtypes))
    piece = program_piece(program, {slot: operand}, kinds, "", shape=shape)
    return identified(replace(piece, base=program.base))
