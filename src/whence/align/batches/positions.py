"""Position ids in any layout: one number for each token, or several.

Rotary embeddings with several axes (M-RoPE: time, height, width) use (axes, batch, tokens), and
engines that flatten the batch use (axes, tokens). Newer libraries put the plain position in front
of the three; then it alone counts the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whence.dtypes import Array

Place = tuple[int, ...]  # where one token stands: a number for each axis

WITH_PLAIN = 4  # axes, the first of which is the plain position: text before time, height and width


def places_of(positions: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The position of each token, (rows, tokens, axes); None if the layout cannot be inferred.

    positions: (tokens), (batch, tokens), or with a further axis of components at any place; a batch
    of 1 stands for all rows. shape: of the token ids, (batch, tokens), or (tokens,) for a flattened
    batch, which is one row here.
    """
    if positions is None or positions.dtype.kind not in "iu" or not shape:
        return None
    batch, tokens = shape if len(shape) == 2 else (1, shape[0])
    with_axes = _with_axes(positions, batch, tokens)
    if with_axes is None:
        return None
    if with_axes.shape[-1] == WITH_PLAIN:
        with_axes = with_axes[..., :1]
    return np.broadcast_to(with_axes, (batch, tokens, with_axes.shape[-1]))


def _with_axes(positions: Array, batch: int, tokens: int) -> Array | None:
    """The positions as (batch or 1, tokens, axes), whatever the order of their axes; None if it
    cannot be inferred.
    """
    shape, rows = positions.shape, (batch, 1)
    if shape in ((tokens,), *((n, tokens) for n in rows)):
        return positions.reshape(-1, tokens, 1)
    if len(shape) == 2 and shape[1] == tokens and batch == 1:
        return positions.T[None]
    if len(shape) != 3:
        return None
    if shape[2] == tokens and shape[1] in rows:
        return np.moveaxis(positions, 0, 2)
    if shape[2] == tokens and shape[0] in rows:
        return np.moveaxis(positions, 1, 2)
    return positions if shape[1] == tokens and shape[0] in rows else None


class Course:
    """The positions of one row so far, which decide what position may come next.

    Text counts up by one on all axes. The tokens of a picture or film count through a grid that
    starts where the text ended; later text continues above the highest number of the grid.
    """

    __slots__ = ("_last", "_origin", "_top")

    def __init__(self, first: Place) -> None:
        self._origin = self._last = first
        self._top = max(first)

    def follows(self, place: Place) -> bool:
        """Whether a token at this position may be the next one of the row."""
        return self._is_text(place) or (len(place) > 1 and self._is_in_grid(place))

    def go(self, places: Sequence[Place]) -> None:
        """Continue the row with tokens at these positions."""
        for place in places:
            if self._is_text(place):
                self._origin = place
            self._last, self._top = place, max(self._top, *place)

    def _is_text(self, place: Place) -> bool:
        return len(place) == len(self._last) and all(n == self._top + 1 for n in place)

    def _is_in_grid(self, place: Place) -> bool:
        """Whether the position may be the next one in a grid: height and width stay, go up by one
        or restart; time does not fall below the start of the grid.
        """
        if place == self._last or len(place) != len(self._last):
            return False
        time, *other_axes = zip(place, self._last, self._origin, strict=True)
        return time[0] >= time[2] and all(
            now in (last, last + 1, origin) for now, last, origin in other_axes
        )


def rows_of(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """(start, stop) of every row in a flattened batch, separated by their positions."""
    start = 0
    course = Course(places[0])
    for index, place in enumerate(places[1:], start=1):
        if course.follows(place):
            course.go((place,))
        else:
            yield start, index
            start, course = index, Course(place)
    yield start, len(places)
