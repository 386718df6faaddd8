"""A command of whence: its options under headings, the rare ones only with --help-all, and the
program that it starts behind `--`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EVERYTHING = "whence.help-all"
"""Key of `Context.meta`: show the rare options too."""
_OTHER = "Other"
_PROGRAM = "whence.program"
"""Key of `Context.meta`: the words of a program are being read."""


class Verb(click.Command):
    """A command with its options under headings, that may start a program.

    entries: its arguments and options; a text is the heading of those behind it. program: the line
    that shows how a program is given behind `--`, "" where it may be left out, None where none is
    started.
    """

    def __init__(
        self,
        name: str,
        entries: Iterable[str | click.Parameter],
        *,
        program: str | None = None,
        **more: Any,
    ) -> None:
        self.program = program
        if program:
            more.setdefault("options_metavar", "[OPTIONS] -- CMD ...")
        super().__init__(
            name, params=[e for e in entries if isinstance(e, click.Parameter)], **more
        )
        self.groups: dict[str, list[click.Option]] = {}
        heading = ""
        for entry in entries:
            if isinstance(entry, str):
                heading = entry
            elif isinstance(entry, click.Option):
                self.groups.setdefault(heading, []).append(entry)
        self.rare = [option for option in self.params if getattr(option, "rare", False)]
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; what stands behind the first `--` is the program to run."""
        if self.program is None:
            return super().parse_args(ctx, args)
        dashes = args.index("--") if "--" in args else len(args)
        words = tuple(args[dashes + 1 :])
        ctx.meta[_PROGRAM] = dashes < len(args)
        if dashes < len(args) and not words and not ctx.resilient_parsing:
            raise click.UsageError("no command after --", ctx)
        rest = super().parse_args(ctx, args[:dashes])
        if self.program and not words and not ctx.resilient_parsing:
            raise click.UsageError(f"no command given:  {self.program}", ctx)
        ctx.params["command"] = words
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Files where the program to run stands, else as click does."""
        from click.shell_completion import CompletionItem

        if ctx.meta.get(_PROGRAM):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options under their headings, then those without one."""
        if not any(self.groups):
            super().format_options(ctx, formatter)
            return
        rows: dict[str, list[tuple[str, str]]] = {}
        named = {option: name for name, group in self.groups.items() for option in group}
        options = (each for each in self.get_params(ctx) if isinstance(each, click.Option))
        for option in options:
            record = option.get_help_record(ctx)
            if record is not None and (option not in self.rare or ctx.meta.get(EVERYTHING)):
                rows.setdefault(named.get(option, _OTHER), []).append(record)
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
