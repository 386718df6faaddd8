"""The command of msprobe: compare.

\b
    whence msprobe compare -tp dump_npu/step0 -gp dump_gpu/step0 -o out
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from whence.cli import _answers, _files
from whence.cli._answers import CODES
from whence.cli._options import HERE, PATH, below, group, option

command = group("msprobe", __doc__)


@below(
    command,
    "compare",
    option(
        "-tp, --target_path PATH",
        "The target: the dump to check.",
        PATH,
        name="target",
        required=True,
    ),
    option(
        "-gp, --golden_path PATH",
        "The reference: the dump to trust.",
        PATH,
        name="golden",
        required=True,
    ),
    option(
        "-o, --output_path FOLDER",
        "Folder for compare_result_*.csv.",
        HERE,
        name="output",
        default="./output",
    ),
    option(
        "-m, --mode",
        "Changes nothing: the kind of the dumps is recognised.",
        ("auto",),
        show_default=False,
        default="auto",
    ),
    option("-fm, --fuzzy_match", "Changes nothing: similar names are always paired."),
    option("-da, --diff_analyze", "Changes nothing: the first difference is always named."),
)
def compare_command(target: str, golden: str, output: str, **_: object) -> int:
    """Compare two dumps: msprobe's table into FOLDER, whence's answer on the terminal.

    Exit code: 0 the same, 1 different, 2 undecided.
    """
    import time

    from whence import api
    from whence.report.answer import answer
    from whence.report.tables import clean
    from whence.report.views import view_csv

    click.echo(
        f"whence: the same as  whence compare {clean(golden)} {clean(target)} --view msprobe -o CMP",  # noqa: E501
        err=True,
    )
    result = api.compare(golden, target, view="msprobe")
    by_rank: dict[int, list[Any]] = {}
    for row in result.views["msprobe"]:
        side = row.target or row.reference
        by_rank.setdefault(side.rank if side is not None else 0, []).append(row)
    folder, stamp = Path(output), time.strftime("%Y%m%d%H%M%S")
    _answers.put(answer(result))
    _answers.kept(result)
    jobs = []
    for rank, rows in sorted(by_rank.items()):
        whose = "" if Path(target).is_file() else f"rank{rank}_"
        table = view_csv("msprobe", rows)
        jobs.append(
            partial(_files.write, folder / f"compare_result_{whose}{stamp}.csv", table, force=False)
        )
    _answers.all_of(*jobs)
    click.echo(f"written to {clean(output)}")
    return CODES[result.status]
