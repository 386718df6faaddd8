"""Reads a .npy file of a dump as a tensor of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.encodings import numpy_file
from whence.readers.encodings.archive import File
from whence.readers.source import Place


def add(building: Building, place: Place, name: str, **options: Any) -> int:
    """Adds the tensor in the file `name` of a dump; a damaged one has no elements and states the
    reason. options: of `Building.tensor`.
    """
    path = place.inside(name)
    try:
        npy_header = header(path)
    except UnreadableRun as error:
        return building.tensor("float32", (), why=str(error), file=name, **options)
    why = npy_header.why and f"{path.name} {npy_header.why}"

    def load() -> Any:
        file = File(path, path.name)
        return numpy_file.array(npy_header, file.part(0, file.size), path.name)

    return building.tensor(
        npy_header.dtype, npy_header.shape, None if why else load, why=why, file=name, **options
    )


def header(path: Path) -> numpy_file.Header:
    """Returns the header of a file. Raises UnreadableRun."""
    return numpy_file.header(File(path, path.name).head(numpy_file.HEAD_BYTES), path.name)
