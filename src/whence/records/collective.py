"""Communication between processes: collectives, and messages between two of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from whence.display import Described


class CollectiveKind(StrEnum):
    """The kind of communication among the processes of a group."""

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
        """Whether it is between two processes alone."""
        return self in (CollectiveKind.SEND, CollectiveKind.RECEIVE)


class Collective(
    Described, msgspec.Struct, frozen=True, tag="collective", tag_field="t", omit_defaults=True
):
    """One collective, as one process issued it. It is kept beside the calls of a run and is none of
    them; a run of one process has no collectives.

    rank: of the process. order: position among the beginnings of all calls and collectives of the
    process. group: name of the group; ranks: its processes; purpose: the program's name for it.
    number: position among all that this process issued in the group; for messages, among those in
    the same direction between the same two processes. op: "sum", "avg", "max", ...; "" when nothing
    is reduced. given: shapes of the tensors that this process passes in; taken: of those it
    receives. splits: for an all_to_all, how many rows this process sends to each and receives from
    each. nbytes: of the tensors passed in, or of those received where it only receives. peer: the
    rank that a message goes to or comes from, or that a broadcast starts at (-1: any, or none).
    root, scope, step, micro, phase: of the innermost module call in progress; step -1 before any
    model was called. source: "file:line" of the program. by: the library that issues it, unless the
    program's own code does ("DDP", "FSDP2", "DTensor", ...). waits: whether the program blocks
    until it is done. at: time of issue, in seconds since 1970.
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
