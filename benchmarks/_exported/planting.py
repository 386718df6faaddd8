"""Faults that are planted in a treated file, and whether an answer names their node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {}


def answer(result: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
    return {"first": False}
