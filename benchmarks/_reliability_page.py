"""The tables of docs/dev/reliability.md, from docs/dev/reliability.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs" / "dev"
ANSWERS = DOCS / "reliability.json"
PAGE = DOCS / "reliability.md"
SUMS = ("cases", "struck", "acknowledged", "acknowledged_lost", "unflushed_lost", "wrong")


def answers() -> dict[str, list[dict[str, Any]]]:
    """The rows of the last runs, by "faults" and "inputs"."""
    return json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}


def tables(rows: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The text of each table, by the name of its place in the page."""
    faults = rows.get("faults", [])
    return {
        "faults": _summed(faults, "fault"),
        "programs": _summed(faults, "program"),
        "inputs": _inputs(rows.get("inputs", [])),
    }


def _summed(rows: list[dict[str, Any]], by: str) -> str:
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (row[by], "all"):
            sums.setdefault(name, Counter()).update({k: row[k] for k in SUMS})
    titles = "cases | met | acknowledged | of these lost | unflushed lost | wrong"
    lines = [f"| {by} | {titles} |", "|---|---|---|---|---|---|---|"]
    ordered = sorted(sums, key=lambda n: (n == "all", n))
    lines += [f"| {n} | " + " | ".join(str(sums[n][k]) for k in SUMS) + " |" for n in ordered]
    return "\n".join(lines)


def _inputs(rows: list[dict[str, Any]]) -> str:
    lines = ["| what is read | inputs | failures |", "|---|---|---|"]
    lines += [f"| {r['target']} | {r['inputs']} | {r['failures']} |" for r in rows]
    total = sum(r["inputs"] for r in rows), sum(r["failures"] for r in rows)
    return "\n".join([*lines, f"| all | {total[0]} | {total[1]} |"])


def write(**new: list[dict[str, Any]]) -> None:
    """Keep new rows, and write the page's tables anew."""
    rows = answers() | new
    ANSWERS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def filled(text: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    """The page with these tables in it."""
    for name, table in tables(rows).items():
        head, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->")
        text = f"{head}{start}{table}\n{end}{tail}"
    return text
