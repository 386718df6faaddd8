"""The commands of torch_xray: summary, compare, jprof and more.

\b
    whence xray summary globalrank-0_localrank-0.h5 out.txt
    whence xray compare gpu.h5 xpu.h5 result.csv
    whence xray jprof --cpu_init --blacklist --factory=load dump.json
    whence xray summary_diff_check xpu.csv gpu.csv result.csv
    whence xray check gpu_debug/proc_7 xpu_debug/proc_9
"""

from __future__ import annotations

from pathlib import Path

import click

from whence.cli import _answers, _files
from whence.cli._answers import CODES
from whence.cli._options import HERE, PATH, argument, below, group, option

_STATUS = {"tolerance": "", "verdict": "Status"}
_MATCHES = {"exact": "exact", "fuzzy": "auto", "order": "order"}


command = group("xray", __doc__)


@below(
    command,
    "summary",
    argument("dump", "X.h5"),
    argument("output", "OUT", HERE),
    option("--force", "Replace OUT."),
)
def summary_command(dump: str, output: str, force: bool) -> None:
    """Write min, max, mean and std of every tensor: as a table, or as CSV when OUT ends in .csv."""
    from whence import api
    from whence.report.xray import xray_summary

    _same_as(f"whence show {dump}")
    _files.check(Path(output), force)
    run = api.open_to_show(dump)
    _files.write(
        Path(output),
        xray_summary(run, "csv" if output.lower().endswith(".csv") else "text"),
        force,
    )


@below(
    command,
    "compare",
    argument("bench", "BENCH.h5"),
    argument("target", "TARGET.h5"),
    argument("output", "RESULT.csv", HERE),
    option("--golden FILE", "The reference, if it is not the first file.", PATH),
    option(
        "--match",
        "How names are paired: equal names, similar names, or in order.",
        _MATCHES,
        default="fuzzy",
    ),
    option(
        "--status",
        "Status: Fail by the tool's tolerance, or where the fault is.",
        _STATUS,
        default="tolerance",
    ),
    option("--force", "Replace RESULT.csv."),
)
def compare_command(
    bench: str,
    target: str,
    output: str,
    golden: str | None,
    match: str,
    status: str,
    force: bool,
) -> int:
    """Compare two dumps: torch_xray's table into RESULT.csv, whence's answer on the terminal.

    Exit code: 0 the same, 1 different, 2 undecided.
    """
    from whence import api
    from whence.report.answer import answer
    from whence.report.tables import clean
    from whence.report.views import view_csv

    if golden is not None and golden not in (bench, target):
        raise click.UsageError(f"--golden {golden} must be {bench} or {target}")
    if golden == target:
        bench, target = target, bench
    _same_as(
        f"whence compare {bench} {target} --view torch_xray -o CMP   (Bench, the reference: "
        f"{bench}; Target: {target})"
    )
    _files.check(Path(output), force)
    result = api.compare(bench, target, view="torch_xray", match=_MATCHES[match])
    _answers.put(answer(result))
    _answers.kept(result)
    rows, judged = result.views["torch_xray"], _STATUS[status]
    _answers.all_of(
        lambda: _files.write(Path(output), view_csv("torch_xray", rows, judged=judged), force)
    )
    click.echo(f"written to {clean(output)}")
    return CODES[result.status]


@below(
    command,
    "jprof",
    argument("dump", "dump.json"),
    option(
        "--cpu_init, --cpu-init",
        "Draw random values on the CPU, so that all devices get the same.",
        name="cpu_init",
    ),
    option("--blacklist", "Leave out random, creation and view operators."),
    option(
        "--factory",
        "Input values: as dumped, random within the dumped range, or special ones.",
        ("load", "random", "special"),
        default="load",
    ),
    option("--force", "Replace the tests that were written before."),
)
def jprof_command(dump: str, cpu_init: bool, blacklist: bool, factory: str, force: bool) -> None:
    """Write tests of the operators in a dump (`begin_dump`), to the folder ./pytests."""
    from whence import api
    from whence.report.operator_diff import written

    if not Path(dump).exists():
        raise click.UsageError(
            f"{dump} does not exist; end_dump of torch_xray writes xray_debug/proc_<pid>/dump.json"
        )
    run, output = _run_of(dump), Path("pytests")
    _same_as(f"whence ops generate {run} -o {output} --factory {factory}")
    result = api.generate_tests(
        run, output, factory=factory, cpu_init=cpu_init, keep_trivial=not blacklist, force=force
    )
    _answers.say(written(result))


@below(
    command,
    "summary_diff_check",
    argument("target", "XPU.csv"),
    argument("reference", "GPU.csv"),
    argument("output", "RESULT.csv", HERE),
    option("--force", "Replace RESULT.csv."),
)
def diff_command(target: str, reference: str, output: str, force: bool) -> int:
    """Compare what the tests measured on two devices, the reference second. Exit code: 0 the same,
    1 different, 2 nothing compared.
    """
    from whence import api
    from whence.report.operator_diff import tested_csv, tested_text

    _same_as(f"whence ops diff {reference} {target} -o {output}   (the reference: {reference})")
    _files.check(Path(output), force)
    result = api.diff_results(reference, target)
    _files.write(Path(output), tested_csv(result, xray=True), force)
    return _answers.told(result, "text", tested_text)


@below(
    command,
    "check",
    argument("reference", "GPU"),
    argument("target", "XPU"),
    option("-o, --output DIR", "A new folder for tests and tables.", HERE, default="xray_check"),
    option("--device NAME", "Where the tests of XPU run.", default="cpu"),
    option(
        "--tested FILE",
        "The table that the tests of XPU wrote on its own machine, in place of running them.",
        PATH,
    ),
)
def check_command(reference: str, target: str, output: str, device: str, tested: str | None) -> int:
    """Compare two dumps of operators (begin_dump), and what their tests measure: jprof, pytest and
    summary_diff_check in one.

    GPU or XPU may be the table (.csv) that the tests wrote on another machine. Into DIR: pytests,
    their tables, result.csv. Exit code: 0 the same, 1 different, 2 undecided.
    """
    from whence import api
    from whence.report.answer import answer
    from whence.report.operator_diff import tested_csv, tested_text

    sides = [p if p.endswith(".csv") else str(_run_of(p)) for p in (reference, target)]
    result = api.check_operators(sides[0], sides[1], output, device=device, tested=tested)
    if result.recorded is not None:
        _answers.put(answer(result.recorded))
        _answers.kept(result.recorded)
    _files.write(Path(output) / "result.csv", tested_csv(result.tested, xray=True), False)
    code = _answers.told(result.tested, "text", lambda diff: tested_text(diff, result.recorded))
    codes = {code, CODES[result.recorded.status] if result.recorded is not None else 0}
    return next(worst for worst in (1, 2, 0) if worst in codes)


def _run_of(dump: str) -> Path:
    """The run of a dump: of its folder, or of the dump.json in it."""
    folder = Path(dump).parent if Path(dump).suffix == ".json" else Path(dump)
    return folder / "dump" if (folder / "dump").is_dir() else folder


def _same_as(line: str) -> None:
    """Say which command of whence does the same."""
    from whence.report.tables import clean

    click.echo(f"whence: the same as  {clean(line)}", err=True)
