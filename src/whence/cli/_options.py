"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click


class _Here(click.Path):
    """A path of this machine: a URL would be taken for a folder of its name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is not None and isinstance(value, str) and "://" in value:
            from whence.records.places import refuse_url

            is_option = isinstance(param, click.Option)
            name = param.opts[-1] if is_option else param.metavar or str(param.name).upper()
            refuse_url(
                value,
                f"{name} takes paths of this machine alone: copy to or from the store yourself",
            )
        return super().convert(value, param, ctx)


HERE = _Here()
"""The type of options and arguments that can be no URL: what is written, but for runs and
comparisons, and what is changed where it lies.
"""

TEXT_OR_JSON = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What goes to stdout.",
)
KEEP_RUNS = click.option(
    "--keep", metavar="DIR", type=HERE, help="Keep the runs in this new folder."
)
OUTPUT_FILE = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=HERE,
    help="Write to this file instead of the terminal.",
)
REPLACE_FILE = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
REPLACE_COMPARISON = click.option("--force", is_flag=True, help="Replace the comparison in CMP.")
WHILE_WRITTEN = click.option(
    "--force", is_flag=True, help="Go on even while a process still writes to the run."
)
FIRST_MAP = click.option(
    "--map", "chart", metavar="FILE", type=click.Path(), help="Start from this map."
)
STRICT = click.option(
    "--strict", is_flag=True, help="Count precision losses and suspects as different, too."
)


def words_of(command: str) -> list[str]:
    """The words of a command that was given as one text. Raises UsageError where a quote is not
    closed.
    """
    import shlex

    from whence.errors import UsageError

    try:
        return shlex.split(command)
    except ValueError as err:
        raise UsageError(
            f"cannot read the command {command!r} ({str(err).lower()}): close the quote, or write "
            "a backslash before one that is meant as it is; nothing was started"
        ) from err
