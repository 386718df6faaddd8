"""Which rows of a call of a model belong to which request: found by tokens, whatever the batch.

An engine joins requests in one row, cuts prompts into pieces, skips prefixes that it has, and pads.
Requests are known by their tokens alone; what the engine says of lengths and positions decides only
between requests that have the same tokens at the same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Segment(NamedTuple):
    """Tokens of one request in one call of the model.

    row: of the batch; columns: (first, behind the last) in it, without padding. start: position of
    the first in the request. at: place among the segments of the call.
    """

    request: int
    row: int
    columns: tuple[int, int]
    start: int
    at: int

    @property
    def length(self) -> int:
        """Tokens of it."""
        return self.columns[1] - self.columns[0]

    @property
    def end(self) -> int:
        """Length of the request after the call."""
        return self.start + self.length


class Piece(NamedTuple):
    """Tokens that lie together in a call. position: that the call gives the first, -1 for none."""

    row: int
    columns: tuple[int, int]
    tokens: list[int]
    position: int


class Schedule:
    """Follows requests through the calls of a model.

    sequences: prompt and generated tokens of each request. unmatched: tokens of calls that belong
    to none of them.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._ends = [0] * len(sequences)
        self._order: list[int] = []
        self.unmatched = 0

    def segments(self, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> list[Segment]:
        """The segments of a call. ids: (batch, tokens). kwargs: what the model was given beside."""
        segments: list[Segment] = []
        for piece in pieces(ids, kwargs):
            request, start = self._request(piece, {segment.request for segment in segments})
            if request < 0:
                self.unmatched += len(piece.tokens)
                continue
            place = Segment(request, piece.row, piece.columns, start, len(segments))
            segments.append(place)
            self._ends[request] = start + len(piece.tokens)
        self._order = [segment.request for segment in segments]
        return segments

    def _request(self, piece: Piece, used: set[int]) -> tuple[int, int]:
        """(request, position of the first token), (-1, -1) where no request has these tokens."""
        places = [
            (request, start)
            for request, sequence in enumerate(self._sequences)
            if request not in used
            for start in self._starts(request, sequence, piece)
        ]
        return min(places, key=lambda place: self._rank(place, piece), default=(-1, -1))

    def _starts(self, request: int, sequence: list[int], piece: Piece) -> list[int]:
        count = len(piece.tokens)
        starts = {self._ends[request], piece.position, 0}
        return [s for s in starts if s >= 0 and sequence[s : s + count] == piece.tokens]

    def _rank(self, place: tuple[int, int], piece: Piece) -> tuple[bool, bool, int, int]:
        """Best first: what goes on where its request ended, at the position that the call says, in
        the order of the call before.
        """
        request, start = place
        order = self._order.index(request) if request in self._order else len(self._order)
        return start != self._ends[request], start != piece.position, order, request


def pieces(ids: torch.Tensor, kwargs: Mapping[str, Any]) -> list[Piece]:
    """The tokens of a call, cut where requests end and without padding."""
    positions = kwargs.get("position_ids")
    positions = positions if isinstance(positions, torch.Tensor) else None
    cuts = kwargs.get("cu_seq_lens_q")
    cut: list[Piece] = []
    for row, tokens in enumerate(ids.tolist()):
        columns = [(0, len(tokens))]
        if isinstance(cuts, torch.Tensor):
            ends = cuts.tolist()
            columns = list(itertools.pairwise(ends))
        elif (real := real_slots(kwargs, row, len(tokens))) is not None:
            own = [slot - real.total + len(tokens) for slot in real.slots]
            own = [column for column in own if column >= 0]
            columns = [(own[0], own[-1] + 1)] if own else []
        for first, last in columns:
            if first < last:
                place = positions[min(row, len(positions) - 1)] if positions is not None else None
                position = int(place[first]) if place is not None and place.dim() else -1
                cut.append(Piece(row, (first, last), tokens[first:last], position))
    return cut


class RealSlots(NamedTuple):
    """Slots of a row of the mask that hold tokens, in order, of so many."""

    slots: list[int]
    total: int


def real_slots(kwargs: Mapping[str, Any], row: int, count: int) -> RealSlots | None:
    """The slots of a row's cache and new tokens that are no padding; None where no mask says.
    count: new tokens.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] < count:
        return None
    return RealSlots(mask[row].nonzero().flatten().tolist(), mask.shape[1])
