"""What of an answer is the same wherever it is given: places, times and versions are taken out and,
in the form that tests hold, every figure that depends on rounding.
"""

from __future__ import annotations

import re
from pathlib import Path

DIGITS = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
"""A float, kept to nine digits. Later ones depend on how numpy happens to align an array."""
TIMES = re.compile(
    r'("timing":\s*)\{[^}]*\}|("(?:\w+_s|seconds|started|ended|time|written)":\s*)[\d.e-]+'
    r"|\b\d+(?:\.\d+)? (?:s|ms|min|seconds)\b"
)
DATE = re.compile(
    r"\b20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(?:\+\d\d:\d\d|Z)?|\b20\d{12}\b"
)
PROCESS = re.compile(r"\b(rank\d{5})-[\w.]+-\d+|\b(pid|process) \d+")
VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:\.?[a-z]+\d*)?(?:[+-][\w.]+)?")
NUMBER = re.compile(r"[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\.\d+)", re.IGNORECASE)
SIZE = re.compile(r"\b\d+(?:\.\d+)?\s?(?:[kKMGT]i?B|B|bytes)\b")
COUNT = re.compile(r"\b\d+ (times|%|ulp|of \d+ (?:elements|values|numbers))")
HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b")
BLANKS = re.compile(r"(?<=\S)[ ─-]{2,}(?=\S)")


CASE_LINE = re.compile(r"(_golden/\w+\.py|tests/[\w/]+\.py):\d+")


def plain(text: str, folder: Path, root: Path) -> str:
    """Without times and the places of this machine, floats at nine digits."""
    text = text.replace(str(folder), ".").replace(str(root), "<whence>")
    text = PROCESS.sub(lambda m: f"{m.group(1) or m.group(2)}<process>", text)
    text = CASE_LINE.sub(r"\1:<line>", text)
    text = DATE.sub("<date>", text)
    text = DIGITS.sub(lambda m: f"{float(m.group()):.9g}", text)
    if text.startswith("{"):  # JSON in one line: a line a value, so that a difference can be read
        text = text.replace(",", ",\n")
    return TIMES.sub(lambda m: f"{m.group(1) or m.group(2) or ''}<time>", text)


def held(text: str) -> str:
    """The words of a plain text: without figures that another processor may give otherwise."""
    text = HASH.sub("<hash>", VERSION.sub("<version>", text))
    text = COUNT.sub(lambda m: f"# {re.sub(r'[0-9]+', '#', m.group(1))}", SIZE.sub("<size>", text))
    text = NUMBER.sub("#", text)
    return "\n".join(BLANKS.sub("  ", line).rstrip() for line in text.splitlines()) + "\n"
