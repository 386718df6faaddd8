"""One tensor that the ranks of a run hold together."""

from __future__ import annotations

from functools import cached_property

from whence.align.module_names import starred
from whence.align.ranks.groups import Key, Place, Side
from whence.align.ranks.shards import Shape


class RankTensor:
    """A slot of a group of calls of one run. records: of ranks that hold it or a piece of it."""

    def __init__(self, side: Side, key: Key, slot: str) -> None:
        self.side, self.key, self.slot = self.where = side, key, slot

    @cached_property
    def records(self) -> tuple[int, ...]:
        return self.side.holders(self.key, self.slot)[1]

    @property
    def place(self) -> Place:
        return self.side.name, self.records

    @cached_property
    def shapes(self) -> list[Shape]:
        return [self.side.run.records[r].shape for r in self.records]

    @property
    def family(self) -> tuple[object, ...]:
        """What siblings that lie alike on the ranks have in common."""
        return starred(str(self.key[4])), self.slot, tuple(self.shapes)
