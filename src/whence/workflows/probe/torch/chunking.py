"""Does reading in pieces, with a cache, give what reading at once gives?

Does greedy generation with a cache follow what the model says of the whole sequence?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.causality import is_causal
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge, said
from whence.workflows.probe.torch.regions import Positions
from whence.workflows.probe.torch.subject import Subject

_KEYS = "past_key_values"
_CACHES = (_KEYS, "cache_params")
_LEAST_LENGTH = 4
_ROOM = 4


def chunking(judge: Judge, inputs: CallInputs, declared: bool | None) -> PropertyAnswer:
    """Read the sequence in pieces, with the model's own cache, then with a static one."""
    model = judge.subject.model
    cache = next((name for name in _CACHES if inputs.takes(name)), "")
    if not cache or not inputs.takes("use_cache"):
        why = "the model takes no cache (past_key_values, use_cache)"
        return PropertyAnswer(Property.CHUNKING, Held.ABSENT, why=why)
    if inputs.length_axis is None or inputs.length < _LEAST_LENGTH:
        why = f"the sequence has {inputs.length} positions, too few; --call takes another call"
        return PropertyAnswer(Property.CHUNKING, Held.ABSENT, why=why)
    expected = declared if declared is not None else is_causal(model, inputs)[0]
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if expected is False or (encoder_decoder and not inputs.main.startswith("decoder")):
        why = "only a model that reads from left to right can read in pieces"
        return PropertyAnswer(Property.CHUNKING, Held.ABSENT, why=why)
    one = inputs.with_rows([0]).changed(use_cache=True)
    if one.given(cache) is not None:
        why = "the call has a cache that is not empty already; --call takes another call"
        return PropertyAnswer(Property.CHUNKING, Held.ABSENT, why=why)
    length = one.length
    name, half = "a token at a time", length // 2
    variants = [_in_pieces(judge, one, cache, name, list(range(1, length)))]
    if cache == _KEYS:
        name = f"in pieces of {half} and {length - half}"
        variants.append(_in_pieces(judge, one, cache, name, [half]))
        if not encoder_decoder and getattr(model, "_can_compile_fullgraph", False):
            variants.append(_static(judge, one))
            name = "a token at a time with a static cache"
            steps = list(range(1, length))
            variants.append(_in_pieces(judge, one, cache, name, steps, _static_cache))
    written, notes = _generated(judge, inputs.with_rows([0]))
    variants += written
    caused = next((v for v in variants if v.held == Held.VIOLATED), None)
    cause = f"with a cache the model computes something else: {caused.name}" if caused else ""
    return answer(Property.CHUNKING, variants, cause=cause, notes=notes)


def _in_pieces(
    judge: Judge,
    one: CallInputs,
    cache: str,
    name: str,
    breaks: Sequence[int],
    first: Callable[[Subject, int], Any] = lambda subject, length: None,
) -> Variant:
    """The last piece, read after the others, against the same positions read at once. first: makes
    the cache of the first piece.
    """
    length, last = one.length, breaks[-1]

    def last_piece(subject: Subject) -> CallInputs:
        past, start = first(subject, length), 0
        for stop in breaks:
            out = subject.raw(_piece(one, cache, past, start, stop))
            past, start = _cache_of(out, cache), stop
        return _piece(one, cache, past, start, length)

    region = Positions(length, length - last, last, length, at=0)
    return judge.variant(name, one, last_piece, region)


def _piece(one: CallInputs, cache: str, past: Any, start: int, stop: int) -> CallInputs:
    """Positions start..stop, after those that the cache holds."""
    values = {cache: past}
    mask = one.given(one.mask) if one.mask else None
    if mask is not None:  # a state that sums up the past has no use for its mask
        values[one.mask] = mask[:, :stop] if cache == _KEYS else mask[:, start:stop]
    return one.cut(start, stop).changed(**values)


def _cache_of(out: Any, name: str) -> Any:
    past = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
    if past is None:
        raise ValueError(f"the model returned no {name}")
    return past


def _static(judge: Judge, one: CallInputs) -> Variant:
    """A cache of fixed size, which some engines need, in the place of one that grows."""
    length = one.length

    def with_static(subject: Subject) -> CallInputs:
        return one.changed(past_key_values=_static_cache(subject, length))

    region = Positions(length, length + _ROOM, 0, length, whole=True)
    return judge.variant("with a static cache", one, with_static, region)


def _static_cache(subject: Subject, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=subject.model.config, max_cache_len=length + _ROOM)


_TOKENS = 6
_LOGITS = "logits"
_NAME = "generated greedily with a cache"


class _Generated(NamedTuple):
    """tokens: [new]. logits: [new, vocabulary], before anything is done to them."""

    tokens: torch.Tensor
    logits: torch.Tensor


class _Stop(Exception):
    """The call that is looked for is reached."""


def _generated(judge: Judge, inputs: CallInputs) -> tuple[list[Variant], list[str]]:
    """(variants, notes): the token furthest from the whole forward, and tokens that are ties. []
    for a model that generates nothing from token ids.
    """
    model = judge.subject.model
    can = getattr(model, "can_generate", None)
    if inputs.main != "input_ids" or not inputs.is_tokens or can is None or not can():
        return [], []
    prompt = _bare(inputs)
    try:
        made = _generate(judge.subject, prompt)
        whole = _whole(prompt, made.tokens)
        logits = judge.base(whole)[_LOGITS][0, prompt.length - 1 :]
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        why = f"the model does not generate so: {said(error)}"
        return [Variant(_NAME, Held.UNKNOWN, why=why)], []
    finally:
        judge.subject.restore()
    count = len(made.tokens)
    if count < 2 or logits.shape != made.logits.shape:
        why = "it ends at once" if count < 2 else "its logits have another shape than the forward's"
        return [Variant(_NAME, Held.UNKNOWN, why=why)], []
    apart = (logits.double() - made.logits.double()).abs().amax(-1)
    step = int(apart[1:].argmax()) + 1

    def at_step(subject: Subject) -> CallInputs:
        return _call_at(subject, prompt, made.tokens, step)

    region = Positions(whole.length, 1, prompt.length + step - 1, prompt.length + step, at=0)
    name = f"{_NAME}, token {step + 1} of {count}"
    variant = judge.variant(name, whole, at_step, region)
    return [variant], _notes(made, logits, apart, variant)


def _notes(
    made: _Generated, logits: torch.Tensor, apart: torch.Tensor, variant: Variant
) -> list[str]:
    """Where another token would be chosen without a cache: a tie where that is rounding."""
    cached, best = made.logits.argmax(-1), logits.argmax(-1)
    other = (cached != best).nonzero().flatten().tolist()
    notes = []
    if other:
        step = other[0]
        margin = float(logits[step, best[step]] - logits[step, cached[step]])
        words = f"token {step + 1} is {int(cached[step])} with a cache, {int(best[step])} without"
        if variant.held in (Held.EXACT, Held.ROUNDING):
            words += (
                f": a tie, {margin:.2g} apart, where rounding moves logits by {apart[step]:.2g}"
            )
        notes.append(words)
    chosen = (cached != made.tokens).nonzero().flatten().tolist()
    if chosen:
        notes.append(
            f"token {chosen[0] + 1} is not the largest logit: generation_config changes them"
        )
    return notes


def _bare(inputs: CallInputs) -> CallInputs:
    """Ids and their mask alone: generation makes the rest."""
    ids = inputs.tensor
    prompt = inputs.changed()
    prompt.values = {inputs.main: ids}
    if inputs.takes("attention_mask"):
        mask = inputs.given("attention_mask")
        is_flat = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        prompt.values["attention_mask"] = mask if is_flat else torch.ones_like(ids)
    return prompt


def _whole(prompt: CallInputs, tokens: torch.Tensor) -> CallInputs:
    """The prompt with all new tokens but the last, in one call."""
    more = tokens[None, :-1].to(prompt.tensor)
    values = {prompt.main: torch.cat([prompt.tensor, more], 1)}
    mask = prompt.given("attention_mask")
    if mask is not None:
        values["attention_mask"] = torch.cat([mask, torch.ones_like(more)], 1)
    return prompt.changed(**values)


def _generate(subject: Subject, prompt: CallInputs, forced: Any = None) -> _Generated:
    def run(model: Any) -> Any:
        more = {"logits_processor": [forced]} if forced is not None else {}
        return model.generate(
            **{name: value.clone() for name, value in prompt.values.items()},
            max_new_tokens=_TOKENS,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )

    out = subject.within(run)
    new = out.sequences[0, prompt.length :]
    return _Generated(new.detach().clone(), torch.stack([step[0] for step in out.logits]).detach())


def _call_at(subject: Subject, prompt: CallInputs, tokens: torch.Tensor, step: int) -> CallInputs:
    """The arguments with which generation calls the model for one token, after `tokens` were
    chosen. Raises ValueError where it reads more than the one before.
    """
    seen: list[dict[str, Any]] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs)
        if len(seen) > step:
            raise _Stop

    def forced(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[:, tokens[ids.shape[1] - prompt.length]] = 0.0
        return out

    handle = subject.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        _generate(subject, prompt, forced)
    except _Stop:
        pass
    finally:
        handle.remove()
    if len(seen) <= step:
        raise ValueError("generation does not call the model once a token")
    call = CallInputs(subject.model, (), {k: v for k, v in seen[step].items() if v is not None})
    if call.length != 1:
        raise ValueError("generation keeps no cache: it reads the whole sequence for each token")
    return call
