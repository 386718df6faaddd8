"""How a command states its options, each once: spelling, help, type, default, heading and rarity.

    @verb(
        argument("run", "RUN"),
        "Answer",
        option("--strict", "Count precision losses as different, too."),
        option("--sample", "Replay every call, or only a few.", ("auto", "all"), default="auto"),
        "Files",
        option("-o, --output CMP", "Folder for the comparison.", HERE, rare=True),
    )
    def command(run: str, **options: Any) -> int: ...

An option is spelt as `--help` shows it, ` ...` behind it where it is repeatable; one that takes no
value is a flag. Without a name of its own its parameter is named like the option.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from whence.cli import _help


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


def seconds(text: str) -> float:
    """Seconds, of 90, 60s, 5m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time; write 90, 60s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


PATH = click.Path()
HERE = _Here()
"""The type of options and arguments that can be no URL: what is written, but for runs and
comparisons, and what is changed where it lies.
"""
COUNT = click.IntRange(1)
SHARE = click.FloatRange(0, 1)


class Option(click.Option):
    """An option that knows whether only `--help-all` shows it."""

    rare = False


def _typed(kind: Any) -> Any:
    return click.Choice(tuple(kind)) if isinstance(kind, Iterable) else kind


def option(
    spelt: str,
    text: str,
    kind: Any = None,
    *,
    name: str = "",
    rare: bool = False,
    **more: Any,
) -> Option:
    """An option. text: its help. kind: its type, or the words to choose from. name: of the
    parameter. more: as click has it.
    """
    metavar = " ".join(word for word in spelt.split() if word[0] != "-")
    words = [word.strip(",") for word in spelt.split() if word[0] == "-"]
    if metavar.endswith("..."):
        metavar, more["multiple"] = metavar[:-3].strip(), True
    elif not metavar and kind is None:
        more["is_flag"] = True
    default = more.get("default")
    more.setdefault("show_default", default not in (None, "") and not isinstance(default, bool))
    stated = Option(
        [*words, name] if name else words,
        help=text,
        metavar=metavar or None,
        type=_typed(kind),
        **more,
    )
    stated.rare = rare
    return stated


def argument(name: str, metavar: str, kind: Any = PATH, **more: Any) -> click.Argument:
    """An argument; one that may be left out stands in brackets."""
    more.setdefault("required", metavar[:1] != "[")
    return click.Argument([name], metavar=metavar or None, type=_typed(kind), **more)


def verb(
    *entries: str | click.Parameter, program: str | None = None, **more: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """The command of a file `cli/NAME.py`, whose docstring is its help. entries: arguments and
    options, behind their headings where it has any. program: it starts one, whose words stand
    behind `--` and are handed over as `command`; "" where it may, else a line that shows how.
    """

    def decorated(function: Callable[..., Any]) -> click.Command:
        name = function.__module__.rpartition(".")[2].replace("_", "-")
        text = inspect.getdoc(inspect.getmodule(function)) or ""
        return _help.Verb(name, entries, program=program, callback=function, help=text, **more)

    return decorated


def below(
    group: click.Group, name: str, *entries: str | click.Parameter
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of a group, whose help is the docstring of the function."""

    def decorated(function: Callable[..., Any]) -> click.Command:
        verb_below = _help.Verb(name, entries, callback=function, help=inspect.getdoc(function))
        group.add_command(verb_below)
        return verb_below

    return decorated


def group(name: str, text: str | None) -> click.Group:
    """A group of commands, each of which is stated with `below`."""
    return click.Group(name, help=text, context_settings={"help_option_names": ["-h", "--help"]})


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given or have a default."""
    return {name: value for name, value in options.items() if value is not None}


TEXT_OR_JSON = option(
    "--format", "What goes to stdout.", ("text", "json"), name="form", default="text"
)
KEEP_RUNS = option("--keep DIR", "Keep the runs in this new folder.", HERE)
OUTPUT_FILE = option("-o, --output FILE", "Write to this file instead of the terminal.", HERE)
REPLACE_FILE = option("--force", "Replace FILE if it exists.")
REPLACE_COMPARISON = option("--force", "Replace the comparison in CMP.")
WHILE_WRITTEN = option("--force", "Go on even while a process still writes to the run.")
FIRST_MAP = option("--map FILE", "Start from this map.", PATH, name="mapping")
STRICT = option("--strict", "Count precision losses and suspects as different, too.")
SETTLED_RUNS = (
    option("--seed N", "Seed every run.", int),
    option("--deterministic", "Switch every run to deterministic kernels."),
    option("--steps START:STOP", "Only these steps, STOP excluded (0:10, 5:, :3)."),
)
"""Of commands that run a program several times."""


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
