"""Compares two runs of statistics step by step and finds where two trainings diverge."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import msgspec
import numpy as np

from whence.comparison.verdicts.status import updated_less
from whence.errors import UsageError
from whence.judge.diverging import LIMITS, Drift
from whence.readers.figures import with_figures
from whence.readers.opening import open_run
from whence.records.missing import missing_of
from whence.records.training import LOSS
from whence.results import Diverged, Parting, PartKind, Status, StepDrift
from whence.workflows.diverge.distances import NORM, Tested, distances, tested
from whence.workflows.diverge.figures import SLOTS, Column, Names, RunFigures, read_figures
from whence.workflows.diverge.pair import Pair, Start, drift_of
from whence.workflows.saved import AnyPath

_MOST_NAMED = 5
_LASTING = 10
"""Number of steps for which a run must be further away than the repetitions before the distance
counts as evidence.
"""
_TOO_FAR = 30.0


class Answer:
    """Builds the answer about a pair of runs."""

    def __init__(self, pair: Pair, repetitions: Sequence[Drift], paths: Sequence[str]) -> None:
        self._pair, self._repetitions, self._paths = pair, repetitions, paths
        self._reference = pair.reference
        self._apart = _medians(pair.drift.own)
        self._noise = [_medians(drift.own) for drift in repetitions]

    def result(self) -> Diverged:
        pair = self._pair
        start = next(pair.starts(), None)
        first = pair.first_difference()
        part = self._part(start) if start is not None else None
        blind = self._blind(start)
        why = [] if part is not None else self._why_not_same(first, blind)
        status = Status.DIFFERENT if part else Status.UNDECIDED if why else Status.SAME
        if status == Status.UNDECIDED and first is not None and self._is_late(first):
            part = pair.parting(first)
        steps = self._reference.steps[pair.common]
        compared: Column = ~np.isnan(pair.drift.judged)
        return Diverged(
            status=status,
            reference=self._paths[0],
            target=self._paths[1],
            repetitions=tuple(self._paths[2:]),
            part=part,
            first=pair.parting(first) if first is not None else None,
            steps=tuple(steps.tolist()),
            tensors=int(compared.any(axis=0).sum()),
            uncompared=int((~compared.any(axis=0)).sum()),
            why=tuple(why),
            notes=tuple(note for note in self._notes() if note not in why),
            drift=tuple(self._steps()),
            blind=int(self._reference.steps[blind]) if blind >= 0 else -1,
            next=tuple(self._next(part, status)),
        )

    # ---- where the runs diverge

    def _part(self, start: Start) -> Parting:
        pair = self._pair
        same_step = [s for s in _of_step(pair, start.step) if s != start]
        if start.change is not None:
            alike = [s for s in same_step if s.change and s.change.words == start.change.words]
            return pair.parting(start, others=len(alike))
        place = pair.reordered(start.step)
        if place >= 0 and pair.kind(start.place) == PartKind.LOSS:
            batch = pair.parting(Start(start.step, start.moment, place))
            words = "the same elements in another order than the labels"
            return msgspec.structs.replace(batch, words=words, error=None)
        return pair.parting(start)

    # ---- certainty

    def _why_not_same(self, first: Start | None, blind: int) -> list[str]:
        why = [*self._ended(), *self._updated_less(), *self._uncompared()]
        if first is not None and self._is_late(first):
            step = int(self._reference.steps[first.step])
            why.append(
                f"equal bit for bit up to step {step}, where a difference no larger than that of "
                "rounding begins: a fault may be as small, and a program that does not repeat "
                "itself looks alike (--repeat, whence repeat)"
            )
        if blind >= 0:
            step = int(self._reference.steps[blind])
            share = f"{self._apart[blind]:.1%}"
            why.append(
                f"from step {step} on the runs are {share} apart by growth without a single "
                "origin; a later fault would not stand out"
                + (
                    ""
                    if self._repetitions
                    else ": --repeat RUN says whether rounding makes as much"
                )
            )
        return why

    def _ended(self) -> list[str]:
        """Sentences about missing parts of both runs."""
        sides = ("reference", self._reference.figures.run), ("target", self._pair.target.run)
        return [
            f"the {name} is not whole: {missing.text}"
            for name, run in sides
            for missing in missing_of(run)
        ]

    def _updated_less(self) -> list[str]:
        """A sentence where one training updated its parameters after fewer backward passes."""
        if len(self._reference.steps) == len(self._pair.target.steps):
            return []
        sides = self._reference.figures.run, self._pair.target.run
        sentence = updated_less(*(run.calls for run in sides))
        return [sentence] if sentence else []

    def _is_late(self, first: Start) -> bool:
        """Whether the runs were equal for so many steps before `first` that a difference of any
        size is evidence, and no repetition differs up to that step.
        """
        if any((np.nan_to_num(d.judged[: first.step + 1]) > 0).any() for d in self._repetitions):
            return False
        return int(self._pair.common[: first.step].sum()) >= LIMITS.late

    def _blind(self, start: Start | None) -> int:
        """The first step at which noise hides a fault, -1 for none.

        With repetitions: the first step from which on the runs are further apart than the
        repetitions.
        """
        if start is not None:
            return -1
        apart = np.nan_to_num(self._apart)
        far = apart > LIMITS.blind
        if self._noise:
            noise = np.nan_to_num(np.maximum.reduce(self._noise))
            noise = np.maximum.accumulate(noise)
            far = (apart > _TOO_FAR * noise) & (apart > LIMITS.floor * self._roundoff())
            steps = np.flatnonzero(far)
            return int(steps[0]) if steps.size >= _LASTING else -1
        steps = np.flatnonzero(far)
        return int(steps[0]) if steps.size else -1

    def _roundoff(self) -> float:
        return float(self._pair.found.roundoff.max(initial=0.0))

    def _uncompared(self) -> list[str]:
        """Sentences about tensors that were not compared and could therefore hide a fault."""
        pair = self._pair
        compared = np.asarray(~np.isnan(pair.drift.judged).all(axis=0))
        kinds = [pair.kind(p) for p in range(compared.size)]
        stepped = [p for p, k in enumerate(kinds) if k == PartKind.OPTIMIZER]
        judged = stepped or [p for p, k in enumerate(kinds) if k == PartKind.FORWARD]
        words = "parameters after a step" if stepped else "outputs of modules"
        lost = [p for p in judged if not compared[p]]
        if lost or not judged:
            names = (
                ", ".join(
                    dict.fromkeys(pair.parting(Start(0, 0, p)).name for p in lost[:_MOST_NAMED])
                )
                or "none was recorded"
            )
            return [f"{len(lost)} of {len(judged)} {words} are not compared: {names}"]
        return []

    def _notes(self) -> list[str]:
        pair, notes = self._pair, self._ended()
        a, b = self._reference.steps, pair.target.steps
        common = int(pair.common.sum())
        if common < max(len(a), len(b)):
            notes.append(
                f"{common} steps are in both runs: the reference has {extent(a)}, the target "
                f"{extent(b)}"
            )
        missing = np.isnan(pair.drift.judged).all(axis=0)
        forward = [p for p in np.flatnonzero(missing).tolist() if pair.kind(p) == PartKind.FORWARD]
        if forward:
            name = pair.parting(Start(0, 0, forward[0])).name
            notes.append(
                f"{len(forward)} tensors of forward passes are in the reference alone or of other "
                f"shapes, {name} first: a fault in them shows later"
            )
        orders = pair.found.is_permuted.any(axis=0)
        if any(pair.kind(p) == PartKind.BATCH for p in np.flatnonzero(orders).tolist()):
            notes.append("batches hold the same elements in another order")
        return notes

    # ---- every step

    def _steps(self) -> list[StepDrift]:
        losses = self._losses()
        noise = np.maximum.reduce(self._noise) if self._noise else None
        out = []
        for row, step in enumerate(self._reference.steps.tolist()):
            if not self._pair.common[row]:
                continue
            one, other, band = losses.get(row, (None, None, None))
            out.append(
                StepDrift(
                    step,
                    one,
                    other,
                    _number(self._apart[row]),
                    _number(noise[row]) if noise is not None else None,
                    band,
                )
            )
        return out

    def _losses(self) -> dict[int, tuple[float | None, float | None, float | None]]:
        """Losses of the last micro-batch, by step that has one: of the reference, of the target,
        and the difference that noise makes.
        """
        pair, reference = self._pair, self._reference
        place = next(
            (
                p
                for p, known in enumerate(reference.places.place)
                if pair.names.keys[known.number // SLOTS].op == LOSS
                and pair.names.words[known.number % SLOTS] == "output.0"
            ),
            -1,
        )
        out: dict[int, tuple[float | None, float | None, float | None]] = {}
        for row, record in _records(reference, place):
            other = int(pair.found.record[row, place])
            one = _number(_signed(reference.figures.values[record]))
            two = _number(_signed(pair.target.values[other])) if other >= 0 else None
            noise = float(pair.allowed.limit[row, place]) * float(
                np.nan_to_num(pair.found.scale[row, place])
            )
            out[row] = one, two, noise if other >= 0 else None
        return out

    # ---- the next experiment

    def _next(self, part: Parting | None, status: Status) -> list[str]:
        pair = self._pair
        commands = [r.run.info.command for r in (self._reference.figures, pair.target)]
        if part is None:
            blind_or_late = status == Status.UNDECIDED and not self._repetitions
            if not blind_or_late or not commands[0]:
                return []
            again = shlex.join(["env", "OMP_NUM_THREADS=1", *commands[0]])
            return [
                f"whence run --keep stats -o {self._beside('repeat')} -- {again}",
                f"whence diverge {shlex.join(self._paths[:2])} --repeat {self._beside('repeat')}",
            ]
        begin = max(part.step - 1, 0)
        if part.kind not in (PartKind.PARAMETER, PartKind.STATE):
            begin = part.step
        steps = f"{begin}:{part.step + 1}"
        level = ["--level", "op"] if part.kind == PartKind.LOSS else []
        names = [self._beside(f"step-{part.step}", side) for side in (0, 1)]
        lines = [
            shlex.join(["whence", "run", "--steps", steps, *level, "-o", name, "--", *command])
            for name, command in zip(names, commands, strict=True)
            if command
        ]
        return [*lines, shlex.join(["whence", "compare", *names])]

    def _beside(self, end: str, side: int = 0) -> str:
        return f"{self._paths[side].rstrip('/')}-{end}"


def _of_step(pair: Pair, step: int) -> list[Start]:
    return [start for start in pair.starts() if start.step == step]


def _medians(errors: Column) -> Column:
    """Median error of the compared tensors at each step, NaN where nothing is compared."""
    known = ~np.isnan(errors).all(axis=1)
    out = np.full(errors.shape[0], np.nan)
    if known.any():
        out[known] = np.nanmedian(errors[known], axis=1)
    return out


def _records(reference: Tested, place: int) -> list[tuple[int, int]]:
    """(step, record) pairs of a place."""
    rows = np.flatnonzero(reference.place == place)
    return list(zip(reference.step[rows].tolist(), reference.record[rows].tolist(), strict=True))


def _signed(values: Column) -> float:
    """The value of a scalar tensor, with its sign."""
    return float(values[3]) if not np.isnan(values[3]) else float(values[NORM])


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def extent(steps: Column) -> str:
    if not len(steps):
        return "no steps"
    return f"{len(steps):,} steps from {steps[0]} to {steps[-1]}"


def diverge(
    reference: AnyPath,
    target: AnyPath,
    *,
    repeat: Sequence[AnyPath] = (),
) -> Diverged:
    """Find the first step, and the place in it, where two trainings differ by more than noise.

    reference, target: runs of the same program; statistics (`keep="stats"`) are enough. repeat:
    further runs of the reference that differ from it in a way known to be harmless (other threads,
    other kernels); what they differ by is noise. Raises UnreadableRun, and UsageError where the
    runs have no step in common.
    """
    paths = [os.fspath(p) for p in (reference, target, *repeat)]
    names = Names()

    def figures(path: str) -> RunFigures:
        return read_figures(with_figures(open_run(path)), names)

    looked_at = tested(figures(paths[0]), names)
    repetitions = [
        drift_of(distances(looked_at, figures(p), names), looked_at, names) for p in paths[2:]
    ]
    pair = Pair(looked_at, figures(paths[1]), names, repetitions)
    if not pair.common.any():
        raise UsageError(
            f"{paths[0]} and {paths[1]} have no step in common: they have "
            f"{extent(looked_at.steps)} and {extent(pair.target.steps)}; capture the same steps "
            "(--steps, --every)"
        )
    return Answer(pair, repetitions, paths).result()
