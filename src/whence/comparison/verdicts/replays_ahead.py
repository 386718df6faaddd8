"""Replays that the workers of an engine make before regions are judged, where each stands for
itself: both runs lie on disk as they are compared, every call has a partner, and nothing is
declared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import msgspec

from whence.comparison.options import CompareOptions
from whence.comparison.paired_runs import PairedCall, PairedRuns
from whence.comparison.replays.replayer import Replayer
from whence.comparison.tasks import measuring, replaying
from whence.comparison.tasks.replaying import Described, Replayed, Work
from whence.comparison.tasks.sources import Source, Sources
from whence.comparison.verdicts.parameters import Parameters
from whence.engines import Engine, Task
from whence.records import Call, Over, Program
from whence.records.marks import Mark, has_mark
from whence.store import StoredRun

LEAST_BYTES = 1 << 30
"""Of tensors on both sides, from which on replays are handed out: a gigabyte takes some 10 s of
CPU, and a worker 4 s until it has imported torch.
"""


def replay_ahead(
    paired: PairedRuns,
    replayer: Replayer,
    parameters: Parameters,
    options: CompareOptions,
    pairs: Iterable[PairedCall],
) -> None:
    """Have these calls replayed by workers, and hand the figures to the replayer. What workers do
    not give is replayed when it is asked for.
    """
    engine, sources = options.engine, _sources(paired)
    if engine is None or sources is None or not _is_plain(paired, options):
        return
    groups: dict[str, list[tuple[Described, int]]] = {}
    for pair in pairs:
        program = paired.reference.programs.get(pair.call.program)
        if program is not None and pair.call.leaf and not has_mark(program, Mark.COMPOSED):
            described = _described(paired, parameters, pair, program)
            groups.setdefault(program.id, []).append((described, _nbytes(paired, described)))
    if sum(nbytes for group in groups.values() for _, nbytes in group) < LEAST_BYTES:
        return
    works = [
        Work(*sources, options.allow, len(paired.calls), tuple(calls))
        for calls in _packed(groups.values())
    ]
    for done in _done(engine, works, paired):
        replayer.take(done.results, done.trust)


def _sources(paired: PairedRuns) -> tuple[Source, Source] | None:
    """Both runs on disk, if they are compared as they lie there."""
    sources = []
    for run in (paired.reference, paired.target):
        below = run
        while type(below) is type(paired.reference) and isinstance(below, Over):
            below = below.base
        first_record = Sources(run).of(0) if len(run.records) else None
        if not isinstance(below, StoredRun) or first_record is None:
            return None
        sources.append(first_record[0])
    return sources[0], sources[1]


def _is_plain(paired: PairedRuns, options: CompareOptions) -> bool:
    """Does each replay stand for itself?"""
    special = (options.policy, options.chart, options.model, options.budget)
    return (
        all(option is None for option in special)
        and len(paired.plan.pairs) == len(paired.calls)
        and not paired.plan.padded
        and all(map(_stands_alone, paired.calls))
    )


def _stands_alone(call: Call) -> bool:
    return call.kind == "module" and call.phase == "forward" and call.forward < 0


def _described(
    paired: PairedRuns, parameters: Parameters, pair: PairedCall, program: Program
) -> Described:
    slot_of = functools.partial(paired.replayed, pair.index)
    names = dict.fromkeys(
        (
            *program.inputs,
            *program.params,
            *(slot for slot, _ in program.outputs),
            *(slot for both in program.same for slot in both),
        )
    )
    slots = {name: slot for name in names if (slot := slot_of(name)) is not None}
    return Described(
        pair.call.id,
        pair.partner.id,
        slots,
        parameters.given(pair.call, paired.slots[pair.index]),
        frozenset(name for name in slots if paired.all_same(pair.index, (name,))),
    )


def _nbytes(paired: PairedRuns, described: Described) -> int:
    """Of the tensors of a call, on both sides."""
    return sum(
        measuring.nbytes_of(record)
        for slot in described.slots.values()
        for record in paired.records(slot)
    )


def _packed(groups: Iterable[list[tuple[Described, int]]]) -> Iterator[list[Described]]:
    """Calls of whole programs, with a task's worth of data."""
    calls: list[Described] = []
    nbytes = 0
    for group in groups:
        calls += [described for described, _ in group]
        nbytes += sum(size for _, size in group)
        if nbytes >= measuring.TASK_BYTES:
            yield calls
            calls, nbytes = [], 0
    if calls:
        yield calls


def _done(engine: Engine, works: list[Work], paired: PairedRuns) -> Iterator[Replayed]:
    tasks = [
        Task(number, replaying.__name__, msgspec.msgpack.encode(work))
        for number, work in enumerate(works)
    ]
    done = 0
    with contextlib.closing(engine.run(tasks)) as outcomes:
        for outcome in outcomes:
            done += 1
            paired.progress(done, len(tasks), "replaying")
            if not outcome.error:
                yield msgspec.msgpack.decode(outcome.result, type=Replayed)
