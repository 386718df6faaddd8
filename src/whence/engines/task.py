"""A task, who runs it, what came of it, and how a worker performs it."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from typing import Protocol

import msgspec
import xxhash

from whence._version import __version__

ATTEMPTS = 3
"""How often a task is tried that ends its worker."""


class Task(msgspec.Struct, frozen=True):
    """Work for one worker. module: of whence, whose `perform(payload)` does it and gives bytes."""

    number: int
    module: str
    payload: bytes

    @property
    def key(self) -> str:
        """What two tasks have in common that do the same."""
        return xxhash.xxh3_128_hexdigest(self.module.encode() + b"\0" + self.payload)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a task: its result, or an error in words."""

    number: int
    result: bytes = b""
    error: str = ""


class Engine(Protocol):
    """Runs tasks on workers, which start with the first task.

    A worker that is killed is replaced, and its task tried again; a task that ends its worker
    ATTEMPTS times comes back with an error.
    """

    def run(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """What came of each task, in the order in which they finish. Closing the iterator early
        stops what is being done.
        """
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class Request(msgspec.Struct, frozen=True):
    """A task as it reaches a worker. version: of the whence that sent it."""

    module: str
    payload: bytes
    version: str = __version__


def perform(request: Request) -> bytes:
    """Do what a request asks. Raises ValueError for a request of another whence, and what the task
    raises.
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
    """What an exception says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def gave_up(how: str) -> str:
    """The error of a task that ended its worker too often. how: the last time."""
    return f"its worker ended {ATTEMPTS} times, the last time {how}"
