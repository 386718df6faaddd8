"""Rows of one request: what a reference and an engine have at each position, and their distance."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Kind(StrEnum):
    """The kind of a row. Rows of the cache have heads: (positions, heads, width)."""

    INPUT = "input"
    OUTPUT = "output"
    K_WRITTEN = "K written"
    V_WRITTEN = "V written"
    K_READ = "K"
    V_READ = "V"
    SCORES = "scores"
    """What a router chooses from."""
    CHOICE = "choice"
    """Indices that a router takes."""
    OPERATOR = "operator"
    LOGITS = "logits"

    @property
    def is_of_cache(self) -> bool:
        """Whether the rows are keys or values."""
        return self.value[0] in "KV"

    @property
    def is_of_router(self) -> bool:
        """Whether the rows are scores of a router, or its choice among them."""
        return self in (Kind.SCORES, Kind.CHOICE)

    @property
    def is_read(self) -> bool:
        """Whether the rows were read from the cache."""
        return self in (Kind.K_READ, Kind.V_READ)

    @property
    def read(self) -> Kind:
        """The kind of keys or values as read from the cache."""
        return Kind(self.value[0]) if self.is_of_cache else self

    @property
    def written(self) -> Kind:
        """The kind of keys or values as written to the cache."""
        return Kind(f"{self.value[0]} written") if self.is_of_cache else self


class Event(NamedTuple):
    """Identifies what is compared: a tensor of a module, or keys or values of a layer.

    place: index among several tensors of a module.
    """

    module: str
    kind: Kind
    layer: int = -1
    place: int = 0


class Rows(NamedTuple):
    """Rows of one call, for the positions from `start` on."""

    call: int
    start: int
    rows: Array


class CacheRead(NamedTuple):
    """What a cache returned in one call for a request of `end` tokens, of which `added` are new.

    The cache covers positions from `first` on. Only rows that changed since the last read are kept.
    """

    call: int
    first: int
    end: int
    added: int
    positions: Array
    rows: Array


class HandedOut(NamedTuple):
    """Keys and values by layer, (positions, heads, width) each, that a call attends to which leaves
    a request with `end` tokens.
    """

    end: int
    states: dict[int, tuple[Array, Array]]


class HasExtent(Protocol):
    """The extent of a request in a call, as in `Segment`."""

    @property
    def length(self) -> int: ...
    @property
    def end(self) -> int: ...


class Trace:
    """The recorded rows of one request, by event, in the order in which events first occurred."""

    def __init__(self) -> None:
        self.rows: dict[Event, list[Rows]] = {}
        self.reads: dict[Event, list[CacheRead]] = {}
        self.order: dict[Event, int] = {}
        self._last: dict[Event, tuple[int, Array]] = {}

    def add(self, event: Event, rows: Rows) -> None:
        """Record rows of a call."""
        self.order.setdefault(event, len(self.order))
        self.rows.setdefault(event, []).append(rows)

    def read(self, event: Event, call: int, segment: HasExtent, rows: Array) -> None:
        """Record what a cache returned, except rows that are equal to the last read."""
        self.order.setdefault(event, len(self.order))
        first = segment.end - len(rows)
        changed = np.ones(len(rows), bool)
        if event in self._last:
            start, before = self._last[event]
            low, high = max(first, start), min(segment.end, start + len(before))
            if low < high:
                equal = rows[low - first : high - first] == before[low - start : high - start]
                changed[low - first : high - first] = ~equal.all((1, 2))
        self._last[event] = first, rows
        (places,) = np.nonzero(changed)
        self.reads.setdefault(event, []).append(
            CacheRead(call, first, segment.end, segment.length, places + first, rows[places])
        )

    def whole(self, event: Event) -> Array:
        """The rows of all positions in order, for an event that produced each row once."""
        return np.concatenate([rows.rows for rows in self.rows[event]])

    def handed(self) -> list[HandedOut]:
        """What the cache handed out, call by call; [] where calls did not continue each other."""
        calls: dict[int, HandedOut] = {}
        states: dict[Event, Array] = {}
        for event in sorted(self.reads, key=lambda event: event.kind):  # keys, then values
            for read in self.reads[event]:
                rows = np.zeros((read.end, *read.rows.shape[1:]), np.float64)
                before = states.get(event, rows[:0])
                rows[: len(before)] = before[: read.end]
                rows[read.positions] = read.rows
                states[event] = rows
                held = rows[read.first :]
                call = calls.setdefault(read.call, HandedOut(read.end, {}))
                keys = call.states.get(event.layer, (held, held))[0]
                call.states[event.layer] = keys, held
        ordered = [calls[number] for number in sorted(calls)]
        ends = [call.end for call in ordered]
        return ordered if ends == sorted(set(ends)) else []

    def choices(self, length: int) -> dict[int, Array]:
        """Indices that routers took, (length, k), by number of the choice in a call of the model;
        -1 at positions that no call computed.
        """
        chosen: dict[int, Array] = {}
        for event, several in self.rows.items():
            if event.kind is Kind.CHOICE:
                whole = np.full((length, several[0].rows.shape[-1]), -1, np.int64)
                for rows in several:
                    whole[rows.start : rows.start + len(rows.rows)] = rows.rows
                chosen[event.place] = whole
        return chosen


def distances(rows: Array, truth: Array, whole: Array | None = None) -> Array:
    """Relative 2-norm of the difference along the last axis.

    Infinite for NaN and infinities that only one side has. A row smaller than usual in `whole`, by
    default in `truth`, is compared with the usual size.
    """
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(truth.astype(np.float64), axis=-1)
        sizes = norms if whole is None else np.linalg.norm(whole.astype(np.float64), axis=-1)
        usual = np.median(sizes) if sizes.size else 0.0
        away = np.linalg.norm(rows.astype(np.float64) - truth, axis=-1)
        result: Array = away / np.maximum(np.maximum(norms, usual), np.finfo(np.float32).tiny)
    result[away == 0] = 0.0
    return np.nan_to_num(result, nan=np.inf, posinf=np.inf)


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers as runs of consecutive ones (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
