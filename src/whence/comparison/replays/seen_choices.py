"""The choices among scores that replays of one program observed, and those that the tensors of the
other run show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.dtypes import Array
from whence.judge import ties
from whence.records import Program

if TYPE_CHECKING:
    from whence.replay.choices import Choices, SeenChoices

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
_SHOWN = 4  # rows that are named


@dataclass(frozen=True, slots=True)
class ObservedChoices:
    """The choices of a wide replay, and of the working ones that choose as it does.

    produced: outputs of the other run, by slot. proposed: integer tensors that the other run's own
    program computes, which may be its choices.
    """

    program: Program
    produced: Mapping[str, Array]
    proposed: Callable[[], Sequence[I64]]
    wide: Choices
    workings: list[Choices]

    def shown(self) -> dict[int, I64]:
        """The indices that outputs of the other run hold, by choice, [rows, k]."""
        out: dict[int, I64] = {}
        for slot, operand in self.program.outputs:
            shown = (
                self.wide.shown.get(tuple(operand["op"]))
                if "op" in operand and slot in self.produced
                else None
            )
            if shown is None:
                continue
            place, positions = shown[0], shown[1].numpy()
            indices = self.produced[slot]
            if (
                place not in out
                and indices.shape == positions.shape
                and not dtypes.of(indices).is_floating
            ):
                out[place] = _completed(
                    self.wide.seen[place],
                    positions.reshape(-1),
                    indices.reshape(-1).astype(np.int64),
                )
        return out

    def proposals(self) -> dict[int, I64]:
        """By choice that no output shows, the indices that the other run's own program chose: of
        its integer tensors that fit in shape, the one with the fewest wrong rows.
        """
        out: dict[int, I64] = {}
        shown_choices = self.shown()
        for place, choice in self.wide.seen.items():
            if place in shown_choices:
                continue
            fitting = self.fitting(place, choice)
            followed = [self.judged(place, choice, p) for p in fitting]
            judged = [(int(f.wrong.sum()), -int(f.tied.sum()), n) for n, f in enumerate(followed)]
            if judged and (best := min(judged))[0] < len(choice.own) / 2:
                out[place] = fitting[best[2]]
        return out

    def fitting(self, place: int, choice: SeenChoices) -> list[I64]:
        """The distinct integer tensors of the other run's own program with a choice's extents."""
        if not any(place in w.seen for w in self.workings):
            return []
        fitting = [
            p
            for p in self.proposed()
            if p.size == choice.own.size and p.shape[-1:] == choice.own.shape[1:]
        ]
        return list({p.tobytes(): p.reshape(choice.own.shape) for p in fitting}.values())

    def noise(self, place: int, choice: SeenChoices) -> F64:
        """How far rounding moves each score (one standard deviation), [rows, n]."""
        workings = [
            w.seen[place]
            for w in self.workings
            if place in w.seen and w.seen[place].scores.shape == choice.scores.shape
        ]
        return np.asarray(
            np.maximum.reduce(
                [
                    ties.noise_of(choice.scores, w.scores, choice.own, choice.length)
                    for w in workings
                ]
            )
        )

    def unit(self, place: int) -> float:
        """The coarsest roundoff of the scores of a choice."""
        return max(
            judge.unit_roundoff(w.seen[place].dtype) for w in self.workings if place in w.seen
        )

    def judged(self, place: int, choice: SeenChoices, proposal: I64) -> ties.Followed:
        """Which rows of a proposal differ from a choice by ties alone, and which do not."""
        return ties.follow(
            choice.own,
            proposal,
            choice.scores,
            self.noise(place, choice),
            self.unit(place),
            ordered=choice.ordered,
            distinct=choice.distinct,
        )

    def by_rank(self, choice: SeenChoices, computed: Mapping[str, Array]) -> tuple[F64, F64] | None:
        """(other run, replay): the outputs computed for each rank of a choice, [rows, k, m]; None
        if no output has a row for each rank. Every output is scaled to a root mean square of 1, so
        that none outweighs the others.
        """
        rows, ranks = choice.used.shape
        leading = (*choice.shape, ranks)
        sides: tuple[list[F64], list[F64]] = [], []
        for slot, output in self.produced.items():
            replayed = computed.get(slot)
            if (
                output.ndim <= len(leading)
                or output.shape[: len(leading)] != leading
                or replayed is None
                or replayed.shape != output.shape
                or not dtypes.of(output).is_floating
            ):
                continue
            wide = replayed.astype(np.float64).reshape(rows, ranks, -1)
            size = float(np.sqrt(np.mean(wide * wide))) or 1.0
            sides[0].append(output.astype(np.float64).reshape(rows, ranks, -1) / size)
            sides[1].append(wide / size)
        return (np.concatenate(sides[0], 2), np.concatenate(sides[1], 2)) if sides[0] else None

    def described(self, followed_by_place: Mapping[int, ties.Followed]) -> tuple[judge.Choice, ...]:
        """A description of each operator that chose otherwise. followed_by_place: by choice."""
        out = []
        for place, followed in sorted(followed_by_place.items()):
            choice = self.wide.seen[place]
            rows = [
                tuple(int(i) for i in np.unravel_index(r, choice.shape)) if choice.shape else ()
                for r in np.flatnonzero(followed.tied)[:_SHOWN]
            ]
            worst_row = (
                [int(i) for i in np.unravel_index(followed.worst.row, choice.shape)]
                if followed.worst is not None and choice.shape
                else []
            )
            widest, worst = followed.widest, followed.worst
            out.append(
                judge.Choice(
                    choice.operator,
                    len(followed.indices),
                    int(followed.tied.sum()),
                    tuple(rows),
                    widest,
                    worst,
                    tuple(worst_row),
                )
            )
        return tuple(out)


def _completed(choice: SeenChoices, positions: I64, indices: I64) -> I64:
    """The indices of a choice of which an output shows a part; the rest keep the replay's order."""
    flat = np.full(choice.own.size, -1, np.int64)
    flat[positions] = indices
    out = flat.reshape(choice.own.shape)
    if (out >= 0).all() or positions.size == choice.own.size:
        return out
    shown_at = np.zeros(choice.own.size, bool)
    shown_at[positions] = True
    is_shown = shown_at.reshape(choice.own.shape)
    for row in range(len(out)):
        if not choice.distinct or np.array_equal(
            out[row, is_shown[row]], choice.own[row, is_shown[row]]
        ):
            out[row, ~is_shown[row]] = choice.own[row, ~is_shown[row]]
            continue
        unused = choice.own[row, ~np.isin(choice.own[row], out[row, is_shown[row]])]
        free = np.flatnonzero(~is_shown[row])
        out[row, free] = np.resize(unused, len(free)) if len(unused) else -1
    return out
