"""The stages of a check of an engine: each runs only where the one before leaves something open."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from whence.judge.limits import LIMITS, U32
from whence.results import (
    RequestCheck,
    ServingCheck,
    ServingFault,
    ServingStage,
    Status,
)
from whence.workflows.serving.engines import Answer, Engine
from whence.workflows.serving.judging import Judged, Wrong, first_wrong, place_words
from whence.workflows.serving.logprobs import log_softmax, transform_of
from whence.workflows.serving.rows import Array, Event, Kind, Trace, distances

if TYPE_CHECKING:
    from whence.workflows.serving.torch.forced import Forced, Truth
    from whence.workflows.serving.torch.listening import Listening

_LOOKED_INTO = 2
"""Requests of which modules and caches are kept."""
_LOGITS = Event("", Kind.LOGITS)
_LEAST_LOGITS = 64 * U32


class Request(NamedTuple):
    """A prompt and the engine's answer to it."""

    prompt: tuple[int, ...]
    answer: Answer

    @property
    def sequence(self) -> list[int]:
        """All tokens that the model was given or gave."""
        return [*self.prompt, *self.answer.tokens]


class Funnel:
    """The stages of one check.

    reference: a causal language model, called `name`. cache_error: as `Judged` has it. tell: is
    given a line at the start of each stage.
    """

    def __init__(
        self,
        reference: Any,
        name: str,
        target: Engine,
        prompts: list[tuple[int, ...]],
        count: int,
        cache_error: float,
        tell: Callable[[str], None],
    ) -> None:
        self._reference, self._name, self._target = reference, name, target
        self._prompts, self._count = prompts, count
        self._cache_error, self._tell = cache_error, tell
        self._notes: list[str] = []

    def check(self) -> ServingCheck:
        self._tell(f"{self._target.name} answers {len(self._prompts)} prompts")
        answers = self._target.generate(self._prompts, self._count)
        requests = [Request(p, a) for p, a in zip(self._prompts, answers, strict=True)]
        fault = self._weights()
        forced = self._forced()
        seen = self._listen(requests, range(len(requests)), modules=False)
        checks, suspects = [], []
        self._tell(f"{self._name} scores the answers")
        for number, request in enumerate(requests):
            truth = forced.truth(request.sequence, modules=False)
            trace = seen.traces[number] if seen is not None else Trace()
            check = _checked(number, request, trace, truth)
            checks.append(check)
            if fault is None:
                fault = _of_logprobs(number, request, truth)
            if check.first >= 0:
                suspects.append((number, _is_right(check, truth)))
        if suspects and fault is None:
            fault = self._narrowed(requests, suspects, checks, forced)
        return ServingCheck(
            self._status(requests, checks, fault),
            self._name,
            self._target.name,
            tuple(checks),
            fault,
            tuple(dict.fromkeys(self._notes)),
        )

    def _ended_early(self, requests: list[Request]) -> list[int]:
        """Numbers of prompts whose answer is shorter than asked for and has no end."""
        settings = getattr(self._reference, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None)
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        return [
            number
            for number, request in enumerate(requests, 1)
            if len(request.answer.tokens) < self._count
            and not ends & set(request.answer.tokens[-1:])
        ]

    def _status(
        self, requests: list[Request], checks: list[RequestCheck], fault: ServingFault | None
    ) -> Status:
        if fault is not None:
            return Status.DIFFERENT
        if early := self._ended_early(requests):
            self._notes.append(
                f"prompts {', '.join(map(str, early[:5]))} ended after fewer than {self._count} "
                "tokens, and not at an end of text: did the engine fail?"
            )
        blind = [check for check in checks if check.error is None or check.judged < check.tokens]
        if self._target.model is None:
            self._notes.append("the engine's inside cannot be seen: only its answers are compared")
        elif blind:
            self._notes.append(f"the logits of {len(blind)} of {len(checks)} prompts were not seen")
        return Status.UNDECIDED if blind or early else Status.SAME

    def _weights(self) -> ServingFault | None:
        if self._target.model is None:
            return None
        from whence.workflows.serving.torch.forced import differing_parameters

        names = differing_parameters(self._reference, self._target.model)
        if not names:
            return None
        several = f", nor are {len(names) - 1} more" if len(names) > 1 else ""
        return ServingFault(
            ServingStage.WEIGHTS,
            layer=_layer(names[0]),
            name=names[0],
            sentence=f"{names[0]} is not the reference's, rounded to the coarser dtype{several}",
        )

    def _forced(self) -> Forced:
        from whence.workflows.serving.torch.forced import Forced

        models = [self._reference, self._target.model]
        dtypes = {next(m.parameters()).dtype for m in models if m is not None}
        return Forced(self._reference, dtypes)

    def _listen(
        self, requests: Sequence[Request], kept: Sequence[int], *, modules: bool
    ) -> Listening | None:
        """Have the engine answer again, listened to; None where its model cannot be seen."""
        if self._target.model is None:
            return None
        from whence.workflows.serving.torch.listening import Listening

        sequences = [request.sequence for request in requests]
        with Listening(self._target.model, sequences, kept, modules=modules) as listening:
            answers = self._target.generate([r.prompt for r in requests], self._count)
        if [a.tokens for a in answers] != [r.answer.tokens for r in requests]:
            self._notes.append(
                "the engine does not repeat itself: asked again it answers otherwise"
            )
        self._notes += [f"not listened to: {error}" for error in listening.errors[:1]]
        if listening.schedule.unmatched:
            self._notes.append(
                f"{listening.schedule.unmatched} tokens of its calls belong to no prompt"
            )
        return listening

    def _narrowed(
        self,
        requests: list[Request],
        suspects: list[tuple[int, bool]],
        checks: list[RequestCheck],
        forced: Forced,
    ) -> ServingFault:
        """Where the first wrong token comes from. suspects: (request, are its logits right)."""
        wrong = [number for number, is_right in suspects if not is_right]
        if not wrong:
            return _of_sampler(suspects[0][0], checks[suspects[0][0]])
        wrong.sort(key=lambda number: checks[number].first)
        self._tell(f"looking into {len(wrong[:_LOOKED_INTO])} prompts")
        seen = self._listen(requests, wrong[:_LOOKED_INTO], modules=True)
        fault = _of_logits(wrong[0], checks[wrong[0]])
        if seen is None:
            return fault
        firsts = []
        for number in wrong[:_LOOKED_INTO]:
            truth = forced.truth(requests[number].sequence, modules=True)
            judged = Judged(
                number,
                {event: truth.trace.whole(event) for event in truth.trace.rows},
                truth.floors,
                _windows(self._reference),
                seen.writers,
                self._cache_error,
            )
            first = first_wrong(seen.traces[number], judged)
            if first is not None:
                firsts.append((first.call, number, first, judged))
        if firsts:
            _, number, first, judged = min(firsts, key=lambda entry: entry[:2])
            fault = _fault(number, first, len(requests[number].prompt), judged)
        return self._beside_others(fault, requests, forced)

    def _beside_others(
        self, fault: ServingFault, requests: list[Request], forced: Forced
    ) -> ServingFault:
        """The fault, and whether it is there when its request is asked alone."""
        if len(requests) < 2 or fault.request < 1:
            return fault
        prompt = requests[fault.request - 1].prompt
        request = Request(prompt, self._target.generate([prompt], self._count)[0])
        seen = self._listen([request], [0], modules=False)
        truth = forced.truth(request.sequence, modules=False)
        check = _checked(0, request, seen.traces[0] if seen else Trace(), truth)
        return msgspec.structs.replace(fault, alone=check.first >= 0)


def _checked(number: int, request: Request, trace: Trace, truth: Truth) -> RequestCheck:
    """How the tokens of an answer stand to the reference's logits of the same text."""
    logits = {rows.start: rows.rows[0] for rows in trace.rows.get(_LOGITS, ())}
    allowed = max(truth.floors.get(_LOGITS, 0.0), _LEAST_LOGITS) * LIMITS.whole
    tokens, begin = request.answer.tokens, len(request.prompt) - 1
    first, ties, gap_there, errors = -1, 0, 0.0, []
    for place, token in enumerate(tokens):
        right = truth.logits[begin + place]
        gap = float(right.max() - right[token])
        is_off = False
        if (own := logits.get(begin + place)) is not None:
            errors.append(_logits_error(own, right))
            is_off = errors[-1] > allowed
        is_tie = 0 < gap <= LIMITS.flip * max(truth.noise, _LEAST_LOGITS)
        ties += is_tie and not is_off
        if first < 0 and (is_off or (gap > 0 and not is_tie)):
            first, gap_there = place, gap
    error = max(errors, default=None) if len(errors) == len(tokens) else None
    if not errors and len(request.answer.logprobs) == len(tokens) > 0:
        error = _logprobs_error(request, truth)
    return RequestCheck(
        number + 1, len(tokens), len(tokens), first, ties, gap_there, truth.noise, error
    )


def _logprobs_error(request: Request, truth: Truth) -> float:
    """Largest residual of reported log-probabilities."""
    begin, tokens = len(request.prompt) - 1, list(request.answer.tokens)
    right = log_softmax(truth.logits[begin : begin + len(tokens)])
    return max(abs(float(row[t]) - p) for row, t, p in zip(right, tokens, request.answer.logprobs))


def _logits_error(own: Array, right: Array) -> float:
    """Relative error of logits; one vocabulary may be padded."""
    width = min(len(own), len(right))
    return float(distances(own[None, :width], right[None, :width])[0])


def _is_right(check: RequestCheck, truth: Truth) -> bool:
    """Are the logits of a prompt right, so that its tokens alone are wrong?"""
    allowed = max(truth.floors.get(_LOGITS, 0.0), _LEAST_LOGITS) * LIMITS.whole
    return check.error is not None and check.error <= allowed


def _of_logprobs(number: int, request: Request, truth: Truth) -> ServingFault | None:
    tokens, logprobs = request.answer
    if not tokens or len(logprobs) != len(tokens):
        return None
    begin = len(request.prompt) - 1
    logits = truth.logits[begin : begin + len(tokens)]
    residual, words = transform_of(logits, tokens, logprobs, truth.noise)
    if not residual or not words:
        return None
    sentence = f"its log-probabilities are those of the reference's logits by another rule: {words}"
    return ServingFault(
        ServingStage.SAMPLER, number + 1, error=residual, tensor="logprobs", sentence=sentence
    )


def _of_sampler(number: int, check: RequestCheck) -> ServingFault:
    sentence = (
        f"the logits of prompt {number + 1} are right, and token {check.first} is not their best: "
        f"its logit lies {check.gap:.3g} below, rounding adds {check.noise:.2g}"
    )
    return ServingFault(
        ServingStage.SAMPLER, number + 1, check.first, tensor="tokens", sentence=sentence
    )


def _of_logits(number: int, check: RequestCheck) -> ServingFault:
    words = "are off" if check.error is not None else "cannot be seen"
    sentence = (
        f"token {check.first} of prompt {number + 1} is not explained by rounding, and its logits "
        f"{words}"
    )
    return ServingFault(
        ServingStage.LOGITS, number + 1, check.first, tensor="logits", sentence=sentence
    )


def _fault(number: int, wrong: Wrong, prompt: int, judged: Judged) -> ServingFault:
    """The first wrong tensor, in words."""
    event = wrong.event
    step = max(wrong.end - prompt, 0)
    when = "the prefill" if step == 0 else f"decode step {step}"
    before = "prefill is right, " if step else ""
    layer = event.layer if event.layer >= 0 else _layer(event.module)
    stage = ServingStage.CACHE if event.kind.is_read else ServingStage.LAYER
    if event.kind is Kind.LOGITS:
        stage = ServingStage.LOGITS
    if event.kind.is_of_cache:
        written = event._replace(kind=event.kind.written)
        how = "" if event.kind.is_read else " as the cache is how them"
        words = f"layer {layer}, {event.kind.value[0]}{how}, " + place_words(
            wrong, judged.truth[written].shape[1]
        )
    else:
        words = _module_words(event, wrong)
    return ServingFault(
        stage,
        number + 1,
        step,
        layer,
        event.module,
        event.kind.value[0] if event.kind.is_of_cache else str(event.kind),
        wrong.heads,
        wrong.positions,
        wrong.error,
        f"{before}{when} differs first: {words}",
    )


def _module_words(event: Event, wrong: Wrong) -> str:
    if event.kind is Kind.INPUT:
        parent = event.module.rpartition(".")[0] or "the model"
        return (
            f"what {parent} computes in front of {event.module}, by {wrong.error:.2g} of its size; "
            "all before it is right"
        )
    return f"{event.module or 'logits'}, by {wrong.error:.2g} of its size; all before it is right"


def _layer(name: str) -> int:
    """The number of the layer that a name is in, -1 for none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else -1


def _windows(model: Any) -> Mapping[int, int]:
    """Positions that a query of each layer sees, for layers with a window."""
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "num_hidden_layers", 0)
    if not window or not layers:
        return {}
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return {n: int(window) for n, kind in enumerate(types) if kind == "sliding_attention"}
