"""Statistics of tensors in tables (.csv, or printed in columns) and in trees (.json, .jsonl), as
lines of a log.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.encodings.printed_text import ALIASES, FIGURES

_TREES = (".json", ".jsonl", ".ndjson")
SUFFIXES = (".csv", ".tsv", *_TREES)
_ENOUGH = 2
"""Least number of statistics that tell a record of a tensor from other numbers."""
_WORDS = FIGURES | ALIASES.keys()
_SIDE = re.compile(r"(?:(input|output|in|out)[_.](?=[a-z]))?")
"""The side of a module in front of a word."""
_KEY = re.compile(
    rf"\"{_SIDE.pattern}({'|'.join(_WORDS)})\"\s*:\s*-?[\dNI]".encode(), re.IGNORECASE
)
_HEADER = re.compile(
    rf"^(?=[^\d\n]*$).*\b(?:{'|'.join(_WORDS)})[ \t|]+(?:.*[ \t|])?(?:{'|'.join(_WORDS)})\b",
    re.IGNORECASE | re.MULTILINE,
)
"""A line of words, with two statistics, above the columns of a printed table."""
_CELL = re.compile(r"\([^()\n]*\)|\[[^\[\]\n]*\]|\S+")
_RULE = re.compile(r"[\s|+=:-]*")
_STEPS = ("step", "iteration", "iter", "batch", "sample")
_DEEPEST = 64


def sniff(head: bytes, suffix: str) -> bool:
    """Whether a text that begins so holds statistics of tensors."""
    if suffix in _TREES:
        return len({m[2].lower() for m in _KEY.finditer(head)}) >= _ENOUGH
    header = re.split(rb"[,\t;]", head.partition(b"\n")[0])
    words = (cell.strip(b" \r\"'").lower().decode("ascii", "replace") for cell in header)
    return suffix in SUFFIXES and sum(_SIDE.sub("", word, 1) in _WORDS for word in words) >= _ENOUGH


def of_columns(text: str) -> str:
    """Returns a log with the rows of its printed tables as lines of name, shape and statistics: all
    rows with as many cells as a line above that names two statistics or more.
    """
    if not _HEADER.search(text):
        return text
    words: list[str] = []
    out: list[str] = []
    for line in text.split("\n"):
        cells = [c.strip() for c in line.strip(" |").split("|")]
        cells = cells if len(cells) > 1 else _CELL.findall(line)
        if sum(cell.lower() in _WORDS for cell in cells) >= _ENOUGH:
            words = [cell.lower() for cell in cells]
        elif words and len(cells) == len(words) and not _RULE.fullmatch(line):
            out += _line("", dict(zip(words, cells, strict=True)))
        else:
            out.append(line)
    return "\n".join(out)


def lines(text: str, suffix: str) -> str:
    """Returns a line of name, shape and statistics for each record. Raises UnreadableRun."""
    try:
        return "\n".join(_of_trees(text) if suffix in _TREES else _of_table(text)) + "\n"
    except (ValueError, RecursionError, csv.Error) as error:
        raise UnreadableRun(f"its statistics cannot be read: {str(error)[:120]}") from error


def _of_table(text: str) -> Iterator[str]:
    lines = text.splitlines()
    marks = max(",\t;", key=lines[0].count) if lines else ","
    header, *rows = csv.reader(lines, delimiter=marks)
    words = [word.strip().lower() for word in header]
    for row in filter(None, rows):
        if len(row) != len(words):
            raise UnreadableRun(f"its header has {len(words)} cells, a row {len(row)}")
        if words != [cell.strip().lower() for cell in row]:  # a header again, as from appending
            yield from _line("", dict(zip(words, row, strict=True)))


def _of_trees(text: str) -> Iterator[str]:
    try:
        trees = [json.loads(text)]
    except ValueError:
        trees = [json.loads(line) for line in text.splitlines() if line.strip()]
    for tree in trees:
        yield from _below("", tree, 0)


def _below(name: str, node: Any, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise UnreadableRun("it is nested too deeply")
    if isinstance(node, dict):
        words = {str(key).lower(): part for key, part in node.items()}
        numbers = [w for w, part in words.items() if isinstance(part, (int, float))]
        if sum(_SIDE.sub("", w, 1) in _WORDS for w in numbers) >= _ENOUGH:
            yield from _line(name, words)
            return
    parts = node.items() if isinstance(node, dict) else enumerate(node)
    for key, part in parts if isinstance(node, (dict, list)) else ():
        if isinstance(part, (dict, list)):
            yield from _below(f"{name}.{key}".strip("."), part, depth + 1)


def _line(name: str, record: dict[str, Any]) -> Iterator[str]:
    """Yields the line of a record; before it that of its step, if it states one."""
    step = next((record[word] for word in _STEPS if str(record.get(word, "")).isdecimal()), None)
    if step is not None:
        yield f"step {step}"
    sides: dict[str, dict[str, Any]] = {}
    for key, part in record.items():
        match = _SIDE.match(key)
        side, word = (match[1] or "", key[match.end() :]) if match else ("", key)
        if word in _WORDS or word == "shape":
            sides.setdefault(side, {})[word] = part
    texts = [t for word, t in record.items() if isinstance(t, str) and word not in _WORDS]
    named = [t for t in texts if re.search(r"[^\W\d_]", t) and not re.match(r"torch\.|float|\(", t)]
    whole = ".".join(filter(None, (name, next(iter(named), "")))) or "tensor"
    for side, its in sides.items():
        shape = ", ".join(re.findall(r"\d+", str(its.pop("shape", ""))))
        if its:
            figures = " ".join(f"{word}={number}" for word, number in its.items())
            yield f"{whole}{side and '.'}{side} shape=({shape}) {figures}"
