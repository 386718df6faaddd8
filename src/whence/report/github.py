"""A Comparison as workflow commands of GitHub Actions (also read by Gitea and Forgejo), which show
findings at lines of source files.
"""

from __future__ import annotations

from pathlib import Path

from whence.report.remarks import Remark, remarks
from whence.report.tables import clean
from whence.results import Comparison

_MOST = 10  # annotations of one kind that a step shows
_LEVELS = {"note": "notice"}


def github_annotations(result: Comparison, root: Path | None = None) -> str:
    """A line per finding, at most ten, and one for the answer where there is none. root: the
    checkout that files are named from.
    """
    kinds: dict[str, list[Remark]] = {}
    for remark in remarks(result, root):
        kinds.setdefault(remark.kind, []).append(remark)
    return "".join(f"{_line(r)}\n" for of_kind in kinds.values() for r in of_kind[:_MOST])


def _line(remark: Remark) -> str:
    where = {"file": remark.file, "line": str(remark.line)} if remark.file else {}
    title = {"title": f"whence: {remark.title}"}
    properties = ",".join(
        f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in {**where, **title}.items()
    )
    level = _LEVELS.get(remark.level, remark.level)
    return f"::{level} {properties}::{_data(remark.text)}"


def _data(text: str) -> str:
    # A name from a run must not start a command of its own: `clean` removes line ends.
    return clean(text).replace("%", "%25")
