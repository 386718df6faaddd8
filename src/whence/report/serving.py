"""A check of an engine against a reference, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whence.report.document import Document, Table, answering, few
from whence.report.tables import count, number
from whence.results import (
    BatchDependence,
    RequestCheck,
    ServingCheck,
    ServingFault,
    ServingStage,
    Status,
)

_MOST = 20
_MOST_CAUSES = 5
WORDS = {Status.SAME: "SAME", Status.DIFFERENT: "FAULT", Status.UNDECIDED: "UNDECIDED"}
STAGES = {
    ServingStage.WEIGHTS: "the weights",
    ServingStage.PROMPT: "the prompt, between the engine and its model",
    ServingStage.SAMPLER: "the sampler: the logits are right",
    ServingStage.CACHE: "the cache: what it was given is right, what it hands out is not",
    ServingStage.LAYER: "a layer: the cache hands out what it was given",
    ServingStage.LOGITS: "the logits",
}


@answering
def serving_text(result: ServingCheck) -> Document:
    """The answer as text."""
    judged = sum(check.judged for check in result.requests)
    words = f"{count(judged, 'token')} of {count(len(result.requests), 'prompt')} compared"
    fault = result.fault
    if fault is not None:
        yield "FAULT", fault.sentence
        yield from _fault(fault)
    else:
        is_same = result.status == Status.SAME
        yield (
            WORDS[result.status],
            "no fault: every difference is rounding" if is_same else "no fault, as far as was seen",
        )
    yield "  compared", words
    yield "  tokens", _tokens(result)
    errors = [check.error for check in result.requests if check.error is not None]
    noise = max((check.noise for check in result.requests), default=0.0)
    if errors:
        seen = f"differ by {number(max(errors))} at most; rounding adds {number(noise)} to a logit"
        yield "  logits", seen
    if flips := sum(check.routes for check in result.requests):
        yield "  routes", f"{count(flips, 'choice')} of a router differ, among scores that tie"
    yield from (("  in a batch", dependence(each)) for each in result.batch)
    yield from ratio_lines(result)
    if wrong := [check for check in result.requests if check.first >= 0]:
        yield ""
        yield Table(prompt_rows(wrong), range(6))
    yield from (f"note: {note}" for note in result.notes)


def _fault(fault: ServingFault) -> Document:
    yield "  stage", STAGES[fault.stage]
    if fault.request:
        step = "prefill" if fault.step == 0 else f"decode step {fault.step}"
        is_timed = fault.stage in (ServingStage.CACHE, ServingStage.LAYER)
        yield "  first at", f"prompt {fault.request}" + (f", {step}" if is_timed else "")
    if fault.alone is not None:
        yield (
            "  alone",
            "wrong too, when this prompt is asked alone"
            if fault.alone
            else "right, when this prompt is asked alone: it takes others beside it",
        )


def _tokens(result: ServingCheck) -> Iterator[str]:
    wrong = [check for check in result.requests if check.first >= 0]
    ties = sum(check.ties for check in result.requests)
    yield (
        f"{len(wrong)} of {count(len(result.requests), 'prompt')} go wrong; "
        f"{count(ties, 'token')} chosen otherwise in a near tie"
    )


def ratio_lines(result: ServingCheck) -> Iterator[tuple[str, str]]:
    """Lines on the log-ratios and what they come from."""
    if not result.ratios:
        return
    sizes = {(r.number, n): abs(t) for r in result.ratios for n, t in enumerate(r.tokens)}
    prompt, token = max(sizes, key=sizes.__getitem__)
    mean = sum(sizes.values()) / len(sizes)
    largest = f"{number(sizes[prompt, token])} at token {token} of prompt {prompt}"
    yield "  log-ratio", f"{number(mean)} on average, at most {largest}"
    parts: dict[str, float] = {}
    for ratio in result.ratios:
        for name, values in ratio.causes.items():
            parts[name] = parts.get(name, 0.0) + sum(map(abs, values))
    whole = sum(parts.values()) or 1.0
    most = sorted(parts, key=parts.__getitem__, reverse=True)[:_MOST_CAUSES]
    yield "  from", ", ".join(f"{name} {100 * parts[name] / whole:.0f} %" for name in most)


def dependence(result: BatchDependence) -> str:
    """What a prompt shows that was asked alone too."""
    prompt = f"prompt {result.number}"
    if not result.compared:
        return f"{prompt}: no operator in the batch has rows that face those of the prompt alone"
    if not result.operator:
        rows = count(result.compared, "row")
        return f"{prompt} is as alone, bit for bit, in {rows} of operators"
    where = f"at position {result.position}, by {number(result.error)} of its size"
    kind = "by rounding" if result.is_rounding else "by more than rounding"
    return f"{prompt} depends on others {kind}, first in {result.operator}, {where}"


def prompt_rows(checks: Sequence[RequestCheck]) -> Iterator[tuple[str, ...]]:
    """A table of prompts, with its head."""
    yield "prompt", "tokens", "first", "gap", "noise", "logits"
    for check in checks[:_MOST]:
        error = "-" if check.error is None else number(check.error)
        yield (
            str(check.number),
            str(check.tokens),
            str(check.first),
            number(check.gap),
            number(check.noise),
            error,
        )
    yield from ((text,) for text in few(checks, _MOST, str) if text.startswith("and "))
