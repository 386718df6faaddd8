"""The text of tokens, from a `tokenizer.json` on this machine.

The file is read as data: its list of pieces is looked up, and nothing in it is executed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whence.records import Run
from whence.results import Comparison

_FILE = "tokenizer.json"
_LARGEST = 100_000_000  # bytes
_LONGEST = 60  # characters of a token


def vocabulary(
    compared: Comparison, runs: tuple[Run, Run] | None, given: Path | None = None
) -> tuple[tuple[int, str], ...]:
    """(number, text) of every token that both runs generated or received.

    given: a tokenizer.json, or a folder that contains one. Without it, the folders that the
    commands of the runs name are searched; () when none is found.
    """
    if compared.generation is None:
        return ()
    wanted = {token.reference for token in compared.generation.tokens}
    wanted |= {token.target for token in compared.generation.tokens}
    wanted |= {number for prompt in compared.generation.prompts for number in prompt.ids[:64]}
    for file in [_file(given)] if given is not None else _beside(runs or ()):
        if (texts := _texts(file)) is not None:
            return tuple((n, texts[n][:_LONGEST]) for n in sorted(wanted) if n in texts)
    return ()


def is_tokenizer(path: Path) -> bool:
    """Whether this is a model's tokenizer.json, or a folder that contains one."""
    return _texts(_file(path)) is not None


def _file(path: Path) -> Path:
    return path / _FILE if path.is_dir() else path


def _beside(runs: Iterable[Run]) -> Iterator[Path]:
    """Candidate files in the folders that a command names."""
    for run in runs:
        for word in run.info.command:
            value = word.partition("=")[2] if word.startswith("-") else word
            place = Path(run.info.cwd) / value
            if value and len(value) < 1000 and (place / _FILE).is_file():
                yield place / _FILE


def _texts(file: Path) -> dict[int, str] | None:
    """Text by token number; None for a file that is no tokenizer."""
    try:
        if file.stat().st_size > _LARGEST:
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        model = content["model"]
        pieces = _pieces(model)
        is_bytes = "ByteLevel" in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
        texts = {number: _readable(piece, is_bytes) for piece, number in pieces}
        for added in content.get("added_tokens") or ():
            texts[int(added["id"])] = str(added["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return texts


def _pieces(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(piece, number) of each token.

    BPE and WordPiece store a table, Unigram a list of (piece, score).
    """
    table = model["vocab"]
    if isinstance(table, dict):
        yield from ((str(piece), int(number)) for piece, number in table.items())
    else:
        yield from ((str(entry[0]), number) for number, entry in enumerate(table))


def _readable(piece: str, is_bytes: bool) -> str:
    if is_bytes:
        table = _byte_of()
        if all(sign in table for sign in piece):
            return bytes(table[sign] for sign in piece).decode("utf-8", "replace")
        return piece
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)]).decode("utf-8", "replace")
    return piece.replace("\u2581", " ")


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte for each sign of a byte-level tokenizer: printable bytes stand for themselves,
    others are written as signs from 256 on.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(others)}
