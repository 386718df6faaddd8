"""Checks whether a finding can be reproduced: does the target's code still compute something else
if its operators run without rounding and the reference's run in the dtype of the target's inputs?

A replay measures errors in units of rounding in the dtype of the outputs. Under autocast, and in
models that mix dtypes, a call may get 16-bit inputs and return 32 bits. Then its code equals the
reference's, its error follows from the precision of its inputs, and a script that reproduces the
finding would not fail.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides, Slots, slot_in_target
from whence.comparison.replays.self_check import Threads
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program, Record
from whence.replay import allowed_operators
from whence.results import SlotPair

_ONE_FUNCTION = 1e-9  # relative, of two ways to write one formula in float64


class Reproduction(NamedTuple):
    """Whether a finding fails again in a script of its own. withdrawn: why it does not, "" if it
    does or that is not known. cast: where both programs are one function in float64, the cast that
    one of them alone makes, as words.
    """

    withdrawn: str = ""
    cast: str = ""


def reproduction(
    sides: BothSides,
    call: Call,
    partner: Call,
    slots: Slots,
    flagged: Sequence[str],
    *,
    is_own: bool,
) -> Reproduction:
    """Whether the error of a call's flagged outputs, which exceeds the rounding of the reference's
    operators, can be reproduced as a fault. is_own: whether the target's own program gives its
    recorded outputs.
    """
    program = sides.reference.run.programs.get(call.program)
    of_file = sides.target.dtype_of_file
    if program is None or sides.reference.borrows(call) or not (partner.program or of_file):
        return Reproduction()
    pairs = {
        slot: pair
        for slot in (*program.inputs, *program.params, *flagged)
        if (pair := slots(slot)) is not None
    }
    inputs = {s: p for s, p in pairs.items() if s in program.inputs}
    both = [
        (sides.reference.run.records[p.reference_record], sides.target.run.records[p.target_record])
        for p in inputs.values()
    ]
    coarser = _first_coarser(both) or of_file
    if any(slot not in pairs for slot in flagged):
        return Reproduction()
    # A target with wider inputs that casts them down computes on the reference's precision.
    known = _first_coarser([(b, a) for a, b in both])
    own_program = sides.unmasked.run.programs.get(partner.program)
    casts, own_casts = _casts(program, known), _casts(own_program, known)
    same_casts = is_own and casts == own_casts
    inputs_in = {record.dtype for pair in both for record in pair}
    cast = _one_sided(casts, own_casts, inputs_in) if is_own else ""
    if not (coarser or same_casts or cast):
        return Reproduction()
    try:
        with Threads(1):
            # A model stored in 16 bits is judged in that dtype, as its constants are rounded too.
            score = _score(sides, call, pairs, flagged, of_file) if of_file else np.inf
            is_one = False
            with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError, ValueError):
                is_one = _is_one_function(sides, call, partner, pairs, flagged)
            if is_one and coarser:
                score = min(score, _score(sides, call, pairs, flagged, coarser))
    except (ReplayRefused, ElementsMissing, KeyError, ValueError):
        return Reproduction()
    if score <= 1 and of_file and (is_one or not _are_set_otherwise(program, own_program)):
        return Reproduction(
            f"no more than the reference's operators round in {of_file}, the dtype of the file"
        )
    if score <= 1 and is_one:
        return Reproduction(
            "not reproduced: in float64 both programs are one function, and the reference's "
            f"operators round as much in {coarser}, the dtype of what the target is given"
        )
    if is_one and same_casts:
        return Reproduction(
            "in float64 both programs are one function, and neither casts what the other does not: "
            "its operators round more than the reference's"
        )
    return Reproduction(cast=cast if is_one else "")


def _one_sided(reference: Counter[str], target: Counter[str], inputs_in: set[str]) -> str:
    """The cast that one of two programs alone makes, as words; "" where both cast otherwise, or
    neither. inputs_in: the dtypes of the inputs, to which a cast goes back.
    """
    by_side = {"reference": reference - target, "target": target - reference}
    (side, more), (absent, none) = sorted(by_side.items(), key=lambda item: not item[1])
    names = sorted(more.keys() & dtypes.DTYPES.keys())
    if not names or none:
        return ""
    inside = " and ".join([name for name in names if name not in inputs_in] or names)
    return (
        f"in float64 both programs are one function, and the {side} casts to {inside} inside, the "
        f"{absent} does not"
    )


def _casts(program: Program | None, known: str) -> Counter[str]:
    """The floating dtypes, other than `known`, to which a program casts, with counts. They tell
    code that casts down, or does not cast up as the reference does, from code that only rounds in
    its own dtype.
    """
    if program is None:
        return Counter()
    asked = Counter[str]()
    for op in program.operations:
        if op.name == allowed_operators.CAST:
            asked[str(op.args[2])] += 1
        for kind, value in op.operands():
            if kind == "dtype" and dtypes.named(str(value)).is_floating:
                asked[str(value)] += 1
    del asked[known]
    return asked


def _are_set_otherwise(program: Program, other: Program | None) -> bool:
    """Whether norms that both programs contain equally often have another epsilon. Its effect may
    be as small as the rounding of 16-bit weights, but it is no rounding.
    """
    own, across = _numbers_of(program), _numbers_of(other)
    return any(
        len(own[name]) == len(across[name]) and own[name] != across[name]
        for name in own.keys() & across.keys()
    )


def _numbers_of(program: Program | None) -> dict[str, list[str]]:
    """The float arguments of each norm in a program, as sorted texts by operator name."""
    numbers: dict[str, list[str]] = {}
    for op in program.operations if program is not None else ():
        if "norm" not in op.name:
            continue
        told = [f"{np.float32(value):.6g}" for value in op.args if isinstance(value, float)]
        numbers.setdefault(op.name, []).append(" ".join(told))
    return {name: sorted(texts) for name, texts in numbers.items()}


def _first_coarser(pairs: Iterable[tuple[Record, Record]]) -> str:
    """The dtype of the second tensor in the first pair whose second is less precise; "" if none."""
    for first, second in pairs:
        digits, fewer = (dtypes.unit_roundoff(record.dtype) or 0.0 for record in (first, second))
        if fewer > digits > 0:
            return second.dtype
    return ""


def _on_targets_inputs(
    sides: BothSides, call: Call, pairs: dict[str, SlotPair], flagged: Sequence[str], working: str
) -> dict[str, Array]:
    """The flagged outputs of the reference's program on the target's inputs, in dtype `working`."""
    loaded = sides.reference.load(call)
    needed = {s for slot in flagged for s in loaded.needs(slot)}
    arrays, strides = sides.target.arrays({s: pairs[s].target_record for s in needed})
    results: dict[str, Array] = loaded.run(
        arrays, arrays, working=working, strides=strides, outputs=list(flagged)
    )
    return results


def _is_one_function(
    sides: BothSides,
    call: Call,
    partner: Call,
    pairs: dict[str, SlotPair],
    flagged: Sequence[str],
) -> bool:
    """Whether both programs give the same flagged outputs in float64."""
    if not partner.program:
        return False
    loaded = sides.unmasked.load(partner)
    names = [slot_in_target(sides, partner, loaded.program, s, pairs[s]) for s in flagged]
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return False
    slots = (*loaded.program.inputs, *loaded.program.params)
    arrays, strides = sides.unmasked.arrays(sides.unmasked.records(partner, slots))
    of_target = loaded.run(arrays, arrays, working="float64", strides=strides, outputs=known)
    of_reference = _on_targets_inputs(sides, call, pairs, flagged, "float64")
    return all(
        of_reference[slot].shape == of_target[name].shape
        and float(np.linalg.norm((of_target[name] - of_reference[slot]).ravel()))
        <= _ONE_FUNCTION * float(np.linalg.norm(of_reference[slot].ravel()))
        for slot, name in zip(flagged, known, strict=True)
    )


def _score(
    sides: BothSides,
    call: Call,
    pairs: dict[str, SlotPair],
    flagged: Sequence[str],
    working: str,
) -> float:
    """The error of the target's outputs, as a multiple of the limit, if the reference's operators
    round in dtype `working`. The outputs are rounded to that dtype first.
    """
    recorded, _ = sides.target.arrays({s: pairs[s].target_record for s in flagged})
    wide = _on_targets_inputs(sides, call, pairs, flagged, "float64")
    rounded = _on_targets_inputs(sides, call, pairs, flagged, working)
    errors = [
        judge.local(judge.rounded(recorded[s], working), wide[s], rounded[s]) for s in flagged
    ]
    if sides.target.dtype_of_file == working and not any(e.mismatch for e in errors):
        # Weights were rounded once, some after norms were folded in, and are used many times.
        # This error follows rows and channels and adds up as over several operators.
        limits = judge.LIMITS
        return max(max(e.rho / limits.whole, e.z / limits.whole_z) for e in errors)
    return max(error.score for error in errors)
