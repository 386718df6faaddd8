"""Comparisons in object stores: written here first and then uploaded, and read from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from whence.errors import OutputExists, StoreFailed, UnreadableRun
from whence.store.remote import Absent, Failed, Place
from whence.workflows.upload import spool_folder

REPORT = "report.json"


def check_output_at(url: str, *, force: bool, resume: bool) -> None:
    """Raise OutputExists where a comparison or a run lies at the URL, StoreFailed where the store
    cannot be reached.
    """
    if resume:
        raise StoreFailed(
            f"--resume needs what was left in a folder of this machine, and {url} is a URL: choose "
            "a folder, and copy it there when it is done"
        )
    place = Place(url)
    try:
        if place.exists("run.json"):
            raise OutputExists(f"{url} holds a run; choose another -o")
        if not force and place.exists(REPORT):
            raise OutputExists(
                f"{url} already holds a comparison; --force replaces it, or choose another -o"
            )
    except Failed as error:
        raise StoreFailed(str(error)) from error


def write_at(url: str, write_files: Callable[[Path], None]) -> None:
    """Write the files of a comparison into a folder of this machine and upload them, `report.json`
    last. The folder is deleted when all of it is there. Raises StoreFailed, which names it.
    """
    spool = spool_folder(url)
    shutil.rmtree(spool, ignore_errors=True)
    write_files(spool)
    place = Place(url)
    try:
        for file in sorted(spool.iterdir(), key=lambda file: (file.name == REPORT, file.name)):
            place.put(str(file), file.name)
    except Failed as error:
        raise StoreFailed(
            f"the comparison is not whole at {url}: {error}; all of it is at {spool}: take that "
            "folder, or compare again when the store answers"
        ) from error
    shutil.rmtree(spool, ignore_errors=True)


def report_at(url: str) -> bytes:
    """The `report.json` of a comparison at a URL, or the file that the URL names. Raises
    UnreadableRun.
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    place, file = (Place(folder), name) if name.endswith(".json") else (Place(url), REPORT)
    try:
        return place.read(file)
    except Absent as error:
        raise UnreadableRun(
            f"no comparison at {url}: it has no {REPORT}, which whence compare REF TGT -o {url} "
            "writes"
        ) from error
    except Failed as error:
        raise UnreadableRun(str(error)) from error
