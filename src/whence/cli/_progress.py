"""What long commands say while they work, and the words after `--`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click


def teller() -> tuple[Callable[[str], None], Callable[[], None]]:
    """(say, wipe): a line on stderr that is rewritten, for a terminal only."""
    if not sys.stderr.isatty():
        return (lambda text: None), (lambda: None)

    def say(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text.encode('ascii', 'backslashreplace').decode()[:100]} ...")
        sys.stderr.flush()

    def wipe() -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    return say, wipe


class WithCommand(click.Command):
    """A command with words of its own before `--` and a program to run after it; the latter is in `ctx.meta["whence.command"]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, after everything behind the first `--` was taken away."""
        if "--" in args:
            at = args.index("--")
            ctx.meta["whence.command"] = tuple(args[at + 1 :])
            if not args[at + 1 :]:
                raise click.UsageError("no command after --", ctx)
            args = args[:at]
        return super().parse_args(ctx, args)
