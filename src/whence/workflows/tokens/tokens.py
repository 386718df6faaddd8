"""Compare what two runs generated: which prompts' outputs agree, from which token on they do not,
and whether that is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import UsageError
from whence.results import OutputMatch, PromptMatch, TokenComparison, TokenMatch
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.workflows.tokens.predictions import Predictions
    from whence.workflows.tokens.prompts import Row
    from whence.workflows.tokens.statistics import Thresholds

Source = AnyPath | Sequence[Mapping[str, Any]]
PROMPT_KEY = "src"
MATCHES = ("auto", "prompt", "position")


def first_difference(reference: str | Sequence[int], target: str | Sequence[int]) -> OutputMatch:
    """How far one output of a prompt is another's: `first_token` is the token, from 0, at which
    they part, None where they do not.

    Both are texts, or both lists of token ids; see `OutputMatch`. Raises UsageError for one of
    each.
    """
    from whence.workflows.tokens import statistics as tokens

    return tokens.match(reference, target)


def tokens(
    reference: Source | None = None,
    target: Source | None = None,
    *,
    before: tuple[Source, Source] | None = None,
    after: tuple[Source, Source] | None = None,
    full: float | None = None,
    half: float | None = None,
    thresholds: AnyPath | None = None,
    model: str = "",
    prompt_key: str = PROMPT_KEY,
    output_key: str = "output",
    match: str = "auto",
) -> TokenComparison:
    """Compare the outputs of two runs, prompt by prompt; of two commits, each with a reference,
    when given `before` and `after`.

    reference, target: files (JSON lines or one array) of objects with a prompt and an output, or
    lists of such; an output is text or a list of token ids. before, after: (reference, target) of
    each commit, instead of these two. full, half: shares of the prompts, 0 to 1, that must agree
    over the shorter output, and over its first half (0.75, 0.4). thresholds, model: a TOML or YAML
    file with shares per model (docs/generation.md), and the model's name there; else what the
    records call "model". prompt_key, output_key: other keys, "choices.0.text" for nested ones.
    match: how prompts are paired. "auto": by the prompt, and by position where a record has
    none; "prompt" or "position": that alone. Raises UnreadableRun, UsageError.
    """
    from whence.workflows.tokens import commits
    from whence.workflows.tokens import statistics as judge

    if match not in MATCHES:
        raise UsageError(f"match {match!r}: {', '.join(MATCHES[:-1])} or {MATCHES[-1]}")
    if (before is None) != (after is None):
        raise UsageError("before and after go together: each is a reference and a target")
    if before is not None and (reference is not None or target is not None):
        raise UsageError("give REF and TGT, or --before REF TGT --after REF TGT, not both")
    if before is None and (reference is None or target is None):
        raise UsageError("two files are compared: REF and TGT, or --before REF TGT --after REF TGT")

    keys = {"prompt_key": prompt_key, "output_key": output_key}
    limits = {"full": full, "half": half, "path": thresholds, "model": model}
    judge.thresholds(full, half, thresholds, model)  # a wrong one is told before anything is read
    if before is None or after is None:
        assert reference is not None
        assert target is not None
        now, _ = _compare((reference, target), ("<reference>", "<target>"), match, keys, limits)
        return commits.widened(now)
    old, old_rows = _compare(before, ("<reference before>", "<target before>"), match, keys, limits)
    new, new_rows = _compare(after, ("<reference after>", "<target after>"), match, keys, limits)
    return commits.two_commits(old, old_rows, new, new_rows)


def _compare(
    sources: tuple[Source, Source],
    words: tuple[str, str],
    how: str,
    keys: Mapping[str, str],
    limits: Mapping[str, Any],
) -> tuple[TokenMatch, list[Row]]:
    from whence.workflows.tokens import prompts
    from whence.workflows.tokens import statistics as judge
    from whence.workflows.tokens.predictions import Predictions, records

    checked = [s if isinstance(s, (str, os.PathLike)) else records(s) for s in sources]
    with (
        Predictions(checked[0], words[0], **keys) as reference,
        Predictions(checked[1], words[1], **keys) as target,
    ):
        rows = prompts.pair_prompts(reference.entries, target.entries, how)
        _check_key(keys["prompt_key"], (reference, target))
        model, notes = _model(limits, reference, target)
        allowed = judge.thresholds(limits["full"], limits["half"], limits["path"], model)
        repeats = prompts.again(reference, "reference"), prompts.again(target, "target")
        unsteady = {
            digest: f"the {disagreement.side} itself answers it in two ways"
            for _, disagreements in repeats
            for digest, disagreement in disagreements.items()
        }
        matches = prompts.named(
            prompts.row(i + 1, row, reference, target, unsteady) for i, row in enumerate(rows)
        )
        notes += _notes(sources, rows, how, reference, target)
        return _judged(matches, allowed, reference, target, repeats, notes), rows


def _judged(
    prompts: tuple[PromptMatch, ...],
    allowed: Thresholds,
    reference: Predictions,
    target: Predictions,
    repeats: Sequence[Any],
    notes: list[str],
) -> TokenMatch:
    from whence.workflows.tokens.statistics import wilson

    count, full, half = (
        len(prompts),
        sum(p.full is True for p in prompts),
        sum(p.half is True for p in prompts),
    )
    shares = (full / count, half / count) if count else (None, None)
    is_paired = any(p.matched_by and p.reference_length is not None for p in prompts)
    (repeated_reference, of_reference), (repeated_target, of_target) = repeats
    return TokenMatch(
        reference=reference.name,
        target=target.name,
        status="undecided" if not is_paired else "pass" if allowed.reached(*shares) else "fail",
        count=count,
        full_match=shares[0],
        half_match=shares[1],
        full_count=full,
        half_count=half,
        full_interval=wilson(full, count),
        half_interval=wilson(half, count),
        full_threshold=allowed.full,
        half_threshold=allowed.half,
        thresholds_from=allowed.origin,
        longer_reference=sum(p.longer == "reference" for p in prompts),
        longer_target=sum(p.longer == "target" for p in prompts),
        not_compared=sum(p.verdict == "NO" for p in prompts),
        prompts=prompts,
        repeated=repeated_reference + repeated_target,
        disagreements=(*of_reference.values(), *of_target.values()),
        unreadable=tuple(
            f"{side.name}: {side.noun} {e.line}: {e.why}"
            for side in (reference, target)
            for e in side.entries
            if e.why
        ),
        notes=tuple(notes),
    )


def _check_key(key: str, sides: Sequence[Predictions]) -> None:
    """Raise UsageError for an explicit key that no record has.

    Without an explicit key, prompts are matched by position.
    """
    for side in sides:
        if key != PROMPT_KEY and side.entries and all(e.prompt is None for e in side.entries):
            raise UsageError(
                f"{side.name}: no {side.noun} has a prompt under {key!r}; without --prompt-key, "
                "prompts are matched by position"
            )


def _model(
    limits: Mapping[str, Any], reference: Predictions, target: Predictions
) -> tuple[str, list[str]]:
    model, named = str(limits["model"]), [*dict.fromkeys((*reference.models, *target.models))]
    if model or not named or limits["path"] is None:
        return model, []
    if len(named) == 1:
        return named[0], []
    return "", [
        f"the records name {len(named)} models ({', '.join(named[:4])}); --model says whose "
        "thresholds hold"
    ]


def _notes(
    sources: Sequence[Source],
    rows: Sequence[Row],
    how: str,
    reference: Predictions,
    target: Predictions,
) -> list[str]:
    notes = []
    paths = [Path(s) for s in sources if isinstance(s, (str, os.PathLike))]
    if len(paths) == 2 and paths[0].samefile(paths[1]):
        notes.append("reference and target are one file")
    by_position = sum(r[2] == "position" for r in rows)
    different = sum(
        a is not None
        and b is not None
        and None not in (a.prompt, b.prompt)
        and a.prompt != b.prompt
        for a, b, _ in rows
    )
    if by_position and how == "auto":
        notes.append(
            f"{by_position} of {len(rows)} matched by position: they hold no "
            f"{reference.prompt_key!r}, or cannot be read"
        )
    if different:
        notes.append(f"{different} of {by_position} matched by position hold different prompts")
    if (
        how == "auto"
        and rows
        and not any(r[2] for r in rows)
        and reference.entries
        and target.entries
    ):
        notes.append(
            "no prompt of one file is in the other; --match position takes them line by line"
        )
    for side, only in (
        (reference, [a for a, b, _ in rows if b is None]),
        (target, [b for a, b, _ in rows if a is None]),
    ):
        if only:
            lines = ", ".join(str(e.line) for e in only[:8] if e) + (
                " ..." if len(only) > 8 else ""
            )
            notes.append(f"{len(only)} only in {side.name}: {side.noun} {lines}")
    extra = (
        len(reference.entries)
        + len(target.entries)
        - sum((a is not None) + (b is not None) for a, b, _ in rows)
    )
    if extra:
        notes.append(
            f"{extra} further occurrences of a prompt only check that a run repeats itself"
        )
    if not reference.entries and not target.entries:
        notes.append("both files are empty")
    return notes
