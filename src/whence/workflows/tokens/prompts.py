"""Prompts of two files of outputs: which are paired, how far the outputs of a pair agree, and
whether a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from msgspec.structs import replace

from whence.results import Disagreement, OutputMatch, PromptMatch

if TYPE_CHECKING:
    from whence.workflows.tokens.predictions import Entry, Predictions

Row = tuple["Entry | None", "Entry | None", str]  # reference, target, "prompt" or "position" or ""
_PROMPT = 1000  # characters of a prompt that are kept
_AROUND = {"character": 16, "token": 6}  # units shown before a first difference, and from it on
_NORMALISED = 1 << 20  # characters that are looked at for how they differ


def pair_prompts(reference: Sequence[Entry], target: Sequence[Entry], how: str) -> list[Row]:
    """Pairs of prompts in the reference's order, then prompts that only the target has.

    The n-th occurrences of a prompt are paired. Surplus occurrences only serve to check whether a
    run agrees with itself. A record without a prompt, or one that cannot be read, is paired by its
    position.
    """
    rows: list[Row] = []
    unpaired_reference, unpaired_target = list(reference), list(target)
    if how != "position":
        reference_prompts, target_prompts = by_prompt(reference), by_prompt(target)
        shared = reference_prompts.keys() & target_prompts.keys()
        for key in reference_prompts:
            if key in shared:
                rows += [
                    (a, b, "prompt") for a, b in zip(reference_prompts[key], target_prompts[key])
                ]
        unpaired_reference = [e for e in reference if e.prompt not in shared]
        unpaired_target = [e for e in target if e.prompt not in shared]
    by_number = {e.number: e for e in unpaired_target}
    for entry in unpaired_reference:
        partner = by_number.get(entry.number) if how != "prompt" else None
        if partner is not None and (
            how == "position" or entry.prompt is None or partner.prompt is None
        ):
            rows.append((entry, by_number.pop(entry.number), "position"))
        else:
            rows.append((entry, None, ""))
    rows += [(None, entry, "") for entry in by_number.values()]

    def place(row: Row) -> tuple[bool, int]:
        a, b, _ = row
        return (False, a.number) if a is not None else (True, b.number if b is not None else 0)

    return sorted(rows, key=place)


def by_prompt(entries: Iterable[Entry]) -> dict[bytes, list[Entry]]:
    """Records by the digest of their prompt, in order; records without a prompt are left out."""
    by_digest: dict[bytes, list[Entry]] = {}
    for entry in entries:
        if entry.prompt is not None:
            by_digest.setdefault(entry.prompt, []).append(entry)
    return by_digest


def row(
    number: int,
    pair: Row,
    reference: Predictions,
    target: Predictions,
    unsteady: Mapping[bytes, str],
) -> PromptMatch:
    """Compare one prompt: both outputs are read, compared and released.

    unsteady: prompts that a run answers in two ways, and in which run.
    """
    a, b, how = pair
    result = PromptMatch(
        number=number,
        prompt="",
        verdict="NO",
        matched_by=how,
        id=next((e.id for e in (a, b) if e and e.id), ""),
        reference_line=a.line if a else None,
        target_line=b.line if b else None,
    )
    reasons, read = [], []
    for entry, side, word in ((a, reference, "reference"), (b, target, "target")):
        if entry is None:
            reasons.append(f"the {word} has no such prompt")
        elif entry.why:
            reasons.append(f"{word}, {side.noun} {entry.line}: {entry.why}")
        else:
            try:
                read.append(side.read(entry))
            except ValueError as error:  # it could be read a moment ago
                where = f"{word}, {side.noun} {entry.line}"
                reasons.append(f"{where}, changed while it was read: {error}")
    prompts = (short(p.prompt) for p in read if p.prompt is not None)
    result = replace(result, prompt=next(prompts, ""))
    if reasons:
        return replace(result, why="; ".join(reasons))
    twice = unsteady.get(a.prompt or b"", "") if a else ""
    return _compared(result, read[0].output, read[1].output, twice)


def _compared(result: PromptMatch, a: Any, b: Any, twice: str) -> PromptMatch:
    """The match with the agreement of two outputs.

    twice: the run that answers this prompt in two ways.
    """
    from whence.workflows.tokens.statistics import match

    if isinstance(a, str) != isinstance(b, str):
        return replace(result, why=f"the reference is {_form(a)}, the target {_form(b)}")
    outcome = match(a, b)
    if not outcome.full:
        position, around = outcome.prefix_length or 0, _AROUND[outcome.unit]
        result = replace(
            result,
            common=_some(a, max(position - around, 0), position),
            reference_at=_some(a, position, position + around),
            target_at=_some(b, position, position + around),
            why="; ".join(w for w in (_why(outcome, a, b), twice) if w),
        )
    return replace(
        result,
        verdict=_verdict(outcome),
        **{f: getattr(outcome, f) for f in OutputMatch.__struct_fields__},
    )


def named(rows: Iterable[PromptMatch]) -> tuple[PromptMatch, ...]:
    """The rows with the ids of their file when these are unique; otherwise the ids are removed."""
    listed = tuple(rows)
    ids = [row.id for row in listed]
    unique = all(ids) and len(set(ids)) == len(ids)
    return listed if unique else tuple(replace(row, id="") for row in listed)


def _verdict(outcome: OutputMatch) -> str:
    if outcome.full:
        return "PASS"
    return "FAIL" if outcome.reference_length or outcome.target_length else "NO"


def _why(outcome: OutputMatch, a: Any, b: Any) -> str:
    if outcome.full is None:
        sides = [
            word
            for word, length in (
                ("reference", outcome.reference_length),
                ("target", outcome.target_length),
            )
            if not length
        ]
        return "both outputs are empty" if len(sides) == 2 else f"the {sides[0]}'s output is empty"
    if not outcome.full and isinstance(a, str):
        if len(a) + len(b) > _NORMALISED:
            return ""
        if normalize("NFC", a) == normalize("NFC", b):
            return "equal but for Unicode normalisation"
        if a.split() == b.split():
            return "equal but for blanks"
    return ""


def _some(output: Any, start: int, stop: int) -> str:
    """A part of an output as text; tokens are separated by blanks."""
    part = output[start:stop]
    return part if isinstance(part, str) else " ".join(map(str, part))


def _form(output: object) -> str:
    return "text" if isinstance(output, str) else "a list of tokens"


def short(prompt: str) -> str:
    """A prompt shortened for display: at most 1,000 characters."""
    return prompt if len(prompt) <= _PROMPT else prompt[:_PROMPT] + "…"


def again(side: Predictions, word: str) -> tuple[int, dict[bytes, Disagreement]]:
    """(number of prompts that occur more than once, those whose outputs are not all equal by
    digest).
    """
    from whence.workflows.tokens.statistics import match

    disagreements: dict[bytes, Disagreement] = {}
    repeated = 0
    for digest, entries in by_prompt(e for e in side.entries if not e.why).items():
        repeated += len(entries) > 1
        differing = next((e for e in entries[1:] if e.output != entries[0].output), None)
        if differing is None:
            continue
        a, b = side.read(entries[0]), side.read(differing)
        # A text and a list of ids cannot be matched; their different forms are disagreement
        # enough.
        figures = (
            match(a.output, b.output)
            if isinstance(a.output, str) == isinstance(b.output, str)
            else OutputMatch()
        )
        disagreements[digest] = Disagreement(
            word, short(a.prompt or ""), (entries[0].line, differing.line), figures
        )
    return repeated, disagreements
