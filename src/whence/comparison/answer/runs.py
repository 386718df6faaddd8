"""What every answer says about the two runs themselves."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from whence._version import __version__
from whence.align.environment import changed, observer_effects
from whence.comparison.options import CompareOptions
from whence.readers.unread import same_bytes
from whence.records import Call, Dumped, Lack, Missing, Run, files_of, marks, missing_of
from whence.results import Comparison, NotThere, Status

_MAX_ERROR_TEXT = 200  # characters of an exception that are shown


def capture_notes(side: str, run: Run, calls: Sequence[Call]) -> list[str]:
    """Problems during the capture of a run, in sentences, without those that say what it lacks.
    calls: the calls whose notes and errors count.
    """
    out, told = [], {missing.text for missing in missing_of(run)}
    out += [_in_words(call) for call in calls if call.error and call.parent == -1][:1]
    out += changed(run)
    kinds = ("budget", "error", "inside-not-seen")
    out += [n.text for n in run.notes if n.kind in kinds and n.text not in told]
    out += observer_effects(run)
    out += sorted({note for c in calls if (note := marks.hidden_inside(c))})
    return [f"{side}: {sentence}" for sentence in out]


def _in_words(raised: Call) -> str:
    message = " ".join(raised.error.split())
    more = "..." if message[_MAX_ERROR_TEXT:] else ""
    return f"{raised.module_name} raised in step {raised.step}: {message[:_MAX_ERROR_TEXT]}{more}"


def versions(reference: Run) -> dict[str, str]:
    """The version of this package, and of the reference's file format."""
    return {"whence": __version__, "format": str(reference.info.format)}


def ended(result: Comparison, reference: Run, target: Run, options: CompareOptions) -> Comparison:
    """The answer, completed by what the runs lack and by what to do next. Every way to an answer
    ends here.
    """
    result = with_missing(result, reference, target, options)
    notes = result.notes
    paths = [os.path.realpath(path) for path in (result.reference, result.target) if path]
    if len(paths) == 2 and paths[0] == paths[1] and Path(paths[0]).exists():
        notes = (f"both are one run, compared with itself: {result.reference}", *notes)
    result = msgspec.structs.replace(result, notes=notes)
    if result.status == Status.SAME:
        return result
    from whence.comparison.answer.next_steps import next_steps  # which looks at what the stages say

    return msgspec.structs.replace(result, next=next_steps(result, reference, target))


# What either run lacks. Unless the user accepts that, two incomplete runs are never the same; a
# fault in the tensors that exist stays a fault.

_PARTIAL = frozenset((Lack.CUT, Lack.RANK, Lack.RUNNING, Lack.DAMAGED, Lack.ABSENT))
"""Kinds of missing parts that `partial` accepts."""
_IGNORED = frozenset((Lack.UNREAD, Lack.DAMAGED, Lack.ABSENT))
"""Kinds of files that `ignore` may name."""
_OF_ONE_RUN = re.compile(r"\d{8,}|(?<=pid)\d+")
"""Parts of a file's name that differ from run to run: times and process ids."""


def not_there(reference: Run, target: Run, options: CompareOptions) -> Iterator[NotThere]:
    """The missing parts of either run, the reference's first. What follows where a step raised in
    one run alone is such a part of that run.
    """
    raised = [[c for c in r.calls if c.error and c.parent == -1] for r in (reference, target)]
    sides = zip(("reference", "target"), (reference, target), raised, raised[::-1], strict=True)
    for side, run, own, others in sides:
        for missing in missing_of(run):
            yield _told(side, missing, options)
        steps = {call.step for call in others}
        for call in [c for c in own if c.step not in steps][:1]:
            text = f"{_in_words(call)}; what follows it was not computed"
            yield _told(side, Missing(Lack.CUT, "", text), options)


def with_missing(
    result: Comparison, reference: Run, target: Run, options: CompareOptions
) -> Comparison:
    """The answer with all missing parts; never `same` if one of them was not accepted."""
    missing = _with_equal_files(tuple(not_there(reference, target, options)), reference, target)
    pairs = _files_in_pairs(reference, target)
    beside = [
        *_absent(pairs, reference, target),
        *(_of_other_size(pairs, reference, target) if result.incomparable else ()),
    ]
    missing += tuple(_told(side, one, options) for side, one in beside)
    result = msgspec.structs.replace(result, missing=missing)
    open_ones = [one for one in missing if not one.accepted]
    if not open_ones or result.status != Status.SAME:
        return result
    return msgspec.structs.replace(result, status=Status.UNDECIDED, headline=_headline(open_ones))


def _with_equal_files(
    missing: tuple[NotThere, ...], reference: Run, target: Run
) -> tuple[NotThere, ...]:
    """The missing parts; unread files count as accepted if they are bytewise equal in both runs."""
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


def _told(side: str, missing: Missing, options: CompareOptions) -> NotThere:
    """A missing part, with advice about its file if its text has none."""
    text = missing.text
    if missing.kind in _IGNORED and "--ignore" not in text:
        again = "" if "again" in text else " copy it again, or"
        text += f";{again} give --ignore {missing.where!r} to do without"
    return NotThere(side, missing.kind, missing.where, text, _is_accepted(missing, options))


_Pairs = list[tuple[list[str], list[str]]]


def _files_in_pairs(reference: Run, target: Run) -> _Pairs:
    """(files of the reference, of the target) with equal names, apart from times and process ids;
    empty if fewer than half have a namesake, as in dumps of two tools.
    """
    names: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, run in enumerate((reference, target)):
        for file in sorted(files_of(run)):
            names[_OF_ONE_RUN.sub("#", file)][side].append(file)
    both = sum(min(map(len, pair)) for pair in names.values())
    either = sum(max(map(len, pair)) for pair in names.values())
    return list(names.values()) if 2 * both >= either else []


def _absent(pairs: _Pairs, reference: Run, target: Run) -> Iterator[tuple[str, Missing]]:
    """Files that only one run has, although most files have a namesake in the other."""
    for one, other in pairs:
        for side, run, held, lacking in (
            ("reference", target, other, one),
            ("target", reference, one, other),
        ):
            for file in held[len(lacking) :]:
                if files_of(run)[file]:
                    yield side, Missing(Lack.ABSENT, file, f"{file} is in the other run only")


def _of_other_size(pairs: _Pairs, reference: Run, target: Run) -> Iterator[tuple[str, Missing]]:
    """Files with more or fewer elements than their namesakes, which may have been exchanged."""
    elements, others = _elements_in_files(reference), _elements_in_files(target)
    for one, other in pairs:
        for file, namesake in zip(one, other, strict=False):
            count, second = elements[file], others[namesake]
            if count and second and count != second:
                text = (
                    f"{namesake} holds {second:,} elements and its namesake {count:,}, and they "
                    "are not all compared: exchanged with another file?"
                )
                yield "target", Missing(Lack.DAMAGED, namesake, text)


def _elements_in_files(run: Run) -> Counter[str]:
    held: Counter[str] = Counter()
    for record in run.records:
        if isinstance(record.elements, Dumped):
            held[record.elements.file.partition(",")[0]] += record.count
    return held


def _is_accepted(missing: Missing, options: CompareOptions) -> bool:
    if options.partial and missing.kind in _PARTIAL:
        return True
    return missing.kind in _IGNORED and any(
        fnmatch.fnmatchcase(missing.where, pattern) for pattern in options.ignore
    )


def _headline(missing: Sequence[NotThere]) -> str:
    """Why the answer is not `same` although no captured tensor differs."""
    if missing[0].kind == Lack.WATCHED:
        return f"no fault in what was captured, but of the {missing[0].side}: {missing[0].text}"
    sides = dict.fromkeys(one.side for one in missing)
    whose = "neither run is" if len(sides) > 1 else f"the {missing[0].side} is not"
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"no fault in what is there, but {whose} whole: {missing[0].text}{others}"
