"""What users write down holds: names, signatures, commands, options and entry points are those of
the list kept here.

A change that is meant is accepted with `python tests/test_public.py`, which writes the list again;
the difference is then part of the review.
"""

import importlib
import inspect
import json
import sys
from enum import Enum
from pathlib import Path

import click

import whence
from whence import cli

LIST = Path(__file__).parent / "data" / "public.json"
MODULES = {
    "whence.api": ["first_difference", "include", "load_policy", "plots", "views"],
    "whence.metrics": ["METRICS", "histogram_edges", "measure", "measure_many"],
    "whence.readers": ["Building", "Place", "Reader", "open_run"],
    "whence.compat.torch_xray": None,
    "whence.compat.torchair": None,
    "whence.compat.ait_llm": None,
    "whence.compat.msit_llm": None,
    "whence.compat.msprobe.pytorch": None,
    "whence.compat.msquickcmp.pta_acl_cmp.compare": None,
    "whence.errors": None,
    "whence.records": None,
    "whence.results": None,
    "whence.testing": None,
    "whence": None,
}
"""Modules that users import from, and the names that hold; None for all that are public."""
GROUPS = ("whence.cli", "whence.metrics", "whence.readers", "whence.writers")


def _public(module):
    """Classes and functions of the module or package itself; of the others what `__all__` lists."""
    if module.__name__ not in ("whence.errors", "whence.records", "whence.results"):
        return sorted(module.__all__)
    return sorted(
        name
        for name in {*vars(module), *getattr(module, "__all__", ())}
        if not name.startswith("_")
        and getattr(getattr(module, name), "__module__", "").startswith(module.__name__)
    )


def _shape(value):
    """The signature of what can be called, the words of a list, the type's name of anything else."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "exception"
    if inspect.isclass(value) and issubclass(value, Enum):
        return [member.value for member in value]
    try:
        return [
            f"{'*' if p.kind is p.KEYWORD_ONLY else ''}{p.name}{'' if p.default is p.empty else '?'}"
            for p in inspect.signature(value).parameters.values()
        ]
    except (TypeError, ValueError):
        return type(value).__name__


def _commands(command, words=()):
    """{command line: its options and arguments}"""
    yield (
        " ".join(words) or "whence",
        sorted("/".join(sorted(p.opts + p.secondary_opts)) for p in command.params),
    )
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*words, name))


def _listed():
    names = {}
    for name, chosen in MODULES.items():
        module = importlib.import_module(name)
        names[name] = {key: _shape(getattr(module, key)) for key in chosen or _public(module)}
    return {"names": names, "commands": dict(_commands(cli.group))}


def test_names_and_signatures_hold():
    assert _listed()["names"] == json.loads(LIST.read_text(encoding="utf-8"))["names"]


def test_commands_and_options_hold():
    assert _listed()["commands"] == json.loads(LIST.read_text(encoding="utf-8"))["commands"]


def test_exit_codes_hold():
    assert (cli.USAGE, cli.INTERRUPTED, cli.BROKEN_PIPE, cli.BISECT_SKIP) == (3, 130, 141, 125)
    assert whence.errors.WhenceError.exit_code == 3


def test_other_packages_add_by_the_same_groups(monkeypatch):
    """Every group is asked for by its name when the plug-ins of its kind are listed."""
    asked = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: asked.append(group) or [])
    for module in [name for name in sys.modules if name.startswith("whence.")]:
        if hasattr(sys.modules[module], "entry_points"):
            monkeypatch.setattr(f"{module}.entry_points", lambda group: asked.append(group) or [])
    from whence import metrics, readers, writers

    lists = (readers.known, writers.known, metrics.installed)
    cached = (*lists, writers._added)
    for known in cached:
        getattr(known, "cache_clear", lambda: None)()
    cli.group.list_commands(click.Context(cli.group))
    for known in lists:
        known()
    for known in cached:  # the next test sees what is installed
        getattr(known, "cache_clear", lambda: None)()
    assert set(GROUPS) <= set(asked)


if __name__ == "__main__":
    LIST.write_text(json.dumps(_listed(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
