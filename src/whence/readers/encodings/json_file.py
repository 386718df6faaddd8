"""JSON that another tool wrote, with the NaN and Infinity that Python's own writer leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BEGINNING = 64


def json_of(path: Path) -> Any:
    """What a file of JSON holds. Raises OSError; ValueError and RecursionError for text that is no
    JSON.

    Zeros are looked for first: a file of some hundred megabytes that was not written to its end
    takes several times its size as text, before a parser comes to them. The parser is that of the
    standard library: orjson ends the process where memory ends.
    """
    data = path.read_bytes()
    is_utf8 = json.detect_encoding(data).startswith("utf-8")
    if is_utf8 or not data[:_BEGINNING].strip(b"\0"):
        zero = data.find(b"\0")
        if zero >= 0:
            raise ValueError(f"it holds zeros from byte {zero} on: it was not written to its end")
    return json.loads(data)
