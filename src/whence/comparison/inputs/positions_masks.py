"""Reports differing position ids and masks; they are a fault only if an output depends on them.

Rotary positions count from any start, and a mask may block what was never looked at: that two
integers differ proves nothing. That the outputs then part by more than rounding does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from whence import align, judge
from whence.comparison.paired_runs import PairedRuns
from whence.display import listed
from whence.records import Call
from whence.records.slots import input_name, is_input, is_output, is_written
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
)


class PositionsAndMasks:
    """Integer inputs other than token ids (positions, masks) that differ between the runs and come
    from the caller of the target.
    """

    def __init__(self, paired: PairedRuns, error_of: Callable[[SlotPair], judge.PairError]) -> None:
        self.paired, self._error_of = paired, error_of
        self._harmless: dict[str, list[str]] = {}
        self._padded: dict[str, Call] = {}
        # By side and call: how many columns of padding were before the first token that both runs
        # have.
        self._padding_before = {
            (j.side, j.root, j.step, j.micro): j.pieces[0][2]
            for j in paired.plan.joined
            if j.pieces
        }
        self._from_caller: set[int] = set()
        produced: set[int] = set()
        for call in paired.target.calls:
            if call.parent == -1:
                self._from_caller.update(r.record for r in call.slots("input"))
            produced.update(r.record for r in call.refs if is_written(r.slot))
        self._from_caller -= produced
        self._differing: dict[tuple[int, int], SlotPair] = {}
        # pairs of roots, by step
        self._roots: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, pair in enumerate(paired.plan.pairs):
            call = paired.calls[pair.reference]
            if call.parent == -1:
                self._roots[align.step_of(call)].append(index)

    def notes(self) -> list[str]:
        """Inputs that differ and do no harm, a sentence for each tensor of each module."""

        return [
            f"{name} differs, {listed(steps, 1)}: no output but caches depends on it beyond "
            "rounding"
            for name, steps in self._harmless.items()
        ] + [
            f"{sentence}; no output but caches depends on that beyond rounding"
            for sentence in self.padded(matters=False)
        ]

    def given(self, slot: SlotPair) -> bool:
        """Is this an integer or boolean tensor that the caller of the target chose? Then no
        operator of it is at fault; it is noted.
        """
        exact = judge.unit_roundoff(self.paired.target.records[slot.target_record].dtype) == 0.0
        if not exact or slot.target_record not in self._from_caller:
            return False
        if not self.paired.measured[slot.reference_record, slot.target_record].identical:
            self.blame(slot)
        return True

    def counts_padding(self, call: Call, partner: Call, slot: SlotPair) -> bool:
        """Are these positions that the model counts from the first column, padding too, so that
        they differ by its width alone?

        Then no operator is at fault: they are noted, and what depends on them is compared given
        them.
        """
        if judge.unit_roundoff(self.paired.target.records[slot.target_record].dtype) != 0.0:
            return False
        sides = (("reference", call), ("target", partner))
        padding = [
            self._padding_before.get((side, c.root, c.step, c.micro), 0) for side, c in sides
        ]
        arrays = self.paired.arrays_of_one_shape(slot)
        if padding[0] == padding[1] or arrays is None or not arrays[0].ndim:
            return False
        a, b = (x.astype(np.int64) for x in arrays)
        if not all(
            (np.diff(x, axis=-1) == 1).all() and (x[..., 0] == n).all()
            for x, n in zip((a, b), padding, strict=True)
        ):
            return False
        sentence = (
            "the model counts positions from the first column, padding too: tokens that both "
            "runs have start from "
            f"{padding[0]} in the reference and from {padding[1]} in the target; pass position_ids "
            "that leave the padding out"
        )
        self._padded.setdefault(sentence, call)
        return True

    def padded(self, *, matters: bool) -> list[str]:
        """A sentence for each tensor of positions that count the padding. matters: those on which
        the outputs depend beyond rounding, or the others.
        """
        out = []
        for sentence, call in self._padded.items():
            error, limit = self._outputs(call)
            if matters == (error is None or error > limit):
                out.append(sentence)
        return out

    def blame(self, slot: SlotPair) -> None:
        """Add a tensor that the callers of both runs chose differently."""
        self._differing.setdefault((slot.reference_record, slot.target_record), slot)

    def harmless(self, call: Call, slot: SlotPair) -> bool:
        """Does nothing that the root of a call returns depend on this difference beyond rounding?
        Then it is noted.
        """
        error, limit = self._outputs(call)
        if error is None or error > limit:
            return False
        name = f"{call.module_name}: {input_name(slot.reference_slot)}"
        self._harmless.setdefault(name, []).append(f"step {call.step} {self._where(slot)}")
        return True

    def judged(
        self, verdicts: Mapping[tuple[int, int], Verdict], others: Collection[str]
    ) -> dict[tuple[int, int], Verdict]:
        """The verdicts, with a fault at the first call that uses such a tensor where its root's
        outputs are beyond rounding; else a note. Outputs prove nothing of it behind a fault that a
        replay or a parameter proves.

        others: roots that have other tokens, so that their outputs prove nothing.
        """
        out = dict(verdicts)
        proven = {
            align.step_of(self.paired.calls[call])
            for (call, _), verdict in verdicts.items()
            if verdict.verdict == VerdictKind.PARAM_DIFF
            or (verdict.verdict in GUILTY and verdict.evidence == Evidence.REPLAY)
        }
        for call, name, slot in self._users():
            if call.root in others or self.harmless(call, slot):
                continue
            error, limit = self._outputs(call)
            tensor = f"{input_name(name)} {self._where(slot)}"
            number = self.paired.pair_of[call.id]
            size = (
                f"the outputs differ by rel_l2 {error:.2g}, rounding explains {limit:.1g}"
                if error is not None
                else "the outputs could not be measured"
            )
            confidence = Confidence.CERTAIN if error is not None else Confidence.SUSPECT
            is_open = align.step_of(call) in proven
            out[call.id, -1 if call.leaf else 0] = Verdict(
                number,
                VerdictKind.UNDETERMINED if is_open else VerdictKind.INTRODUCED,
                stretch=-1 if call.leaf else 0,
                evidence=Evidence.TWO_DUMPS,
                confidence=Confidence.NONE if is_open else confidence,
                cause=CauseKind.INPUT,
                numbers={"e_out": error},
                slot=name,
                sentence=f"given another {tensor}; {size}",
            )
        return out

    def _users(self) -> Iterator[tuple[Call, str, SlotPair]]:
        """For each pair of tensors found the first call that works on it, a leaf where there is
        one, and its slot.
        """
        users: dict[tuple[int, int], list[tuple[Call, str]]] = defaultdict(list)
        for pair in self.paired.plan.pairs if self._differing else ():
            for slot in pair.slots:
                key = slot.reference_record, slot.target_record
                if key in self._differing and is_input(slot.reference_slot):
                    users[key].append((self.paired.calls[pair.reference], slot.reference_slot))
        for key, candidates in users.items():
            yield (
                *min(candidates, key=lambda user: (not user[0].leaf, user[0].order)),
                self._differing[key],
            )

    def _outputs(self, call: Call) -> tuple[float | None, float]:
        """(largest relative 2-norm of the root's outputs, what rounding may make of it) in the step
        of a call.

        Keys in a cache are turned by the absolute position: they differ where nothing else does.
        """
        errors = [
            self._error_of(s)
            for index in self._roots[align.step_of(call)]
            for s in self.paired.slots[index].values()
            if is_output(s.reference_slot) and not align.is_cache(s.reference_slot)
        ]
        u = max((e.u for e in errors), default=0.0)
        limit = judge.LIMITS.root_output_room(u)
        values = [e.value for e in errors if e.value is not None and np.isfinite(e.value)]
        return (max(values) if values and len(values) == len(errors) else None), limit

    def _where(self, slot: SlotPair) -> str:
        arrays = self.paired.arrays_of_one_shape(slot)
        if arrays is None:
            return f"({self.paired.measured[slot.reference_record, slot.target_record].why or 'other content'})"  # noqa: E501
        different = np.argwhere(arrays[0] != arrays[1])
        if not len(different):
            return f"({arrays[0].dtype} against {arrays[1].dtype})"
        index = tuple(int(i) for i in different[0])
        return f"(at {list(index)}: {arrays[0][index]} against {arrays[1][index]})"
