"""A Comparison as workflow commands of GitHub Actions (also read by Gitea and Forgejo): findings
stand at the lines they name.
"""

from __future__ import annotations

from pathlib import Path

from whence.report.answer import cause_words, headline
from whence.report.tables import AT_LINE, clean, from_here
from whence.results import Comparison, Finding, Status

_MOST = 10  # of one kind that a step shows
_LEVELS = {"certain": "error", "likely": "error"}


def github_annotations(result: Comparison, root: Path | None = None) -> str:
    """A line per finding, at most ten, and one for the answer where there is none. root: the
    checkout that files are named from.
    """
    checkout = (root or Path.cwd()).resolve()
    lines = [
        _line("error", "whence: inputs differ", sentence)
        for sentence in result.inputs_differ[:_MOST]
    ]
    lines += [_finding(finding, checkout) for finding in result.findings[:_MOST]]
    if not lines:
        level = {"same": "notice", "different": "error", "undecided": "warning"}[result.status]
        lines.append(_line(level, f"whence: {result.status}", headline(result)))
    elif result.status == Status.UNDECIDED:
        lines.append(_line("warning", "whence: undecided", headline(result)))
    return "".join(f"{line}\n" for line in lines)


def _finding(finding: Finding, checkout: Path) -> str:
    where = {}
    if AT_LINE.search(finding.source):
        file, _, line = from_here(finding.source, checkout).rpartition(":")
        where = {"file": Path(file).as_posix(), "line": line}
    text = (
        f"{finding.name} ({finding.op_type}) step {finding.step}, rank {finding.rank}: "
        f"{cause_words(finding)} ({finding.confidence}). {finding.sentence}"
    )
    return _line(
        _LEVELS.get(finding.confidence, "warning"), f"whence: {finding.name}", text, **where
    )


def _line(level: str, title: str, message: str, **where: str) -> str:
    properties = ",".join(
        f"{key}={_property(value)}" for key, value in {**where, "title": title}.items()
    )
    return f"::{level} {properties}::{_data(message)}"


def _data(text: str) -> str:
    # What a run names must not begin a command of its own: `clean` leaves no line end.
    return clean(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
