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
_NO_SPACE = re.compile(r"\S+")
_LINE = re.compile(r"^(\S+?):?[ \t]+(\S.*)$", re.MULTILINE)


class TextsBeside:
    """What texts say of the files below a folder; each text is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[PurePosixPath, Any] = {}
        self._folders: dict[PurePosixPath, tuple[frozenset[str], dict[str, Any]]] = {}
        self._silent: dict[str, bool] = {}

    def of(self, name: str) -> Iterator[Any]:
        """Yields what is said of a file, the text of its own first: JSON, or words. name: relative,
        with forward slashes.
        """
        yield from self._own(PurePosixPath(name))
        yield from self._listed(PurePosixPath(name))

    def called(self, name: str) -> str:
        """Returns the name of the tensor in a file, "" where no text states it."""
        folder = name.rpartition("/")[0]
        if folder not in self._silent:
            self._silent[folder] = not any(self._folder(PurePosixPath(folder)))
        if self._silent[folder]:
            return ""
        pure = PurePosixPath(name)
        trees = [tree for tree in self._own(pure) if isinstance(tree, dict)]
        return next(filter(None, map(_name_in, (*trees, *self._listed(pure)))), "")

    def listed(self, name: str, count: int) -> list[str]:
        """Returns the names that a text in the folder of a file lists, if they are `count`: a list
        of JSON, lines, or names at their numbers; [] where none does. name: of the file.
        """
        folder = PurePosixPath(name).parent
        texts, _ = self._folder(folder)
        for text in sorted(texts) if len(texts) <= _MOST else ():
            tree = self._read(folder / text)
            if isinstance(tree, dict) and all(key == str(n) for n, key in enumerate(tree)):
                tree = list(tree.values())
            lines = tree.split("\n") if isinstance(tree, str) else tree
            names = [_name_in(part) for part in lines or ()] if isinstance(lines, list) else []
            names = names[:-1] if isinstance(tree, str) and names[-1:] == [""] else names
            if len(names) == count == len(set(names)) and all(map(_NO_SPACE.fullmatch, names)):
                return names
        return []

    def _own(self, pure: PurePosixPath) -> Iterator[Any]:
        names, _ = self._folder(pure.parent)
        for suffix in _OF_ONE:
            for name in (f"{pure.stem}{suffix}", f"{pure.name}{suffix}"):
                if name in names:
                    yield self._read(pure.with_name(name))

    def _listed(self, pure: PurePosixPath) -> list[Any]:
        _, index = self._folder(pure.parent)
        return [index[key] for key in (pure.name, pure.stem) if key in index]

    def _folder(self, folder: PurePosixPath) -> tuple[frozenset[str], dict[str, Any]]:
        """Returns (names of texts, what texts say by name of a file): under it as a key, in an
        entry with it, at its number in a list, or behind it in a line.
        """
        if folder not in self._folders:
            try:
                names = [PurePosixPath(entry.name) for entry in os.scandir(self._root / folder)]
            except OSError:
                names = []
            others = {name.stem for name in names if name.suffix not in _OF_ONE}
            texts = [name for name in names if name.suffix in _OF_ONE]
            shared = sorted(n for n in texts if n.suffix in _OF_ALL and n.stem not in others)
            index: dict[str, Any] = {}
            for text in shared if len(shared) <= _MOST else ():
                index |= self._said(folder / text)
            self._folders[folder] = frozenset(map(str, texts)), index
        return self._folders[folder]

    def _said(self, text: PurePosixPath) -> dict[str, Any]:
        tree = self._read(text)
        if isinstance(tree, str):
            tree = dict(_LINE.findall(tree))
        parts = [tree, *(tree.values() if isinstance(tree, dict) else ())]
        return dict(e for p in parts if isinstance(p, (dict, list)) for e in _entries(p))

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


def _name_in(value: Any) -> str:
    """Returns the name that a text or an entry with several fields states, "" for none."""
    names = [value.get(k) for k in _NAMES] if isinstance(value, dict) else [value]
    return next((n for n in names if n and isinstance(n, str)), "")


def _entries(tree: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields (key, part); of a part with texts, also under each of them, as names of files."""
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield str(key), part
        if isinstance(part, dict):
            for text in part.values():
                if isinstance(text, str):
                    yield PurePosixPath(text).name, part
