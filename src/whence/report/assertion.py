"""The message of a failed assertion: what differs, why, by how much, and where to look."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from whence.report.answer import answer, headline
from whence.report.document import text
from whence.report.tables import clean
from whence.results import Comparison, Status

_WIDTH = 120


def disparity(result: Comparison, folder: str | os.PathLike[str] | None) -> str:
    """The message of a failed parity check. folder: contains the comparison `cmp`, which names the
    paths of the runs; None where nothing was kept.
    """
    claim = "models differ" if result.status == Status.DIFFERENT else "cannot be told"
    kept = _kept(result, folder) if folder is not None else ()
    failure = f"{claim}: {clean(headline(result))}\n{answer(result, width=_WIDTH)}"
    return (failure + text([("kept in", kept)])).rstrip("\n")


def _kept(result: Comparison, folder: str | os.PathLike[str]) -> Iterator[str]:
    """Says where everything was kept, and which commands show it."""
    compared = shlex.quote(clean(Path(folder) / "cmp"))
    yield clean(folder)
    yield f"whence report {compared} -o report.html"
    if result.findings and result.status == Status.DIFFERENT:
        run, name = clean(result.target), clean(result.findings[0].name)
        yield f"whence show {shlex.quote(run)} {shlex.quote(name)}"
