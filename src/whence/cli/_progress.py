"""What long commands say while they work, and the words after `--`."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click

_SILENT_S = 1.0  # work that takes less says nothing


class Progress:
    """A line on stderr while long work goes on: a bar where its length is known. It comes after a
    second and goes with the work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        self._now: tuple[str, int | None, int | None] = ("", None, None)
        self._timer = threading.Timer(_SILENT_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def say(self, text: str) -> None:
        """What is being done now; nobody knows for how long."""
        self._set(text, None, None)

    def count(self, done: int, of: int, what: str) -> None:
        """How far `what` is."""
        self._set(what, done, of)

    def close(self) -> None:
        """Take the line away. Idempotent."""
        with self._lock:
            self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None

    def _set(self, text: str, done: int | None, of: int | None) -> None:
        from whence.report import tables

        with self._lock:
            self._now = tables.clean(text), done, of
            if self._bar is not None:
                self._draw()

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        with self._lock:
            if self._timer.finished.is_set():  # closed while this waited
                return
            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(32),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
                transient=True,
            )
            self._draw()
            self._bar.start()

    def _draw(self) -> None:
        text, done, of = self._now
        if self._task is None:
            self._task = self._bar.add_task(text, total=of)
        self._bar.update(self._task, description=text, total=of, completed=done or 0)


def bar() -> tuple[Callable[[int, int, str], None] | None, Callable[[], None]]:
    """(count, close) of a `Progress`, for a terminal only: elsewhere count is None and close does
    nothing.
    """
    if not sys.stderr.isatty():
        return None, (lambda: None)
    shown = Progress()
    return shown.count, shown.close


@contextlib.contextmanager
def shown() -> Iterator[Callable[[int, int, str], None] | None]:
    """`bar` around a block."""
    count, close = bar()
    try:
        yield count
    finally:
        close()


def teller() -> tuple[Callable[[str], None], Callable[[], None]]:
    """(say, close) of a `Progress`, for a terminal only: elsewhere both do nothing."""
    if not sys.stderr.isatty():
        return (lambda text: None), (lambda: None)
    shown = Progress()
    return shown.say, shown.close


class WithCommand(click.Command):
    """A command with words of its own before `--` and a program to run after it; the latter is in
    `ctx.meta["whence.command"]`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, after everything behind the first `--` was taken away."""
        if "--" in args:
            at = args.index("--")
            ctx.meta["whence.command"] = tuple(args[at + 1 :])
            if not args[at + 1 :]:
                raise click.UsageError("no command after --", ctx)
            args = args[:at]
        return super().parse_args(ctx, args)
