"""Values of capture options as text: tree numbers, ranks, sizes and patterns."""

from __future__ import annotations

import re

from whence.errors import UsageError

TREE_NUMBER = re.compile(r"(0|[1-9][0-9]*(_[1-9][0-9]*)*)")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def parse_ids(text: str) -> tuple[str, ...]:
    """Read "3,7_1" -> ("3", "7_1"). Raises UsageError for what is not a tree number."""
    numbers = tuple(part.strip() for part in text.split(",") if part.strip())
    for number in numbers:
        if not TREE_NUMBER.fullmatch(number):
            raise UsageError(
                f"ids: {number!r} is not a tree number like 0, 3 or 7_1 (whence show RUN --tree "
                "lists them)"
            )
    if not numbers:
        raise UsageError("ids: no tree number given; write them like 3,7_1")
    return numbers


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read "0,3" -> (0, 3), "0-2" -> (0, 1, 2). Raises UsageError."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ranks.extend(range(int(first), int(last) + 1) if dash else [int(first)])
        except ValueError:
            raise UsageError(f"ranks: {text!r} is not a list of ranks like 0,3 or 0-7") from None
    if not ranks:
        raise UsageError(f"ranks: {text!r} holds no rank")
    return tuple(dict.fromkeys(ranks))


def parse_size(text: str) -> int:
    """Read "20GB" -> 20 * 10**9, "512MiB" -> 512 * 2**20, "4096" -> 4096 bytes. Raises
    UsageError.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise UsageError(f"size: {text!r} is not a number of bytes like 20GB, 512MiB or 4096")
    power = " kmgtp".index(match[2].lower() or " ")
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if size >= 1 << 62:
        raise UsageError(f"size: {text[:40]!r} is more than any disk holds")
    return int(size)


def check_pattern(pattern: str, option: str) -> None:
    """Raise UsageError when `pattern` is empty or an invalid regular expression (`re:...`)."""
    if not pattern:
        raise UsageError(f"{option}: an empty pattern matches nothing; * matches every name")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as err:
            raise UsageError(f"{option}: {pattern!r} is not a regular expression: {err}") from None
