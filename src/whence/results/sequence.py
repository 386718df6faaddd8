"""Parts of an answer that are made when they are looked at: a comparison of equal runs has a row
for every tensor, and hardly a reader for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


_BATCH = 4096  # items that are made at once


class MadeOnDemand(Sequence[T]):
    """A sequence whose items are made each time they are asked for; equal to a tuple of them.

    made: the items from one place to another, in turn, or as columns (`whence.results.columns`).
    examples: some items, in order, of which
    each other item is like one that comes before it; None where these are not known.
    """

    __slots__ = ("_length", "_made", "examples")

    def __init__(
        self,
        length: int,
        made: Callable[[int, int], Iterable[T]],
        examples: Sequence[T] | None = None,
    ) -> None:
        self._length, self._made, self.examples = length, made, examples

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        places = range(self._length)[index]
        if isinstance(places, int):
            return next(iter(self._made(places, places + 1)))
        return tuple(self[place] for place in places)

    def __iter__(self) -> Iterator[T]:
        for part in self.parts():
            yield from part

    def parts(self) -> Iterator[Iterable[T]]:
        """The items as they are made, many at once."""
        for start in range(0, self._length, _BATCH):
            yield self._made(start, min(start + _BATCH, self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, MadeOnDemand)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, tuple[tuple[T, ...]]]:
        """What leaves the process holds its items."""
        return tuple, (tuple(self),)
