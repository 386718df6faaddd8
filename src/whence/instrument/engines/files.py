"""Files that a model is loaded from: their size and hash."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 1 << 24


def facts_of_file(path: str) -> dict[str, Any]:
    """Name, size and hash of a model's file; no hash where it cannot be read."""
    facts: dict[str, Any] = {"model": os.path.basename(path)}  # noqa: PTH119
    try:
        facts |= {"model_bytes": Path(path).stat().st_size, "model_hash": _hash_of(path)}
    except OSError:
        facts["model_hash"] = ""  # the program deleted it, or never had it on disk
    return facts


def facts_of_bytes(data: bytes) -> dict[str, Any]:
    """Size and hash of a model that was given as bytes."""
    digest = xxhash.xxh3_128_hexdigest(data)
    return {"model": "(bytes)", "model_bytes": len(data), "model_hash": digest}


def files_beside(path: str, names: Iterable[str]) -> dict[str, str]:
    """Hashes of the files beside a model that hold its parameters, by name; "" of one that cannot
    be read.
    """
    hashes = {}
    for name in sorted(names):
        try:
            hashes[name] = _hash_of(os.path.join(os.path.dirname(path), name))  # noqa: PTH118, PTH120
        except OSError:
            hashes[name] = ""
    return hashes


def _hash_of(path: str) -> str:
    """xxh3_128 of a file, read in pieces."""
    state = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while piece := file.read(_CHUNK):
            state.update(piece)
    return state.hexdigest()
