"""The first tensor of a request that rounding does not explain: in the order in which an engine
made them, call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from whence.judge.limits import LIMITS, U32
from whence.workflows.serving.causes import WrongRows, explained, position_words
from whence.workflows.serving.rows import Array, CacheRead, Event, Kind, Rows, Trace, distances

_LEAST = 32 * U32
"""Floors below are not measured: what is kept is float32."""


class Judged(NamedTuple):
    """The truth of one request, and what it is judged by.

    truth: (positions, ...) by event. windows: positions that a query of a layer may see, itself
    among them; layers without are not in it. origin: (request, position) that wrote these bits, by
    layer, keys or values, and digest. cache_error: relative error that the cache may add.
    """

    request: int
    truth: Mapping[Event, Array]
    floors: Mapping[Event, float]
    windows: Mapping[int, int]
    origin: Mapping[tuple[int, Kind, bytes], tuple[int, int]]
    cache_error: float = 0.0


class Wrong(NamedTuple):
    """The first tensor that is wrong. end: length of the request after the call. positions, heads:
    which rows of it. error: relative.
    """

    event: Event
    call: int
    end: int
    positions: tuple[int, ...]
    heads: tuple[int, ...]
    error: float
    words: str


def first_wrong(trace: Trace, judged: Judged) -> Wrong | None:
    """The first tensor of a request that is not what the reference makes of the same tokens."""
    marks = sorted(_marks(trace, judged), key=lambda mark: mark[:2])
    if not marks:
        return None
    call, _, event, item, away = marks[0]
    if isinstance(item, CacheRead):
        return _wrong_read(event, item, away, judged)
    places, *rest = np.nonzero(away)
    positions = places + item.start
    heads = rest[0] if event.kind.is_of_cache else np.zeros(0, int)
    words = ""
    if event.kind.is_of_cache:
        words = _explained(event, item.rows, away, positions, heads, judged, {})
    return _wrong(event, (call, item.start + len(item.rows)), positions, heads, away, words)


def _marks(
    trace: Trace, judged: Judged
) -> Iterator[tuple[int, int, Event, Rows | CacheRead, Array]]:
    """(call, order, event, rows, error of each cell, 0 where rounding explains it) of what is
    wrong.
    """
    for event, several in trace.rows.items():
        truth = judged.truth.get(event)
        if truth is None:
            continue
        for rows in several:
            right = truth[rows.start : rows.start + len(rows.rows)]
            if right.shape != rows.rows.shape:
                continue
            away = _beyond(distances(rows.rows, right), _allowed(event, judged))
            if away.any():
                yield rows.call, trace.order[event], event, rows, away
    for event, reads in trace.reads.items():
        truth = judged.truth.get(event._replace(kind=event.kind.written))
        if truth is None:
            continue
        for read in reads:
            right = truth[read.positions]
            if right.shape != read.rows.shape:
                continue
            away = _beyond(distances(read.rows, right), _allowed(event, judged))
            if away.any() or read.first > _needed_from(event, read, judged):
                yield read.call, trace.order[event], event, read, away


def _allowed(event: Event, judged: Judged) -> float:
    floor = judged.floors.get(event._replace(kind=event.kind.written), 0.0)
    extra = judged.cache_error if event.kind.is_read else 0.0
    return max(floor, _LEAST) * LIMITS.whole + extra


def _beyond(errors: Array, allowed: float) -> Array:
    return np.where(errors > allowed, errors, 0.0)


def _needed_from(event: Event, read: CacheRead, judged: Judged) -> int:
    """The first position that the first new token has to see."""
    window = judged.windows.get(event.layer, 0)
    return max(read.end - read.added - window + 1, 0) if window else 0


def _wrong_read(event: Event, read: CacheRead, away: Array, judged: Judged) -> Wrong:
    if not away.any():
        missing = np.arange(_needed_from(event, read, judged), read.first)
        words = "are not handed out: evicted, or outside of a window that the layer does not have"
        return Wrong(event, read.call, read.end, tuple(missing.tolist()), (), 1.0, words)
    places, heads = np.nonzero(away)
    positions = read.positions[places]
    from whence.workflows.serving.torch.listening import digest

    origin = {
        int(position): judged.origin[key]
        for position, row in zip(read.positions, read.rows)
        if (key := (event.layer, event.kind, digest(row))) in judged.origin
    }
    words = _explained(event, read.rows, away, positions, heads, judged, origin)
    return _wrong(event, (read.call, read.end), positions, heads, away, words)


def _explained(
    event: Event,
    rows: Array,
    away: Array,
    positions: Array,
    heads: Array,
    judged: Judged,
    origin: Mapping[int, tuple[int, int]],
) -> str:
    held = judged.truth[event._replace(kind=event.kind.written)]
    cells = np.nonzero(away)
    wrong = WrongRows(
        event.kind,
        rows[cells].astype(np.float64),
        held[positions, heads],
        positions,
        heads,
        held,
        judged.request,
        origin,
    )
    return explained(wrong)


def _wrong(
    event: Event, when: tuple[int, int], positions: Array, heads: Array, away: Array, words: str
) -> Wrong:
    error = float(np.median(away[away > 0]))
    return Wrong(
        event,
        *when,
        tuple(sorted(set(positions.tolist()))),
        tuple(sorted(set(heads.tolist()))),
        error,
        words,
    )


def place_words(wrong: Wrong, heads: int) -> str:
    """Where it is wrong and what is there. heads: that the layer has."""
    texts = []
    if wrong.heads and len(wrong.heads) < heads:
        numbers = ", ".join(map(str, wrong.heads))
        texts.append(f"head{'' if len(wrong.heads) == 1 else 's'} {numbers}: ")
    texts.append(position_words(list(wrong.positions)))
    words = wrong.words or f"differ by {wrong.error:.2g} of their size"
    return f"{''.join(texts)}: {words}"
