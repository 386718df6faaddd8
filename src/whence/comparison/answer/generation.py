"""What two runs generated, token by token: which token parts them first, and whether rounding
explains it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from whence import align
from whence._version import __version__
from whence.align import prompts as sequences
from whence.align.batches.prompts import Prompt
from whence.comparison.verdicts.status import decide
from whence.dtypes import unit_roundoff
from whence.errors import ElementsMissing
from whence.judge import token_flips as choice
from whence.judge.limits import U32
from whence.metrics.logits import LogitFigures, of_token
from whence.records import Call, Run
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

_TF32, _BFLOAT16 = 2.0**-11, 2.0**-8
_FAULTY = (
    VerdictKind.INTRODUCED,
    VerdictKind.PARAM_DIFF,
    VerdictKind.STRUCTURAL,
    VerdictKind.PRECISION,
)
_WRONG = (VerdictKind.INTRODUCED, VerdictKind.STRUCTURAL)
_BAD = (TokenKind.UNEXPLAINED, TokenKind.OFF)
_CLEAR = 1.5  # times what is allowed, from which on one token is more than a suspect
_SEVERAL = 3


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
    was captured.
    """
    given = {
        "--third": third,
        "--policy": options.policy,
        "--map": options.chart,
        "--model": options.model,
        "--view": options.views or None,
    }
    unused = [words for words, value in given.items() if value is not None]
    told = _Generated(reference, target)
    found = told.judged(
        [r for run in again for r in _Generated(reference, run).errors()], logits_only=True
    )
    findings = _findings(found, told)
    compared, of = found.compared, found.of
    measured = sum(t.verdict != TokenKind.INCOMPARABLE for t in found.tokens)
    coverage = Coverage(of, compared, measured, 0, 0, bool(compared) and measured == compared)
    notes = [
        n.text
        for run in (reference, target)
        for n in run.notes
        if n.kind in ("logits", "budget", "error")
    ]
    notes += [
        f"{side}: {text}"
        for side, run in (("reference", reference), ("target", target))
        for text in align.changed(run)
    ]
    notes += [f"tokens: {why}" for why in dict.fromkeys(told.whys)]
    notes += [f"{words} needs modules: it changes nothing between logits alone" for words in unused]
    status, why = decide(
        findings,
        (),
        coverage,
        inputs_differ=False,
        strict=options.strict,
        min_coverage=options.min_coverage,
    )
    if status == Status.UNDECIDED and not findings:
        why = _too_few(found, coverage, options.min_coverage)
        why = f"no token is compared: {told.whys[0]}" if told.whys and not compared else why
    differs = next(
        (t for t in found.tokens if t.verdict not in (TokenKind.IDENTICAL, TokenKind.NOISE)), None
    )
    versions = {"whence": __version__, "format": str(reference.info.format)}
    return Comparison(
        status=status,
        evidence=Evidence.TWO_DUMPS if compared else Evidence.NONE,
        reference=reference.path,
        target=target.path,
        findings=tuple(findings),
        first_difference=None if differs is None else told.first_difference(differs, found),
        counts=dict(Counter(t.verdict for t in found.tokens)),
        coverage=coverage,
        unmatched=found.alone_reference + found.alone_target,
        incomparable=compared - measured,
        inputs_differ=(),
        versions=versions,
        plan=Plan(()),
        rows=(),
        verdicts=(),
        headline=why,
        notes=tuple(notes),
        environment=tuple(align.differences(reference, target)),
        generation=found,
    )


def generated(
    reference: Run, target: Run, result: Comparison, calls: Sequence[Call]
) -> tuple[Generation | None, tuple[str, ...]]:
    """(what both runs of a comparison generated, tied to its findings, notes on what of it is not
    known).

    None where neither went on with tokens of its own. reference, target: as they were captured;
    calls: of the aligned reference, which the result speaks of.
    """
    told = _Generated(reference, target)
    notes = tuple(f"tokens are not compared: {why}" for why in dict.fromkeys(told.whys))
    if not any(len(p.calls) > 1 for p in (*told.left, *told.right)):
        return None, notes
    reach = _Reach(result, calls)
    found = told.judged((), logits_only=False, faulty=_faulty(result, reach))
    if not found.compared:
        return None, notes
    led_to = _behind(found.tokens[found.suspect], told, result, reach) if found.suspect >= 0 else ""
    return msgspec.structs.replace(
        found, led_to=led_to, prompts=tuple(_with_no_effect(found, told, result, reach))
    ), notes


@dataclass(frozen=True, slots=True)
class _At:
    """A place that is compared: number of the pair of prompts, index of the token before it, and
    the figures (None: why not).
    """

    pair: int
    index: int
    figures: LogitFigures | None
    same: bool
    why: str = ""


class _Generated:
    """The prompts of two runs face to face."""

    def __init__(self, reference: Run, target: Run) -> None:
        self.runs = reference, target
        self.whys: list[str] = []
        self.left = sequences.prompts(reference, whys=self.whys)
        self.right = sequences.prompts(target, [p.tokens for p in self.left], self.whys)
        self.left = sequences.prompts(reference, [p.tokens for p in self.right])
        self.pairs = sequences.together(self.left, self.right)
        self._eos = [
            {name: _several(found.get("eos")) for name, found in align.settings_of(run).items()}
            for run in self.runs
        ]

    def errors(self) -> list[float]:
        """Relative errors of the logits, wherever both runs had the same tokens before them."""
        places = (p for n in range(len(self.pairs)) for p in self._places(n)[0])
        return [p.figures.rel_logit_err for p in places if p.figures is not None]

    def judged(
        self, again: Sequence[float], *, logits_only: bool, faulty: Collection[tuple[str, int]] = ()
    ) -> Generation:
        """Every token judged. faulty: (root, step) of calls of the reference that a proven fault
        reaches.
        """
        places: list[_At] = []
        lengths: list[tuple[int, int]] = []
        for n in range(len(self.pairs)):
            found, length = self._places(n)
            places += found
            lengths.append(length)
        order = {id(p): self._moment(p) for p in places}
        places.sort(key=lambda p: order[id(p)])
        measured = [p for p in places if p.figures is not None]
        figures = [p.figures for p in measured if p.figures is not None]
        working = self._roundoff(measured, weights=False)
        wrong = [working if self._of(p) in faulty else 0.0 for p in measured] if faulty else ()
        said = {
            id(p): j
            for p, j in zip(
                measured,
                choice.judged(figures, self._roundoff(measured), again, wrong),
                strict=True,
            )
        }
        tokens = tuple(self._token(p, said.get(id(p))) for p in places)
        prompts = tuple(self._prompted(n, tokens, lengths[n]) for n in range(len(self.pairs)))
        noise = [
            t.numbers.get("rel_logit_err") or 0.0
            for t in tokens
            if t.verdict in (TokenKind.NOISE, TokenKind.EXPLAINED, TokenKind.SAMPLED)
        ]
        suspect = next((i for i, t in enumerate(tokens) if t.verdict in _BAD), -1)
        alone = sum(
            self._length(0, p)
            for n, p in enumerate(self.left)
            if n not in {m.reference for m in self.pairs}
        )
        sentence = _words(tokens[suspect], prompts[places[suspect].pair]) if suspect >= 0 else ""
        return Generation(
            logits_only,
            prompts,
            tokens,
            sum(p.compared for p in prompts),
            sum(p.of for p in prompts) + alone,
            median(noise) if noise else None,
            len(self.left) - len(self.pairs),
            len(self.right) - len(self.pairs),
            self._forced(),
            suspect,
            sentence,
        )

    def _forced(self) -> bool:
        return bool(self.runs[1].info.options.get("force_tokens"))

    def _of(self, place: _At) -> tuple[str, int]:
        call = self.runs[0].calls[
            self.left[self.pairs[place.pair].reference].scores[place.index].call
        ]
        return call.root, call.step

    def _moment(self, place: _At) -> tuple[int, int, int]:
        one = self.left[self.pairs[place.pair].reference]
        scored = one.scores[place.index]
        return self.runs[0].calls[scored.call].order, scored.row, place.index

    def _length(self, side: int, prompt: Prompt) -> int:
        """How many choices behind a prompt have logits, with the one after its last token."""
        return sum(prompt.prompt - 1 <= i < self._end(side, prompt) for i in prompt.scores)

    def _end(self, side: int, prompt: Prompt) -> int:
        """The token behind which nothing was chosen any more: the row was done, and only filled up
        beside others.
        """
        start, tokens = max(prompt.prompt, 1), prompt.tokens
        if len(tokens) == prompt.prompt:
            return len(tokens)
        filled = len(tokens) - 1
        while filled > start and tokens[filled - 1] == tokens[-1]:
            filled -= 1
        ends = self._eos[side].get(prompt.call.root, ())
        for at in range(start, len(tokens)):
            ended = at > start and tokens[at - 1] in ends
            if (ended or filled <= at < len(tokens) - 1) and self._best(
                side, prompt, at - 1
            ) not in (tokens[at], None):
                return at - 1
        return len(tokens) - (tokens[-1] in ends)

    def _best(self, side: int, prompt: Prompt, index: int) -> int | None:
        """The token that the logits behind a token choose, None where they were not kept."""
        try:
            return int(sequences.logits(self.runs[side], prompt.scores[index]).argmax())
        except (KeyError, ElementsMissing):
            return None

    def _places(self, n: int) -> tuple[list[_At], tuple[int, int]]:
        """What of a pair of prompts is compared, and how many tokens each run chose."""
        pair = self.pairs[n]
        one, other = self.left[pair.reference], self.right[pair.target]
        lengths = self._length(0, one), self._length(1, other)
        start, stop = max(min(one.prompt, other.prompt), 1), pair.shared
        if len(one.calls) > 1 and len(other.calls) > 1:
            stop = min(stop, self._end(0, one), self._end(1, other))
        out = []
        for i in range(start - 1, stop):
            if i not in one.scores or i not in other.scores:
                continue
            try:
                a, b = (
                    sequences.logits(self.runs[0], one.scores[i]),
                    sequences.logits(self.runs[1], other.scores[i]),
                )
            except ElementsMissing as error:
                out.append(_At(n, i, None, False, str(error)))
                continue
            out.append(_At(n, i, of_token(a, b), a.dtype == b.dtype and a.tobytes() == b.tobytes()))
        return out, lengths

    def _roundoff(self, places: Iterable[_At], *, weights: bool = True) -> float:
        """Unit roundoff of the coarser dtype that either model works in; 0 where a model is
        quantised, which rounds otherwise, and where its precision is not known.

        weights: False leaves quantised parameters out, where both runs have the same.
        """
        widths = [U32]
        assumed = {run.info.options.get("precision") for run in self.runs}
        if "unknown" in assumed:
            return 0.0
        if "16 bits" in assumed:
            widths.append(_BFLOAT16)
        for place in places:
            pair = self.pairs[place.pair]
            for run, prompt in zip(self.runs, (self.left[pair.reference], self.right[pair.target])):
                widths.append(unit_roundoff(run.records[prompt.scores[place.index].record].dtype))
        for run in self.runs:
            for settings in align.settings_of(run).values():
                kinds = settings.get("parameter_dtypes") or {}
                packed = [kind for kind in kinds if re.match(r"u?int\d|float[48]", str(kind))]
                if packed and weights:
                    return 0.0
                widths += [unit_roundoff(str(kind)) for kind in kinds if kind not in packed]
                if settings.get("matmul_precision", "highest") != "highest":
                    widths.append(_TF32)
        return max(widths)

    def _token(self, place: _At, said: choice.Judged | None) -> Token:
        pair = self.pairs[place.pair]
        one, other = self.left[pair.reference], self.right[pair.target]
        mine, theirs = one.scores[place.index], other.scores[place.index]
        steps = self.runs[0].calls[mine.call].step, self.runs[1].calls[theirs.call].step
        where = (pair.reference + 1, place.index + 1, steps[0], mine.row, steps[1], theirs.row)
        after = [
            p.tokens[place.index + 1] if place.index + 1 < len(p.tokens) else -1
            for p in (one, other)
        ]
        f = place.figures
        if f is None or said is None:
            return Token(*where, after[0], after[1], TokenKind.INCOMPARABLE, why=place.why)
        chosen = [a if a >= 0 else best for a, best in zip(after, (f.first, f.other))]
        if chosen[0] == chosen[1] and not f.agree:
            chosen = [f.first, f.other]  # fed alike, yet the models would go on otherwise
        elif chosen[0] != chosen[1] and self._forced() and f.agree:
            chosen = [f.first, f.other]
        verdict = TokenKind.IDENTICAL if place.same else TokenKind.NOISE
        if said.flip == TokenKind.EXPLAINED and said.off:
            verdict = TokenKind.OFF
        elif said.flip == TokenKind.EXPLAINED and chosen != [f.first, f.other]:
            verdict = TokenKind.SAMPLED
        elif said.flip:
            verdict = TokenKind(said.flip)
        elif said.off:
            verdict = TokenKind.OFF
        elif chosen[0] != chosen[1]:
            verdict = TokenKind.SAMPLED
        if f.nonfinite:
            verdict = TokenKind.UNEXPLAINED if not f.agree else TokenKind.OFF
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
            "noise": said.noise,
        }
        why = f"{f.nonfinite} logits are NaN or infinite in one run alone" if f.nonfinite else ""
        figures = {k: _finite(v) for k, v in numbers.items()}
        return Token(*where, chosen[0], chosen[1], verdict, round(said.score, 4), figures, why)

    def _prompted(self, n: int, tokens: Sequence[Token], lengths: tuple[int, int]) -> Prompted:
        pair = self.pairs[n]
        one, other = self.left[pair.reference], self.right[pair.target]
        mine = [i for i, t in enumerate(tokens) if t.prompt == pair.reference + 1]
        verdicts = Counter(tokens[i].verdict for i in mine)
        compared = len(mine) - verdicts[TokenKind.INCOMPARABLE]
        worst = next((v for v in ("unexplained", "off", "explained", "sampled") if verdicts[v]), "")
        outcome = worst or ("equal" if compared else "not compared")
        first = next((i for i in mine if tokens[i].reference != tokens[i].target), -1)
        off = next((i for i in mine if tokens[i].verdict == TokenKind.OFF), -1)
        if outcome == "equal" and self._ended(one, other, lengths):
            outcome = "not compared"
        root = one.call
        return Prompted(
            one.tokens[: min(one.prompt, other.prompt)],
            root.root,
            root.rank,
            root.step,
            one.row,
            other.call.step,
            other.row,
            *lengths,
            compared,
            max(lengths[0], compared),
            outcome,
            (
                verdicts[TokenKind.EXPLAINED],
                verdicts[TokenKind.UNEXPLAINED],
                verdicts[TokenKind.SAMPLED],
            ),
            first,
            off,
            number=pair.reference + 1,
        )

    @staticmethod
    def _ended(one: Prompt, other: Prompt, lengths: tuple[int, int]) -> bool:
        """Did the target stop long before the reference, though nothing differed?"""
        return len(one.calls) > 1 and len(other.calls) > 1 and lengths[1] < lengths[0]

    def first_difference(self, token: Token, found: Generation) -> dict[str, object]:
        prompt = found.prompt_of(token)
        call = self.left[token.prompt - 1].call
        return {
            "name": prompt.root,
            "op_type": call.op_type,
            "step": token.step,
            "rank": prompt.rank,
            "verdict": token.verdict,
        }


def _several(ids: object) -> tuple[int, ...]:
    return (
        (ids,)
        if isinstance(ids, int)
        else tuple(i for i in ids if isinstance(i, int))
        if isinstance(ids, list)
        else ()
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _words(token: Token, prompt: Prompted) -> str:
    """A token that is not explained, in a sentence."""
    place = (
        f"prompt {token.prompt}, token {token.index - len(prompt.ids)} (step {token.step}, "
        f"row {token.row}"
    )
    if (token.target_step, token.target_row) != (token.step, token.row):
        place += f"; target step {token.target_step}, row {token.target_row}"
    n = token.numbers
    if token.why:
        return f"{place}): {token.why}"
    choice = (
        f"{token.reference} in the reference, {token.target} in the target; "
        if token.reference != token.target
        else ""
    )
    if token.verdict == TokenKind.OFF:
        parts = (
            f"the logits part by {n.get('rel_logit_err') or 0:.2g} of their spread, "
            f"{token.score:.3g} times what rounding explains"
        )
        return f"{place}): {choice}{parts}"
    noise = n.get("noise")
    against = f"{noise:.3g}" if noise is not None else "not known"
    return (
        f"{place}): {choice}the reference puts {n.get('gap') or 0:.3g} between them, the "
        f"noise of a logit is {against}"
    )


def _findings(found: Generation, told: _Generated) -> list[Finding]:
    """At most one: the first token that rounding does not explain, with how many follow it."""
    if found.suspect < 0:
        return []
    token = found.tokens[found.suspect]
    prompt = found.prompt_of(token)
    bad = [t for t in found.tokens if t.verdict in _BAD]
    first = found.suspect == 0
    clear = [
        t
        for t in bad
        if t.score > (4.0 if first and t.verdict == TokenKind.OFF else _CLEAR) or t.why
    ]
    likely = bool(clear) or (len(bad) >= _SEVERAL and not first)
    flipped = any(t.reference != t.target for t in bad)
    said = found.sentence + f"; {len(bad)} of {found.compared} tokens are so"
    if not flipped:
        said += ", with no effect on tokens"
    hint = (
        "; capture both without --level logits, --steps "
        f":{max(token.step, token.target_step) + 1}, to see which module"
    )
    call = told.left[token.prompt - 1].call
    also = tuple(dict.fromkeys(f"prompt {t.prompt}" for t in bad if t.prompt != token.prompt))
    numbers = token.numbers | {"score": _finite(token.score)}
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
            said + hint,
            prompt.root,
            slot="output.logits",
            also=also,
            worst_index=(token.row,),
        )
    ]


def _too_few(found: Generation, coverage: Coverage, least: float) -> str:
    if not found.prompts:
        return (
            "no prompt of one run is in the other, or no logits were captured (no token ids, "
            "no module that makes logits)"
        )
    if not found.compared:
        return "no token of any prompt could be compared"
    if coverage.share < least:
        parted = sum(p.outcome in ("explained", "sampled") for p in found.prompts)
        why = (
            f"{parted} prompts part at a token that is no fault, and what follows answers "
            "another text"
            if parted
            else "the target ends early"
        )
        forced = (
            ""
            if found.forced
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
        return call.scope or call.root


def _faulty(result: Comparison, reach: _Reach) -> set[tuple[str, int]]:
    """(root, step) of calls in which something computes wrongly: what their logits part by is no
    rounding.
    """
    found: set[tuple[str, int]] = set()
    proven = any(finding.confidence == Confidence.CERTAIN for finding in result.findings)
    for verdict in result.verdicts if proven else ():
        if verdict.verdict in _WRONG and verdict.pair >= 0:
            root, steps = reach.of(verdict.pair)
            found.update((root, step) for step in steps)
    return found


def _behind(token: Token, told: _Generated, result: Comparison, reach: _Reach) -> str:
    """The finding that a token leads to: the first one in calls of its root up to the token's
    own.
    """
    root = told.left[token.prompt - 1].call.root
    for finding in result.findings:
        name, steps = (
            reach.of(finding.pair) if finding.pair >= 0 else (finding.root, {finding.step})
        )
        if name == root and min(steps) <= token.step:
            return finding.name
    return ""


def _with_no_effect(
    found: Generation, told: _Generated, result: Comparison, reach: _Reach
) -> Iterator[Prompted]:
    """Prompts that pass, with the modules in their calls that make an error of their own all the
    same.
    """
    touched: dict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    for verdict in result.verdicts:
        if verdict.verdict in _FAULTY and verdict.pair >= 0:
            root, steps = reach.of(verdict.pair)
            for step in steps:
                touched[root, step][f"{reach.name(verdict.pair)} ({verdict.verdict})"] = None
    for prompt, pair in zip(found.prompts, told.pairs):
        if not prompt.passes:
            yield prompt
            continue
        one = told.left[pair.reference]
        calls = [told.runs[0].calls[c] for c in one.calls]
        names = dict.fromkeys(name for c in calls for name in touched.get((c.root, c.step), ()))
        yield msgspec.structs.replace(prompt, no_effect=tuple(names))
