"""A task, the engine that runs it, its outcome, and the function with which a worker
performs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from typing import Protocol

import msgspec
import xxhash

from whence._version import __version__

ATTEMPTS = 3
"""Most attempts for a task that ends its worker."""


class Task(msgspec.Struct, frozen=True):
    """Work for one worker.

    module: of whence; its `perform(payload)` does the work and returns bytes.
    """

    number: int
    module: str
    payload: bytes

    @property
    def key(self) -> str:
        """Equal for two tasks that do the same."""
        return xxhash.xxh3_128_hexdigest(self.module.encode() + b"\0" + self.payload)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a task: its result, or an error in words."""

    number: int
    result: bytes = b""
    error: str = ""


class Engine(Protocol):
    """Runs tasks on workers, which start with the first task.

    A worker that is killed is replaced, and its task tried again; a task that ends its worker
    ATTEMPTS times comes back with an error.
    """

    def run(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """The outcome of each task, in the order in which they finish.

        Closing the iterator early stops running tasks.
        """
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class Request(msgspec.Struct, frozen=True):
    """A task as sent to a worker. version: of the sending whence."""

    module: str
    payload: bytes
    version: str = __version__


def perform(request: Request) -> bytes:
    """Perform a request.

    Raises ValueError for a request from another version of whence, and what the task raises.
    """
    if request.version != __version__:
        raise ValueError(
            f"the worker has whence {__version__}, and the comparison whence {request.version}: "
            "install the same on all machines"
        )
    package, _, name = request.module.partition(".")
    if package != "whence" or not name:
        raise ValueError(f"{request.module!r} is not a module of whence")
    result: bytes = importlib.import_module(request.module).perform(request.payload)
    return result


def in_words(error: BaseException) -> str:
    """An exception as one line of text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def gave_up(how: str) -> str:
    """The error of a task that ended its worker too often. how: its last end."""
    return f"its worker ended {ATTEMPTS} times, the last time {how}"
