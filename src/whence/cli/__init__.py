"""The command line: words to verbs to an answer and an exit code, one file a command.

A command is a file `cli/NAME.py` with a click command called `command` (`_options.verb` makes it);
the first line of its docstring is its line in `whence --help`, and `GROUPS` says under which
heading it stands there.
Files are read, not imported, for help: that costs a few milliseconds however heavy a command is.
Other packages add commands through the entry point group `whence.cli` (name = "module:command").
"""

from __future__ import annotations

import ast
import contextlib
import errno
import gc
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whence._version import __version__
from whence.errors import WhenceError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

FOLDER = Path(__file__).parent
GROUPS = {
    "Capture": ("run", "trigger"),
    "Compare": (
        "compare",
        "accept",
        "diverge",
        "tokens",
        "serve-check",
        "labels",
        "ladder",
        "commits",
        "upgrade",
        "export-check",
    ),
    "One run": ("probe", "repeat", "nans", "ranges", "ranks"),
    "Inspect": (
        "show",
        "report",
        "query",
        "trace",
        "repro",
        "locate",
        "recipe",
        "align",
        "map-weights",
    ),
    "Operators": ("ops",),
    "Other tools": ("convert", "xray", "msprobe", "msit", "ait"),
    "Try it": ("demo", "doctor"),
    "Agents": ("mcp",),
    "Maintenance": (
        "completion",
        "pack",
        "unpack",
        "upload",
        "recover",
        "scrub",
        "include",
    ),
}
"""Headings of `whence --help` with their commands, in the order in which both are shown."""
UNGROUPED = "More commands"
"""The last heading: files that `GROUPS` does not name, and commands of other packages."""
USAGE = 3
INTERRUPTED = 130
BROKEN_PIPE = 141
BISECT_SKIP = 125


class Commands(click.Group):
    """A group whose commands are files beside this one; each is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the files as `GROUPS` orders them, then those of other packages."""
        return [name for names in grouped().values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now; None when there is none."""
        import importlib

        name = _file(cmd_name)
        if name.isidentifier() and name[0] != "_" and (FOLDER / f"{name}.py").is_file():
            command: click.Command = importlib.import_module(f"whence.cli.{name}").command
            return command
        added = _added().get(cmd_name)
        if added is None:
            return None
        try:
            loaded: click.Command = added.load()
        except Exception as err:  # someone else's package: named, whatever it raises
            raise WhenceError(
                f"command {cmd_name} comes from {added.value} and cannot be loaded: "
                f"{type(err).__name__}: {err}"
            ) from err
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, saying which commands there are when the name is unknown."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as err:
            names = self.list_commands(ctx)
            import difflib

            near = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(names)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx) from err

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and options that begin so, without importing a command."""
        from click.shell_completion import CompletionItem

        names = (name for name in self.list_commands(ctx) if name.startswith(incomplete))
        commands = [CompletionItem(name, help=one_line(name)) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands under their headings, without importing one."""
        groups = grouped()
        width = max(len(name) for names in groups.values() for name in names)
        for heading, names in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), one_line(name)) for name in names])


def grouped() -> dict[str, list[str]]:
    """Names of commands by heading; no heading without one."""
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")}
    groups = {
        heading: [name for name in names if name in files] for heading, names in GROUPS.items()
    }
    others = files.difference(*GROUPS.values())
    groups[UNGROUPED] = [*sorted(others), *sorted(set(_added()).difference(files))]
    return {heading: names for heading, names in groups.items() if names}


def _file(command: str) -> str:
    """The name of a command's file: map-weights lies in map_weights.py, and has one name only."""
    return "" if "_" in command else command.replace("-", "_")


def one_line(name: str) -> str:
    """What a command does: the first paragraph of its file in one line; of another package's, where
    it comes from.
    """
    path = FOLDER / f"{_file(name)}.py"
    if not path.is_file():
        return f"(from {_added()[name].value})"
    with path.open(encoding="utf-8") as file:
        paragraph = []
        for line in file:
            paragraph.append(line.strip())
            if not line.strip() or line.rstrip().endswith('"""'):
                break
    text = " ".join(paragraph).strip()
    quoted = text if text.endswith('"""') and len(text) > 5 else text + '"""'
    return str(ast.literal_eval(quoted)).strip()


def _added() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="whence.cli")}


def _help_of_all(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        from whence.cli import _help

        _help.of_every_command(ctx, option, given)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="whence")
@click.option(
    "--debug",
    is_flag=True,
    envvar="WHENCE_DEBUG",
    help="Show where an unexpected error happened (also WHENCE_DEBUG=1).",
)
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_of_all,
    help="Show the help of every command with all its options and exit.",
)
@click.pass_context
def group(ctx: click.Context, debug: bool) -> None:
    """From which operator does the error come? Compares two runs of one neural network."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `whence`: run one command and leave with its exit code (DESIGN section 5a)."""
    for name in ("stdout", "stderr"):
        # closed by who started us; its number must not become that of a file
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a name shows its code, never an error.
            stream.reconfigure(errors="backslashreplace")
    # Modules and results are many, stay, and hold few cycles: scanning them again and again costs a
    # third of the time, of importing torch and of comparing.
    gc.set_threshold(200_000, 50, 100)
    sys.exit(execute(sys.argv[1:] if arguments is None else list(arguments)))


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code; whatever happens has been told on stderr."""
    if "_WHENCE_COMPLETE" in os.environ:
        group.main(arguments, prog_name="whence")
    code = _execute(arguments)
    # For git bisect everything that is no answer means "skip this commit"; 3 would mean "bad".
    is_asked = "--bisect" in arguments and "commits" not in arguments[:2]
    return BISECT_SKIP if code == USAGE and is_asked else code


def _execute(arguments: list[str]) -> int:
    debug = os.environ.get("WHENCE_DEBUG", "") not in ("", "0") or "--debug" in arguments[:1]
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()  # the reader had enough (`| head`)
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        _tell("whence: interrupted")
        return INTERRUPTED
    except click.ClickException as err:
        err.show()
        return USAGE
    except WhenceError as err:
        if debug:
            _trace()
        _tell(f"whence: {err}")
        return err.exit_code
    except OSError as err:
        if err.filename is not None or err.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EIO,
            errno.EBADF,
            errno.EFBIG,
        ):
            return _unexpected(err, arguments, debug)
        _drop_stdout()
        _tell(f"whence: the answer cannot be written to stdout: {err.strerror}")
        return USAGE
    except Exception as err:  # noqa: BLE001 - the last frame: exit 1 would mean "the runs differ"
        return _unexpected(err, arguments, debug)


def _unexpected(err: Exception, arguments: list[str], debug: bool) -> int:
    """Tell an error that nobody foresaw; a framework that is not installed is a foreseen one."""
    if debug:
        _trace()
    if isinstance(err, UnicodeEncodeError | TypeError) and "surrogates not allowed" in str(err):
        _tell(
            "whence: a path or a name here holds bytes that are not UTF-8, and cannot be written "
            "down as text: rename it, or take a folder with another name"
        )
        return USAGE
    if isinstance(err, ModuleNotFoundError):
        from whence import extras

        foreseen = extras.of_import(err, f"whence {' '.join(arguments[:1])}")
        if foreseen is not None:
            _tell(f"whence: {foreseen}")
            return foreseen.exit_code
    _tell(
        f"whence: unexpected {type(err).__name__}: {err}\n  this is a bug in whence"
        + ("" if debug else "; `whence --debug ...` shows where")
    )
    return USAGE


def _drop_stdout() -> None:
    """What is still buffered has nowhere to go; Python would try once more as it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trace() -> None:
    import traceback

    traceback.print_exc()


def _invoke(arguments: list[str]) -> int:
    try:
        with group.make_context("whence", arguments) as context:
            result = group.invoke(context)
    except click.exceptions.Exit as err:
        return err.exit_code
    return result if isinstance(result, int) else 0


def _tell(text: str) -> None:
    from whence.report import tables

    try:
        click.echo("\n".join(tables.clean(line) for line in text.split("\n")), err=True)
    except OSError:
        return
