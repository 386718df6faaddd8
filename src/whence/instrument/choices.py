"""Values of options that are one of a few."""

from __future__ import annotations

import difflib

from whence.errors import UsageError


def one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(
            f"{option}: {value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}"
        )


def nearest(name: str, choices: tuple[str, ...]) -> str:
    """ " (did you mean NAME?)", "" where nothing is near."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
