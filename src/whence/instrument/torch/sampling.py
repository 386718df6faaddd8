"""Which operator calls are written and keep their elements, and counts of all of them, written or
not.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.session import Session
from whence.instrument.torch.operator_call import OperatorCall, widen

NOTE = "operators"
TELL_S = 5.0


class _Tally:
    """Calls of one signature since the last note."""

    __slots__ = ("arguments", "count", "op", "phases", "scopes", "seconds", "tables", "tensors")

    def __init__(self, call: OperatorCall) -> None:
        self.op, self.arguments, self.tensors = (
            call.overload.name,
            call.arguments,
            [[s, *_look(t)] for s, t in call.inputs],
        )
        self.clear()

    def clear(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.scopes: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        # Figures of device tensors come later, so a call's own are taken in when they are told.
        self.tables: list[dict[str, list[Any]]] = []


class Sampling:
    """Chooses by the options `samples` and `dedup`. The choice depends on the seed, the operator
    and the number of its call alone:

    of every operator the calls with the lowest hashes so far keep their elements, so two runs of
    one program keep the same ones. on: is there a choice to make? counts: is every call counted and
    ranged, because not every one is written?
    """

    def __init__(self, session: Session) -> None:
        options = session.options
        self._session, self._samples, self.counts = session, options.samples, options.dedup
        self.on = self.counts or self._samples is not None
        self._seed = options.seed or 0
        self._called: dict[str, int] = {}
        self._lowest: dict[str, list[int]] = {}
        self._tallies: dict[Any, _Tally] = {}
        self._last_told = time.monotonic()

    def choose(self, call: OperatorCall) -> bool:
        """Does this call keep its elements?"""
        if self._samples is None:
            return True
        if self._samples == 0:
            return False
        op = call.overload.name
        number = self._called[op] = self._called.get(op, -1) + 1
        rank = -xxhash.xxh3_64_intdigest(f"{self._seed}|{op}|{number}".encode())
        lowest = self._lowest.setdefault(op, [])
        if len(lowest) < self._samples:
            heapq.heappush(lowest, rank)
            return True
        return heapq.heappushpop(lowest, rank) != rank

    def writes(self, call: OperatorCall, chosen: bool) -> bool:
        """Is this call written? With dedup the first of its signature, and those that were chosen
        among all.
        """
        if not self.counts:
            return True
        key = (
            call.overload.name,
            tuple((s, _look(t)) for s, t in call.inputs),
            repr(call.arguments),
        )
        first = key not in self._tallies
        if first:
            self._tallies[key] = _Tally(call)
        call.tally = self._tallies[key]
        return first or (chosen and self._samples is not None)

    def tally(self, call: OperatorCall) -> None:
        """The call ended."""
        tally = call.tally
        assert tally is not None
        tally.count += 1
        tally.seconds += call.seconds
        tally.scopes[call.scope] = tally.scopes.get(call.scope, 0) + 1
        tally.phases[call.phase] = tally.phases.get(call.phase, 0) + 1
        tally.tables.append(call.ranges or {})
        if len(tally.tables) > 64:
            tally.tables = [_merged(tally.tables)]

    def step_ended(self) -> None:
        """Tell the counts now and then, so that a killed program leaves them too."""
        if self.counts and time.monotonic() - self._last_told > TELL_S:
            self.tell()

    def tell(self) -> None:
        """Leave a note of what was counted since the one before."""
        if not self.counts:
            return
        self._last_told = time.monotonic()
        entries = [
            {
                "op": t.op,
                "tensors": t.tensors,
                "arguments": t.arguments,
                "count": t.count,
                "seconds": t.seconds,
                "scopes": t.scopes,
                "phases": t.phases,
                "ranges": _merged(t.tables),
            }
            for t in self._tallies.values()
            if t.count
        ]
        for tally in self._tallies.values():
            tally.clear()
        if entries:
            self._session.note(NOTE, msgspec.json.encode(entries).decode())


def _look(tensor: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return (
        dtype,
        () if tensor.is_nested else tuple(tensor.shape),
        tensor.stride() if strided and not tensor.is_contiguous() else (),
    )


def _merged(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    merged: dict[str, list[Any]] = {}
    for table in tables:
        for slot, figures in table.items():
            widen(merged.setdefault(slot, [None, None, 0, 0]), *figures)
    return merged
