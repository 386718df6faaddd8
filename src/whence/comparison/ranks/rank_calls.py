"""The calls of a run by rank, so that corresponding calls of all ranks can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from whence.records import Call, Collective, Over, Placement, Record, Run, collectives_of, in_order
from whence.store import StoredRun


class Moment(NamedTuple):
    """The key of a call without its rank; corresponding calls of all ranks share it."""

    root: str
    step: int
    micro: int
    phase: str
    scope: str
    op: str
    occurrence: int


class Print(NamedTuple):
    """A fingerprint of a tensor; tensors with equal `text` count as equal. exact: whether it is a
    hash, not a checksum that ignores the order of elements. constant: all elements are equal, or
    there are too few to distinguish tensors.
    """

    text: str
    shape: tuple[int, ...]
    exact: bool
    constant: bool


_FEWEST = 2  # fewest elements of a tensor that does not count as constant


class RankCalls:
    """The calls of a run by rank. at: moment -> rank -> call, in execution order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.at: dict[Moment, dict[int, Call]] = {}
        calls = in_order(run.calls)
        for call in calls:
            moment = Moment(
                call.root,
                call.step,
                call.micro,
                call.phase,
                call.scope,
                call.op,
                call.occurrence,
            )
            self.at.setdefault(moment, {}).setdefault(call.rank, call)
        self.ranks = tuple(sorted({c.rank for c in calls} | {c.rank for c in collectives_of(run)}))
        self._prints: dict[int, Print | None] = {}
        self._records: list[Record] = list(run.records)

    @cached_property
    def collectives(self) -> dict[int, list[Collective]]:
        """By rank, its collectives in the order in which it issued them."""
        by_rank: dict[int, list[Collective]] = {rank: [] for rank in self.ranks}
        for collective in sorted(collectives_of(self.run), key=lambda c: c.order):
            by_rank[collective.rank].append(collective)
        return by_rank

    @cached_property
    def broken_off(self) -> frozenset[int]:
        """Ranks whose process did not end cleanly."""
        run = self.run.base if isinstance(self.run, Over) else self.run
        if not isinstance(run, StoredRun):
            return frozenset()
        return frozenset(p.info.rank for p in run.readers if p.ended())

    def record(self, call: Call, slot: str) -> Record | None:
        """The record in a slot of a call; None if the call has no such slot."""
        number = call.by_slot.get(slot)
        return None if number is None else self._records[number]

    def print_of(self, call: Call, slot: str) -> Print | None:
        """The fingerprint of a slot's tensor; None if the call lacks the slot, or the record has
        neither hash nor statistics.
        """
        number = call.by_slot.get(slot)
        if number is None:
            return None
        if number not in self._prints:
            self._prints[number] = _print(self._records[number])
        return self._prints[number]

    def prints(self, moment: Moment, slot: str) -> dict[int, Print]:
        """By rank, the fingerprint of the slot at this moment, in order of ranks."""
        by_rank = {rank: self.print_of(call, slot) for rank, call in self.at[moment].items()}
        return {rank: known for rank, known in sorted(by_rank.items()) if known is not None}


def _print(record: Record) -> Print | None:
    figures, sketch = record.statistics, record.sketch
    constant = record.count < _FEWEST or (
        figures is not None and figures.min == figures.max and not figures.nan
    )
    text = f"{record.dtype} {record.shape} "
    if record.hash:
        return Print(text + record.hash, record.shape, True, constant)
    if sketch is None or figures is None:
        return None
    return Print(f"{text}{sketch.checksum} {figures}", record.shape, False, constant)


def clusters(prints: dict[int, Print], ranks: Iterable[int] | None = None) -> list[tuple[int, ...]]:
    """Groups of ranks with equal tensors, sorted by their smallest rank."""
    by_text: dict[str, list[int]] = {}
    for rank, known in prints.items():
        if ranks is None or rank in ranks:
            by_text.setdefault(known.text, []).append(rank)
    return sorted(tuple(sorted(group)) for group in by_text.values())


def replicated(placement: Placement) -> Iterator[tuple[int, ...]]:
    """Groups of ranks that hold replicas according to a tensor's placement; none if ranks hold
    partial sums.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    if not any(place.startswith("sum") for place in placement.places):
        for index, rank in enumerate(placement.ranks):
            place: list[int] = []
            rest = index
            for extent, how in reversed(list(zip(placement.mesh, placement.places, strict=True))):
                if how != "replicate":
                    place.append(rest % extent)
                rest //= extent
            groups.setdefault(tuple(place), []).append(rank)
    yield from (tuple(group) for group in groups.values() if len(group) > 1)


def in_words(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
