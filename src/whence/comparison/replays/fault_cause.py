"""Decides between the causes `kernel` and `semantic` for an operator whose parameters are equal."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides, Slots, slot_in_target
from whence.comparison.replays.program_difference import (
    Parting,
    difference,
    first_parting,
    only_operator,
    other_function,
    source_line,
    written_anew,
)
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.semantics import FaultCause
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.tied_choices import Figures, settled
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program
from whence.records.marks import NoProgram, is_gathered, is_without_program
from whence.records.program import GRADIENTS
from whence.results import CauseKind


def fault_cause(
    sides: BothSides,
    call: Call,
    partner: Call,
    slots: Slots,
    flagged: Sequence[str],
    own_limit: float = 1.0,
) -> FaultCause:
    """The cause of an introduced error in a call with equal parameters. flagged: the outputs in
    question. own_limit: score up to which the target's own program explains its recorded outputs.

    The target's own program is run on its own inputs. If it gives the recorded outputs (within
    rounding), the kernel does what the code says, so the code differs (`semantic`); if not, the
    kernel is at fault. A node of a graph replaces a module by operators of its own, so an operator
    that only one side has proves nothing between a graph and a module.
    """
    is_rewritten = sides.reference.is_of_graphs != sides.target.is_of_graphs
    if not partner.program:
        # The reference could be replayed, so it drew no random numbers.
        is_random = is_without_program(partner, NoProgram.RANDOM)
        words = f"only the target {partner.no_program}" if is_random else ""
        return FaultCause(CauseKind.SEMANTIC if is_random else CauseKind.UNKNOWN, words)
    first = Parting()
    try:
        target_program, borrowed = sides.unmasked.program(partner), sides.reference.borrows(call)
        reference_program = sides.reference.program(call) if not borrowed else None
        anew = reference_program is not None and written_anew(reference_program, target_program)
        if reference_program is not None and not anew:
            first = _shared(difference(reference_program, target_program), is_rewritten)
        names = [
            slot_in_target(sides, partner, target_program, slot, pair)
            for slot in flagged
            if (pair := slots(slot)) is not None
        ]
        outputs = [s for s in names if s is not None and s in dict(target_program.outputs)] or [
            s for s, _ in target_program.outputs
        ]
        with Threads(1):
            score, wide, right = own_score(sides.unmasked, partner, outputs)
            if score > own_limit:
                if is_gathered(partner):  # its program is that of one of its pieces
                    return FaultCause(CauseKind.UNKNOWN, first.words)
                return _kernel_fault(partner, target_program)
            if reference_program is None or (anew and is_rewritten):
                parting = Parting()
            elif anew:
                parting = other_function(reference_program, target_program)
            else:
                parting = _parting(sides, call, slots, flagged, target_program, right, wide)
                parting = _shared(parting, is_rewritten)
    except (ReplayRefused, ElementsMissing, KeyError, ValueError):
        return FaultCause(CauseKind.UNKNOWN, first.words)
    return FaultCause(
        CauseKind.SEMANTIC,
        parting.after(first)
        or "the target's own operators reproduce it, so its code computes something else",
        parting.operator,
        source_line(partner, target_program, parting.place),
        parting.reason(first),
    )


def _shared(parting: Parting, is_rewritten: bool) -> Parting:
    """The first difference of two programs; nothing if only one side runs the operator and one
    program is a rewritten form of the other.
    """
    return Parting() if is_rewritten and parting.on_one_side else parting


def _kernel_fault(partner: Call, program: Program) -> FaultCause:
    """The cause if the target's own program does not give the target's recorded outputs."""
    if program.operations and program.operations[-1].name == GRADIENTS:
        return FaultCause(
            CauseKind.KERNEL,
            "the target's gradients are not the derivative of the operators that it ran: a custom "
            "autograd function, a hook, or a kernel",
        )
    operator = only_operator(program)
    named = f" ({operator})" if operator else ""
    place = next((i for i, op in enumerate(program.operations) if op.name == operator), -1)
    return FaultCause(
        CauseKind.KERNEL,
        f"the target's own operators{named}, run again on its own inputs, do not give what it "
        "recorded",
        operator,
        source_line(partner, program, place),
    )


def _parting(
    sides: BothSides,
    call: Call,
    slots: Slots,
    flagged: Sequence[str],
    target_program: Program,
    target_results: Mapping[int, Array],
    wide: str,
) -> Parting:
    """The first operator at which the reference's program, on the target's inputs, gives another
    result than the target's own program (`target_results`).
    """
    loaded = sides.reference.load(call)
    program = loaded.program
    pairs = {
        slot: pair
        for slot in (*program.inputs, *program.params)
        if (pair := slots(slot)) is not None
    }
    arrays, strides = sides.target.arrays({s: pair.target_record for s, pair in pairs.items()})
    results: dict[int, Array] = {}
    try:
        loaded.run(
            arrays,
            arrays,
            working=wide,
            strides=strides,
            outputs=list(flagged),
            trace=results.__setitem__,
        )
    except ReplayRefused:
        return Parting()
    return first_parting(
        program, target_program, results, target_results, 1e-9 if wide == "float64" else 1e-4
    )


def own_score(
    side: ReplaySource, call: Call, outputs: Sequence[str]
) -> tuple[float, str, dict[int, Array]]:
    """(score, dtype, results) of a call's own program on its own inputs.

    score: error of the recorded outputs as a multiple of the limit; above 1 the program does not
    explain them. dtype: of the wide replay. results: first result of each operation in it, by
    number of the operation. Raises ReplayRefused, ElementsMissing.
    """
    loaded = side.load(call)
    program = loaded.program
    arrays, strides = side.arrays(side.records(call, (*program.inputs, *program.params)))
    recorded, _ = side.arrays(side.records(call, outputs))
    wide = (
        "float64"
        if min(judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in recorded.values()) < 1e-5
        else "float32"
    )
    results: dict[int, Array] = {}
    exact = loaded.run(
        arrays,
        arrays,
        working=wide,
        strides=strides,
        outputs=list(recorded),
        trace=results.__setitem__,
    )
    score, errors = 0.0, dict[str, judge.ReplayError]()
    for stepwise in (False, True):
        working = loaded.run(
            arrays,
            arrays,
            working="recorded",
            strides=strides,
            outputs=list(recorded),
            stepwise=stepwise,
        )
        figures: Figures = {
            s: judge.local(output, exact[s], working[s], written_out=stepwise)
            for s, output in recorded.items()
            if exact[s].shape == output.shape
        }
        run = functools.partial(
            loaded.run, arrays, arrays, strides=strides, outputs=list(recorded), stepwise=stepwise
        )
        figures = settled(loaded, recorded, run, wide, figures)
        errors = {s: judge.less_suspect(errors.get(s, e), e) for s, e in figures.items()}
        score = max((error.score for error in errors.values()), default=0.0)
        if score <= 1:
            break
    return score, wide, results
