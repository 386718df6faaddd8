"""What a recorded program needs on the target's inputs, and what the reference gives beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.replays.both_sides import BothSides, Slots
from whence.comparison.replays.program_run import ProgramRun
from whence.comparison.replays.tied_choices import I64
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call
from whence.results import SlotPair


def own_integers(sides: BothSides, other: Call) -> list[I64]:
    """The whole numbers that the target's own program makes on its own inputs, as far as it
    runs.
    """
    from whence.replay.choices import Integers

    seen = Integers()
    with contextlib.suppress(ReplayRefused, ElementsMissing):
        loaded = sides.own.load(other)
        arrays, strides = sides.own.arrays(
            sides.own.records(other, (*loaded.program.inputs, *loaded.program.params))
        )
        loaded.run(arrays, arrays, working="recorded", strides=strides, watch=seen)
    return seen.arrays


def check_same_choices(
    sides: BothSides, call: Call, loaded: Any, faced: Mapping[str, SlotPair]
) -> None:
    """Raises ReplayRefused where integers inside a composed program are others on the target's
    inputs than on the reference's.

    Code that loops over experts or takes what a mask lets through looked at such numbers, and
    the operators that were recorded are those of the reference's.
    """
    slots = (*loaded.program.inputs, *loaded.program.params)
    mine, strides = sides.reference.arrays(sides.reference.records(call, slots))
    theirs, _ = sides.target.arrays({s: faced[s].target_record for s in slots if s in faced})
    if mine.keys() != theirs.keys():
        return
    chosen: list[dict[int, Array]] = [{}, {}]
    for given, into in zip((mine, theirs), chosen, strict=True):
        if any(given[s].shape != mine[s].shape for s in mine):
            return
        loaded.run(given, given, working="recorded", strides=strides, trace=into.__setitem__)
    for place, one in chosen[0].items():
        if one.dtype.kind in "biu" and not np.array_equal(one, chosen[1].get(place, one)):
            name = loaded.program.operations[place].name
            raise ReplayRefused(
                f"{name} chooses other elements on the target's inputs, and what the code "
                "does then was not recorded"
            )


def load(sides: BothSides, call: Call) -> Any:
    """The call's program; also one that only a call of the reference itself contradicts, for
    `examined` to decide.
    """
    try:
        return sides.reference.trusted(call)
    except ReplayRefused:
        # one that cannot be loaded; then the reason is the one above
        with contextlib.suppress(ReplayRefused):
            if (
                call.program
                and np.isfinite(score := sides.reference.confirm(call)[1])
                and score > 1
            ):
                return sides.reference.load(call)
        raise


def inside_slots(
    sides: BothSides, call: Call, inputs: Sequence[str], faced: Collection[str]
) -> set[str]:
    """The inputs that children without a partner leave: they run again too."""
    kids = sides.reference.children(call.id)
    alone = {k for k, kid in enumerate(kids) if kid not in sides.paired}
    return (
        {
            s
            for s in inputs
            if s not in faced and s[0].isdigit() and int(s.partition(":")[0]) in alone
        }
        if alone
        else set()
    )


def check_still_one(sides: BothSides, one: str, two: str, slots: Slots) -> None:
    """What a module was given and what it returned were one tensor: where the target's are not,
    which was used is unknown.
    """
    given, left = slots(one), slots(two)
    if given is None or left is None or given.target_record == left.target_record:
        return
    a, b = (sides.target.run.records[p.target_record] for p in (given, left))
    if not a.hash or a.hash != b.hash or a.shape != b.shape:
        raise ReplayRefused(f"{two} was {one} itself in the reference and is not in the target")


def is_passthrough(
    sides: BothSides,
    operand: Any,
    inputs: Sequence[str],
    faced: Mapping[str, SlotPair],
    pair: SlotPair,
) -> bool:
    """Is this output an input as it is, in the target as in the program?"""
    if "in" not in operand or inputs[operand["in"]] not in faced:
        return False
    records = sides.target.run.records
    source, made = (
        records[faced[inputs[operand["in"]]].target_record],
        records[pair.target_record],
    )
    return (
        bool(source.hash)
        and source.hash == made.hash
        and source.dtype == made.dtype
        and source.shape == made.shape
    )


def reference_outputs(
    sides: BothSides,
    call: Call,
    loaded: Any,
    faced: Mapping[str, SlotPair],
    outputs: Mapping[str, SlotPair],
    run: ProgramRun,
) -> dict[str, tuple[Array, Array | None]]:
    """(what the reference made, the wide replay on its inputs or None where they are the
    target's) by output, where known.
    """
    records = sides.reference.records(call, (*loaded.program.inputs, *loaded.program.params))
    try:
        made, _ = sides.reference.arrays(
            {slot: pair.reference_record for slot, pair in outputs.items()}
        )
        if all(sides.is_equal(pair) for pair in faced.values()):
            return {slot: (array, None) for slot, array in made.items()}
        if run.wide_dtype == "float32" and all(
            dtypes.of(a).name in ("float32", "float64") for a in made.values()
        ):
            # it was checked to reproduce its recording
            return {slot: (a, a) for slot, a in made.items()}
        arrays, strides = sides.reference.arrays(records)
        held = sides.parameters.hold(
            (
                loaded.program.id,
                "own",
                tuple(records.get(s) for s in loaded.program.params),
                run.wide_dtype,
            ),
            lambda: loaded.hold(arrays, working=run.wide_dtype),
        )
        again = loaded.run(
            arrays, held, working=run.wide_dtype, strides=strides, outputs=list(outputs)
        )
    except (ReplayRefused, ElementsMissing):
        return {}
    return {
        slot: (made[slot], again[slot]) for slot in outputs if again[slot].shape == made[slot].shape
    }
