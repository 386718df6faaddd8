"""Reads raw bytes of tensors (`array.tofile`): .bin, .raw, .dat or .f32, whose dtype and shape are
stated elsewhere.

Sources of dtype and shape: the caller (`--shape`, the other run); a file beside them (x.json or
x.txt for x.bin, or one for all: shapes.json, manifest.json, ...); their own name
(x_2x12x64_float32.bin). A .txt that llama.cpp's model conversion writes beside logits gives their
count by its lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from whence import dtypes
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import limits, raw_form
from whence.readers.encodings.archive import File, words
from whence.readers.encodings.raw_form import Form
from whence.readers.source import Place
from whence.records import Run
from whence.regular_files import is_regular

LOOKS_LIKE = "raw bytes (.bin, .raw, .dat) with their dtype and shape beside them"
ORDER = 87
LOOSE = True
_BESIDE = (".json", ".txt", ".shape", ".meta")
_FOR_ALL = ("shapes.json", "manifest.json", "meta.json", "metadata.json", "index.json")
_LARGEST = 16 << 20  # bytes of a file that describes others


def sniff(place: Place) -> bool:
    forms = _Forms(place)
    names = place.files if place.is_folder else (place.path.name,)
    return any(forms.of(name) is not None for name in names)


def open_run(place: Place) -> Run:
    """Memory-maps elements on request."""
    building, forms = Building(place.path, "raw bytes"), _Forms(place)
    items = named_tensors.of_files(
        building, place, lambda name: forms.of(name) is not None, partial(_items, forms)
    )
    named_tensors.add(building, items)
    return building.run()


def _items(forms: _Forms, building: Building, file: File) -> Iterator[Named]:
    path = PurePosixPath(str(file.source)).relative_to(forms.root)
    form, name = forms.of(str(path)), forms.called(path)
    assert form is not None  # is asked for those alone that have one
    kind = dtypes.named(form.dtype)
    nbytes, shape = limits.count(form.shape) * kind.itemsize, form.shape
    if nbytes != file.size:
        why = f"{form.dtype} {shape} needs {nbytes} bytes, {file.name} has {file.size}"
        yield Named(name, form.dtype, shape, None, why, is_whole=bool(name))
        return

    def load() -> dtypes.Array:
        return words(file.part(0, nbytes), kind.numpy).reshape(shape)

    yield Named(name, form.dtype, shape, load, is_whole=bool(name))


class _Forms:
    """The forms of the raw files of a place; each describing file is read once."""

    def __init__(self, place: Place) -> None:
        self._stated = place.forms
        self.root = place.path if place.is_folder else place.path.parent
        self._texts: dict[PurePosixPath, Any] = {}

    def of(self, name: str) -> Form | None:
        """Returns the form of a raw file, None for any other file and where nothing
        states a form.
        """
        pure = PurePosixPath(name)
        if pure.suffix.lower() not in raw_form.SUFFIXES:
            return None
        size = (self.root / name).stat().st_size
        called = (name, pure.name, pure.stem, named_tensors.placed(name)[0])
        return (
            next((f for n, f in self._stated.items() if any(fnmatch(c, n) for c in called)), None)
            or next(
                filter(None, (raw_form.of_value(self._read(b), size) for b in _beside(pure))), None
            )
            or next(filter(None, (self._of_index(pure, size, index) for index in _FOR_ALL)), None)
            or raw_form.of_text(pure.name, size)
        )

    def called(self, pure: PurePosixPath) -> str:
        """Returns the name that a file beside states, "" where none does."""
        trees = map(self._read, _beside(pure))
        names = (tree.get("name") for tree in trees if isinstance(tree, dict))
        return next((name for name in names if isinstance(name, str)), "")

    def _of_index(self, pure: PurePosixPath, size: int, index: str) -> Form | None:
        """Returns the form in a file that describes all: under a key, or in an entry
        with a name.
        """
        tree = self._read(pure.with_name(index))
        names = {pure.name, pure.stem}
        if isinstance(tree, dict):
            own = next((tree[name] for name in (pure.name, pure.stem) if name in tree), None)
            if own is not None:
                return raw_form.of_value(own, size)
            tree = next((part for part in tree.values() if isinstance(part, (list, dict))), None)
        entries = list(tree.values()) if isinstance(tree, dict) else tree
        for entry in entries if isinstance(entries, list) else ():
            values = entry.values() if isinstance(entry, dict) else ()
            if any(isinstance(v, str) and PurePosixPath(v).name in names for v in values):
                return raw_form.of_value(entry, size)
        return None

    def _read(self, name: PurePosixPath) -> Any:
        """Returns the contents of a describing file: JSON, or its text; None where
        there is none.
        """
        if name not in self._texts:
            path = self.root / name
            try:
                is_small = is_regular(path) and path.stat().st_size <= _LARGEST
                text = path.read_text("utf-8") if is_small and not path.is_symlink() else ""
                self._texts[name] = json.loads(text) if name.suffix == ".json" else text
            except (OSError, ValueError, RecursionError):
                self._texts[name] = None
        return self._texts[name]


def _beside(pure: PurePosixPath) -> Iterator[PurePosixPath]:
    for suffix in _BESIDE:
        yield pure.with_suffix(suffix)
        yield pure.with_name(pure.name + suffix)
