"""A comparison of two runs: align and measure them, pass verdicts through the stages, answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence.comparison import equal_runs
from whence.comparison.answer import assemble, generation, token_logits
from whence.comparison.answer.effect import effect
from whence.comparison.answer.runs import ended
from whence.comparison.call_columns import RULE, CallColumns, of_columns
from whence.comparison.context import Context, context_of, followed, timed
from whence.comparison.left_out import LeftOut, operator_form
from whence.comparison.options import CompareOptions
from whence.comparison.own_tensors import Column
from whence.comparison.ranks.target_alone import with_ranks
from whence.comparison.verdicts import (
    after_steps,
    checkpoints,
    compiled_kernels,
    gradient_flow,
    loss_scale,
    operator_forms,
    random_draws,
    returned_shapes,
    rewritten,
)
from whence.comparison.verdicts.causes.explained import explained
from whence.comparison.verdicts.patched import declare_patched
from whence.comparison.verdicts.ranks import RankFaults
from whence.comparison.verdicts.source_lines import placed
from whence.dtypes import Array
from whence.records import Call, Over, Run, in_order
from whence.records.slots import (
    is_input,
    is_own_input,
    is_param,
    is_read_beside,
    is_written,
    slot_family,
    slot_kind,
)
from whence.records.views import CachedRun
from whence.results import (
    Comparison,
    Finding,
    Plan,
    Remark,
    Row,
    Status,
    Undecided,
    Verdict,
    VerdictKind,
)
from whence.store import StoredRun, differing_tensors, some_calls, some_records

Verdicts = dict[tuple[int, int], Verdict]
"""By call of the reference and segment of it, -1 for a leaf."""
Stage = Callable[[Verdicts, Context], Verdicts]
"""Looks at the verdicts so far and gives new ones; writes nothing in the context."""


def _excuse_what_does_not_repeat(verdicts: Verdicts, context: Context) -> Verdicts:
    figures = (
        (call, local)
        for call, by_slot in context.judge.replays.figures.items()
        for local in by_slot.values()
    )
    return context.repeated.explained(verdicts, figures)


def _judge_three_ways(verdicts: Verdicts, context: Context) -> Verdicts:
    return context.third.judged(
        verdicts, list(context.regions), context.judge.first, context.errors.of
    )


def _declare_patched(verdicts: Verdicts, context: Context) -> Verdicts:
    paired = context.paired
    return declare_patched(verdicts, paired.plan.pairs, paired.calls, context.prepared.target.calls)


# The order is the method.
STAGES: dict[str, Stage] = {
    # In words of ranks, before anything is excused.
    "ranks": lambda verdicts, c: RankFaults(c.judge.replays).explained(verdicts),
    "repeated runs": _excuse_what_does_not_repeat,
    # Only where nothing was replayed.
    "third run": _judge_three_ways,
    # Integers that the callers gave differently: guilty only where an output depends on them.
    "positions": lambda verdicts, c: c.positions.judged(verdicts, c.root_inputs.differ),
    # Growth says little of modules that are written differently.
    "rewritten": lambda verdicts, c: rewritten.doubted(verdicts, c.errors),
    # What sizes cannot show: another form of an operator, other arguments.
    "operator forms": lambda verdicts, c: operator_forms.formed(verdicts, c.errors),
    # Random numbers that were drawn by other settings, and those that were not recorded.
    "random draws": lambda verdicts, c: random_draws.judged(verdicts, c.paired),
    # Losses whose other scale is taken out again.
    "loss scale": lambda verdicts, c: loss_scale.undone(verdicts, c.paired),
    # Parameters that are not what the step before left.
    "after steps": lambda verdicts, c: after_steps.blamed(verdicts, c.errors),
    # Tensors through which a gradient flows in one run only.
    "gradient flow": lambda verdicts, c: gradient_flow.stopped(verdicts, c.paired),
    # A module whose parameters the checkpoint lacks.
    "checkpoints": lambda verdicts, c: checkpoints.complete(verdicts, c.paired),
    # What something behind it takes back is another form of the same computation.
    "travels": lambda verdicts, c: c.neighbourhoods.judged(verdicts),
    # The same where no program says so.
    "data flow": lambda verdicts, c: c.data_flow.judged(verdicts),
    # Steps of operators that nothing paired shows.
    "steps": lambda verdicts, c: c.neighbourhoods.with_steps(verdicts),
    # Models of which not every operator was judged, in float64.
    "functions": lambda verdicts, c: c.neighbourhoods.functions.judged(
        verdicts, c.judge.replays.inside
    ),
    # Models that were given different inputs prove little by their outputs.
    "root inputs": lambda verdicts, c: c.root_inputs.doubted(verdicts),
    # Elements that agree in other axes are another result, unless a map says that it is meant.
    "returned shapes": lambda verdicts, c: (
        verdicts if c.options.chart else returned_shapes.blamed(verdicts, c.paired)
    ),
    "patched": _declare_patched,
    # Names for what is guilty by now: kernels, then lines of source.
    "compiled kernels": lambda verdicts, c: compiled_kernels.named(verdicts, c.errors),
    "source lines": lambda verdicts, c: placed(verdicts, c.paired),
    # Why, where the runs hold more than the verdict needed.
    "causes": lambda verdicts, c: explained(verdicts, c.paired),
}


def judge_regions(context: Context) -> Verdicts:
    """A verdict for every region whose call has a partner, after all stages."""
    verdicts = context.judge.verdicts()
    for stage in STAGES.values():
        verdicts = stage(verdicts, context)
    return verdicts


def compare_runs(
    reference: Run,
    target: Run,
    options: CompareOptions,
    *,
    again: Sequence[Run] = (),
    third: Run | None = None,
) -> Comparison:
    """Compare two opened runs. Reads all, writes nothing. again: further runs of the reference;
    third: a run of it in higher precision.
    """
    if not again and third is None:
        bare = token_logits.of_bare_logits(reference, target, options)
        if bare is not None:
            return ended(bare, reference, target, options)
    if generation.logits_alone(reference, target):
        result = generation.compare_logits(reference, target, options, again, third)
        return ended(result, reference, target, options)
    options, not_replayed = followed(reference, target, options)
    alone = not again and third is None and not not_replayed
    if alone and (equal := equal_runs.answer(reference, target, options)) is not None:
        return ended(equal, reference, target, options)
    part = differing_part(reference, target, options) if alone else None
    if part is not None:
        answer = _compared_in_part(part, reference, target, options)
        if answer is not None:
            return ended(answer, reference, target, options)
    reference, target = (
        CachedRun(run) if isinstance(run, StoredRun) else run for run in (reference, target)
    )
    context = context_of(reference, target, options, again=again, third=third)
    prepared, result = context.prepared, _answered(context, not_replayed)
    result = _with_tokens(
        result, context, prepared.read_reference, prepared.read_target, context.paired.calls
    )
    with timed(context.timing, "ranks"):
        result = with_ranks(result, reference, target)
    return ended(result, prepared.read_reference, prepared.read_target, options)


def _compared_in_part(
    part: DifferingPart, reference: Run, target: Run, options: CompareOptions
) -> Comparison | None:
    """The comparison of runs whose stages look at a part of them; None where a stage would have
    taken the whole otherwise.
    """
    context = context_of(part.reference, part.target, options, left_out=part.left_out)
    if not part.fits(context):
        return None
    result = part.whole(_answered(context, ()))
    if not part.columns.may_hold_tokens():
        return msgspec.structs.replace(result, effect=effect(context.paired, context.errors))
    read = CachedRun(reference)
    return _with_tokens(result, context, read, CachedRun(target), read.calls)


def _answered(context: Context, not_replayed: Sequence[str]) -> Comparison:
    with timed(context.timing, "judge"):
        verdicts = judge_regions(context)
    return assemble.comparison(context, verdicts, not_replayed)


def _with_tokens(
    result: Comparison, context: Context, reference: Run, target: Run, calls: Sequence[Call]
) -> Comparison:
    """The answer with what both runs generated, and what the differences come to at the outputs.
    calls: of the reference, which the answer speaks of.
    """
    with timed(context.timing, "tokens"):
        generated, unknown = generation.generated(reference, target, result, calls)
    if result.status == Status.SAME and (longer := generation.going_on(generated)):
        result = msgspec.structs.replace(result, status=Status.UNDECIDED, headline=longer)
    return msgspec.structs.replace(
        result,
        generation=generated,
        notes=(*result.notes, *unknown),
        effect=effect(context.paired, context.errors, generated),
    )


# The part in which two runs differ that say the same in every line: calls that hold a tensor with
# another hash, the calls around them, and what these are made of. The stages of a comparison look
# at these alone; what is equal beside them is counted, and its rows and verdicts are read off
# columns.

_LARGEST_SHARE = 0.6  # of calls that are kept; above, little is won
_force = msgspec.structs.force_setattr
Said = TypeVar("Said", Finding, Remark, Verdict, Undecided)


class PartOfRun(Over):
    """Some calls and records of a run on disk, under numbers of their own.

    numbers: by record of this run, its number in `base`. like: the calls of the other run, whose
    references are held once where they are the same.
    """

    def __init__(
        self, run: StoredRun, calls: Column, records: Column, like: Sequence[Call] = ()
    ) -> None:
        place_of = np.full(len(run.calls), -1, np.int64)
        place_of[calls] = np.arange(calls.size)
        places = np.full(len(run.records), -1, np.int64)
        places[records] = np.arange(records.size)
        own_calls, own_records = [], []
        for number, call in enumerate(some_calls(run, calls)):
            _force(call, "id", number)
            if call.parent >= 0:
                _force(call, "parent", int(place_of[call.parent]))
            for ref in call.refs:
                _force(ref, "record", int(places[ref.record]))
            if like and call.refs == like[number].refs:
                _force(call, "refs", like[number].refs)
            own_calls.append(call)
        for number, record in enumerate(some_records(run, records)):
            _force(record, "id", number)
            own_records.append(record)
        super().__init__(run, own_calls, own_records)
        self.numbers = records
        self.programs = {
            key: msgspec.structs.replace(p, constants=tuple(places[list(p.constants)].tolist()))
            for key, p in run.programs.items()
        }

    def array(self, record: int) -> Array:
        """Elements of a record."""
        return self.base.array(int(self.numbers[record]))

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return self.base, int(self.numbers[record])


@dataclass(frozen=True)
class DifferingPart:
    """Both runs as far as they differ. columns: of the whole reference; kept: which of its calls
    are in the part.
    """

    reference: PartOfRun
    target: PartOfRun
    columns: CallColumns
    kept: Kept
    left_out: LeftOut

    # ---- what the stages made of it

    def fits(self, context: Context) -> bool:
        """Did the stages take both runs as they are, with each call paired with its like?"""
        prepared, paired = context.prepared, context.paired
        sides = (
            (prepared.read_reference, prepared.aligned.reference, self.reference),
            (prepared.read_target, prepared.aligned.target, self.target),
        )
        if not all(aligned is read and read.base is part for read, aligned, part in sides):
            return False
        plan = paired.plan
        if paired.target is not paired.shown or msgspec.structs.replace(plan, pairs=()) != Plan(()):
            return False
        order = [call.id for call in in_order(paired.calls)]
        return order == [pair.reference for pair in plan.pairs] and all(
            pair.target == pair.reference
            and pair.rule == RULE
            and not (pair.evidence or pair.only_reference or pair.only_target or pair.also)
            and [
                (s.reference_slot, s.reference_record, s.target_slot, s.target_record)
                for s in pair.slots
            ]
            == [(r.slot, r.record) * 2 for r in paired.calls[pair.reference].refs]
            for pair in plan.pairs
        )

    def whole(self, result: Comparison) -> Comparison:
        """The answer about the part as one about both runs. Raises nothing where `fits`."""
        calls = np.flatnonzero(self.kept.is_kept)
        of_pairs = [p.reference for p in result.plan.pairs]
        pair_of = self.columns.pair_of[calls[of_pairs]]

        def placed(said: Said) -> Said:
            return msgspec.structs.replace(
                said, pair=int(pair_of[said.pair]) if said.pair >= 0 else said.pair
            )

        verdicts: dict[tuple[int, int], Verdict] = {}
        for verdict in result.verdicts:
            moved = placed(verdict)
            if verdict.named >= 0:
                moved = moved.replace(named=int(calls[verdict.named]))
            verdicts[moved.pair, moved.stretch] = moved
        others = {key: v for key, v in verdicts.items() if v != self.columns.equal(*key)}
        every = self.columns.verdicts(others, self._stretches(verdicts))
        undecided = result.undecided
        return msgspec.structs.replace(
            result,
            findings=tuple(map(placed, result.findings)),
            remarks=tuple(map(placed, result.remarks)),
            undecided=placed(undecided) if undecided is not None else None,
            plan=Plan(self.columns.pairs()),
            rows=self.columns.rows(self._rows(result.rows, pair_of)),
            verdicts=every,
            counts=_in_order(result.counts, every),
        )

    def _stretches(self, verdicts: Mapping[tuple[int, int], Verdict]) -> tuple[Column, Column]:
        """(container, stretch) of what is judged of containers, in the order of execution: of those
        in the part as it was judged, of the others what made a tensor.
        """
        containers, stretches, ends = self.columns.own
        is_beside = ~self.kept.is_open[containers]
        keys = [(self.columns.order[pair], part) for pair, part in verdicts if part >= 0]
        own = np.array(keys, np.int64).reshape(-1, 2)
        containers = np.concatenate([containers[is_beside], own[:, 0]])
        stretches = np.concatenate([stretches[is_beside], own[:, 1]])
        when = np.concatenate([ends[is_beside], self.columns.times.ends(own[:, 0], own[:, 1])])
        in_order = np.argsort(when, kind="stable")
        return containers[in_order], stretches[in_order]

    def _rows(self, rows: Sequence[Row], pair_of: Column) -> dict[int, list[Row]]:
        """The rows of calls that are not equal in all, by pair."""
        differ = {
            row.pair
            for row in rows
            if row.verdict != VerdictKind.IDENTICAL or not row.measured.identical
        }
        numbers, out = self.reference.numbers, dict[int, list[Row]]()
        for row in rows:
            if row.pair in differ:
                pair = int(pair_of[row.pair])
                moved = msgspec.structs.replace(
                    row,
                    pair=pair,
                    reference_record=int(numbers[row.reference_record]),
                    target_record=int(numbers[row.target_record]),
                )
                out.setdefault(pair, []).append(moved)
        return out


def differing_part(reference: Run, target: Run, options: CompareOptions) -> DifferingPart | None:
    """The part in which two runs differ; None where they differ in more than elements, where it is
    most of them, or where the stages have to look at more than columns tell.
    """
    runs = of_columns(reference, target, options)
    if runs is None or options.engine is not None:
        return None
    differ = differing_tensors(*runs)
    if differ is None or not differ.any():
        return None
    columns = CallColumns(runs[0])
    if not columns.are_plain() or not columns.are_modules():
        return None
    has_programs = bool(options.replay and columns.programs)
    kept = kept_calls(columns, differ, makers=has_programs)
    if kept is None or kept.is_kept.sum() > _LARGEST_SHARE * kept.is_kept.size:
        return None
    calls = np.flatnonzero(kept.is_kept)
    is_used = np.zeros(differ.size, bool)
    is_used[columns.records_of(kept.is_kept)] = True
    for program in runs[0].programs.values():
        is_used[list(program.constants)] = True
    records = np.flatnonzero(is_used)
    first = PartOfRun(runs[0], calls, records)
    second = PartOfRun(runs[1], calls, records, first.calls)
    if not all(_is_plain(call) for part in (first, second) for call in part.calls):
        return None
    return DifferingPart(first, second, columns, kept, _Beside(*runs, columns, kept).left_out())


class _Beside:
    """The calls that are not in the part. target: the whole run."""

    def __init__(
        self, reference: StoredRun, target: StoredRun, columns: CallColumns, kept: Kept
    ) -> None:
        self._reference, self._target = reference, target
        self._columns, self._is_left = columns, ~kept.is_kept

    def left_out(self) -> LeftOut:
        """What the stages have to know of them."""
        columns, is_left = self._columns, self._is_left
        has_tensors = np.diff(columns.columns["refs_at"]) > 0
        has_tensors[columns.own[0]] = True
        roots = np.bincount(columns.columns["root"][is_left], minlength=len(columns.names))
        return LeftOut(
            int(is_left.sum()),
            int((columns.have_programs() & is_left).sum()),
            int((has_tensors & is_left).sum()),
            {columns.names[n]: int(roots[n]) for n in np.flatnonzero(roots).tolist()},
            self._repeats,
            self._target_elements,
        )

    def _repeats(self) -> Counter[Hashable]:
        run, counts = self._reference, Counter[Hashable]()
        first, numbers = self._columns.forms(self._is_left)
        for call, number in zip(some_calls(run, first), numbers.tolist(), strict=True):
            outputs = [r.record for r in call.refs if is_written(r.slot)]
            if call.leaf and outputs and all(run.records[record].count for record in outputs):
                counts[operator_form(call, call, run.records)] += number
        return counts

    def _target_elements(self, call: Call, step: int, slot: str) -> Array | None:
        calls, keys = self._by_step
        scope = self._columns.names.index(call.scope)
        first, last = np.searchsorted(keys, [_key(scope, step), _key(scope, step + 1)]).tolist()
        wanted = msgspec.structs.replace(call, step=step).key()
        for number in calls[first:last].tolist():
            earlier = self._target.calls[number]
            if earlier.key() == wanted:
                record = earlier.by_slot.get(slot)
                return self._target.array(record) if record is not None else None
        return None

    @cached_property
    def _by_step(self) -> tuple[Column, Column]:
        """(calls, key of the module and step of each), in the order of the keys."""
        columns, calls = self._columns.columns, np.flatnonzero(self._is_left)
        keys = _key(columns["scope"][calls].astype(np.int64), columns["step"][calls])
        in_order = np.argsort(keys, kind="stable")
        return calls[in_order], keys[in_order]


def _key(scope: Any, step: Any) -> Any:
    """One number of a module and a step."""
    return (scope << 32) + step


def _is_plain(call: Call) -> bool:
    """Is it a module's in a forward pass that computes with numbers?"""
    is_forward = call.phase == "forward" and call.forward < 0
    return is_forward and call.quantised is None and not call.gradients


def _in_order(counts: Mapping[str, int], verdicts: Sequence[Verdict]) -> dict[str, int]:
    """The counts in the order in which verdicts have them first."""
    first: dict[str, None] = {}
    for verdict in verdicts:
        first[verdict.verdict] = None
        if verdict.verdict == VerdictKind.IDENTICAL:
            break
    return {kind: counts[kind] for kind in (*first, *counts) if kind in counts}


# Which calls the stages of a comparison have to see of two runs that differ in some tensors: told
# from columns, of all calls at once.


@dataclass(frozen=True)
class Kept:
    """Which calls are looked at, by call, and of which all children are too. Of a container whose
    children are not, all tensors are equal.
    """

    is_kept: Column
    is_open: Column


def kept_calls(columns: CallColumns, differ: Column, *, makers: bool) -> Kept | None:
    """The calls of roots, and all children of a call in or below which a tensor differs: what is
    between them is numbered by them.

    A container is opened too where calls that are kept and calls inside it share a tensor that it
    does not hand on itself. differ: by record. makers: keep the calls that made what such a call
    reads, which a replay asks for. None where parameters or integers differ, or where slots or
    places of calls are none of a forward pass.
    """
    refs = _Refs(columns)
    is_differing = differ[refs.record]
    dtypes = columns.columns["dtype"][differ]
    if columns.is_exact()[dtypes].any() or not refs.are_plain() or not _are_in_place(columns):
        return None
    if refs.holds_parameters(is_differing):
        return None
    parent = columns.columns["parent"]
    is_open = np.zeros(parent.size, bool)
    fresh = np.unique(refs.call[is_differing])
    while fresh.size:
        is_open[fresh] = True
        above = parent[fresh]
        above = np.unique(above[above >= 0])
        fresh = above[~is_open[above]]
    differing = is_open.copy()
    has_children = columns.times.children > 0
    while True:
        is_kept = (parent < 0) | is_open[parent]
        is_closed = is_kept & ~is_open & has_children
        opened = refs.lacking(is_kept, is_closed, differing if makers else None)
        if not opened.size:
            return Kept(is_kept, is_open & has_children)
        is_open[opened] = True


def _are_in_place(columns: CallColumns) -> bool:
    """Is every call of the root and step of its parent, and all of one rank?"""
    of = columns.columns
    inside = np.flatnonzero(of["parent"] >= 0)
    above = of["parent"][inside]
    return not np.diff(of["rank"]).any() and all(
        np.array_equal(of[name][inside], of[name][above]) for name in ("root", "step")
    )


class _Refs:
    """References of calls to tensors, one call after the other."""

    def __init__(self, columns: CallColumns) -> None:
        self._parent, self._names = columns.columns["parent"], columns.names
        self.slot, self.record = columns.columns["ref_slot"], columns.columns["ref_record"]
        counts = np.diff(columns.columns["refs_at"])
        self.call = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
        self._number = columns.columns["dtype"].size
        self._is_param, self._is_written = (
            np.array([test(name) for name in self._names])[self.slot]
            for test in (is_param, is_written)
        )

    def are_plain(self) -> bool:
        """Are all tensors read or made by a forward pass, and no parameter changed by one?"""
        if self._marked(self._is_param)[self.record[self._is_written]].any():
            return False
        used = np.flatnonzero(np.bincount(self.slot, minlength=len(self._names)))
        return all(_is_plain_slot(self._names[number]) for number in used.tolist())

    def holds_parameters(self, some: Column) -> bool:
        """Is a parameter among some references?"""
        return bool((some & self._is_param).any())

    def lacking(self, is_kept: Column, is_closed: Column, differing: Column | None) -> Column:
        """Containers, of those that are closed, that hide what calls outside of them share, or made
        nothing. differing: by call; None where the makers of what these read need not be seen.
        """
        of_kept = is_kept[self.call]
        is_shown = self._marked(of_kept & ~self._is_param)
        hidden = np.flatnonzero(~of_kept & is_shown[self.record])
        tops = self._tops(self.call[hidden], is_kept)
        own = np.flatnonzero(is_closed[self.call])
        keys = tops * self._number + self.record[hidden]
        lone = ~np.isin(keys, self.call[own].astype(np.int64) * self._number + self.record[own])
        if differing is not None:
            is_read = self._marked(differing[self.call] & ~self._is_param)
            lone |= is_read[self.record[hidden]] & self._is_written[hidden]
        has_made = np.zeros(is_closed.size, bool)
        has_made[self.call[self._is_written]] = True
        return np.union1d(tops[lone], np.flatnonzero(is_closed & ~has_made))

    def _tops(self, calls: Column, is_kept: Column) -> Column:
        """The innermost kept call around each call."""
        tops = calls.astype(np.int64)
        while (inside := np.flatnonzero(~is_kept[tops])).size:
            tops[inside] = self._parent[tops[inside]]
        return tops

    def _marked(self, some: Column) -> Column:
        """Which records some references are to."""
        is_marked = np.zeros(self._number, bool)
        is_marked[self.record[some]] = True
        return is_marked


def _is_plain_slot(name: str) -> bool:
    if is_own_input(name) or is_read_beside(name) or slot_family(name) != slot_kind(name):
        return False
    return is_input(name) or is_param(name) or is_written(name)
