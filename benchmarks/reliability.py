"""What a failing disk does to captures, at every call to the operating system.

    python benchmarks/reliability.py                       # everything; some thousand processes
    python benchmarks/reliability.py --only "torch op"     # programs whose name contains this
    python benchmarks/reliability.py --every 20            # one case of twenty
    python benchmarks/reliability.py --write               # and docs/dev/reliability.json and .md

Each program of `_captured_programs.py` is captured once undisturbed, which counts its writes,
opens, renames, maps ... Then it runs again for every one of these and every fault of
`_faulty_disk.py` that may strike there. Exits 1 when an acknowledged record is lost, the program
computes something else or ends otherwise, the user is not told once, or the run that is left claims
what it has not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import _captured_programs as programs

programs.calm()

import _faulted_run as faulted  # noqa: E402
import _reliability_page as page  # noqa: E402
from _faulty_disk import faults  # noqa: E402


def cases(name: str, every: int) -> Iterator[faulted.Case]:
    """Every case of a program."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        place = Path(folder)
        (plain, *_) = faulted.run(name, place / "plain", None, captured=False)
        undisturbed = faulted.run(name, place / "whole", None)
        for report in undisturbed:
            assert report.exit_code == plain.exit_code == faulted.EXIT, (plain, report)
            assert report.output == plain.output, "capturing changes the program"
        for fault in faults(undisturbed[0].calls, every):
            run = place / "run"
            yield faulted.judged(name, fault, run, plain, undisturbed)
            shutil.rmtree(run, ignore_errors=True)


def table(results: Iterable[faulted.Case]) -> list[dict[str, object]]:
    """A row for each program and fault."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for case in results:
        row = rows.setdefault(
            (case.program, case.fault.what),
            {
                "program": case.program,
                "fault": case.fault.what,
                "cases": 0,
                "struck": 0,
                "acknowledged": 0,
                "acknowledged_lost": 0,
                "unflushed_lost": 0,
                "wrong": 0,
            },
        )
        row["cases"] += 1
        row["struck"] += case.happened
        row["acknowledged"] += case.acknowledged
        row["acknowledged_lost"] += case.acknowledged - case.kept
        row["unflushed_lost"] += case.unflushed_lost
        row["wrong"] += bool(case.wrong)
    return list(rows.values())


def main() -> int:
    """Run the cases, print those that went wrong and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--group", choices=programs.GROUPS, default=None)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="into docs/dev/reliability.*")
    asked = parser.parse_args()
    results: list[faulted.Case] = []
    for group, named in programs.GROUPS.items():
        chosen = [n for n in named if asked.only in n and asked.group in (None, group)]
        if chosen and not programs.is_here(group):
            print(f"{group}: not installed, left out")
            continue
        if chosen:
            programs.warm(group)
        for name in chosen:
            start, before = time.perf_counter(), len(results)
            for case in cases(name, asked.every):
                results.append(case)
                if case.wrong:
                    print(
                        f"WRONG {case.program}: {case.fault}: {'; '.join(case.wrong)}", flush=True
                    )
            mine = results[before:]
            print(
                f"{name}: {len(mine)} cases, {sum(c.acknowledged for c in mine)} acknowledged, "
                f"{sum(c.acknowledged - c.kept for c in mine)} lost, "
                f"{sum(bool(c.wrong) for c in mine)} wrong, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    if asked.write:
        page.write(faults=table(results))
    return int(any(case.wrong for case in results))


if __name__ == "__main__":
    sys.exit(main())
