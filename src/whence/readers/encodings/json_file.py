"""Reads JSON that another tool wrote, including the NaN and Infinity that Python's own writer
emits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from whence.errors import UnreadableRun
from whence.readers.encodings import limits

_BEGINNING = 64
_PIECE = 1 << 20
_WIDE_BYTES = 256 << 20


def json_of(path: Path) -> Any:
    """Returns the content of a JSON file. Raises OSError; ValueError and RecursionError for text
    that is not JSON.

    Zero bytes are searched first, piece by piece: an incomplete or sparse file (a few bytes on the
    disk, gigabytes to read) would take several times its size as text before a parser reaches them.
    The parser is that of the standard library: orjson aborts the process when memory runs out.
    """
    with path.open("rb") as file:
        head = file.read(_BEGINNING)
        size = os.fstat(file.fileno()).st_size
        if json.detect_encoding(head).startswith("utf-8") or not head.strip(b"\0"):
            refuse_zeros(file)
        elif size > _WIDE_BYTES:
            raise ValueError(f"it has {size} bytes and is not written in UTF-8; write it in UTF-8")
        file.seek(0)
        return json.loads(file.read())


_AGAIN = "copy or dump it again"


def tree_of(path: Path, name: str, remedy: str = _AGAIN, limit: int = limits.JSON_BYTES) -> Any:
    """As `json_of`; raises UnreadableRun, also beyond `limit` bytes. name: in errors."""
    try:
        if (size := path.stat().st_size) > limit:
            raise UnreadableRun(f"{name} has {size} bytes, more than {limit}; dump less at once")
        return json_of(path)
    except OSError as error:
        raise UnreadableRun(f"cannot read {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        words = str(error)[:120]
        raise UnreadableRun(
            f"{name} is damaged or was not written to its end ({words}); {remedy}"
        ) from error


def object_of(
    path: Path, name: str, remedy: str = _AGAIN, limit: int = limits.JSON_BYTES
) -> dict[str, Any]:
    """As `tree_of`, for a file that holds an object."""
    tree = tree_of(path, name, remedy, limit)
    if not isinstance(tree, dict):
        raise UnreadableRun(f"{name} holds a {type(tree).__name__}, not an object")
    return tree


def leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, leaf) of nested lists and objects, in their order; a value that is
    neither is a leaf as well.
    """
    todo = [("", tree)]
    while todo:
        path, node = todo.pop()
        if is_leaf(node) or not isinstance(node, (dict, list)):
            yield path, node
            continue
        parts = node.items() if isinstance(node, dict) else enumerate(node)
        inner = [(f"{path}.{key}" if path else str(key), part) for key, part in parts]
        todo += reversed(inner)


def refuse_zeros(file: IO[bytes]) -> None:
    """Raises ValueError where a text holds zero bytes."""
    file.seek(0)
    place = 0
    while piece := file.read(_PIECE):
        zero = piece.find(b"\0")
        if zero >= 0:
            raise ValueError(
                f"it holds zeros from byte {place + zero} on: it was not written to its end"
            )
        place += len(piece)
