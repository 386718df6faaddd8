"""Compares generated tokens, and tells whether rounding explains the first that differs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from whence import align
from whence._version import __version__
from whence.align.batches.prompts import Prompt
from whence.comparison.answer.effect import of_tokens
from whence.comparison.answer.paired_prompts import PairedPrompts, TokenPlace
from whence.comparison.verdicts.status import Gaps, decide, failed_alone
from whence.dtypes import Array
from whence.judge import token_flips
from whence.metrics.logits import LogitFigures
from whence.records import Call, Over, Run
from whence.records.experts import has_experts
from whence.records.logits import maker_of
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
    """Whether one of the runs was captured at the level of logits, so that no modules can be
    compared.
    """
    return any(run.info.options.get("level") == "logits" for run in runs)


def compare_logits(
    reference: Run,
    target: Run,
    options: CompareOptions,
    again: Sequence[Run] = (),
    third: Run | None = None,
) -> Comparison:
    """Compare two runs by their logits alone. again: further runs of the reference, whose
    differences count as noise. third: a third run; a note says that it is not used.

    The status is that of `decide`. A finding names root, step and token, since no module was
    captured. If one side holds the output of the model's last module and the other the model's own
    output (scaled or capped), the former is converted first, and the answer is never `same`.
    """
    relation = between(reference, target)
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
    """The comparison of two runs whose logits are the same tensor of the model."""
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
    gaps = Gaps(one_sided=failed_alone(reference.info, target.info))
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
    if status == Status.UNDECIDED and not findings and why != gaps.one_sided:
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
    """(generated tokens of both runs, linked to the findings of a comparison; notes).

    The former is None if neither run generated tokens or none can be compared. reference, target:
    the runs as captured; calls: those of the aligned reference, to which `result` refers.
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


def going_on(generation: Generation | None) -> str:
    """Which prompt's equal tokens the target continues where a loop of the reference ended, in a
    sentence; "" without one.
    """
    for prompt in generation.prompts if generation is not None else ():
        if prompt.first < 0 and 1 < prompt.tokens < prompt.target_tokens:
            return (
                f"behind prompt {prompt.number} the target generates {prompt.target_tokens} tokens "
                f"and the reference {prompt.tokens}: what follows these was not compared"
            )
    return ""


def _inherited(generation: Generation) -> Generation:
    """The generation with unexplained tokens as inherited, for runs in which every module is right
    on its inputs: a choice inside the model, such as among experts, turned out differently.
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
    """At most one finding: the first token that rounding does not explain, with the number of all
    such tokens. routes: whether the model routes tokens to experts.
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
            f"{parted} prompts diverge at a token that is not a fault, and later tokens continue "
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
    """Maps calls of the aligned reference to steps of the reference as captured."""

    def __init__(self, result: Comparison, calls: Sequence[Call]) -> None:
        self._pairs, self._calls = result.plan.pairs, calls
        self._joined = {
            (j.root, j.step, j.micro): {p[0] for p in j.pieces}
            for j in result.plan.joined
            if j.side == "reference"
        }

    def of(self, pair: int) -> tuple[str, set[int]]:
        """(root, steps of the captured reference) of a pair's call."""
        call = self._calls[self._pairs[pair].reference]
        return call.root, self._joined.get((call.root, call.step, call.micro), {call.step})

    def name(self, pair: int) -> str:
        """Name of a pair's call."""
        call = self._calls[self._pairs[pair].reference]
        return call.module_name


def _faulty(result: Comparison, reach: _Reach) -> set[tuple[str, int]]:
    """(root, step) of calls that contain a proven fault or a differing parameter. The error of
    their logits is not rounding.
    """
    faulty: set[tuple[str, int]] = set()
    proven = any(f.confidence in (Confidence.CERTAIN, Confidence.LIKELY) for f in result.findings)
    for verdict in result.verdicts if proven else ():
        if verdict.verdict in _WRONG and verdict.pair >= 0:
            root, steps = reach.of(verdict.pair)
            faulty.update((root, step) for step in steps)
    return faulty


def _led_to(token: Token, prompts: PairedPrompts, result: Comparison, reach: _Reach) -> str:
    """The name of the finding behind an unexplained token: the first one in its root, up to the
    step of the token; "" if there is none.
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
    """All prompts: failing ones with the finding behind the failure, passing ones with the faulty
    modules in their calls that have no effect on the tokens.
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


# Detects that one run recorded logits before, the other after, a scale or cap.
#
# Cohere and Granite multiply the output of their head by a number, Gemma 2 caps it with a tanh. If
# such a relation holds between the two sides, it is applied to one of them and the rest is
# compared. Whether the relation itself is right is then not known.

Floats = npt.NDArray[np.float64]

# largest residual at most tokens, relative to the norm of the logits, if the relation is right
_ALIKE = 0.05
_LEAST_GAIN = 4.0  # least factor by which a relation must reduce the residual
_HALVINGS = 60


class Relation(NamedTuple):
    """How a model's logits follow from the output x of its module `maker`: factor * x, or
    cap * tanh(x / cap) if cap is not 0. tokens: number of tokens that show it. left_over: median
    residual over tokens, relative to the norm.
    """

    maker: str
    inside: str  # side that holds what the module returned
    tokens: int
    left_over: float
    factor: float = 1.0
    cap: float = 0.0

    def brought(self, run: Run) -> Run:
        """The run with logits converted from the module's output to the model's; a run that holds
        the model's own output stays as it is.
        """
        return _Related(run, self) if maker_of(run) else run

    def applied(self, array: Floats) -> Floats:
        """The model's logits for these outputs of the module."""
        return self.cap * np.tanh(array / self.cap) if self.cap else self.factor * array

    def told(self, result: Comparison) -> Comparison:
        """The comparison of converted logits, with the relation as a note. `same` becomes
        `undecided` unless the relation is the identity.
        """
        outside = "target" if self.inside == "reference" else "reference"
        sides = (
            f"the {self.inside}'s logits are what {self.maker} returned, the {outside}'s what the "
            "model returned"
        )
        if self.is_identity:
            text = f"{sides}; no factor and no cap lies between"
            notes = (text,) if result.status != Status.SAME else ()
            return msgspec.structs.replace(result, notes=(*result.notes, *notes))
        between = (
            f"{self.cap:.4g} * tanh(logits / {self.cap:.4g})"
            if self.cap
            else f"a factor of {self.factor:.6g}"
        )
        text = f"not the same tensor: {sides}; {between} lies between, at {self.tokens} tokens"
        if result.status == Status.DIFFERENT:
            return msgspec.structs.replace(result, notes=(*result.notes, text))
        advice = (
            "alike but for that, and whether it is right is not known: capture the same tensor on "
            "both sides (--logits-module on both, or on neither)"
        )
        return msgspec.structs.replace(
            result, status=Status.UNDECIDED, headline=f"{text}; {advice}"
        )

    @property
    def is_identity(self) -> bool:
        """Whether no factor and no cap was found, so that the model returns its module's output."""
        return self.factor == 1.0 and not self.cap


class _Related(Over):
    """A run whose logits are converted from the module's output to the model's."""

    def __init__(self, base: Run, relation: Relation) -> None:
        super().__init__(base)
        self._relation = relation
        self._logits = {
            ref.record for call in base.calls for ref in call.refs if ref.slot == "output.logits"
        }

    def array(self, record: int) -> Array:
        array = self.base.array(record)
        if record not in self._logits:
            return array
        return self._relation.applied(array.astype(np.float64)).astype(array.dtype)


def between(reference: Run, target: Run) -> Relation | None:
    """The relation between the logits of a side that holds the output of a module and of a side
    that holds the model's own output; the identity if none is found. None if both sides hold the
    same kind.
    """
    makers = maker_of(reference), maker_of(target)
    if bool(makers[0]) == bool(makers[1]):
        return None
    inside = 0 if makers[0] else 1
    rows = [
        (pair[inside], pair[1 - inside]) for pair in PairedPrompts(reference, target).logit_rows()
    ]
    identity = Relation(makers[inside], ("reference", "target")[inside], len(rows), 0.0)
    if not rows:
        return identity
    related = [
        relation._replace(left_over=_left_over(rows, relation.applied))
        for relation in (
            identity._replace(factor=_factor(rows)),
            identity._replace(cap=_cap(rows)),
        )
    ]
    best = min(related, key=lambda relation: relation.left_over)
    least = _left_over(rows, identity.applied) / _LEAST_GAIN
    return best if best.left_over < min(_ALIKE, least) else identity


def _left_over(rows: Sequence[tuple[Floats, Floats]], applied: Callable[[Floats], Floats]) -> float:
    """The median residual of a relation over tokens, relative to the norm."""
    return median(
        float(np.linalg.norm(returned - applied(made)) / (np.linalg.norm(returned) or 1.0))
        for made, returned in rows
    )


def _factor(rows: Sequence[tuple[Floats, Floats]]) -> float:
    """The median over tokens of the least squares factor from module to model."""
    return median(float(made @ returned / ((made @ made) or np.inf)) for made, returned in rows)


def _cap(rows: Sequence[tuple[Floats, Floats]]) -> float:
    """The median over tokens of the cap that reduces the norm of the module's output to that of the
    model's; 0.0 if the model's is not smaller.
    """
    return median(_cap_of(made, returned) for made, returned in rows)


def _cap_of(made: Floats, returned: Floats) -> float:
    norm, largest = float(np.linalg.norm(returned)), float(np.abs(made).max(initial=0.0))
    if not largest or not 0.0 < norm < float(np.linalg.norm(made)):
        return 0.0
    low, high = float(np.abs(returned).max()) / 2, largest * 1e4
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if np.linalg.norm(middle * np.tanh(made / middle)) < norm:
            low = middle
        else:
            high = middle
    return high


# A verdict for every token that both runs chose, and for every prompt.

BAD = (TokenKind.UNEXPLAINED, TokenKind.OFF)


def judged(
    prompts: PairedPrompts,
    noise: Sequence[float],
    *,
    logits_only: bool,
    faulty: Collection[tuple[str, int]] = (),
) -> Generation:
    """The generation with every token judged. noise: relative errors of logits between runs of the
    reference. faulty: (root, step) of calls of the reference that contain a proven fault.
    """
    places: list[TokenPlace] = []
    lengths: list[tuple[int, int]] = []
    for number in range(len(prompts.pairs)):
        compared, counts = prompts.places(number)
        places += compared
        lengths.append(counts)
    places.sort(key=prompts.moment)
    judgements = _judgements(prompts, places, noise, faulty)
    tokens = tuple(_token(prompts, p, judgements.get(id(p))) for p in places)
    outcomes = tuple(_prompted(prompts, n, tokens, counts) for n, counts in enumerate(lengths))
    unflagged = [
        t.numbers.get("rel_logit_err") or 0.0
        for t in tokens
        if t.verdict in (TokenKind.NOISE, TokenKind.EXPLAINED, TokenKind.SAMPLED)
    ]
    suspect = next((i for i, t in enumerate(tokens) if t.verdict in BAD), -1)
    return Generation(
        logits_only,
        outcomes,
        tokens,
        sum(p.compared for p in outcomes),
        sum(p.of for p in outcomes) + prompts.unpaired_length(),
        median(unflagged) if unflagged else None,
        len(prompts.reference) - len(prompts.pairs),
        len(prompts.target) - len(prompts.pairs),
        prompts.is_forced,
        suspect,
        _words(tokens[suspect], outcomes[places[suspect].pair]) if suspect >= 0 else "",
    )


def _judgements(
    prompts: PairedPrompts,
    places: Sequence[TokenPlace],
    noise: Sequence[float],
    faulty: Collection[tuple[str, int]],
) -> Mapping[int, token_flips.Judged]:
    """By `id()` of the place, the judgement of each token with logits."""
    measured = [(p, p.figures) for p in places if p.figures is not None]
    working = prompts.roundoff((p for p, _ in measured), weights=False)
    wrong = [
        working if any((call.root, call.step) in faulty for call in prompts.behind(p)) else 0.0
        for p, _ in (measured if faulty else ())
    ]
    roundoff = prompts.roundoff(p for p, _ in measured)
    judgements = token_flips.judged([f for _, f in measured], roundoff, noise, wrong)
    return {id(p): j for (p, _), j in zip(measured, judgements, strict=True)}


def _token(
    prompts: PairedPrompts, place: TokenPlace, judgement: token_flips.Judged | None
) -> Token:
    pair = prompts.pair(place.pair)
    scores = [prompt.scores[place.index] for prompt in pair]
    steps = [run.calls[s.call].step for run, s in zip(prompts.runs, scores, strict=True)]
    where = (
        prompts.pairs[place.pair].reference + 1,
        place.index + 1,
        steps[0],
        scores[0].row,
        steps[1],
        scores[1].row,
    )
    following = [p.tokens[place.index + 1] if place.index + 1 < len(p.tokens) else -1 for p in pair]
    f = place.figures
    if f is None or judgement is None:
        return Token(*where, following[0], following[1], TokenKind.INCOMPARABLE, why=place.why)
    best = [f.first, f.other]
    chosen = [a if a >= 0 else b for a, b in zip(following, best, strict=True)]
    is_same = chosen[0] == chosen[1]
    # The runs go on with one token though their logits favour two, or the other way round.
    if (is_same and not f.agree) or (not is_same and prompts.is_forced and f.agree):
        chosen = best
    why = f"{f.nonfinite} logits are NaN or infinite in one run alone" if f.nonfinite else ""
    numbers = {
        "cosine_similarity": f.cosine_similarity,
        "rel_l2": f.rel_l2,
        "kl": f.kl,
        "top1": float(f.agree),
        "top5": f.top5,
        "rank": float(f.rank),
        "margin": f.margin,
        "gap": f.gap,
        "logit_err": f.logit_err,
        "rel_logit_err": f.rel_logit_err,
        "noise": judgement.noise,
    }
    figures = {name: finite(value) for name, value in numbers.items()}
    verdict = _kind(place, f, judgement, chosen)
    score = round(judgement.score, 4)
    return Token(*where, chosen[0], chosen[1], verdict, score, figures, why)


def _kind(
    place: TokenPlace, f: LogitFigures, judgement: token_flips.Judged, chosen: Sequence[int]
) -> TokenKind:
    """The verdict of a token. chosen: the tokens of the reference and of the target."""
    if f.nonfinite:
        return TokenKind.OFF if f.agree else TokenKind.UNEXPLAINED
    if judgement.flip and judgement.flip != TokenKind.EXPLAINED:
        return TokenKind(judgement.flip)
    if judgement.off:
        return TokenKind.OFF
    if judgement.flip:
        is_best = list(chosen) == [f.first, f.other]
        return TokenKind.EXPLAINED if is_best else TokenKind.SAMPLED
    if chosen[0] != chosen[1]:
        return TokenKind.SAMPLED
    return TokenKind.IDENTICAL if place.is_equal else TokenKind.NOISE


def _prompted(
    prompts: PairedPrompts, number: int, tokens: Sequence[Token], lengths: tuple[int, int]
) -> Prompted:
    reference, target = prompts.pair(number)
    name = prompts.pairs[number].reference + 1
    indices = [i for i, t in enumerate(tokens) if t.prompt == name]
    verdicts = Counter(tokens[i].verdict for i in indices)
    compared = len(indices) - verdicts[TokenKind.INCOMPARABLE]
    chosen_off = sum(
        tokens[i].verdict == TokenKind.OFF and tokens[i].reference != tokens[i].target
        for i in indices
    )
    worst = next((v for v in ("unexplained", "off", "explained", "sampled") if verdicts[v]), "")
    outcome = worst or ("equal" if compared else "not compared")
    if outcome == "equal" and _has_ended(reference, target, lengths):
        outcome = "not compared"
    root = reference.call
    return Prompted(
        reference.tokens[: min(reference.prompt, target.prompt)],
        root.root,
        root.rank,
        root.step,
        reference.row,
        target.call.step,
        target.row,
        *lengths,
        compared,
        max(lengths[0], compared),
        outcome,
        (
            verdicts[TokenKind.EXPLAINED],
            verdicts[TokenKind.UNEXPLAINED] + chosen_off,
            verdicts[TokenKind.SAMPLED],
        ),
        next((i for i in indices if tokens[i].reference != tokens[i].target), -1),
        next((i for i in indices if tokens[i].verdict == TokenKind.OFF), -1),
        number=name,
    )


def _has_ended(reference: Prompt, target: Prompt, lengths: tuple[int, int]) -> bool:
    """Whether the target generated fewer tokens than the reference."""
    return len(reference.calls) > 1 and len(target.calls) > 1 and lengths[1] < lengths[0]


def finite(value: float | None) -> float | None:
    """The value, or None in place of infinity and NaN, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def _words(token: Token, prompt: Prompted) -> str:
    """A sentence about an unexplained token."""
    place = (
        f"prompt {token.prompt}, token {token.index - len(prompt.ids)} (step {token.step}, "
        f"row {token.row}"
    )
    if (token.target_step, token.target_row) != (token.step, token.row):
        place += f"; target step {token.target_step}, row {token.target_row}"
    n = token.numbers
    if token.why:
        return f"{place}): {token.why}"
    choices = (
        f"{token.reference} in the reference, {token.target} in the target; "
        if token.reference != token.target
        else ""
    )
    if token.verdict == TokenKind.OFF:
        parts = (
            f"the logits part by {n.get('rel_logit_err') or 0:.2g} of their spread, "
            f"{token.score:.3g} times what rounding explains"
        )
        return f"{place}): {choices}{parts}"
    noise = n.get("noise")
    against = f"{noise:.3g}" if noise is not None else "not known"
    return (
        f"{place}): {choices}the reference puts {n.get('gap') or 0:.3g} between them, the "
        f"noise of a logit is {against}"
    )
