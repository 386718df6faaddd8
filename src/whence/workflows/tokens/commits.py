"""The outputs of two commits, each against a reference: which prompts fail newly, which pass newly,
and whether that is chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from whence.results import PromptMatch, TokenComparison, TokenMatch
from whence.workflows.tokens import statistics as judge

if TYPE_CHECKING:
    from whence.workflows.tokens.prompts import Row


def widened(now: TokenMatch, **more: Any) -> TokenComparison:
    """A TokenMatch as a TokenComparison, with these fields."""
    return TokenComparison(**{**{f: getattr(now, f) for f in TokenMatch.__struct_fields__}, **more})


def two_commits(
    old: TokenMatch, old_rows: Sequence[Row], new: TokenMatch, new_rows: Sequence[Row]
) -> TokenComparison:
    """The later commit, with what changed since the earlier one. A prompt is the same by its text
    and occurrence, else by position.
    """
    was = dict(zip(_names(old_rows), old.prompts))
    rows_before = dict(zip(_names(old_rows), old_rows))
    table = {"both": 0, "only_before": 0, "only_after": 0, "neither": 0}
    prompts: list[PromptMatch] = []
    failing: list[int] = []
    passing: list[int] = []
    missing = moved = 0
    for name, row, prompt in zip(_names(new_rows), new_rows, new.prompts):
        earlier = was.pop(name, None)
        if earlier is None:
            missing += 1
            prompts.append(prompt)
            continue
        moved += _reference_moved(rows_before[name], row)
        passed, passes = earlier.verdict == "PASS", prompt.verdict == "PASS"
        table[
            "both"
            if passed and passes
            else "only_before"
            if passed
            else "only_after"
            if passes
            else "neither"
        ] += 1
        change = (
            "newly failing"
            if passed and not passes
            else "newly passing"
            if passes and not passed
            else ""
        )
        if change:
            (failing if passed else passing).append(prompt.number)
        prompts.append(replace(prompt, before=earlier.verdict, change=change))
    p = judge.sign_test(len(failing), len(passing))
    worse = p < judge.SIGNIFICANT and len(failing) > len(passing)
    notes = [*(f"before: {n}" for n in old.notes), *new.notes]
    if missing or was:
        notes.append(f"not in the table: {missing} prompts only after, {len(was)} only before")
    if moved:
        notes.append(
            f"the reference itself answers {moved} prompts otherwise than before: the two "
            "commits are held against different outputs"
        )
    status = new.status
    if status == "pass" and (old.status == "undecided" or not sum(table.values())):
        status = "undecided"
    elif status == "pass" and worse:
        status = "fail"
    return widened(
        new,
        prompts=tuple(prompts),
        before=old,
        table=table,
        newly_failing=tuple(failing),
        newly_passing=tuple(passing),
        p_value=p,
        notes=tuple(notes),
        status=status,
    )


def _names(rows: Sequence[Row]) -> Iterator[tuple[object, int]]:
    """What tells a row from the others of its commit: the digest of its prompt and the occurrence,
    else its position.
    """
    seen: dict[bytes, int] = {}
    for a, b, _ in rows:
        digest = next((e.prompt for e in (a, b) if e is not None and e.prompt is not None), None)
        if digest is None:
            yield "position", next(e.number for e in (a, b) if e is not None)
        else:
            seen[digest] = seen.get(digest, -1) + 1
            yield digest, seen[digest]


def _reference_moved(old: Row, new: Row) -> bool:
    digests = [row[0].output if row[0] is not None else None for row in (old, new)]
    return None not in digests and digests[0] != digests[1]
