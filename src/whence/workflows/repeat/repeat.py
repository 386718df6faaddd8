"""Does a program repeat itself? Runs of one command in fresh processes, compared bit for bit."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import UsageError
from whence.records.missing import missing_of
from whence.records.slots import is_of_child, split_child
from whence.results import Repeated, Source, SourceKind, Status
from whence.workflows.repeat import programs
from whence.workflows.repeat.advice import draws_differ, words_and_advice
from whence.workflows.repeat.equal_records import rel_l2
from whence.workflows.repeat.reach import Reach
from whence.workflows.repeat.sources import Walk

if TYPE_CHECKING:
    from whence.records import Call, Run
    from whence.workflows.repeat.sources import Difference

Tell = Callable[[str], None]

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
    """Runs of one program. options: that they were captured with."""

    def __init__(
        self, runs: Sequence[Run], command: tuple[str, ...] = (), options: Mapping[str, Any] = {}
    ) -> None:
        self._runs, self._command, self._options = runs, command, options
        self._walks: dict[tuple[int, int], tuple[Walk, list[Difference]]] = {}

    def result(self) -> Repeated:
        """What all runs say together."""
        groups = self._groups()
        pair = (0, 1) if len(groups) == 1 else (groups[0][0], groups[1][0])
        walk, differences = self._walk(*pair)
        why = [] if differences else self._why_not_same()
        sources = self._sources(walk, differences)
        reach = Reach(walk.records)
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
        """Numbers of runs that are equal to each other."""
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
        """Why runs that show no difference may differ all the same."""
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
        """One source for each module and kind, the first first."""
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
            is_certain=difference.kind != SourceKind.RANDOM or draws_differ(difference, walk),
        )

    def _inner(self, walk: Walk, difference: Difference) -> programs.ChangedOperation | None:
        """The operation of the call's program that does not repeat on the recorded tensors."""
        call = difference.call
        if difference.kind != SourceKind.OPERATOR or not call.program:
            return None
        return programs.unrepeatable(walk.first, call, difference.slot)

    def _size(self, walk: Walk, difference: Difference) -> tuple[float | None, int, int]:
        """(relative 2-norm, elements that differ, elements) of what differs."""
        if difference.records is None:
            return None, 0, 0
        count = walk.first.records[difference.records[0]].count
        arrays = walk.records.elements(*difference.records)
        if arrays is None:
            return None, 0, count
        a, b = arrays
        return rel_l2([arrays]), int(((a != b) & ~((a != a) & (b != b))).sum()), count

    def _next(self, sources: tuple[Source, ...]) -> str:
        """A command that shows more of the first source."""
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
    """Where the program calls a call, or the child that is given what differs; its class where that
    is not known.
    """
    call = difference.call
    if is_of_child(difference.slot):
        place = split_child(difference.slot)[0]
        return _called_at(run, call, place) or _child(run, call, place).source
    if call.parent < 0:
        return call.source
    parent = run.calls[call.parent]
    place = next((k for k, c in enumerate(_kids(run, parent)) if c.id == call.id), -1)
    return _called_at(run, parent, place) or call.source


def _kids(run: Run, call: Call) -> list[Call]:
    return sorted((c for c in run.calls if c.parent == call.id), key=lambda c: c.order)


def _child(run: Run, call: Call, place: int) -> Call:
    return _kids(run, call)[place]


def _called_at(run: Run, call: Call, place: int) -> str:
    """The line of a call's code that calls its child, "" where it is not known."""
    program = run.programs.get(call.program)
    if program is None:
        return ""
    lines = dict(zip((k for k, _ in program.calls), program.call_lines, strict=False))
    return lines.get(place, "")
