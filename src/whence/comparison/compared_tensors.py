"""Tensors that earlier comparisons of the same two programs have judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_REMEMBERED = 4
"""Tensors of so many comparisons are known."""


class ComparedTensors:
    """Pairs of tensors that differ and were compared, by their hashes (reference, target).

    A later window begins with parameters, states and caches that an earlier one left: what differs
    in them was judged where it was made. `next_window` begins another comparison; what is asked for
    in one is known in the next.
    """

    def __init__(self) -> None:
        self._windows: deque[set[tuple[str, str]]] = deque(maxlen=_REMEMBERED)
        self.next_window()

    def __contains__(self, hashes: tuple[str, str]) -> bool:
        is_known = any(hashes in pairs for pairs in self._windows)
        if is_known:
            self._windows[-1].add(hashes)
        return is_known

    def next_window(self) -> None:
        """Another comparison begins."""
        self._windows.append(set())

    def add(self, hashes: Iterable[tuple[str, str]]) -> None:
        """Remember tensors that a comparison has measured and that differ."""
        self._windows[-1].update(hashes)
