"""Writes a run's operators or leaf modules as tests that run without whence, and compares the
results of two runs of these tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whence import extras
from whence.errors import UsageError
from whence.records import Run
from whence.workflows.saved import AnyRun, as_run, storing, write_file

if TYPE_CHECKING:
    from whence.replay.export.pytest_files import Folder, Written
    from whence.workflows.operator_tests.diff import Diff

LEVELS = ("op", "module")


def generate_tests(
    run: AnyRun,
    output: str | Path,
    *,
    level: str = "op",
    factory: str = "load",
    cpu_init: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_trivial: bool = False,
    samples: int = 3,
    force: bool = False,
) -> Written:
    """Write the operators of a run as pytest files with their data; docs/operators.md says what
    they are.

    run: a folder or an open Run. output: a new folder. level: "op" (operators of a run captured at
    level op) or "module" (leaf modules that have a program). factory: "load" (recorded elements),
    "random" (within the recorded range) or "special" (zeros, denormals, infinities, NaN, ties);
    cpu_init: draw them on the CPU. include, exclude: patterns on operators, or module scopes.
    keep_trivial: random, creation and view operators too. samples: calls of one signature at most.
    force: replace such a folder. Raises UsageError when nothing is left to write, OutputExists,
    UnreadableRun, MissingDependency without torch.
    """
    extras.needed("torch", "writing tests of operators")
    from whence.replay.export import pytest_files

    if level not in LEVELS:
        raise UsageError(f"level {level!r} is none of {', '.join(LEVELS)}")
    pytest_files.checked(factory, samples)
    opened = as_run(run)
    folder = pytest_files.Folder(opened, samples)
    if level == "op":
        _write_operators(opened, folder, include, exclude, keep_trivial)
    else:
        _write_modules(opened, folder, include, exclude)
    if not folder.tests:
        reasons = (
            "; ".join(f"{len(names)} {reason}" for reason, names in folder.left_out.items())
            or "nothing matches"
        )
        raise UsageError(f"no test can be written of {opened.path}: {reasons}")
    with storing(f"write {output}", "; nothing was left there"):
        return folder.write(Path(output), factory=factory, cpu_init=cpu_init, force=force)


def _write_operators(
    run: Run, folder: Folder, include: Sequence[str], exclude: Sequence[str], keep_trivial: bool
) -> None:
    from whence.replay.export import pytest_operators
    from whence.workflows.operator_tests.operators import chosen_operators, signatures

    groups = signatures(run)
    if not groups:
        raise UsageError(
            f"{run.path} holds no operators: capture with --level op, or write tests of modules "
            "with --level module"
        )
    chosen = chosen_operators(groups, include, exclude, "name")
    pytest_operators.write_operators(run, chosen, folder, keep_trivial=keep_trivial)


def _write_modules(
    run: Run, folder: Folder, include: Sequence[str], exclude: Sequence[str]
) -> None:
    from whence.instrument.selection import matcher
    from whence.replay.export import pytest_files, pytest_modules

    included, excluded = [matcher(p) for p in include], [matcher(p) for p in exclude]
    calls = [
        c
        for c in pytest_files.leaves(run.calls)
        if not any(m(c.scope) for m in excluded)
        and (not included or any(m(c.scope) for m in included))
    ]
    pytest_modules.write_modules(run, folder, calls)


def diff_results(
    reference: str | Path,
    target: str | Path,
    output: str | Path | None = None,
    *,
    force: bool = False,
) -> Diff:
    """Join two tables that generated tests wrote (`--detail_compare_path`), row by row, and judge
    each (docs/operators.md).

    reference, target: csv files, also those of the public tool, which have fewer columns. output: a
    csv to write. Raises UnreadableRun for what is no such table, OutputExists, StoreFailed.
    """
    from whence.report.operator_diff import tested_csv
    from whence.report.own_files import check_replaceable
    from whence.workflows.operator_tests import diff

    if output is not None:
        check_replaceable(output, force)
    result = diff.diff(diff.read(Path(reference)), diff.read(Path(target)))
    if output is not None:
        write_file(output, tested_csv(result))
    return result
