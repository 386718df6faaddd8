"""Commands that lead on from a page, as they are typed into a POSIX shell."""

from __future__ import annotations

import shlex

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
