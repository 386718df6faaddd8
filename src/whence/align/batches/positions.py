"""Position ids of any form: one number for each token, or several.

Rotary embeddings of several axes (M-RoPE: time, height, width) hand on (axes, batch, tokens), and
engines that flatten the batch (axes, tokens). Newer libraries put the plain position in front of
the three; it alone counts the tokens then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whence.dtypes import Array

Place = tuple[int, ...]  # where one token stands: a number for each axis

WITH_PLAIN = 4  # axes, the first of which is the plain position: text before time, height and width


def places_of(positions: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Where each token stands, (rows, tokens, axes); None where the extents do not say so.

    positions: (tokens), (batch, tokens), or with several axes in front of, between or behind these;
    a batch of 1 stands for all rows. shape: of the token ids, (batch, tokens), or (tokens,) of a
    flattened batch, which is one row here.
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
    """(batch or 1, tokens, axes) of positions in whatever order their axes are."""
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
    """How far the positions of one row have come, and so which token may be its next.

    Text goes up by one on all axes. The tokens of a picture or film count through a grid that
    begins where the text ended; the text behind it goes on above the highest number of the grid.
    """

    __slots__ = ("_last", "_origin", "_top")

    def __init__(self, first: Place) -> None:
        self._origin = self._last = first
        self._top = max(first)

    def follows(self, place: Place) -> bool:
        """Could a token here be the next of the row?"""
        return self._is_text(place) or (len(place) > 1 and self._is_in_grid(place))

    def go(self, places: Sequence[Place]) -> None:
        """The row goes on with these tokens."""
        for place in places:
            if self._is_text(place):
                self._origin = place
            self._last, self._top = place, max(self._top, *place)

    def _is_text(self, place: Place) -> bool:
        return len(place) == len(self._last) and all(n == self._top + 1 for n in place)

    def _is_in_grid(self, place: Place) -> bool:
        """Each axis stays, goes up by one or starts again; time may leap or stay."""
        if place == self._last or len(place) != len(self._last):
            return False
        time, *other_axes = zip(place, self._last, self._origin, strict=True)
        return time[0] >= time[2] and all(
            now in (last, last + 1, origin) for now, last, origin in other_axes
        )


def rows_of(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """(start, stop) of every row in a flattened batch, told apart by their positions."""
    start = 0
    course = Course(places[0])
    for index, place in enumerate(places[1:], start=1):
        if course.follows(place):
            course.go((place,))
        else:
            yield start, index
            start, course = index, Course(place)
    yield start, len(places)
