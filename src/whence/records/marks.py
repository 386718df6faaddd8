"""What alignment writes into notes of calls and reasons of tensors that were joined, and what later
stages read off them.
"""

from __future__ import annotations

from whence.records.run import Call, Record

_GATHERED = "joined from "
_PIECES = "joined of the pieces that "
_SHOWN = "of the ranks' replicas, shown is that of rank "
_UNPLACED = "how it lies on the ranks is not known"


def gathered(rows: str, calls: int) -> str:
    """The note of a call that was cut from others or joined from them, row by row and token by
    token.
    """
    return f"{_GATHERED}{rows} of {calls} {'call' if calls == 1 else 'calls'}"


def is_gathered(call: Call) -> bool:
    """Was this call cut from others or joined from them?"""
    return any(note.startswith(_GATHERED) for note in call.notes)


def of_pieces(ranks: int) -> str:
    """The note of a joined call that worked on pieces of its tensors."""
    return f"{_PIECES}{ranks} ranks hold"


def is_of_pieces(call: Call) -> bool:
    """Did each rank work on pieces of this call's tensors?"""
    return any(note.startswith(_PIECES) for note in call.notes)


def shown(rank: int) -> str:
    """The note of a joined call whose tensors every rank should hold alike and does not."""
    return f"{_SHOWN}{rank}"


def shown_rank(call: Call) -> str:
    """The rank whose tensors stand for all in a call whose ranks differ; "" where they do not."""
    return next((note.removeprefix(_SHOWN) for note in call.notes if note.startswith(_SHOWN)), "")


def unplaced(ranks: int) -> str:
    """The reason of a tensor without elements: the ranks hold different ones, and nothing tells how
    to join them.
    """
    return (
        f"{_UNPLACED}: {ranks} ranks differ, and no tensor of the other run says what they "
        "make together"
    )


def is_unplaced(record: Record) -> bool:
    """Is this a tensor of which neither the elements nor the shape are known, since it is not known
    how it lies on the ranks?
    """
    return record.why.startswith(_UNPLACED)


PATCHED = "patched from "
"""How the note of a call begins whose outputs another run's replaced on purpose."""

PATCHED_AS = ", where it is called "
"""How that note goes on where the other run calls it otherwise."""

MEMORY_ORDER = "its elements may stand as a kernel library lays them out in memory"
"""The note of a call of a dump whose outputs may not be in the order that their shape says."""

OVERWRITTEN = "overwritten without being read"
"""Why an operator's argument has no elements: what it held does not matter."""


NOT_SELECTED = "not selected"


GATHERED = "put together: the dump has no call for the whole"
"""The note of a root call that no dump held: its inputs are those of the first call, its outputs
those of the last.
"""

UNTOLD = "what it read is not known"
"""The note of a call of which a dump does not tell all that it read: it may depend on all that was
made before.
"""

WIDER = "the dump does not say in what dtype it was computed"
"""The note of a call whose tensors may be stored wider than they were computed; they are judged by
the numbers in them.
"""

UNORDERED = "the dump does not say which tensor was made before which"
"""The note of a call whose place among the others means nothing."""


TAKES = "takes "
"""How the note of a call begins that says as what its operator takes a parameter: "takes
linear_0.w_0 as Y".
"""

ONEDNN = "a kernel of oneDNN"
"""The note of a call that a pass gave to oneDNN."""
