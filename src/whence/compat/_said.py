"""What a name of another tool says on stderr, once in a process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_printed: set[str] = set()


def once(text: str) -> None:
    """One line, the first time."""
    if text not in _printed:
        _printed.add(text)
        with contextlib.suppress(Exception):  # a stderr that is closed is not worth failing for
            sys.stderr.write(f"whence: {text}\n")


def same_as(name: str, command: str) -> None:
    """Say what of whence does the same as a name of the tool."""
    once(f"{name} is  {command}")


def without(
    name: str, options: Mapping[str, Any], why: Mapping[str, str], others: Iterable[str] = ()
) -> None:
    """Note options that change nothing here, each with its reason. Raises UsageError for an option
    that has none.

    options: name -> value, None or False where it was not given. others: options that do something,
    as hints for a misspelt one.
    """
    from whence.errors import UsageError

    for option, value in options.items():
        if option not in why:
            import difflib

            near = difflib.get_close_matches(option, [*others, *why], n=1)
            raise UsageError(
                f"{name} has no option "
                f"{option!r}{f'; did you mean {near[0]}?' if near else ' (docs/switching.md lists them)'}"  # noqa: E501
            )
        if value is not None and value is not False:
            once(f"{name}({option}=...) changes nothing: {why[option]}")
