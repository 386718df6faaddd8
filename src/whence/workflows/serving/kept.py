"""Results of stages of a check, kept on disk, so that a check which was stopped goes on. They count
only while the content of everything that the check read stays the same.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from whence import cache_folders, disk
from whence.workflows.serving.rows import Array

T = TypeVar("T")
_FOLDER = "serving"
_CONTENT = "content.json"
_MOST_CHECKS = 16
_LARGE = 64 << 20
"""Bytes from which a file is known by its size and its time. Weights are hashed as parameters."""
_OF_TERMINALS = ("COLUMNS", "LINES", "OLDPWD", "SHLVL", "TERM", "WINDOWID", "_")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


class _Stage(msgspec.Struct):
    """What a stage returned, as msgpack, and what it noted."""

    value: msgspec.Raw
    notes: list[str]


class _Content(msgspec.Struct):
    """Digests of what a check depends on, and of files by their path."""

    inputs: dict[str, str]
    files: dict[str, str]


class Kept:
    """Keeps results of stages; without a folder nothing outlasts this object.

    notes: of all stages so far; `result` adds those of a stage that it did not run. count: results
    that earlier commands left and this one used.
    """

    def __init__(
        self,
        folder: Path | None = None,
        content: _Content | None = None,
        reading: Reading | None = None,
    ) -> None:
        self._folder, self._content, self._reading = folder, content, reading
        self._arrays: dict[str, Array] = {}
        self.notes: list[str] = []
        self.count = 0

    def result(
        self,
        name: str,
        kind: type[T],
        compute: Callable[[], T],
        is_whole: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """What `compute` returns, or returned when it last ran on this content. is_whole: whether
        all is still there that belongs to a kept value.
        """
        if self._folder is None:
            return compute()
        file = self._folder / f"{name}.stage"
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            stage = msgspec.msgpack.decode(file.read_bytes(), type=_Stage)
            value = msgspec.msgpack.decode(stage.value, type=kind)
            if is_whole(value):
                self.notes += stage.notes
                self.count += 1
                return value
        before = len(self.notes)
        value = compute()
        if self._remembers_code():
            raw = msgspec.Raw(msgspec.msgpack.encode(value))
            self._write(file, msgspec.msgpack.encode(_Stage(raw, self.notes[before:])))
        return value

    def keep(self, name: str, array: Array) -> None:
        """Keep an array of float32 for `array`."""
        if self._folder is None:
            self._arrays[name] = array
        else:
            self._write(self._folder / f"{name}.array", array.tobytes())

    def array(self, name: str, width: int) -> Array:
        """An array of rows of this width that was kept."""
        if self._folder is None:
            return self._arrays[name]
        return np.fromfile(self._folder / f"{name}.array", np.float32).reshape(-1, width)

    def has(self, name: str) -> bool:
        """Whether a stage or an array of this name is kept."""
        kinds = ("stage", "array")
        return self._folder is not None and any(
            (self._folder / f"{name}.{kind}").exists() for kind in kinds
        )

    def forget(self, name: str) -> None:
        """Drop an array that no stage needs again."""
        self._arrays.pop(name, None)
        if self._folder is not None:
            (self._folder / f"{name}.array").unlink(missing_ok=True)

    def _remembers_code(self) -> bool:
        """Add the code and data that were read since; False where some of it changed meanwhile."""
        assert self._folder is not None
        if self._content is None or self._reading is None:
            return False
        if (files := self._reading.files()) is None:
            return False
        if files.keys() - self._content.files.keys():
            self._content.files |= files
            self._write(self._folder / _CONTENT, msgspec.json.encode(self._content))
        return True

    def _write(self, file: Path, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the check
            disk.write_file(file, data, mode=0o600)


def opened(
    question: object,
    inputs: Mapping[str, object],
    reading: Reading,
    *,
    fresh: bool,
    tell: Callable[[str], None],
) -> Kept:
    """Results that are kept of this question, as far as their content is what it is now.

    question: what makes it another check. inputs: by their name, what the results depend on beside
    files. reading: since before the code of both sides was imported, which it was. fresh: use none.
    """
    home = cache_folders.folder(_FOLDER)
    if home is None:
        return Kept()
    folder = home / digest(question)
    now = _Content({name: digest(value) for name, value in inputs.items()}, {})
    kept = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = msgspec.json.decode((folder / _CONTENT).read_bytes(), type=_Content)
    reason = "" if kept is None else "--fresh" if fresh else _change(kept, now)
    if reason:
        tell(f"kept results are not used: {reason}")
    if kept is None or reason:
        shutil.rmtree(folder, ignore_errors=True)
    elif age := _age(folder):
        tell(f"going on with what was kept {age} of the same code, models and prompts")
    _tidy(home, folder)
    if not cache_folders.private(folder):
        return Kept()
    return Kept(folder, now if kept is None or reason else kept, reading)


def environment() -> dict[str, str]:
    """The environment variables, without those of the terminal."""
    return {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS}


def digest(value: object) -> str:
    """Digest of a value that msgpack can hold."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


def _change(kept: _Content, now: _Content) -> str:
    """What of the content is another now, "" for nothing."""
    for name, value in now.inputs.items():
        if kept.inputs.get(name) != value:
            return f"{name} changed"
    for path, value in kept.files.items():
        if _of_file(path) != value:
            return f"{path} changed"
    new = _modules() - kept.files.keys()
    return f"{min(new)} is new" if new else ""


def _age(folder: Path) -> str:
    from whence.report.tables import ago

    times = [file.stat().st_mtime for file in folder.glob("*.stage")]
    return ago(time.time() - max(times)) if times else ""


def _tidy(home: Path, own: Path) -> None:
    """Delete the oldest checks, and arrays of all that were not finished but this."""
    with contextlib.suppress(OSError):
        aged = sorted(home.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in aged[_MOST_CHECKS:]:
            shutil.rmtree(folder, ignore_errors=True)
        for folder in set(aged) - {own}:
            for array in folder.glob("*.array"):
                array.unlink()


# What this process read: code that it imported or mapped, and files that it opened.

_opened: set[str] = set()
_written: set[str] = set()
_is_listening = False


class Reading:
    """Digests of the files that this process reads from now on, and of the code it has."""

    def __init__(self) -> None:
        global _is_listening
        if not _is_listening:
            sys.addaudithook(_notice)
            _is_listening = True
        self._since = time.time_ns()
        self._digests: dict[str, str] = {}

    def files(self) -> dict[str, str] | None:
        """Digests by path; None where a file changed after it may have been read."""
        for path in (_modules() | set(_mapped()) | set(_opened)) - self._digests.keys() - _written:
            if path.startswith(_SYSTEM) or path.endswith(".pyc") or not Path(path).is_file():
                continue  # the source of compiled code counts
            if Path(path).stat().st_mtime_ns > self._since:
                return None
            self._digests[path] = _of_file(path)
        return self._digests


def _notice(event: str, args: tuple[Any, ...]) -> None:
    """Note a file that this process opens, or writes under another name."""
    if event == "os.rename":
        _written.add(os.path.realpath(os.fsdecode(args[1])))
    if event != "open" or not isinstance(args[0], str | bytes | os.PathLike):
        return
    path = os.path.realpath(os.fsdecode(args[0]))
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    (_written if is_written else _opened).add(path)


def _modules() -> set[str]:
    """Files of the modules that are imported."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {os.path.realpath(file) for file in files if file and not file.endswith(".pyc")}
    return {path for path in paths if Path(path).is_file()}


def _mapped() -> Iterator[str]:
    """Files that are mapped into memory, such as libraries that no module names."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            _, slash, path = line.partition("/")
            if slash:
                yield slash + path


def _of_file(path: str) -> str:
    """Digest of a file, "" where there is none."""
    try:
        about = Path(path).stat()
        if about.st_size > _LARGE:
            return f"{about.st_size} {about.st_mtime_ns}"
        return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
    except OSError:
        return ""
