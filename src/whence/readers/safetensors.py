"""safetensors: one file, a folder of them, or a checkpoint in parts with its index.

Format: eight bytes with the length of a JSON header, the header ({name: dtype, shape, data_offsets}), the elements, little endian.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import orjson

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.building import Building
from whence.readers.parts import limits, named
from whence.readers.parts.named import Named
from whence.readers.parts.stored import File, words
from whence.readers.place import Place
from whence.records import Run

LOOKS_LIKE = "a .safetensors file, or a folder of them"
ORDER = 84
_HEADER_BYTES = 100_000_000  # what the format allows
_DTYPES = {d.safetensors: d for d in reversed(dtypes.DTYPES.values())}  # F64 is float64; complex128 has no code of its own
_INDEX = ".safetensors.index.json"


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(map(_is_ours, place.files))
    length = int.from_bytes(place.head[:8], "little")
    return place.head[8:9] == b"{" and 2 <= length <= min(_HEADER_BYTES, place.size - 8)


def open_run(place: Place) -> Run:
    """Lazy: headers now, elements memory-mapped when asked for."""
    building = Building(place.path, "safetensors")
    named.add(building, named.of_files(building, place, _is_ours, _items))
    for name in place.files:
        if name.endswith(_INDEX):
            _check_index(building, place, name)
    return building.run()


def _is_ours(name: str) -> bool:
    return name.lower().endswith(".safetensors")


def _items(building: Building, file: File, name: str) -> Iterator[Named]:
    """The tensors of a file, in the order of their elements. Raises UnreadableRun when its header cannot be read."""
    header, start = _header(file)
    for inner, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
        own = named.below(name, inner)
        try:
            shape = limits.extents(entry["shape"], inner)
            begin, end = limits.extents(entry["data_offsets"], inner)
            code = str(entry["dtype"])
        except (KeyError, TypeError, ValueError, UnreadableRun):
            building.note("error", f"{own} is not read: its entry in the header of {file.name} makes no sense")
            continue
        kind = _DTYPES.get(code)
        if kind is None:
            yield Named(own, code, shape, None, f"dtype {code} is not known to whence")
            continue
        yield Named(own, kind.name, shape, partial(_load, file, kind, shape, start + begin, start + end))


def _load(file: File, kind: dtypes.DType, shape: tuple[int, ...], begin: int, end: int) -> Array:
    nbytes = limits.count(shape) * kind.itemsize
    if nbytes != end - begin:
        raise ElementsMissing(f"{kind.name} {shape} needs {nbytes} bytes, its offsets hold {end - begin}")
    return words(file.part(begin, nbytes), kind.numpy).reshape(shape)


def _header(file: File) -> tuple[dict[str, Any], int]:
    """(entries by name, where the elements start)."""
    length = int.from_bytes(file.head(8), "little")
    if not 2 <= length <= min(_HEADER_BYTES, file.size - 8):
        raise UnreadableRun(f"{file.name} says that its header has {length} bytes; the file has {file.size}")
    try:
        header = orjson.loads(bytes(file.part(8, length)))
    except orjson.JSONDecodeError as error:
        raise UnreadableRun(f"{file.name}: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise UnreadableRun(f"{file.name}: its header is no JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _begin(entry: Any) -> int:
    try:
        return int(entry["data_offsets"][0])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return 0


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
