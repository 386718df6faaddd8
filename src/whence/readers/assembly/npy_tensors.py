"""A .npy file of a dump as a tensor of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.encodings import numpy_file
from whence.readers.encodings.archive import File
from whence.readers.source import Place


def add(building: Building, place: Place, name: str, **given: Any) -> int:
    """Add the tensor in the file `name` of a dump; a damaged one has no elements and says why.
    given: as `Building.tensor` takes it.
    """
    path = place.inside(name)
    try:
        found = header(path)
    except UnreadableRun as error:
        return building.tensor("float32", (), why=str(error), file=name, **given)
    why = found.why and f"{path.name} {found.why}"

    def load() -> Any:
        file = File(path, path.name)
        return numpy_file.array(found, file.part(0, file.size), path.name)

    return building.tensor(
        found.dtype, found.shape, None if why else load, why=why, file=name, **given
    )


def header(path: Path) -> numpy_file.Header:
    """The header of a file. Raises UnreadableRun."""
    return numpy_file.header(File(path, path.name).head(numpy_file.HEAD_BYTES), path.name)
