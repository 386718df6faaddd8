"""Files that hold a run as it is shown here."""

from __future__ import annotations

import re

_STARTS = re.compile(
    rb'[^\n]*   \S[^\n]* run   |index,rank,root,|\{"(?:path|call)": |Index +Step |'
    rb"[^\n]*   step -?\d+, rank \d+, call |[^\n]*   rank \d+   step"
)


def begins_as_shown(head: bytes) -> bool:
    """Whether a file with these first bytes holds a run, or one record, in one of these forms."""
    return _STARTS.match(head) is not None
