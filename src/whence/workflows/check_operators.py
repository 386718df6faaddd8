"""Compares the operators of two dumps, or of a dump and a table from another device: as recorded,
and by running their tests here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from whence.errors import CaptureError, UsageError
from whence.results import Comparison

_TAIL = 15  # lines of pytest that an error shows


class Checked(NamedTuple):
    """recorded: comparison of the dumps, None when the target is a table. tested: comparison of the
    tables, as from `diff_results`.
    """

    recorded: Comparison | None
    tested: Any


def check_operators(
    reference: str,
    target: str,
    output: str,
    *,
    device: str = "cpu",
    tested: str | None = None,
) -> Checked:
    """Compare two dumps of operators, then their tests: those of the target run on `device`, and
    those of a reference without a table of its own on the CPU.

    reference, target: runs, or tables (.csv) of such tests from another machine; one must be a run.
    tested: the table of the target's tests, where they ran elsewhere. output: a new folder for the
    tests and tables. Raises UsageError, UnreadableRun, OutputExists, CaptureError when the tests
    cannot run.
    """
    from whence.workflows.compare import compare
    from whence.workflows.operator_tests.generate import diff_results, generate_tests
    from whence.workflows.rerun import workplace

    is_table = [path.endswith(".csv") for path in (reference, target)]
    if all(is_table):
        raise UsageError("two tables are compared by whence xray summary_diff_check")
    with workplace(output, "xray check") as place:
        tests = place / "pytests"
        generate_tests(reference if is_table[1] else target, tests, cpu_init=True)
        tables = [
            table or _table(tests, place / f"{side}.csv", where)
            for table, side, where in (
                (is_table[0] and reference, "reference", device if is_table[1] else "cpu"),
                (tested or (is_table[1] and target), "target", device),
            )
        ]
        recorded = None if any(is_table) else compare(reference, target)
        return Checked(recorded, diff_results(*tables))


def _table(tests: Path, table: Path, device: str) -> str:
    """Run the tests on a device and return the path of their table; failing tests are
    rows of it.
    """
    options = ("--device", device, "--seed", "42", "-q", "-p", "no:cacheprovider")
    words = [sys.executable, "-m", "pytest", str(tests), f"--detail_compare_path={table}", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not table.exists():
        tail = "\n".join(f"  | {line}" for line in done.stdout.splitlines()[-_TAIL:])
        raise CaptureError(f"the tests cannot run on {device}:\n{tail}\n{done.stderr[-400:]}")
    return str(table)
