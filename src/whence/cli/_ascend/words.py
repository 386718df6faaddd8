"""What the commands of `ait` and `msit` share: how options are read, and what is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

CONTEXT = {"help_option_names": ["-h", "--help"]}


class Several(click.Command):
    """A command with options that take several words: `--type model layer` is `--type model --type
    layer`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell them so that click reads them."""
        many = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        spelt: list[str] = []
        current = ""
        for word in args:
            if word.startswith("-"):
                current = word if word in many else ""
            elif current and spelt[-1] != current:
                spelt.append(current)
            spelt.append(word)
        return super().parse_args(ctx, spelt)


def command(
    name: str, function: Callable[..., int], options: Sequence[click.Option]
) -> click.Command:
    return click.command(name, cls=Several, params=list(options), context_settings=CONTEXT)(
        function
    )


def free_path(path: Path) -> Path:
    """`path`, numbered (`name-2.csv`) where it exists: nothing that was written before is lost."""
    unused, number = path, 1
    while unused.exists():
        number += 1
        unused = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return unused


def word(value: Any) -> str:
    """A value of an option as it is written on the command line."""
    if isinstance(value, tuple):
        return (
            f"{value[0]}:{value[1]}"
            if all(isinstance(v, int) for v in value) and len(value) == 2
            else ",".join(map(str, value))
        )
    return shlex.quote(str(value))


def tell_same(command: str, same_command: str) -> None:
    tell(f"{command} is  {same_command}")


def tell(text: str) -> None:
    click.echo(f"whence: {text}", err=True)
