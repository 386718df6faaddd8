"""Indices that differ where nothing was replayed: what their scores say, else that nothing is known
(`judge.ties`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.frameworks.operator_names import CHOOSES
from whence.judge import ties
from whence.records import Call, Run
from whence.results import Evidence, SlotPair, Verdict, VerdictKind

# of the indices, of the rows: ties are the exception, and where more than that differs they are no
# explanation
_MOST = 0.8
_MOST_OF_A_MASK = 0.25  # of the elements of a mask: a tie flips two of a row, or one at a threshold
# rows of what these make move up and down with what was chosen
_MOVES_ROWS = {"nonzero", "argwhere", "masked_select"}
_LARGEST = 1 << 24  # elements of scores that are sorted


def notes(verdicts: Iterable[Verdict], names: Sequence[str]) -> list[str]:
    """A note on the number of rows with a different choice among ties, and the first call with one.
    names: of the pairs of calls.
    """
    by_pair: dict[int, int] = {}
    for verdict in verdicts:
        by_pair[verdict.pair] = max(
            by_pair.get(verdict.pair, 0), int(verdict.numbers.get("tied_rows") or 0)
        )
    tied = [(pair, rows) for pair, rows in by_pair.items() if rows]
    if not tied:
        return []
    calls = "1 call" if len(tied) == 1 else f"{len(tied)} calls"
    rows = sum(rows for _, rows in tied)
    words = "1 row" if rows == 1 else f"{rows} rows"
    first = names[min(tied)[0]]
    return [
        f"{words} in {calls} chose differently among tied scores, first in {first}; what depends "
        "on them is compared given that choice"
    ]


class Indices:
    """Revises verdicts that rest on error growth alone, for calls that choose among scores."""

    def __init__(self, errors: PairErrors) -> None:
        self._paired, self.errors = errors.paired, errors
        self._operator_names: dict[str, frozenset[str]] = {}

    def judged(
        self,
        verdict: Verdict,
        call: Call,
        inputs: Sequence[SlotPair],
        outputs: Sequence[tuple[str, SlotPair]],
    ) -> Verdict:
        """The verdict, revised if it rests on indices that differ or on tensors that depend on a
        choice, since ties may explain these.

        inputs, outputs: the tensors that the verdict is based on; outputs as (name of the slot,
        pair).
        """
        by_growth = verdict.verdict == VerdictKind.INTRODUCED and verdict.evidence in (
            Evidence.TWO_DUMPS,
            Evidence.STATISTICS,
        )
        is_open = verdict.verdict == VerdictKind.UNDETERMINED and not verdict.numbers.get("growth")
        flipped = {name: s for name, s in outputs if self._differs(s) and self._is_index(s)}
        if not by_growth and not is_open:
            numbers = {"tied_rows": 0.0, **verdict.numbers}
            return verdict.replace(numbers=numbers) if flipped else verdict
        if flipped:
            others = [slot for name, slot in outputs if name not in flipped]
            return self._flipped(verdict, inputs, flipped, others)
        operators = self._operators(call)
        if (
            by_growth
            and operators & CHOOSES.keys()
            and (operators & _MOVES_ROWS or self._few_rows(outputs))
        ):
            sentence = (
                f"{verdict.sentence}; it chooses among scores, and only a replay shows whether "
                "they tie"
            )
            return _undetermined(verdict, verdict.numbers, sentence)
        return verdict

    def _flipped(
        self,
        verdict: Verdict,
        inputs: Sequence[SlotPair],
        flipped: Mapping[str, SlotPair],
        others: Sequence[SlotPair],
    ) -> Verdict:
        """The verdict of a call whose indices differ. others: its other outputs."""
        if not any(
            dtypes.is_floating(self._paired.reference.records[s.reference_record].dtype)
            for s in inputs
        ):
            return verdict  # whole numbers that depend on whole numbers differ by no rounding
        tied, unknown = 0, []
        for name, slot in flipped.items():
            ranked = self._ranked(slot, [*inputs, *flipped.values(), *others])
            if ranked is None:
                unknown.append(name)
            elif ranked.wrong.any():
                return verdict.replace(slot=name, sentence=f"{verdict.sentence}; {_said(ranked)}")
            else:
                tied += int(ranked.tied.sum())
        numbers = {**verdict.numbers, "tied_rows": tied} if tied else verdict.numbers
        if unknown:
            if max(self._share(flipped[name]) for name in unknown) > _MOST:
                return verdict
            sentence = (
                f"{unknown[0]}: indices differ, and the scores that they were chosen by were "
                "not recorded: ties or not"
            )
            return _undetermined(verdict, numbers, sentence)
        errors = [self.errors.of(s) for s in others]
        u = max((e.u for e in errors), default=0.0)
        growth = judge.grow([self.errors.of(s) for s in inputs], errors, u)
        words = (
            f"{tied} rows of indices differ, and hold what their ranks among the target's "
            "own scores ask for"
        )
        if errors and growth.verdict in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED):
            words = f"{verdict.sentence}; {words}, and what depends on them differs"
            return _undetermined(verdict, numbers, words)
        kind = VerdictKind.INHERITED if growth.e_in else VerdictKind.NOISE
        return verdict.withdrawn(kind, words, numbers=numbers)

    def after_ties(self, verdicts: dict[tuple[int, int], Verdict], ties_at: int) -> None:
        """Withdraw, in place, verdicts that rest only on a changed mean or norm, of calls from
        `ties_at` on.

        There, rows that were routed differently hold all of the error, and they change the
        statistics of a tensor in other ways than rounding does.
        """
        for (call, stretch), verdict in verdicts.items():
            growth = verdict.numbers.get("growth")
            by_figures = verdict.verdict == VerdictKind.INTRODUCED and verdict.evidence in (
                Evidence.TWO_DUMPS,
                Evidence.STATISTICS,
            )
            if (
                by_figures
                and call >= ties_at
                and growth is not None
                and growth <= judge.LIMITS.growth
            ):
                why = "rows that were routed differently before change its figures"
                verdicts[call, stretch] = verdict.withdrawn(
                    VerdictKind.INHERITED, f"{why}: {verdict.sentence}"
                )

    def _differs(self, slot: SlotPair) -> bool:
        return bool(self.errors.of(slot).value)

    def _is_index(self, slot: SlotPair) -> bool:
        kinds = {run.records[r].dtype for run, r in self._of(slot)}
        return all(dtypes.is_whole(kind) for kind in kinds)

    def _of(self, slot: SlotPair) -> tuple[tuple[Run, int], tuple[Run, int]]:
        return (self._paired.reference, slot.reference_record), (
            self._paired.target,
            slot.target_record,
        )

    def _ranked(self, slot: SlotPair, among: Sequence[SlotPair]) -> ties.RankedScores | None:
        """The indices of a slot, judged by the first tensor whose scores they may rank; None if
        there is none.
        """
        indices = self._paired.arrays_of_one_shape(slot)
        if indices is None or not indices[0].size:
            return None
        for scored in among:
            a, b = (run.records[r] for run, r in self._of(scored))
            u = judge.coarser(a.dtype, b.dtype)
            if (
                not u
                or a.shape != b.shape
                or a.count > _LARGEST
                or (scores := self._paired.arrays(scored)) is None
            ):
                continue
            for axis in _axes(indices[0].shape, a.shape):
                reference, target = (
                    _rows(i, axis, squeezed=i.ndim < len(a.shape)).astype(np.int64) for i in indices
                )
                x, y = (_rows(s.astype(np.float64), axis) for s in scores)
                ranked = ties.by_rank(reference, target, x, y, u)
                if ranked is not None:
                    return ranked
        return None

    def _share(self, slot: SlotPair) -> float:
        """The share of indices that differ; for a mask, relative to the places that either side has
        set. 0 if elements were not kept or shapes differ.
        """
        arrays = self._paired.arrays_of_one_shape(slot)
        if arrays is None or not arrays[0].size:
            return 0.0
        if (
            arrays[0].dtype == arrays[1].dtype == np.bool_
            and np.mean(arrays[0] != arrays[1]) > _MOST_OF_A_MASK
        ):
            return 1.0
        a, b = (x.astype(np.int64) for x in arrays)
        of = (
            np.count_nonzero(a | b)
            if max(a.max(), b.max()) <= 1 and min(a.min(), b.min()) >= 0 and a.ndim > 1
            else a.size
        )
        return float(np.count_nonzero(a != b) / max(of, 1))

    def _few_rows(self, outputs: Sequence[tuple[str, SlotPair]]) -> bool:
        """Whether the error of every output lies in a few rows."""
        for _, slot in outputs:
            if not self._differs(slot):
                continue
            arrays = self._paired.arrays_of_one_shape(slot)
            if arrays is None or arrays[0].ndim < 2:
                return False
            a, b = (x.astype(np.float64).reshape(-1, x.shape[-1]) for x in arrays)
            u = self.errors.of(slot).u
            size = np.maximum(np.linalg.norm(a, axis=1), 1e-300)
            if (
                float(np.mean(np.linalg.norm(a - b, axis=1) > judge.LIMITS.growth * 2 * u * size))
                > _MOST
            ):
                return False
        return True

    def _operators(self, call: Call) -> frozenset[str]:
        """Names of the operators in the call's program; `max` and `min` only where they reduce."""
        if call.program not in self._operator_names:
            program = self._paired.reference.programs.get(call.program) if call.program else None
            names = [op.name.split(".") for op in program.operations] if program is not None else []
            self._operator_names[call.program] = frozenset(
                n[1] for n in names if len(n) == 3 and n[2] != "other"
            )
        return self._operator_names[call.program]


def _axes(index: tuple[int, ...], scores: tuple[int, ...]) -> Iterator[int]:
    """The axes of `scores` along which `index` can have been chosen, the last one first."""
    for axis in reversed(range(len(scores))):
        remaining = scores[:axis] + scores[axis + 1 :]
        if index == remaining or (
            len(index) == len(scores)
            and index[:axis] + index[axis + 1 :] == remaining
            and index[axis] <= scores[axis]
        ):
            yield axis


def _rows(array: npt.NDArray[Any], axis: int, *, squeezed: bool = False) -> npt.NDArray[Any]:
    moved = np.moveaxis(np.expand_dims(array, axis) if squeezed else array, axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _said(ranked: ties.RankedScores) -> str:
    assert ranked.worst is not None
    worst, count = ranked.worst, int(ranked.wrong.sum())
    words = (
        f"their scores are {worst.gap:.3g} apart, rounding explains {worst.explained:.3g}"
        if np.isfinite(worst.gap)
        else "taken twice"
    )
    return (
        f"in {count} rows an index does not have its rank: row {worst.row} takes "
        f"{worst.target} and not {worst.reference}, {words}"
    )


def _undetermined(verdict: Verdict, numbers: dict[str, float | None], sentence: str) -> Verdict:
    e_out = numbers.get("e_out")
    numbers = {"tied_rows": 0.0, **numbers, "e_out": e_out if e_out != 0.0 else 1.0}
    return verdict.withdrawn(VerdictKind.UNDETERMINED, sentence, numbers=numbers)
