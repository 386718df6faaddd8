"""torch_xray dumps: one HDF5 file for every rank, a group for every step, a dataset for every
tensor of a leaf module.

`globalrank-<g>_localrank-<l>.h5`: `/<step>/<module
path>.<Class>[.<n>].forward_{params.<name>|input.<i>|output.<i>}`, in the order in which the groups
were filled; attribute `dtype` says what the tensor was where HDF5 has no such type. Other HDF5
files open too: what has no such name is an output of its own. Nothing outside the file is read:
external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import call_order, named_tensors, sidecar, spoken_names
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import hdf5, limits
from whence.readers.encodings.archive import bytes_of, words
from whence.readers.source import Place
from whence.records import Lack, Run
from whence.records.known_order import Trace
from whence.records.marks import Mark, mark

LOOKS_LIKE = "an HDF5 file, or a folder with globalrank-*_localrank-*.h5"
ORDER = 20

_MAGIC = b"\x89HDF\r\n\x1a\n"
_FILE = re.compile(r"globalrank-(\d{1,6})_localrank-(\d{1,6}).*\.h5$")
_KEY = re.compile(
    r"(?:(?P<path>.+)\.)?(?P<cls>[A-Za-z_]\w*)(?:\.(?P<n>\d+))?\.(?P<phase>forward|backward)_"
    r"(?P<kind>params|input|output|kwargs)(?:\.(?P<slot>.*))?"
)
_SLOTS = {"params": "param", "input": "input", "kwargs": "input", "output": "output"}
_NAME = 4096
# filters that HDF5 and h5py include
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(_FILE.search(name) for name in place.names)
    return any(place.head[offset : offset + 8] == _MAGIC for offset in (0, 512, 1024, 2048))


def open_run(place: Place) -> Run:
    """Reads the index now, elements on request. Needs h5py."""
    worker = hdf5.Worker()
    building = Building(place.path, "torch_xray")
    files = (
        [name for name in place.names if _FILE.search(name)]
        if place.is_folder
        else [place.path.name]
    )
    for name in place.names if place.is_folder else ():
        if name.endswith("_summary.csv"):  # a table of what the files hold
            place.leave(name)
    ranks: dict[int, str] = {}
    for name in files:
        match = _FILE.search(name)
        rank = int(match[1]) if match else 0
        if rank in ranks:
            raise UnreadableRun(
                f"{ranks[rank]} and {name} are both rank {rank}; give one of the files, or keep "
                "each run in its own folder"
            )
        ranks[rank] = name
    for rank, name in sorted(ranks.items()):
        try:
            _add(building, worker, place.inside(name), name, rank)
        except (UnreadableRun, OSError) as error:
            if len(ranks) == 1:
                raise UnreadableRun(f"{name} is damaged: {error}; copy or dump it again") from error
            building.lacks(Lack.DAMAGED, name, f"{name} is damaged and left out: {error}")
    return building.run()


class _Call(NamedTuple):
    """The common part of the names of one call's tensors."""

    scope: str
    cls: str
    number: str
    phase: str


class _Tensor(NamedTuple):
    """A dataset: its position, the parts of its name, and its description in the file (None when it
    is damaged, with the reason).
    """

    path: str
    call: _Call
    kind: str
    name: str
    description: dict[str, Any] | None
    why: str = ""


def _add(building: Building, worker: hdf5.Worker, path: Path, name: str, rank: int) -> None:
    """Adds all steps of one file."""
    steps: dict[int | None, list[_Tensor]] = {}
    step: int | None = None
    for message in worker.index(path):
        if "note" in message:
            building.lacks(Lack.DAMAGED, name, f"{name}: {message['note']}")
        elif "step" in message:
            step = message["step"]
        elif "damaged" in message:
            steps.setdefault(step, []).append(
                _named(message["damaged"], message["shown"], None, message["why"])
            )
        elif message["tensor"]["kind"] != "S":  # texts: prompts, names of a run
            steps.setdefault(step, []).append(
                _named(message["path"], message["shown"], message["tensor"])
            )
    file = _File(worker, path, name, path.stat().st_size)
    first = 0 if 0 in steps else 1  # the tool counts from 1
    groups = {0 if group is None else group - first: tensors for group, tensors in steps.items()}
    if not any(map(_is_of_tool, itertools.chain(*groups.values()))):
        _add_named(building, file, groups, rank)
        return
    for group, tensors in groups.items():
        _step(building, file, tensors, rank, group)


def _is_of_tool(tensor: _Tensor) -> bool:
    """Whether a name has the tool's form, or a card of whence's own comes with it."""
    is_label = (tensor.call.cls, tensor.kind, tensor.name) == ("", "output", "0")
    return not is_label or bool(tensor.description and tensor.description["whence"])


def _add_named(
    building: Building, file: _File, groups: Mapping[int, Sequence[_Tensor]], rank: int
) -> None:
    """Adds the tensors of a file whose names are people's: they state steps, ranks and sides. The
    file keeps them by address, where small ones fill gaps: hardly more than a time.
    """
    tensors = [(group, tensor) for group, tensors in groups.items() for tensor in tensors]
    spoken = spoken_names.tell(["_"] * len(tensors), [tensor.call.scope for _, tensor in tensors])
    items = [
        replace(_item(file, tensor), name=said.name, step=group or said.step,
                rank=said.rank or rank, modified_ns=place)
        for place, ((group, tensor), said) in enumerate(zip(tensors, spoken, strict=True), 1)
    ]  # fmt: skip
    named_tensors.add(building, items)


class _File(NamedTuple):
    """A file that tensors are read from. name: in the dump. size: in bytes."""

    worker: hdf5.Worker
    path: Path
    name: str
    size: int


def _step(building: Building, file: _File, tensors: list[_Tensor], rank: int, step: int) -> None:
    """Adds one group. Tensors with one prefix form a call; calls are in the order in which they
    ended.
    """
    calls: dict[_Call, dict[str, dict[str, int]]] = {}
    unsaid: set[_Call] = set()
    cards = sidecar.CardedCalls()
    for tensor in tensors:
        record = _item(file, tensor).record(building)
        if tensor.description is not None:
            if not tensor.description["dtype"] and tensor.description["kind"] == "f":
                unsaid.add(tensor.call)
            cards.add(tensor.description["whence"], record)
        calls.setdefault(tensor.call, {}).setdefault(tensor.kind, {})[tensor.name] = record
    if cards.count == len(tensors):
        cards.build(building, rank=rank, step=step)
        return
    for phase in dict.fromkeys(call.phase for call in calls):
        ended = [call for call in calls if call.phase == phase]
        kinds = [
            "module" if "input" in calls[call] else "operator" if call.cls else "label"
            for call in ended
        ]
        # a label contains no call
        scopes = [call.scope for call in ended]
        parent = [-1] * len(ended) if "label" in kinds else call_order.parents(scopes)
        handles: dict[int, int] = {}
        for place in call_order.begun(parent):
            call, slots = ended[place], calls[ended[place]]
            notes: tuple[str, ...] = (mark(Mark.STORED_WIDER),) if call in unsaid else ()
            if "label" in kinds:  # by address, where small ones fill gaps: hardly more than a time
                notes += (Trace(call.scope, time=place, file=file.name).note(),)
            handles[place] = building.call(
                call.scope,
                op_type=call.cls,
                rank=rank,
                step=step,
                phase=phase,
                parent=handles.get(parent[place], -1),
                kind=kinds[place],
                notes=notes,
                inputs=slots.get("input", {}),
                outputs=slots.get("output", {}),
                params=slots.get("param", {}),
            )


def _named(path: str, label: str, description: dict[str, Any] | None, why: str = "") -> _Tensor:
    name = label.replace("%2F", "/").replace("%2f", "/")
    match = _KEY.fullmatch(name) if len(name) <= _NAME else None
    if match is None:
        return _Tensor(path, _Call(name, "", "", "forward"), "output", "0", description, why)
    scope, cls, number = match["path"] or "", match["cls"], match["n"] or ""
    if cls.islower():  # a name without the class
        scope, cls, number = ".".join(part for part in (scope, cls, number) if part), "", ""
    return _Tensor(
        path,
        _Call(scope, cls, number, match["phase"]),
        _SLOTS[match["kind"]],
        match["slot"] or "0",
        description,
        why,
    )


def _item(file: _File, tensor: _Tensor) -> Named:
    """Returns the tensor in a dataset: dtype from the attribute, elements on request."""
    try:
        return _readable(file, tensor)
    except UnreadableRun as error:
        why = f"{tensor.path} is damaged: {error}"
        return Named("", "unknown", (), None, why, file=file.name)


def _readable(file: _File, tensor: _Tensor) -> Named:
    """As `_item`. Raises UnreadableRun where the dataset is damaged."""
    description, where = tensor.description, f"{file.name},{tensor.path}"
    if description is None:
        raise UnreadableRun(tensor.why)
    dtype_name = description["dtype"].removeprefix("torch.").removeprefix("paddle.")[:64]
    if description["shape"] is None:
        why = "the dataset holds nothing (a null dataspace)"
        return Named("", dtype_name or "unknown", (), None, why, file=where)
    stored = _stored(description)
    dtype, why = _dtype(stored, dtype_name, description["words"])
    shape = limits.extents(description["shape"], tensor.path)
    nbytes = limits.count(shape) * description["itemsize"]
    why = why or _unsafe(description, nbytes, file.size)
    load = None
    if not why and stored is not None:
        load = _load(description, stored, shape, file, tensor.path, dtype)
    return Named("", dtype, shape, load, why, file=where)


def _stored(description: dict[str, Any]) -> np.dtype[Any] | None:
    """Returns numpy's name of the stored elements' type, structures as raw bytes; None where they
    are not numbers.
    """
    if description["kind"] == "O":
        return None
    if description["kind"] == "V":
        return np.dtype(f"V{description['itemsize']}")
    element_type = dtypes.DTYPES.get(description["type"])
    return element_type.numpy if element_type is not None else np.dtype(description["type"])


def _dtype(stored: np.dtype[Any] | None, dtype_name: str, words: str) -> tuple[str, str]:
    """Returns (whence's name of the tensor's dtype, why its elements cannot be read or ""). words:
    the file's name of the stored dtype.
    """
    plain = dtypes.DTYPES.get(dtype_name)
    stored_name = (
        ""
        if stored is None
        else next(
            (d.name for d in dtypes.DTYPES.values() if d.numpy == stored.newbyteorder("=")), ""
        )
    )
    if plain is None and dtype_name:
        return dtype_name, f"dtype {dtype_name} is not known to whence"
    if plain is None:
        return (
            (stored_name, "")
            if stored_name
            else (words, f"stored as {words} without an attribute that says which dtype this is")
        )
    if (
        stored_name == dtype_name
        or (stored_name == "float32" and plain.is_floating and plain.bits < 32)
        or (stored_name == "float64" and plain.is_floating)
    ):
        return dtype_name, ""
    if stored is not None and stored.itemsize == plain.itemsize and stored.kind in "uiV":
        return dtype_name, ""  # the bits themselves
    return dtype_name, f"stored as {words}, which cannot hold {dtype_name}"


def _unsafe(description: dict[str, Any], nbytes: int, size: int) -> str:
    """Returns why the elements must not be read, "" when they may. nbytes: of all elements. size:
    of the file.
    """
    if description["external"]:
        return f"its elements are in another file ({description['external']!r}), which is not read"
    if description["layout"] == "virtual":
        return "it is put together from other files (a virtual dataset), which are not read"
    offset, stored_bytes = description["at"], description["storage"]
    if stored_bytes > size:
        return f"it says that it takes {stored_bytes} bytes of a file of {size}"
    unknown = [
        f"{code} {name}".strip() for code, name in description["filters"] if code not in _FILTERS
    ]
    if unknown:
        return (
            f"it is packed with HDF5 filter {', '.join(unknown)}, a plug-in that whence does "
            "not load; write it without, or with gzip"
        )
    if nbytes and not stored_bytes and description.get("fill") is None:
        return "it was never written, and the file does not state a fill value"
    stored = nbytes // description["itemsize"] * description["width"] if nbytes else 0
    if (
        nbytes
        and stored_bytes
        and description["layout"] == "contiguous"
        and (offset is None or offset + stored > size)
    ):
        return f"its {stored} bytes are not in the file of {size} bytes, which was cut or damaged"
    if description["layout"] == "chunked" or not stored_bytes:
        chunk = (
            limits.count(tuple(description["chunks"] or ())) * description["itemsize"]
            if stored_bytes
            else 0
        )
        try:
            limits.unpacked(max(nbytes, chunk), stored_bytes, "it")
        except UnreadableRun as error:
            return str(error)
    return ""


def _load(
    description: dict[str, Any],
    stored: np.dtype[Any],
    shape: tuple[int, ...],
    file: _File,
    name: str,
    dtype: str,
) -> Callable[[], Array]:
    """Returns the elements of a dataset: mapped where they are stored as is, else decompressed; of
    one that was never written, its fill value.
    """
    count = limits.count(shape)

    def filled() -> Array:
        element = np.frombuffer(bytes.fromhex(description["fill"]), stored)
        return _as(np.full(shape, element[0], stored), dtype)

    def mapped() -> Array:
        kind = stored if stored.kind != "b" else np.dtype(np.uint8)
        data = bytes_of(file.path, description["at"], count * kind.itemsize)
        return _as(words(data, kind).reshape(shape), dtype)

    def unpacked() -> Array:
        data = file.worker.read(file.path, name, count * stored.itemsize)
        return _as(data.view(stored).reshape(shape), dtype)

    if count and "fill" in description:
        return filled
    return mapped if count and description["at"] is not None and description["plain"] else unpacked


def _as(array: Array, dtype: str) -> Array:
    """Converts stored elements to the dtype of the tensor. Raises ElementsMissing when that would
    change them.
    """
    want = dtypes.named(dtype).numpy
    if array.dtype == want:
        return array
    if array.dtype.newbyteorder("=") == want:
        return array.astype(want)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(want)
        if not np.array_equal(cast.astype(array.dtype), array, equal_nan=True):
            raise ElementsMissing(
                f"stored as {array.dtype}, with numbers that are not a {dtype}, which its "
                "attribute says it is"
            )
        return cast
    bits = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind in "ui" else array
    return np.ascontiguousarray(bits).view(want).reshape(array.shape)
