"""Lists of steps and ranks as those tools write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whence.api import Dump


_DIGITS = 8  # a range of more numbers is a mistake, and fills the memory


def numbers(name: str, chosen: Sequence[int | str] | int | str | None) -> frozenset[int] | None:
    """3, [0, 2] or ["4-6"] as a set; None (all) for None and an empty list. Raises UsageError."""
    from whence.errors import UsageError

    if chosen is None or chosen == [] or chosen == ():
        return None
    if not isinstance(chosen, int | str | list | tuple | set | frozenset | range):
        raise UsageError(f"{name}: {chosen!r:.80} is not a list of numbers")
    numbers_: set[int] = set()
    for item in (chosen,) if isinstance(chosen, (int, str)) else chosen:
        first, _, last = str(item).partition("-")
        if not all(text.isdecimal() and len(text) < _DIGITS for text in (first, last or "0")):
            raise UsageError(f"{name}: {item!r:.80} is not a number from 0 and no range like '4-6'")
        numbers_.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers_)


class Stepped:
    """What every debugger does once its `start` has made the dump."""

    _dump: Dump | None = None

    def stop(self) -> None:
        """Take nothing until the next `start`."""
        if self._dump is not None:
            self._dump.pause()

    def step(self) -> None:
        """The step ends here."""
        if self._dump is not None:
            self._dump.mark()
