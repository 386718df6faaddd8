"""Colours an answer on a terminal: the word that decides it, and the next steps."""

from __future__ import annotations

import os
import re
from typing import TextIO

_STYLES = {
    "bold red": r"(?:FIRST )?FAULT|DIFFERENT|INPUTS DIFFER|STAGE \w+",
    "bold green": "SAME",
    "bold yellow": "UNDECIDED|SUSPECT|PRECISION(?: LOSS)?|OTHER CODE",
    "cyan": "  next",
}
_CODES = {"bold red": "1;31", "bold green": "1;32", "bold yellow": "1;33", "cyan": "36"}
_HEADINGS = {
    code: re.compile(rf"^(?:{_STYLES[style]})(?=\s|$)", re.MULTILINE)
    for style, code in _CODES.items()
}


def coloured(text: str) -> str:
    """An answer with its deciding words in colour."""
    for code, heading in _HEADINGS.items():
        text = heading.sub(f"\x1b[{code}m\\g<0>\x1b[0m", text)
    return text


def is_wanted(stream: TextIO) -> bool:
    """Whether a stream should get colours: it is a terminal, and neither NO_COLOR (no-color.org)
    nor TERM=dumb forbids them.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
