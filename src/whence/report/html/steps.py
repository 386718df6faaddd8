"""Commands that lead on from a page, as they are typed into a POSIX shell."""

from __future__ import annotations

import shlex
from typing import Any

from whence.report.tables import clean
from whence.results.page import Page


def commands(page: Page) -> dict[str, list[str]]:
    """ "repro": one for each finding, in order; "compare": how to compare again. None without a
    folder to name.
    """
    if not page.folder:
        return {"repro": [], "compare": []}
    folder = shlex.quote(page.folder)
    findings = range(1, len(page.comparison.findings) + 1)
    return {
        "repro": [
            f"whence repro {folder}{f' --finding {n}' if n > 1 else ''} -o "
            f"repro{n if n > 1 else ''}"
            for n in findings
        ],
        "compare": [
            f"whence compare {shlex.quote(page.comparison.reference)} "
            f"{shlex.quote(page.comparison.target)} -o {folder} --force"
        ],
    }


def next_steps(page: Page) -> list[dict[str, Any]]:
    """Commands of the first screen, each with what its result decides; of what the comparison
    proposes, else to reproduce the first finding.
    """
    steps = [step.about(page.folder) if page.folder else step for step in page.comparison.next]
    # Not of a comparison that is not on disk, and not for the page that is being read.
    steps = [
        step
        for step in steps
        if not step.takes_comparison and not step.command.startswith("whence report ")
    ]
    if steps:
        return [
            {
                "command": clean(step.command),
                "decides": clean(step.decides),
                "fill_in": step.fill_in,
            }
            for step in steps[:3]
        ]
    return [
        {
            "command": clean(command),
            "decides": "runs this operator alone, on the recorded inputs",
            "fill_in": False,
        }
        for command in commands(page)["repro"][:1]
    ]
