"""Checks whether documents that share a row influence each other.

The call states where documents lie in a row, or a row is built from several documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import Unanswered, answer, observed
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import WIDE_ROUNDING, Judge, Trial, moved_at
from whence.workflows.probe.torch.padding import without_padding
from whence.workflows.probe.torch.regions import Positions

_LEAST_LENGTH = 4
_MOST_DOCUMENTS = 3
_READS_A_MASK = ("softmax", "attention")
_READS_POSITIONS = ("aten.embedding", "aten.index", "aten.cos", "aten.sin", "aten.arange")
_OPTION = "--declare packed says that documents must not see each other"


def packing(judge: Judge, inputs: CallInputs, declare: Collection[str]) -> PropertyAnswer:
    """Compare documents in one row with each document alone.

    declare: "packed" when they must not influence each other although neither the call nor the
    library's code says so, "not-packed" when they may.
    """
    declared = False if "not-packed" in declare else True if "packed" in declare else None
    _check_applies(judge.subject.model, inputs, declared)
    own = documents(inputs)
    if own:
        tried, cause = _own(judge, inputs, own)
        return _answered(judge, tried, ["the call itself is packed"], cause)
    if not inputs.takes(_POSITIONS):
        raise Unanswered(
            f"the model takes no {_POSITIONS}: nothing tells it where a document begins"
        )
    return _made(judge, inputs, declared)


def _check_applies(model: Any, inputs: CallInputs, declared: bool | None) -> None:
    """Raise `Unanswered` where the property does not apply."""
    if declared is False:
        raise Unanswered("declared not packed")
    if inputs.length_axis is None or inputs.batch_axis != 0:
        raise Unanswered(f"{inputs.main} has no axis of positions in rows")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Unanswered(
            "it has an encoder and a decoder, and neither is told of documents in the other"
        )
    if inputs.length < _LEAST_LENGTH:
        raise Unanswered(
            f"the sequence has {inputs.length} positions, too few; --call takes another call"
        )


_Tried = list[tuple[Variant, Trial]]
"""Pairs of a variant and the trial that it compares."""


def _tried(judge: Judge, name: str, trial: Trial) -> tuple[Variant, Trial]:
    return judge.variant(name, *trial), trial


def _answered(judge: Judge, tried: _Tried, notes: list[str], cause: str = "") -> PropertyAnswer:
    variants = [variant for variant, _ in tried]
    for wanted in (Held.VIOLATED, Held.OBSERVED):
        broken = [(v, trial) for v, trial in tried if v.held == wanted]
        if broken:
            words = f"documents of one row see each other: {broken[0][0].name}"
            at = moved_at(judge, broken[0][1])
            words += f", from its position {at} on" if at is not None else ""
            cause = f"{words}; {cause}" if cause else words
            break
    return answer(Property.PACKING, variants, cause=cause, notes=notes)


# ---- documents of the call itself


def _own(
    judge: Judge, inputs: CallInputs, spans: dict[int, list[tuple[int, int]]]
) -> tuple[_Tried, str]:
    """Compare the documents of the call's own row with each alone: (variants, what would cure a
    violation).
    """
    tried: _Tried = []
    row, places = next(iter(spans.items()))
    one = inputs.with_rows([row])
    length = one.length
    # the last document first: it has the most context before it
    for number in range(len(places), max(0, len(places) - _MOST_DOCUMENTS), -1):
        start, stop = places[number - 1]
        base = _document_alone(one, start, stop)
        region = Positions(stop - start, length, 0, stop - start, at=start)
        name = f"document {number} of {len(places)} in row {row}, alone"
        tried.append(_tried(judge, name, Trial(base, one, region)))
    start, stop = places[-1]
    changed = _with_others(one, places[:-1])
    region = Positions(length, length, start, stop)
    name = f"document {len(places)}, with other tokens in those before it"
    tried.append(_tried(judge, name, Trial(one, changed, region)))
    broken = next((trial for v, trial in tried if v.held == Held.VIOLATED), None)
    return tried, _cure(judge, broken) if broken is not None else ""


def _cure(judge: Judge, trial: Trial) -> str:
    """Find a change of the call that separates the documents: libraries detect documents only
    without a mask and without a cache.
    """
    one = trial.changed
    assert isinstance(one, CallInputs)
    cures = [(_uncached(one), "use_cache=False parts them")]
    if one.given("attention_mask") is not None:
        bare = _with_mask(one, None)
        words = "without attention_mask"
        cures += [(bare, f"{words} they are parted")]
        cures += [(_uncached(bare), f"{words}, and with use_cache=False, they are parted")]
    for changed, words in cures:
        try:
            moved = judge.moved(trial._replace(changed=changed))
        except Exception:  # noqa: BLE001 - a model that does not run so is not cured so
            continue
        if moved <= WIDE_ROUNDING:
            return words
    return ""


def _with_others(one: CallInputs, places: list[tuple[int, int]]) -> CallInputs:
    tensor, others = one.tensor.clone(), other_tokens(one.tensor, seed=5)
    for start, stop in places:
        tensor[:, start:stop] = others[:, start:stop]
    return one.changed(**{one.main: tensor})


def _uncached(inputs: CallInputs) -> CallInputs:
    """The same call without a cache: libraries detect documents only then."""
    return inputs.changed(use_cache=False) if inputs.takes("use_cache") else inputs


# ---- documents combined into one row


def _made(judge: Judge, inputs: CallInputs, declared: bool | None) -> PropertyAnswer:
    one = _uncached(without_padding(inputs.with_rows([0])))
    one = _with_mask(one, None)
    others = one.changed(**{one.main: other_tokens(one.tensor, 3)})
    thirds = one.changed(**{one.main: other_tokens(one.tensor, 8)})
    half, length = one.length // 2, one.length
    base = _document_alone(one, 0, length)
    packed, twin = _joined_documents(others, half, one), _joined_documents(thirds, half, one)
    region = Positions(length, half + length, 0, length, at=half)
    content = Positions(half + length, length, half, half + length)
    name = "the second of two documents, whose positions restart"
    other = "the same, with other tokens in the first"
    tried = [
        _tried(judge, name, Trial(base, packed, region)),
        _tried(judge, other, Trial(packed, twin, content, base)),
    ]
    is_recognised = _recognised(judge, packed)
    notes = ["declared"] if declared else []
    if not declared:
        notes.append(_evidence(is_recognised))
        tried = [(v if is_recognised and _is_told(v) else observed(v), trial) for v, trial in tried]
    restarts = [variant.held for variant, _ in tried]
    more = _with_blocks(judge, tried, (base, packed, half, region), declared)
    if more:
        notes.append(more)
    cause = ""
    if Held.OBSERVED in restarts and not any(v.held == Held.VIOLATED for v, _ in tried):
        held = len(tried) > len(restarts) and tried[-1][0].held in (Held.EXACT, Held.ROUNDING)
        cause = "a block mask [1, 1, length, length] parts them" if held else _OPTION
    return _answered(judge, tried, notes, cause)


def _evidence(is_recognised: bool) -> str:
    if is_recognised:
        return "the library's code of masks takes positions that restart for documents"
    return f"nothing takes positions that restart for documents; {_OPTION}"


def _is_told(variant: Variant) -> bool:
    """Whether the operator at fault reads the mask or the positions.

    Other mixing of positions (a convolution, a recurrent state) receives no information about
    documents.
    """
    if variant.held != Held.VIOLATED or variant.first is None:
        return False
    operator = variant.first.operator
    is_mask = any(word in operator for word in _READS_A_MASK)
    return is_mask or operator.startswith(_READS_POSITIONS)


def _recognised(judge: Judge, packed: CallInputs) -> bool:
    """Whether the library's masking code detects documents in this call."""
    found: list[bool] = []
    try:
        judge.subject.run(packed, _noting_documents(found))
    except Exception:  # noqa: BLE001 - whatever the user's model raises; its variants say so
        return False
    return any(found)


@contextlib.contextmanager
def _noting_documents(found: list[bool]) -> Iterator[None]:
    """Record whether the masking code of transformers detects documents by their positions."""
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    name = "find_packed_sequence_indices"
    original = getattr(masking_utils, name, None)
    if original is None:
        yield
        return

    def noting(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        found.append(isinstance(out, torch.Tensor) and bool((out != out[..., :1]).any()))
        return out

    setattr(masking_utils, name, noting)
    try:
        yield
    finally:
        setattr(masking_utils, name, original)


# ---- a mask of blocks


def _with_blocks(
    judge: Judge, tried: _Tried, made: tuple[CallInputs, CallInputs, int, Positions], declared: Any
) -> str:
    """Repeat the comparison with a block mask for each document, when the model follows such a
    mask.
    """
    base, packed, half, region = made
    if base.mask != "attention_mask":
        return "no block mask tried: the model takes no attention_mask"
    dtype = next((p.dtype for p in judge.subject.model.parameters()), torch.float32)
    shape = base.length
    for is_causal in (True, False):
        single = _with_mask(base, block_mask([shape], dtype, is_causal=is_causal))
        if not _agree(judge, base, single):
            continue
        if _agree(judge, base, _with_mask(base, block_mask([1] * shape, dtype))):
            return "no block mask tried: the model does not read a mask [1, 1, length, length]"
        blocks = _with_mask(packed, block_mask([half, shape], dtype, is_causal=is_causal))
        name = "the second of two documents, under a block mask"
        variant, trial = _tried(judge, name, Trial(single, blocks, region))
        is_asked = declared or _is_told(variant)
        tried.append((variant if is_asked else observed(variant), trial))
        return ""
    return "no block mask tried: with a mask of its own the model computes something else"


def _agree(judge: Judge, base: CallInputs, changed: CallInputs) -> bool:
    try:
        return judge.moved(Trial(base, changed)) <= WIDE_ROUNDING
    except Exception:  # noqa: BLE001 - a model that takes no such mask
        return False


_POSITIONS = "position_ids"
_ENDS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens")
_OF_ENDS = (*_ENDS, "cu_seq_lens_k", "cu_seqlens_k", "max_length_q", "max_length_k", "max_seqlen")
_MASK = "attention_mask"

_Span = tuple[int, int]


def documents(inputs: CallInputs) -> dict[int, list[_Span]]:
    """(start, stop) of each document by row, for the first row with several documents; {} when none
    has.

    Read from the ends of documents (cu_seq_lens_q), a block mask, document numbers in a mask, or
    positions that restart.
    """
    for row in range(inputs.rows):
        spans = _of_row(inputs, row)
        if len(spans) > 1:
            return {row: spans}
    return {}


def _of_row(inputs: CallInputs, row: int) -> list[_Span]:
    length = inputs.length
    for name in _ENDS:
        ends = inputs.given(name)
        if isinstance(ends, torch.Tensor) and ends.ndim == 1:
            return [(a, b) for a, b in pairwise(ends.tolist()) if a < b <= length]
    mask = inputs.given(_MASK)
    real = torch.ones(length, dtype=torch.long)
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-2:] == (length, length):
        return _mask_blocks(mask[min(row, len(mask) - 1), 0])
    if isinstance(mask, torch.Tensor) and mask.shape == (inputs.rows, length):
        real = mask[row].long().cpu()
        if real.max() > 1:
            return _equal_runs(real, real)
    positions = inputs.given(_POSITIONS)
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        own = positions[min(row, len(positions) - 1)].long().cpu()
        if len(own) == length:
            return _equal_runs((own.diff(prepend=own[:1] - 1) != 1).cumsum(0), real)
    return []


def _equal_runs(numbers: torch.Tensor, real: torch.Tensor) -> list[_Span]:
    """(start, stop) of stretches of equal numbers among the real positions."""
    length = len(numbers)
    key = torch.where(real > 0, numbers, -1)
    starts = [0, *[i for i in range(1, length) if key[i] != key[i - 1]], length]
    return [(a, b) for a, b in pairwise(starts) if key[a] >= 0]


def _mask_blocks(mask: torch.Tensor) -> list[_Span]:
    """(start, stop) of blocks in a mask (queries, keys): no query attends to a key of another
    block.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min / 2
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        seen = mask > 0
    length = len(seen)
    starts = [s for s in range(1, length) if not seen[s:, :s].any() and not seen[:s, s:].any()]
    return list(pairwise([0, *starts, length]))


def _document_alone(one: CallInputs, start: int, stop: int) -> CallInputs:
    """One document of a row by itself; its positions start at 0 if the model accepts positions."""
    cut = one.cut(start, stop).changed(**{name: None for name in _OF_ENDS if name in one.values})
    mask = one.given(_MASK)
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        cut = _with_mask(cut, mask[..., start:stop, start:stop])
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
        cut = _with_mask(cut, torch.ones_like(mask[:, start:stop]))
    if one.takes(_POSITIONS):
        cut = cut.changed(**{_POSITIONS: torch.arange(stop - start)[None]})
    return _of_device(cut)


def _joined_documents(first: CallInputs, count: int, second: CallInputs) -> CallInputs:
    """A row of the first `count` positions of one document and all of another; the positions of
    both start at 0.
    """
    head = first.cut(0, count)
    values = {
        name: torch.cat([head.values[name], tensor], axis)
        for name, tensor, axis in second.of_length()
    }
    positions = torch.cat([torch.arange(count), torch.arange(second.length)])[None]
    return _of_device(second.changed(**values, **{_POSITIONS: positions}))


def _of_device(inputs: CallInputs) -> CallInputs:
    positions = inputs.given(_POSITIONS)
    if positions is None:
        return inputs
    return inputs.changed(**{_POSITIONS: positions.to(inputs.tensor.device)})


def _with_mask(inputs: CallInputs, mask: torch.Tensor | None) -> CallInputs:
    """The same call with another mask, when the model takes one or was given one."""
    if _MASK not in inputs.values and (mask is None or not inputs.takes(_MASK)):
        return inputs
    return inputs.changed(**{_MASK: mask.to(inputs.tensor.device) if mask is not None else None})


def block_mask(
    lengths: Sequence[int], dtype: torch.dtype, *, is_causal: bool = True
) -> torch.Tensor:
    """Additive mask [1, 1, length, length]: 0 where a query may attend to a key of its own
    document, otherwise the smallest number of the dtype.
    """
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = numbers[:, None] == numbers[None]
    if is_causal:
        seen = seen.tril()
    least = torch.finfo(dtype).min if dtype.is_floating_point else torch.finfo(torch.float32).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)[None, None]
