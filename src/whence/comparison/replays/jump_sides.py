"""Lets the replays of one call fall on the target's side of a jump (a round, a floor, a sign, a
comparison), wherever rounding may carry an argument across it (`judge.jumps`).

Later results are then compared under the assumption of these sides, just as they are compared under
the assumption of the target's choice among tied scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from whence import judge
from whence.comparison.replays.tied_choices import element_errors
from whence.dtypes import Array
from whence.judge import jumps as noise_of_jumps
from whence.judge.ties import Gap

if TYPE_CHECKING:
    from whence.replay.jumps import Jumps, Place, SeenJump

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
_RUNS = 128  # of the program, to find the sides
_SHARE = 0.02  # largest share of an operator's elements at a jump whose sides are searched
_FEW = 64  # number of elements at a jump that is always searched
_SHOWN = 4  # rows that are named

Run = Callable[["Jumps"], Mapping[str, Array]]


@dataclass(slots=True)
class JumpSides:
    """The sides of the jumps of one call that explain the target best.

    wide: runs the call in wide arithmetic. exact, drawn: run it in the target's dtype, on the
    target's inputs and on inputs perturbed by one rounding. produced: the target's outputs by slot.
    known: flipped elements of another replay of the call, such as its forward pass; this replay
    adds its own. flipped: by operator, indices of elements on the other side than in the wide
    replay. is_open: whether too many elements lie at a jump to find their sides.
    """

    wide: Run
    exact: Sequence[Run]
    drawn: Sequence[Run]
    produced: Mapping[str, Array]
    known: dict[Place, I64]
    flipped: dict[Place, I64] = field(default_factory=dict)
    is_open: bool = False
    _seen: Mapping[Place, SeenJump] = field(default_factory=dict)
    _reach: dict[Place, F64] = field(default_factory=dict)
    _runs: int = 0

    def differ(self) -> bool:
        """Whether the call falls on other sides in the target's dtype than in wide arithmetic."""
        from whence.replay.jumps import Jumps

        wide, working = Jumps(), Jumps()
        self.wide(wide)
        self.exact[0](working)
        return any(
            place in working.seen and not np.array_equal(working.seen[place].level, seen.level)
            for place, seen in wide.seen.items()
        )

    def follow(self) -> Mapping[str, Array]:
        """The outputs of the wide replay with the sides that come nearest to the target."""
        from whence.replay.jumps import Jumps

        first = Jumps()
        outputs = self.wide(first)
        self._seen = first.seen
        self._measure_reach()
        known = {place: index for place, index in self.known.items() if self._fits(place, index)}
        if known:
            jumps = Jumps(flipped=known)
            there = self.wide(jumps)
            if _errors(self.produced, there, 1) < _errors(self.produced, outputs, 1):
                self.flipped, self._seen, outputs = known, jumps.seen, there
        for place in sorted(self._reach):
            outputs = self._at(place, outputs)
        self.known.update(self.flipped)
        return outputs

    def _fits(self, place: Place, index: I64) -> bool:
        """Whether rounding can carry all these elements of an operator across their jump."""
        reach = self._reach.get(place, np.zeros(0)).reshape(-1)
        if index.max(initial=-1) >= reach.size:
            return False
        return bool((self._seen[place].distance.reshape(-1)[index] <= reach[index]).all())

    def levels(self) -> Jumps:
        """The sides of the wide replay, to be forced on replays in the target's dtype."""
        from whence.replay.jumps import Jumps

        return Jumps(levels={place: seen.level for place, seen in self._seen.items()})

    def _measure_reach(self) -> None:
        """Find, for each operator with elements at a jump, how far rounding moves its arguments."""
        copies: list[list[dict[Place, SeenJump]]] = []
        for runs in (self.exact, self.drawn):
            seen = []
            for run in runs:
                levels = self.levels()
                run(levels)
                seen.append(levels.seen)
            copies.append(seen)
        for place, jump in self._seen.items():
            exact, drawn = (
                [
                    seen[place]
                    for seen in group
                    if place in seen and seen[place].argument.shape == jump.argument.shape
                ]
                for group in copies
            )
            if not exact:
                continue
            reach = noise_of_jumps.reach(
                jump.argument,
                [e.argument for e in exact],
                [d.argument for d in drawn],
                jump.size,
                judge.unit_roundoff(exact[0].dtype),
                jump.length,
            )
            at_jump = np.count_nonzero((jump.distance <= reach) & (reach > 0))
            if at_jump > max(_SHARE * reach.size, _FEW):
                self.is_open = True
            elif at_jump:
                self._reach[place] = reach

    def _at(self, place: Place, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs, with the elements of one operator on the sides that bring them nearest to
        the target.

        If argument and outputs share leading axes, a row of the outputs depends only on the same
        row of the argument. So one run tries one element of each row, and each row keeps its best.
        """
        rows, length = self._rows(place, outputs)
        single = [tried[:, None] for tried in self._candidates(place, length)]
        pairs = [_together(a, b, length) for a, b in itertools.combinations(single, 2)]
        taken, seen = self.flipped.get(place, np.zeros(0, np.int64)), self._seen
        moves = single
        while moves and self._runs + len(moves) < _RUNS:
            best, moved = np.zeros(rows), dict[int, I64]()
            for tried in moves:
                _, there = self._run(place, np.setxor1d(taken, tried))
                gains = _errors(self.produced, outputs, rows) - _errors(self.produced, there, rows)
                row = tried[:, 0] // length
                moved |= {int(r): t for r, t in zip(row, tried, strict=True) if gains[r] > best[r]}
                best[row] = np.maximum(best[row], gains[row])
            if moved:
                taken = np.setxor1d(taken, np.concatenate(list(moved.values())))
                seen, outputs = self._run(place, taken)
            # Pairs are tried only after single elements: one element may do what a pair does.
            moves = single if moved else pairs if moves is single else []
        if taken.size:
            self.flipped[place], self._seen = taken, seen
        return outputs

    def _run(self, place: Place, told: I64) -> tuple[Mapping[Place, SeenJump], Mapping[str, Array]]:
        from whence.replay.jumps import Jumps

        self._runs += 1
        jumps = Jumps(flipped={**self.flipped, place: told})
        outputs = self.wide(jumps)
        return jumps.seen, outputs

    def _rows(self, place: Place, outputs: Mapping[str, Array]) -> tuple[int, int]:
        """(number of rows, elements of the argument in each row). Rows are those of the leading
        axes that the operator's argument shares with all outputs.
        """
        shape = self._seen[place].argument.shape
        shared = max(len(shape) - 1, 0)
        for slot in self.produced:
            alike = [a == b for a, b in zip(shape, outputs[slot].shape, strict=False)]
            shared = min(shared, [*alike, False].index(False))
        return math.prod(shape[:shared]), math.prod(shape[shared:])

    def _candidates(self, place: Place, length: int) -> Iterator[I64]:
        """Indices of elements within reach of their jump: one per row at a time, nearest first."""
        reach, distance = self._reach[place].reshape(-1), self._seen[place].distance.reshape(-1)
        at = np.flatnonzero((distance <= reach) & (reach > 0))
        at = at[np.argsort(distance[at] / reach[at], kind="stable")]
        while at.size:
            _, first = np.unique(at // length, return_index=True)
            yield at[first]
            at = np.delete(at, first)

    def described(self) -> tuple[judge.Choice, ...]:
        """A description of each operator with elements on another side."""
        return tuple(self._described(place, index) for place, index in self.flipped.items())

    def _described(self, place: Place, index: I64) -> judge.Choice:
        jump, reach = self._seen[place], self._reach[place].reshape(-1)
        distance, shape = jump.distance.reshape(-1), jump.argument.shape
        length = shape[-1] if len(shape) > 1 else 1
        rows = np.unique(index // length)
        widest = index[np.argmax(distance[index] / reach[index])]
        gap = Gap(int(widest // length), 0, 0, 0, float(distance[widest]), float(reach[widest]))
        leading = shape[:-1] if len(shape) > 1 else shape
        first = [
            tuple(map(int, np.unravel_index(r, leading))) if leading else () for r in rows[:_SHOWN]
        ]
        return judge.Choice(
            jump.operator, reach.size // length, len(rows), tuple(first), gap, jumps=True
        )


def _together(first: I64, second: I64, length: int) -> I64:
    """The two moves combined row by row, for rows that both have."""
    shared = np.isin(first[:, 0] // length, second[:, 0] // length)
    return np.concatenate([first[shared], second], axis=1)


def _errors(produced: Mapping[str, Array], outputs: Mapping[str, Array], rows: int) -> F64:
    """By row, the summed error of the outputs (`element_errors`)."""
    off = [element_errors(y, outputs[s]).reshape(rows, -1).sum(1) for s, y in produced.items()]
    return np.asarray(np.sum(off, axis=0))
