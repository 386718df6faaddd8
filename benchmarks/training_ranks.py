"""Is whence silent about a training spread over ranks, and does it name what ranks do wrong?

    python benchmarks/training_ranks.py [--clean | --faults] [--only REGEX] [--json FILE] [-v]

A small decoder trains three steps, on one rank and over ranks of gloo on the CPU: data parallel
(DDP, FSDP2, by hand), tensor and sequence parallel (DTensors, by hand), expert parallel, pipeline,
and data by tensor parallel. A clean run on 2 and 4 ranks against one rank must be `same`, and its
parameters after the training must be bitwise those without a capture. A planted fault must be the
first finding, at its place and with its cause: "named"; "placed" is at its place without the
cause, "wrong" elsewhere, "missed" where the answer is `same`. Faults marked * were planted after
the rules were written.

Exit code 1 where a clean run is not `same`, is changed by its capture, or something crashes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _training_ranks import layouts
from _training_ranks.faults import Fault, faults
from _training_ranks.launch import captured, parameters
from _training_ranks.layouts import LAYOUTS, Training

import whence

Make = Callable[[], Training]


class References:
    """Runs of one rank, each captured once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, make: Make) -> Path:
        """The run of this training."""
        path = self._folder / make.__name__
        return path if path.exists() else captured(make, path, 1)


def clean(name: str, ranks: int, references: References, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    make = LAYOUTS[name]
    bare, seen = parameters(make, ranks, None), parameters(make, ranks, folder)
    result = whence.compare(references.of(getattr(make, "reference", layouts.one)), folder)
    answer = str(result.status) if bare == seen else "changed by the capture"
    return {"answer": answer, **_told(result)}


def planted(fault: Fault, references: References, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    captured(fault.make, folder, fault.ranks)
    result = whence.compare(references.of(fault.reference), folder)
    return {"answer": fault.answer(result), **_told(result)}


def _told(result: Any) -> dict[str, Any]:
    return {
        "status": str(result.status),
        "headline": result.headline,
        "findings": [f"{f.name} ({f.phase or 'forward'}, step {f.step})" for f in result.findings],
        "sentences": [f.sentence for f in result.findings],
    }


def _line(row: dict[str, Any], *, verbose: bool) -> str:
    words = f"{row['case']:<44} {row['answer']:<10} {row['seconds']:5.1f} s"
    found = row.get("findings", ())
    words += f"  {found[0]}" if found else ""
    words += f" and {len(found) - 1} more" if len(found) > 1 else ""
    if row["answer"] not in ("same", "named") or verbose:
        words += f"\n    {row.get('status')}: {row.get('headline') or row.get('error', '')}"
        pairs = zip(found, row.get("sentences", ()), strict=True)
        words += "".join(f"\n    {at}: {sentence[:300]}" for at, sentence in list(pairs)[:4])
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--clean", action="store_true", help="clean runs only")
    which.add_argument("--faults", action="store_true", help="planted faults only")
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("-v", "--verbose", action="store_true", help="every finding in words")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        references = References(Path(scratch))
        cases: list[tuple[str, str, Callable[[Path], dict[str, Any]]]] = []
        for name in () if chosen.faults else LAYOUTS:
            for ranks in (4,) if name == "dp_tp" else (2, 4):
                case = lambda f, n=name, r=ranks: clean(n, r, references, f)  # noqa: E731
                cases.append(("clean", f"{name} on {ranks} ranks", case))
        for fault in () if chosen.clean else faults():
            title = f"{fault.title}{' *' if fault.held_out else ''}"
            cases.append(
                (
                    "held out" if fault.held_out else "fault",
                    title,
                    lambda f, x=fault: planted(x, references, f),
                )
            )
        for number, (kind, title, run) in enumerate(cases):
            if not re.search(chosen.only, title):
                continue
            began = time.perf_counter()
            row: dict[str, Any] = {"case": title, "kind": kind}
            try:
                row |= run(Path(scratch) / str(number))
            except Exception as error:  # noqa: BLE001 - the other cases are of interest too
                row |= {"answer": "crashed", "error": f"{error!r}", "trace": traceback.format_exc()}
            row["seconds"] = time.perf_counter() - began
            rows.append(row)
            print(_line(row, verbose=chosen.verbose), flush=True)
    for kind in ("clean", "fault", "held out"):
        counts = Counter(row["answer"] for row in rows if row["kind"] == kind)
        if counts:
            told = ", ".join(f"{answer} {count}" for answer, count in counts.most_common())
            print(f"{kind}: {counts.total()}: {told}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    bad = [
        r
        for r in rows
        if r["answer"] == "crashed" or (r["kind"] == "clean" and r["answer"] != "same")
    ]
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
