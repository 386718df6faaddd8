"""Runs as files of other tools: one file a format, streamed a tensor at a time, bitwise.

A writer is a file `writers/NAME.py` (or a module behind an entry point of the group
`whence.writers`) with

    def write(run: Run, destination: Path, *, tell: Tell = silent) -> Written

which fills `destination` (that is not there yet) and says what the format could not hold. Names of
a run are untrusted: none becomes a path as it is. `parts` holds what several formats share.

Which writers there are (`known`, `named`) is found here.
"""

import functools
import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from whence.errors import UsageError, WhenceError
from whence.records import Run
from whence.writers.support.job import Tell, Writing, Written, moved, silent

__all__ = ["Tell", "Writer", "Writing", "Written", "known", "moved", "named", "silent"]

_FOLDER = Path(__file__).parent / "formats"
_GROUP = "whence.writers"


class Writer(Protocol):
    """What a writer's module holds."""

    def write(self, run: Run, destination: Path, *, tell: Tell = ...) -> Written: ...


@functools.cache
def known() -> tuple[str, ...]:
    """The formats there are: the files of `formats/`, then those of other packages."""
    builtin = {path.stem for path in _FOLDER.glob("[!_]*.py")}
    return (*sorted(builtin), *sorted(set(_added()) - builtin))


def named(name: str) -> Writer:
    """The writer of a format. Raises UsageError when there is none, WhenceError when another
    package's cannot be loaded.
    """
    if name not in known():
        raise UsageError(f"no writer for {name!r}; there are {', '.join(known())}")
    point = _added().get(name)
    if point is None or (_FOLDER / f"{name}.py").is_file():
        writer: Writer = importlib.import_module(f"whence.writers.formats.{name}")
        return writer
    try:
        loaded: Writer = point.load()
    except Exception as error:  # someone else's package: named, whatever it raises
        raise WhenceError(
            f"writer {name} comes from {point.value} and cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not hasattr(loaded, "write"):
        raise WhenceError(f"writer {name} from {point.value} has no write")
    return loaded


@functools.cache
def _added() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=_GROUP)}
