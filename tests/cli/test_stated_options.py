"""Options: stated once, and what a command hands on is what the verb of Python takes."""

import ast
import importlib
import inspect
import textwrap

import click
import pytest

from whence import api, cli
from whence.cli import _options
from whence.instrument.options import CaptureOptions
from whence.workflows.commits import Files
from whence.workflows.operator_fuzz.fuzz import Trials
from whence.workflows.probe.probe import Question

CONTEXT = click.Context(cli.group)
FREE = {
    *CaptureOptions.__struct_fields__,
    *Files.__annotations__,
    *Trials.__annotations__,
    *Question.__struct_fields__,
    *inspect.signature(api.compare).parameters,
    *inspect.signature(api.run_command).parameters,
}
"""What verbs with `**options` hand on in their turn."""


def verbs():
    """(name, command) of each command of ours, those of groups too."""
    for path in sorted(cli.FOLDER.glob("[!_]*.py")):
        found = importlib.import_module(f"whence.cli.{path.stem}").command
        below = found.commands.values() if isinstance(found, click.Group) else [found]
        yield from ((each.name, each) for each in below if not isinstance(each, click.Group))


def handed_on(function):
    """Names of functions of the api to which a function hands all options that it does not name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("api."):
            stars = [ast.unparse(k.value) for k in call.keywords if k.arg is None]
            if any("options" in text or "how" in text for text in stars):
                yield ast.unparse(call.func)[4:], {k.arg for k in call.keywords} - {None}


@pytest.mark.parametrize("command", [pytest.param(command, id=name) for name, command in verbs()])
def test_what_a_command_hands_on_is_taken(command):
    own = {
        p.name
        for p in inspect.signature(command.callback).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    }
    rest = {param.name for param in command.params if param.expose_value} - own
    rest |= {"command"} - own if getattr(command, "program", None) is not None else set()
    for verb, also in handed_on(command.callback):
        taken = inspect.signature(getattr(api, verb)).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        known = {*taken, *FREE} if free else {*taken}
        assert rest <= known, f"api.{verb} has no {sorted(rest - known)}"
        assert not rest & also


def test_an_option_is_spelt_as_help_shows_it():
    option = _options.option("-x, --ignore PATTERN ...", "Files.", rare=True)
    assert (option.opts, option.name, option.metavar) == (["-x", "--ignore"], "ignore", "PATTERN")
    assert (option.multiple, option.is_flag, option.rare) == (True, False, True)
    flag = _options.option("--all", "Everything.", name="everything")
    assert (flag.is_flag, flag.name, flag.show_default) == (True, "everything", False)
    chosen = _options.option("--tier", "Which.", ("core", "full"), default="full")
    assert (chosen.type.choices, chosen.show_default) == (("core", "full"), True)
    assert not _options.argument("target", "[TGT]").required


@pytest.mark.parametrize("text", ["90", "90s", "1.5m", "2h"])
def test_a_time(text):
    assert _options.seconds(text) == {"90": 90, "90s": 90, "1.5m": 90, "2h": 7200}[text]


def test_no_time():
    with pytest.raises(click.BadParameter, match="5d' is no time; write 90, 60s, 5m or 1h"):
        _options.seconds("5d")
