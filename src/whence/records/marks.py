"""What alignment writes into notes of calls and reasons of tensors that were joined, and what later stages read off them."""

from __future__ import annotations

from whence.records import Call, Record
from whence.results import Made

_GATHERED = "joined from "
_PIECES = "joined of the pieces that "
_SHOWN = "of the ranks' replicas, shown is that of rank "
_ON_RANKS = " on the ranks"
_UNPLACED = "how it lies on the ranks is not known"


def gathered(rows: str, calls: int) -> str:
    """The note of a call that was cut from others or joined from them, row by row and token by token."""
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


def on_ranks(words: str) -> str:
    """The reason of a tensor that was joined of the ranks' pieces. words: how it lies on them."""
    return f"{words}{_ON_RANKS}"


def is_on_ranks(made: Made) -> bool:
    """Was this tensor joined of the ranks' pieces?"""
    return made.why.endswith(_ON_RANKS)


def unplaced(ranks: int) -> str:
    """The reason of a tensor without elements: the ranks hold different ones, and nothing tells how to join them."""
    return f"{_UNPLACED}: {ranks} ranks differ, and no tensor of the other run says what they make together"


def is_unplaced(record: Record) -> bool:
    """Is this a tensor of which neither the elements nor the shape are known, since it is not known how it lies on the ranks?"""
    return record.why.startswith(_UNPLACED)
