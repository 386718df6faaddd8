"""One run of a stretch of the reference on the target's inputs, with tensors or calls of the target
in the place of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.paired_runs import PairedCall
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.wired import WiredReplay
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call, Ref
from whence.records.slots import is_written
from whence.results import SlotPair, Verdict, VerdictKind

_CLEARLY = 4.0  # a clearly larger score, as a multiple of the score of right results
_TELLS = 0.5  # least score, as a share of the limit, that is told from rounding
WELL_WITHIN = 0.28  # share of the limit: right results reach 0.25, half of a fold in 16 bits 0.32


@dataclass(slots=True)
class Stretch:
    """A paired call and all that it calls, run on the target's inputs.

    replaced: ids of calls inside that run with the target's program and parameters.
    end: the call inside whose inputs the stretch ends with, -1 for the end of the call.
    left: the pairs of tensors that the stretch leaves, by record of the reference: its outputs, and
    buffers that it or a call inside it wrote in place.
    plain: these tensors as replayed in wide arithmetic; copies: as replayed in the target's dtypes,
    first without and then with noise.
    computed, copies_computed: the same for the suspects' tensors inside the stretch.
    score: error of the target's results as a multiple of the limit; inf until it is known.
    """

    pair: PairedCall
    left: dict[int, SlotPair]
    replaced: frozenset[int] = frozenset()
    end: int = -1
    plain: dict[int, Array] = field(default_factory=dict)
    copies: list[dict[int, Array]] = field(default_factory=list)
    computed: dict[int, Array] = field(default_factory=dict)
    copies_computed: list[dict[int, Array]] = field(default_factory=list)
    score: float = math.inf

    @property
    def is_clean(self) -> bool:
        """Whether the target's results at the end of the stretch are right."""
        return self.score <= 1

    @property
    def can_acquit(self) -> bool:
        """Whether the results are well within the limit, as rounding alone leaves them. A fault
        that the rest of the stretch nearly drowns comes close to the limit.
        """
        return self.score <= WELL_WITHIN


class Outcome(enum.Enum):
    """What the replay of one stretch shows about a suspect inside it."""

    TAKEN_BACK = "taken back"
    IN_PLACE = "agrees in place"
    TRAVELS = "travels"
    NO_EFFECT = "no effect"
    UNKNOWN = "cannot be run"


def acquitted(
    verdict: Verdict, kind: VerdictKind, outcome: Outcome, stretch: Stretch, change: str = ""
) -> Verdict:
    """The verdict of a suspect that a stretch acquits, as `kind`. change: the suspect's difference
    in words.
    """
    call = stretch.pair.call
    around = call.module_name or "the model"
    words = {
        Outcome.TAKEN_BACK: f"another form: {change}, and is taken back before the end of {around}",
        Outcome.IN_PLACE: f"another form: the reference makes the same here within {around}",
        Outcome.NO_EFFECT: f"inside {around}, whose results are right on its inputs",
    }[outcome]
    return verdict.withdrawn(kind, f"{words}; {verdict.sentence}")


class StretchReplay(WiredReplay):
    """One run of a stretch of the reference. patches: by record, tensors that replace the computed
    ones. computed: the tensors that the run computed for the `watched` records. replaced: by call
    of the reference, the target's call (and pairs of slots) whose program and parameters it uses.
    """

    def __init__(
        self,
        sides: BothSides,
        *args: Any,
        patches: Mapping[int, Array],
        watched: frozenset[int],
        replaced: Mapping[int, tuple[Call, Mapping[str, SlotPair]]],
        **options: Any,
    ) -> None:
        super().__init__(sides.reference, *args, **options)
        self._sides, self._target, self._replaced = sides, sides.unmasked, replaced
        self._start: int | None = None
        self._patches, self._watched = patches, watched
        self.computed: dict[int, Array] = {}

    def run(self, call: Call, given_tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As `TreeReplay.run`. Raises ReplayRefused, ElementsMissing."""
        self._start = call.order if self._start is None else self._start
        if call.id not in self._replaced or self.side.is_of_operators(call):
            return super().run(call, given_tensors)
        partner, slots = self._replaced[call.id]
        run = self._target
        if len(run.children(partner.id)) != len(self.side.children(call.id)):
            # The target's call has other children, so its recorded outputs are used.
            left = {s: pair.target_record for s, pair in slots.items() if is_written(s)}
            return self.passing(call, run.arrays(left)[0])
        loaded, program = run.trusted(partner), run.program(partner)
        names = {pair.target_slot: slot for slot, pair in slots.items()}
        handed = self.passing(call, given_tensors)
        inputs = {slot: handed[names[slot]] for slot in program.inputs if names.get(slot) in handed}
        alone = run.records(partner, (s for s in program.inputs if s not in names))
        held = {s: n for s, n in alone.items() if n not in run.first_made}
        inputs |= run.arrays(held)[0]
        own, _ = run.arrays(run.records(partner, program.params))
        inside = (
            s for k, kid in enumerate(self.side.children(call.id)) for s in self.leaves(k, kid)
        )
        results: dict[str, Array] = loaded.run(
            inputs,
            loaded.hold(own, working=self.working),
            working=self.working,
            outputs=loaded.determined({*inputs, *program.params, *inside}),
            child=lambda k, tensors: self.child(call, k, tensors),
            convert=False,
            lenient=True,
        )
        return self.passing(
            call, {names[slot]: array for slot, array in results.items() if slot in names}
        )

    def outside(self, call: Call, ref: Ref) -> Array | None:
        """As `WiredReplay.outside`. Tensors made before the stretch come from the target; constants
        are used if they are equal in both runs.
        """
        made, pair = self.side.first_made.get(ref.record), self._sides.pair_of(call, ref.slot)
        if made is None:
            is_same = pair is None or self._sides.is_equal(pair)
            return super().outside(call, ref) if is_same else None
        if pair is None or self._start is None or made >= self._start:
            return None
        return self._sides.target.run.array(pair.target_record)

    def held(self, call: Call, slots: Sequence[str]) -> dict[str, Array]:
        """As `WiredReplay.held`."""
        of_reference = super().held(call, slots)
        if call.id not in self._replaced:
            return of_reference
        _, pairs = self._replaced[call.id]
        of_target = {s: self._target.run.array(pairs[s].target_record) for s in slots if s in pairs}
        return of_reference | of_target

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        records = call.by_slot
        passed = dict(arrays)
        for slot, array in arrays.items():
            record = records.get(slot, -1)
            if record in self._watched:
                self.computed.setdefault(record, array)
            patch = self._patches.get(record)
            if patch is not None and patch.shape == array.shape:
                passed[slot] = patch
        return passed


def is_told(score: float, right: float) -> bool:
    """Whether a result is so much farther off than right results that the target would show it.
    Both are scores, as multiples of the limit.
    """
    return score > max(_TELLS, _CLEARLY * right)


def moved_to(
    result: Array, plain: Array, copies: Sequence[Mapping[int, Array]], record: int
) -> list[Array]:
    """The noisy copies of a tensor, shifted by `result - plain`, so that they spread around
    `result`. Raises ReplayRefused if shapes differ.
    """
    arrays = [copy[record] for copy in copies]
    if any(a.shape != result.shape for a in (plain, *arrays)):
        raise ReplayRefused("its shape follows what is computed inside")
    if result is plain or not dtypes.of(result).is_floating:
        return arrays
    moved = result.astype(np.float64) - plain.astype(np.float64)
    return [a.astype(np.float64) + moved for a in arrays]
