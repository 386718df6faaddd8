"""Why an operator whose parameters are equal is at fault: its kernel, or its code."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides, Slots
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
from whence.results import CauseKind


def fault_cause(
    sides: BothSides, call: Call, other: Call, slots: Slots, flagged: Sequence[str]
) -> FaultCause:
    """The cause of an introduced error whose parameters are equal. flagged: the outputs in
    question.

    The target's own program on its own inputs: where it gives what the target recorded (within
    rounding), the kernel does what the code says, so the code differs (`semantic`); where it
    does not, the kernel is at fault.
    """
    if not other.program:
        # The reference could be replayed, so it drew none.
        random = other.no_program.startswith("draws random numbers")
        return (
            FaultCause(CauseKind.SEMANTIC, f"only the target {other.no_program}")
            if random
            else FaultCause()
        )
    words = ""
    try:
        theirs, borrowed = sides.unmasked.program(other), sides.reference.borrows(call)
        mine = sides.reference.program(call) if not borrowed else None
        anew = mine is not None and written_anew(mine, theirs)
        words = difference(mine, theirs) if mine is not None and not anew else ""
        outputs = [pair.target_slot for slot in flagged if (pair := slots(slot)) is not None]
        outputs = [s for s in outputs if s in dict(theirs.outputs)] or [
            s for s, _ in theirs.outputs
        ]
        with Threads(1):
            score, wide, right = own_score(sides.unmasked, other, outputs)
            if score > 1:
                alone = only_operator(theirs)
                what = (
                    f"the target's own operators ({alone})"
                    if alone
                    else "the target's own operators"
                )
                source = source_line(
                    other,
                    theirs,
                    next((i for i, op in enumerate(theirs.operations) if op.name == alone), -1),
                )
                return FaultCause(
                    CauseKind.KERNEL,
                    f"{what}, run again on its own inputs, do not give what it recorded",
                    alone,
                    source,
                )
            if mine is None:
                parting = Parting()
            elif anew:
                parting = other_function(mine, theirs)
            else:
                parting = _parting(sides, call, slots, flagged, theirs, right, wide)
    except (ReplayRefused, ElementsMissing, KeyError, ValueError):
        return FaultCause(CauseKind.UNKNOWN, words)
    because = "; ".join(w for w in (words, parting.words) if w)
    return FaultCause(
        CauseKind.SEMANTIC,
        because or "the target's own operators reproduce it, so its code computes something else",
        parting.operator,
        source_line(other, theirs, parting.place),
    )


def _parting(
    sides: BothSides,
    call: Call,
    slots: Slots,
    flagged: Sequence[str],
    theirs: Program,
    right: Mapping[int, Array],
    wide: str,
) -> Parting:
    """Where the reference's program, on the target's inputs, first gives something else than
    the target's own (`right`).
    """
    loaded = sides.reference.load(call)
    mine = loaded.program
    faced = {
        slot: pair for slot in (*mine.inputs, *mine.params) if (pair := slots(slot)) is not None
    }
    arrays, strides = sides.target.arrays({s: pair.target_record for s, pair in faced.items()})
    left: dict[int, Array] = {}
    try:
        loaded.run(
            arrays,
            arrays,
            working=wide,
            strides=strides,
            outputs=list(flagged),
            trace=left.__setitem__,
        )
    except ReplayRefused:
        return Parting()
    return first_parting(mine, theirs, left, right, 1e-9 if wide == "float64" else 1e-4)


def own_score(
    side: ReplaySource, call: Call, outputs: Sequence[str]
) -> tuple[float, str, dict[int, Array]]:
    """How far what a call recorded is from its own program on its own inputs, over the limit; above
    1 it is not what the program says.

    Also the dtype of the wide replay and what that computed, by operation. Raises ReplayRefused,
    ElementsMissing.
    """
    loaded = side.load(call)
    program = loaded.program
    arrays, strides = side.arrays(side.records(call, (*program.inputs, *program.params)))
    made, _ = side.arrays(side.records(call, outputs))
    wide = (
        "float64"
        if min(judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in made.values()) < 1e-5
        else "float32"
    )
    right: dict[int, Array] = {}
    r = loaded.run(
        arrays, arrays, working=wide, strides=strides, outputs=list(made), trace=right.__setitem__
    )
    score = 0.0
    for stepwise in (False, True):
        w = loaded.run(
            arrays,
            arrays,
            working="recorded",
            strides=strides,
            outputs=list(made),
            stepwise=stepwise,
        )
        figures: Figures = {
            s: judge.local(y, r[s], w[s], written_out=stepwise)
            for s, y in made.items()
            if r[s].shape == y.shape
        }
        run = functools.partial(
            loaded.run, arrays, arrays, strides=strides, outputs=list(made), stepwise=stepwise
        )
        figures = settled(loaded, made, run, wide, figures)
        found = max((local.score for local in figures.values()), default=0.0)
        score = min(score, found) if stepwise else found
        if score <= 1:
            break
    return score, wide, right
