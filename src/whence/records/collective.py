"""What a process sends to others: collectives and messages between two of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from whence.display import Described


class CollectiveKind(StrEnum):
    """What is done over the processes of a group."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SEND = "send"
    RECEIVE = "recv"

    @property
    def is_message(self) -> bool:
        """Is it between two processes alone?"""
        return self in (CollectiveKind.SEND, CollectiveKind.RECEIVE)


class Collective(
    Described, msgspec.Struct, frozen=True, tag="collective", tag_field="t", omit_defaults=True
):
    """One collective, as one process issued it. It stands beside the calls of a run and is none of
    them: a run of one process has none.

    rank: of the process. order: among the beginnings of all calls and collectives of the process.
    group: name of the group; ranks: its processes; purpose: what the program calls it. number:
    place among what this process issued in the group, of messages among those in the same direction
    between the same two processes. op: "sum", "avg", "max", ...; "" of what adds up nothing. given:
    shapes of what this process hands in, one tensor after the other; taken: of what it gets.
    splits: of an all_to_all, how many rows this process sends to each and gets from each. nbytes:
    of what it hands in, where it gets only, of that. peer: the rank that a message goes to or comes
    from, or that a broadcast starts at (-1: any, or none). root, scope, step, micro, phase: of the
    innermost call of a module in progress; step -1 before any model was called. source: "file:line"
    of the program. by: what issues it, where it is not a code of the program's own ("DDP", "FSDP2",
    "DTensor", ...). waits: is the program stopped until it is done? at: when, in seconds since
    1970.
    """

    kind: CollectiveKind
    rank: int
    order: int
    number: int
    group: str = ""
    ranks: tuple[int, ...] = ()
    purpose: str = ""
    op: str = ""
    dtype: str = ""
    given: tuple[tuple[int, ...], ...] = ()
    taken: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    nbytes: int = 0
    peer: int = -1
    root: str = ""
    scope: str = ""
    step: int = -1
    micro: int = 0
    phase: str = ""
    source: str = ""
    by: str = ""
    waits: bool = False
    at: float = 0.0
