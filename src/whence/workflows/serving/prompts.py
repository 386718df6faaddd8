"""Reads the prompts of a file as token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whence.errors import UsageError

_KEYS = ("src", "prompt", "prompt_token_ids")


def read_prompts(path: str) -> list[list[int]]:
    """Prompts of a file: JSON lines, or one array, of lists of token ids or of objects with such a
    list as `src`, `prompt` or `prompt_token_ids`. Raises UsageError for what is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts {path}: {error}") from error
    try:
        entries = json.loads(text)
        if isinstance(entries, dict) or (entries and isinstance(entries[0], int)):
            entries = [entries]
    except ValueError:
        entries = [
            _line(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
    if not isinstance(entries, list):
        raise UsageError(f"prompts {path}: neither lines nor an array of prompts")
    return [_tokens(path, number, entry) for number, entry in enumerate(entries, 1)]


def _line(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"prompts {path}: line {number}: not JSON: {error}") from error


def _tokens(path: str, number: int, entry: Any) -> list[int]:
    if isinstance(entry, dict):
        entry = next((entry[key] for key in _KEYS if key in entry), None)
    if not isinstance(entry, list) or not all(type(token) is int and token >= 0 for token in entry):
        raise UsageError(
            f"prompts {path}: prompt {number} is not a list of token ids; write them with the "
            "model's tokenizer"
        )
    return entry
