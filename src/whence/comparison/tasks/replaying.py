"""Replays of calls as tasks for an engine: which tensors are put into which call's program, and the
figures that come back.

A task has all calls of a program, in the order of the comparison: whether a program may be trusted
is found out with the first call that it serves.
"""

from __future__ import annotations

import msgspec

from whence.comparison.replays.replayer import Replayer, ReplayRequest
from whence.comparison.replays.semantics import ReplayResult
from whence.comparison.replays.side import Trust
from whence.comparison.tasks.sources import Source, opened
from whence.records.views import CachedRun
from whence.results import SlotPair


class Described(msgspec.Struct, frozen=True):
    """A `ReplayRequest` by numbers. same: slots whose tensors are bitwise equal."""

    call: int
    partner: int
    slots: dict[str, SlotPair]
    is_initial: dict[str, bool]
    same: frozenset[str]

    def skip(self, slot: str, needs: object) -> bool:
        """Is there nothing to find out of an output?"""
        return self.same.issuperset((slot, *needs))  # type: ignore[misc]


class Work(msgspec.Struct, frozen=True):
    """A task: calls of some programs. paired: how many calls have a partner: all."""

    reference: Source
    target: Source
    allow: tuple[str, ...]
    paired: int
    calls: tuple[Described, ...]


class Replayed(msgspec.Struct, frozen=True):
    """What came of a task. results: by call of the reference; trust: what was found out about the
    programs.
    """

    results: dict[int, ReplayResult]
    trust: dict[str, Trust]


def perform(payload: bytes) -> bytes:
    """Replay the calls of a task, in a worker."""
    work = msgspec.msgpack.decode(payload, type=Work)
    reference, target = (CachedRun(opened(source)) for source in (work.reference, work.target))
    replayer = Replayer(reference, target, paired=range(work.paired), allow=work.allow)
    results: dict[int, ReplayResult] = {}
    for described in work.calls:
        request = ReplayRequest(
            reference.calls[described.call],
            target.calls[described.partner],
            described.slots.get,
            described.is_initial,
            described.skip,
        )
        result = replayer.figures(request)
        if not replayer.made_choices(request):  # which later replays of the call build on
            results[described.call] = result
    programs = {reference.calls[described.call].program for described in work.calls}
    trust = {program: replayer.reference.trust(program) for program in programs}
    return msgspec.msgpack.encode(Replayed(results, trust))
