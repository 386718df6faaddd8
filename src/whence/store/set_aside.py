"""Keeps a run that another one replaces until the new one holds something."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

from whence.errors import StoreFailed
from whence.store.folder import RUN, is_run, process_folders


class SetAside:
    """The files of the run at `path`, moved to the folder PATH.replaced. also: names of further
    files that belong to the run. Raises StoreFailed, and leaves the run at its place.

    Nothing is moved without `force`, where there is no run, or where something else lies beside it.
    A killed process leaves PATH.replaced, which is a run; an existing one stays, and the run at
    `path`, which began after it, is then not moved.
    """

    def __init__(self, path: str | Path, *, also: Collection[str] = (), force: bool = True) -> None:
        self._run = Path(path)
        self._place = self._run.with_name(f"{self._run.name}.replaced")
        self._names: list[str] = []
        if not force or not is_run(self._run) or self._run.is_symlink() or self._place.exists():
            return
        own = {RUN, *also, *(folder.name for folder in process_folders(self._run))}
        names = [entry.name for entry in self._run.iterdir()]
        if not own.issuperset(names):
            return
        try:
            self._place.mkdir(mode=0o700)
            for name in names:
                (self._run / name).rename(self._place / name)
                self._names.append(name)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._move_back()
            raise StoreFailed(
                f"cannot move the run {self._run} to {self._place}: {error.strerror or error}; "
                "choose another output path"
            ) from error

    def keep(self, *, in_its_place: bool) -> str:
        """Keeps the old run. in_its_place: move it back if possible, instead of leaving it in
        PATH.replaced. Returns its folder, "" where there is no run.
        """
        if not self._names:
            return ""
        folder = self._place
        if in_its_place:
            with contextlib.suppress(OSError):
                self._move_back()
                folder = self._run
        self._names = []
        return str(folder)

    def _move_back(self) -> None:
        self._run.mkdir(mode=0o700, exist_ok=True)
        for name in self._names:
            (self._place / name).rename(self._run / name)
        self._place.rmdir()

    def delete(self) -> None:
        """Deletes the old run, as far as possible, unless it is kept."""
        if self._names:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._place)
