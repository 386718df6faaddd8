"""Aligns the tensors of calls that carry out the same operators: inputs in the same order, and only
parameters that can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.call_sites import match_roots
from whence.align.calls.input_order import (
    ordered_like,
    origins,
    parameters_like,
    results_like,
)
from whence.align.calls.tensor_slots import have_one_content, pair_in_order
from whence.align.derived_run import Derived
from whence.errors import ElementsMissing
from whence.records import Call, Program, Record, Run
from whence.records.slots import is_param


class ResultNames(NamedTuple):
    """The names of each side's results, by record (`results_of`)."""

    reference: Mapping[int, str]
    target: Mapping[int, str]


def facing(
    reference: Run,
    target: Run,
    pairs: Sequence[tuple[int, int]],
    names: ResultNames | None = None,
) -> tuple[Run, Run]:
    """Both runs, with the tensors of paired calls aligned. pairs: (call, partner). names: of the
    results, for two runs of one weights file; None if inputs already have the same order and each
    side may have folded weights.
    """
    is_one_file = names is not None
    if names is not None:
        reference, target = _same_result_order(reference, target, pairs, names)
        reference, target = _same_input_order(reference, target, pairs)
    calls, partners = dict[int, Call](), dict[int, Call]()
    programs: dict[str, Program] = {}
    for a, b in pairs:
        is_operator = reference.calls[a].kind == "operator" and reference.calls[a].program
        if is_operator or not is_one_file:
            call, partner = reference.calls[a], target.calls[b]
            settled = settled_parameters(reference, call, target, partner, is_one_file=is_one_file)
            calls[a], partners[b] = settled.call, settled.partner
            if settled.program is not None:
                programs[settled.program.id] = settled.program
    return _with(reference, calls, programs), _with(target, partners, {})


def with_programs(run: Run, calls: Sequence[Call], programs: Mapping[str, Program]) -> Run:
    """The run with other calls, and with programs beside its own."""
    derived = Derived(run, (), (), calls)
    if programs:
        derived.programs = {**run.programs, **programs}
    return derived


def _same_result_order(
    reference: Run, target: Run, pairs: Sequence[tuple[int, int]], names: ResultNames
) -> tuple[Run, Run]:
    """Both runs, with the outputs of joined calls in the order of their partners' outputs."""
    calls, partners = dict[int, Call](), dict[int, Call]()
    for a, b in pairs:
        call, partner = reference.calls[a], target.calls[b]
        if len(call.origins) > 1:
            calls[a] = results_like(call, partner, names.reference, names.target)
        elif len(partner.origins) > 1:
            partners[b] = results_like(partner, call, names.target, names.reference)
    return _with(reference, calls, {}), _with(target, partners, {})


def _same_input_order(
    reference: Run, target: Run, pairs: Sequence[tuple[int, int]]
) -> tuple[Run, Run]:
    """Both runs, with the inputs of joined calls in the order of their partners' inputs."""
    roots = match_roots(reference.calls, target.calls)
    labels = origins(reference, {a: number for number, (a, _) in enumerate(pairs)}, roots)
    target_labels = origins(target, {b: number for number, (_, b) in enumerate(pairs)}, {})
    calls, partners = dict[int, Call](), dict[int, Call]()
    for a, b in pairs:
        call, partner = reference.calls[a], target.calls[b]
        if len(call.origins) > 1:
            ordered = ordered_like(reference, call, target, partner, labels, target_labels)
            if len(partner.origins) > 1:
                ordered = parameters_like(reference, ordered, target, partner)
            calls[a] = ordered
        elif len(partner.origins) > 1:
            partners[b] = ordered_like(target, partner, reference, call, target_labels, labels)
    return _with(reference, calls, {}), _with(target, partners, {})


def _with(run: Run, changed: Mapping[int, Call], programs: Mapping[str, Program]) -> Run:
    calls = {k: c for k, c in changed.items() if c is not run.calls[k]}
    if not calls:
        return run
    return with_programs(run, [calls.get(c.id, c) for c in run.calls], programs)


# Parameters that were folded (a scale into a weight) cannot be compared one to one.
#
# So the reference's program keeps its own parameters as constants, and the effect of the target's
# shows in a replay on the target's inputs.

_ROUNDINGS = 6
"""Roundings, in unit roundoffs, of a weight that was scaled by a square root and a quotient."""


_MOST_INTEGERS = 64
_CONVERTED_OTHERWISE = 1e-3  # share of the elements of a copy


class Settled(NamedTuple):
    """Both calls without the parameters that have no counterpart. program: the reference's program
    with these as constants; None if it did not change.
    """

    call: Call
    partner: Call
    program: Program | None


def settled_parameters(
    reference: Run, call: Call, target: Run, partner: Call, *, is_one_file: bool
) -> Settled:
    """Two calls that carry out the same operators, with only those parameters that correspond.
    is_one_file: whether both runs use one weights file (see `facing`).
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
    # with transposed matrices, a matrix may have been paired with the next one of its shape
    shapes = {target.records[ref.record].shape for ref in partner.slots("param")}
    turned = {shape for shape in shapes if shape[::-1] != shape}
    for pair in params:
        a, b = reference.records[pair.reference_record], target.records[pair.target_record]
        if have_one_content(a, b) or _is_rounded_copy(reference, a, target, b):
            continue
        if (
            is_folded
            or _says_what_to_do(a)
            or (not is_one_file and _are_rounded_alike(reference, a, target, b))
            or (not is_one_file and a.shape == b.shape and a.shape[::-1] in turned)
        ):
            alone.add(pair.reference_slot)
            alone_target.add(pair.target_slot)
    program = reference.programs.get(call.program)
    changed = _with_constants(program, call, alone) if program is not None and alone else None
    new_call = _without(call, alone)
    if changed is not None:
        new_call = replace(new_call, program=changed.id)
    return Settled(new_call, _without(partner, alone_target), changed)


def _is_rounded_copy(reference: Run, a: Record, target: Run, b: Record) -> bool:
    """Whether one parameter is the other rounded to fewer bits, as in a converted file. A few
    elements may differ, which a converter keeps from becoming zero or infinite.
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
    """Whether this is a number or a short list of integers, such as a shape, which two graphs of
    one function may express differently.
    """
    few = record.count <= _MOST_INTEGERS and not dtypes.is_floating(record.dtype)
    return few or record.count == 1


def _are_rounded_alike(reference: Run, a: Record, target: Run, b: Record) -> bool:
    """Whether two parameters differ by no more than the rounding of a few folding operations."""
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
    """The program with these parameters as constants; None if it reads none of them."""
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
