"""A verdict for every token that both runs chose, and for every prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from whence.align.batches.prompts import Prompt
from whence.comparison.answer.paired_prompts import PairedPrompts, TokenPlace
from whence.judge import token_flips
from whence.metrics.logits import LogitFigures
from whence.results import Generation, Prompted, Token, TokenKind

BAD = (TokenKind.UNEXPLAINED, TokenKind.OFF)


def judged(
    prompts: PairedPrompts,
    noise: Sequence[float],
    *,
    logits_only: bool,
    faulty: Collection[tuple[str, int]] = (),
) -> Generation:
    """Every token judged. noise: relative errors between runs of the reference. faulty: (root,
    step) of calls of the reference that a proven fault reaches.
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
    """By id of the place, what rounding explains there."""
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
    # Fed alike, yet the models would go on otherwise; or the other way round.
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
    """The verdict of a token. chosen: by either run."""
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
    """Did the target stop long before the reference, though nothing differed?"""
    return len(reference.calls) > 1 and len(target.calls) > 1 and lengths[1] < lengths[0]


def finite(value: float | None) -> float | None:
    """JSON has no infinity: None."""
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
