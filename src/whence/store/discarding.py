"""Deletes a run in which nothing was captured, so that it does not block the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from whence.errors import WhenceError
from whence.store import journal
from whence.store.folder import JOURNAL, RUN, delete_run, is_run, load_process, process_folders
from whence.store.process_reader import ProcessReader
from whence.store.recovering import is_written
from whence.store.status import FAILED, RUNNING, read_status


def discard(path: str | Path, *, also: Collection[str] = (), folder: bool = True) -> bool:
    """Deletes the run at `path` if it holds no tensor; returns whether it was deleted.

    The run stays when a process still writes it, when a part of it cannot be read, and when the
    folder holds anything else. also: names of files and empty folders that belong to the run.
    folder: delete the emptied folder too.
    """
    run = Path(path)
    try:
        if not is_run(run) or is_written(run) or _holds_tensors(run):
            return False
        processes = {place.name for place in process_folders(run)}
        others = [
            place
            for place in run.iterdir()
            if place.name not in {RUN, *processes} and not place.match(f"{RUN}.*.tmp")
        ]
        if any(place.name not in also or _is_filled(place) for place in others):
            return False
        for place in others:
            if place.is_dir():
                place.rmdir()
            else:
                place.unlink()
        delete_run(run)
    except (WhenceError, OSError):
        return False
    if folder:
        with contextlib.suppress(OSError):
            run.rmdir()
    return True


def reasons(path: str | Path) -> list[str]:
    """Returns why the processes of a run captured nothing, in their own words."""
    found = []
    with contextlib.suppress(WhenceError, OSError):
        for folder in process_folders(Path(path)):
            status = read_status(folder)
            if status.ended == FAILED and status.error:
                found.append(status.error)
            if status.ended == RUNNING:
                found.append(
                    "a process still runs, or ended without a word (os._exit, SIGKILL), before the "
                    "first call that it began was complete"
                )
            if (folder / JOURNAL).exists():
                process = ProcessReader(folder, load_process(folder))
                notes = process.decode(journal.NOTE, journal.decode_note)
                found += [note.text for note in notes if note.kind in ("error", "selection")]
    return list(dict.fromkeys(found))


def _holds_tensors(run: Path) -> bool:
    """Whether a run holds tensors. Raises UnreadableRun where a process folder does not tell."""
    for folder in process_folders(run):
        if (folder / JOURNAL).exists():
            process = ProcessReader(folder, load_process(folder))
            if process.records or process.index.damage is not None:
                return True
    return False


def _is_filled(place: Path) -> bool:
    return place.is_dir() and any(place.iterdir())
