"""Workers as processes of this machine.

Each runs one task at a time. A worker that ends is replaced, and its task is tried again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from typing import IO, cast

import msgspec

from whence.engines.task import ATTEMPTS, Outcome, Request, Task, gave_up
from whence.engines.worker import Answer, read_frame, write_frame

_END_S = 5.0  # for a worker to end by itself
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Processes:
    """Workers as processes. workers: their number; None means one for each core that this process
    may use.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}

    def run(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """The outcome of each task, as they finish."""
        waiting = deque((task, 1) for task in tasks)
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or self._busy:
                    while waiting and len(self._busy) < self._workers:
                        self._hand_out(*waiting.popleft(), selector)
                    for key, _ in selector.select():
                        worker = self._busy.pop(key.fd)
                        selector.unregister(key.fd)
                        outcome = self._outcome(worker)
                        if outcome is None:
                            waiting.appendleft((worker.task, worker.attempt + 1))
                        else:
                            yield outcome
            finally:
                for worker in self._busy.values():
                    worker.kill()
                self._busy.clear()

    def _hand_out(self, task: Task, attempt: int, selector: selectors.BaseSelector) -> None:
        worker = self._idle.pop() if self._idle else _Worker()
        worker.start(task, attempt)
        fd = worker.answers.fileno()
        self._busy[fd] = worker
        selector.register(fd, selectors.EVENT_READ)

    def _outcome(self, worker: _Worker) -> Outcome | None:
        """The outcome of a worker's task; None when it is to be tried again."""
        message = read_frame(worker.answers)
        number = worker.task.number
        if message:
            self._idle.append(worker)
            answer = msgspec.msgpack.decode(message, type=Answer)
            return Outcome(number, answer.result, answer.error)
        how = worker.kill()
        if worker.attempt < ATTEMPTS:
            return None
        return Outcome(number, error=gave_up(how))

    def close(self) -> None:
        """End all workers."""
        while self._idle:
            self._idle.pop().end()


class _Worker:
    """One process."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}; "  # noqa: PTH109
            "from whence.engines.worker import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **{name: os.environ.get(name, "1") for name in _THREADS}},
            start_new_session=True,  # Ctrl-C is for the comparison, which ends its workers
        )
        self.answers = cast(IO[bytes], self._process.stdout)
        self.task, self.attempt = Task(-1, "", b""), 0

    def start(self, task: Task, attempt: int) -> None:
        """Send a task to the worker."""
        self.task, self.attempt = task, attempt
        message = msgspec.msgpack.encode(Request(task.module, task.payload))
        with contextlib.suppress(OSError):  # it ended: shows where its answer is read
            write_frame(cast(IO[bytes], self._process.stdin), message)

    def kill(self) -> str:
        """End the worker at once; returns how it ended."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its end a moment ago
                self._process.wait(0.2)
        if self._process.poll() is None:
            self._process.kill()
        return self._ended()

    def end(self) -> None:
        """Let the worker finish and end."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._ended()

    def _ended(self) -> str:
        code = self._process.wait()
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        self.answers.close()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
