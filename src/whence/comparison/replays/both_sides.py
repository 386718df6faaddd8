"""Both runs of a comparison as sources of replays: which tensors are paired, and what a program of
the reference needs in order to run on the target's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.program_run import ParameterCache
from whence.comparison.replays.seen_choices import I64
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program, Record
from whence.records.slots import is_of_child, is_param, split_child
from whence.results import SlotPair

Slots = Callable[[str], SlotPair | None]
"""The pair of tensors in a slot of a program; None where the target has none."""


@dataclass(frozen=True, slots=True)
class BothSides:
    """The reference and the target as sources of replays, with their pairs of tensors.

    unmasked: the target as it ran, with masks in its own form. paired: ids of calls of the
    reference with a partner. inner: (target's call, unpaired call of the reference inside it, slot
    of a parameter) -> the pair of that parameter. pair_of: (paired call, slot) -> the pair of
    tensors. spread: record of the reference -> how much each element differs between runs of the
    reference (`RepeatedRuns.elementwise`).
    """

    reference: ReplaySource
    target: ReplaySource
    unmasked: ReplaySource
    parameters: ParameterCache
    paired: Collection[int]
    inner: Callable[[Call, Call, str], SlotPair | None] | None
    pair_of: Callable[[Call, str], SlotPair | None]
    spread: Callable[[int], Array | None]

    def is_equal(self, pair: SlotPair) -> bool:
        """Whether both tensors are known to be bitwise equal."""
        if pair.target_record < 0:
            return False
        return _is_same_tensor(
            self.reference.run.records[pair.reference_record],
            self.target.run.records[pair.target_record],
        )

    def is_print(self, pair: SlotPair) -> bool:
        """Whether one of the two tensors was printed to fewer digits than its dtype holds."""
        a = self.reference.run.records[pair.reference_record]
        b = self.target.run.records[pair.target_record]
        return judge.roundoff(a, b) > judge.coarser(a.dtype, b.dtype)

    def working_dtypes(
        self,
        inputs: Mapping[str, SlotPair],
        outputs: Mapping[str, SlotPair],
        produced: Mapping[str, Array],
    ) -> tuple[str, str]:
        """(dtype of the wide replay, dtype of the working replay) for the target's outputs
        (`produced`); "recorded" if the runs store the same dtypes.
        """
        names = [dtypes.of(array).name for array in produced.values()]
        floating = [n for n in names if dtypes.named(n).is_floating]
        target = max(floating, key=judge.unit_roundoff, default="float32")
        finest = min(
            (judge.unit_roundoff(n) for n in floating), default=judge.unit_roundoff("float32")
        )
        pairs = [p for s, p in inputs.items() if not is_param(s)] + list(outputs.values())
        recorded = {self.reference.run.records[p.reference_record].dtype for p in pairs}
        produced_in = {self.target.run.records[p.target_record].dtype for p in pairs}
        return (
            "float64" if finest < 1e-5 else "float32",
            "recorded" if recorded == produced_in else target,
        )


def own_integers(sides: BothSides, partner: Call) -> list[I64]:
    """The integer tensors that the target's own program computes on its own inputs, up to the first
    operator that cannot be run.
    """
    from whence.replay.choices import Integers

    integers = Integers()
    with contextlib.suppress(ReplayRefused, ElementsMissing):
        loaded = sides.unmasked.load(partner)
        arrays, strides = sides.unmasked.arrays(
            sides.unmasked.records(partner, (*loaded.program.inputs, *loaded.program.params))
        )
        loaded.run(arrays, arrays, working="recorded", strides=strides, watch=integers)
    return integers.arrays


def check_same_choices(
    sides: BothSides, call: Call, loaded: Any, pairs: Mapping[str, SlotPair]
) -> None:
    """Raises ReplayRefused if integers that a composed program computes differ between the target's
    inputs and the reference's.

    Code that loops over experts or selects by a mask depends on such integers: with others it runs
    other operators than those recorded in the reference.
    """
    slots = (*loaded.program.inputs, *loaded.program.params)
    reference, strides = sides.reference.arrays(sides.reference.records(call, slots))
    target, _ = sides.target.arrays({s: pairs[s].target_record for s in slots if s in pairs})
    if reference.keys() != target.keys():
        return
    if any(target[s].shape != reference[s].shape for s in reference):
        return
    traces: list[dict[int, Array]] = [{}, {}]
    for arrays, trace in zip((reference, target), traces, strict=True):
        loaded.run(arrays, arrays, working="recorded", strides=strides, trace=trace.__setitem__)
    for place, array in traces[0].items():
        if array.dtype.kind in "biu" and not np.array_equal(array, traces[1].get(place, array)):
            name = loaded.program.operations[place].name
            raise ReplayRefused(
                f"{name} chooses other elements on the target's inputs, and what the code "
                "does then was not recorded"
            )


def load(sides: BothSides, call: Call) -> Any:
    """The call's program, ready to run. A program that does not reproduce the reference's own
    recording is returned too: `Replayer.examined` decides about it. Raises ReplayRefused.
    """
    try:
        return sides.reference.trusted(call)
    except ReplayRefused:
        # if the program cannot be loaded either, the first reason is raised
        with contextlib.suppress(ReplayRefused):
            if (
                call.program
                and np.isfinite(score := sides.reference.confirm(call)[1])
                and score > 1
            ):
                return sides.reference.load(call)
        raise


def inside_slots(
    sides: BothSides, call: Call, inputs: Sequence[str], pairs: Collection[str]
) -> set[str]:
    """The inputs of a call's program that come from unpaired children, which are replayed too."""
    unpaired = [s for s in inputs if s not in pairs and is_of_child(s)]
    if not unpaired:
        return set()
    kids = sides.reference.children(call.id)
    run_again = {k for k, kid in enumerate(kids) if kid not in sides.paired}
    return {s for s in unpaired if split_child(s)[0] in run_again}


def check_still_one(sides: BothSides, first: str, second: str, slots: Slots) -> None:
    """Raises ReplayRefused if two slots hold one tensor in the reference and two different ones in
    the target, since it is not known which of them is used.
    """
    pairs = [pair for slot in (first, second) if (pair := slots(slot)) is not None]
    if len(pairs) < 2 or pairs[0].target_record == pairs[1].target_record:
        return
    a, b = (sides.target.run.records[p.target_record] for p in pairs)
    if not a.hash or a.hash != b.hash or a.shape != b.shape:
        raise ReplayRefused(
            f"{first} and {second} are one tensor in the reference and two in the target"
        )


def is_passthrough(
    sides: BothSides,
    operand: Any,
    inputs: Sequence[str],
    pairs: Mapping[str, SlotPair],
    pair: SlotPair,
) -> bool:
    """Whether this output is an unchanged input, both in the program and in the target."""
    if "in" not in operand or inputs[operand["in"]] not in pairs:
        return False
    records = sides.target.run.records
    return _is_same_tensor(
        records[pairs[inputs[operand["in"]]].target_record], records[pair.target_record]
    )


def reference_outputs(
    sides: BothSides,
    call: Call,
    loaded: Any,
    pairs: Mapping[str, SlotPair],
    outputs: Mapping[str, SlotPair],
    wide: str,
) -> dict[str, tuple[Array, Array | None]]:
    """By slot, (output of the reference, the wide replay on the reference's inputs). The latter is
    None if both runs have equal inputs. Empty if the replay is refused. wide: dtype of that replay.
    """
    records = sides.reference.records(call, (*loaded.program.inputs, *loaded.program.params))
    try:
        recorded, _ = sides.reference.arrays(
            {slot: pair.reference_record for slot, pair in outputs.items()}
        )
        if all(sides.is_equal(pair) for pair in pairs.values()):
            return {slot: (array, None) for slot, array in recorded.items()}
        if wide == "float32" and all(
            dtypes.of(a).name in ("float32", "float64") for a in recorded.values()
        ):
            # the program is known to reproduce its recording, so no replay is needed
            return {slot: (a, a) for slot, a in recorded.items()}
        arrays, strides = sides.reference.arrays(records)
        param_records = tuple(records.get(s) for s in loaded.program.params)
        params = sides.parameters.hold(
            (loaded.program.id, "own", param_records, wide),
            lambda: loaded.hold(arrays, working=wide),
        )
        replayed = loaded.run(arrays, params, working=wide, strides=strides, outputs=list(outputs))
    except (ReplayRefused, ElementsMissing):
        return {}
    return {
        slot: (recorded[slot], replayed[slot])
        for slot in outputs
        if replayed[slot].shape == recorded[slot].shape
    }


def slot_in_target(
    sides: BothSides, partner: Call, program: Program, slot: str, pair: SlotPair
) -> str | None:
    """The slot of the target's program for a slot of the reference's; None if there is no such
    tensor. For a slot of a child, `pair` holds the child's own slot only, and the child may have
    another number in the target.
    """
    if not is_of_child(slot):
        return pair.target_slot
    candidates = [
        name
        for name in dict.fromkeys((*program.inputs, *(s for s, _ in program.outputs)))
        if is_of_child(name)
        and split_child(name)[1] == pair.target_slot
        and sides.unmasked.record(partner, name) == pair.target_record
    ]
    if slot in candidates:
        return slot
    return candidates[0] if len(candidates) == 1 else None


def _is_same_tensor(a: Record, b: Record) -> bool:
    """Whether both records are known to be bitwise equal."""
    return bool(a.hash) and a.hash == b.hash and a.dtype == b.dtype and a.shape == b.shape
