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


def faces(reference: Sequence[Entry], target: Sequence[Entry], how: str) -> list[Row]:
    """Which prompts are paired, in the reference's order, then what only the target has.

    By prompt, the n-th occurrence is paired with the n-th; further ones of a prompt that the other
    side has too only serve the check of one run against itself. What has no prompt, because it
    cannot be read or holds none, faces what is left at its position.
    """
    rows: list[Row] = []
    left, right = list(reference), list(target)
    if how != "position":
        ours, theirs = by_prompt(reference), by_prompt(target)
        faced = ours.keys() & theirs.keys()
        for key in ours:
            if key in faced:
                rows += [(a, b, "prompt") for a, b in zip(ours[key], theirs[key])]
        left = [e for e in reference if e.prompt not in faced]
        right = [e for e in target if e.prompt not in faced]
    at = {e.number: e for e in right}
    for entry in left:
        other = at.get(entry.number) if how != "prompt" else None
        if other is not None and (
            how == "position" or entry.prompt is None or other.prompt is None
        ):
            rows.append((entry, at.pop(entry.number), "position"))
        else:
            rows.append((entry, None, ""))
    rows += [(None, entry, "") for entry in at.values()]

    def place(row: Row) -> tuple[bool, int]:
        a, b, _ = row
        return (False, a.number) if a is not None else (True, b.number if b is not None else 0)

    return sorted(rows, key=place)


def by_prompt(entries: Iterable[Entry]) -> dict[bytes, list[Entry]]:
    """Records by the digest of their prompt, in order; without those that have none."""
    found: dict[bytes, list[Entry]] = {}
    for entry in entries:
        if entry.prompt is not None:
            found.setdefault(entry.prompt, []).append(entry)
    return found


def row(
    number: int,
    pair: Row,
    reference: Predictions,
    target: Predictions,
    unsteady: Mapping[bytes, str],
) -> PromptMatch:
    """One prompt: both outputs are read, compared and let go. unsteady: prompts that a run answers
    in two ways, and in which run.
    """
    from whence.workflows.tokens.statistics import match

    one, other, how = pair
    told = PromptMatch(
        number=number,
        prompt="",
        verdict="NO",
        matched_by=how,
        id=next((e.id for e in (one, other) if e and e.id), ""),
        reference_line=one.line if one else None,
        target_line=other.line if other else None,
    )
    whys, read = [], []
    for entry, side, word in ((one, reference, "reference"), (other, target, "target")):
        if entry is None:
            whys.append(f"the {word} has no such prompt")
        elif entry.why:
            whys.append(f"{word}, {side.noun} {entry.line}: {entry.why}")
        else:
            try:
                read.append(side.read(entry))
            except ValueError as error:  # it could be read a moment ago
                whys.append(f"{word}, {side.noun} {entry.line}, changed while it was read: {error}")
    told = replace(told, prompt=next((short(p.prompt) for p in read if p.prompt is not None), ""))
    if whys:
        return replace(told, why="; ".join(whys))
    a, b = read[0].output, read[1].output
    if isinstance(a, str) != isinstance(b, str):
        return replace(told, why=f"the reference is {_form(a)}, the target {_form(b)}")
    found = match(a, b)
    at = found.prefix_length or 0
    if not found.full:
        around = _AROUND[found.unit]
        before = _some(a, max(at - around, 0), at)
        told = replace(
            told,
            common=before,
            reference_at=_some(a, at, at + around),
            target_at=_some(b, at, at + around),
        )
        twice = unsteady.get(one.prompt or b"", "") if one else ""
        told = replace(told, why="; ".join(w for w in (_why(found, a, b), twice) if w))
    return replace(
        told,
        verdict=_verdict(found),
        **{f: getattr(found, f) for f in OutputMatch.__struct_fields__},
    )


def named(rows: Iterable[PromptMatch]) -> tuple[PromptMatch, ...]:
    """Rows with the ids of their file where these tell all prompts apart, else without any."""
    listed = tuple(rows)
    ids = [row.id for row in listed]
    apart = all(ids) and len(set(ids)) == len(ids)
    return listed if apart else tuple(replace(row, id="") for row in listed)


def _verdict(found: OutputMatch) -> str:
    if found.full:
        return "PASS"
    return "FAIL" if found.reference_length or found.target_length else "NO"


def _why(found: OutputMatch, a: Any, b: Any) -> str:
    if found.full is None:
        sides = [
            word
            for word, length in (
                ("reference", found.reference_length),
                ("target", found.target_length),
            )
            if not length
        ]
        return "both outputs are empty" if len(sides) == 2 else f"the {sides[0]}'s output is empty"
    if not found.full and isinstance(a, str):
        if len(a) + len(b) > _NORMALISED:
            return ""
        if normalize("NFC", a) == normalize("NFC", b):
            return "equal but for Unicode normalisation"
        if a.split() == b.split():
            return "equal but for blanks"
    return ""


def _some(output: Any, start: int, stop: int) -> str:
    """A piece of an output, as it is; tokens with blanks between them."""
    part = output[start:stop]
    return part if isinstance(part, str) else " ".join(map(str, part))


def _form(output: object) -> str:
    return "text" if isinstance(output, str) else "a list of tokens"


def short(prompt: str) -> str:
    """A prompt to be shown: at most 1,000 characters."""
    return prompt if len(prompt) <= _PROMPT else prompt[:_PROMPT] + "…"


def again(side: Predictions, word: str) -> tuple[int, dict[bytes, Disagreement]]:
    """(how many prompts the file holds more than once, those of them whose outputs are not all
    equal by their digests).
    """
    from whence.workflows.tokens.statistics import match

    found: dict[bytes, Disagreement] = {}
    repeated = 0
    for digest, entries in by_prompt(e for e in side.entries if not e.why).items():
        repeated += len(entries) > 1
        other = next((e for e in entries[1:] if e.output != entries[0].output), None)
        if other is None:
            continue
        a, b = side.read(entries[0]), side.read(other)
        # A text and a list of ids cannot be matched; that they are two forms is disagreement
        # enough.
        figures = (
            match(a.output, b.output)
            if isinstance(a.output, str) == isinstance(b.output, str)
            else OutputMatch()
        )
        found[digest] = Disagreement(
            word, short(a.prompt or ""), (entries[0].line, other.line), figures
        )
    return repeated, found
