"""The table of a benchmark of cases: each is run, judged and shown as a line."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
CLEAN, FAULT, HELD_OUT = "clean", "fault", "held out"


class Case(NamedTuple):
    """kind: `CLEAN`, `FAULT` or `HELD_OUT`. run: given a folder of its own, the fields of a row:
    its answer, status, headline or error, findings and their sentences.
    """

    kind: str
    title: str
    run: Callable[[Path], Row]


def main(doc: str, cases: Callable[[Path], Iterable[Case]], good: str = "same") -> None:
    """Run the cases that the command line chooses, and exit with 1 where one crashed or a clean
    one is not `good`. doc: of the program; cases: given a folder for what they share.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--clean", action="store_true", help="clean runs only")
    which.add_argument("--faults", action="store_true", help="planted faults only")
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("-v", "--verbose", action="store_true", help="every finding in words")
    chosen = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases(Path(scratch))):
            left_out = chosen.faults if case.kind == CLEAN else chosen.clean
            if left_out or not re.search(chosen.only, case.title):
                continue
            rows.append(judged(case, Path(scratch) / str(number)))
            print(line(rows[-1], (good, "named"), verbose=chosen.verbose), flush=True)
    for kind in (CLEAN, FAULT, HELD_OUT):
        counts = Counter(row["answer"] for row in rows if row["kind"] == kind)
        if counts:
            told = ", ".join(f"{answer} {count}" for answer, count in counts.most_common())
            print(f"{kind}: {counts.total()}: {told}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    bad = (r["answer"] == "crashed" or (r["kind"] == CLEAN and r["answer"] != good) for r in rows)
    sys.exit(any(bad))


def judged(case: Case, folder: Path) -> Row:
    """One line of the table."""
    began = time.perf_counter()
    row: Row = {"case": case.title, "kind": case.kind}
    try:
        row |= case.run(folder)
    except Exception as error:  # noqa: BLE001 - the other cases are of interest too
        row |= {"answer": "crashed", "error": f"{error!r}", "trace": traceback.format_exc()}
    row["seconds"] = time.perf_counter() - began
    return row


def line(row: Row, good: tuple[str, ...], *, verbose: bool) -> str:
    """A row in words, with what it says where its answer is none of the good ones."""
    words = f"{row['case']:<44} {row['answer']:<10} {row['seconds']:5.1f} s"
    found = row.get("findings", ())
    words += f"  {found[0]}" if found else ""
    words += f" and {len(found) - 1} more" if len(found) > 1 else ""
    if row["answer"] not in good or verbose:
        words += f"\n    {row.get('status')}: {row.get('headline') or row.get('error', '')}"
        pairs = zip(found, row.get("sentences", ()), strict=True)
        words += "".join(f"\n    {at}: {sentence[:300]}" for at, sentence in list(pairs)[:4])
    return words
