"""Comparisons in object stores: they are written locally and then uploaded, and read from there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from whence.errors import OutputExists, StoreFailed, UnreadableRun
from whence.store.folder import RUN
from whence.store.remote import Absent, Failed, Place
from whence.workflows.upload import spool_folder

REPORT = "report.json"


def check_output_at(url: str, *, force: bool) -> None:
    """Raise OutputExists when a comparison or a run is at the URL, StoreFailed when the store
    cannot be reached.
    """
    place = Place(url)
    try:
        if place.exists(RUN):
            raise OutputExists(f"{url} holds a run; choose another -o")
        if not force and place.exists(REPORT):
            raise OutputExists(
                f"{url} already holds a comparison; --force replaces it, or choose another -o"
            )
    except Failed as error:
        raise StoreFailed(str(error)) from error


def write_at(url: str, write_files: Callable[[Path], None]) -> None:
    """Write the files of a comparison into a local folder and upload them, `report.json` last.

    The folder is deleted after a complete upload. Raises StoreFailed, which names the folder.
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


def holds_comparison(url: str) -> bool:
    """Whether a comparison lies at a URL, or the URL is that of its `report.json`. Raises
    UnreadableRun where the store does not answer.
    """
    place, file = _report(url)
    try:
        return place.exists(file)
    except Failed as error:
        raise UnreadableRun(str(error)) from error


@contextmanager
def report_here(url: str) -> Iterator[Path]:
    """A copy of the `report.json` of a comparison at a URL, in a temporary folder that is deleted
    with the context. Raises UnreadableRun.
    """
    place, file = _report(url)
    with tempfile.TemporaryDirectory(prefix="whence-remote-") as folder:
        copy = Path(folder) / REPORT
        try:
            place.fetch(file, copy, place.size(file))
        except Absent as error:
            raise UnreadableRun(_no_comparison(url)) from error
        except Failed as error:
            raise UnreadableRun(str(error)) from error
        yield copy


def _no_comparison(url: str) -> str:
    """The error text for a URL without a comparison, and what to do."""
    if url.endswith(".json"):
        return (
            f"no comparison at {url}: there is no such file; give the URL that whence compare -o "
            "was given, or that of its report.json"
        )
    try:
        if Place(url).exists(RUN):
            return (
                f"{url} is a run, not a comparison; compare it with another run: whence compare "
                f"{url} TGT -o CMP"
            )
    except Failed:  # then nothing is known of it
        pass
    return (
        f"no comparison at {url}: it has no {REPORT}, which whence compare REF TGT -o {url} writes"
    )


def _report(url: str) -> tuple[Place, str]:
    folder, _, name = url.rstrip("/").rpartition("/")
    return (Place(folder), name) if name.endswith(".json") else (Place(url), REPORT)
