"""What each window of two runs said, as a line of text and as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from whence.report.tables import count, csv_text
from whence.results import Status
from whence.results.windows import ComparedWindow

_MOST = 4
_ORDER = (Status.DIFFERENT, Status.UNDECIDED, Status.SAME)


def words(windows: Sequence[ComparedWindow]) -> str:
    """How many windows were compared, of which steps, and what they said."""
    numbers = Counter(window.status for window in windows)
    answers = ", ".join(f"{numbers[status]} {status}" for status in _ORDER if numbers[status])
    text = f"{count(len(windows), 'window')} ({steps(windows)}): {answers}"
    others = [window for window in windows if window.status != Status.SAME]
    if others and len(others) < len(windows):
        shown = ", ".join(steps([window]) for window in others[:_MOST])
        more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
        text += f"; not same: {shown}{more}"
    return text


def steps(windows: Sequence[ComparedWindow]) -> str:
    """The steps of some windows, in words."""
    known = [window for window in windows if window.first_step >= 0]
    if not known:
        return "no step"
    first, last = min(w.first_step for w in known), max(w.last_step for w in known)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def windows_csv(windows: Sequence[ComparedWindow]) -> str:
    """`windows.csv`: a line for each window."""
    return csv_text([ComparedWindow.__struct_fields__, *map(msgspec.structs.astuple, windows)])
