"""Finished tasks, kept in a file as they finish: a comparison that was killed or stopped goes on
where it was.

The first line says what the comparison is of; every further one holds a task's key, the digest of
its result and the result. The file comes with the first finished task. Lines are only appended. A
last line that was cut off is dropped.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from whence.engines.task import Engine, Outcome, Task
from whence.errors import StoreFailed, UsageError


class _Head(msgspec.Struct, tag="comparison", tag_field="t"):
    about: dict[str, str]


class _Done(msgspec.Struct, tag="task", tag_field="t"):
    key: str
    digest: str
    result: bytes


class Journal:
    """The file of a comparison's finished tasks.

    about: what the comparison is of, in words by name. resume: take up what the file holds; raises
    UsageError where that is of something else, with what differs. Raises StoreFailed where the file
    cannot be read.
    """

    def __init__(self, path: Path, about: Mapping[str, str], *, resume: bool) -> None:
        self.path, self._about = path, dict(about)
        self._places: dict[str, tuple[int, int]] = {}
        self._file: BinaryIO | None = None
        self._end = 0
        try:
            if resume and path.exists():
                self._end = self._read(about)
        except OSError as error:
            raise StoreFailed(
                f"cannot read the finished tasks in {path}: {error.strerror}"
            ) from error

    def _read(self, about: Mapping[str, str]) -> int:
        """Find the tasks in the file; gives where its last whole line ends, 0 for none."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                try:
                    entry = msgspec.json.decode(line, type=_Head | _Done)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break  # cut off, or damaged: what follows is done again
                if isinstance(entry, _Head) == bool(number) or not line.endswith(b"\n"):
                    break
                if isinstance(entry, _Head):
                    _check(entry.about, about, self.path)
                elif _digest(entry.result) != entry.digest:
                    break
                else:
                    self._places[entry.key] = end, len(line)
                end += len(line)
        return end

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def result(self, key: str) -> bytes:
        """What a task gave."""
        start, nbytes = self._places[key]
        with self.path.open("rb") as file:
            file.seek(start)
            return msgspec.json.decode(file.read(nbytes), type=_Done).result

    def add(self, key: str, result: bytes) -> None:
        """Keep what a task gave. Raises StoreFailed."""
        try:
            self._append(msgspec.json.encode(_Done(key, _digest(result), result)) + b"\n")
        except OSError as error:
            raise StoreFailed(
                f"cannot keep a finished task in {self.path}: {error.strerror}; make room, then go "
                "on with --resume"
            ) from error

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+b" if self._end else "wb")
            self._file.truncate(self._end)
            self._file.seek(self._end)
            if not self._end:
                self._file.write(msgspec.json.encode(_Head(self._about)) + b"\n")
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """The comparison is done, and the file is not needed any more."""
        self.close()
        self.path.unlink(missing_ok=True)


class Kept:
    """An engine whose finished tasks are kept, and not done again. has_failed: a task gave an
    error, and may be tried again later.
    """

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self.has_failed = False

    def run(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """What came of each task: of those that were done before at once."""
        keys = {task.number: task.key for task in tasks}
        todo = []
        for task in tasks:
            if keys[task.number] in self._journal:
                yield Outcome(task.number, self._journal.result(keys[task.number]))
            else:
                todo.append(task)
        for outcome in self._engine.run(todo):
            if outcome.error:
                self.has_failed = True
            else:
                self._journal.add(keys[outcome.number], outcome.result)
            yield outcome

    def close(self) -> None:
        """End all workers, and close the file."""
        self._engine.close()
        self._journal.close()


def _digest(result: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(result)


def _check(kept: Mapping[str, str], about: Mapping[str, str], path: Path) -> None:
    names = [name for name in {**about, **kept} if kept.get(name) != about.get(name)]
    if names:
        lines = "".join(
            f"\n  {name}: {kept.get(name, 'nothing')} then, {about.get(name, 'nothing')} now"
            for name in names
        )
        raise UsageError(
            f"cannot resume: {path} holds tasks of another comparison{lines}\n  compare as then, "
            "or start anew with --force"
        )
