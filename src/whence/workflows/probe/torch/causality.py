"""Checks whether a position depends on what comes after it."""

from __future__ import annotations

from typing import Any

import torch

from whence.results.probe import Held, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import Unanswered, answer, observed
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import WIDE_ROUNDING, Judge, Trial
from whence.workflows.probe.torch.regions import Positions

_LEAST_LENGTH = 3
_MOST_AHEAD = 12
_MOST_ENDS = 24


def causality(judge: Judge, inputs: CallInputs, declared: bool | None) -> PropertyAnswer:
    """Change the end of the sequence: no earlier position may change.

    declared: whether the model is causal; None when its class and its attention tell.
    """
    expected, evidence = (
        (declared, "declared") if declared is not None else is_causal(judge.subject.model, inputs)
    )
    _check_applies(judge.subject.model, inputs)
    if declared is False:
        raise Unanswered("declared not causal")
    one = inputs.with_rows([0]) if inputs.batch_axis is not None else inputs
    length = one.length
    twin = _shorter(judge, one)
    step = -(-length // _MOST_ENDS)
    ends = sorted({length - 1, length // 2, *range(1, length, step)}, reverse=True)
    variants: list[Variant] = []
    for stop in ends:
        region = Positions(length, twin.length if twin else length - 1, 0, stop)
        name = f"changed from position {stop} of {length} on"
        variants.append(judge.variant(name, one, _changed(one, stop, length), region, twin=twin))
        if variants[-1].held == Held.VIOLATED:
            break
    still = [v for v in variants if v.held == Held.EXACT and not v.effect]
    if still and len(still) == len(variants):
        return PropertyAnswer(
            Property.CAUSALITY,
            Held.UNKNOWN,
            tuple(variants),
            why="changing the input changed no output at all: nothing was tried",
        )
    if expected is not True:
        variants = [observed(v) for v in variants]
    cause = ""
    if any(v.held in (Held.VIOLATED, Held.OBSERVED) for v in variants):
        cause = _reach(judge, one, twin)
        if expected is not True:
            cause += f"; {evidence}"
    next_step = "" if expected is not None else "whence probe --causal or --no-causal"
    notes = [evidence]
    if step > 1:
        notes.append(f"changed from every {step}th position on, and from the last")
    return answer(Property.CAUSALITY, variants, cause=cause, notes=notes, next_step=next_step)


def _check_applies(model: Any, inputs: CallInputs) -> None:
    """Raise `Unanswered` where the property does not apply."""
    config = getattr(model, "config", None)
    if inputs.length_axis is None:
        raise Unanswered(f"{inputs.main} has no axis of positions")
    if inputs.length < _LEAST_LENGTH:
        raise Unanswered(
            f"the sequence has {inputs.length} positions, too few; --call takes another call"
        )
    if getattr(config, "is_encoder_decoder", False) and not inputs.main.startswith("decoder"):
        raise Unanswered("an encoder reads both ways, and no decoder_input_ids are given")


def _shorter(judge: Judge, inputs: CallInputs) -> CallInputs | None:
    """The same call with one position less; the axes whose size changes are axes of positions."""
    twin = inputs.cut(0, inputs.length - 1)
    try:
        judge.base(twin)
    except Exception:  # noqa: BLE001 - a model that takes one length only
        return None
    return twin


def _changed(inputs: CallInputs, start: int, stop: int) -> CallInputs:
    axis = inputs.length_axis
    assert axis is not None
    tensor = inputs.tensor.clone()
    others = other_tokens(inputs.tensor, seed=start + 1)
    span = slice(start, stop)
    tensor.movedim(axis, 0)[span] = others.movedim(axis, 0)[span]
    return inputs.changed(**{inputs.main: tensor})


def _reach(judge: Judge, inputs: CallInputs, twin: CallInputs | None) -> str:
    """How many later positions a position depends on."""
    length, at = inputs.length, inputs.length // 4
    places = list(range(at + 1, length))
    if len(places) > _MOST_AHEAD:
        places = sorted(
            {at + 1, at + 2, at + 3, *places[:: len(places) // _MOST_AHEAD], places[-1]}
        )
    region = Positions(length, twin.length if twin else length - 1, at, at + 1)
    seen = [
        place - at
        for place in places
        if judge.moved(Trial(inputs, _changed(inputs, place, place + 1), region, twin))
        > WIDE_ROUNDING
    ]
    if not seen:
        return "a position sees some that come after it"
    if len(seen) == len(places) and len(seen) > 1:
        return "a position sees all that come after it"
    return f"through all layers together, a position sees up to {max(seen)} ahead"


def is_causal(model: Any, inputs: CallInputs) -> tuple[bool | None, str]:
    """Whether a position should depend only on earlier ones: (yes, no or None for unknown,
    evidence).
    """
    config = getattr(model, "config", None)
    name = type(model).__name__
    marks = {
        bool(m.is_causal)
        for m in model.modules()
        if isinstance(getattr(m, "is_causal", None), bool)
    }
    if inputs.main.startswith("decoder"):
        return True, f"{inputs.main} is read by a decoder"
    if isinstance(model, torch.nn.RNNBase):
        return not model.bidirectional, f"{name}, bidirectional={model.bidirectional}"
    if getattr(config, "is_decoder", None) is True:
        return True, "its configuration has is_decoder=True"
    if marks == {True}:
        return True, "its attention modules have is_causal=True"
    if marks == {False} or marks == {True, False}:
        return (None if "CausalLM" in name else False), "its attention has is_causal=False"
    if "ForCausalLM" in name:
        return True, f"it is a {name}"
    return None, "nothing says whether it should be causal"
