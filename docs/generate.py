"""Hook of mkdocs: pages of the site that are not written by hand, and links that hold on GitHub and
in the site alike.

Commands come from their `--help`, the Python reference from docstrings; README, CONTRIBUTING and
CHANGELOG stand outside of docs/.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import whence
from whence import cli
from whence.cli import _help

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
"""Files of the repository that are pages of the site under another name."""
DECISIONS = "dev/decisions/index.md"
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ANSWER = re.compile(r"^```text\n(?=(?:(?!```).*\n)*?.{161,}\n)", re.MULTILINE)
"""The head of a block that shows an answer with sentences in it: its long lines are wrapped, as
terminals do.
"""
WIDTH = 82
ROOMS = {
    "whence.results": "What a comparison holds",
    "whence.testing": "In tests",
    "whence.readers": "Readers",
    "whence.writers": "Writers",
    "whence.metrics": "Metrics",
    "whence.errors": "Errors",
}


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as on GitHub, so that a link holds in both places."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not written by hand."""
    made = {OUTSIDE[name]: (ROOT / name).read_text(encoding="utf-8") for name in OUTSIDE}
    made[DECISIONS] = decisions()
    made["reference/cli.md"] = commands()
    made["reference/api.md"] = functions()
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; what is no page of the
    site stays as words.
    """
    place = page.file.src_uri
    written = next((name for name, here in OUTSIDE.items() if here == place), f"docs/{place}")

    def turned(found: re.Match[str]) -> str:
        words, link, anchor = found[1], found[2], found[3] or ""
        if "://" in link:
            return found[0]
        to = posixpath.normpath(posixpath.join(posixpath.dirname(written), link))
        if not to.startswith("docs/") and to not in OUTSIDE:
            return words
        page = (
            DECISIONS if to == "docs/dev/decisions" else OUTSIDE.get(to, to.removeprefix("docs/"))
        )
        return f"[{words}]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{anchor})"

    return ANSWER.sub("``` {.text .answer}\n", LINK.sub(turned, markdown))


def decisions() -> str:
    """A list of docs/dev/decisions."""
    lines = ["# Decisions", "", "Choices that closed a door, and why.", ""]
    for path in sorted((ROOT / "docs" / "dev" / "decisions").glob("*.md")):
        title = re.sub(r"^# (\d+\. )?", "", path.read_text(encoding="utf-8").partition("\n")[0])
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with its `--help`."""
    parts = [
        "# Commands",
        "What `--help` prints. Exit codes: [reference](../reference.md).",
    ]
    context = click.Context(cli.group, info_name="whence", terminal_width=WIDTH)
    context.meta[_help.EVERYTHING] = True
    parts += _helped(cli.group, context)
    return "\n\n".join(parts) + "\n"


def _helped(command: click.Command, context: click.Context) -> list[str]:
    """The help of a command, then that of the commands below it."""
    parts = [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"]
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        below = command.get_command(context, name)
        assert below is not None
        parts += _helped(
            below, click.Context(below, info_name=name, parent=context, terminal_width=WIDTH)
        )
    return parts


def functions() -> str:
    """The names of `whence`, then those of the rooms that users import from."""
    parts = ["# Python", "What docstrings say. Importing `whence` loads no framework."]
    parts += [
        _described(f"whence.{name}", getattr(whence, name)) for name in sorted(whence.__all__)
    ]
    for room, title in ROOMS.items():
        module = importlib.import_module(room)
        parts += [f"## {title}: {room}", _prose(inspect.getdoc(module) or "")]
        for name in getattr(module, "__all__", None) or _own(module):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                parts.append(_described(f"{room}.{name}", value, level=3))
    return "\n\n".join(parts) + "\n"


def _own(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def _described(name: str, value: Any, *, level: int = 2) -> str:
    """A heading, the signature, the docstring; of a class its public methods and properties too."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    short = name.rpartition(".")[2]
    parts = [
        f"{'#' * level} {name}",
        f"```python\n{_spelt(short, signature)}\n```",
        _prose(inspect.getdoc(value) or ""),
    ]
    if inspect.isclass(value):
        for part, method in vars(value).items():
            inner = (
                method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            )
            if part[0] != "_" and inspect.isfunction(inner) and inner.__doc__:
                called = inspect.signature(inner)
                shown = part if isinstance(method, property) else _spelt(part, called)
                parts += [f"**`.{shown}`**", _prose(inspect.getdoc(inner) or "")]
    return "\n\n".join(part for part in parts if part)


def _spelt(name: str, signature: inspect.Signature) -> str:
    """A signature as written, without `self`; a line for each argument where it is long."""
    taken = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    named = next((i for i, p in enumerate(taken) if p.kind is p.KEYWORD_ONLY), None)
    words = [_unquoted(str(p)) for p in taken]
    if named is not None and not any(p.kind is p.VAR_POSITIONAL for p in taken):
        words.insert(named, "*")
    back = signature.return_annotation
    end = (
        ")"
        if back is signature.empty
        else f") -> {back if isinstance(back, str) else inspect.formatannotation(back)}"
    )
    text = f"{name}({', '.join(words)}{end}"
    return (
        text
        if len(text) <= 100
        else "\n".join([f"{name}(", *(f"    {word}," for word in words), end])
    )


def _unquoted(argument: str) -> str:
    """Annotations that are kept as text come in quotes."""
    return (
        re.sub(r"^(\**\w+: )'(.*?)'(?= = |$)", r"\1\2", argument)
        .replace("whence.results.", "")
        .replace("typing.", "")
    )


def _prose(text: str) -> str:
    """A docstring as Markdown: indented parts are code, and what is said of an argument or field is
    a point of its own.
    """
    parts = []
    for part in re.split(r"\n\n+", inspect.cleandoc(text)):
        if part.startswith("    "):
            parts.append(f"```python\n{textwrap.dedent(part)}\n```")
            continue
        # Sentences begin with a capital: what does not, and ends in a colon, is a name.
        said = re.sub(
            r"(?:^|(?<=\. ))([a-z_]\w*(?:, [a-z_]\w*)*): ", r"\n\n- `\1`: ", " ".join(part.split())
        )
        parts.append(_escaped(re.sub(r"(?<=[.)]) (Raises|Returns) ", r"\n\n\1 ", said).strip()))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Text between backticks stays; elsewhere no sign is markup."""
    pieces = re.split(r"(`+[^`]*`+)", text)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", p) for i, p in enumerate(pieces)
    )
