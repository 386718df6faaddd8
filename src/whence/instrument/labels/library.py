"""Profiles of accelerated libraries that can save their tensors: the environment variables that
make them do it, and the places of the files. Profiles are data files.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from whence.errors import UsageError
from whence.instrument.labels.labels import Waiting, filled

FOLDER = Path(__file__).parent / "libraries"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a library is made to save its tensors.

    variables: of the environment of the program, set to what {max}, {runner} and {dump} make of
    these texts; one that the user has exported stays as it is unless an option says otherwise. max:
    of {max} when nobody says. dump: the folder it writes to when nobody says, below the folder the
    program is started in. task: variables that change with each task, from {pid}, {task} and
    {number} (of the task, from 0). places: where the file of a label lies below the dump folder,
    from these, {tid}, {rank}, {file} and wild cards; the first that exists counts.
    """

    variables: dict[str, str] = {}
    max: int = 1
    dump: str = "."
    task: dict[str, str] = {}
    places: tuple[str, ...] = ("{task}/{file}", "{file}")


class Library(msgspec.Struct, frozen=True):
    """A profile with what was asked of it. dump: absolute."""

    name: str
    profile: Profile
    dump: str
    variables: dict[str, str]

    @property
    def limit(self) -> tuple[str, int] | None:
        """The variable that says how many tokens are saved, and how many; None where none does."""
        for variable, text in self.profile.variables.items():
            value = self.variables.get(variable, "")
            if "{max}" in text and value.isdigit():
                return variable, int(value)
        return None

    def hides(self, file: str) -> str:
        """Which variable keeps the library from writing a file, as the begin of a sentence; ""
        where none does.
        """
        for variable, text in self.profile.variables.items():
            listed = self.variables.get(variable, "")
            named = (name in file for name in re.findall(r"[^\s,;]+", listed))
            if "{runner}" in text and listed and not any(named):
                return f"{variable}={listed} hides it, none of these is in its path; "
        return ""

    def places(self, label: Waiting) -> list[str]:
        """Paths, with wild cards, at which the file of a label may lie, in the order in which they
        are tried.
        """
        if Path(label.file).is_absolute():
            return [glob.escape(label.file)]
        values = {
            "pid": label.pid,
            "tid": label.tid,
            "rank": label.rank,
            "number": label.number,
            "file": label.file,
            "task": label.task,
        }
        escaped = {name: glob.escape(str(value)) for name, value in values.items()}
        usable = (p for p in self.profile.places if label.task or "{task}" not in p)
        return [
            os.path.normpath(Path(glob.escape(self.dump)) / filled(place, **escaped))
            for place in usable
        ]


NOWHERE = Profile(places=("{file}",))


def known() -> list[str]:
    """Names of the profiles that come along."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load(
    name: str,
    *,
    runner: str = "",
    max_tokens: int | None = None,
    dump: str = "",
    start: Path | None = None,
    environment: Mapping[str, str] = {},
) -> Library:
    """The library called `name`, or described by the profile file `name`, and what is asked of it.

    runner: white list of its operations, "" for all. dump: its folder of tensors. start: where the
    program starts. environment: of the program; its variables win over what the profile assumes,
    and lose against `runner`, `max_tokens` and `dump`. Raises UsageError: no such
    profile or file, a key that is not known, a number below 1.
    """
    from whence import config_files

    file = _profile_file(name)
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"library-max {max_tokens}: a number of tokens, 1 or more")
    try:
        data = config_files.yaml_value(config_files.text_of(file))
        profile = msgspec.convert(data or {}, Profile, strict=False)
    except (OSError, UnicodeDecodeError, config_files.NotConfig, msgspec.ValidationError) as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"library profile {file}: {words}; known keys: {', '.join(Profile.__struct_fields__)}"
        ) from None
    options = {"max": max_tokens is not None, "runner": bool(runner), "dump": bool(dump)}
    dump_values = {
        variable: environment[variable]
        for variable, text in profile.variables.items()
        if variable in environment
        and not any(options[option] and "{" + option + "}" in text for option in options)
    }
    place = dump or next(
        (
            dump_values[v]
            for v, text in profile.variables.items()
            if v in dump_values and text.rstrip("/") == "{dump}"
        ),
        "",
    )
    folder = os.path.normpath((start or Path.cwd()) / Path(place or profile.dump).expanduser())
    values: dict[str, Any] = {
        "max": profile.max if max_tokens is None else max_tokens,
        "runner": runner,
        "dump": folder,
    }
    variables = {
        variable: filled(str(text), **values) for variable, text in profile.variables.items()
    }
    return Library(Path(name).stem, profile, folder, {**variables, **dump_values})


def _profile_file(name: str) -> Path:
    file = FOLDER / f"{name}.yaml"
    if re.fullmatch(r"\w+", name) and file.is_file():
        return file
    file = Path(name)
    if not file.is_file():
        close = difflib.get_close_matches(name, known(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(
            f"library {name!r}: no profile of that name{hint} and no such file; there are "
            f"{', '.join(known())}"
        )
    return file


def anywhere(dump: str = "", cwd: str = "") -> Library:
    """No library in particular: files lie where their labels say, below a folder."""
    return Library("", NOWHERE, str(Path(cwd) / dump) if cwd else dump, {})


def encoded(library: Library) -> dict[str, Any]:
    """A library as plain JSON values."""
    plain: dict[str, Any] = msgspec.to_builtins(library)
    return plain


def decoded(plain: Mapping[str, Any]) -> Library:
    """Back from `encoded`."""
    return msgspec.convert(dict(plain), Library)
