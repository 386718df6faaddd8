"""torch_xray dumps: one HDF5 file for every rank, a group for every step, a dataset for every tensor of a leaf module.

`globalrank-<g>_localrank-<l>.h5`: `/<step>/<module path>.<Class>[.<n>].forward_{params.<name>|input.<i>|output.<i>}`, in the order in
which the groups were filled; attribute `dtype` says what the tensor was where HDF5 has no such type. Other HDF5 files open too: what has no
such name is an output of its own. Nothing outside the file is read: external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, MissingDependency, UnreadableRun
from whence.readers.building import WIDER, Building
from whence.readers.parts import carded, limits, nesting
from whence.readers.place import Place
from whence.records import Run

LOOKS_LIKE = "an HDF5 file, or a folder with globalrank-*_localrank-*.h5"
ORDER = 20

_MAGIC = b"\x89HDF\r\n\x1a\n"
_FILE = re.compile(r"globalrank-(\d{1,6})_localrank-(\d{1,6}).*\.h5$")
_KEY = re.compile(
    r"(?:(?P<path>.+)\.)?(?P<cls>[A-Za-z_]\w*)(?:\.(?P<n>\d+))?\.(?P<phase>forward|backward)_"
    r"(?P<kind>params|input|output|kwargs)(?:\.(?P<slot>.*))?"
)
_SLOTS = {"params": "param", "input": "input", "kwargs": "input", "output": "output"}
_LEVELS = 3  # of groups below a step: modules
_NAME = 4096
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}  # those that HDF5 and h5py bring along
_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, NotImplementedError)  # what h5py raises for a damaged file
_DEFLATE_RATIO = 1032  # the most that gzip packs


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(_FILE.search(name) for name in place.names)
    return any(place.head[at : at + 8] == _MAGIC for at in (0, 512, 1024, 2048))


def open_run(place: Place) -> Run:
    """The index now, elements when asked. Needs h5py."""
    try:
        import h5py
    except ImportError as error:
        raise MissingDependency('h5py is needed to read it: pip install "whence[h5]"') from error
    building = Building(place.path, "torch_xray")
    files = [name for name in place.names if _FILE.search(name)] if place.is_folder else [place.path.name]
    ranks: dict[int, str] = {}
    for name in files:
        found = _FILE.search(name)
        rank = int(found[1]) if found else 0
        if rank in ranks:
            raise UnreadableRun(f"{ranks[rank]} and {name} are both rank {rank}; give one of the files, or keep each run in its own folder")
        ranks[rank] = name
    for rank, name in sorted(ranks.items()):
        path = place.inside(name)
        try:
            with h5py.File(path, "r", locking=False) as file:
                _add(building, file, path, name, rank)
        except _DAMAGE as error:
            if len(ranks) == 1:
                raise UnreadableRun(f"{name} is damaged: {_short(error)}; copy or dump it again") from error
            building.note("error", f"{name} is damaged and left out: {_short(error)}")
    return building.run()


class _Call(NamedTuple):
    """What the tensors of one call have in common in their names."""

    scope: str
    cls: str
    number: str
    phase: str


class _Tensor(NamedTuple):
    """A dataset: where it lies, and what its name says."""

    path: str
    call: _Call
    kind: str
    name: str


def _add(building: Building, file: Any, path: Path, name: str, rank: int) -> None:
    """All steps of one file."""
    import h5py

    steps = [key for key in _members(file) if key.isdigit() and len(key) < 10 and isinstance(file.get(key, getlink=True), h5py.HardLink)]
    steps = [key for key in steps if isinstance(file[key], h5py.Group)]
    first = 0 if "0" in steps else 1  # the tool counts from 1
    for key in sorted(steps, key=int):
        _step(building, file, list(_tensors(building, file[key], name)), path, name, rank, int(key) - first)
    rest = list(_tensors(building, file, name, skip=steps))
    if rest:
        _step(building, file, rest, path, name, rank, 0)


def _step(building: Building, file: Any, tensors: list[_Tensor], path: Path, name: str, rank: int, step: int) -> None:
    """One group. Tensors with one prefix are a call; calls stand in the order in which they ended."""
    size = path.stat().st_size
    calls: dict[_Call, dict[str, dict[str, int]]] = {}
    unsaid: set[_Call] = set()
    told = carded.Told()
    for one in tensors:
        try:
            dataset = file[one.path]
            record = _record(building, dataset, path, name, size)
            if not _said(dataset) and dataset.dtype.kind == "f":
                unsaid.add(one.call)
            told.add(dataset.attrs.get("whence"), record)
        except _DAMAGE as error:
            record = building.tensor("unknown", (), why=f"{one.path} is damaged: {_short(error)}", file=name)
        calls.setdefault(one.call, {}).setdefault(one.kind, {})[one.name] = record
    if told.of == len(tensors):
        told.build(building, rank=rank, step=step)
        return
    for phase in dict.fromkeys(call.phase for call in calls):
        ended = [call for call in calls if call.phase == phase]
        parent = nesting.parents([call.scope for call in ended])
        handles: dict[int, int] = {}
        for place in nesting.begun(parent):
            call, slots = ended[place], calls[ended[place]]
            handles[place] = building.call(
                call.scope, op_type=call.cls, rank=rank, step=step, phase=phase, parent=handles.get(parent[place], -1),
                kind="module" if "input" in slots else "operator" if call.cls else "label",
                notes=(WIDER,) if call in unsaid else (), inputs=slots.get("input", {}), outputs=slots.get("output", {}),
                params=slots.get("param", {}),
            )  # fmt: skip


def _members(group: Any) -> list[str]:
    """Names in a group in the order in which they were made; by where they lie in the file where it does not keep that order."""
    from h5py import h5, h5p

    names: list[bytes] = []
    if group.id.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED:
        group.id.links.iterate(names.append, idx_type=h5.INDEX_CRT_ORDER)
        return [_text(name) for name in names]
    links = group.id.links
    links.iterate(names.append)
    return [_text(name) for name in sorted(names, key=lambda name: (links.get_info(name).type, links.get_info(name).u))]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _tensors(
    building: Building, group: Any, where: str, skip: Container[str] = (), above: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[_Tensor]:
    """Datasets below a group, in order. What leads outside the file, or back to a group that was read, is not followed, and said."""
    import h5py

    seen = set() if seen is None else seen
    seen.add(h5py.h5o.get_info(group.id).addr)
    for name in _members(group):
        if name in skip:
            continue
        what = f"{where}: {group.name.rstrip('/')}/{name}"
        try:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                building.note("error", f"{what} leads to another file ({link.filename}); it is not followed")
                continue
            found = group[name]
        except _DAMAGE as error:
            building.note("error", f"{what} cannot be opened: {_short(error)}")
            continue
        if isinstance(found, h5py.Dataset):
            yield _named(found.name, ".".join((*above, name)))
        elif isinstance(found, h5py.Group) and len(above) < _LEVELS and h5py.h5o.get_info(found.id).addr not in seen:
            yield from _tensors(building, found, where, above=(*above, name), seen=seen)
        elif isinstance(found, h5py.Group):
            building.note("error", f"{what} is nested too deep, or was read under another name; what is in it is left out")


def _named(path: str, shown: str) -> _Tensor:
    name = shown.replace("%2F", "/").replace("%2f", "/")
    found = _KEY.fullmatch(name) if len(name) <= _NAME else None
    if found is None:
        return _Tensor(path, _Call(name, "", "", "forward"), "output", "0")
    scope, cls, number = found["path"] or "", found["cls"], found["n"] or ""
    if cls.islower():  # a name without the class
        scope, cls, number = ".".join(part for part in (scope, cls, number) if part), "", ""
    return _Tensor(path, _Call(scope, cls, number, found["phase"]), _SLOTS[found["kind"]], found["slot"] or "0")


def _record(building: Building, dataset: Any, path: Path, name: str, size: int) -> int:
    """The tensor in a dataset: its dtype from the attribute, its elements when asked."""
    shape, stored, where = dataset.shape, dataset.dtype, f"{name},{dataset.name}"
    said = _said(dataset)
    if shape is None:
        return building.tensor(said or "unknown", (), why="the dataset holds nothing (a null dataspace)", file=where)
    dtype, why = _dtype(stored, said)
    shape = limits.extents(tuple(map(int, shape)), dataset.name)
    why = why or _unsafe(dataset, shape, size)
    if why:
        return building.tensor(dtype, shape, why=why, file=where)
    return building.tensor(dtype, shape, _load(dataset, path, dtype), file=where)


def _said(dataset: Any) -> str:
    """The dtype that the attribute names, "" when there is none."""
    try:
        said = dataset.attrs.get("dtype", "")
    except _DAMAGE:
        return ""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
    return text.removeprefix("torch.").removeprefix("paddle.")[:64]


def _dtype(stored: np.dtype[Any], said: str) -> tuple[str, str]:
    """(whence's name of the tensor's dtype, why its elements cannot be read or "")."""
    plain = dtypes.DTYPES.get(said)
    held = next((d.name for d in dtypes.DTYPES.values() if d.numpy == stored.newbyteorder("=")), "")
    if plain is None and said:
        return said, f"dtype {said} is not known to whence"
    if plain is None:
        return (held, "") if held else (f"{stored}", f"stored as {stored} without an attribute that says which dtype this is")
    if held == said or (held == "float32" and plain.is_floating and plain.bits < 32) or (held == "float64" and plain.is_floating):
        return said, ""
    if stored.itemsize == plain.itemsize and (stored.kind in "uiV" or stored.names):
        return said, ""  # the bits themselves
    return said, f"stored as {stored}, which cannot hold {said}"


def _unsafe(dataset: Any, shape: tuple[int, ...], size: int) -> str:
    """Why the elements must not be read, "" when they may."""
    from h5py import h5d

    plan = dataset.id.get_create_plist()
    if plan.get_external_count():
        return f"its elements lie in another file ({plan.get_external(0)[0]!r}), which is not read"
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        return "it is put together from other files (a virtual dataset), which are not read"
    nbytes, there = limits.count(shape) * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if layout == h5d.CONTIGUOUS and nbytes:
        at = dataset.id.get_offset()
        if at is None or at + nbytes > size:
            return f"its {nbytes} bytes are not in the file of {size} bytes, which was cut or damaged"
    if there > size:
        return f"it says that it takes {there} bytes of a file of {size}"
    filters = [plan.get_filter(i) for i in range(plan.get_nfilters())]
    unknown = [f"{code} {_text(name)}".strip() for code, _, _, name in filters if code not in _FILTERS]
    if unknown:
        return f"it is packed with HDF5 filter {', '.join(unknown)}, a plug-in that whence does not load; write it without, or with gzip"
    if layout == h5d.CHUNKED:
        try:
            limits.unpacked(max(nbytes, limits.count(dataset.chunks) * dataset.dtype.itemsize), there, "it")
        except UnreadableRun as error:
            return str(error)
        if any(code == 1 for code, *_ in filters):
            return _inflating(dataset, there)
    return ""


def _inflating(dataset: Any, there: int) -> str:
    """Why chunks packed with gzip must not be unpacked: HDF5 itself unpacks a chunk to whatever size it has, not to that of the dataset."""
    if there * _DEFLATE_RATIO <= limits.ZIP_FLOOR:
        return ""
    most = limits.count(dataset.chunks) * dataset.dtype.itemsize + (1 << 16)  # checksums
    for i in range(dataset.id.get_num_chunks()):
        chunk = dataset.id.get_chunk_info(i)
        if chunk.size * _DEFLATE_RATIO <= limits.ZIP_FLOOR:
            continue
        mask, packed = dataset.id.read_direct_chunk(chunk.chunk_offset)
        inflate = zlib.decompressobj()
        inflate.decompress(packed, most)
        if not mask and inflate.unconsumed_tail:
            return f"chunk {i} unpacks to more than the {most} bytes that it should have"
    return ""


def _load(dataset: Any, path: Path, dtype: str) -> Callable[[], Array]:
    """Elements of a dataset: mapped where they lie as they are, else unpacked."""
    name, shape, stored = dataset.name, dataset.shape, dataset.dtype
    at = dataset.id.get_offset()
    mapped = at is not None and not stored.hasobject and stored.names is None and dataset.size

    def load() -> Array:
        import h5py

        if mapped:
            kind = stored if stored.kind != "b" else np.dtype(np.uint8)
            flat = np.memmap(path, kind, "r", offset=at, shape=shape)
            return _as(np.asarray(flat), dtype)
        with h5py.File(path, "r", locking=False) as file:
            return _as(np.asarray(file[name][()]), dtype)

    return load


def _as(array: Array, dtype: str) -> Array:
    """Stored elements in the dtype that the tensor had. Raises ElementsMissing when that would change them."""
    want = dtypes.named(dtype).numpy
    if array.dtype == want:
        return array
    if array.dtype.newbyteorder("=") == want:
        return array.astype(want)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(want)
        if not np.array_equal(cast.astype(array.dtype), array, equal_nan=True):
            raise ElementsMissing(f"stored as {array.dtype}, with numbers that are no {dtype}, which its attribute says it is")
        return cast
    bits = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind in "ui" else array
    return np.ascontiguousarray(bits).view(want).reshape(array.shape)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
