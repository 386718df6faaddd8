"""Reports what two runs generated, as text and CSV: a line per prompt, and the first token that
rounding does not explain.
"""

from __future__ import annotations

from whence.report.document import Document
from whence.report.tables import count, csv_text, listed
from whence.results import Comparison, Generation, Prompted, Token, TokenKind, VerdictKind

_MOST_PROMPTS = 16
UNSEEN_IN_LOGITS = "errors below 8 times their noise, nor which module makes one"
_WORDS = {
    "explained": "explained by rounding",
    "sampled": "sampled or searched: another token from the same logits",
    "unexplained": "not explained by rounding",
    "off": "its logits are off",
    "inherited": "inherited: no module is wrong",
}
_FIELDS = ("index", "step", "row", "target_step", "target_row", "reference", "target", "score")
_FIGURES = (
    *("cosine_similarity", "rel_l2", "kl", "top1", "top5", "rank"),
    *("margin", "gap", "logit_err", "rel_logit_err", "noise"),
)


def lines(comparison: Comparison) -> Document:
    """The fields of an answer on generated tokens."""
    result = comparison.generation
    if result is None:
        return
    if not result.of:
        yield "TOKENS", "none compared"
        return
    yield "TOKENS", _counts(result)
    if result.forced:
        yield "  forced", "the target was fed the reference's tokens"
    if result.logits_only:
        if result.compared and set(comparison.counts) != {VerdictKind.IDENTICAL}:
            yield "  how sure", f"logits alone; could not have seen {UNSEEN_IN_LOGITS}"
    elif result.suspect >= 0:
        is_inherited = result.tokens[result.suspect].verdict == TokenKind.INHERITED
        yield ("  inherited" if is_inherited else "  unexplained"), result.sentence
        yield "  behind it", result.led_to or _behind_no_finding(comparison)
    yield from _prompt_lines(result)
    names = dict.fromkeys(name for p in result.prompts if p.passes for name in p.no_effect)
    if names:
        numbers = [str(p.number) for p in result.prompts if p.no_effect]
        prompts = ", ".join(numbers[:8]) + (" ..." if len(numbers) > 8 else "")
        yield "  no effect", f"on the tokens of prompts {prompts}: {listed(list(names), 4)}"


def _counts(result: Generation) -> str:
    """Says how many prompts pass, over how many tokens, and how the changed ones were judged."""
    explained, unexplained, sampled = (sum(p.flips[k] for p in result.prompts) for k in range(3))
    kinds = {token.verdict for token in result.tokens}
    by_rounding = "explained by rounding" + " or inherited from it" * (TokenKind.INHERITED in kinds)
    changed = f"{explained} {by_rounding}, {unexplained} not explained"
    if result.noise is not None:
        noise = f"logits differ by {result.noise:.2g} of their standard deviation"
    elif kinds <= {TokenKind.IDENTICAL}:
        noise = "no logit differs"
    elif kinds <= {TokenKind.OFF}:
        noise = "all from logits that are off by more than rounding"
    else:
        noise = "logits that are not off are bitwise equal"
    passing = sum(p.passes for p in result.prompts)
    verb = "passes" if len(result.prompts) == 1 else "pass"
    return (
        f"{passing} of {count(len(result.prompts), 'prompt')} {verb}; {count(result.compared)} of "
        f"{count(result.of, 'token')} compared, {noise}; tokens that changed: {changed}"
        f"{f', {sampled} sampled' if sampled else ''}"
    )


def _behind_no_finding(comparison: Comparison) -> str:
    unknown = comparison.counts.get(VerdictKind.UNDETERMINED, 0)
    if unknown:
        verb = "was" if unknown == 1 else "were"
        return f"not known: {count(unknown, 'call')} {verb} not judged"
    return "no module: each computes right on the inputs that it had"


def _prompt_lines(result: Generation) -> Document:
    yield "  prompts", (_prompt(prompt, result) for prompt in _shown(result.prompts))
    if len(result.prompts) > _MOST_PROMPTS:
        yield "", f"{count(len(result.prompts) - _MOST_PROMPTS)} more in generation.csv"
    for side, n in (("reference", result.alone_reference), ("target", result.alone_target)):
        yield f"  only {side}", count(n, "prompt") if n else ""


def _state(prompt: Prompted) -> str:
    return "NO" if prompt.outcome == "not compared" else "PASS" if prompt.passes else "FAIL"


def _shown(prompts: tuple[Prompted, ...]) -> list[Prompted]:
    """The prompts in their order; of very many, those that do not pass first."""
    if len(prompts) <= _MOST_PROMPTS:
        return list(prompts)
    return sorted(prompts, key=lambda p: ("FAIL", "NO", "PASS").index(_state(p)))[:_MOST_PROMPTS]


def _prompt(prompt: Prompted, result: Generation) -> str:
    ids = " ".join(map(str, prompt.ids[:4])) + (
        f" ... ({len(prompt.ids)})" if len(prompt.ids) > 4 else ""
    )
    where = f"step {prompt.step} row {prompt.row}"
    if (prompt.target_step, prompt.target_row) != (prompt.step, prompt.row):
        where += f", target step {prompt.target_step} row {prompt.target_row}"
    head = f"{prompt.number:>2} {_state(prompt):<4} {prompt.compared}/{prompt.of}"
    # dumps without token ids have -1
    shown_ids = f"; ids {ids}" if min(prompt.ids, default=-1) >= 0 else ""
    return f"{head:<14} {_what(prompt, result)}   ({where}{shown_ids})"


def _what(prompt: Prompted, result: Generation) -> str:
    """Describes the result of a prompt: its first token that differs, and the position from which
    on its logits are off.
    """
    if prompt.first < 0 and prompt.off < 0:
        if prompt.outcome != "not compared":
            return "equal"
        return (
            f"the target ends after {prompt.target_tokens} tokens"
            if prompt.compared
            else "nothing to compare"
        )
    further = "further apart than rounding" if prompt.outcome == TokenKind.INHERITED else "off"
    off = (
        f"logits {further} from token {_place(result.tokens[prompt.off], prompt)}"
        if prompt.off >= 0
        else ""
    )
    if prompt.first < 0:
        return f"{off}, no effect on tokens"
    token = result.tokens[prompt.first]
    gap = f"gap {_figure(token, 'gap')}, noise {_figure(token, 'noise')}"
    text = (
        f"token {_place(token, prompt)}: {token.reference} against {token.target}, {gap}: "
        f"{_WORDS[token.verdict]}"
    )
    if prompt.led_to:
        text += f", behind {prompt.led_to}"
    return f"{text}; {off}" if off else text


def _place(token: Token, prompt: Prompted) -> str:
    return f"{token.index - len(prompt.ids)} (step {token.step} row {token.row})"


def _figure(token: Token, name: str) -> str:
    value = token.numbers.get(name)
    return "not known" if value is None else f"{value:.3g}"


def generation_csv(result: Comparison) -> str:
    """`generation.csv`: one line per compared token, in the order in which the reference generated
    them.
    """
    head = ("verdict", "prompt", "token", *_FIELDS, *_FIGURES, "why")
    generated = result.generation
    if generated is None:
        return csv_text([head])
    lengths = {prompt.number: len(prompt.ids) for prompt in generated.prompts}
    rows: list[tuple[object, ...]] = [head]
    for token in generated.tokens:
        figures = (token.numbers.get(name) for name in _FIGURES)
        cells = ("" if value is None else repr(value) for value in figures)
        place = (token.prompt, token.index - lengths[token.prompt])
        fields = (getattr(token, name) for name in _FIELDS)
        rows.append((token.verdict, *place, *fields, *cells, token.why))
    return csv_text(rows)
