"""Replays fused calls whose parameters were folded (scale into weight), since these cannot be
compared one to one.

Their elements say nothing of each other. The program takes the reference's own instead, so that
what the target's amount to shows in what it computes from the target's inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.calls.tensor_slots import pair_in_order
from whence.errors import ElementsMissing
from whence.records import Call, Program, Record, Run
from whence.records.slots import is_param

_ROUNDINGS = 6
"""Of a weight that was scaled by what a square root and a quotient gave, in unit roundoffs."""


_MOST_INTEGERS = 64
_CONVERTED_OTHERWISE = 1e-3  # share of the elements of a copy


class Settled(NamedTuple):
    """Both calls without the parameters that have no like across. program: of the reference's call,
    with these as constants; None where it is as it was.
    """

    call: Call
    partner: Call
    program: Program | None


def settled_parameters(
    reference: Run, call: Call, target: Run, partner: Call, *, is_one_file: bool
) -> Settled:
    """Two calls that carry out the same operators, with parameters left that face each other.
    is_one_file: as `facing` has it.
    """
    pairs, only, only_target = pair_in_order(call, partner, reference, target)
    params = [p for p in pairs if is_param(p.reference_slot)]
    alone = {slot for slot in only if is_param(slot)}
    alone_target = {slot for slot in only_target if is_param(slot)}
    sides = ((reference, call, alone), (target, partner, alone_target))
    is_folded = any(
        run.records[ref.record].count > 1
        for run, of, slots in sides
        for ref in of.slots("param")
        if ref.slot in slots
    )
    for pair in params:
        a, b = reference.records[pair.reference_record], target.records[pair.target_record]
        if _have_one_content(a, b) or _is_rounded_copy(reference, a, target, b):
            continue
        if (
            is_folded
            or _says_what_to_do(a)
            or (not is_one_file and _are_rounded_alike(reference, a, target, b))
        ):
            alone.add(pair.reference_slot)
            alone_target.add(pair.target_slot)
    program = reference.programs.get(call.program)
    changed = _with_constants(program, call, alone) if program is not None and alone else None
    new_call = _without(call, alone)
    if changed is not None:
        new_call = replace(new_call, program=changed.id)
    return Settled(new_call, _without(partner, alone_target), changed)


def _have_one_content(a: Record, b: Record) -> bool:
    return bool(a.hash) and (a.hash, a.dtype, a.shape) == (b.hash, b.dtype, b.shape)


def _is_rounded_copy(reference: Run, a: Record, target: Run, b: Record) -> bool:
    """Is one the other in fewer bits, as in a file that was reduced? A converter may keep single
    elements from becoming zero or infinite.
    """
    bits = [dtypes.named(r.dtype).bits if dtypes.is_floating(r.dtype) else 0 for r in (a, b)]
    if a.shape != b.shape or bits[0] == bits[1] or not all(bits):
        return False
    try:
        x, y = reference.array(a.id), target.array(b.id)
    except ElementsMissing:
        return False
    wide, narrow = (x, y) if bits[0] > bits[1] else (y, x)
    with np.errstate(over="ignore", invalid="ignore"):
        differ = np.count_nonzero(wide.astype(narrow.dtype) != narrow)
    return bool(differ <= _CONVERTED_OTHERWISE * narrow.size)


def _says_what_to_do(record: Record) -> bool:
    """Is this a number or a list of integers, such as a shape, that two graphs of one function may
    say in several ways?
    """
    few = record.count <= _MOST_INTEGERS and not dtypes.is_floating(record.dtype)
    return few or record.count == 1


def _are_rounded_alike(reference: Run, a: Record, target: Run, b: Record) -> bool:
    """Do two parameters differ by the rounding of the few operations that folded them?"""
    if a.shape != b.shape or a.dtype != b.dtype or not dtypes.is_floating(a.dtype):
        return False
    try:
        x, y = (run.array(r.id).astype(np.float64) for run, r in ((reference, a), (target, b)))
    except ElementsMissing:
        return False
    u = dtypes.named(a.dtype).unit_roundoff or 0.0
    return bool((np.abs(x - y) <= _ROUNDINGS * u * np.abs(x)).all())


def _without(call: Call, slots: set[str]) -> Call:
    if not slots:
        return call
    refs = tuple(r for r in call.refs if r.slot not in slots)
    return replace(call, refs=refs)


def _with_constants(program: Program, call: Call, slots: set[str]) -> Program | None:
    """The program with parameters as constants; None where it reads none of them."""
    records = {r.slot: r.record for r in call.slots("param") if r.slot in slots}
    taken = [slot for slot in program.params if slot in records]
    if not taken:
        return None
    constants = list(program.constants)
    places = {slot: len(constants) + k for k, slot in enumerate(taken)}
    constants += [records[slot] for slot in taken]

    def replaced(kind: str, value: Any) -> Any:
        if kind == "param" and value in places:
            return {"const": places[value]}
        return {kind: value}

    return replace(
        program,
        id=f"{program.id} with {' '.join(map(str, constants))}",
        operations=tuple(o.with_operands(replaced) for o in program.operations),
        outputs=tuple(
            (slot, replaced(*next(iter(operand.items())))) for slot, operand in program.outputs
        ),
        params=tuple(slot for slot in program.params if slot not in places),
        constants=tuple(constants),
    )
