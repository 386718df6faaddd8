"""The help of every command, and what commands say of wrong words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from _golden.place import DATA, Answers, Case, Place
from whence import cli


def _lines(command: click.Command, words: Sequence[str] = ()) -> Iterator[Sequence[str]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _lines(child, (*words, name))


def _help(place: Place) -> Answers:
    for words in _lines(cli.group):
        yield f"{'.'.join(words) or 'whence'}.txt", place.whence(*words, "--help")
    yield "all.txt", place.whence("compare", "--help-all")


def _wrong(place: Place) -> Answers:
    """What is said of a run that is not there, of an option that is not known, and the like."""
    (place.folder / "out/text.json").write_text("[")
    (place.folder / "out/empty").mkdir()
    for number, words in enumerate(
        (
            ("compare", "here", "there"),
            ("compare", "out/text.json", "out/empty"),
            ("show", "out/empty"),
            ("compare", DATA / "polygraphy/ref.json", DATA / "polygraphy/ref.json", "--mach", "no"),
            ("compare", DATA / "polygraphy/ref.json", DATA / "polygraphy/ref.json", "--map", "m"),
            ("nans", "here"),
            ("trace",),
            ("report", "out/empty"),
            ("include",),
            (),
        )
    ):
        yield f"{number}.txt", place.whence(*words)


CASES: dict[str, Case] = {"help": _help, "wrong": _wrong}
