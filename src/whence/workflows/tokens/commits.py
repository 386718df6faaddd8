"""Compares the outputs of two commits, each with a reference: which prompts newly fail, which newly
pass, and whether that is chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from whence.results import PromptMatch, TokenComparison, TokenMatch
from whence.workflows.tokens import statistics as judge

if TYPE_CHECKING:
    from whence.workflows.tokens.prompts import Row


def widened(now: TokenMatch, **fields: Any) -> TokenComparison:
    """Convert a TokenMatch to a TokenComparison with these additional fields."""
    return TokenComparison(
        **{**{f: getattr(now, f) for f in TokenMatch.__struct_fields__}, **fields}
    )


def two_commits(
    old: TokenMatch, old_rows: Sequence[Row], new: TokenMatch, new_rows: Sequence[Row]
) -> TokenComparison:
    """The later commit, with the changes since the earlier one.

    Prompts are identified by text and occurrence, otherwise by position.
    """
    earlier = dict(zip(_names(old_rows), zip(old.prompts, old_rows)))
    table = {"both": 0, "only_before": 0, "only_after": 0, "neither": 0}
    prompts: list[PromptMatch] = []
    missing = moved = 0
    for name, row, prompt in zip(_names(new_rows), new_rows, new.prompts):
        if name not in earlier:
            missing += 1
            prompts.append(prompt)
            continue
        old_prompt, old_row = earlier.pop(name)
        moved += _reference_moved(old_row, row)
        column, change = _CHANGES[old_prompt.verdict == "PASS", prompt.verdict == "PASS"]
        table[column] += 1
        prompts.append(replace(prompt, before=old_prompt.verdict, change=change))
    failing, passing = (
        tuple(p.number for p in prompts if p.change == change)
        for change in ("newly failing", "newly passing")
    )
    p_value = judge.sign_test(len(failing), len(passing))
    notes = [*(f"before: {n}" for n in old.notes), *new.notes]
    if missing or earlier:
        notes.append(f"not in the table: {missing} prompts only after, {len(earlier)} only before")
    if moved:
        notes.append(
            f"the reference itself answers {moved} prompts differently than before: the two "
            "commits are compared with different outputs"
        )
    status = new.status
    if status == "pass" and (old.status == "undecided" or not sum(table.values())):
        status = "undecided"
    elif status == "pass" and p_value < judge.SIGNIFICANT and len(failing) > len(passing):
        status = "fail"
    return widened(
        new,
        prompts=tuple(prompts),
        before=old,
        table=table,
        newly_failing=failing,
        newly_passing=passing,
        p_value=p_value,
        notes=tuple(notes),
        status=status,
    )


_CHANGES = {
    (True, True): ("both", ""),
    (True, False): ("only_before", "newly failing"),
    (False, True): ("only_after", "newly passing"),
    (False, False): ("neither", ""),
}
"""(passed before, passes now) -> (column of the table, change)."""


def _names(rows: Sequence[Row]) -> Iterator[tuple[object, int]]:
    """The identity of a row within its commit: digest of its prompt and occurrence, else its
    position.
    """
    occurrences: dict[bytes, int] = {}
    for a, b, _ in rows:
        digest = next((e.prompt for e in (a, b) if e is not None and e.prompt is not None), None)
        if digest is None:
            yield "position", next(e.number for e in (a, b) if e is not None)
        else:
            occurrences[digest] = occurrences.get(digest, -1) + 1
            yield digest, occurrences[digest]


def _reference_moved(old: Row, new: Row) -> bool:
    digests = [row[0].output if row[0] is not None else None for row in (old, new)]
    return None not in digests and digests[0] != digests[1]
