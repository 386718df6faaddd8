"""A Comparison as remarks on lines of code, for build servers and editors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whence.report.answer import cause_words, headline
from whence.report.tables import AT_LINE, from_here
from whence.results import Comparison, Finding, Status

_LEVELS = {"certain": "error", "likely": "error"}
_OF_STATUS = {"same": "note", "different": "error", "undecided": "warning"}


class Remark(NamedTuple):
    """kind: "inputs", "finding" or "answer". rule: what kind of fault it is, in one word. level:
    "error", "warning" or "note". title: the module, or what the remark is about. file, line: "" and
    0 where no line is known; file is relative where it lies below the checkout.
    """

    kind: str
    rule: str
    level: str
    title: str
    text: str
    file: str = ""
    line: int = 0


def remarks(result: Comparison, root: Path | None = None) -> Iterator[Remark]:
    """One remark for inputs that differ, one for each finding, and one for the answer if there is
    no other remark or the answer is undecided. root: the checkout; None for the working folder.
    """
    checkout = (root or Path.cwd()).resolve()
    for sentence in result.inputs_differ:
        yield Remark("inputs", "inputs", "error", "inputs differ", sentence)
    for finding in result.findings:
        yield _of_finding(finding, checkout)
    is_undecided = result.status == Status.UNDECIDED
    if is_undecided or not (result.inputs_differ or result.findings):
        status = str(result.status)
        yield Remark("answer", status, _OF_STATUS[status], status, headline(result))


def _of_finding(finding: Finding, checkout: Path) -> Remark:
    text = (
        f"{finding.name} ({finding.op_type}) step {finding.step}, rank {finding.rank}: "
        f"{cause_words(finding)} ({finding.confidence}). {finding.sentence}"
    )
    level = _LEVELS.get(finding.confidence, "warning")
    rule = str(finding.cause or finding.verdict)
    remark = Remark("finding", rule, level, finding.name, text)
    if not AT_LINE.search(finding.source):
        return remark
    file, _, line = from_here(finding.source, checkout).rpartition(":")
    return remark._replace(file=Path(file).as_posix(), line=int(line))
