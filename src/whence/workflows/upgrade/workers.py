"""Processes inside the two environments that build and run models, with a time limit each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whence.errors import WhenceError
from whence.workflows.upgrade.environments import Environment

_START_S = 300
_LAST_LINES = 8


class Worker:
    """A process of one environment. scripts: the folder with the package that it runs. A crash, or
    a model beyond its time, ends the process; the next task starts another.
    """

    def __init__(
        self, environment: Environment, scripts: Path, catalogue: str, limit_s: float
    ) -> None:
        self.environment, self._limit_s = environment, limit_s
        self._scripts, self._catalogue = scripts, catalogue
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._held = b""
        self._deadline = 0.0
        self.first: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """What the environment has: `names` of models and `versions`. Raises WhenceError where it
        does not work.
        """
        self.launch()
        if not self.first:
            self.first = self._read(time.monotonic() + _START_S)
        if not self.first["ok"]:
            said = self.first["error"]
            self.stop()
            raise WhenceError(f"{self.environment.given} does not work: {said}")
        return self.first

    def launch(self) -> None:
        """Begin to start; `start` waits for it."""
        if self._process is not None:
            return
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            [self.environment.python, "-m", "whence_inside.worker", self._catalogue],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._scripts,
            env={**os.environ, **self.environment.variables()},
            start_new_session=True,
        )
        self._held, self.first = b"", {}

    def send(self, task: Mapping[str, Any]) -> None:
        """Begin a task; `receive` waits for it."""
        self.start()
        self._deadline = time.monotonic() + self._limit_s
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; receive says so
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer of the task that was sent: also that it crashed or took too long."""
        found = self._read(self._deadline)
        if found.get("ended"):
            self.stop()
        return found

    def _read(self, deadline: float) -> dict[str, Any]:
        """One line of the process."""
        assert self._process is not None and self._process.stdout is not None
        number = self._process.stdout.fileno()
        while b"\n" not in self._held:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([number], [], [], left)[0]:
                return _failed(f"it took longer than {self._limit_s:g} s (--limit)")
            piece = os.read(number, 1 << 16)
            if not piece:
                return _failed(f"the process died ({self._ending()}): {self._last_lines()}")
            self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ending(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:])[-600:]

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _failed(words: str) -> dict[str, Any]:
    return {"ok": False, "error": words, "ended": True, "seconds": 0.0}
