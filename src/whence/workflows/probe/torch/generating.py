"""Does greedy generation with a cache follow what the model says of the whole sequence?"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from whence.results.probe import Held, Variant
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge
from whence.workflows.probe.torch.regions import Positions
from whence.workflows.probe.torch.subject import Subject

_TOKENS = 6
_LOGITS = "logits"
_NAME = "generated greedily with a cache"


class _Generated(NamedTuple):
    """tokens: [new]. logits: [new, vocabulary], before anything is done to them."""

    tokens: torch.Tensor
    logits: torch.Tensor


class _Stop(Exception):
    """The call that is looked for is reached."""


def generated(judge: Judge, inputs: CallInputs) -> tuple[list[Variant], list[str]]:
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
        why = f"the model does not generate so: {type(error).__name__}: {error}"[:160]
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
