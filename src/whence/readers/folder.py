"""Opens a folder as one run of everything that readers recognise in it.

Readers are asked in their order. Each takes the files whose paths it requests, and the next sees
the folder without them. The remaining files are tried one by one. A file that may hold tensors and
that no reader reads counts as missing: two runs are then not called equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from whence.errors import ElementsMissing, MissingDependency, UnreadableRun, WhenceError
from whence.readers.assembly import named_tensors
from whence.readers.assembly.joined_parts import Part, joined
from whence.readers.source import Place, Reader, suffix_of
from whence.readers.unread import Content, content_of, described, may_hold, not_read
from whence.records import Dumped, Lack, Missing, Over, Run, missing_of

_TABLES = {".txt", ".csv", ".tsv", ".jsonl"}
"""Endings of names of text files that are as often notes as tensors."""


class NoTensor(UnreadableRun):
    """A file of a known kind that holds no tensor, and nothing that cannot be read."""


Readers = Mapping[str, Reader]


def recognising(place: Place, readers: Readers) -> str:
    """Returns the name of the first reader that recognises a place, "" where none does."""
    return next((name for name, reader in readers.items() if _sniffed(reader, place)), "")


def opened(place: Place, name: str, reader: Reader) -> Run:
    """Returns the run that a reader opens at a place. Raises UnreadableRun with the reader's
    reason, also where not one tensor can be read; MissingDependency.
    """
    try:
        run = reader.open_run(place)
    except MissingDependency as error:
        raise MissingDependency(f"{place.path} is a {name} dump: {error}") from error
    except WhenceError as error:
        raise type(error)(
            f"{place.path} looks like {name} ({reader.LOOKS_LIKE}), but {error}"
        ) from error
    except Exception as error:  # whatever a damaged file does to a parser
        raise UnreadableRun(
            f"{place.path} looks like {name} ({reader.LOOKS_LIKE}), but is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not len(run.calls) and not len(run.records) and not missing_of(run):
        raise NoTensor(
            f"{place.path} looks like {name} ({reader.LOOKS_LIKE}), but there is no tensor in it; "
            "copy or dump it again"
        )
    if problem := _nothing_readable(run):
        raise UnreadableRun(
            f"{place.path} looks like {name} ({reader.LOOKS_LIKE}), but {problem}; "
            "copy or dump it again"
        )
    return run


def open_folder(place: Place, readers: Readers) -> tuple[Run | None, str]:
    """Returns (the run in a folder, the names of its readers); None where no reader recognises
    anything in it.

    Raises as `opened` does where nothing of it, or a group of files that belong together, cannot be
    read.
    """
    reading = _Reading(place, readers)
    reading.take_folders()
    reading.take_files()
    if not reading.parts:
        if reading.failures:
            raise reading.failures[0]
        return None, ""
    parts, missing = reading.parts, tuple(reading.missing)
    is_whole = len(parts) == 1 and not parts[0].file  # one reader took all
    run = parts[0].run if is_whole else joined(place.path, parts)
    return _Folder(run, missing, reading.files()), " and ".join(
        dict.fromkeys(part.reader for part in parts)
    )


class _Folder(Over):
    """A run of a folder, with its other files."""

    def __init__(self, base: Run, missing: tuple[Missing, ...], files: Mapping[str, bool]) -> None:
        super().__init__(base)
        self._beside, self._files = missing, files

    @property
    def files(self) -> Mapping[str, bool]:
        """The files that were read, or could not be."""
        return self._files

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What the readers could not read, and what none of them read."""
        return (*missing_of(self.base), *self._beside)


class _Reading:
    """Tracks which reader reads which files of a folder."""

    def __init__(self, place: Place, readers: Readers) -> None:
        self._readers = readers
        self._place = self._left = place
        self._unneeded: set[str] = set()
        self.parts: list[Part] = []
        self.missing: list[Missing] = []
        self.failures: list[WhenceError] = []

    def take_folders(self) -> None:
        """Lets each reader open what it recognises in the folder. Raises as `opened` does where
        files that belong together cannot be read, and nothing was read before.
        """
        for name, reader in self._readers.items():
            if not _sniffed(reader, self._left):
                continue
            self._left.asked_for.clear()
            try:
                run = opened(self._left, name, reader)
            except WhenceError as error:
                if not self.parts and not getattr(reader, "LOOSE", False):
                    raise
                self._failed(error, sorted(self._left.asked_for))
            else:
                self.parts.append(Part(run, name))
                self._left.asked_for.update(_files_of(run))
            self._unneeded |= self._left.left
            self._left = self._left.without(self._left.asked_for)

    def take_files(self) -> None:
        """Tries each remaining file, and reads those that a reader recognises."""
        for name in self._left.not_followed:
            if may_hold(name):
                self._lacks(Lack.UNREAD, name, "is a link that leads nowhere or out of the folder, "
                            "a pipe or a folder too deep, and is not followed")  # fmt: skip
        recognised: list[tuple[str, Place, str]] = []
        read = {suffix_of(name) for name in set(self._place.files) - {*self._left.files}}
        for name, file in self._places():
            content = content_of(file, name)
            if content in (Content.EMPTY, Content.CUT):
                self._lacks(Lack.DAMAGED, name, f"holds {content.value}")
            elif content in (Content.TEXT, Content.TENSORS) or not file.size:
                reader = recognising(file, self._readers)
                recognised += [(name, file, reader)] if reader else []
                if (
                    not reader
                    and suffix_of(name) in read & _TABLES
                    and file.size <= len(file.head)
                    and not file.head.endswith(b"\n")
                ):
                    self._lacks(
                        Lack.UNREAD, name, "has no end, and others of its kind hold tensors"
                    )
                if not reader and content is Content.TENSORS:
                    self._lacks(
                        Lack.UNREAD, name, f"is not read: it is {described(name, file.head)}"
                    )
        counts = Counter(reader for *_, reader in recognised)
        for name, file, reader in recognised:
            self._take(name, file, reader, is_only=counts[reader] == 1)

    def files(self) -> Mapping[str, bool]:
        """Returns the result of `records.files_of`."""
        taken = set(self._place.files) - set(self._left.files)
        beside = {part.file for part in self.parts if part.file}
        unread = {lack.where for lack in self.missing}
        return {name: name not in self._unneeded for name in taken | beside | unread}

    def _places(self) -> Iterator[tuple[str, Place]]:
        """The remaining files."""
        for name in self._left.files:
            try:
                yield name, self._left.within(name)
            except UnreadableRun as error:
                self._lacks(Lack.UNREAD, name, f"is not read: {error}")

    def _take(self, name: str, file: Place, reader: str, *, is_only: bool) -> None:
        if not getattr(self._readers[reader], "HOLDS_TENSORS", True):
            return
        if alone := getattr(self._readers[reader], "ALONE", ""):
            self._lacks(Lack.UNREAD, name, f"is {alone}, and is not read as part of a folder: "
                        "compare it by itself")  # fmt: skip
            return
        try:
            run = opened(file, reader, self._readers[reader])
        except WhenceError as error:
            self._failed(error, [name])
            return
        prefix, step, rank = named_tensors.placed(name, is_only=is_only)
        self.parts.append(Part(run, reader, name, prefix, step, rank))

    def _failed(self, error: WhenceError, files: Sequence[str]) -> None:
        kind = Lack.UNREAD if isinstance(error, MissingDependency) else Lack.DAMAGED
        self.failures.append(error)
        if isinstance(error, NoTensor):
            return
        self.missing += [Missing(kind, name, not_read(name, error)) for name in files]

    def _lacks(self, kind: Lack, name: str, text: str) -> None:
        self.missing.append(
            Missing(kind, name, f"{name} {text}; take it away, or give --ignore {name!r}")
        )


def _files_of(run: Run) -> set[str]:
    """Returns the files that hold the elements of a run."""
    named = {r.elements.file for r in run.records if isinstance(r.elements, Dumped)}
    return named | {name.partition(",")[0] for name in named}


def _nothing_readable(run: Run) -> str:
    """Returns why nothing of a dump can be compared: none of its tensors can be read. "" where one
    can, or has figures, or where a dump of this kind has no elements.

    Reads tensors until one succeeds, in almost every dump the first.
    """
    if not len(run.calls) and not len(run.records):
        return f"no tensor in it can be read: {_first_of([m.text for m in missing_of(run)])}"
    reasons = []
    for record in run.records:
        if record.statistics is not None or record.hash:
            return ""
        if record.elements is None or not record.count:
            continue
        try:
            run.array(record.id)
        except ElementsMissing as error:
            reasons.append(str(error).removeprefix("cannot be read: "))
        else:
            return ""
    return f"not one of its tensors can be read: {_first_of(reasons)}" if reasons else ""


def _first_of(reasons: Sequence[str]) -> str:
    different = list(dict.fromkeys(reasons))
    return different[0] + (f" (and {len(different) - 1} more)" if different[1:] else "")


def _sniffed(reader: Reader, place: Place) -> bool:
    try:
        return reader.sniff(place)
    except UnreadableRun:
        raise
    except Exception:  # noqa: BLE001 - not even its first bytes make sense to this one
        return False
