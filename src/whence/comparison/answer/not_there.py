"""What either run lacks: where that was not accepted, two runs are not the same.

Every route to an answer ends here. A fault in what is there stays a fault.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from whence.comparison.options import CompareOptions
from whence.readers.unread import same_bytes
from whence.records import Lack, Missing, Run, missing_of
from whence.results import Comparison, NotThere, Status

_PARTIAL = frozenset((Lack.CUT, Lack.RANK, Lack.RUNNING, Lack.DAMAGED))
"""What `partial` accepts."""
_IGNORED = frozenset((Lack.UNREAD, Lack.DAMAGED))
"""Kinds of files that `ignore` may name."""


def not_there(reference: Run, target: Run, options: CompareOptions) -> Iterator[NotThere]:
    """What either run lacks, the reference first."""
    for side, run in (("reference", reference), ("target", target)):
        for missing in missing_of(run):
            accepted = _is_accepted(missing, options)
            yield NotThere(side, missing.kind, missing.where, missing.text, accepted)


def with_missing(
    result: Comparison, reference: Run, target: Run, options: CompareOptions
) -> Comparison:
    """The answer, which is not that the runs are the same where one of them is not whole."""
    missing = _with_equal_files(tuple(not_there(reference, target, options)), reference, target)
    result = msgspec.structs.replace(result, missing=missing)
    open_ones = [one for one in missing if not one.accepted]
    if not open_ones or result.status != Status.SAME:
        return result
    return msgspec.structs.replace(result, status=Status.UNDECIDED, headline=_headline(open_ones))


def _with_equal_files(
    missing: tuple[NotThere, ...], reference: Run, target: Run
) -> tuple[NotThere, ...]:
    """Accepted, too, are files that nobody read and that hold the same bytes in both runs."""
    unread = Counter(one.where for one in missing if one.kind == Lack.UNREAD and not one.accepted)
    equal = {
        file
        for file, sides in unread.items()
        if sides == 2 and same_bytes(Path(reference.path) / file, Path(target.path) / file)
    }
    return tuple(
        msgspec.structs.replace(
            one, accepted=True, text=f"{one.where} is not read; both runs have it, byte by byte"
        )
        if one.kind == Lack.UNREAD and one.where in equal
        else one
        for one in missing
    )


def _is_accepted(missing: Missing, options: CompareOptions) -> bool:
    if options.partial and missing.kind in _PARTIAL:
        return True
    return missing.kind in _IGNORED and any(
        fnmatch.fnmatchcase(missing.where, pattern) for pattern in options.ignore
    )


def _headline(missing: Sequence[NotThere]) -> str:
    """Why two runs are not called the same that differ in nothing that is there."""
    if missing[0].kind == Lack.WATCHED:
        return f"no fault in what was captured, but of the {missing[0].side}: {missing[0].text}"
    sides = dict.fromkeys(one.side for one in missing)
    whose = "neither run is" if len(sides) > 1 else f"the {missing[0].side} is not"
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"no fault in what is there, but {whose} whole: {missing[0].text}{others}"
