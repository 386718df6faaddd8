"""Inputs of the roots: are they the same in both runs?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from whence import align, judge
from whence.comparison.inputs.differing_masks import differing_mask
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call, Record
from whence.records.marks import Mark, has_mark
from whence.records.slots import input_name, is_input, is_output
from whence.records.training import OPTIMIZER
from whence.results import CallPair, Confidence, Evidence, Parted, SlotPair, Verdict, VerdictKind


class RootInputs:
    """Root inputs that differ. notes: what explains some of them."""

    def __init__(
        self,
        paired: PairedRuns,
        otherwise: PositionsAndMasks,
        error_of: Callable[[SlotPair], judge.PairError],
    ) -> None:
        self.paired, self._otherwise, self._error_of = paired, otherwise, error_of
        self.notes: list[str] = []
        # roots that were given something else than positions or masks
        self.differ: set[str] = set()

    def sentences(self) -> list[str]:
        """Root inputs that differ without an explanation, a sentence each. Tokens that each
        run chose are explained by what parted before: a note each.
        """
        sentences: list[str] = []
        parted: set[tuple[str, int]] = set()
        for pair, slot in self._root_inputs():
            call = self.paired.calls[pair.reference]
            if any(root == call.root and step < call.step for root, step in parted):
                continue
            if self._is_unknown(call, slot):
                # else an input of the first call; the count of what is incomparable says so
                if not has_mark(call, Mark.PUT_TOGETHER):
                    self.notes.append(
                        f"{self._input_sentence(call, slot)}: not known whether both runs "
                        "were given the same"
                    )
                continue
            dtype = self.paired.reference.records[slot.reference_record].dtype
            told_apart = align.is_told_apart(slot.reference_slot, dtype)
            if told_apart and self._otherwise.harmless(call, slot):
                continue
            sentence = self._input_sentence(call, slot)
            why = self._token_flip(pair, slot) if call.step > 0 else ""
            if why:
                parted.add((call.root, call.step - 1))
                self.notes.append(why)
                continue
            sentences.append(sentence)
            if told_apart and align.is_position_or_mask(slot.reference_slot):
                self._otherwise.blame(slot)
            elif not told_apart:
                self.differ.add(call.root)
        return sentences + [
            text for parted in self.paired.plan.parted if (text := self._parted(parted))
        ]

    def _root_inputs(self) -> Iterator[tuple[CallPair, SlotPair]]:
        """Inputs of roots that come from the caller and are not equal within rounding."""
        # What a follower is given was computed by the program.
        followers = align.followers(self.paired.calls)
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots):
            call = self.paired.calls[pair.reference]
            if call.parent != -1 or call.id in followers:
                continue
            for slot in slots.values():
                is_produced = slot.reference_record in self.paired.written
                if not is_input(slot.reference_slot) or is_produced:
                    continue
                a, b = self._records(slot)
                error = self._error_of(slot)
                limit = max(2 * judge.roundoff(a, b), judge.LIMITS.spread * error.spread)
                is_equal = error.exact or (error.value is not None and error.value <= limit)
                if not is_equal:
                    yield pair, slot

    def _records(self, slot: SlotPair) -> tuple[Record, Record]:
        return (
            self.paired.reference.records[slot.reference_record],
            self.paired.target.records[slot.target_record],
        )

    def doubted(
        self, verdicts: Mapping[tuple[int, int], Verdict]
    ) -> dict[tuple[int, int], Verdict]:
        """The verdicts, with those of statistics, of partial prints and of steps whose gradients no
        measured tensor leads to reduced to a suspicion where the root inputs differ.

        Such figures move as far as their tensors do, not less as under rounding.
        """
        out = dict(verdicts)
        for key, verdict in verdicts.items():
            pair = self.paired.plan.pairs[verdict.pair]
            if (
                verdict.verdict != VerdictKind.INTRODUCED
                or verdict.confidence != Confidence.LIKELY
                or verdict.evidence not in (Evidence.TWO_DUMPS, Evidence.STATISTICS)
            ):
                continue
            if self.paired.calls[pair.reference].root in self.differ and self._moved_along(verdict):
                out[key] = verdict.replace(
                    confidence=Confidence.SUSPECT,
                    sentence=f"{verdict.sentence}; the root inputs differ",
                )
        return out

    def _moved_along(self, verdict: Verdict) -> bool:
        e_in, e_out = (verdict.numbers.get(key) or 0.0 for key in ("e_in", "e_out"))
        if verdict.evidence == Evidence.STATISTICS or 0 < e_out <= judge.LIMITS.growth * e_in:
            return True
        pair = self.paired.plan.pairs[verdict.pair]
        if not e_in and self.paired.calls[pair.reference].phase == OPTIMIZER:
            return True  # gradients that nothing measured leads to
        return any(self.paired.partly(slot) for slot in self.paired.slots[verdict.pair].values())

    def _is_unknown(self, call: Call, slot: SlotPair) -> bool:
        """Can it not be told whether both runs were given the same: one dtype and shape, without
        elements and without digests that differ?
        """
        a, b = self._records(slot)
        if self._error_of(slot).value is not None or a.shape != b.shape:
            return False
        measured = self.paired.measured[slot.reference_record, slot.target_record]
        return has_mark(call, Mark.PUT_TOGETHER) or (
            measured.tier == "none"
            and a.dtype == b.dtype
            and not (a.hash and b.hash and a.hash != b.hash)
        )

    def _parted(self, parted: Parted) -> str:
        """A sentence about a sequence that continues with other tokens; "" where each run
        goes on as it chose, which is noted.
        """
        where = f"{parted.root} step {parted.step}" + (
            f" row {parted.micro}" if parted.micro else ""
        )
        if parted.before:
            tokens_shown = ", ".join(map(str, parted.before[:4])) + (
                ", ..." if len(parted.before) > 4 else ""
            )
            finding = (
                f"{len(parted.before)} tokens ahead of it in the target that the reference "
                f"has not: {tokens_shown}"
            )
            return f"{where}: {finding}; no mask says that they are padding"
        if parted.reference is None or parted.target is None:
            return (
                f"{where}: only {parted.tokens} of {parted.of} tokens of the reference are in "
                "the target"
            )
        tokens = f"token {parted.tokens}: {parted.reference} against {parted.target}"
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots):
            call = self.paired.calls[pair.reference]
            place = call.parent, call.root, call.step, call.micro
            if place != (-1, parted.root, parted.step, parted.micro):
                continue
            for choices in filter(None, (self._choices(slot, 1) for slot in slots.values())):
                if [int(c[-1, -1]) for c in choices.tokens] == [parted.reference, parted.target]:
                    self.notes.append(f"{where}: {tokens}, as each run chose: inherited")
                    return ""
        return f"{where}: {tokens}; compared up to there"

    def _input_sentence(self, call: Call, slot: SlotPair) -> str:
        name = input_name(slot.reference_slot)
        where = f"{call.root} step {call.step}: {name}"
        arrays = self.paired.arrays_of_one_shape(slot)
        if arrays is None:
            return (
                f"{where} "
                f"({self.paired.measured[slot.reference_record, slot.target_record].why or 'different content'})"  # noqa: E501
            )
        different = np.argwhere(arrays[0] != arrays[1])
        if different.size == 0 and arrays[0].ndim:
            return f"{where} ({arrays[0].dtype} against {arrays[1].dtype})"
        index = tuple(int(i) for i in different[0]) if arrays[0].ndim else ()
        words = differing_mask(name, arrays)
        return (
            f"{where} at {list(index)}: {arrays[0][index]} against {arrays[1][index]} "
            f"({len(different)} of {arrays[0].size} differ){f': {words}' if words else ''}"
        )

    def _token_flip(self, pair: CallPair, slot: SlotPair) -> str:
        """Tokens that differ because each run was given those that it chose a step before: a
        sentence; "" when that does not explain them.
        """
        call = self.paired.calls[pair.reference]
        tokens_in = self.paired.arrays_of_one_shape(slot)
        if tokens_in is None or tokens_in[0].dtype.kind not in "iu":
            return ""
        earlier = -1, call.root, call.step - 1, call.rank
        for before, slots in zip(self.paired.plan.pairs, self.paired.slots):
            maker = self.paired.calls[before.reference]
            if (maker.parent, maker.root, maker.step, maker.rank) != earlier:
                continue
            rows = tokens_in[0].shape[0] if tokens_in[0].ndim > 1 else 1
            choices = filter(None, (self._choices(s, rows) for s in slots.values()))
            if tokens_in[0].ndim and any(each.explain(tokens_in) for each in choices):
                a, b = (int(side[tokens_in[0] != tokens_in[1]][0]) for side in tokens_in)
                return (
                    f"step {call.step - 1}: token {a} against {b}: each run was given what it "
                    "chose: inherited"
                )
            return ""
        return ""

    def _choices(self, slot: SlotPair, rows: int) -> Choices | None:
        """What both runs chose in an output for each of `rows`; None for any other tensor."""
        arrays = self.paired.arrays(slot) if is_output(slot.reference_slot) else None
        if arrays is None or arrays[0].dtype.kind == "b" or not all(a.size for a in arrays):
            return None
        are_tokens = all(array.dtype.kind in "iu" for array in arrays)
        if not are_tokens:
            if arrays[0].ndim < 2 or arrays[0].shape != arrays[1].shape:
                return None
            arrays = arrays[0].argmax(-1), arrays[1].argmax(-1)
        if any(array.size % rows for array in arrays):
            return None
        return Choices(
            (arrays[0].reshape(rows, -1), arrays[1].reshape(rows, -1)), 0 if are_tokens else 1
        )


class Choices(NamedTuple):
    """The tokens that each run returned, or those of its best scores: (rows, places). ahead: how
    many places after its scores a token stands.
    """

    tokens: tuple[Array, Array]
    ahead: int

    def explain(self, tokens_in: tuple[Array, Array]) -> bool:
        """Whether every token that differs is the one that its own run chose for that row: the last
        of a row, or at its place of it.
        """
        # Scores of other places than the tokens' say nothing but by their last.
        aligned = not self.ahead or self.tokens[0].shape[1] == tokens_in[0].shape[-1]
        for index in np.argwhere(tokens_in[0] != tokens_in[1]):
            row, place = int(index[0]) if tokens_in[0].ndim > 1 else 0, int(index[-1]) - self.ahead
            for side, own in zip(tokens_in, self.tokens, strict=True):
                has_place = aligned and 0 <= place < own.shape[1]
                at_place = own[row, place] if has_place else own[row, -1]
                if side[tuple(index)] not in (own[row, -1], at_place):
                    return False
        return True
