"""What a failed assertion says: who differs, why, by how much, and where to look."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from whence.report.answer import LEFT, answer, headline
from whence.report.tables import clean
from whence.results import Comparison, Status

_WIDTH = 120


def disparity(result: Comparison, folder: str | os.PathLike[str]) -> str:
    """The message of a failed parity check. folder: holds the comparison `cmp`; the runs are where
    it says they are.
    """
    claim = "models differ" if result.status == Status.DIFFERENT else "cannot be told"
    compared = shlex.quote(clean(Path(folder) / "cmp"))
    looks = [f"whence report {compared} -o report.html"]
    if result.findings and result.status == Status.DIFFERENT:
        looks.append(
            f"whence show {shlex.quote(clean(result.target))} "
            f"{shlex.quote(clean(result.findings[0].name))}"
        )
    rows = [("kept in" if i == 0 else "", line) for i, line in enumerate([clean(folder), *looks])]
    return "\n".join(
        [
            f"{claim}: {clean(headline(result))}",
            answer(result, width=_WIDTH).rstrip("\n"),
            *(f"{title:<{LEFT}}{text}" for title, text in rows),
        ]
    )
