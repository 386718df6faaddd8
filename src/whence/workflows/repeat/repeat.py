"""Checks whether a program repeats itself: runs one command in fresh processes and compares the
runs bit for bit.

The module describes what differs and what would make the program repeat itself.

It also measures how far a difference between two runs of a training reaches: gradients, loss,
parameters.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Ref, Run
from whence.records.marks import NoProgram, drawn_by, is_without_program, reads_unwritten
from whence.records.missing import missing_of
from whence.records.region import children
from whence.records.slots import (
    is_drawn,
    is_input,
    is_of_child,
    is_output,
    is_param,
    is_read,
    is_state,
    is_written,
    split_child,
)
from whence.results import Repeated, Source, SourceKind, Status, StepLoss, TouchedGradient
from whence.workflows.notebook_progress import Tell
from whence.workflows.repeat import programs
from whence.workflows.repeat.equal_records import EqualRecords, partners, rel_l2
from whence.workflows.repeat.programs import (
    ChangedOperation,
    changed_operation,
    documented,
    is_own_backward,
)

_MOST_SOURCES = 20
_SEEDED = (SourceKind.INPUT, SourceKind.STATE, SourceKind.RANDOM)
_LOST = ("hook-error", "error", "not-captured", "label-error", "observer")


def repeat_command(
    command: Sequence[str],
    *,
    times: int = 2,
    keep: str | os.PathLike[str] | None = None,
    tell: Tell | None = None,
    **options: Any,
) -> Repeated:
    """Run a command several times, each in a process of its own with the same arguments and
    environment, and name the first operator that does not repeat itself bit for bit.

    times: how many runs, at least 2. keep: a new folder that keeps the runs. options: of capture
    (seed, deterministic, steps, level ...). Without a seed nothing is seeded. tell: called with
    what is done next. Raises UsageError, OutputExists, CaptureError when a run fails.
    """
    from whence.readers.opening import open_run
    from whence.workflows.notebook_progress import telling
    from whence.workflows.rerun import Command, workplace

    if times < 2:
        raise UsageError(f"times {times}: at least 2 runs are compared")
    subject = Command(command)
    with workplace(keep, "repeat") as place, telling(tell) as say:
        runs = []
        for number in range(1, times + 1):
            say(f"run {number} of {times}")
            subject.capture(place / f"run-{number}", **options)
            runs.append(open_run(str(place / f"run-{number}")))
        say("comparing the runs")
        result = Repetition(runs, tuple(command), options).result()
    return result if keep is not None else msgspec.structs.replace(result, runs=())


class Repetition:
    """Several runs of one program. options: of their capture."""

    def __init__(
        self, runs: Sequence[Run], command: tuple[str, ...] = (), options: Mapping[str, Any] = {}
    ) -> None:
        self._runs, self._command, self._options = runs, command, options
        self._walks: dict[tuple[int, int], tuple[Walk, list[Difference]]] = {}

    def result(self) -> Repeated:
        """The combined result of all runs."""
        groups = self._groups()
        pair = (0, 1) if len(groups) == 1 else (groups[0][0], groups[1][0])
        walk, differences = self._walk(*pair)
        why = [] if differences else self._why_not_same()
        sources = self._sources(walk, differences)
        reach = _Reach(walk.records)
        status = Status.DIFFERENT if differences else Status.UNDECIDED if why else Status.SAME
        return Repeated(
            command=self._command,
            status=status,
            runs=tuple(run.path for run in self._runs),
            times=len(self._runs),
            groups=tuple(tuple(n + 1 for n in group) for group in groups),
            pair=(pair[0] + 1, pair[1] + 1),
            sources=sources,
            tensors=len(walk.records.compared),
            calls=walk.calls,
            uncompared=len(walk.records.unknown),
            why=tuple(why),
            gradient=reach.gradient(),
            losses=reach.losses(),
            end=reach.end() if differences else ("", None),
            steps=str(self._options.get("steps", "")),
            next=self._next(sources),
        )

    def _walk(self, first: int, second: int) -> tuple[Walk, list[Difference]]:
        if (first, second) not in self._walks:
            walk = Walk(self._runs[first], self._runs[second])
            self._walks[first, second] = walk, walk.differences()
        return self._walks[first, second]

    def _groups(self) -> list[list[int]]:
        """Groups of numbers of equal runs."""
        groups: list[list[int]] = []
        for number in range(len(self._runs)):
            for group in groups:
                if not self._walk(group[0], number)[1]:
                    group.append(number)
                    break
            else:
                groups.append([number])
        return groups

    def _why_not_same(self) -> list[str]:
        """Reasons why runs without a visible difference may still differ."""
        why = []
        for number, run in enumerate(self._runs, 1):
            why += [f"run {number}: {missing.text}" for missing in missing_of(run)]
            why += [f"run {number}: {n.text}" for n in run.notes if n.kind in _LOST][:3]
        for walk, _ in self._walks.values():
            if unknown := len(walk.records.unknown):
                record = walk.first.records[walk.records.unknown[0][0]]
                reason = f" ({record.why})" if record.why else ""
                why.append(f"{unknown} tensors have neither a hash nor elements{reason}")
            if not walk.records.compared:
                why.append("no tensor was captured in both runs")
        return list(dict.fromkeys(why))

    # ---- what differs

    def _sources(self, walk: Walk, differences: list[Difference]) -> tuple[Source, ...]:
        """One source for each module and kind, in program order."""
        by_place: dict[tuple[Any, ...], list[Difference]] = {}
        for difference in differences:
            call = difference.call
            slot = difference.slot if difference.kind == SourceKind.INPUT else ""
            key = (difference.kind, call.root, call.name, call.op_type, call.phase, slot)
            by_place.setdefault(key, []).append(difference)
        chosen = itertools.islice(by_place.values(), _MOST_SOURCES)
        return tuple(self._source(walk, same[0], len(same)) for same in chosen)

    def _source(self, walk: Walk, difference: Difference, calls: int) -> Source:
        call = difference.call
        inner = self._inner(walk, difference)
        words, advice = words_and_advice(difference, walk, inner)
        known = difference.changed or inner
        error, differing, count = self._size(walk, difference)
        return Source(
            kind=difference.kind,
            scope=call.name if call.scope or call.op else "",
            root=call.root,
            op_type=call.op_type,
            slot=difference.slot,
            step=call.step,
            rank=call.rank,
            order=call.order,
            words=words,
            phase=call.phase,
            operator=known.operator if known is not None else "",
            line=(known.line if known is not None else "") or _line(walk.first, difference),
            error=error,
            differing=differing,
            count=count,
            calls=calls,
            repeats_with=advice,
            is_certain=difference.kind != SourceKind.RANDOM or _draws_differ(difference, walk),
        )

    def _inner(self, walk: Walk, difference: Difference) -> programs.ChangedOperation | None:
        """The operation of the call's program that does not repeat on the recorded tensors."""
        call = difference.call
        if difference.kind != SourceKind.OPERATOR or not call.program:
            return None
        return programs.unrepeatable(walk.first, call, difference.slot)

    def _size(self, walk: Walk, difference: Difference) -> tuple[float | None, int, int]:
        """(relative 2-norm, number of differing elements, number of elements) of a difference."""
        if difference.records is None:
            return None, 0, 0
        count = walk.first.records[difference.records[0]].count
        arrays = walk.records.elements(*difference.records)
        if arrays is None:
            return None, 0, count
        a, b = arrays
        return rel_l2([arrays]), int(((a != b) & ~((a != a) & (b != b))).sum()), count

    def _next(self, sources: tuple[Source, ...]) -> str:
        """A command that shows more about the first source."""
        if not sources:
            return ""
        first = sources[0]
        options: list[str] = []
        if first.kind in _SEEDED and first.is_certain and self._options.get("seed") is None:
            options = ["--seed", "0"]
        elif first.kind in (SourceKind.OPERATOR, SourceKind.RANDOM) and not first.operator:
            if self._options.get("level", "modules") == "modules":
                options = ["--level", "op"]
            elif not self._options.get("deterministic"):
                options = ["--deterministic"]
        if not options:
            return ""
        return shlex.join(["whence", "repeat", *options, "--", *self._command])


def _line(run: Run, difference: Difference) -> str:
    """The line at which the program calls a call, or the child whose input differs; the class's
    line when that is unknown.
    """
    call = difference.call
    if is_of_child(difference.slot):
        place = split_child(difference.slot)[0]
        return _called_at(run, call, place) or _kids(run, call)[place].source
    if call.parent < 0:
        return call.source
    parent = run.calls[call.parent]
    place = next((k for k, c in enumerate(_kids(run, parent)) if c.id == call.id), -1)
    return _called_at(run, parent, place) or call.source


def _kids(run: Run, call: Call) -> list[Call]:
    return sorted((c for c in run.calls if c.parent == call.id), key=lambda c: c.order)


def _called_at(run: Run, call: Call, place: int) -> str:
    """The line of a call's code that calls its child, "" when unknown."""
    program = run.programs.get(call.program)
    if program is None:
        return ""
    lines = dict(zip((k for k, _ in program.calls), program.call_lines, strict=False))
    return lines.get(place, "")


_ROW_BYTES = 16  # a shorter row may be equal by chance
_SEED = "seed the program before it draws: torch.manual_seed(0), numpy.random.seed(0)"
_TRY_SEED = "whence repeat --seed 0 tells whether a seed is enough"
_DETERMINISTIC = "torch.use_deterministic_algorithms(True) (whence repeat --deterministic tries it)"


_Words = tuple[str, tuple[str, ...]]
"""A text about what differs, and advice for making it repeat."""


def words_and_advice(difference: Difference, walk: Walk, inner: ChangedOperation | None) -> _Words:
    """The text and advice for a source.

    inner: the operation of the call's program that does not repeat, when known.
    """
    kind = difference.kind
    if kind == SourceKind.OPERATOR:
        return _operator(difference, walk, inner)
    words = {SourceKind.INPUT: _input, SourceKind.STATE: _state, SourceKind.RANDOM: _random}
    if kind in words:
        return words[kind](difference, walk)
    if kind == SourceKind.CODE and difference.changed is not None:
        return (
            difference.words or difference.changed.words,
            (
                "look at the line for what differs from run to run: the time, a random number of "
                "Python, the order of a set (PYTHONHASHSEED=0 fixes it)",
            ),
        )
    return difference.words, ("look for what decides this: the time, a file that the program "
                              "writes itself, a random number",)  # fmt: skip


def _input(difference: Difference, walk: Walk) -> _Words:
    shared, rows = _shared_rows(difference, walk)
    loader = "DataLoader(..., generator=torch.Generator().manual_seed(0))"
    workers = "with num_workers, seed numpy and random in worker_init_fn"
    if rows and shared:
        every = f"all {rows} of its rows" if shared == rows else f"{shared} of its {rows} rows"
        words = f"the data come in another order: {every} are in the other run at another place"
        return words, (f"fix the order: shuffle=False, or {loader}", workers, _TRY_SEED)
    return "the program gives it other data", (_SEED, f"{loader}; {workers}", _TRY_SEED)


def _shared_rows(difference: Difference, walk: Walk) -> tuple[int, int]:
    """(number of rows of an input that also occur in the same input at any step of the other run,
    number of rows); (0, 0) when rows tell nothing.
    """
    if difference.records is None:
        return 0, 0
    try:
        rows = _row_bytes(walk.second.array(difference.records[1]))
        others: set[bytes] = set()
        for record in outside_inputs(walk.first, difference.call, difference.slot):
            others.update(_row_bytes(walk.first.array(record)))
    except ElementsMissing:
        return 0, 0
    return sum(row in others for row in rows), len(rows)


def _row_bytes(array: Array) -> list[bytes]:
    if array.ndim < 2 or array.nbytes // max(len(array), 1) < _ROW_BYTES:
        return []
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    return [row.tobytes() for row in rows if (row != row[0]).any()]


def _state(difference: Difference, walk: Walk) -> _Words:
    first, second = initial_states(walk.first), initial_states(walk.second)
    hashes = {walk.first.records[r].hash: name for name, r in first.items()}
    moved = [
        name
        for name, record in second.items()
        if name in first
        and (digest := walk.second.records[record].hash)
        and digest != walk.first.records[first[name]].hash
        and digest in hashes
    ]
    if moved:
        words = (
            f"it holds what {hashes[walk.second.records[second[moved[0]]].hash]} holds in the "
            "other run: values are drawn in another order"
            if len(moved) == 1
            else f"values stand in other parameters ({len(moved)} of {len(first)}): they are drawn "
            "in another order"
        )
        return words, (
            "make the order one: sorted(...) in the place of a set, or PYTHONHASHSEED=0",
        )
    if difference.call.step:
        return "code that was not captured sets it to another value", (_SEED, _TRY_SEED)
    return "it begins with other values", (
        f"{_SEED}, before the model is made",
        "if it is read from a file: a file that the program itself writes",
        _TRY_SEED,
    )


def _random(difference: Difference, walk: Walk) -> _Words:
    drawn = _drawn_by(difference, walk.first)
    words = f"draws other random numbers{f' ({drawn})' if drawn else ''}"
    if not _draws_differ(difference, walk):
        words = f"{NoProgram.RANDOM}{f' ({drawn})' if drawn else ''}: these differ, or an operator"
        return words, (_SEED, "whence repeat --level op tells which of the two it is")
    if walk.first.info.seed is None:
        return words, (_SEED, _TRY_SEED)
    return f"{words} although the run was seeded: something else draws before it, or seeds anew", (
        "draw in one thread and in a fixed order, or give the draw a generator of its own",
    )


def _drawn_by(difference: Difference, run: Run) -> str:
    """The operator that drew random numbers, "" when unknown."""
    program = run.programs.get(difference.call.program)
    draws = program.draws if program is not None else ()
    operators = {draw.slot: draw.operator for draw in draws}
    return operators.get(difference.slot, "") or drawn_by(difference.call)


def _draws_differ(difference: Difference, walk: Walk) -> bool:
    """Whether it is certain that other random numbers were drawn.

    This is so when the drawn numbers or the generator's state differ, or the elements that a
    dropout zeroes.
    """
    if is_state(difference.slot) or is_drawn(difference.slot):
        return True
    if "dropout" not in difference.call.op_type.lower() or difference.records is None:
        return False
    arrays = walk.records.elements(*difference.records)
    return arrays is not None and bool(((arrays[0] == 0) != (arrays[1] == 0)).any())


def _operator(difference: Difference, walk: Walk, inner: ChangedOperation | None) -> _Words:
    reason = difference.call.no_program
    if reads_unwritten(difference.call):
        return "reads memory that torch.empty made and nothing wrote", (
            f"write it before it is read; {_DETERMINISTIC} fills such memory",
        )
    if inner is not None:
        return f"{inner.operator} {inner.words}", (_DETERMINISTIC,)
    names = documented(walk.first.programs.get(difference.call.program))
    device = _device(difference, walk.first)
    if names and device not in ("", "cpu"):
        advice = [_DETERMINISTIC]
        if any("conv" in name for name in names):
            advice.append("torch.backends.cudnn.benchmark = False")
        if any(name.startswith("aten.bmm") for name in names):
            advice.append("CUBLAS_WORKSPACE_CONFIG=:4096:8")
        return f"runs {', '.join(names[:3])}, which torch documents as not deterministic", (
            *advice,
        )
    words = "gives another result on equal inputs"
    if is_of_child(difference.slot) and has_operators(walk.first, difference.call):
        words = "is made by code that torch does not see: numpy, a thread, an extension"
    elif is_own_backward(walk.first, difference.call) or (
        difference.partner is not None and is_own_backward(walk.second, difference.partner)
    ):
        words += "; a backward of its own computes it (torch.autograd.Function)"
    elif reason:
        words += f"; it cannot be looked into ({reason})"
    advice = [_DETERMINISTIC, "an operator of your own: sum in a fixed order, write every element"]
    return words, tuple(advice)


def _device(difference: Difference, run: Run) -> str:
    if difference.records is None:
        return ""
    return run.records[difference.records[0]].device


_GRADIENTS, _LOSS, _SUM = "gradients", "loss", "AccumulateGrad"


class _Reach:
    """Measures the difference between two runs in gradients, loss, parameters and outputs."""

    def __init__(self, records: EqualRecords) -> None:
        self._records = records
        self._first, self._second = records.first, records.second
        self._partners = partners(self._first.calls, self._second.calls)

    def _pairs(self, call: Call, refs: Iterable[Ref]) -> list[tuple[int, int]]:
        """The records of some tensors of a call: (first run, second run)."""
        number = self._partners.get(call.id)
        if number is None:
            return []
        others = {ref.slot: ref.record for ref in self._second.calls[number].refs}
        return [(r.record, others[r.slot]) for r in refs if r.slot in others]

    def gradient(self) -> TouchedGradient | None:
        """The gradients of the first step at which a parameter's gradient differs; None when none
        does.
        """
        by_step: dict[int, list[tuple[int, int]]] = {}
        kind = _GRADIENTS if any(c.op == _GRADIENTS for c in self._first.calls) else _SUM
        for call in self._first.calls:
            if kind in (call.op, call.op_type):
                slots = (
                    [r for r in call.refs if is_input(r.slot)]
                    if kind == _GRADIENTS
                    else [r for r in call.refs if is_output(r.slot)]
                )
                by_step.setdefault(call.step, []).extend(self._pairs(call, slots))
        for step, pairs in sorted(by_step.items()):
            differing = [pair for pair in pairs if self._records.equal(*pair) is False]
            if differing:
                return self._touched(step, pairs, set(differing))
        return None

    def _touched(
        self, step: int, pairs: list[tuple[int, int]], differing: set[tuple[int, int]]
    ) -> TouchedGradient:
        squares = {pair: self._norm(pair[0]) ** 2 for pair in pairs}
        whole = sum(squares.values())
        share = sum(squares[pair] for pair in differing) / whole if whole else 1.0
        error = rel_l2(self._records.elements(*pair) for pair in pairs)
        return TouchedGradient(step, share, error, len(differing), len(pairs))

    def _norm(self, record: int) -> float:
        statistics = self._first.records[record].statistics
        return (statistics.norm or 0.0) if statistics is not None else 0.0

    def losses(self) -> tuple[StepLoss, ...]:
        """The loss at the first step where it differs and at the last step; () when it never
        differs.
        """
        steps: dict[int, tuple[int, int]] = {}
        for call in sorted(self._first.calls, key=lambda c: c.order):
            if call.op == _LOSS and call.phase == "forward":
                for pair in self._pairs(call, call.slots("output")):
                    if self._first.records[pair[0]].count == 1:
                        steps[call.step] = pair
        differing = [s for s, pair in sorted(steps.items()) if not self._records.equal(*pair)]
        if not differing:
            return ()
        wanted = dict.fromkeys((differing[0], max(steps)))
        return tuple(
            StepLoss(s, _number(self._first, steps[s][0]), _number(self._second, steps[s][1]))
            for s in wanted
        )

    def end(self) -> tuple[str, float | None]:
        """(name, relative 2-norm of the difference) of the final result: the parameters of a
        training, otherwise the outputs of a model.
        """
        steps = [c for c in self._first.calls if c.phase == "optimizer" and c.refs]
        if steps:
            last = max(c.step for c in steps)
            calls = [c for c in steps if c.step == last]
            refs = [(c, [r for r in c.refs if r.slot == "output.param"]) for c in calls]
            name = f"parameters after step {last}"
        else:
            roots = [c for c in self._first.calls if c.parent == -1 and c.slots("output")]
            if not roots:
                return "", None
            last = max(c.step for c in roots)
            refs = [(c, list(c.slots("output"))) for c in roots if c.step == last]
            name = f"outputs of step {last}"
        pairs = [pair for call, slots in refs for pair in self._pairs(call, slots)]
        numbers = [p for p in pairs if dtypes.is_floating(self._first.records[p[0]].dtype)]
        if not numbers:
            return "", None
        return name, rel_l2(self._records.elements(*pair) for pair in numbers)


def _number(run: Run, record: int) -> float | None:
    try:
        return float(run.array(record).reshape(()))
    except ElementsMissing:
        statistics = run.records[record].statistics
        return statistics.mean if statistics is not None else None


# Walks over two runs of one program in execution order and collects tensors that differ although
# everything they were computed from is equal.


class Difference(NamedTuple):
    """A tensor that differs although its inputs are equal.

    call, partner: the call with the tensor in both runs; for a tensor made by a container's own
    code, the container's. place: of the container's child that receives it, -1 for none. records:
    in the two runs, None when it is no tensor. changed: the first operation in which the recorded
    programs differ.
    """

    kind: SourceKind
    call: Call
    partner: Call | None
    slot: str
    records: tuple[int, int] | None = None
    changed: ChangedOperation | None = None
    words: str = ""


class _Sides(NamedTuple):
    """A call and the same call of the other run."""

    call: Call
    partner: Call


class Walk:
    """Finds differences between two runs in execution order.

    calls: number of compared calls. records: compares records of the two runs.
    """

    def __init__(self, first: Run, second: Run) -> None:
        self.first, self.second = first, second
        self.records = EqualRecords(first, second)
        self._partners = partners(first.calls, second.calls)
        self._kids = children(first.calls)
        self._seen: set[int] = set()
        self._unequal = 0  # sights that differ, so far
        self._unequal_results = 0  # those of them that a call made
        self._programs: dict[tuple[str, str], ChangedOperation | None] = {}
        self.calls = len(self._partners)

    def differences(self) -> list[Difference]:
        """All differences, in execution order."""
        differences = [*self._below(-1, None, 0), *self._only_in_second()]
        return sorted(differences, key=lambda difference: difference.call.order)

    def _only_in_second(self) -> Iterator[Difference]:
        paired = set(self._partners.values())
        missing = {call.id for call in self.second.calls if call.id not in paired}
        for call in self.second.calls:
            if call.id in missing and call.parent not in missing:
                words = "only the second run makes this call"
                yield Difference(SourceKind.CALLS, call, None, "", words=words)

    def _below(self, parent: int, above: _Sides | None, before: int) -> Iterator[Difference]:
        """Differences inside a call. before: number of differing tensors when the call began."""
        for place, number in enumerate(self._kids.get(parent, ())):
            call = self.first.calls[number]
            if call.id not in self._partners:
                words = "only the first run makes this call"
                self._unequal += 1
                yield Difference(SourceKind.CALLS, call, None, "", words=words)
                continue
            sides = _Sides(call, self.second.calls[self._partners[call.id]])
            began = self._unequal
            yield from self._given(sides, above, place, before)
            yield from self._below(call.id, sides if call.refs else None, began)
            yield from self._left(sides, began)

    # ---- inputs of a call

    def _given(
        self, sides: _Sides, above: _Sides | None, place: int, before: int
    ) -> Iterator[Difference]:
        call, partner = sides
        if repr(call.arguments) != repr(partner.arguments) and not self._unequal:
            self._unequal += 1
            words = _arguments(call, partner)
            yield Difference(SourceKind.ARGUMENT, call, partner, "arguments", words=words)
        untouched = self._unequal == before
        for ref, equal in self._refs(sides, read=True):
            is_new = ref.record not in self._seen
            self._seen.add(ref.record)
            if equal:
                continue
            self._unequal += 1
            if not is_new:
                continue
            records = self._pair(ref, partner)
            if is_state(ref.slot) or is_drawn(ref.slot):
                yield Difference(SourceKind.RANDOM, call, partner, ref.slot, records)
            elif is_param(ref.slot):
                yield Difference(SourceKind.STATE, call, partner, ref.slot, records)
            elif above is not None:
                if untouched:
                    yield self._made(above, f"{place}:{ref.slot}", records)
            elif not self._unequal_results:
                yield Difference(SourceKind.INPUT, call, partner, ref.slot, records)

    def _refs(self, sides: _Sides, *, read: bool) -> Iterator[tuple[Ref, bool]]:
        """The tensors that a call reads (or writes), each with whether it is equal; unknown counts
        as equal.
        """
        others = {ref.slot: ref.record for ref in sides.partner.refs}
        for ref in sides.call.refs:
            wanted = is_read(ref.slot) or is_state(ref.slot) if read else is_written(ref.slot)
            if wanted:
                record = others.get(ref.slot)
                equal = record is not None and self.records.equal(ref.record, record) is not False
                yield ref, equal

    @staticmethod
    def _pair(ref: Ref, partner: Call) -> tuple[int, int] | None:
        record = next((r.record for r in partner.refs if r.slot == ref.slot), None)
        return (ref.record, record) if record is not None else None

    # ---- outputs of a call

    def _left(self, sides: _Sides, began: int) -> Iterator[Difference]:
        inherited = self._unequal > began
        changed = self._changed(sides)
        told = False
        for ref, equal in self._refs(sides, read=False):
            is_new = ref.record not in self._seen
            self._seen.add(ref.record)
            if equal:
                continue
            self._unequal += 1
            self._unequal_results += 1
            if is_new and not inherited and not told:
                told = True
                yield self._made(sides, ref.slot, self._pair(ref, sides.partner))
        if changed is not None and not self._unequal:
            self._unequal += 1
            words = f"{changed.words}; its outputs are equal"
            yield Difference(SourceKind.CODE, sides.call, sides.partner, "", None, changed, words)
        if len(sides.call.refs) != len(sides.partner.refs) and not self._unequal:
            self._unequal += 1
            words = "it has other tensors in the two runs"
            yield Difference(SourceKind.CALLS, sides.call, sides.partner, "", words=words)

    def _made(self, sides: _Sides, slot: str, records: tuple[int, int] | None) -> Difference:
        """A difference that a call's own code produced from equal inputs."""
        call, partner = sides
        changed = self._changed(sides)
        has_state = any(is_state(ref.slot) for ref in call.refs)
        if changed is not None:
            kind = SourceKind.CODE
        elif is_without_program(call, NoProgram.RANDOM) and not has_state:
            kind = SourceKind.RANDOM
        else:
            kind = SourceKind.OPERATOR
        return Difference(kind, call, partner, slot, records, changed)

    def _changed(self, sides: _Sides) -> ChangedOperation | None:
        """The first operation in which the recorded programs of both calls differ."""
        ids = sides.call.program, sides.partner.program
        if not all(ids) or ids[0] not in self.first.programs:
            return None
        if ids not in self._programs:
            programs = self.first.programs[ids[0]], self.second.programs[ids[1]]
            self._programs[ids] = changed_operation(programs, (self.first, self.second))
        return self._programs[ids]


def _arguments(call: Call, partner: Call) -> str:
    for name in {**call.arguments, **partner.arguments}:
        a, b = (repr(c.arguments.get(name)) for c in (call, partner))
        if a != b:
            return f"{name} is {a[:60]} in one run and {b[:60]} in the other"
    return "it is given other arguments"


def has_operators(run: Run, call: Call) -> bool:
    """Whether the operators that a call ran are recorded as calls of their own."""
    return any(c.kind == "operator" and c.parent == call.id for c in run.calls)


def initial_states(run: Run) -> dict[str, int]:
    """Parameters and buffers as a run first reads them: NAME.SLOT -> record."""
    out: dict[str, int] = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.phase == "forward" and call.kind == "module":
            for ref in call.slots("param"):
                out.setdefault(f"{call.root}.{call.scope}.{ref.slot}", ref.record)
    return out


def outside_inputs(run: Run, call: Call, slot: str) -> Iterator[int]:
    """Records of an input slot over all calls of the same module or operator."""
    place = (call.root, call.scope, call.op, call.op_type)
    for other in run.calls:
        if (other.root, other.scope, other.op, other.op_type) == place:
            yield from (r.record for r in other.refs if r.slot == slot)
