"""The tensors of calls that carry out the same operators, brought to face each other: inputs in one
order, and parameters that can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from whence.align.call_sites import match_roots
from whence.align.calls.folded_parameters import settled_parameters
from whence.align.calls.input_order import (
    ordered_like,
    origins,
    parameters_like,
    results_like,
)
from whence.align.derived_run import Derived
from whence.records import Call, Program, Run


class ResultNames(NamedTuple):
    """How each side calls what its calls leave, by record (`results_of`)."""

    reference: Mapping[int, str]
    target: Mapping[int, str]


def facing(
    reference: Run,
    target: Run,
    pairs: Sequence[tuple[int, int]],
    names: ResultNames | None = None,
) -> tuple[Run, Run]:
    """Both runs, with the tensors of paired calls facing each other. pairs: (call, partner).
    names: of two runs of one file of weights; None where inputs are in one order already, and
    weights may have been folded by each side.
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
    """Both runs, with what joined calls make in the order in which their partners make it."""
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
    """Both runs, with what joined calls read in the order in which their partners read it."""
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
