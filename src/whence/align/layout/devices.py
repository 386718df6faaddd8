"""How kernel libraries lay out what is printed or copied as it lies in memory: channels last, or in blocks of channels."""

from __future__ import annotations

from collections.abc import Iterator

from whence.align import dims as ex
from whence.align.layout.axes import Shape, X

_BLOCKS = (16, 8, 4)  # channels in one
_SPACE = "hwd"  # axes behind the channels


def in_memory(shape: Shape, *, undo: bool) -> Iterator[ex.Node]:
    """Expressions over x between elements in the order of memory and (batch, channels, space ...). undo: from the former to the latter.

    Of channels that fill no whole block only a part is there: none of these brings that back.
    """
    space = shape[2:]
    if not 1 <= len(space) <= len(_SPACE):
        return
    words, sizes = " ".join(_SPACE[: len(space)]), tuple(zip(_SPACE, space))
    blocks = (block for block in _BLOCKS if shape[1] % block == 0 and shape[1] > block)
    laid = [(f"{words} c", "c", sizes), *((f"g {words} c", "(g c)", (*sizes, ("c", block))) for block in blocks)]
    for memory, channels, lengths in laid:
        if undo:
            yield ex.Rearrange(ex.Rearrange(X, f"n c {words} -> n (c {words})"), f"n ({memory}) -> n {channels} {words}", lengths)
        else:
            flat = ex.Rearrange(X, f"n {channels} {words} -> n ({memory})", lengths)
            yield ex.Rearrange(flat, f"n (c {words}) -> n c {words}", sizes)
