"""Reports on a terminal the first values that are not finite."""

from __future__ import annotations

from whence.report.document import Document, answering, few
from whence.report.tables import count, spaced, where
from whence.results import Nans, NotFinite, Range

_MOST_READ = 6
_NEAR = 0.5  # share of a dtype's largest number


@answering
def nans_text(result: Nans) -> Document:
    """The answer as text."""
    first = result.first
    if first is None and result.unmeasured:
        words = f"{count(result.unmeasured, 'tensor')} without statistics; all others are finite"
        yield "CANNOT TELL", words
    elif first is None:
        yield "FINITE", f"every tensor of {count(result.calls, 'call')}"
    else:
        yield from _found(first)
        if (then := result.then) is not None:
            names = spaced(then.scope or then.root, then.op_type, then.slot)
            yield "  then", f"{names}   makes NaN of infinities at step {then.step}"
        later = count(result.after, "later call")
        yield "  after", f"{later} of {result.calls:,} hold NaN or infinities"
        if result.unmeasured:
            yield f"note: {count(result.unmeasured, 'tensor')} without statistics could hide others"


def _found(found: NotFinite) -> Document:
    name = found.scope or found.root
    place = spaced(name, found.op_type, found.slot, where(found))
    yield "NOT FINITE" if found.nan else "OVERFLOW", place
    made = [f"{found.nan:,} NaN"] if found.nan else []
    made += [f"{found.infinite:,} infinite"] if found.infinite else []
    limit = f" (largest {found.largest:.6g})" if found.largest is not None else ""
    words = f"{' and '.join(made)} of {count(found.count, 'element')}, {found.dtype}{limit}"
    yield "  made", words + (f", by {found.operator}" if found.operator else "")
    yield "  from", few(found.read, _MOST_READ, lambda read: _range(read, found))


def _range(read: Range, found: NotFinite) -> str:
    if read.low is None or read.high is None:
        return f"{read.slot} {read.dtype}, not measured"
    words = f"{read.slot} {read.dtype}, {read.low:.6g} to {read.high:.6g}"
    if read.infinite:
        words += f", {read.infinite:,} infinite"
    largest = max(abs(read.low), abs(read.high))
    if found.largest is not None and largest > _NEAR * found.largest:
        words += f": {largest / found.largest:.0%} of the largest {found.dtype}"
    return words
