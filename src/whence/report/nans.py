"""The first values that are not finite, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, count, headed
from whence.results import Nans, NotFinite, Range

_MOST_READ = 6
_NEAR = 0.5  # of the largest number of a dtype


def nans_text(result: Nans) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Nans) -> Iterator[str]:
    first = result.first
    if first is None and result.unmeasured:
        words = f"{count(result.unmeasured, 'tensor')} without statistics; all others are finite"
        yield headed("CANNOT TELL", words)
    elif first is None:
        yield headed("FINITE", f"every tensor of {count(result.calls, 'call')}")
    else:
        yield from _found(first, "NOT FINITE" if first.nan else "OVERFLOW")
        if result.then is not None:
            yield headed("  then", _words(result.then))
        later = count(result.after, "later call")
        yield headed("  after", f"{later} of {result.calls:,} hold NaN or infinities")
        if result.unmeasured:
            yield f"note: {count(result.unmeasured, 'tensor')} without statistics could hide others"


def _found(found: NotFinite, title: str) -> Iterator[str]:
    where = f"step {found.step}, rank {found.rank}"
    if found.phase != "forward":
        where += f", {clean(found.phase)}"
    name = clean(found.scope or found.root)
    yield headed(title, "   ".join((name, clean(found.op_type), clean(found.slot), where)))
    made = [f"{found.nan:,} NaN"] if found.nan else []
    made += [f"{found.infinite:,} infinite"] if found.infinite else []
    limit = f" (largest {found.largest:.6g})" if found.largest is not None else ""
    words = f"{' and '.join(made)} of {count(found.count, 'element')}, {found.dtype}{limit}"
    yield headed("  made", words + (f", by {clean(found.operator)}" if found.operator else ""))
    for place, read in enumerate(found.read[:_MOST_READ]):
        yield headed("  from" if not place else "", _range(read, found))
    if len(found.read) > _MOST_READ:
        yield headed("", f"and {len(found.read) - _MOST_READ} more")


def _range(read: Range, found: NotFinite) -> str:
    if read.low is None or read.high is None:
        return f"{clean(read.slot)} {read.dtype}, not measured"
    words = f"{clean(read.slot)} {read.dtype}, {read.low:.6g} to {read.high:.6g}"
    if read.infinite:
        words += f", {read.infinite:,} infinite"
    largest = max(abs(read.low), abs(read.high))
    if found.largest is not None and largest > _NEAR * found.largest:
        words += f": {largest / found.largest:.0%} of the largest {found.dtype}"
    return words


def _words(then: NotFinite) -> str:
    names = (then.scope or then.root, then.op_type, then.slot)
    return f"{'   '.join(map(clean, names))}   makes NaN of infinities at step {then.step}"
