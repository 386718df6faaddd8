"""safetensors: one file, a folder of them, or a checkpoint in parts with its index.

The order in which tensors were made is lost: the format's own library sorts them by dtype and name.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import orjson

from whence.readers.building import Building
from whence.readers.parts import named, safetensors_file
from whence.readers.place import Place
from whence.records import Run

LOOKS_LIKE = "a .safetensors file, or a folder of them"
ORDER = 84
_INDEX = ".safetensors.index.json"


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(map(_is_ours, place.files))
    length = int.from_bytes(place.head[:8], "little")
    return place.head[8:9] == b"{" and 2 <= length <= min(safetensors_file.HEADER_BYTES, place.size - 8)


def open_run(place: Place) -> Run:
    """Lazy: headers now, elements memory-mapped when asked for."""
    building = Building(place.path, "safetensors")
    named.add(building, named.of_files(building, place, _is_ours, safetensors_file.tensors_of))
    for name in place.files:
        if name.endswith(_INDEX):
            _check_index(building, place, name)
    return building.run()


def _is_ours(name: str) -> bool:
    return name.lower().endswith(".safetensors")


def _check_index(building: Building, place: Place, name: str) -> None:
    """Say which files an index names that are not there."""
    try:
        wanted = Counter(orjson.loads(place.inside(name).read_bytes())["weight_map"].values())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, OSError) as error:
        building.note("error", f"{name} cannot be read: {type(error).__name__}: {error}")
        return
    at = PurePosixPath(name).parent
    for file, count in wanted.items():
        if str(at / str(file)) not in place.files:
            building.note("error", f"{count} tensors that {name} names lie in {file}, which is not there")
