"""Do documents that share a row see each other?"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from msgspec.structs import replace

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.documents import (
    POSITIONS,
    alone,
    block_mask,
    documents,
    joined_documents,
    with_mask,
)
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import WIDE_ROUNDING, Judge, Trial, moved_at
from whence.workflows.probe.torch.padding import without_padding
from whence.workflows.probe.torch.regions import Everything, Positions

_LEAST_LENGTH = 4
_MOST_DOCUMENTS = 3
_READS_A_MASK = ("softmax", "attention")
_READS_POSITIONS = ("aten.embedding", "aten.index", "aten.cos", "aten.sin", "aten.arange")
_OPTION = "--declare packed says that documents must not see each other"


def packing(judge: Judge, inputs: CallInputs, declare: Collection[str]) -> PropertyAnswer:
    """Read documents in one row, and each alone. declare: "packed" where they must not see each
    other though neither the call nor the library's own code says so, "not-packed" where they may.
    """
    declared = False if "not-packed" in declare else True if "packed" in declare else None
    if why := _does_not_apply(judge.subject.model, inputs, declared):
        return PropertyAnswer(Property.PACKING, Held.ABSENT, why=why)
    own = documents(inputs)
    if own:
        tried, cause = _own(judge, inputs, own)
        return _answered(judge, tried, ["the call itself is packed"], cause)
    if not inputs.takes(POSITIONS):
        why = f"the model takes no {POSITIONS}: nothing tells it where a document begins"
        return PropertyAnswer(Property.PACKING, Held.ABSENT, why=why)
    return _made(judge, inputs, declared)


def _does_not_apply(model: Any, inputs: CallInputs, declared: bool | None) -> str:
    if declared is False:
        return "declared not packed"
    if inputs.length_axis is None or inputs.batch_axis != 0:
        return f"{inputs.main} has no axis of positions in rows"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "it has an encoder and a decoder, and neither is told of documents in the other"
    if inputs.length < _LEAST_LENGTH:
        return f"the sequence has {inputs.length} positions, too few; --call takes another call"
    return ""


class _Tried(list[tuple[Variant, Trial]]):
    """Variants with what they compare."""

    def judge(self, judge: Judge, name: str, trial: Trial) -> Variant:
        variant = judge.variant(name, trial.base, trial.changed, trial.region, twin=trial.twin)
        self.append((variant, trial))
        return variant

    def allowed(self, number: int) -> None:
        """Nothing says that this one should hold."""
        variant, trial = self[number]
        if variant.held == Held.VIOLATED:
            self[number] = replace(variant, held=Held.OBSERVED), trial


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
    """(variants, what would cure a violation)."""
    tried = _Tried()
    row, places = next(iter(spans.items()))
    one = inputs.with_rows([row])
    length = one.length
    # the last one first: before it lies most
    for number in range(len(places), max(0, len(places) - _MOST_DOCUMENTS), -1):
        start, stop = places[number - 1]
        base = alone(one, start, stop)
        region = Positions(stop - start, length, 0, stop - start, at=start)
        name = f"document {number} of {len(places)} in row {row}, alone"
        tried.judge(judge, name, Trial(base, one, region))
    start, stop = places[-1]
    changed = _with_others(one, places[:-1])
    region = Positions(length, length, start, stop)
    name = f"document {len(places)}, with other tokens in those before it"
    tried.judge(judge, name, Trial(one, changed, region))
    broken = next((trial for v, trial in tried if v.held == Held.VIOLATED), None)
    return tried, _cure(judge, broken) if broken is not None else ""


def _cure(judge: Judge, trial: Trial) -> str:
    """What parts the documents: libraries look for them only without a mask and without a cache."""
    one = trial.changed
    assert isinstance(one, CallInputs)
    cures = [(_uncached(one), "use_cache=False parts them")]
    if one.given("attention_mask") is not None:
        bare = with_mask(one, None)
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
    """Libraries look for documents only where no cache is kept."""
    return inputs.changed(use_cache=False) if inputs.takes("use_cache") else inputs


# ---- documents that are put together


def _made(judge: Judge, inputs: CallInputs, declared: bool | None) -> PropertyAnswer:
    one = _uncached(without_padding(inputs.with_rows([0])))
    one = with_mask(one, None)
    others = one.changed(**{one.main: other_tokens(one.tensor, 3)})
    thirds = one.changed(**{one.main: other_tokens(one.tensor, 8)})
    half, length = one.length // 2, one.length
    base = alone(one, 0, length)
    packed, twin = joined_documents(others, half, one), joined_documents(thirds, half, one)
    region = Positions(length, half + length, 0, length, at=half)
    tried = _Tried()
    name = "the second of two documents, whose positions restart"
    tried.judge(judge, name, Trial(base, packed, region))
    content = Positions(half + length, length, half, half + length)
    name = "the same, with other tokens in the first"
    tried.judge(judge, name, Trial(packed, twin, content, base))
    is_recognised = _recognised(judge, packed)
    notes = ["declared"] if declared else []
    if not declared:
        notes.append(_evidence(is_recognised))
        for number, (variant, _) in enumerate(tried):
            if not (is_recognised and _is_told(variant)):
                tried.allowed(number)
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
    """Is the operator at fault one that reads the mask or the positions? What mixes positions
    otherwise (a convolution, a recurrent state) is told nothing of documents.
    """
    if variant.held != Held.VIOLATED or variant.first is None:
        return False
    operator = variant.first.operator
    is_mask = any(word in operator for word in _READS_A_MASK)
    return is_mask or operator.startswith(_READS_POSITIONS)


def _recognised(judge: Judge, packed: CallInputs) -> bool:
    """Does the library's code of masks find documents in this call?"""
    found: list[bool] = []
    try:
        judge.subject.run(packed, _noting_documents(found))
    except Exception:  # noqa: BLE001 - whatever the user's model raises; its variants say so
        return False
    return any(found)


@contextlib.contextmanager
def _noting_documents(found: list[bool]) -> Iterator[None]:
    """Notes whether masking code of transformers finds documents by their positions."""
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
    """The same with a mask of each document's own block, where the model follows such a mask."""
    base, packed, half, region = made
    if base.mask != "attention_mask":
        return "no block mask tried: the model takes no attention_mask"
    dtype = next((p.dtype for p in judge.subject.model.parameters()), torch.float32)
    shape = base.length
    for is_causal in (True, False):
        single = with_mask(base, block_mask([shape], dtype, is_causal=is_causal))
        if not _agree(judge, base, single):
            continue
        if _agree(judge, base, with_mask(base, block_mask([1] * shape, dtype))):
            return "no block mask tried: the model does not read a mask [1, 1, length, length]"
        blocks = with_mask(packed, block_mask([half, shape], dtype, is_causal=is_causal))
        name = "the second of two documents, under a block mask"
        variant = tried.judge(judge, name, Trial(single, blocks, region))
        if not declared and not _is_told(variant):
            tried.allowed(len(tried) - 1)
        return ""
    return "no block mask tried: with a mask of its own the model computes something else"


def _agree(judge: Judge, base: CallInputs, changed: CallInputs) -> bool:
    try:
        return judge.moved(Trial(base, changed, Everything())) <= WIDE_ROUNDING
    except Exception:  # noqa: BLE001 - a model that takes no such mask
        return False
