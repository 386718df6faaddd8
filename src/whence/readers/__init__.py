"""Foreign dumps as a Run: one file a format, found by content, lazy, pure Python, never executing
anything in a dump.

A reader is a file `readers/NAME.py` (or a module behind an entry point of the group
`whence.readers`) with

    LOOKS_LIKE = "a folder with dump.json"           what it recognises, in words, for error messages
    ORDER = 50                                       whom to ask first: 10 for marks nobody else has, 90 for what could be anything's
    def sniff(place: Place) -> bool                  cheap and silent: names and first bytes only
    def open_run(place: Place) -> Run                lazy: the index now, elements when asked; UnreadableRun says what is wrong

`Building` puts calls and records together; `parts` holds what several formats share.

Which readers there are (`known`), and which of them opens a path (`open_run`), is found here.
"""  # noqa: E501

import functools
import importlib
import os
from pathlib import Path
from types import MappingProxyType

from whence.display import listed
from whence.errors import UnreadableRun, WhenceError
from whence.readers.assembly.builder import LOGGED, Building
from whence.readers.encodings.raw_form import Forms
from whence.readers.source import Place, Reader
from whence.readers.unread import described, may_hold
from whence.records.marks import GATHERED, ONEDNN, TAKES, UNORDERED, UNTOLD, WIDER
from whence.records.views import ForeignRun

__all__ = [
    "GATHERED", "LOGGED", "ONEDNN", "TAKES", "UNORDERED", "UNTOLD", "WIDER", "Building",
    "ForeignRun", "Place", "Reader", "known", "open_run",
]  # fmt: skip

_FOLDER = Path(__file__).parent / "formats"
_GROUP = "whence.readers"


@functools.cache
def known() -> dict[str, Reader]:
    """Returns readers by name: the files of `formats/`, then those of other packages, in the order
    in which they are asked.

    Raises WhenceError when another package's reader cannot be loaded or is incomplete.
    """
    from importlib.metadata import entry_points

    readers: dict[str, Reader] = {}
    for path in sorted(_FOLDER.glob("[!_]*.py")):
        readers[path.stem] = importlib.import_module(f"whence.readers.formats.{path.stem}")
    for point in entry_points(group=_GROUP):
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


def open_run(path: str | os.PathLike[str], forms: Forms = MappingProxyType({})) -> ForeignRun:
    """Opens a foreign dump with the first reader that recognises it; a folder with all readers that
    recognise something in it. forms: dtypes and shapes of raw bytes in it.

    Raises UnreadableRun when the path does not exist, is recognised but damaged (with the reader's
    reason), or is recognised by no reader (with a description of the path); MissingDependency when
    the reader that recognises it needs a package.
    """
    from whence.readers import folder

    place = Place(path, forms=forms)
    if place.is_folder:
        run, name = folder.open_folder(place, known())
    else:
        name = folder.recognising(place, known())
        run = folder.opened(place, name, known()[name]) if name else None
    if run is not None:
        return ForeignRun(run, name)
    if not place.is_folder and not place.size:
        raise UnreadableRun(
            f"{place.path} is empty: it was cut off or never written; copy or dump it again"
        )
    raise UnreadableRun(f"no reader could open {place.path}: {_described(place)}{_MORE}")


_MORE = " (docs/formats.md says what is read)"


def _described(place: Place) -> str:
    """Describes a path that no reader opens, in one sentence that says what to do."""
    if not place.is_folder:
        return f"it is {described(place.path.name, place.head)}"
    if not place.files:
        return "it is a folder with nothing in it; give the folder that the dump was written to"
    held = [name for name in place.files if may_hold(name)] or list(place.files)
    largest = max(held, key=lambda name: (place.path / name).stat().st_size)
    return (
        f"it is a folder with {listed(place.names, 5)}; {largest} is "
        f"{described(largest, place.within(largest).head)}"
    )
