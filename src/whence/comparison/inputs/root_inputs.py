"""Inputs of the roots: are they the same in both runs?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from whence import align, judge
from whence.comparison.inputs.differing_masks import differing_mask
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call, Record
from whence.records.marks import Mark, has_mark
from whence.records.slots import input_name, is_input, is_output
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
        """Root inputs that differ without an explanation, a sentence each. Tokens that parted
        within noise are explained by it: a note each.
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
        """The verdicts, with those of statistics and partial prints reduced to a suspicion where
        the root inputs differ.

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
        """A sentence about a sequence that continues with other tokens; "" where the scores before
        were a near tie, which is noted.
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
            if (call.parent, call.root, call.step, call.micro) != (
                -1,
                parted.root,
                parted.step,
                parted.micro,
            ):
                continue
            tie = _tie(
                parted.reference,
                parted.target,
                (self.paired.arrays(s) for s in slots.values() if is_output(s.reference_slot)),
            )
            if tie:
                gap, noise = tie
                self.notes.append(
                    f"{where}: {tokens}; the scores part them by {gap:.3g}, within their own "
                    f"difference {noise:.3g}: inherited"
                )
                return ""
        return f"{where}: {tokens}; compared up to there"

    def _input_sentence(self, call: Call, slot: SlotPair) -> str:
        name = input_name(slot.reference_slot)
        where = f"{call.root} step {call.step}: {name}"
        arrays = self.paired.arrays(slot)
        if arrays is None or arrays[0].shape != arrays[1].shape:
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
        """Tokens that differ because the scores of the step before were a near tie: a sentence; ""
        when that does not explain them.
        """
        call = self.paired.calls[pair.reference]
        arrays = self.paired.arrays(slot)
        if (
            arrays is None
            or arrays[0].shape != arrays[1].shape
            or arrays[0].dtype.kind not in "iu"
            or arrays[0].ndim == 0
        ):
            return ""
        previous = next(
            (
                slots
                for p, slots in zip(self.paired.plan.pairs, self.paired.slots)
                if self._precedes(p, call)
            ),
            None,
        )
        for score in (previous or {}).values():
            if not is_output(score.reference_slot):
                continue
            scores = self.paired.arrays(score)
            if scores is not None and _are_returned(arrays, scores):
                return (
                    f"step {call.step}: {input_name(slot.reference_slot)} differs, and each run "
                    f"was given the tokens that it returned at step {call.step - 1}: inherited"
                )
            if (
                scores is None
                or scores[0].ndim < 2
                or scores[0].dtype.kind in "iub"
                or scores[0].shape != scores[1].shape
            ):
                continue
            flips = _flips(arrays, scores)
            if flips:
                a, b, gap, noise = flips
                tie = f"the scores part them by {gap:.3g}, within their own difference {noise:.3g}"
                return f"step {call.step - 1}: token {a} against {b}; {tie}: inherited"
        return ""

    def _precedes(self, pair: CallPair, call: Call) -> bool:
        """Is this the call of the same root one step before?"""
        earlier = self.paired.calls[pair.reference]
        return (earlier.parent, earlier.root, earlier.step, earlier.rank) == (
            -1,
            call.root,
            call.step - 1,
            call.rank,
        )


def _tie(
    token: int, target_token: int, outputs: Iterable[tuple[Array, Array] | None]
) -> tuple[float, float] | None:
    """(gap, noise) when both tokens are the best of their run's last scores, and nearly tied in the
    reference's.
    """
    for scores in outputs:
        if (
            scores is None
            or scores[0].ndim < 2
            or scores[0].dtype.kind in "iub"
            or scores[0].shape != scores[1].shape
        ):
            continue
        x, y = (s.reshape(-1, s.shape[-1])[-1].astype(np.float64) for s in scores)
        gap_and_noise = _near(x, y, token, target_token)
        if gap_and_noise:
            return gap_and_noise
    return None


def _near(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], token: int, target_token: int
) -> tuple[float, float] | None:
    if (
        not (0 <= token < x.size and 0 <= target_token < x.size)
        or int(x.argmax()) != token
        or int(y.argmax()) != target_token
    ):
        return None
    gap, noise = float(x[token] - x[target_token]), float(np.abs(x - y).max())
    return (gap, noise) if gap <= 2 * noise else None


def _flips(
    tokens: tuple[Array, Array], scores: tuple[Array, Array]
) -> tuple[int, int, float, float] | None:
    """(token, other token, gap, noise) of the first differing token, when every difference is the
    argmax of near-tied scores.
    """
    differ = np.argwhere(tokens[0] != tokens[1])
    first: tuple[int, int, float, float] | None = None
    for index in differ:
        row = int(index[0]) if tokens[0].ndim > 1 else 0
        a, b = (
            s.astype(np.float64).reshape(-1, s.shape[-2] if s.ndim > 2 else 1, s.shape[-1])
            for s in scores
        )
        if row >= a.shape[0]:
            return None
        i, j = int(tokens[0][tuple(index)]), int(tokens[1][tuple(index)])
        # The scores of the last position, or of the token before this one where rows are padded.
        places = [-1, int(index[-1]) - 1] if a.shape[1] == tokens[0].shape[-1] else [-1]
        near = next(
            (n for p in places if p >= -1 and (n := _near(a[row, p], b[row, p], i, j))), None
        )
        if near is None:
            return None
        first = first or (i, j, *near)
    return first


def _are_returned(tokens: tuple[Array, Array], returned: tuple[Array, Array]) -> bool:
    """Is every token that differs the one that its own run returned for that row: the last of a
    row, or at the same place of it?
    """
    if any(array.dtype.kind not in "iu" or not array.size for array in returned):
        return False
    rows = tokens[0].shape[0] if tokens[0].ndim > 1 else 1
    if any(array.size % rows for array in returned):
        return False
    by_row = [array.reshape(rows, -1) for array in returned]
    for index in np.argwhere(tokens[0] != tokens[1]):
        row, place = int(index[0]) if tokens[0].ndim > 1 else 0, int(index[-1])
        for given, own in zip(tokens, by_row, strict=True):
            at_place = own[row, place] if own.shape[1] > place else own[row, -1]
            if int(given[tuple(index)]) not in (int(own[row, -1]), int(at_place)):
                return False
    return True
