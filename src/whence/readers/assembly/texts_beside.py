"""Small texts that describe the files of a dump: one beside each, or one for all of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from whence.regular_files import is_regular

_OF_ONE = (".json", ".txt", ".shape", ".meta")
_OF_ALL = (".json", ".txt")
_LARGEST, _MOST = 16 << 20, 16  # bytes of a text; texts of a folder that are tried
_NAMES = ("name", "module", "layer", "tensor")
_LINE = re.compile(r"^(\S+?):?[ \t]+(\S.*)$", re.MULTILINE)


class TextsBeside:
    """What texts say of the files below a folder; each text is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[PurePosixPath, Any] = {}
        self._indexes: dict[PurePosixPath, dict[str, Any]] = {}

    def of(self, name: str) -> Iterator[Any]:
        """Yields what is said of a file, the text of its own first: JSON, or words. name: relative,
        with forward slashes.
        """
        pure = PurePosixPath(name)
        for suffix in _OF_ONE:
            yield self._read(pure.with_suffix(suffix))
            yield self._read(pure.with_name(pure.name + suffix))
        if pure.parent not in self._indexes:
            self._indexes[pure.parent] = self._index(pure.parent)
        index = self._indexes[pure.parent]
        yield from (index[key] for key in (pure.name, pure.stem) if key in index)

    def called(self, name: str) -> str:
        """Returns the name of the tensor in a file, "" where no text states it."""
        for value in self.of(name):
            if isinstance(value, dict):
                value = next((value[k] for k in _NAMES if isinstance(value.get(k), str)), None)
            elif self._is_beside(name, value):
                continue
            if isinstance(value, str) and value:
                return value
        return ""

    def _is_beside(self, name: str, value: Any) -> bool:
        """Whether words are those of the text of a file of its own: not its name."""
        return any(value is text for path, text in self._texts.items() if path.stem in name)

    def _index(self, folder: PurePosixPath) -> dict[str, Any]:
        """Returns what the texts of a folder say, by name of a file: under it as a key, in an entry
        with it, at its number in a list, or behind it in a line.
        """
        try:
            names = [PurePosixPath(entry.name) for entry in os.scandir(self._root / folder)]
        except OSError:
            return {}
        others = {name.stem for name in names if name.suffix not in _OF_ALL}
        texts = sorted(n for n in names if n.suffix in _OF_ALL and n.stem not in others)
        index: dict[str, Any] = {}
        for text in texts if len(texts) <= _MOST else ():
            tree = self._read(folder / text)
            if isinstance(tree, str):
                tree = dict(_LINE.findall(tree))
            for part in [tree, *(tree.values() if isinstance(tree, dict) else ())]:
                if isinstance(part, (dict, list)):
                    index |= dict(_entries(part))
        return index

    def _read(self, name: PurePosixPath) -> Any:
        """Returns a JSON text, or its words; None where there is none."""
        if name not in self._texts:
            path = self._root / name
            try:
                is_small = is_regular(path) and path.stat().st_size <= _LARGEST
                text = path.read_text("utf-8") if is_small and not path.is_symlink() else ""
                self._texts[name] = json.loads(text) if name.suffix == ".json" else text
            except (OSError, ValueError, RecursionError):
                self._texts[name] = None
        return self._texts[name]


def _entries(tree: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields (key, part); of a part with texts, also under each of them, as names of files."""
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield str(key), part
        if isinstance(part, dict):
            for text in part.values():
                if isinstance(text, str):
                    yield PurePosixPath(text).name, part
