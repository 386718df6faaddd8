"""Pairs of tensors that differ, measured: here on threads, or as tasks of an engine. A task holds
which tensors of which runs on disk; the figures come back.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from whence import _kernels, metrics, store
from whence.comparison.options import CompareOptions
from whence.dtypes import DTYPES, Array
from whence.engines import Engine, Outcome, Task
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import ForeignRun, opening
from whence.records import Over, Record, Run
from whence.results import Measured
from whence.store import StoredRun, is_url

TASK_BYTES = 128 << 20
"""Of both sides of a task's pairs: what makes the cost of handing it out and of its row's way back
less than a hundredth of its work.
"""

Key = tuple[int, int]
Progress = Callable[[int, int, str], None]


class _Work(msgspec.Struct, frozen=True):
    """A task: pairs of tensors of two runs on disk, and how they are measured. compiled: by the
    kernels, as the process does that hands it out; else by numpy.
    """

    reference: Source
    target: Source
    pairs: tuple[Key, ...]
    tier: str
    rtol: float
    atol: float
    compiled: bool


_Results = list[Measured | str]
"""What came of a task's pairs, in their order; a text says why the elements are missing."""


def perform(payload: bytes) -> bytes:
    """Measure the pairs of a task, in a worker."""
    work = msgspec.msgpack.decode(payload, type=_Work)
    runs = opened(work.reference), opened(work.target)
    results = _taken(runs, work.pairs, work, 1, lambda *_: None, kernels=work.compiled)
    return msgspec.msgpack.encode([results[pair] for pair in work.pairs])


def measure(
    runs: tuple[Run, Run],
    keys: Sequence[Key],
    options: CompareOptions,
    progress: Progress,
) -> dict[Key, Measured]:
    """Figures of pairs of tensors, those of which a run has no elements first. keys: in the order
    in which they are best read.

    The figures are the same, bit for bit, whatever engine measures. Less than a task's worth of
    data is measured here.
    """
    pairs = [_Pair.of(key, runs) for key in keys]
    if options.engine is None or sum(pair.nbytes for pair in pairs) < TASK_BYTES:
        return _here(runs, keys, options, progress)
    results = _with_engine(runs, pairs, options, options.engine, progress)
    missing = {key: m for key in keys if (m := results[key]).tier == "none"}
    return missing | {key: results[key] for key in keys}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A pair to measure. has_dtypes: both have a name here."""

    key: Key
    has_dtypes: bool
    nbytes: int

    @staticmethod
    def of(key: Key, runs: tuple[Run, Run]) -> _Pair:
        records: list[Record] = [run.records[number] for run, number in zip(runs, key, strict=True)]
        size = math.prod(records[0].shape)
        first, second = (DTYPES.get(record.dtype) for record in records)
        if first is None or second is None:
            return _Pair(key, False, 0)
        return _Pair(key, True, size * (first.itemsize + second.itemsize))


def _with_engine(
    runs: tuple[Run, Run],
    pairs: Sequence[_Pair],
    options: CompareOptions,
    engine: Engine,
    progress: Progress,
) -> dict[Key, Measured]:
    works, rest = _packed(runs, pairs, options)
    done = 0

    def tell(number: int) -> None:
        nonlocal done
        done += number
        progress(done, len(pairs), "measuring")

    results: dict[Key, Measured] = {}
    if rest:
        results |= _here(runs, rest, options, lambda *_: None)
        tell(len(rest))
    tasks = [
        Task(number, __name__, msgspec.msgpack.encode(work))
        for number, (work, _) in enumerate(works)
    ]
    unread: list[Key] = []
    with contextlib.closing(engine.run(tasks)) as outcomes:
        for outcome in outcomes:
            keys = works[outcome.number][1]
            for key, result in zip(keys, _measured(outcome, len(keys)), strict=True):
                if isinstance(result, str):
                    unread.append(key)
                else:
                    results[key] = result
            tell(len(keys))
    # asked for once more, of these runs: they then say that they lack it
    return results | _here(runs, unread, options, lambda *_: None)


def _measured(outcome: Outcome, number: int) -> Iterable[Measured | str]:
    if outcome.error:
        return [Measured("none", False, why=f"could not be measured: {outcome.error}")] * number
    return msgspec.msgpack.decode(outcome.result, type=_Results)


def _packed(
    runs: tuple[Run, Run], pairs: Sequence[_Pair], options: CompareOptions
) -> tuple[list[tuple[_Work, list[Key]]], list[Key]]:
    """Tasks with the pairs they are of, and the pairs that only this process can read."""
    sources = Sources(runs[0]), Sources(runs[1])
    groups: dict[tuple[Source, Source], list[tuple[_Pair, Key]]] = {}
    rest: list[Key] = []
    for pair in pairs:
        sides = sources[0].of(pair.key[0]), sources[1].of(pair.key[1])
        if sides[0] is None or sides[1] is None or not pair.has_dtypes:
            rest.append(pair.key)
            continue
        group = groups.setdefault((sides[0][0], sides[1][0]), [])
        group.append((pair, (sides[0][1], sides[1][1])))
    works = []
    for (reference, target), members in groups.items():
        for part in _parts(members):
            work = _Work(
                reference, target, tuple(numbers for _, numbers in part),
                options.tier, options.rtol, options.atol, _kernels.compiled is not None,
            )  # fmt: skip
            works.append((work, [pair.key for pair, _ in part]))
    return works, rest


def _parts(members: Sequence[tuple[_Pair, Key]]) -> Iterator[list[tuple[_Pair, Key]]]:
    """Pairs in a row with at least a task's worth of data; the last ones go with those before."""
    left = sum(pair.nbytes for pair, _ in members)
    part: list[tuple[_Pair, Key]] = []
    nbytes = 0
    for member in members:
        part.append(member)
        nbytes += member[0].nbytes
        left -= member[0].nbytes
        if nbytes >= TASK_BYTES and left >= TASK_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _here(
    runs: tuple[Run, Run],
    keys: Sequence[Key],
    options: CompareOptions,
    progress: Progress,
) -> dict[Key, Measured]:
    """Measure on threads of this process."""
    taken = _taken(runs, keys, options, options.threads, progress)
    return {
        key: Measured("none", False, why=result) if isinstance(result, str) else result
        for key, result in taken.items()
    }


def _taken(
    runs: tuple[Run, Run],
    keys: Sequence[Key],
    how: _Work | CompareOptions,
    threads: int | None,
    progress: Progress,
    *,
    kernels: bool | None = None,
) -> dict[Key, Measured | str]:
    """Figures of pairs, those first of which a run has no elements: of them a text says why."""
    missing: dict[Key, Measured | str] = {}
    readable: list[Key] = []
    for side, run in enumerate(runs):
        announce(run, (key[side] for key in keys))

    def arrays() -> Iterator[tuple[Array, Array]]:
        for key in keys:
            try:
                pair = runs[0].array(key[0]), runs[1].array(key[1])
            except ElementsMissing as error:
                missing[key] = str(error)
                continue
            readable.append(key)
            progress(len(readable), len(keys), "measuring")
            yield pair

    measured = metrics.measure_many(
        arrays(), tier=how.tier, rtol=how.rtol, atol=how.atol, threads=threads, kernels=kernels
    )
    return missing | dict(zip(readable, measured, strict=True))


# Where the elements of a tensor lie, as a worker can find them again: a run by its path or URL,
# and a number in it.


class Source(msgspec.Struct, frozen=True):
    """A run on disk. ranks: only of these processes; None for all. records: how many it has."""

    path: str
    ranks: tuple[int, ...] | None
    is_foreign: bool
    records: int


@functools.lru_cache(maxsize=4)
def opened(source: Source) -> Run:
    """The run. Raises UnreadableRun where it is not the one that was described."""
    run: Run = (
        opening.open_run(source.path)
        if source.is_foreign
        else store.open_run(source.path, ranks=source.ranks)
    )
    if len(run.records) < source.records:
        raise UnreadableRun(
            f"{source.path} has {len(run.records)} tensors here, {source.records} where it is "
            "compared: all machines must see the same files under this path"
        )
    return run


class Sources:
    """Finds the source of each tensor of one run of a comparison."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[int, Source | None] = {}

    def of(self, record: int) -> tuple[Source, int] | None:
        """(run on disk, number in it) whose elements a tensor has unchanged; None where it was made
        from others, or lies in memory.
        """
        lowest = _lowest(self._run, record)
        if lowest is None:
            return None
        run, record = lowest
        if id(run) not in self._known:
            self._known[id(run)] = _source(run)
        source = self._known[id(run)]
        return None if source is None else (source, record)


def announce(run: Run, records: Iterable[int]) -> None:
    """Say which elements are looked at next, in this order, where a store fetches them ahead."""
    if not is_url(run.path):
        return
    by_run: dict[int, tuple[StoredRun, list[int]]] = {}
    for record in records:
        lowest = _lowest(run, record)
        if lowest is not None and isinstance(lowest[0], StoredRun):
            by_run.setdefault(id(lowest[0]), (lowest[0], []))[1].append(lowest[1])
    for stored, numbers in by_run.values():
        store.announce(stored, numbers)


def _lowest(run: Run, record: int) -> tuple[Run, int] | None:
    """The run, and the number in it, whose elements a tensor has unchanged; None where it was made
    from others.
    """
    while isinstance(run, Over) and not isinstance(run, ForeignRun):
        below = run.below(record)
        if below is None:
            return None
        run, record = below
    return run, record


def _source(run: Run) -> Source | None:
    if isinstance(run, StoredRun):
        path = run.path if is_url(run.path) else str(Path(run.path).absolute())
        ranks = None if run.chosen_ranks is None else tuple(sorted(run.chosen_ranks))
        return Source(path, ranks, False, len(run.records))
    if isinstance(run, ForeignRun) and Path(run.path).exists():
        return Source(str(Path(run.path).absolute()), None, True, len(run.records))
    return None
