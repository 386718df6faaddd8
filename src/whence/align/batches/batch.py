"""The batch of a root call: its rows of tokens, read from its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whence.align.batches.positions import Place, places_of, rows_of
from whence.align.call_sites import coarsened
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Ref, Run
from whence.records.slots import CACHES, input_name

_DECODER = "decoder_input_ids"


_TOKENS = (_DECODER, "input_ids", "ids", "tokens", "token_ids", "input_tokens", "0")


_POSITIONS = ("position_ids", "positions", "cache_position", "pos", "input_pos")


class Row(NamedTuple):
    """A row of a batch. tokens: without padding; start: their first index in the token axis;
    places: their positions, empty if not known.
    """

    tokens: tuple[object, ...]
    start: int
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one root call. shape: (batch, tokens), or (tokens,) if rows are flattened into
    one axis.

    past: number of earlier tokens, None if not known. cached: whether a cache is among the inputs.
    padding_from: what shows which tokens are padding ("mask", "ids"), "" if nothing does.
    """

    call: Call
    shape: tuple[int, ...]
    rows: tuple[Row, ...]
    past: int | None
    cached: bool
    padding_from: str = ""

    @property
    def flat(self) -> bool:
        """Whether all rows of the batch are concatenated in one axis."""
        return len(self.shape) == 1

    @property
    def width(self) -> int:
        """Extent of the token axis, padding included."""
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Rows of the batch as its tensors have them; 1 when they are flattened."""
        return 1 if self.flat else self.shape[0]


def is_told_apart(slot: str, dtype: str) -> bool:
    """Whether this is an integer input other than tokens: positions, a mask, token types."""
    return dtype in ("int64", "int32", "bool") and input_name(slot) not in _TOKENS


def is_position_or_mask(slot: str) -> bool:
    """Whether an input is named like positions or a mask, which follow from the tokens."""
    name = input_name(slot)
    return name in _POSITIONS or "mask" in name


def is_position(slot: str) -> bool:
    """Whether an input is named like positions."""
    return input_name(slot) in _POSITIONS


def batches_of(run: Run, roots: Sequence[Call], coarse: str = "") -> list[Batch] | None:
    """The batch of each call of a root; None if the input of one is not known. coarse: floating
    rows are rounded to this dtype before they are compared, "" for no rounding.
    """
    out = []
    places = _position_slots(run, roots)
    for call in roots:
        batch = _batch(run, call, places, coarse)
        if batch is None:
            return None
        out.append(batch)
    return out


def _position_slots(run: Run, roots: Sequence[Call]) -> list[str]:
    """Names of inputs that hold positions: the usual ones, and an integer input that counts up
    along the tokens.
    """
    for call in roots:
        inputs = {input_name(r.slot): r for r in call.slots("input")}
        tokens = _token_input(run, inputs)
        if tokens is None:
            continue
        shape = run.records[tokens.record].shape
        for name, ref in inputs.items():
            record = run.records[ref.record]
            if (
                ref.record == tokens.record
                or record.dtype not in ("int64", "int32")
                or record.shape[-1:] != shape[-1:]
                or shape[-1] < 2
            ):
                continue
            with contextlib.suppress(ElementsMissing):
                steps = np.diff(run.array(ref.record), axis=-1)
                if 2 * np.count_nonzero(steps == 1) > steps.size:
                    return [*_POSITIONS, name]
    return list(_POSITIONS)


def _batch(run: Run, call: Call, places: Sequence[str], coarse: str) -> Batch | None:
    inputs = {input_name(r.slot): r for r in call.slots("input")}
    ref = _token_input(run, inputs)
    try:
        if ref is not None and _DECODER in inputs and any(n in inputs for n in _TOKENS[1:]):
            return _encoder_decoder(run, call, inputs)
        if ref is not None:
            return _tokens(run, call, ref, inputs, places)
        return _rows(run, call, inputs, coarse)
    except ElementsMissing:
        return None


def _token_input(run: Run, inputs: dict[str, Ref]) -> Ref | None:
    def fits(ref: Ref) -> bool:
        record = run.records[ref.record]
        return (
            record.dtype in ("int64", "int32") and len(record.shape) in (1, 2) and record.count > 0
        )

    for name in _TOKENS:
        if name in inputs and fits(inputs[name]):
            return inputs[name]
    return None


def _tokens(run: Run, call: Call, ref: Ref, inputs: dict[str, Ref], names: Sequence[str]) -> Batch:
    ids = run.array(ref.record)
    if ref.slot == f"input.{_DECODER}":  # a mask without that word is the encoder's
        inputs = {
            n.removeprefix("decoder_"): r
            for n, r in inputs.items()
            if n.startswith("decoder_") or "mask" not in n
        }
    positions = next((run.array(inputs[n].record) for n in names if n in inputs), None)
    past = _cached(run, inputs)
    cached = any(name.split(".")[0] in CACHES for name in inputs)
    places = places_of(positions, ids.shape)
    if ids.ndim == 1:
        return Batch(call, ids.shape, tuple(_flat_rows(ids, _placed(places, 0))), past, cached)
    mask = _mask(run, inputs, ids.shape)
    if mask is not None and mask.shape[1] > ids.shape[1]:
        past = mask.shape[1] - ids.shape[1]
        mask = mask[:, past:]
    rows = []
    for b, row in enumerate(ids):
        start, stop = _real(mask[b]) if mask is not None else (0, len(row))
        rows.append(Row(tuple(map(int, row[start:stop])), start, _placed(places, b)[start:stop]))
    return Batch(call, ids.shape, tuple(rows), past, cached, "mask" if mask is not None else "")


def _placed(places: Array | None, row: int) -> tuple[Place, ...]:
    return tuple(map(tuple, places[row].tolist())) if places is not None else ()


def _flat_rows(ids: Array, places: tuple[Place, ...]) -> list[Row]:
    """The rows of a flattened batch, separated by their positions; one row without positions."""
    spans = rows_of(places) if places else [(0, len(ids))]
    return [
        Row(tuple(map(int, ids[start:stop])), start, places[start:stop]) for start, stop in spans
    ]


def _encoder_decoder(run: Run, call: Call, inputs: dict[str, Ref]) -> Batch | None:
    """The batch of an encoder with a decoder, in which each row is one unit, with its padding; None
    if rows are flattened.
    """
    parts: list[list[object]] = []
    for name in (_DECODER, next(n for n in _TOKENS[1:] if n in inputs)):
        of_decoder = name == _DECODER
        half_inputs = {n: r for n, r in inputs.items() if n.startswith("decoder_") == of_decoder}
        half = _tokens(run, call, inputs[name], half_inputs, ())
        if half.flat:
            return None
        parts.append([(row.tokens, row.start, half.width) for row in half.rows])
    if len(parts[0]) != len(parts[1]):
        return None
    return Batch(
        call,
        (len(parts[0]), 1),
        tuple(Row((unit,), 0) for unit in zip(*parts, strict=True)),
        None,
        False,
    )


def _rows(run: Run, call: Call, inputs: dict[str, Ref], coarse: str) -> Batch | None:
    """The batch of an input that holds no tokens. Each row is one unit, identified by its bytes;
    with a mask, each position of a row is.
    """
    several = {
        name: r
        for name, r in inputs.items()
        if len(run.records[r.record].shape) > 1 and run.records[r.record].count
    }
    # Positions and masks only describe the rows of another input, even if they come first.
    asking = {name: r for name, r in several.items() if not is_position_or_mask(f"input.{name}")}
    ref = next(iter((asking or several).values()), None)
    if ref is None:
        return None
    array = coarsened(run.array(ref.record), coarse)
    mask = _mask(run, inputs, array.shape[:2]) if array.ndim > 2 else None
    if mask is None or mask.shape != array.shape[:2]:
        return Batch(
            call, (array.shape[0], 1), tuple(Row((row.tobytes(),), 0) for row in array), None, False
        )
    rows = []
    for b, row in enumerate(array):
        start, stop = _real(mask[b])
        rows.append(Row(tuple(position.tobytes() for position in row[start:stop]), start))
    return Batch(call, array.shape[:2], tuple(rows), None, False)


def _real(mask: Array) -> tuple[int, int]:
    """(start, stop) of a row's real tokens; all tokens if the mask has zeros between real ones,
    since it then does not mark padding.
    """
    real = np.flatnonzero(mask)
    return (
        (int(real[0]), int(real[-1]) + 1)
        if len(real) and len(real) == real[-1] - real[0] + 1
        else (0, len(mask))
    )


def _mask(run: Run, inputs: dict[str, Ref], shape: tuple[int, ...]) -> Array | None:
    """Boolean (batch, tokens or more), True for tokens that are no padding; None without mask."""
    for name, ref in inputs.items():
        record = run.records[ref.record]
        if (
            "mask" not in name
            or len(record.shape) != 2
            or record.shape[0] != shape[0]
            or record.shape[1] < shape[1]
        ):
            continue
        array = run.array(ref.record)
        if array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
            continue
        # A "padding_mask" is true at padding.
        return np.asarray(array == 0 if "pad" in name else array != 0)
    return None


def _cached(run: Run, inputs: dict[str, Ref]) -> int | None:
    """The number of tokens in a cache among the inputs (second last of four axes), None if there is
    none or several differ.
    """
    extents = {
        run.records[ref.record].shape[-2]
        for name, ref in inputs.items()
        if name.split(".")[0] in CACHES and len(run.records[ref.record].shape) == 4
    }
    return extents.pop() if len(extents) == 1 else None
