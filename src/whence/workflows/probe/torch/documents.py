"""Documents that share a row: where a call says that they lie, and how a row is made of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from whence.workflows.probe.torch.inputs import CallInputs

POSITIONS = "position_ids"
_ENDS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens")
_OF_ENDS = (*_ENDS, "cu_seq_lens_k", "cu_seqlens_k", "max_length_q", "max_length_k", "max_seqlen")
_MASK = "attention_mask"

Span = tuple[int, int]


def documents(inputs: CallInputs) -> dict[int, list[Span]]:
    """Row -> (start, stop) of its documents, of the first row that has several; {} where none has.
    Told by ends of documents (cu_seq_lens_q), a mask of blocks, numbers of documents in a mask, or
    positions that restart.
    """
    for row in range(inputs.rows):
        spans = _of_row(inputs, row)
        if len(spans) > 1:
            return {row: spans}
    return {}


def _of_row(inputs: CallInputs, row: int) -> list[Span]:
    length = inputs.length
    for name in _ENDS:
        ends = inputs.given(name)
        if isinstance(ends, torch.Tensor) and ends.ndim == 1:
            return [(a, b) for a, b in pairwise(ends.tolist()) if a < b <= length]
    mask = inputs.given(_MASK)
    real = torch.ones(length, dtype=torch.long)
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-2:] == (length, length):
        return _blocks(mask[min(row, len(mask) - 1), 0])
    if isinstance(mask, torch.Tensor) and mask.shape == (inputs.rows, length):
        real = mask[row].long().cpu()
        if real.max() > 1:
            return _runs(real, real)
    positions = inputs.given(POSITIONS)
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        own = positions[min(row, len(positions) - 1)].long().cpu()
        if len(own) == length:
            return _runs((own.diff(prepend=own[:1] - 1) != 1).cumsum(0), real)
    return []


def _runs(numbers: torch.Tensor, real: torch.Tensor) -> list[Span]:
    """Runs of equal numbers among what is no padding."""
    length = len(numbers)
    key = torch.where(real > 0, numbers, -1)
    starts = [0, *[i for i in range(1, length) if key[i] != key[i - 1]], length]
    return [(a, b) for a, b in pairwise(starts) if key[a] >= 0]


def _blocks(mask: torch.Tensor) -> list[Span]:
    """Blocks of a mask (queries, keys): no query sees a key of another block."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min / 2
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        seen = mask > 0
    length = len(seen)
    starts = [s for s in range(1, length) if not seen[s:, :s].any() and not seen[:s, s:].any()]
    return list(pairwise([0, *starts, length]))


def alone(one: CallInputs, start: int, stop: int) -> CallInputs:
    """One document of a row by itself, with positions from 0 where the model takes them."""
    cut = one.cut(start, stop).changed(**{name: None for name in _OF_ENDS if name in one.values})
    mask = one.given(_MASK)
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        cut = with_mask(cut, mask[..., start:stop, start:stop])
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
        cut = with_mask(cut, torch.ones_like(mask[:, start:stop]))
    if one.takes(POSITIONS):
        cut = cut.changed(**{POSITIONS: torch.arange(stop - start)[None]})
    return _of_device(cut)


def joined_documents(first: CallInputs, count: int, second: CallInputs) -> CallInputs:
    """A row of the first `count` positions of one document and all of another; positions of both
    begin at 0.
    """
    head = first.cut(0, count)
    values = {
        name: torch.cat([head.values[name], tensor], axis)
        for name, tensor, axis in second.of_length()
    }
    positions = torch.cat([torch.arange(count), torch.arange(second.length)])[None]
    return _of_device(second.changed(**values, **{POSITIONS: positions}))


def _of_device(inputs: CallInputs) -> CallInputs:
    positions = inputs.given(POSITIONS)
    if positions is None:
        return inputs
    return inputs.changed(**{POSITIONS: positions.to(inputs.tensor.device)})


def with_mask(inputs: CallInputs, mask: torch.Tensor | None) -> CallInputs:
    """With another mask, where the model takes one or was given one."""
    if _MASK not in inputs.values and (mask is None or not inputs.takes(_MASK)):
        return inputs
    return inputs.changed(**{_MASK: mask.to(inputs.tensor.device) if mask is not None else None})


def block_mask(
    lengths: Sequence[int], dtype: torch.dtype, *, is_causal: bool = True
) -> torch.Tensor:
    """[1, 1, length, length], added to scores: 0 where a query sees a key of its own document, else
    the least number of the dtype.
    """
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = numbers[:, None] == numbers[None]
    if is_causal:
        seen = seen.tril()
    least = torch.finfo(dtype).min if dtype.is_floating_point else torch.finfo(torch.float32).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)[None, None]
