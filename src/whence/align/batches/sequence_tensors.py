"""Tensors of one sequence, put together from the pieces that went through several calls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from whence.align.batches.batch import Batch
from whence.align.batches.sequences import Piece
from whence.align.batches.token_axes import Axes
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Cat, Cut, Name, Node, Pad, Star, Take
from whence.align.dims import names as names_in

Line = Sequence[Piece]
Shape = tuple[int, ...]


class SequenceTensors:
    """Puts tensors together from pieces of several calls' tensors."""

    def __init__(self, derived: DerivedTensors, batches: Mapping[int, Batch]) -> None:
        self.derived, self._batches = derived, batches

    def assembled(
        self,
        axes: Axes,
        lines: Sequence[Line],
        records: Mapping[int, int],
        tokens_across: Sequence[int] | None,
        shape_across: Shape | None,
    ) -> int | None:
        """The tensor of all lines; None where it cannot be made.

        records: the tensor of each root call. tokens_across: tokens that the other run has of this
        slot, None for all; shape_across: the shape it has there.
        """
        last_tokens = ends(lines[0])
        if axes.last is not None:
            # Of each call its last token: one token each, and those of the sequence that both runs
            # have.
            shared_ends = {t for t in last_tokens if tokens_across is None or t in tokens_across}
            lines = [
                [
                    self._last(p)
                    for p, end in zip(line, _ends(line), strict=True)
                    if p.whole and end in shared_ends
                ]
                for line in lines
            ]
            if not lines[0]:
                return None
            return self._joined(Axes(axes.batch, axes.last), lines, records, shape_across)
        if tokens_across is not None and axes.token is not None:
            record = self._joined(axes, lines, records, None)
            if record is None:
                return None
            return self.derived.add(
                Take(Name("x"), tuple(tokens_across), axes.token), {"x": [record]}
            )
        return self._joined(axes, lines, records, shape_across)

    def _last(self, piece: Piece) -> Piece:
        """Where its last token lies among those of all rows."""
        position = piece.row if self._batches[piece.call].flat else 0
        return piece._replace(start=position, stop=position + 1)

    def _joined(
        self,
        axes: Axes,
        lines: Sequence[Line],
        records: Mapping[int, int],
        shape_across: Shape | None,
    ) -> int | None:
        calls = list(dict.fromkeys(p.call for line in lines for p in line))
        stacked = next(
            (axis for axis in (axes.batch, axes.flat, axes.token) if axis is not None), None
        )
        if stacked is None and axes.visible is None:
            return self._as_it_is(lines[0][0], records, shape_across)
        names = {call: "x" if len(calls) == 1 else f"s{i}" for i, call in enumerate(calls)}
        if len(lines) == 1:
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=True), names, records
            )
        if self.all_rows(lines) and (axes.batch is not None or self._whole(lines)):
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=False), names, records
            )
        shared = self._line(axes, lines[0], names, records, cut_row=True)
        if stacked is None:
            return self._add(shared, names, records)
        every = Cat(
            tuple(self._line(axes, line, names, records, cut_row=True) for line in lines), stacked
        )
        bound = {names[call]: [self.derived.record(records[call]).shape] for call in calls}
        if shape_across is not None and every.shape(bound) == shape_across:
            return self._add(every, names, records)
        if (
            (shape_across is not None and shared.shape(bound) == shape_across)
            or axes.batch is None
            or self._shared(axes, lines, records)
        ):
            return self._add(shared, names, records)
        return self._add(every, names, records)

    def _as_it_is(
        self, piece: Piece, records: Mapping[int, int], shape_across: Shape | None
    ) -> int | None:
        """A tensor that follows neither rows nor tokens; None where the other run's has other
        extents: tokens sorted by experts.
        """
        record = records[piece.call]
        return (
            record
            if shape_across is None or self.derived.record(record).shape == shape_across
            else None
        )

    def _add(self, node: Node, names: Mapping[int, str], records: Mapping[int, int]) -> int:
        used = set(names_in(node))
        bound = {name: [records[call]] for call, name in names.items() if name in used}
        node = _starred(node, bound)
        if isinstance(node, Cat) and any(isinstance(p, Star) for p in node.parts):
            bound = {"steps": [ids[0] for ids in bound.values()]}
        return self.derived.add(node, bound)

    def _shared(self, axes: Axes, lines: Sequence[Line], records: Mapping[int, int]) -> bool:
        """Have rows in calls of their own one tensor there, as positions are? It has no batch."""
        tensors = [self.derived.record(records[line[0].call]) for line in lines]
        own_calls = len({line[0].call for line in lines}) == len(lines)
        single_rows = all(r.shape[axes.batch or 0] == 1 for r in tensors)
        return (
            own_calls
            and single_rows
            and bool(tensors[0].hash)
            and len({r.hash for r in tensors}) == 1
        )

    def _whole(self, lines: Sequence[Line]) -> bool:
        """Are these all tokens of their calls?"""
        return (
            all(
                (p.start, p.stop) == (0, self._batches[p.call].width)
                for line in lines
                for p in line
            )
            and len(lines[0]) == 1
        )

    def all_rows(self, lines: Sequence[Line]) -> bool:
        """Are these all rows of their calls in order, with the same tokens of each?"""
        return (
            all(
                len({(p.call, p.start, p.stop) for p in pieces}) == 1
                and [p.row for p in pieces] == list(range(self._batches[pieces[0].call].size))
                for pieces in zip(*lines, strict=True)
            )
            and len({len(line) for line in lines}) == 1
        )

    def _line(
        self,
        axes: Axes,
        line: Line,
        names: Mapping[int, str],
        records: Mapping[int, int],
        *,
        cut_row: bool,
    ) -> Node:
        """One row from its pieces."""
        first, last = line[0], line[-1]
        if axes.token is None and axes.flat is None and axes.visible is not None:
            # A cache: the last one holds what was there before.
            return self._piece(
                axes,
                last,
                names,
                records,
                first.start,
                cut_row=cut_row,
                stop=first.start + sum(p.stop - p.start for p in line),
            )
        along = axes.token if axes.token is not None else axes.flat
        if along is None:
            return self._piece(axes, first, names, records, first.start, cut_row=cut_row)
        parts = [self._piece(axes, p, names, records, first.start, cut_row=cut_row) for p in line]
        if axes.visible is not None:
            to = last.total - first.start
            parts = [
                Pad(p, axes.visible, to, "lowest") if piece.total < last.total else p
                for p, piece in zip(parts, line, strict=True)
            ]
        return parts[0] if len(parts) == 1 else Cat(tuple(parts), along)

    def _piece(
        self,
        axes: Axes,
        piece: Piece,
        names: Mapping[int, str],
        records: Mapping[int, int],
        pad: int,
        *,
        cut_row: bool,
        stop: int = 0,
    ) -> Node:
        shape = self.derived.record(records[piece.call]).shape
        keys: list[Any] = [slice(None)] * len(shape)
        if axes.batch is not None and cut_row and shape[axes.batch] > 1:
            keys[axes.batch] = slice(piece.row, piece.row + 1)
        if axes.token is not None and (piece.start, piece.stop) != (0, shape[axes.token]):
            keys[axes.token] = slice(piece.start, piece.stop)
        if axes.flat is not None and cut_row and shape[axes.flat] != piece.stop - piece.start:
            offset = piece.row * self._batches[piece.call].width
            keys[axes.flat] = slice(offset + piece.start, offset + piece.stop)
        if axes.visible is not None and (pad, stop or piece.total) != (0, shape[axes.visible]):
            keys[axes.visible] = slice(pad, stop or piece.total)
        name = Name(names[piece.call])
        return Cut(name, tuple(keys)) if any(k != slice(None) for k in keys) else name


def ends(line: Line) -> list[int]:
    """Which tokens of its sequence are the last of a call, for one row."""
    return [end for piece, end in zip(line, _ends(line), strict=True) if piece.whole]


def _ends(line: Line) -> list[int]:
    return [total - 1 for total in itertools.accumulate(p.stop - p.start for p in line)]


def _starred(node: Node, bound: Mapping[str, Sequence[int]]) -> Node:
    """`cat(s0, s1, s2, axis=1)` written as `cat(*steps, axis=1)`."""
    if (
        isinstance(node, Cat)
        and len(node.parts) > 1
        and tuple(Name(n) for n in bound) == node.parts
    ):
        return Cat((Star("steps"),), node.axis)
    return node
