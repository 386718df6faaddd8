"""The last comparison made in a folder, kept in the user's cache folder for commands that are
called without one.

Each working folder has one file, named by a digest of its path and replaced atomically. The newest
32 are kept, for 30 days at most. A file contains the report, or the path to which it was written
when the user named a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from pathlib import Path

from whence import disk
from whence.errors import UnreadableRun
from whence.results import Comparison

_FOLDER = "comparisons"
_MOST_FILES = 32
_MOST_SECONDS = 30 * 86_400
_MOST_ROWS = 1_000_000  # of a comparison that is kept without being asked to: some 300 MB


def _place(output: str | os.PathLike[str]) -> str:
    """Absolute location of a comparison, which is valid from any working folder."""
    from whence.store import is_url

    return os.fspath(output) if is_url(output) else str(Path(output).resolve())


def keep_latest(result: Comparison, output: str | os.PathLike[str] | None = None) -> str:
    """Keep a comparison as the last one of the working folder. output: where it was written to.
    Returns "", or why it was not kept.
    """
    import orjson

    from whence import cache_folders
    from whence.report.files import everything_json

    folder = cache_folders.folder(_FOLDER)
    if folder is None:
        return "no cache folder can be written"
    head = orjson.dumps(
        {
            "folder": _place(output) if output is not None else None,
            "reference": result.reference,
            "target": result.target,
            "why": (why := _too_large(result) if output is None else ""),
        }
    )
    body = () if output is not None or why else everything_json(result)
    try:
        # encoded part by part: a large report as a whole would take as much memory as its file
        disk.write_file(folder / _name(), itertools.chain((head + b"\n",), body), mode=0o600)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    _tidy(folder)
    return why


def _too_large(result: Comparison) -> str:
    """The reason why a comparison is not kept; "" when it is kept."""
    rows = len(result.rows)
    if rows <= _MOST_ROWS:
        return ""
    return f"it has {f'{rows:,}'.replace(',', ' ')} rows, too many to keep unasked"


def latest() -> tuple[Comparison | str, str]:
    """(the last comparison made in the working folder, or the folder it was written to; what it is,
    in words). Raises UnreadableRun.
    """
    import msgspec
    import orjson

    from whence.report.tables import ago

    file = _file()
    if file is None:
        raise UnreadableRun(
            "no comparison was made in this folder yet: whence compare REF TGT makes one, or "
            "name one that was written with -o"
        )
    try:
        head, _, body = file.read_bytes().partition(b"\n")
        said = orjson.loads(head)
        folder = said["folder"]
        age = ago(time.time() - file.stat().st_mtime)
        if folder is not None:
            return folder, f"{folder}, made {age}"
        if said.get("why"):
            raise UnreadableRun(
                f"the last comparison of this folder, made {age}, was not kept: {said['why']}; "
                f"keep it: whence compare {said['reference']} {said['target']} -o CMP"
            )
        result = msgspec.json.decode(body, type=Comparison)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableRun(
            f"the last comparison ({file}) cannot be read: {error}; compare again"
        ) from error
    return result, f"{result.reference} against {result.target}, made {age}"


def _file() -> Path | None:
    from whence import cache_folders

    name = _name()
    places = [
        home / _FOLDER / name
        for home in cache_folders.homes()
        if cache_folders.private(home / _FOLDER)
    ]
    return next((place for place in places if place.is_file()), None)


def _name() -> str:
    try:
        folder = os.getcwd()  # noqa: PTH109 - the digest is of its bytes
    except OSError:  # the folder is gone
        folder = ""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:32] + ".json"


def _tidy(folder: Path) -> None:
    """Delete old comparisons, those beyond the newest few, and what a killed process left."""
    now, aged = time.time(), []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                aged.append((now - entry.stat(follow_symlinks=False).st_mtime, entry.path))
    finished = 0
    for age, path in sorted(aged):
        is_unfinished = path.endswith(".tmp")
        finished += not is_unfinished
        if age > (3600 if is_unfinished else _MOST_SECONDS) or (
            not is_unfinished and finished > _MOST_FILES
        ):
            with contextlib.suppress(OSError):
                Path(path).unlink()
