"""Compares the results of two commits, on a terminal and as JSON."""

from __future__ import annotations

import json
from typing import Any

from whence.report.answer import answer
from whence.report.document import Document, answering
from whence.report.summary import summary
from whence.report.tables import listed, spaced
from whence.report.tokens import tokens_json, tokens_text


def commits_text(result: Any, *, width: int | None = None) -> str:
    """The texts first, as the tests of both commits see them, then the finding, then the commit
    that made it. result: of `api.commits`.
    """
    parts = [_sides(result), answer(result.comparison, width=width)]
    if result.texts is not None:
        parts.insert(1, tokens_text(result.texts, width=width))
    return "\n".join(parts)


@answering
def _sides(result: Any) -> Document:
    if result.broken_by:
        yield "BROKEN BY", result.broken_by
        for skipped in result.skipped:
            yield "  or by", spaced(skipped, "cannot be judged")
    for name, side in (("first", result.first), ("second", result.second)):
        code = "" if side.exit_code == 0 else f"exit code {side.exit_code}"
        yield f"  {name}", spaced(side.commit or side.given, code, side.run)
    evidence = {f.name: f.sentence.partition("; ")[0] for f in result.comparison.findings}
    for finding, prompts in result.behind.items():
        numbers = listed(list(map(str, prompts)), 10)
        why = f" ({evidence[finding]})" if finding in evidence else ""
        yield "  changes", f"the answers to prompts {numbers}: {finding}{why}"
    for note in result.notes:
        yield f"note: {note}"


def commits_json(result: Any) -> str:
    """As `commits_text`; the comparison as summary.json has it."""
    sides = {name: getattr(result, name)._asdict() for name in ("first", "second")}
    texts = json.loads(tokens_json(result.texts)) if result.texts is not None else None
    whole = {
        "status": result.comparison.status,
        "broken_by": result.broken_by,
        "skipped": result.skipped,
        **sides,
        "texts": texts,
        "behind": result.behind,
        "notes": result.notes,
        "comparison": json.loads(summary(result.comparison)),
    }
    return json.dumps(whole, indent=1) + "\n"
