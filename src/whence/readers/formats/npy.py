"""Reads numpy arrays: a .npy or .npz file, or a folder tree of them. The name of a tensor is its
path without folders such as step0 or rank1; files that whence wrote have an index of their calls.

Format: numpy.lib.format; a .npz is a zip archive of .npy files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from zipfile import ZipInfo

import numpy as np

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import named_tensors, sidecar_index
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import limits, numpy_file, torch_file
from whence.readers.encodings.archive import Bytes, File
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = "a .npy or .npz file, or a folder of them"
ORDER = 80
LOOSE = True
_POSITION = re.compile(r"arr_\d{1,9}\.npy")


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(map(_is_ours, place.files))
    return place.head.startswith(numpy_file.MAGIC) or (
        place.suffix == ".npz" and place.head.startswith(b"PK")
    )


def open_run(place: Place) -> Run:
    """Reads headers now and memory-maps elements on request. Text and structured arrays, and
    objects without a tensor, have no elements, and state the reason.
    """
    if sidecar_index.NAME in place.names:
        return sidecar_index.open_run(place, "npy", partial(_elements, place))
    building = Building(place.path, "npy")
    named_tensors.add(building, named_tensors.of_files(building, place, _is_ours, _items))
    return building.run()


def _is_ours(name: str) -> bool:
    return name.lower().endswith((".npy", ".npz"))


def _items(building: Building, file: File) -> Iterator[Named]:
    """Returns the arrays of a file."""
    head = file.head(numpy_file.HEAD_BYTES)
    if head[:2] != b"PK":
        yield from _appended(file, numpy_file.header(head, file.name))
        return
    entries = file.entries()
    names = _names(file, entries)
    for entry, info in entries.items():
        name, label = entry.removesuffix(".npy").replace("/", "."), f"{file.name}: {entry}"
        try:
            header = numpy_file.header(bytes(file.entry(info, numpy_file.HEAD_BYTES)), label)
        except (UnreadableRun, ElementsMissing) as error:
            building.lacks(Lack.DAMAGED, file.name, f"{name} is not read: {error}")
            continue
        name = names.get(name, name)
        yield from _array(header, name, partial(file.entry, info), label, ordered=True)


def _appended(file: File, header: numpy_file.Header) -> Iterator[Named]:
    """Returns the array of a .npy file, or the arrays of several calls of `np.save` on one file, by
    their places.
    """
    start, arrays = 0, list[tuple[numpy_file.Header, int, int]]()
    while True:
        begin, start = start, file.size
        if header.word is not None:  # else it is not known where it ends
            nbytes = header.start + limits.count(header.shape) * header.word.itemsize
            start = min(begin + nbytes, file.size)
        arrays.append((header, begin, start - begin))
        head = bytes(file.part(start, min(numpy_file.HEAD_BYTES, file.size - start)))
        if not head.startswith(numpy_file.MAGIC):
            file.all_read(0, start)
            break
        header = numpy_file.header(head, file.name)
    for place, (header, start, nbytes) in enumerate(arrays):
        part = partial(file.part, start, nbytes)
        name = str(place) if len(arrays) > 1 else ""
        yield from _array(header, name, part, file.name, ordered=len(arrays) > 1)


def _names(file: File, entries: Mapping[str, ZipInfo]) -> dict[str, str]:
    """Returns {arr_0: name} of `np.savez(file, *arrays, names=names)`: the only other entry is an
    array of as many texts.
    """
    others = [entry for entry in entries if not _POSITION.fullmatch(entry)]
    if len(others) != 1 or len(entries) < 2:
        return {}
    info = entries[others[0]]
    try:
        header = numpy_file.header(bytes(file.entry(info, numpy_file.HEAD_BYTES)), file.name)
        if header.dtype[1:2] != "U" or header.shape != (len(entries) - 1,):
            return {}
        texts = np.frombuffer(file.entry(info)[header.start :].tobytes(), header.dtype)
    except (UnreadableRun, ElementsMissing, ValueError):
        return {}
    return {f"arr_{n}": str(text) for n, text in enumerate(texts) if text}


def _array(
    header: numpy_file.Header,
    name: str,
    read: Callable[[], Bytes],
    label: str,
    *,
    ordered: bool = False,
) -> Iterator[Named]:
    """Returns an array; for an object array, the tensors in it (as from `np.save` of a dict)."""
    tensors: list[Named] = []
    if header.holds_objects:
        tree = torch_file.load(bytes(read()), label, start=header.start)
        tensors = [
            named_tensors.of_torch(named_tensors.below(name, inner), tensor, ordered=bool(inner))
            for inner, tensor in torch_file.tensors(tree)
        ]

    def load() -> Array:
        return numpy_file.array(header, read(), label)

    yield from tensors or [
        Named(
            name,
            header.dtype,
            header.shape,
            None if header.why else load,
            header.why,
            ordered=ordered,
            is_text=header.dtype.lstrip("<>=|")[:1] in ("U", "S"),
        )
    ]


def _elements(place: Place, name: str) -> Callable[[], Array]:
    """Returns a loader of the elements of a file that the index names, as stored."""
    path = place.inside(name)

    def load() -> Array:
        file = File(path, path.name)
        return numpy_file.bits(
            numpy_file.header(file.head(numpy_file.HEAD_BYTES), name), file.part(0, file.size), name
        )

    return load
