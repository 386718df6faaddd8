"""Foreign dumps as a Run: one file a format, found by content, lazy, pure Python, never executing
anything in a dump.

A reader is a file `readers/NAME.py` (or a module behind an entry point of the group
`whence.readers`) with

    LOOKS_LIKE = "a folder with dump.json"           what it recognises, in words, for error messages
    ORDER = 50                                       whom to ask first: 10 for marks nobody else has, 90 for what could be anything's
    def sniff(place: Place) -> bool                  cheap and silent: names and first bytes only
    def open_run(place: Place) -> Run                lazy: the index now, elements when asked; UnreadableRun says what is wrong

`Building` puts calls and records together; `parts` holds what several formats share.
"""  # noqa: E501

from whence.readers.assembly.builder import LOGGED, Building
from whence.readers.folder import Reader
from whence.readers.registry import known, open_run
from whence.readers.source import Place
from whence.records.marks import GATHERED, ONEDNN, TAKES, UNORDERED, UNTOLD, WIDER
from whence.records.views import ForeignRun

__all__ = [
    "GATHERED", "LOGGED", "ONEDNN", "TAKES", "UNORDERED", "UNTOLD", "WIDER", "Building",
    "ForeignRun", "Place", "Reader", "known", "open_run",
]  # fmt: skip
