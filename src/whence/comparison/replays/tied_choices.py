"""Lets the replays of one call choose as the target did, wherever the scores it chose between tie
(`judge.ties`).

What follows a choice is then compared knowing it: a token that took the other of two tied experts
is judged by that expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.judge import ties
from whence.records import Program

if TYPE_CHECKING:
    from whence.replay.choices import Choices, SeenChoices

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
_PASSES = 3  # one choice may be made among what another chose
_WAYS = 4  # other choices tried of a row whose choice no output shows
_ROWS = 1023  # such rows that are tried
_SHOWN = 4  # rows that are named

Replay = Callable[["Choices"], Mapping[str, Array]]
Figures = Mapping[str, judge.ReplayError]
Measure = Callable[[Mapping[str, Array]], Figures]


class Choosing:
    """The choices of one program on one call's inputs.

    wide: run it so, with what sees and tells choices. produced: what the other side made, by output
    slot. proposed: whole numbers that the other side made on the way, as far as its own program
    tells: what it chose is believed only where `judge.ties` does.
    """

    def __init__(
        self,
        program: Program,
        produced: Mapping[str, Array],
        wide: Replay,
        proposed: Callable[[], Sequence[I64]],
    ) -> None:
        self._program, self._produced, self._run_wide = program, produced, wide
        self._proposed = functools.cache(proposed)
        self._forced: dict[int, I64] = {}
        self._accepted: dict[int, I64] = {}
        self._wide: Choices | None = None
        self._workings: list[Choices] = []
        self._followed: dict[int, ties.Followed] = {}

    def wide(self) -> Mapping[str, Array]:
        """The wide replay, with what it was told so far."""
        choices, outputs = self._run(self._forced)
        self._wide, self._workings = choices, []
        return outputs

    def for_working(self) -> Choices:
        """For a replay in the working dtype, which chooses as the wide one did."""
        from whence.replay.choices import Choices

        assert self._wide is not None
        choices = Choices(told={place: choice.used for place, choice in self._wide.seen.items()})
        self._workings.append(choices)
        return choices

    def figures(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """The wide replay and the figures of the outputs with the other side's choices where they
        tie.

        wide, found: without. measure: figures against a wide replay, by working ones. Where an
        output shows the indices, they are followed; a choice that none shows is the one that
        explains the outputs best. Both are kept where nothing comes nearer.
        """
        for _ in range(_PASSES):
            if not self._told_anew(self._shown() or self._proposals()):
                break
            wide, errors = self._nearer(wide, errors, measure)
        if max(local.score for local in errors.values()) > 1 and self._told_anew(
            self._proposals() | self._shown()
        ):
            wide, errors = self._nearer(wide, errors, measure)
        if max(local.score for local in errors.values()) > 1:
            wide, errors = self._hidden(wide, errors, measure)
        return wide, errors

    def _nearer(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """Run again with what is told now; as it was where the figures of that are worse."""
        previous = self._wide, self._workings
        rerun = self.wide()
        new_errors = measure(rerun)
        if _badness(new_errors) <= _badness(errors):
            self._accepted = dict(self._forced)
            return rerun, new_errors
        self._wide, self._workings = previous
        self._forced = dict(self._accepted)
        return wide, errors

    def said(self, errors: Figures) -> dict[str, judge.ReplayError]:
        """The figures, with what is to be said of each operator that chose otherwise."""
        choices = self._choices()
        return {slot: dataclasses.replace(local, choices=choices) for slot, local in errors.items()}

    def _choices(self) -> tuple[judge.Choice, ...]:
        out = []
        assert self._wide is not None
        for place, followed in sorted(self._followed.items()):
            choice = self._wide.seen[place]
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

    def looked(self, working: Callable[[], object]) -> bool:
        """Run as far as the program goes, and tell it what the other side's own program chose. Did
        that choose otherwise among ties?

        For a program that does not run through: another choice gives it other extents. working: a
        run of it `for_working`.
        """
        from whence.replay.choices import Choices

        choices = self._wide = Choices(told=self._forced)
        with contextlib.suppress(ReplayRefused):
            self._run_wide(choices)
        with contextlib.suppress(ReplayRefused):
            working()
        return self._told_anew(
            {
                p: proposal
                for p, proposal in self._proposals().items()
                if any(p in w.seen for w in self._workings)
            }
        )

    def wrong(self, agrees: Callable[[Mapping[int, I64]], bool]) -> str:
        """What is said of the choice of the other side's own program that rounding does not
        explain, "" where there is none.

        agrees: does a replay that is told this choice make what the other side made? Only then is
        the choice known to be that one.
        """
        assert self._wide is not None
        ways: list[tuple[int, int, int, ties.Followed, I64]] = []
        for place, choice in self._wide.seen.items():
            for n, proposal in enumerate(self._fitting(place, choice)):
                followed = self._judged(place, choice, proposal)
                ways.append((int(followed.wrong.sum()), place, n, followed, proposal))
        for rows, place, _, followed, proposal in sorted(ways, key=lambda way: way[:3]):
            if agrees({**self._forced, place: proposal}):
                self._followed = {place: followed}
                return self._choices()[0].of_the_wrong if rows else ""
        return ""

    # ---- what the outputs show

    def _run(self, forced: Mapping[int, I64]) -> tuple[Choices, Mapping[str, Array]]:
        from whence.replay.choices import Choices

        choices = Choices(told=forced)
        return choices, self._run_wide(choices)

    def _shown(self) -> dict[int, I64]:
        """By choice, the indices that the outputs of the other side show, [rows, k]."""
        assert self._wide is not None
        out: dict[int, I64] = {}
        for slot, operand in self._program.outputs:
            shown = (
                self._wide.shown.get(tuple(operand["op"]))
                if "op" in operand and slot in self._produced
                else None
            )
            if shown is None:
                continue
            place, positions = shown[0], shown[1].numpy()
            indices = self._produced[slot]
            if (
                place not in out
                and indices.shape == positions.shape
                and not dtypes.of(indices).is_floating
            ):
                out[place] = _completed(
                    self._wide.seen[place],
                    positions.reshape(-1),
                    indices.reshape(-1).astype(np.int64),
                )
        return out

    def _proposals(self) -> dict[int, I64]:
        """By choice that no output shows, what the other side's own program chose: of what could be
        that, the least wrong.
        """
        assert self._wide is not None
        out: dict[int, I64] = {}
        shown_choices = self._shown()
        for place, choice in self._wide.seen.items():
            if place in shown_choices:
                continue
            fitting = self._fitting(place, choice)
            followed = [self._judged(place, choice, p) for p in fitting]
            judged = [(int(f.wrong.sum()), -int(f.tied.sum()), n) for n, f in enumerate(followed)]
            if judged and (best := min(judged))[0] < len(choice.own) / 2:
                out[place] = fitting[best[2]]
        return out

    def _fitting(self, place: int, choice: SeenChoices) -> list[I64]:
        """The whole numbers of the other side's own program that have the extents of a choice, each
        once.
        """
        if not any(place in w.seen for w in self._workings):
            return []
        fitting = [
            p
            for p in self._proposed()
            if p.size == choice.own.size and p.shape[-1:] == choice.own.shape[1:]
        ]
        return list({p.tobytes(): p.reshape(choice.own.shape) for p in fitting}.values())

    def _told_anew(self, proposals: Mapping[int, I64]) -> bool:
        """Tell the replay the shown choices that differ by ties alone. Is anything new among
        them?
        """
        assert self._wide is not None
        changed = False
        for place, proposal in proposals.items():
            choice = self._wide.seen[place]
            followed = self._judged(place, choice, proposal)
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

    def _noise(self, place: int, choice: SeenChoices) -> F64:
        workings = [
            w.seen[place]
            for w in self._workings
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

    def _unit(self, place: int) -> float:
        return max(
            judge.unit_roundoff(w.seen[place].dtype) for w in self._workings if place in w.seen
        )

    def _judged(self, place: int, choice: SeenChoices, proposal: I64) -> ties.Followed:
        return ties.follow(
            choice.own,
            proposal,
            choice.scores,
            self._noise(place, choice),
            self._unit(place),
            ordered=choice.ordered,
            distinct=choice.distinct,
        )

    # ---- what no output shows

    def _hidden(
        self, wide: Mapping[str, Array], errors: Figures, measure: Measure
    ) -> tuple[Mapping[str, Array], Figures]:
        """Follow choices that no output shows, in the order in which they are made."""
        assert self._wide is not None
        shown_choices = self._shown()
        for place in sorted(self._wide.seen):
            for _ in range(_PASSES if place not in shown_choices else 0):
                choice = self._wide.seen.get(place)
                forced = self._best(place, choice, wide) if choice is not None else None
                if choice is None or forced is None:
                    break
                self._forced[place] = forced
                self._followed[place] = self._judged(
                    place, choice, np.where(forced < 0, choice.own, forced)
                )
                wide, errors = self._nearer(wide, errors, measure)
                if self._told_anew(self._shown()):
                    wide, errors = self._nearer(wide, errors, measure)
        return wide, errors

    def _best(self, place: int, choice: SeenChoices, outputs: Mapping[str, Array]) -> I64 | None:
        """Of every row the tied choice that explains the outputs best, -1 where it is the replay's
        own; None: of every row.
        """
        ways = ties.alternatives(
            choice.used, choice.scores, self._noise(place, choice), self._unit(place), _WAYS
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
        """By how much the outputs come nearer with this way of choosing, by row; None where the
        program does not run so.

        Which elements rest on which row is found by runs in which half of the rows choose so: the
        n-th row in the runs of the bits of n.
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
            gain = _error(self._produced[slot], outputs[slot]) - _error(
                self._produced[slot], value[slot]
            )
            fits = of <= len(rows)
            gains = gains + np.bincount(of[fits], gain[fits], minlength=len(rows) + 1)
        out: F64 = np.zeros(len(way), np.float64)
        out[rows] = gains[1:]
        return out


def _completed(choice: SeenChoices, positions: I64, indices: I64) -> I64:
    """The indices of a choice of which some elements are shown: the others keep the replay's
    order.
    """
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


def _error(produced: Array, computed: Array) -> F64:
    """The error of every element: squared, over the mean square of the output; of exact kinds,
    whether it differs.
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
    """The figures of outputs against their own program, with the choices that they show where these
    tie; `found` are those without.

    run: the program, given `working`, what sees and tells choices, and whether to write fused
    operators out. wide: working dtype.
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
        loaded.program, produced, lambda choices: run(working=wide, choices=choices), list
    )
    first = choosing.wide()
    measured = measure(first)
    return (
        choosing.figures(first, measured, measure)[1]
        if measured.keys() == errors.keys()
        else errors
    )


def _badness(figures: Figures) -> tuple[float, float, float]:
    """By what figures are ordered: the score, then how many elements are wrong, then the size of
    the error.
    """
    return (
        max(local.score for local in figures.values()),
        sum(local.integer_mismatch + local.mismatch for local in figures.values()),
        max(local.rho for local in figures.values()),
    )
