"""Does reading in pieces, with a cache, give what reading at once gives?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.causality import is_causal
from whence.workflows.probe.torch.generating import generated
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge
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
    written, notes = generated(judge, inputs.with_rows([0]))
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
