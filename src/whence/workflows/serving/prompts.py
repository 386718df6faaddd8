"""Reads the prompts of a file, as token ids or as texts that a tokenizer makes token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whence.errors import UsageError
from whence.workflows.tokens.evaluations import as_record

_KEYS = ("src", "prompt", "prompt_token_ids")


def read_prompts(path: str) -> list[list[int] | str]:
    """Prompts of a file: JSON lines, or one array, of texts and lists of token ids, or of objects
    with one as `src`, `prompt` or `prompt_token_ids`, also samples of lm-evaluation-harness.
    Raises UsageError for what is none.
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
    filters = [entry.get("filter") if isinstance(entry, dict) else None for entry in entries]
    # Samples repeat a document for every filter of its answers.
    once = [entry for entry, by in zip(entries, filters) if by == filters[0]]
    return [_prompt(path, number, entry) for number, entry in enumerate(once, 1)]


def token_ids(prompts: Sequence[Sequence[int] | str], *owners: Any) -> list[tuple[int, ...]]:
    """The prompts as token ids; texts are encoded by the `tokenizer` of the first owner that has
    one. Raises UsageError where none has, and for no prompts or one without tokens.
    """
    tokenizer = next(filter(None, (getattr(owner, "tokenizer", None) for owner in owners)), None)
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise UsageError(
            "serve-check: a prompt is text; give the reference or the engine its `tokenizer` "
            "(model.tokenizer = AutoTokenizer.from_pretrained(...)), or write token ids"
        )
    encoded = (tokenizer.encode(p) if tokenizer and isinstance(p, str) else p for p in prompts)
    requests = [tuple(int(token) for token in prompt) for prompt in encoded]
    if not requests or not all(requests):
        raise UsageError("serve-check: no prompts, or one without tokens")
    return requests


_FEWEST_TOKENS = 3
"""A text with fewer tokens than this is not taken for a prompt that was changed."""


def given_instead(prompt: Sequence[int], served: int, texts: Sequence[Sequence[int]]) -> str:
    """How what a model was given differs from a prompt; "" where nothing tells.

    served: how many of the prompt's first tokens it was given. texts: what it was given beside.
    """
    whole, count = list(prompt), len(prompt)
    if count < _FEWEST_TOKENS or served >= count:
        return ""
    for text in map(list, texts):
        starts = range(len(text) - count + 1)
        at = next((n for n in starts if text[n : n + count] == whole), -1)
        if at >= 0:
            parts = {"in front of": text[:at], "behind": text[at + count :]}
            more = (f"{_tokens(tokens)} {where} it" for where, tokens in parts.items() if tokens)
            return f"it has {' and '.join(more)}"
        if _FEWEST_TOKENS <= len(text) < count and whole[-len(text) :] == text:
            return f"it lacks its first {count - len(text)} of {count} tokens"
        others = [n for n, pair in enumerate(zip(whole, text)) if pair[0] != pair[1]]
        if len(text) == count and 2 * len(others) <= count:
            first = others[0]
            how = f"token {first} is {text[first]}, not {whole[first]}"
            return f"{len(others)} of {count} tokens are others: {how}"
    is_cut = served >= _FEWEST_TOKENS and texts
    return f"it has only its first {served} of {count} tokens" if is_cut else ""


def _tokens(tokens: Sequence[int]) -> str:
    more = ", ..." if len(tokens) > _FEWEST_TOKENS else ""
    numbers = ", ".join(map(str, tokens[:_FEWEST_TOKENS]))
    return f"{len(tokens)} token{'' if len(tokens) == 1 else 's'} ({numbers}{more})"


def _line(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"prompts {path}: line {number}: not JSON: {error}") from error


def _prompt(path: str, number: int, entry: Any) -> list[int] | str:
    record = as_record(entry)
    if isinstance(record, dict):
        record = next((record[key] for key in _KEYS if key in record), None)
    if isinstance(record, str):
        return record
    if isinstance(record, list) and all(type(token) is int and token >= 0 for token in record):
        return record
    raise UsageError(f"prompts {path}: prompt {number} is neither text nor a list of token ids")
