"""Lists of steps and ranks as those tools write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whence.api import Dump


def numbers(name: str, chosen: Sequence[int | str] | int | str | None) -> frozenset[int] | None:
    """3, [0, 2] or ["4-6"] as a set; None (all) for None and an empty list. Raises UsageError."""
    from whence.errors import UsageError

    if chosen is None or (not isinstance(chosen, int) and not len(chosen)):
        return None
    numbers_: set[int] = set()
    for item in (chosen,) if isinstance(chosen, (int, str)) else chosen:
        first, _, last = str(item).partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise UsageError(f"{name}: {item!r} is no number from 0 and no range like '4-6'")
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
