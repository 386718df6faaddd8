"""What a process costs, with all that it starts: CPU seconds, wall seconds, memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """cpu_s, wall_s: of a process and those it waited for. mb: the most memory that they had of
    their own (`RssAnon`: mapped files aside). exit: its exit code. output: what it wrote on
    standard output and standard error.
    """

    cpu_s: float
    wall_s: float
    mb: float
    exit: int
    output: str


class _Peak(threading.Thread):
    """The largest `RssAnon` of a process and its children while it runs, looked at every 10 ms."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.kilobytes = pid, 0

    def run(self) -> None:
        while True:
            try:
                now = self._of_tree(self.pid)
            except OSError:
                return
            self.kilobytes = max(self.kilobytes, now)
            time.sleep(0.01)

    def _of_tree(self, pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        total = sum(int(s.split()[1]) for s in status.splitlines() if s.startswith("RssAnon:"))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    total += self._of_tree(int(child))
        return total


def cost(command: Sequence[str], variables: Mapping[str, str] = {}) -> Cost:
    """Run a command to its end. variables: of its environment, beside those that are there."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
    )
    peak = _Peak(process.pid)
    peak.start()
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak.join()
    return Cost(
        used.ru_utime + used.ru_stime,
        time.perf_counter() - start,
        peak.kilobytes / 1024,
        process.returncode,
        output,
    )


def python(*words: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *words]
