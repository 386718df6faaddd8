"""Reads HDF5 files in a separate process: libhdf5 crashes on some damaged files and takes gigabytes
of memory for others.

`hdf5_worker` is that process; it starts with the first file of a reader and ends with the reader.
Its memory and CPU time are limited. If it dies, the object that it was reading is skipped and a new
process continues after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whence import extras
from whence.errors import ElementsMissing, MissingDependency, UnreadableRun
from whence.readers.encodings import hdf5_worker
from whence.readers.encodings.archive import Bytes

_DEATHS = 8  # of the process over one file, until the file is given up
_MESSAGE_BYTES = 16 << 20
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_FAREWELL_S = 5.0


class Worker:
    """One process for the files of one dump. Raises MissingDependency without h5py. Thread-safe."""

    def __init__(self) -> None:
        if importlib.util.find_spec("h5py") is None:
            raise MissingDependency(f"h5py is needed to read it: {extras.install('h5py')}")
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], int], Worker] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def index(self, file: Path) -> list[dict[str, Any]]:
        """Returns the content of the file as messages of `hdf5_worker`. An object that crashes
        libhdf5 is "damaged". Raises UnreadableRun.
        """
        deadly: dict[str, str] = {}
        while True:
            messages: list[dict[str, Any]] = []
            place = ""
            try:
                for message in self._ask({"do": "index", "file": str(file), "skip": list(deadly)}):
                    if "at" in message:
                        place = message["at"]
                    else:
                        messages.append(message)
            except _Died as death:
                if not place or place in deadly or len(deadly) >= _DEATHS or death.is_final:
                    raise UnreadableRun(f"{death}{f', at {place}' if place else ''}") from death
                deadly[place] = str(death)
                continue
            return [
                {**message, "why": deadly.get(message["damaged"], message["why"])}
                if "damaged" in message
                else message
                for message in messages
            ]

    def read(self, file: Path, name: str, nbytes: int) -> Bytes:
        """Returns the elements of a dataset as `nbytes` bytes in C order. Raises
        ElementsMissing.
        """
        data = np.empty(nbytes, np.uint8)
        filled = 0
        try:
            for piece in self._ask({"do": "read", "file": str(file), "name": name}, data):
                filled += piece["nbytes"]
        except (_Died, UnreadableRun) as error:
            raise ElementsMissing(f"cannot be read: {error}") from error
        if filled != nbytes:
            raise ElementsMissing(f"has {filled} bytes, {nbytes} were expected")
        return data

    def _ask(self, request: dict[str, Any], data: Bytes | None = None) -> Iterator[dict[str, Any]]:
        """Returns the JSON frames of the answer; elements go into `data`. Raises _Died,
        UnreadableRun for an error in words.
        """
        with self._lock:
            process = self._started()
            whole = False
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
                process.stdin.flush()
                yield from _frames(process, data.data if data is not None else memoryview(b""))
                whole = True
            except BrokenPipeError as error:
                raise _Died(process) from error
            except UnreadableRun:
                whole = True
                raise
            finally:
                if not whole:  # what comes next from it would belong to this request
                    self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._pid == os.getpid():
            return self._process
        if not sys.executable:
            raise UnreadableRun(
                "HDF5 files are read by a Python process, and sys.executable does not name one"
            )
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "HDF5_"))
        }
        # Neither filter plug-ins that the file names nor threads that reserve memory.
        environment |= {
            "HDF5_PLUGIN_PRELOAD": "::",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", hdf5_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._process, self._pid = process, os.getpid()
        self._end = weakref.finalize(self, _ended, process, self._pid)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            fcntl.fcntl(process.stdout.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
        with contextlib.suppress(BrokenPipeError):
            path = [str(Path(folder).resolve()) for folder in sys.path]
            process.stdin.write(json.dumps({"path": path}).encode("ascii") + b"\n")
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


class _Died(Exception):
    """The process ended in the middle of an answer. is_final: a retry would take as long again."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        _ended(process, os.getpid(), kill=False)
        code = process.returncode
        signals = {each.value: each.name for each in signal.Signals}
        self.is_final = code == -signal.SIGXCPU
        super().__init__(
            "libhdf5 does not come to an end with it"
            if self.is_final
            else f"libhdf5 ended with {signals.get(-code, f'code {code}')}"
        )


def _ended(process: subprocess.Popen[bytes], pid: int, *, kill: bool = True) -> None:
    """Closes the pipes and waits for the process to end. In a forked child it does nothing, since
    the process belongs to the parent.
    """
    if pid != os.getpid():
        return
    if kill:
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _frames(process: subprocess.Popen[bytes], data: memoryview) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    stream, filled = process.stdout, 0
    while True:
        head = stream.read(9)
        if len(head) < 9:
            raise _Died(process)
        letter, nbytes = struct.unpack("<cQ", head)
        if letter == b"D":
            if filled + nbytes > len(data):
                raise _Died(process)
            if stream.readinto(data[filled : filled + nbytes]) != nbytes:  # type: ignore[attr-defined]
                raise _Died(process)
            filled += nbytes
            yield {"nbytes": nbytes}
            continue
        payload = stream.read(nbytes) if nbytes <= _MESSAGE_BYTES else b""
        if len(payload) != nbytes:
            raise _Died(process)
        if letter == b"F":
            return
        if letter == b"E":
            raise UnreadableRun(payload.decode("utf-8", "replace"))
        yield json.loads(payload)
