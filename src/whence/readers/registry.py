"""Which readers there are, and which of them opens a path."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from whence.errors import ElementsMissing, MissingDependency, UnreadableRun, WhenceError
from whence.readers.source import Place
from whence.records import Run
from whence.records.views import ForeignRun

FOLDER = Path(__file__).parent / "formats"
GROUP = "whence.readers"


class Reader(Protocol):
    """What a reader's module holds."""

    LOOKS_LIKE: str
    ORDER: int

    def sniff(self, place: Place) -> bool: ...
    def open_run(self, place: Place) -> Run: ...


@functools.cache
def known() -> dict[str, Reader]:
    """Readers by name: the files of `formats/`, then those of other packages; who is to be asked
    first stands first.

    Raises WhenceError when another package's reader cannot be loaded or lacks something.
    """
    readers: dict[str, Reader] = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        readers[path.stem] = importlib.import_module(f"whence.readers.formats.{path.stem}")
    for point in entry_points(group=GROUP):
        if point.name in readers:
            raise WhenceError(
                f"{point.value} calls its reader {point.name!r}, which whence has itself; "
                "another name is needed"
            )
        try:
            loaded = point.load()
        except Exception as error:  # someone else's package: named, whatever it raises
            raise WhenceError(
                f"reader {point.name} comes from {point.value} and cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        lacks = [
            name
            for name in ("LOOKS_LIKE", "ORDER", "sniff", "open_run")
            if not hasattr(loaded, name)
        ]
        if lacks:
            raise WhenceError(f"reader {point.name} from {point.value} has no {', '.join(lacks)}")
        readers[point.name] = loaded
    return dict(sorted(readers.items(), key=lambda item: item[1].ORDER))


def open_run(path: str | os.PathLike[str]) -> ForeignRun:
    """Open a foreign dump with the first reader that recognises it.

    Raises UnreadableRun: nothing there, recognised but broken (with the reader's words), or
    recognised by none (with all that were asked); MissingDependency when the reader that recognises
    it needs a package.
    """
    place = Place(path)
    for name, reader in known().items():
        if not _sniffed(reader, place):
            continue
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
        if problem := _nothing_readable(run):
            raise UnreadableRun(
                f"{place.path} looks like {name} ({reader.LOOKS_LIKE}), but {problem}; "
                "copy or dump it again"
            )
        return ForeignRun(run, name)
    if not place.is_folder and not place.size:
        raise UnreadableRun(
            f"{place.path} is empty: it was cut off or never written; copy or dump it again"
        )
    recognised = "\n".join(f"  {name}: {reader.LOOKS_LIKE}" for name, reader in known().items())
    content = f"{'a folder with ' + _first(place) if place.is_folder else f'a file of {place.size} bytes'}"  # noqa: E501
    raise UnreadableRun(
        f"no reader could open {place.path}: {content}. What is recognised:\n  a whence run: "
        f"run.json\n{recognised}"
    )


def _nothing_readable(run: Run) -> str:
    """Why nothing of a dump can be compared: it holds no tensor, or not one of its tensors can be
    read; "" where one can, or has figures, or where a dump of this kind has no elements.

    Reads tensors until one is read, so one in almost every dump.
    """
    if not len(run.calls) and not len(run.records):
        errors = [note.text for note in run.notes if note.kind == "error"]
        return (
            f"no tensor in it can be read: {_first_of(errors)}"
            if errors
            else ("there is no tensor in it")
        )
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


def _first(place: Place) -> str:
    names = place.names
    if not names:
        return "nothing in it"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
