"""Compares generated tokens, and tells whether rounding explains the first that differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from whence import align
from whence._version import __version__
from whence.comparison.answer import logits_relation
from whence.comparison.answer.effect import of_tokens
from whence.comparison.answer.paired_prompts import PairedPrompts
from whence.comparison.answer.token_verdicts import BAD, finite, judged
from whence.comparison.verdicts.status import Gaps, decide, failed_alone
from whence.records import Call, Run
from whence.records.experts import has_experts
from whence.results import (
    CauseKind,
    Comparison,
    Confidence,
    Coverage,
    Evidence,
    Finding,
    Generation,
    Plan,
    Prompted,
    Status,
    Token,
    TokenKind,
    VerdictKind,
)

if TYPE_CHECKING:
    from whence.comparison.options import CompareOptions

_FAULTY = (
    VerdictKind.INTRODUCED,
    VerdictKind.PARAM_DIFF,
    VerdictKind.STRUCTURAL,
    VerdictKind.PRECISION,
)
_WRONG = (VerdictKind.INTRODUCED, VerdictKind.PARAM_DIFF, VerdictKind.STRUCTURAL)
_CLEAR = 1.5  # times what is allowed, from which on one token is more than a suspect
_SEVERAL = 3
_EXPERTS = (
    "the model sends tokens to experts: where two experts are nearly tied, rounding sends a token "
    "to another one, and its logits differ by more than rounding; logits alone do not show that"
)


def logits_alone(*runs: Run) -> bool:
    """Was one of the runs captured at the level of logits, so that there are no modules to
    compare?
    """
    return any(run.info.options.get("level") == "logits" for run in runs)


def compare_logits(
    reference: Run,
    target: Run,
    options: CompareOptions,
    again: Sequence[Run] = (),
    third: Run | None = None,
) -> Comparison:
    """Compare two runs by their logits alone. again: further runs of the reference; what they
    differ by is noise. third: is noted.

    The status is that of `decide`; a finding names the root, the step and the token, for no module
    was captured. Where one side holds what the model's last module returned and the other what the
    model made of it, they are brought together first, and never `same`.
    """
    relation = logits_relation.between(reference, target)
    if relation is None:
        return _compared(reference, target, options, again, third)
    reference, target, *others = (relation.brought(run) for run in (reference, target, *again))
    return relation.told(_compared(reference, target, options, others, third))


def _compared(
    reference: Run,
    target: Run,
    options: CompareOptions,
    again: Sequence[Run],
    third: Run | None,
) -> Comparison:
    """Two runs whose logits are the same tensor, compared."""
    prompts = PairedPrompts(reference, target)
    noise = [error for run in again for error in PairedPrompts(reference, run).errors()]
    generation = judged(prompts, noise, logits_only=True)
    routes = any(map(has_experts, prompts.runs))
    findings = _findings(generation, prompts, routes=routes)
    compared = generation.compared
    measured = sum(t.verdict != TokenKind.INCOMPARABLE for t in generation.tokens)
    coverage = Coverage(
        generation.of, compared, measured, 0, 0, bool(compared) and measured == compared
    )
    gaps = Gaps(failed_alone=failed_alone(reference.info, target.info))
    status, why, undecided = decide(
        findings,
        (),
        coverage,
        gaps,
        inputs_differ=False,
        strict=options.strict,
        min_coverage=options.min_coverage,
    )
    if status == Status.UNDECIDED and findings and routes:
        why = _EXPERTS
    if status == Status.UNDECIDED and not findings and why != gaps.failed_alone:
        why = _too_few(generation, coverage, options.min_coverage)
        if prompts.reasons and not compared:
            why = f"no token is compared: {prompts.reasons[0]}"
    return Comparison(
        status=status,
        evidence=Evidence.TWO_DUMPS if compared else Evidence.NONE,
        reference=reference.path,
        target=target.path,
        findings=tuple(findings),
        first_difference=_first_difference(generation, prompts),
        counts=dict(Counter(t.verdict for t in generation.tokens)),
        coverage=coverage,
        unmatched=generation.alone_reference + generation.alone_target,
        incomparable=compared - measured,
        inputs_differ=(),
        versions={"whence": __version__, "format": str(reference.info.format)},
        plan=Plan(()),
        rows=(),
        verdicts=(),
        headline=why,
        undecided=undecided,
        notes=tuple(_notes(prompts, options, third)),
        environment=tuple(align.differences(reference, target)),
        generation=generation,
        effect=of_tokens(generation),
    )


def _notes(prompts: PairedPrompts, options: CompareOptions, third: Run | None) -> Iterator[str]:
    for run in prompts.runs:
        yield from (n.text for n in run.notes if n.kind in ("logits", "budget", "error"))
    for side, run in zip(("reference", "target"), prompts.runs, strict=True):
        yield from (f"{side}: {text}" for text in align.changed(run))
    yield from (f"tokens: {reason}" for reason in dict.fromkeys(prompts.reasons))
    needs_modules = {
        "--third": third,
        "--policy": options.policy,
        "--map": options.chart,
        "--model": options.model,
        "--view": options.views or None,
    }
    for words, value in needs_modules.items():
        if value is not None:
            yield f"{words} needs modules: it changes nothing between logits alone"


def _first_difference(generation: Generation, prompts: PairedPrompts) -> dict[str, object] | None:
    for token in generation.tokens:
        if token.verdict not in (TokenKind.IDENTICAL, TokenKind.NOISE):
            prompt = generation.prompt_of(token)
            return {
                "name": prompt.root,
                "op_type": prompts.reference[token.prompt - 1].call.op_type,
                "step": token.step,
                "rank": prompt.rank,
                "verdict": token.verdict,
            }
    return None


def generated(
    reference: Run, target: Run, result: Comparison, calls: Sequence[Call]
) -> tuple[Generation | None, tuple[str, ...]]:
    """(what both runs of a comparison generated, tied to its findings, notes on what of it is not
    known).

    None where neither went on with tokens of its own. reference, target: as they were captured;
    calls: of the aligned reference, which the result speaks of.
    """
    prompts = PairedPrompts(reference, target)
    notes = tuple(f"tokens are not compared: {reason}" for reason in dict.fromkeys(prompts.reasons))
    if not any(len(p.calls) > 1 for p in (*prompts.reference, *prompts.target)):
        return None, notes
    reach = _Reach(result, calls)
    generation = judged(prompts, (), logits_only=False, faulty=_faulty(result, reach))
    if not generation.compared:
        return None, notes
    if result.status == Status.SAME:
        generation = _inherited(generation)
    return msgspec.structs.replace(
        generation,
        led_to=_led_to(generation.tokens[generation.suspect], prompts, result, reach)
        if generation.suspect >= 0
        else "",
        prompts=tuple(_with_causes(generation, prompts, result, reach)),
    ), notes


def _inherited(generation: Generation) -> Generation:
    """Tokens beyond the rounding of logits, where every module computes right on the inputs that it
    had: a choice inside the model, as among experts, came out otherwise.
    """
    tokens = tuple(
        msgspec.structs.replace(t, verdict=TokenKind.INHERITED) if t.verdict in BAD else t
        for t in generation.tokens
    )
    prompts = tuple(
        msgspec.structs.replace(
            p,
            outcome=TokenKind.INHERITED if p.outcome in BAD else p.outcome,
            flips=(p.flips[0] + p.flips[1], 0, p.flips[2]),
        )
        for p in generation.prompts
    )
    return msgspec.structs.replace(generation, tokens=tokens, prompts=prompts)


def _findings(generation: Generation, prompts: PairedPrompts, *, routes: bool) -> list[Finding]:
    """At most one: the first token that rounding does not explain, with how many follow it.
    routes: the model sends tokens to experts.
    """
    if generation.suspect < 0:
        return []
    token = generation.tokens[generation.suspect]
    prompt = generation.prompt_of(token)
    bad = [t for t in generation.tokens if t.verdict in BAD]
    first = generation.suspect == 0
    clear = [
        t
        for t in bad
        if t.score > (4.0 if first and t.verdict == TokenKind.OFF else _CLEAR) or t.why
    ]
    likely = bool(clear) or (len(bad) >= _SEVERAL and not first)
    if routes:  # only what no choice of experts makes: NaN, infinity
        likely = any(t.why for t in bad)
    flipped = any(t.reference != t.target for t in bad)
    sentence = generation.sentence + f"; {len(bad)} of {generation.compared} tokens are so"
    if not flipped:
        sentence += ", with no effect on tokens"
    hint = (
        "; capture both without --level logits, --steps "
        f":{max(token.step, token.target_step) + 1}, to see which module"
    )
    call = prompts.reference[token.prompt - 1].call
    also = tuple(dict.fromkeys(f"prompt {t.prompt}" for t in bad if t.prompt != token.prompt))
    numbers = token.numbers | {"score": finite(token.score)}
    return [
        Finding(
            prompt.root,
            call.op_type,
            CauseKind.UNKNOWN,
            VerdictKind.INTRODUCED,
            Confidence.LIKELY if likely else Confidence.SUSPECT,
            token.step,
            prompt.rank,
            Evidence.TWO_DUMPS,
            numbers,
            sentence + hint,
            prompt.root,
            slot="output.logits",
            also=also,
            worst_index=(token.row,),
        )
    ]


def _too_few(generation: Generation, coverage: Coverage, least: float) -> str:
    if not generation.prompts:
        return (
            "no prompt of one run is in the other, or no logits were captured (no token ids, "
            "no module that makes logits)"
        )
    if not generation.compared:
        return "no token of any prompt could be compared"
    if coverage.share < least:
        parted = sum(p.outcome in ("explained", "sampled") for p in generation.prompts)
        why = (
            f"{parted} prompts diverge at a token that is no fault, and later tokens continue "
            "different texts"
            if parted
            else "the target ends early"
        )
        forced = (
            ""
            if generation.forced
            else "; capture the target with --force-tokens REF to compare the rest"
        )
        share = f"{coverage.share:.0%}, --min-coverage {least:.0%}"
        return (
            f"only {coverage.measured} of {coverage.calls} tokens could be compared "
            f"({share}): {why}{forced}"
        )
    return "not every token could be compared"


class _Reach:
    """Which steps of the reference's own root calls a call of the aligned reference stands for."""

    def __init__(self, result: Comparison, calls: Sequence[Call]) -> None:
        self._pairs, self._calls = result.plan.pairs, calls
        self._joined = {
            (j.root, j.step, j.micro): {p[0] for p in j.pieces}
            for j in result.plan.joined
            if j.side == "reference"
        }

    def of(self, pair: int) -> tuple[str, set[int]]:
        """(root, steps) of a pair's call."""
        call = self._calls[self._pairs[pair].reference]
        return call.root, self._joined.get((call.root, call.step, call.micro), {call.step})

    def name(self, pair: int) -> str:
        """Name of a pair's call."""
        call = self._calls[self._pairs[pair].reference]
        return call.module_name


def _faulty(result: Comparison, reach: _Reach) -> set[tuple[str, int]]:
    """(root, step) of calls in which something computes wrongly, or on other parameters: what
    their logits part by is no rounding.
    """
    faulty: set[tuple[str, int]] = set()
    proven = any(f.confidence in (Confidence.CERTAIN, Confidence.LIKELY) for f in result.findings)
    for verdict in result.verdicts if proven else ():
        if verdict.verdict in _WRONG and verdict.pair >= 0:
            root, steps = reach.of(verdict.pair)
            faulty.update((root, step) for step in steps)
    return faulty


def _led_to(token: Token, prompts: PairedPrompts, result: Comparison, reach: _Reach) -> str:
    """The finding that an unexplained token leads to: the first one in calls of its root up to the
    token's own.
    """
    root = prompts.reference[token.prompt - 1].call.root
    for finding in result.findings:
        name, steps = (
            reach.of(finding.pair) if finding.pair >= 0 else (finding.root, {finding.step})
        )
        if name == root and min(steps) <= token.step:
            return finding.name
    return ""


def _with_causes(
    generation: Generation, prompts: PairedPrompts, result: Comparison, reach: _Reach
) -> Iterator[Prompted]:
    """Prompts that fail, with the finding behind it; those that pass, with the modules in their
    calls that make an error of their own all the same.
    """
    touched: dict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    for verdict in result.verdicts:
        if verdict.verdict in _FAULTY and verdict.pair >= 0:
            root, steps = reach.of(verdict.pair)
            for step in steps:
                touched[root, step][f"{reach.name(verdict.pair)} ({verdict.verdict})"] = None
    for number, prompt in enumerate(generation.prompts):
        if not prompt.passes:
            led_to = ""
            if prompt.first >= 0:
                led_to = _led_to(generation.tokens[prompt.first], prompts, result, reach)
            yield msgspec.structs.replace(prompt, led_to=led_to)
            continue
        calls = [prompts.runs[0].calls[c] for c in prompts.pair(number)[0].calls]
        names = dict.fromkeys(name for c in calls for name in touched.get((c.root, c.step), ()))
        yield msgspec.structs.replace(prompt, no_effect=tuple(names))
