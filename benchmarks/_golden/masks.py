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
HOST = re.compile(r"\([\w.-]+, pid")
VERSION = re.compile(r"(?<![\w.])\d+\.\d+\.\d+(?:\.?[a-z]+\d*)?(?:[+-][\w.]+)?")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)(?![\w.]*\w)")
SIZE = re.compile(r"\b\d+(?:\.\d+)?\s?(?:[kKMGT]i?B|B|bytes)\b")
COUNT = re.compile(r"\b\d[\d,]* (times|%|ulp|of \d+ (?:elements|values|numbers))")
HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b")
BLANKS = re.compile(r"(?<=\S) {2,}(?=\S)|-{4,}|─{2,}")

INTERPRETER = re.compile(r"\S*/(?:tests/warm/\w+|bin)/python3?(?:\.\d+)?(?![\w/.])")
CASE_LINE = re.compile(r"((?:<whence>|_golden|tests)/[\w/+.-]*\.py):\d+")
VERSIONS = re.compile(
    r"^(  versions +|  environment +|    (?:first|second) +\w+ \().*$", re.MULTILINE
)
WHERE = re.compile(r" by \S+ on \S+ in \S+")


def plain(text: str, folder: Path, root: Path) -> str:
    """Without times and the places of this machine, floats at nine digits."""
    text = text.replace(str(folder), ".").replace(str(folder.parents[2]), "<runs>")
    text = text.replace(str(root), "<whence>")
    text = INTERPRETER.sub("python", text)
    text = HOST.sub("(<host>, pid", text)
    text = PROCESS.sub(lambda m: f"{m.group(1) or m.group(2)}<process>", text)
    text = WHERE.sub(" by <user> on <host>", VERSIONS.sub(r"\1<versions>", text))
    text = CASE_LINE.sub(r"\1:<line>", text)
    text = DATE.sub("<date>", text)
    text = DIGITS.sub(lambda m: f"{float(m.group()):.9g}", text)
    if text.startswith("{"):  # JSON in one line: a line a value, so that a difference can be read
        text = text.replace(",", ",\n")
    return TIMES.sub(lambda m: f"{m.group(1) or m.group(2) or ''}<time>", text)


PROCESSOR = re.compile(r"cpu_capability \w+|\b(?:AVX|avx)\w*")
SETTINGS = re.compile(r"\{[^\n]*\"sdp_math\"[^\n]*")
ROUNDED = re.compile(
    r"^(?:  how sure |  would have seen |  at the outputs |  by type |FIRST DIFFERENCE "
    r"|  output error |  overlap |  third run |  error ratio |OUTPUT ERROR |LEFT ).*\n",
    re.MULTILINE,
)
"""Lines that say how kernels rounded, and what was therefore replayed."""
ALIKE = re.compile(
    r"^(SAME +)(?:bitwise identical|no fault: bitwise identical in what both runs show"
    r"|no fault: every difference is rounding)$",
    re.MULTILINE,
)
"""Kernels of some processors give the same bits where those of others round otherwise."""
KINDS = re.compile(r"(?<=[ :])\d+ (?:identical|noise|inherited|amplified)(?:, |(?=;))")


WORST = re.compile(r"(worst element +)\[[\d, ]*\]")


def held(text: str) -> str:
    """The words of a plain text: without what another processor may give otherwise."""
    text = KINDS.sub("", ALIKE.sub(r"\1alike", ROUNDED.sub("", SETTINGS.sub("<settings>", text))))
    text = WORST.sub(r"\1[#]", PROCESSOR.sub("<processor>", text))
    text = HASH.sub("<hash>", VERSION.sub("<version>", text))
    text = NUMBER.sub("#", SIZE.sub("<size>", text))
    text = COUNT.sub(lambda m: f"# {re.sub(r'[0-9]+', '#', m.group(1))}", text)
    return "\n".join(BLANKS.sub("  ", line).rstrip() for line in text.splitlines()) + "\n"
