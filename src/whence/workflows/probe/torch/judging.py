"""Judges one variant: equal, rounding, or more than rounding can explain.

Rounding in float64 is 5e8 times smaller than in float32, while a real dependency remains the same.
Both runs are therefore repeated in float64, where the difference either disappears or stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from whence.results.probe import Held, OperatorPlace, Variant
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.measuring import Begun, Distance, Walk, distance, place
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.regions import EVERYTHING, Region
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.trace import Trace

Changed = CallInputs | Callable[[Subject], CallInputs]
"""Arguments of a variant, or a function that creates them with the model that gets them (its own
cache).
"""

WIDE_ROUNDING = 2.0**-26
"""Largest difference, in root mean squares, that counts as rounding in float64: a quarter of a
rounding of float32. Constants that a model computes in float32 leave an error of about this size.
"""
WIDE_GROWTH = 2.0**-20
"""Share of the difference that remains in float64 when it is only rounding; 2**-29 in theory."""
FAR = 0.25
"""Least share of the difference that remains in float64 when it is not rounding."""
CONSTANTS = 16.0
"""Largest error that float32 constants leave in float64, in roundings of the model's own dtype."""
NARROW_ROUNDING = 1e-4
"""Largest difference that counts as rounding when an operator cannot run in float64."""
GROSS = 2.0**12
"""Number of roundings that no single operator causes; used when float64 is not available."""
_MOST_WINDOWS = 8
_LAST = "last_hidden_state"


class Trial(NamedTuple):
    """A run on `changed`, compared with a run on `base` in the elements that `region` declares
    equal.

    twin: a call with another extent (`Walk`). modes: context managers around the changed run,
    created for the subject that runs. copied=False: the arguments keep their memory layout.
    """

    base: CallInputs
    changed: Changed
    region: Region = EVERYTHING
    twin: CallInputs | None = None
    modes: Sequence[Callable[[Subject], Any]] = ()
    copied: bool = True


class Judge:
    """Runs variants of one model and judges them. Runs of the base are made once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._wide: Subject | None = None
        self._no_wide = ""
        dtypes = {p.dtype for p in subject.model.parameters() if p.is_floating_point()}
        self.unit = max((torch.finfo(d).eps / 2 for d in dtypes), default=2.0**-24)
        self._bases: dict[tuple[int, int], tuple[Any, Outputs]] = {}

    # ---- running

    def base(self, inputs: CallInputs, wide: bool = False) -> Outputs:
        """The model's outputs for these inputs; they are computed once and kept."""
        key = id(inputs), wide
        if key not in self._bases:
            subject = self.wide() if wide else self.subject
            assert subject is not None
            self._bases[key] = inputs, subject.run(inputs)
            self.subject.restore()
        return self._bases[key][1]

    def wide(self) -> Subject | None:
        """The model in float64; None when that is not possible."""
        if self._wide is None and not self._no_wide:
            try:
                self._wide = self.subject.wide()
            except Exception as error:  # noqa: BLE001 - whatever copying the user's model raises
                self._no_wide = f"no copy in float64: {said(error)}"
        return self._wide

    def _narrow(self) -> str:
        """The operator that the float64 run could not compute in float64, "" for none."""
        return next(iter(self._wide.notes), "") if self._wide is not None else ""

    # ---- judging

    def variant(
        self,
        name: str,
        base: CallInputs,
        changed: Changed,
        region: Region = EVERYTHING,
        twin: CallInputs | None = None,
        modes: Sequence[Callable[[Subject], Any]] = (),
        copied: bool = True,
    ) -> Variant:
        """Run a trial and judge it."""
        trial = Trial(base, changed, region, twin, modes, copied)
        try:
            far, effect, compared = self._apart(trial, self.subject)
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises
            return Variant(name, Held.UNKNOWN, why=f"the model does not run so: {said(error)}")
        if not compared:
            why = "no output has an element for each position or row"
            return Variant(name, Held.UNKNOWN, why=why)
        if not far.differing:
            return Variant(name, Held.EXACT, effect=effect, count=far.count)
        return self._judged(name, trial, far, effect)

    def moved(self, trial: Trial, subject: Subject | None = None) -> float:
        """How far a run changes what must stay equal, in root mean squares.

        Measured in float64 when possible, or with `subject` when given. Raises whatever the model
        raises.
        """
        return self._apart(trial, subject or self.wide() or self.subject)[0].moved

    def _apart(self, trial: Trial, subject: Subject) -> tuple[Distance, float | None, int]:
        """The result of `compared_outputs` for both runs. Raises whatever the model raises."""
        is_wide = subject is not self.subject
        changed = made(trial.changed, subject)
        copied = trial.copied or is_wide
        outputs = subject.run(changed, *[m(subject) for m in trial.modes], copied=copied)
        if is_wide:
            self.subject.restore()  # what both share, as a closure may
        twins = self.base(trial.twin, wide=is_wide) if trial.twin is not None else None
        return compared_outputs(self.base(trial.base, wide=is_wide), outputs, trial.region, twins)

    def _judged(self, name: str, trial: Trial, far: Distance, effect: float | None) -> Variant:
        in_float64, why = self._in_float64(trial)
        held = Held.UNKNOWN
        if in_float64 is not None:
            held, why = verdict(far.moved, in_float64, self.unit, self._narrow())
        most = GROSS if held == Held.ROUNDING else float("inf")
        begun = self.begins(trial, wide=held == Held.VIOLATED, most=most)
        first = begun[0] if begun else None
        if held == Held.UNKNOWN and first is not None and first.distance.ulp > GROSS:
            held = Held.VIOLATED
            why = f"{first.distance.ulp:.3g} ulp in one operator is more than it can round"
        return Variant(
            name,
            held,
            in_float64=in_float64,
            effect=effect,
            first=place(first) if first is not None else None,
            why=why,
            **vars(far),
        )

    def _in_float64(self, trial: Trial) -> tuple[float | None, str]:
        wide = self.wide()
        if wide is None:
            return None, self._no_wide
        try:
            return self._apart(trial, wide)[0].moved, ""
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises
            return None, f"the model does not run in float64: {said(error)}"

    # ---- naming

    def begins(
        self, trial: Trial, *, wide: bool = False, most: float = float("inf")
    ) -> list[Begun]:
        """The operators in which the difference begins.

        wide: search in float64, for differences above its rounding. most: distance in units in the
        last place above which two results are not roundings of the same value (another position's
        cosine, another part of a sum); such operators explain nothing.
        """
        subject = self.wide() if wide else self.subject
        if subject is None:
            return []
        walk = Walk(trial.region, WIDE_ROUNDING if wide else 0.0, most)
        found: list[Begun] = []
        begin: int | None = 0
        for _ in range(_MOST_WINDOWS):
            if begin is None or (found and wide):
                break
            try:
                first = traced(subject, trial.base, begin)
                changed = made(trial.changed, subject)
                copied = trial.copied or wide
                second = traced(subject, changed, begin, trial.modes, copied=copied)
                third = traced(subject, trial.twin, 1 << 60) if trial.twin is not None else None
            except Exception:  # noqa: BLE001 - what cannot be traced has no named operator
                break
            found += walk.over(first, second, third)
            begin = first.end
        return found


def made(changed: Changed, subject: Subject) -> CallInputs:
    """The arguments of a variant, created if necessary. Raises whatever the model raises
    meanwhile.
    """
    return changed if isinstance(changed, CallInputs) else changed(subject)


def traced(
    subject: Subject,
    inputs: CallInputs,
    begin: int = 0,
    modes: Sequence[Callable[[Subject], Any]] = (),
    *,
    change: Callable[..., Any] | None = None,
    copied: bool = True,
) -> Trace:
    """Trace one run operator by operator. Raises whatever the model raises."""
    trace = Trace(subject.model, begin=begin, change=change)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        subject.run(inputs, *[m(subject) for m in modes], trace.listening(), copied=copied)
    return trace


def compared_outputs(
    base: Outputs, changed: Outputs, region: Region = EVERYTHING, twins: Outputs | None = None
) -> tuple[Distance, float | None, int]:
    """(distance where values must be equal, largest distance elsewhere, number of outputs
    compared).
    """
    far, effect, compared = Distance(), None, 0
    for name, tensor in base.items():
        other = changed.get(name)
        if other is None or (twins is not None and name not in twins):
            continue
        shape = tuple(twins[name].shape) if twins is not None else None
        pair = region.pair(tensor, other, shape)
        if region.whole and pair is None and not _sums_up(name) and tensor.shape == other.shape:
            pair = tensor, other
        if pair is None or pair[0].shape != pair[1].shape:
            continue
        compared += 1
        far |= distance(*pair)
        moving = region.moving(tensor, other, shape)
        if moving is not None:
            effect = max(effect or 0.0, distance(*moving).moved)
    return far, effect, compared


def verdict(moved: float, in_float64: float, unit: float, narrow: str = "") -> tuple[Held, str]:
    """Whether a difference is rounding: (answer, reason).

    Both differences are in root mean squares of the output. unit: unit roundoff of the model.
    narrow: an operator that has no float64 and rounds there as elsewhere.
    """
    left = f"{in_float64:.2g} in float64, {moved:.2g} as it runs"
    if narrow and WIDE_ROUNDING < in_float64 < NARROW_ROUNDING:
        return Held.UNKNOWN, f"{left}, where {narrow}"
    if in_float64 <= WIDE_ROUNDING or (in_float64 <= moved * WIDE_GROWTH and in_float64 <= 1e-6):
        return Held.ROUNDING, f"it goes away: {left}"
    if in_float64 >= moved * FAR or in_float64 > unit * CONSTANTS:
        return Held.VIOLATED, f"it stays: {left}"
    return Held.UNKNOWN, f"it neither stays nor goes away: {left}"


def _sums_up(name: str) -> bool:
    """Whether an output sums up all positions, padding included, as a recurrent state does."""
    first = name.partition(".")[0]
    return any(word in first for word in ("state", "cache", "past", "mem")) and first != _LAST


def said(error: Exception) -> str:
    """Describe an exception of the user's model in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def guilty(variants: Sequence[Variant]) -> OperatorPlace | None:
    """The operator in which the first of several violations begins."""
    return next((v.first for v in variants if v.held == Held.VIOLATED and v.first), None)


def moved_at(judge: Judge, trial: Trial) -> int | None:
    """The first position that must stay equal and changes in an output.

    None when no output tells positions apart, or the model raises.
    """
    subject = judge.wide() or judge.subject
    try:
        base = judge.base(trial.base, wide=subject is not judge.subject)
        changed = subject.run(made(trial.changed, subject))
    except Exception:  # noqa: BLE001 - whatever the user's model raises
        return None
    places: list[int] = []
    for name in base.keys() & changed.keys():
        pair = trial.region.pair(base[name], changed[name], None)
        if pair is None or pair[0].shape != pair[1].shape or pair[0].ndim < 2:
            continue
        far = (pair[0].double() - pair[1].double()).abs()
        per_position = far.flatten(2).amax(2) if far.ndim > 2 else far
        scale = float(pair[0].double().square().mean().sqrt()) or 1.0
        moved = (per_position[0] > WIDE_ROUNDING * scale).nonzero().flatten()
        places += moved[:1].tolist()
    return min(places, default=None)
