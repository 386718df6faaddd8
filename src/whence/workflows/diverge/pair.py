"""Two runs side by side: what differs in which step by more than is allowed.

Settings, arguments and the set of calls are compared exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.judge.diverging import LIMITS, Allowed, Drift, allowed, came_in, smoothed
from whence.records.slots import is_param, is_written
from whence.records.training import BACKWARD, GRADIENTS, LOSS, OPTIMIZER, TAKEN_GRADIENT, sum_of
from whence.results import Parting, PartKind
from whence.workflows.diverge.distances import COUNT, NAN, ZERO, Distances, Tested, distances
from whence.workflows.diverge.figures import SLOTS, CallKey, Column, Names, RunFigures

_OF_BATCH = (
    *(PartKind.BATCH, PartKind.FORWARD, PartKind.RANDOM, PartKind.LOSS, PartKind.BACKWARD),
)
_CARRIED = (PartKind.PARAMETER, PartKind.STATE)
_DRAWING = ("dropout", "droppath", "stochasticdepth", "gumbel", "noise")


class Start(NamedTuple):
    """A place at which the runs differ by more than is allowed.

    step: position of the step. moment: on the reference's clock. place: -1 for something other than
    a tensor.
    """

    step: int
    moment: int
    place: int
    change: Change | None = None


class Pair:
    """Two runs. repetitions: distances of further runs of the reference from it."""

    def __init__(
        self, reference: Tested, target: RunFigures, names: Names, repetitions: Sequence[Drift] = ()
    ) -> None:
        self.reference, self.target, self.names = reference, target, names
        self._runs = reference.figures, target
        self.found = distances(reference, target, names)
        self.drift = drift_of(self.found, reference, names)
        self.causes = reference.places.causes
        self.common = np.isin(reference.steps, target.steps)
        self._keys = [names.keys[place.number // SLOTS] for place in reference.places.place]
        self._slots = [str(names.words[p.number % SLOTS]) for p in reference.places.place]
        self._moment = np.full(self.found.error.shape, -1, np.int64)
        self._moment[reference.step, reference.place] = reference.moment
        self._kinds = [self._kind(p) for p in range(len(self._slots))]
        self._leave_out_other_batches()
        carried = self._carried()
        self.allowed: Allowed = allowed(
            self.drift, self.causes, self.found.roundoff, carried, repetitions
        )
        self.came_in = np.maximum(came_in(self.drift.own, self.causes), carried)

    def _leave_out_other_batches(self) -> None:
        """When the runs split the batch differently, exclude everything before the sum of gradients
        from the comparison.
        """
        other = self.found.is_other_form
        alike = (self.found.record >= 0) & ~other
        never: Column = np.asarray(other.any(axis=0) & ~alike.any(axis=0))
        batch = [p for p, kind in enumerate(self._kinds) if kind == PartKind.BATCH]
        if never[batch].any():
            lost = [
                p
                for p, kind in enumerate(self._kinds)
                if kind in _OF_BATCH or (kind == PartKind.GRADIENTS and not self._is_summed(p))
            ]
            self.drift.judged[:, lost] = np.nan
            self.drift.own[:, lost] = np.nan

    def _is_summed(self, place: int) -> bool:
        return self._keys[place].op == GRADIENTS and is_written(self._slots[place])

    def _carried(self) -> Column:
        """The error that each tensor had in the step that produced it, 0 for what a step produces
        itself.
        """
        reference = self.reference
        records, first = np.unique(reference.record, return_index=True)
        origin = first[np.searchsorted(records, reference.record)]
        own = np.nan_to_num(self.drift.own, nan=0.0, posinf=0.0)
        out = np.zeros(own.shape)
        rows = np.flatnonzero(origin != np.arange(origin.size))
        left = own[reference.step[origin[rows]], reference.place[origin[rows]]]
        out[reference.step[rows], reference.place[rows]] = left
        return out

    # ---- differences beyond the limits

    def starts(self) -> Iterator[Start]:
        """All places that differ by more than is allowed, in program order."""
        beyond = self._beyond()
        made = _exact_changes(
            self.reference.figures,
            self.target,
            self.reference.steps[self.common],
            self.names,
        )
        position = np.flatnonzero(self.common)
        made = [c._replace(step=int(position[c.step])) for c in made]
        by_step: dict[int, list[Start]] = {}
        for step, place in zip(*(axis.tolist() for axis in np.nonzero(beyond)), strict=True):
            moment = int(self._moment[step, place])
            by_step.setdefault(step, []).append(Start(step, moment, place))
        quiet = self._quiet_until()
        for change in made:
            if change.is_setting or self._is_telling(change, quiet):
                start = Start(change.step, change.moment, -1, change)
                by_step.setdefault(change.step, []).append(start)
        # each model counts its own steps, so the steps are ordered by the clock
        yield from sorted(itertools.chain(*by_step.values()), key=self._rank)

    def _rank(self, start: Start) -> tuple[int, float, int]:
        """Sort key: program order; within one call, the largest excess over the limit first."""
        if start.place < 0:
            return start.moment, -np.inf, -1
        at = start.step, start.place
        ratio = float(self.drift.judged[at] / max(self.allowed.limit[at], 1e-300))
        return start.moment, -np.nan_to_num(ratio), start.place

    def _beyond(self) -> Column:
        """Mask (steps, places) of what differs by more than is allowed."""
        judged = self.drift.judged
        with np.errstate(invalid="ignore"):
            beyond = judged > self.allowed.limit
        whole = np.array([self._is_whole(p) for p in range(judged.shape[1])], bool)
        given = np.array([self.kind(p) == PartKind.BATCH for p in range(judged.shape[1])], bool)
        beyond[:, whole] = (judged[:, whole] > 0) & given[whole]
        out: Column = (beyond & ~self._is_new()) | self._other_form(given)
        return out

    def _is_new(self) -> Column:
        """Mask of parameters and states that first appear after noise began.

        Nothing tells how much of the noise they contain, so they are not judged.
        """
        given = [p for p, kind in enumerate(self._kinds) if kind in _CARRIED]
        seen = np.cumsum(~np.isnan(self.drift.judged), axis=0)
        first = self.first_difference()
        out = np.zeros(seen.shape, bool)
        if first is not None:
            out[:, given] = (seen[:, given] <= 1) & (self._moment[:, given] > first.moment)
        return out

    def _is_whole(self, place: int) -> bool:
        """Whether the tensor of a place contains integers."""
        return bool(self.found.roundoff_of_place[place] == 0)

    def _other_form(self, given: Column) -> Column:
        """Mask of tensors whose dtype or shape differs, or that are missing, from a step on.

        Such a difference counts for the batch, and for other tensors up to the first step with a
        difference in values.
        """
        other = self.found.is_other_form | _missing(
            self.reference, self.target, self.found, self._moment >= 0, len(self.names.keys)
        )
        before = np.vstack([np.zeros_like(other[:1]), np.logical_or.accumulate(other)[:-1]])
        known = (self.found.record >= 0) & ~other
        seen = np.vstack([np.zeros_like(known[:1]), np.logical_or.accumulate(known)[:-1]])
        quiet = np.arange(other.shape[0]) <= self._quiet_until()
        out: Column = other & ~before & seen & (given[None, :] | quiet[:, None])
        return out

    def _quiet_until(self) -> int:
        """Position of the first step in which anything differs; the number of steps when nothing
        does.
        """
        differs = np.flatnonzero((np.nan_to_num(self.drift.judged) > 0).any(axis=1))
        return int(differs[0]) if differs.size else self.drift.judged.shape[0]

    def _is_telling(self, change: Change, quiet: int) -> bool:
        """Whether a call that only one run makes is evidence.

        Under noise an expert may receive no token, and its parameters then get no step of the
        optimiser.
        """
        key = self.names.keys[change.key]
        if change.step <= quiet or (key.phase == "forward" and not key.scope):
            return True
        sent = key._replace(phase=BACKWARD, op=sum_of(key.op))
        number = self.names.calls.get(sent, -1)
        step = self.reference.steps[change.step]
        made = (((run.key == number) & (run.step == step)).any() for run in self._runs)
        return key.phase == OPTIMIZER and all(made)

    # ---- in words

    def first_difference(self) -> Start | None:
        """The first tensor that is not equal bit for bit."""
        rows, places = np.nonzero(np.nan_to_num(self.drift.judged) > 0)
        if not rows.size:
            return None
        at = int(np.argmin(self._moment[rows, places]))
        row, place = int(rows[at]), int(places[at])
        return Start(row, int(self._moment[row, place]), place)

    def kind(self, place: int) -> PartKind:
        """The role of a tensor in a training step."""
        return self._kinds[place]

    def _kind(self, place: int) -> PartKind:
        key, slot = self._keys[place], self._slots[place]
        is_given = self.reference.places.place[place].is_given
        if key.op == LOSS:
            return PartKind.LOSS
        if key.op == GRADIENTS:
            return PartKind.GRADIENTS
        if key.phase == OPTIMIZER:
            if is_written(slot):
                return PartKind.OPTIMIZER
            if slot == TAKEN_GRADIENT:
                return PartKind.GRADIENTS
            return PartKind.PARAMETER if slot == "input.param" else PartKind.STATE
        if is_given:
            return PartKind.PARAMETER if is_param(slot) else PartKind.BATCH
        if key.phase == BACKWARD:
            return PartKind.BACKWARD
        return PartKind.RANDOM if self._draws(place) else PartKind.FORWARD

    def _draws(self, place: int) -> bool:
        """Whether the type of a call suggests that it draws random numbers."""
        key = self._keys[place]
        kind = self.names.types[self.names.calls[key]][0].lower()
        return any(word in kind for word in _DRAWING) and is_written(self._slots[place])

    def parting(self, start: Start, others: int = 0) -> Parting:
        """Convert a start into a result."""
        if start.change is not None:
            return self._of_change(start.change, others)
        place = start.place
        key = self._keys[place]
        words, error = self._words(start)
        return self._made(
            key,
            self.kind(place),
            start.step,
            slot=self._slots[place],
            words=words,
            error=error,
            noise=float(self.allowed.expected[start.step, place]),
            inputs=float(self.came_in[start.step, place]) if self.causes[place] else None,
            others=others,
            during=self._during(start),
        )

    def _during(self, start: Start) -> int:
        """The training step, when it differs from the step number of the call; else -1.

        A training step ends with the next step of the optimiser.
        """
        figures = self.reference.figures
        is_step = np.array([key.phase == OPTIMIZER for key in self.names.keys], bool)
        rows = np.flatnonzero(is_step[figures.key])
        rows = rows[np.argsort(figures.begin[rows])]
        if not rows.size or self._keys[start.place].phase == OPTIMIZER:
            return -1
        at = int(np.searchsorted(figures.begin[rows], start.moment))
        step = int(figures.step[rows[at]] if at < rows.size else figures.step[rows[-1]] + 1)
        return step if step != int(self.reference.steps[start.step]) else -1

    def _of_change(self, change: Change, others: int) -> Parting:
        key = self.names.keys[change.key]
        kind = PartKind.SETTING if change.is_setting else PartKind.CALLS
        return self._made(key, kind, change.step, slot="", words=change.words, others=others)

    def _made(self, key: CallKey, kind: PartKind, step: int, **values: object) -> Parting:
        op_type, source = self.names.types[self.names.calls[key]]
        return Parting(
            kind=kind,
            scope=key.scope,
            root=key.root,
            op=key.op,
            op_type=op_type,
            phase=key.phase,
            step=int(self.reference.steps[step]),
            micro=key.micro,
            rank=key.rank,
            source=source,
            **values,  # type: ignore[arg-type]
        )

    def _words(self, start: Start) -> tuple[str, float | None]:
        """Describe the difference: (what differs, relative difference)."""
        step, place = start.step, start.place
        figures, other = self.reference.figures, self.target
        a, b = self.reference.row(step, place), int(self.found.record[step, place])
        if b < 0:
            return "the reference alone has this tensor", None
        one, two = figures.values[a], other.values[b]
        dtypes = [str(self.names.words[r.dtype[n]]) for r, n in ((figures, a), (other, b))]
        if dtypes[0] != dtypes[1]:
            return f"{dtypes[0]} in the reference, {dtypes[1]} in the target", None
        if one[COUNT] != two[COUNT]:
            shapes = [list(self.names.words[r.shape[n]]) for r, n in ((figures, a), (other, b))]
            return f"shape {shapes[0]} in the reference, {shapes[1]} in the target", None
        error = float(self.drift.judged[step, place])
        if np.isinf(error):
            broken = [int(row[NAN]) + int(row[NAN + 1]) for row in (one, two)]
            return (
                f"{broken[0]:,} NaN or infinite in the reference, {broken[1]:,} in the target",
                None,
            )
        if self._is_whole(place):
            return self._other_batch(start), None
        if self.kind(place) == PartKind.RANDOM:
            zeros = [f"{row[ZERO] / max(row[COUNT], 1):.1%}" for row in (one, two)]
            return f"{zeros[0]} zeros in the reference, {zeros[1]} in the target", error
        return "", error

    def _other_batch(self, start: Start) -> str:
        """Describe where the target's batch comes from: another step of the reference, or no step
        of it.
        """
        figures, place = self.reference.figures, start.place
        record = int(self.found.record[start.step, place])
        rows = np.flatnonzero(self.reference.place == place)
        sums = figures.checksum[self.reference.record[rows]]
        same = rows[(sums == self.target.checksum[record]) & (sums != 0)]
        if not same.size:
            return "other values, which no step of the reference was given here"
        step = int(self.reference.steps[self.reference.step[same[0]]])
        return f"the target is given what the reference is given at step {step}"

    # ---- the batch in another order

    def reordered(self, step: int) -> int:
        """The first place of the batch whose elements are in another order in this step and in no
        earlier one, -1 for none.
        """
        permuted = self.found.is_permuted
        for place in np.flatnonzero(permuted[step]).tolist():
            if self.kind(place) == PartKind.BATCH and not permuted[:step, place].any():
                return place
        return -1


def _missing(
    reference: Tested, target: RunFigures, found: Distances, here: Column, keys: int
) -> Column:
    """Mask of tensors that the target lacks although both runs make the call.

    here: mask of the tensors that the reference has.
    """
    steps = np.searchsorted(reference.steps, target.step)
    steps = np.minimum(steps, len(reference.steps) - 1)
    use = reference.steps[steps] == target.step
    made = np.unique(steps[use] * keys + target.key[use])
    wanted = np.arange(here.shape[0])[:, None] * keys + (reference.number // SLOTS)[None, :]
    out: Column = here & (found.record < 0) & np.isin(wanted, made)
    return out


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Settings of an optimiser that state how it computes, or where a schedule began."""
_CLOSE = 1e-9


class Change(NamedTuple):
    """A call whose setting differs, or that only one run makes.

    step: its position among the common steps. moment: on the reference's clock. key: the call's
    number.
    """

    step: int
    moment: int
    key: int
    words: str
    is_setting: bool


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a run, sorted by `code`, which combines step and key; row: index in the run."""

    code: Column
    row: Column


def _calls(run: RunFigures, steps: Column, keys: int) -> _Calls:
    if not steps.size:
        return _Calls(np.zeros(0, np.int64), np.zeros(0, np.int64))
    at = np.minimum(np.searchsorted(steps, run.step), len(steps) - 1)
    use = np.flatnonzero(steps[at] == run.step)
    code, first = np.unique(at[use] * keys + run.key[use], return_index=True)
    return _Calls(code, use[first])


def _exact_changes(a: RunFigures, b: RunFigures, steps: Column, names: Names) -> list[Change]:
    """Settings that differ, and calls that only one run makes although both runs made the same
    calls in all earlier common steps.
    """
    keys = len(names.keys)
    one, other = _calls(a, steps, keys), _calls(b, steps, keys)
    return [
        *_settings(a, b, one, other, names),
        *_calls_of_one(a, one, other, len(steps), names),
    ]


def _settings(
    a: RunFigures, b: RunFigures, one: _Calls, other: _Calls, names: Names
) -> Iterator[Change]:
    keys = len(names.keys)
    code, left, right = np.intersect1d(
        one.code, other.code, assume_unique=True, return_indices=True
    )
    rows_a, rows_b = one.row[left], other.row[right]
    differ = a.arguments[rows_a] != b.arguments[rows_b]
    first_seen: dict[int, int] = {}
    for number, key in enumerate((code % keys).tolist()):
        first_seen.setdefault(key, int(code[number]) // keys)
    from_start: set[tuple[int, str]] = set()
    for at in np.flatnonzero(differ).tolist():
        step, key = divmod(int(code[at]), keys)
        pair = (names.words[a.arguments[rows_a[at]]], names.words[b.arguments[rows_b[at]]])
        for name, x, y in _differing_settings(*pair):
            is_step = names.keys[key].phase == OPTIMIZER
            if not (is_step and x is not None and y is not None):
                if step == first_seen[key]:
                    from_start.add((key, name))
                if (key, name) in from_start:
                    continue
            words = f"{name} is {_shown(x)} in the reference, {_shown(y)} in the target"
            yield Change(step, int(a.begin[rows_a[at]]), key, words, True)


def _differing_settings(one: bytes, other: bytes) -> list[tuple[str, Any, Any]]:
    """Settings that differ between two texts of arguments: (name, value, value); None for a missing
    one.
    """
    if one == other:
        return []
    a, b = msgspec.json.decode(one), msgspec.json.decode(other)
    found = []
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name), b.get(name)
        if name not in _IMPLEMENTATION and not _alike(x, y):
            found.append((name, x, y))
    return found


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_alike, x, y))
    if isinstance(x, float | int) and isinstance(y, float | int):
        return x == y or abs(x - y) <= _CLOSE * max(abs(x), abs(y))
    return bool(x == y)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)[:60]


def _calls_of_one(
    a: RunFigures, one: _Calls, other: _Calls, steps: int, names: Names
) -> Iterator[Change]:
    """Calls that only one run makes, for keys whose calls agreed in all earlier common steps."""
    keys = len(names.keys)
    only_a = np.setdiff1d(one.code, other.code, assume_unique=True)
    only_b = np.setdiff1d(other.code, one.code, assume_unique=True)
    first: dict[int, tuple[int, bool]] = {}
    for codes, is_reference in ((only_a, True), (only_b, False)):
        for code in codes.tolist():
            step, key = divmod(code, keys)
            if key not in first or step < first[key][0]:
                first[key] = step, is_reference
    if not first:
        return
    # a call that only one run makes from the first step on belongs to a different program
    seen = np.unique(np.concatenate([one.code, other.code]))
    started: dict[int, int] = {}
    for code in seen.tolist():
        step, key = divmod(code, keys)
        started[key] = min(step, started.get(key, step))
    begun = {
        step: int(a.begin[one.row[one.code // keys == step]].min(initial=0))
        for step in {step for step, _ in first.values()}
    }
    for key, (step, is_reference) in first.items():
        # a run may end in the middle of a step
        lacking = other if is_reference else one
        is_cut = lacking.code.size > 0 and step == int(lacking.code[-1]) // keys
        if (
            step == 0
            or is_cut
            or (
                started[key] == step and not _is_more_of_same(names.keys[key], names, started, step)
            )
        ):
            continue
        row = one.row[np.searchsorted(one.code, step * keys + key)] if is_reference else -1
        moment = int(a.begin[row]) if row >= 0 else begun[step]
        who = "reference" if is_reference else "target"
        yield Change(step, moment, key, f"the {who} alone makes this call", False)


def _is_more_of_same(key: CallKey, names: Names, started: dict[int, int], step: int) -> bool:
    """Whether this is a further call, or micro-batch, of a module that both runs called before."""
    for fewer in (
        key._replace(micro=key.micro - 1),
        key._replace(occurrence=key.occurrence - 1),
    ):
        number = names.calls.get(fewer)
        if number is not None and started.get(number, step) < step:
            return True
    return False


# The size of a difference: relative to the tensor, and for gradients relative to their summands.


def drift_of(found: Distances, reference: Tested, names: Names) -> Drift:
    """Relative errors of two runs."""
    scale = smoothed(found.scale)
    own = _over(found.error, scale)
    floor = np.zeros_like(scale)
    groups: dict[tuple[str, bool], list[int]] = {}
    slots = [str(names.words[place.number % SLOTS]) for place in reference.places.place]
    keys = [names.keys[place.number // SLOTS] for place in reference.places.place]
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        if key.phase == BACKWARD or key.op == GRADIENTS:
            groups.setdefault((key.root, _is_of_parameter(key, slot)), []).append(number)
    for places in groups.values():
        some = np.where(scale[:, places] > 0, scale[:, places], np.nan)
        known = ~np.isnan(some).all(axis=1)
        rows = np.flatnonzero(known)[:, None]
        floor[rows, places] = LIMITS.faint * np.nanmedian(some[known], axis=1)[:, None]
    count = np.ones(len(slots))
    count[reference.place] = np.fmax(reference.figures.values[reference.record, COUNT], 1)
    for number, slot in enumerate(slots):
        if slot.startswith(_MADE_FOR_PARAMETER):
            for cause in reference.places.causes[number]:
                if keys[cause].phase == BACKWARD:
                    # a sum over rows rounds like its summands, even when these cancel out
                    size = scale[:, cause] * np.sqrt(count[cause] / count[number])
                    floor[:, number] = np.maximum(floor[:, number], size)
    return Drift(own, _over(found.error, np.maximum(scale, floor)))


_MADE_FOR_PARAMETER = "output.grad.param."


def _is_of_parameter(key: CallKey, slot: str) -> bool:
    return key.op == GRADIENTS or key.op.startswith("sum of") or ".param." in slot


def _over(error: Column, scale: Column) -> Column:
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0.0, error / scale)
