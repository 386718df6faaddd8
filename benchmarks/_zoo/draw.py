"""Which architectures and ways may set something, and which are held back: drawn by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("draw.json")
_SAME = "trained-with-"  # a way under training is in the half of the way


def is_held(kind: str, name: str) -> bool:
    """Is this "architecture" or "way" in the half that sets nothing?"""
    text = f"whence zoo {kind} {name.removeprefix(_SAME)}"
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


def drawn(kinds: dict[str, list[str]]) -> dict[str, Any]:
    """Both halves of each kind of names."""
    return {
        kind: {
            half: sorted(n for n in names if is_held(kind, n) == (half == "held"))
            for half in ("setting", "held")
        }
        for kind, names in kinds.items()
    }


def written() -> dict[str, Any]:
    """The draw as it was written down."""
    out: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return out


def write(kinds: dict[str, list[str]]) -> None:
    """Write the draw down; what it holds already stays where it is."""
    FILE.write_text(json.dumps(drawn(kinds), indent=1) + "\n", encoding="utf-8")
