"""Values of a policy file: read, or refused with a sentence that says what they may be."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from whence.errors import UsageError


def suggestion(word: Any, among: Sequence[str]) -> str:
    names = {name.lower(): name for name in among}
    near = difflib.get_close_matches(str(word).lower(), names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def check_keys(table: Mapping[Any, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise UsageError(
                f"{where}: unknown key {str(key)[:60]!r}; known: "
                f"{', '.join(keys)}{suggestion(key, keys)}"
            )


def read_patterns(value: Any, where: str) -> tuple[str, ...]:
    patterns = [] if value is None else value if isinstance(value, list) else [value]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UsageError(f"{where} must be a pattern or a list of patterns, not {pattern!r}")
        if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
            try:
                re.compile(pattern[1:-1])
            except re.error as error:
                raise UsageError(
                    f"{where}: {pattern} is not a regular expression: {error}"
                ) from error
    return tuple(patterns)


def read_word(value: Any, allowed: Sequence[str], where: str) -> str:
    if value not in allowed or not isinstance(value, str):
        raise UsageError(
            f"{where} is {value!r}; one of "
            f"{', '.join(a for a in allowed if a)}{suggestion(value, allowed)}"
        )
    return value


def read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text, not {value!r}")
    return value


def read_truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false, not {value!r}")
    return value


def read_number(value: Any, where: str, *, negative: bool = False) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or (value < 0 and not negative)
    ):
        raise UsageError(
            f"{where} is {value!r}: a {'finite number' if negative else 'number of at least 0'}"
        )
    return float(value)
