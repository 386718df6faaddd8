"""A disk that fails at its n-th write, open, rename ... It stands in for `whence.disk.system`."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple, NoReturn

from whence import disk

KINDS = ("write", "append", "open", "sync", "rename", "map", "cut", "make_folder", "reserve")

# What may go wrong: once, or from then on (for good).
FAULTS = {
    "short write": ("write", "append"),
    "EINTR once": ("write",),
    "EIO once": ("write",),
    "ENOSPC for good": ("write", "append", "open", "make_folder", "reserve"),
    "EIO for good": KINDS,
    "EROFS for good": ("write", "append", "open", "rename", "cut", "make_folder", "reserve"),
    "kill before": KINDS,
    "kill halfway": ("write", "append"),
    "kill after": KINDS,
}


class Fault(NamedTuple):
    """At the `moment`-th call (from 1) of a kind, `what` of FAULTS happens."""

    kind: str
    moment: int
    what: str

    @property
    def kills(self) -> bool:
        return self.what.startswith("kill")


class FaultyDisk(disk.System):
    """Counts calls by kind, and fails as the fault says. fault: None counts only.

    A full disk is full as file systems are: what was reserved, and what a file has already, can
    still be written; names can be changed; nothing new fits.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self.happened = False  # whether the fault was met
        self._reserved: dict[tuple[int, int], int] = {}

    def _meets(self, kind: str) -> bool:
        """Count a call; whether the fault strikes now."""
        self.calls[kind] += 1
        fault = self.fault
        if fault is None:
            return False
        now = kind == fault.kind and self.calls[kind] == fault.moment
        self.happened = self.happened or now
        if fault.what.endswith("for good"):
            return self.happened and kind in FAULTS[fault.what]
        return now

    def _fail(self, where: object) -> NoReturn:
        assert self.fault is not None
        name = self.fault.what.split()[0]
        if name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, name)
        raise OSError(code, os.strerror(code), where if isinstance(where, str) else None)

    def _runs(self, kind: str, where: object, call):
        """A call that is done whole or not at all."""
        strikes = self._meets(kind)
        if not strikes:
            return call()
        if self.fault.what == "kill after":
            call()
        return self._fail(where)

    def write(self, fd, data, offset):
        strikes = self._meets("write")
        if not strikes:
            return super().write(fd, data, offset)
        what = self.fault.what
        half = data[: (len(data) + 1) // 2]
        if what == "short write":
            return super().write(fd, half, offset)
        if what == "ENOSPC for good":
            if offset + len(data) <= self._room_of(fd):
                return super().write(fd, data, offset)
            fits = max(0, self._room_of(fd) - offset)
            if fits:
                return super().write(fd, data[:fits], offset)
        elif what not in ("EINTR once", "kill before"):  # part of it may have gone out
            super().write(fd, data if what == "kill after" else half, offset)
        return self._fail(None)

    def _room_of(self, fd):
        status = os.fstat(fd)
        return max(status.st_size, self._reserved.get((status.st_dev, status.st_ino), 0))

    def append(self, fd, data):
        strikes = self._meets("append")
        if not strikes:
            return super().append(fd, data)
        if self.fault.what == "short write":
            return super().append(fd, data[: (len(data) + 1) // 2])
        if self.fault.what.startswith("kill") and self.fault.what != "kill before":
            super().append(fd, data if self.fault.what == "kill after" else data[: len(data) // 2])
        return self._fail(None)

    def open(self, path, flags, mode=0o666):
        if self.fault is not None and self.fault.what == "ENOSPC for good":
            new = flags & os.O_CREAT and not Path(path).exists()
            if not self._meets("open") or not new:
                return super().open(path, flags, mode)
            self._fail(str(path))
        if self.fault is not None and self.fault.what == "EROFS for good":
            if not self._meets("open") or not flags & (os.O_WRONLY | os.O_RDWR):
                return super().open(path, flags, mode)
            self._fail(str(path))
        return self._runs(
            "open", str(path), lambda: super(FaultyDisk, self).open(path, flags, mode)
        )

    def reserve(self, fd, start, nbytes):
        strikes = self._meets("reserve")
        if strikes and start + nbytes > self._room_of(fd):
            if self.fault.what == "kill after":
                super().reserve(fd, start, nbytes)
            self._fail(None)
        has = super().reserve(fd, start, nbytes)
        if has:
            status = os.fstat(fd)
            place = status.st_dev, status.st_ino
            self._reserved[place] = max(self._reserved.get(place, 0), start + nbytes)
        return has

    def sync(self, fd):
        self._runs("sync", None, lambda: super(FaultyDisk, self).sync(fd))

    def cut(self, fd, size):
        def cut():
            super(FaultyDisk, self).cut(fd, size)
            status = os.fstat(fd)
            self._reserved.pop((status.st_dev, status.st_ino), None)

        self._runs("cut", None, cut)

    def rename(self, old, new):
        self._runs("rename", str(new), lambda: super(FaultyDisk, self).rename(old, new))

    def map(self, fd, nbytes):
        return self._runs("map", None, lambda: super(FaultyDisk, self).map(fd, nbytes))

    def make_folder(self, path, mode=0o777):
        self._runs(
            "make_folder", str(path), lambda: super(FaultyDisk, self).make_folder(path, mode)
        )


def faults(counts: Counter[str], every: int = 1):
    """Every fault at every call that a program made, or at every so many."""
    number = 0
    for what, kinds in FAULTS.items():
        for kind in kinds:
            for moment in range(1, counts[kind] + 1):
                number += 1
                if number % every == 0:
                    yield Fault(kind, moment, what)
