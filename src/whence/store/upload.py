"""Copies a run to an object store, while it is written or afterwards. The copy can be opened at any
moment: shards are uploaded before the journal that refers to them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from pathlib import Path

from whence.errors import OutputExists, StoreFailed
from whence.store.folder import INDEX, JOURNAL, PROCESS, RUN, STATUS, is_run, process_folders
from whence.store.remote import Failed, Place

EVERY_S = 1.0
_MOST_JOURNAL = 256 << 20  # above, the journal is uploaded at the end only
_SHARD = re.compile(r"shard-(\d{5,})\.(?:safetensors|packed)")
_LAST = (JOURNAL, INDEX, STATUS)


class Upload:
    """The upload of one run. Raises OutputExists where a run exists at the URL already (unless
    `force`), StoreFailed where the store cannot be reached.
    """

    def __init__(self, run: str | Path, url: str, *, force: bool = False) -> None:
        self.run, self.url = Path(run), url.rstrip("/")
        self._place = Place(url)
        self._done: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            is_there = self._place.exists(RUN)
            if is_there and not force:
                raise OutputExists(
                    f"{url} already holds a run; choose another URL or pass --force (in Python, "
                    "force=True) to replace it"
                )
            if is_there:
                self._place.delete()
        except Failed as error:
            raise StoreFailed(str(error)) from error

    def start(self) -> None:
        """Starts a thread that uploads complete files while the run is written."""
        self._thread = threading.Thread(target=self._regularly, name="whence-upload", daemon=True)
        self._thread.start()

    def finish(self) -> int:
        """Uploads the rest of a run that has ended, and returns how many of its files the store now
        has. Raises StoreFailed: the missing files are still in the local run.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._rest()
        except (Failed, OSError) as error:
            raise StoreFailed(
                f"the run is not whole at {self.url}: {error}; all of it is still at {self.run}: "
                f"whence upload {self.run} {self.url} --force"
            ) from error
        return len(self._done)

    def _regularly(self) -> None:
        while not self._stop.wait(EVERY_S):
            # Retried in the next round; `finish` reports the files still missing at the end.
            with contextlib.suppress(Failed, OSError):
                self._round()

    def _round(self) -> None:
        """Uploads the complete shards, and the journals as far as they refer to these."""
        for folder in sorted(process_folders(self.run)):
            shards = self._shards(folder)
            for number, file in shards[:-1]:
                if self._stop.is_set():
                    return
                if self._put(file):
                    self._head(folder)
                    self._journal_before(folder, number + 1)

    def _head(self, folder: Path) -> None:
        """Uploads the files that make a folder of the store a run."""
        self._put(self.run / RUN)
        for name in (PROCESS, STATUS):
            self._put(folder / name)

    def _journal_before(self, folder: Path, shard: int) -> None:
        file = folder / JOURNAL
        if file.stat().st_size > _MOST_JOURNAL:
            return
        text = file.read_bytes()
        first = text.find(b'"shard":%d,' % shard)
        end = text.rfind(b"\n", 0, first if first >= 0 else len(text)) + 1
        if end:
            self._place.write(self._name(file), text[:end])

    def _rest(self) -> None:
        """Uploads everything: shards, then the journals, then how it ended."""
        folders = sorted(process_folders(self.run))
        for folder in folders:
            for _, file in self._shards(folder):
                self._put(file)
        later = {folder / name for folder in folders for name in _LAST} | {self.run / RUN}
        for path, _, names in os.walk(self.run):
            for name in sorted(names):
                file = Path(path) / name
                if file not in later and not name.endswith(".tmp") and not file.is_symlink():
                    self._put(file)
        for folder in folders:
            for name in _LAST:
                if (folder / name).is_file():
                    self._put(folder / name, again=True)
        self._put(self.run / RUN, again=True)

    def _put(self, file: Path, *, again: bool = False) -> bool:
        """Uploads a file, unless that was done before; returns whether it did."""
        name = self._name(file)
        if name in self._done and not again:
            return False
        self._place.put(str(file), name)
        self._done.add(name)
        return True

    def _name(self, file: Path) -> str:
        return file.relative_to(self.run).as_posix()

    def _shards(self, folder: Path) -> list[tuple[int, Path]]:
        names = ((_SHARD.fullmatch(file.name), file) for file in folder.iterdir())
        return sorted((int(match[1]), file) for match, file in names if match is not None)


def delete_spool(run: Path) -> None:
    """Deletes the local folder of a run that was uploaded."""
    if is_run(run):
        shutil.rmtree(run, ignore_errors=True)
