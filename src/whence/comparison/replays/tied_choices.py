"""Makes a replay take the target's choice (top-k, argmax) where the scores are tied within
rounding.

What follows a choice is then compared given that choice: a token that took the other of two tied
experts is judged by that expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.seen_choices import F64, I64, ObservedChoices
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.judge import ties
from whence.records import Program

if TYPE_CHECKING:
    from whence.replay.choices import Choices, SeenChoices

_PASSES = 3  # one choice may be made among what another chose
_WAYS = 4  # other choices tried of a row whose choice no output shows
_ROWS = 1023  # such rows that are tried

Replay = Callable[["Choices"], Mapping[str, Array]]
Figures = Mapping[str, judge.ReplayError]
Measure = Callable[[Mapping[str, Array]], Figures]


class ChoiceHints(NamedTuple):
    """Hints about the other run's choices, used only as far as `judge.ties` allows.

    proposed: integer tensors that the other run's own program computes. shared: by operation, the
    choices of other programs of this call that begin with the same operators, such as its backward
    pass; this program adds its own. sides: the same for jumps (`JumpSides.known`).
    """

    proposed: Callable[[], Sequence[I64]]
    shared: dict[int, I64]
    sides: dict[tuple[int, int], I64]


class Choosing:
    """Follows the other run's choices in replays of one program on one call's inputs.

    wide: runs the program with `Choices`, which record and force its choices. produced: outputs of
    the other run, by slot.
    """

    def __init__(
        self,
        program: Program,
        produced: Mapping[str, Array],
        wide: Replay,
        hints: ChoiceHints,
    ) -> None:
        self._program, self._produced, self._run_wide = program, produced, wide
        self._shared = hints.shared
        self._proposed = functools.cache(hints.proposed)
        self._forced: dict[int, I64] = {}
        self._accepted: dict[int, I64] = {}
        self._observed: ObservedChoices | None = None
        self._followed: dict[int, ties.Followed] = {}

    def wide(self) -> Mapping[str, Array]:
        """The wide replay, with the choices forced so far."""
        choices, outputs = self._run(self._forced)
        self._observe(choices, [])
        return outputs

    def for_working(self) -> Choices:
        """Choices for a replay in the working dtype, which chooses as the wide one did."""
        from whence.replay.choices import Choices

        seen = self._seen.wide.seen
        choices = Choices(told={place: choice.used for place, choice in seen.items()})
        self._seen.workings.append(choices)
        return choices

    def _observe(self, wide: Choices, workings: list[Choices]) -> None:
        self._observed = ObservedChoices(
            self._program, self._produced, self._proposed, wide, workings
        )

    @property
    def _seen(self) -> ObservedChoices:
        """The choices observed in the last wide replay and the working replays after it."""
        assert self._observed is not None
        return self._observed

    def figures(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """(wide replay, figures of the outputs) with the other run's choices among tied scores.

        wide, errors: the replay and figures without them. measure: wide replay -> figures. Indices
        that an output shows are followed; a choice that no output shows is the one that explains
        the outputs best. Both results stay as they were if no choice improves the figures.
        """
        if self._force(self._known()):
            wide, errors = self._nearer(wide, errors, measure)
        if judge.highest(errors) > 1 and self._force(self._in_place()):
            wide, errors = self._nearer(wide, errors, measure)
        for _ in range(_PASSES):
            if not self._force(self._seen.shown() or self._seen.proposals()):
                break
            wide, errors = self._nearer(wide, errors, measure)
        if judge.highest(errors) > 1 and self._force(self._seen.proposals() | self._seen.shown()):
            wide, errors = self._nearer(wide, errors, measure)
        for follow in (self._follow_rows, self._follow_hidden):
            if judge.highest(errors) > 1:
                wide, errors = follow(wide, errors, measure)
        self._shared.update(
            (place, choice.used)
            for place, choice in self._seen.wide.seen.items()
            if place in self._accepted
        )
        return wide, errors

    def _known(self) -> dict[int, I64]:
        """The choices that this program shares with other programs of this call."""
        seen = self._seen.wide.seen
        return {
            place: used
            for place, used in self._shared.items()
            if place in seen and seen[place].own.shape == used.shape
        }

    def _in_place(self) -> dict[int, I64]:
        """Choices with equal scores in the order of their places, as stable sorts leave them."""
        seen = self._seen.wide.seen
        return {place: ties.by_place(choice.used, choice.scores) for place, choice in seen.items()}

    def _nearer(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """Replay with the choices forced now; return the previous replay and figures if they are
        better.
        """
        previous = self._observed
        rerun = self.wide()
        new_errors = measure(rerun)
        if _badness(new_errors) <= _badness(errors):
            self._accepted = dict(self._forced)
            return rerun, new_errors
        self._observed = previous
        self._forced = dict(self._accepted)
        return wide, errors

    def with_choices(self, errors: Figures) -> dict[str, judge.ReplayError]:
        """The figures, with a description of each operator that chose otherwise."""
        choices = self._seen.described(self._followed)
        return {slot: dataclasses.replace(local, choices=choices) for slot, local in errors.items()}

    def follow_own_program(self, working: Callable[[], object]) -> bool:
        """Run the program as far as it goes and force the choices of the other run's own program.
        Returns whether that chooses differently among ties.

        This is for a program that cannot be run to its end, since another choice gives it other
        extents. working: runs it with `for_working`.
        """
        from whence.replay.choices import Choices

        choices = Choices(told=self._forced)
        self._observe(choices, self._observed.workings if self._observed is not None else [])
        with contextlib.suppress(ReplayRefused):
            self._run_wide(choices)
        with contextlib.suppress(ReplayRefused):
            working()
        return self._force(
            {
                p: proposal
                for p, proposal in self._seen.proposals().items()
                if any(p in w.seen for w in self._seen.workings)
            }
        )

    def unexplained(self, agrees: Callable[[Mapping[int, I64]], bool]) -> str:
        """A description of the other run's choice that rounding does not explain, "" if there is
        none.

        agrees: whether a replay with these choices gives the other run's tensors. Only then is a
        proposal known to be its choice.
        """
        ways: list[tuple[int, int, int, ties.Followed, I64]] = []
        for place, choice in self._seen.wide.seen.items():
            for n, proposal in enumerate(self._seen.fitting(place, choice)):
                followed = self._seen.judged(place, choice, proposal)
                ways.append((int(followed.wrong.sum()), place, n, followed, proposal))
        for rows, place, _, followed, proposal in sorted(ways, key=lambda way: way[:3]):
            if agrees({**self._forced, place: proposal}):
                self._followed = {place: followed}
                return self._seen.described(self._followed)[0].of_the_wrong if rows else ""
        return ""

    def _run(self, forced: Mapping[int, I64]) -> tuple[Choices, Mapping[str, Array]]:
        from whence.replay.choices import Choices

        choices = Choices(told=forced)
        return choices, self._run_wide(choices)

    def _force(self, proposals: Mapping[int, I64]) -> bool:
        """Force the proposed choices in rows that differ by ties alone. Returns whether any of
        them is new.
        """
        changed = False
        for place, proposal in proposals.items():
            choice = self._seen.wide.seen[place]
            followed = self._seen.judged(place, choice, proposal)
            forced = np.where(followed.tied[:, None], followed.indices, -1)
            if followed.tied.any() or followed.wrong.any():
                self._followed[place] = followed
            else:
                self._followed.pop(place, None)
            previous = self._forced.get(place)
            changed |= bool(
                followed.tied.any() if previous is None else not np.array_equal(previous, forced)
            )
            self._forced[place] = forced
        return changed

    # ---- choices that no output shows

    def _follow_rows(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """Follow the other run's order among ties if outputs have a row for each rank, such as
        tokens sorted by expert.
        """
        for place in sorted(self._seen.wide.seen.keys() - self._seen.shown().keys()):
            choice = self._seen.wide.seen.get(place)
            rows = self._seen.by_rank(choice, wide) if choice is not None else None
            if choice is None or rows is None:
                continue
            noise, unit = self._seen.noise(place, choice), self._seen.unit(place)
            order = ties.rearranged(choice.used, choice.scores, noise, unit, *rows)
            if order is not None and self._force({place: order}):
                wide, errors = self._nearer(wide, errors, measure)
        return wide, errors

    def _follow_hidden(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """Follow choices that no output shows, in the order in which they are made."""
        shown_choices = self._seen.shown()
        for place in sorted(self._seen.wide.seen):
            for _ in range(_PASSES if place not in shown_choices else 0):
                choice = self._seen.wide.seen.get(place)
                forced = self._best(place, choice, wide) if choice is not None else None
                if choice is None or forced is None:
                    break
                self._forced[place] = forced
                self._followed[place] = self._seen.judged(
                    place, choice, np.where(forced < 0, choice.own, forced)
                )
                wide, errors = self._nearer(wide, errors, measure)
                if self._force(self._seen.shown()):
                    wide, errors = self._nearer(wide, errors, measure)
        return wide, errors

    def _best(self, place: int, choice: SeenChoices, outputs: Mapping[str, Array]) -> I64 | None:
        """For every row, the tied choice that explains the outputs best, -1 for the replay's own;
        None if the replay's own is best in all rows.
        """
        ways = ties.alternatives(
            choice.used,
            choice.scores,
            self._seen.noise(place, choice),
            self._seen.unit(place),
            _WAYS,
        )
        forced = np.where(choice.used != choice.own, choice.used, -1)
        best: F64 = np.zeros(len(forced), np.float64)
        for way in ways:
            rows = np.flatnonzero((way != choice.used).any(axis=1))[:_ROWS]
            gains = self._gains(place, choice, way, rows, outputs)
            if gains is None:
                continue
            better = gains > best
            forced[better] = way[better]
            best[better] = gains[better]
        return forced if (best > 0).any() else None

    def _gains(
        self, place: int, choice: SeenChoices, way: I64, rows: I64, outputs: Mapping[str, Array]
    ) -> F64 | None:
        """By row, how much nearer the outputs come with the alternative choice `way`; None if the
        program cannot be run with it.

        To find which elements depend on which row, each run applies `way` to about half of the
        rows: row n takes part in run b if bit b of n is set.
        """
        numbers = np.zeros(len(way), np.int64)
        numbers[rows] = np.arange(1, len(rows) + 1)
        owner = {
            slot: np.zeros(a.shape, np.int64)
            for slot, a in outputs.items()
            if slot in self._produced
        }
        value = {slot: outputs[slot].copy() for slot in owner}
        for bit in range(len(rows).bit_length()):
            half = (numbers >> bit & 1).astype(bool)[:, None]
            try:
                _, run = self._run(
                    self._forced
                    | {
                        place: np.where(
                            half, way, np.where(choice.used != choice.own, choice.used, -1)
                        )
                    }
                )
            except ReplayRefused:
                return None
            for slot in owner:
                if run[slot].shape != outputs[slot].shape:
                    return None
                moved = run[slot] != outputs[slot]
                owner[slot] |= moved.astype(np.int64) << bit
                value[slot] = np.where(moved, run[slot], value[slot])
        gains = np.zeros(len(rows) + 1, np.float64)
        for slot, of in owner.items():
            gain = element_errors(self._produced[slot], outputs[slot]) - element_errors(
                self._produced[slot], value[slot]
            )
            fits = of <= len(rows)
            gains = gains + np.bincount(of[fits], gain[fits], minlength=len(rows) + 1)
        out: F64 = np.zeros(len(way), np.float64)
        out[rows] = gains[1:]
        return out


def element_errors(produced: Array, computed: Array) -> F64:
    """The squared error of every element over the mean square of the output; for exact dtypes, 1
    where elements differ.
    """
    if not dtypes.of(produced).is_floating:
        return np.asarray(produced != computed.astype(produced.dtype), np.float64)
    y, r = (
        np.nan_to_num(np.abs(x) if np.iscomplexobj(x) else x.astype(np.float64))
        for x in (produced, computed)
    )
    size = float(np.mean(r * r)) or 1.0
    return np.asarray((y - r) ** 2 / size)


def settled(
    loaded: Any,
    produced: Mapping[str, Array],
    run: Callable[..., Mapping[str, Array]],
    wide: str,
    errors: Figures,
) -> Figures:
    """The figures of outputs against their own program, with the outputs' choices among tied
    scores. errors: the figures without them; returned as they are if no choice improves them.

    run: runs the program with the options `working` and `choices`. wide: dtype of the wide replay.
    """
    if not loaded.chooses or max((local.score for local in errors.values()), default=0.0) <= 1:
        return errors

    def measure(r: Mapping[str, Array]) -> Figures:
        w = run(working="recorded", choices=choosing.for_working())
        return {
            slot: judge.local(y, r[slot], w[slot])
            for slot, y in produced.items()
            if r[slot].shape == y.shape == w[slot].shape
        }

    choosing = Choosing(
        loaded.program,
        produced,
        lambda choices: run(working=wide, choices=choices),
        ChoiceHints(list, {}, {}),
    )
    first = choosing.wide()
    measured = measure(first)
    if measured.keys() != errors.keys():
        return errors
    return choosing.figures(first, measured, measure)[1]


def _badness(figures: Figures) -> tuple[float, float, float]:
    """A sort key of figures: score, number of wrong elements, size of the error."""
    return (
        judge.highest(figures),
        sum(local.integer_mismatch + local.mismatch for local in figures.values()),
        max(local.rho for local in figures.values()),
    )
