"""Checks whether real positions depend on padding."""

from __future__ import annotations

from typing import Any

import torch

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import Unanswered, answer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge
from whence.workflows.probe.torch.regions import Positions

_FEW, _MANY = 3, 8
_POSITIONS = "position_ids"
_HOLDS = (Held.EXACT, Held.ROUNDING)
_COUNTED = "positions are counted over the padding: position_ids counted over real tokens cure it"


def padding(judge: Judge, inputs: CallInputs) -> PropertyAnswer:
    """Add padding, move it, and fill it with other ids: the outputs at real positions must not
    change.
    """
    model = judge.subject.model
    if not inputs.is_tokens or inputs.length_axis is None or inputs.batch_axis is None:
        raise Unanswered(f"{inputs.main} holds no token ids in rows")
    if not inputs.mask:
        raise Unanswered("the model takes no mask of padding (attention_mask)")
    _check_applies(model, inputs)
    variants: list[Variant] = []
    notes: list[str] = []
    cause = ""
    for side in _sides(inputs, model):
        whole = side.main != "decoder_input_ids"
        found, cause_here = _own(judge, side)
        variants += found
        cause = cause or cause_here
        one = without_padding(side.with_rows([0]))
        right, more = _right(judge, one, whole)
        variants += right
        notes += more
        if _reads_left(model, side):
            left, more = _left(judge, one)
            variants += left
            notes += more
    guilty = next((v for v in variants if v.held == Held.VIOLATED), None)
    if guilty is not None and not cause:
        cause = f"what is real depends on padding: {guilty.name}"
    return answer(Property.PADDING, variants, cause=cause, notes=notes)


def _sides(inputs: CallInputs, model: Any) -> list[CallInputs]:
    """The call seen from each token sequence with a mask (encoder and decoder)."""
    sides = [inputs]
    encoder = inputs.given("input_ids")
    if inputs.main == "decoder_input_ids" and isinstance(encoder, torch.Tensor):
        twin = inputs.changed()
        twin.main = "input_ids"
        sides = [inputs, twin] if inputs.given(inputs.mask) is not None else [twin]
        if not twin.mask:
            sides.remove(twin)
    return sides


def _check_applies(model: Any, inputs: CallInputs) -> None:
    """Raise `Unanswered` where the property does not apply."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and inputs.given("decoder_input_ids") is None:
        raise Unanswered("the decoder's ids are made from the encoder's; give decoder_input_ids")


def _reads_left(model: Any, inputs: CallInputs) -> bool:
    config = getattr(model, "config", None)
    return not getattr(config, "is_encoder_decoder", False)


def _mask(inputs: CallInputs) -> torch.Tensor:
    mask = inputs.given(inputs.mask)
    return mask if mask is not None else torch.ones_like(inputs.tensor)


def _span(row: CallInputs) -> tuple[int, int]:
    """(start, stop) of the real positions of a call with one row."""
    real = _mask(row)[0].bool().nonzero().flatten()
    return (int(real[0]), int(real[-1]) + 1) if len(real) else (0, row.length)


def without_padding(row: CallInputs) -> CallInputs:
    """A row without its padding; its mask, if any, becomes all ones."""
    if not row.mask:
        return row
    cut = row.cut(*_span(row))
    return cut.changed(**{cut.mask: torch.ones_like(cut.tensor)})


def _own(judge: Judge, inputs: CallInputs) -> tuple[list[Variant], str]:
    """Compare rows that the program itself padded with the same rows without their padding."""
    variants, cause = [], ""
    for row in range(inputs.rows):
        padded = inputs.with_rows([row])
        start, stop = _span(padded)
        if (start, stop) == (0, padded.length) or stop - start < 1:
            continue
        bare = without_padding(padded)
        region = Positions(stop - start, padded.length, 0, stop - start, at=start)
        side = "left" if start else "right"
        name = f"row {row} without its own padding on the {side}"
        variant = judge.variant(name, bare, padded, region)
        is_counted = inputs.takes(_POSITIONS) and inputs.given(_POSITIONS) is None
        if variant.held == Held.VIOLATED and is_counted:
            cured = judge.variant(name, _numbered(bare), _numbered(padded), region)
            cause = _COUNTED if cured.held in _HOLDS else ""
        variants.append(variant)
        break
    return variants, cause


def _right(judge: Judge, one: CallInputs, whole: bool) -> tuple[list[Variant], list[str]]:
    length = one.length
    out = []
    for more in (_FEW, _MANY):
        region = Positions(length, length + more, 0, length, whole=whole)
        out.append(judge.variant(f"{more} pads on the right", one, _padded(one, 0, more), region))
    region = Positions(length + _FEW, length, 0, length, whole=whole)
    first, second = _padded(one, 0, _FEW), _padded(one, 0, _FEW, seed=1)
    others = judge.variant("other ids in pads on the right", first, second, region, twin=one)
    return _with_other_ids(out, others, one.pad_id)


def _left(judge: Judge, one: CallInputs) -> tuple[list[Variant], list[str]]:
    length = one.length
    first, second = _padded(one, _FEW, 0), _padded(one, _FEW, 0, seed=1)
    shifted = Positions(length, length + _FEW, 0, length, at=_FEW)
    bare = judge.variant(f"{_FEW} pads on the left", one, first, shifted)
    best, notes = bare, []
    if bare.held == Held.VIOLATED:
        at = f" ({bare.first.operator} of {bare.first.scope})" if bare.first is not None else ""
        note = f"{_FEW} pads on the left move what is real{at}"
        notes = [f"{note}: the model counts positions itself; pad on the right"]
        if one.takes(_POSITIONS):
            name = f"{_FEW} pads on the left, position_ids counted over real tokens"
            best = judge.variant(name, _numbered(one), _numbered(first), shifted)
            notes = [f"{note} without position_ids: pass them"]
    region = Positions(length + _FEW, length, _FEW, length + _FEW)
    # some models count positions by the pad id, but this variant only tests attention
    filled = [_numbered(i) if i.takes(_POSITIONS) else i for i in (first, second, one)]
    others = judge.variant(
        "other ids in pads on the left", filled[0], filled[1], region, twin=filled[2]
    )
    if best.held == Held.VIOLATED and others.held in _HOLDS:
        return [others], notes  # what they hold does not matter: it is their number
    found, more = _with_other_ids([best], others, one.pad_id)
    return found, [*notes, *more]


def _with_other_ids(
    pads: list[Variant], others: Variant, pad_id: int
) -> tuple[list[Variant], list[str]]:
    """When padding with the pad id changes nothing, an effect of other ids is a note and no
    violation.
    """
    if others.held == Held.VIOLATED and all(v.held in _HOLDS for v in pads):
        at = f" ({others.first.operator} of {others.first.scope})" if others.first else ""
        return pads, [f"{others.name} move what is real{at}: fill padding with {pad_id}"]
    return [*pads, others], []


def _numbered(inputs: CallInputs) -> CallInputs:
    """The same call with positions counted over the real tokens."""
    positions = (_mask(inputs).long().cumsum(-1) - 1).clamp(min=0)
    return inputs.changed(**{_POSITIONS: positions})


def _padded(one: CallInputs, left: int, right: int, seed: int = 0) -> CallInputs:
    """One row with padding. seed 0: filled with the pad id; otherwise with ids from its
    own tokens.
    """
    values: dict[str, Any] = {}
    for name, tensor, axis in one.of_length():
        head, tail = (_fill(one, name, tensor, axis, n, seed) for n in (left, right))
        values[name] = torch.cat([head, tensor, tail], axis)
    for name in ("cache_position",):
        if name in one.values:
            values[name] = None
    return one.changed(**values)


def _fill(
    one: CallInputs, name: str, tensor: torch.Tensor, axis: int, count: int, seed: int
) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[axis] = count
    if name == one.mask:
        return tensor.new_zeros(shape)
    if name == one.main:
        pad = tensor.new_full(shape, one.pad_id)
        if not seed or not count:
            return pad
        ids = other_tokens(tensor.flatten(), seed)[: pad.numel()]
        return ids.repeat(pad.numel() // max(len(ids), 1) + 1)[: pad.numel()].reshape(shape)
    return tensor.new_zeros(shape)
