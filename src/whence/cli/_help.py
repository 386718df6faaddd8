"""Help of a command that has many options: under headings, the rare ones only with --help-all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

EVERYTHING = "whence.help-all"
"""Key of `Context.meta`: show the rare options too."""
_OTHER = "Other"


class Grouped(click.Command):
    """A command with its options under headings.

    groups: heading -> its options, long names separated by blanks. rare: options that --help-all
    shows and --help does not.
    """

    def __init__(
        self, *arguments: Any, groups: Mapping[str, str], rare: str = "", **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self.groups = {heading: names.split() for heading, names in groups.items()}
        self.rare = frozenset(rare.split())
        if self.rare:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    hidden=True,
                    callback=_show_everything,
                    help="Show every option and exit.",
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options under their headings, then those without one."""
        heading_of = {name: heading for heading, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {}
        options = (each for each in self.get_params(ctx) if isinstance(each, click.Option))
        for option in options:
            record = option.get_help_record(ctx)
            names = {*option.opts, *option.secondary_opts}
            if record is None or (names & self.rare and not ctx.meta.get(EVERYTHING)):
                continue
            heading = next((heading_of[name] for name in option.opts if name in heading_of), _OTHER)
            rows.setdefault(heading, []).append(record)
        width = min(max(len(names) for group in rows.values() for names, _ in group), 26)
        for heading in (*self.groups, _OTHER):
            if heading in rows:
                with formatter.section(heading):
                    formatter.write_dl(
                        [(names.ljust(width), text) for names, text in rows[heading]], col_max=width
                    )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say last how many options are not shown, and how to see them."""
        super().format_epilog(ctx, formatter)
        if self.rare and not ctx.meta.get(EVERYTHING):
            formatter.write_paragraph()
            formatter.write_text(
                f"{len(self.rare)} more options are rarely needed: {ctx.command_path} --help-all"
            )


def of_every_command(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    """Print the help of the whole command line, a command after the other with all its options."""
    if given and not ctx.resilient_parsing:
        click.echo("\n\n".join(_helps(ctx)))
        ctx.exit()


def _helps(ctx: click.Context) -> Iterator[str]:
    ctx.meta[EVERYTHING] = True  # shared by the contexts of its commands
    yield ctx.get_help()
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield from _helps(click.Context(command, parent=ctx, info_name=name))


def _show_everything(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[EVERYTHING] = True
        click.echo(ctx.get_help())
        ctx.exit()
