"""Reads safetensors: one file, a folder of them, or a checkpoint in parts with its index.

The files do not keep the order in which tensors were computed: the format's own library sorts them
by dtype and name. Files that whence wrote have an index with that order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import named_tensors, safetensors_file, sidecar_index
from whence.readers.assembly.builder import Building, Load
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings.archive import File
from whence.readers.encodings.json_file import object_of
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = "a .safetensors file, or a folder of them"
ORDER = 84
LOOSE = True
_INDEX = ".safetensors.index.json"


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(map(_is_ours, place.files))
    length = int.from_bytes(place.head[:8], "little")
    return place.head[8:9] == b"{" and 2 <= length <= min(
        safetensors_file.HEADER_BYTES, place.size - 8
    )


def open_run(place: Place) -> Run:
    """Reads headers now and memory-maps elements on request."""
    if sidecar_index.NAME in place.names:
        return sidecar_index.open_run(place, "safetensors", _Elements(place).at)
    building = Building(place.path, "safetensors")
    named_tensors.add(
        building, named_tensors.of_files(building, place, _is_ours, safetensors_file.tensors_of)
    )
    for name in place.files:
        if name.endswith(_INDEX):
            _check_index(building, place, name)
    return building.run()


def _is_ours(name: str) -> bool:
    return name.lower().endswith(".safetensors")


def _check_index(building: Building, place: Place, name: str) -> None:
    """Notes the files that an index names and that do not exist."""
    try:
        counts = Counter(map(str, object_of(place.inside(name), name)["weight_map"].values()))
    except (UnreadableRun, KeyError, AttributeError) as error:
        building.lacks(Lack.DAMAGED, name, f"{name} cannot be read: {error}")
        return
    folder = PurePosixPath(name).parent
    for file, count in counts.items():
        if (path := str(folder / file)) not in place.files:
            text = f"{count} tensors that {name} names are in {file}, which is not there"
            building.lacks(Lack.DAMAGED, path, text)


class _Elements:
    """Tensors of the files of a folder by file and name; each header is read once."""

    def __init__(self, place: Place) -> None:
        self._place, self._files = place, dict[str, dict[str, Named]]()

    def at(self, name: str) -> Load:
        """Returns the loader of "file,name". Raises ElementsMissing, UnreadableRun."""
        file, _, tensor = name.partition(",")
        if file not in self._files:
            items = safetensors_file.tensors_of(
                Building(self._place.path, "safetensors"), File(self._place.inside(file))
            )
            self._files[file] = {item.name: item for item in items}
        item = self._files[file].get(tensor)
        if item is None or item.load is None:
            raise ElementsMissing(
                item.why if item is not None else f"{file} has no tensor {tensor[:200]!r}"
            )
        return item.load
