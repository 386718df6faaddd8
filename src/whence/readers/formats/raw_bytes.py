"""Reads raw bytes of tensors (`array.tofile`): .bin, .raw, .dat or .f32, whose dtype and shape are
stated elsewhere.

Sources of dtype and shape: the caller (`--shape`, the other run); a file beside them (x.json or
x.txt for x.bin, or one for all: shapes.json, manifest.json, ...); their own name
(x_2x12x64_float32.bin); what C++ writes in front of the elements. A .txt that llama.cpp's model
conversion writes beside logits gives their count by its lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from pathlib import PurePosixPath

from whence import dtypes
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.assembly.texts_beside import TextsBeside
from whence.readers.encodings import limits, raw_form
from whence.readers.encodings.archive import File, words
from whence.readers.encodings.raw_form import Form
from whence.readers.source import Place
from whence.records import Run

LOOKS_LIKE = "raw bytes (.bin, .raw, .dat) with their dtype and shape beside them"
ORDER = 87
LOOSE = True


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
    form = forms.of(str(path))
    assert form is not None  # is asked for those alone that have one
    kind = dtypes.named(form.dtype)
    nbytes, shape = limits.count(form.shape) * kind.itemsize, form.shape
    if form.start + nbytes != file.size:
        why = f"{form.dtype} {shape} needs {nbytes} bytes, {file.name} has {file.size}"
        yield Named("", form.dtype, shape, None, why)
        return

    def load() -> dtypes.Array:
        return words(file.part(form.start, nbytes), kind.numpy).reshape(shape)

    yield Named("", form.dtype, shape, load)


class _Forms:
    """The forms of the raw files of a place; each describing file is read once."""

    def __init__(self, place: Place) -> None:
        self._stated = place.forms
        self.root = place.path if place.is_folder else place.path.parent
        self.beside = TextsBeside(self.root)

    def of(self, name: str) -> Form | None:
        """Returns the form of a raw file, None for any other file and where nothing
        states a form.
        """
        pure = PurePosixPath(name)
        if pure.suffix.lower() not in raw_form.SUFFIXES:
            return None
        size = (self.root / name).stat().st_size
        called = (name, pure.name, pure.stem, named_tensors.placed(name)[0])
        stated = (f for n, f in self._stated.items() if any(fnmatch(c, n) for c in called))
        beside = (raw_form.of_value(value, size) for value in self.beside.of(name))
        of_file = (partial(raw_form.of_text, pure.name), partial(self._headed, name))
        inside = (form_of(size) for form_of in of_file)
        return next(filter(None, itertools.chain(stated, beside, inside)), None)

    def _headed(self, name: str, size: int) -> Form | None:
        """Returns the form that the first bytes of a file state."""
        return raw_form.of_header(File(self.root / name).head(_HEADER_BYTES), size)


_HEADER_BYTES = 512
