"""status.json: how the writing of one process ended. It occupies 4 KB of real bytes from the start,
so that it can be rewritten on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import orjson

from whence import disk
from whence.store.folder import STATUS, load_json

STATUS_BYTES = 4096
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

ENDS = RUNNING, CLEAN, FAILED, RECOVERED = "running", "clean", "failed", "recovered"


class Ended(msgspec.Struct, frozen=True):
    """How the writing of one process ended. lines, journal: number of lines and `xxh3_128` of its
    journal at a clean end; -1 and "" where they are not stated.
    """

    ended: str
    error: str = ""
    lines: int = -1
    journal: str = ""


def write_status(folder: Path, status: Ended) -> None:
    """Overwrites the status in place (allocating nothing once it exists). Raises OSError."""
    fd = disk.system.open(folder / STATUS, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        disk.write_all(contextlib.nullcontext(fd), _padded(msgspec.structs.asdict(status)), 0)
    finally:
        os.close(fd)


def leave_status(folder: Path, status: Ended) -> None:
    """Calls `write_status` and ignores a failure: the medium's error has been reported already."""
    with contextlib.suppress(OSError):
        write_status(folder, status)


def read_status(folder: Path) -> Ended:
    """Returns one of `ENDS`, with the error; "running" when there is none or it is unreadable."""
    try:
        fields = load_json(folder / STATUS)
        status = msgspec.convert({"error": None, **fields}, Ended)
    except (OSError, ValueError, TypeError, msgspec.ValidationError):
        return Ended(RUNNING)
    return status if status.ended in ENDS else Ended(RUNNING)


def failure_text(where: Path, records: int, error: OSError) -> str:
    """Returns why a run cannot be continued after so many records, and what to do."""
    file = error.filename
    return (
        f"cannot write the run {where}: {error.strerror or error}"
        f"{f' ({file})' if file and str(file) != str(where) else ''}"
        + (f" after {records} records, which stay readable; " if records else "; ")
        + _advice(error)
    )


def _advice(error: OSError) -> str:
    if error.errno in NO_DESCRIPTOR:
        return "raise the limit of open files (ulimit -n)"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return "leave the folder as it is while the program runs"
    return "free some space, choose another output path, or keep less (keep: stats, max_bytes)"


def _padded(fields: dict[str, Any]) -> bytes:
    fields["error"] = fields["error"].encode("utf-8", "replace").decode()
    text = orjson.dumps(fields)
    while len(text) > STATUS_BYTES - 1:
        fields["error"] = fields["error"][: len(fields["error"]) * 3 // 4]
        text = orjson.dumps(fields)
    return text.ljust(STATUS_BYTES - 1) + b"\n"
