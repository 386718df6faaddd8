"""Where the elements of a tensor lie, as a worker can find them again: a run by its path or URL,
and a number in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from whence import store
from whence.errors import UnreadableRun
from whence.readers import ForeignRun, opening
from whence.records import Over, Run
from whence.store import StoredRun, is_url


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
