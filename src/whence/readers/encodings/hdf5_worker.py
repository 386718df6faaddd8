"""The process in which libhdf5 runs. A damaged file may end it, or take its memory or its time;
whoever asked goes on.

This file runs as a script and imports nothing of whence. It reads one JSON object a line from stdin
and answers on stdout in frames: one letter, eight bytes of length, the payload. J: JSON. D:
elements. E: an error in words. F: the end of an answer.

    {"path": [...]}                                    the first line: where modules are looked for
    {"do": "index", "file": F, "skip": [...]}          J for every dataset, note and step; `skip` are objects that ended a process before
    {"do": "read", "file": F, "name": N}               D, in pieces
"""  # noqa: E501

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Container, Iterator
from typing import Any

_SPARE_BYTES = 256 << 20  # of memory that a request may take beyond what its size explains
_MOST_BYTES = 4 << 30
_PIECE_BYTES = 16 << 20
_SPARE_S = 20
_INDEX_BYTES_PER_S = 500_000  # slower than the slowest file system here: 100 datasets a second
_READ_BYTES_PER_S = 2_000_000
_LEVELS = 16  # of groups below a step: modules, where each part of a name is a group
# those that are read, and how many bytes they may have
_ATTRIBUTES = {"dtype": 256, "whence": 1 << 20}
# What h5py raises for a damaged file.
_DAMAGE = (
    OSError, RuntimeError, ValueError, KeyError, TypeError, NotImplementedError, MemoryError,
    AttributeError, OverflowError,
)  # fmt: skip


class Pipe:
    """Writes the frames of the answers."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, letter: bytes, payload: bytes | memoryview = b"") -> None:
        """Writes one frame."""
        self._write(struct.pack("<cQ", letter, len(payload)))
        self._write(payload)

    def say(self, **fields: Any) -> None:
        """Writes one JSON frame. Names that are not UTF-8 are kept as escapes."""
        payload = json.dumps(fields).encode("ascii")
        self._write(struct.pack("<cQ", b"J", len(payload)) + payload)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def main() -> None:
    """Answers requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Pipe(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing but frames may come through
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = json.loads(sys.stdin.readline() or "{}").get("path", [])
    file: Any = None
    opened: tuple[str, int, int] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            import h5py

            status = os.stat(request["file"])  # noqa: PTH116 - pathlib would cost the start of every worker
            identity = (request["file"], status.st_size, status.st_mtime_ns)
            _allow(
                min(_SPARE_BYTES + status.st_size // 2, _MOST_BYTES),
                status.st_size / _INDEX_BYTES_PER_S,
            )
            if opened != identity:  # opening takes longer than most tensors
                # a file that was written anew in its place would be given for it
                if file is not None:
                    file.close()
                    file = opened = None
                file, opened = h5py.File(request["file"], "r", locking=False), identity
            if request["do"] == "index":
                _index(pipe, file, request["skip"])
            else:
                _read(pipe, file[request["name"]])
            pipe.send(b"F")
        except Exception as error:  # noqa: BLE001 - the answer is that it cannot be read, whatever a file does to h5py
            opened = None
            pipe.send(b"E", short(error).encode("utf-8", "backslashreplace"))


def short(error: BaseException) -> str:
    """Returns an exception's message in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _allow(nbytes: int, seconds: float) -> None:
    """Limits the resources of the process from now on: memory beyond its present use,
    and CPU time.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - as above
            current = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (current + nbytes, resource.RLIM_INFINITY))
    except (OSError, ValueError):  # no such system, or a harder limit is set: that one holds
        pass
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(used + _SPARE_S + seconds) + 1
    resource.setrlimit(
        resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


# ---- content of a file


def _index(pipe: Pipe, file: Any, skip: list[str]) -> None:
    """Sends every dataset, step by step, in order."""
    import h5py

    steps = []
    for key in _members(pipe, file, skip):
        if (
            key.isdigit()
            and len(key) < 10
            and isinstance(file.get(key, getlink=True), h5py.HardLink)
        ):
            pipe.say(at=f"/{key}")
            if f"/{key}" not in skip and isinstance(file[key], h5py.Group):
                steps.append(key)
    for key in sorted(steps, key=int):
        pipe.say(step=int(key))
        _group(pipe, file[key], skip)
    pipe.say(step=None)
    _group(pipe, file, set(steps).union(skip), whole=True)


def _group(pipe: Pipe, group: Any, skip: Container[str], *, whole: bool = False) -> None:
    for name, path, dataset in _datasets(pipe, group, skip, whole=whole):
        try:
            pipe.say(tensor=_tensor(dataset), path=path, shown=name)
        except _DAMAGE as error:
            pipe.say(damaged=path, why=short(error), shown=name)


_SMALL = 2048
"""Size in bytes below which libhdf5 places elements in a block that it allocated earlier."""


def _members(pipe: Pipe, group: Any, skip: Container[str]) -> list[str]:
    """Returns the names in a group in order of creation; by file position where the file does not
    record that order.

    The metadata of a dataset may fill a hole that an older one left; its elements never do. Large
    elements are stored in order of creation, and so are small ones.
    """
    from h5py import h5, h5p

    names: list[bytes] = []
    if group.id.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED:
        group.id.links.iterate(names.append, idx_type=h5.INDEX_CRT_ORDER)
        return [_text(name) for name in names]
    links = group.id.links
    links.iterate(names.append)
    names.sort(key=lambda name: (links.get_info(name).type, links.get_info(name).u))
    offsets: dict[bool, dict[int, int]] = {True: {}, False: {}}  # by place, of small and of large
    for place, name in enumerate(names):
        path = f"{group.name.rstrip('/')}/{_text(name)}"
        pipe.say(at=path)
        at, nbytes = (None, 0) if path in skip else _elements_of(group, name)
        if at is not None:
            offsets[nbytes < _SMALL][place] = at
    ordered = list(names)
    for alike in offsets.values():
        for place, source in zip(alike, sorted(alike, key=alike.__getitem__), strict=True):
            ordered[place] = names[source]
    return [_text(name) for name in ordered]


def _elements_of(group: Any, name: bytes) -> tuple[int | None, int]:
    """Returns (file position of a dataset's elements if they are contiguous, else None; their
    bytes).
    """
    from h5py import h5d, h5l

    try:
        if group.id.links.get_info(name).type != h5l.TYPE_HARD:
            return None, 0
        opened = h5d.open(group.id, name)
        return opened.get_offset(), opened.get_storage_size()
    except _DAMAGE:
        return None, 0


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _datasets(
    pipe: Pipe,
    group: Any,
    skip: Container[str],
    above: tuple[str, ...] = (),
    visited: set[int] | None = None,
    *,
    whole: bool = False,
) -> Iterator[tuple[str, str, Any]]:
    """Yields (shown name, path, dataset) below a group, in order. Links that lead outside the file,
    or back, are reported and not followed.
    """
    import h5py

    visited = set() if visited is None else visited
    visited.add(h5py.h5o.get_info(group.id).addr)
    for name in _members(pipe, group, skip):
        if whole and not above and name in skip:
            continue
        path = f"{group.name.rstrip('/')}/{name}"
        pipe.say(at=path)
        if path in skip:
            pipe.say(damaged=path, why="", shown=".".join((*above, name)))
            continue
        try:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                pipe.say(note=f"{path} leads to another file ({link.filename}); it is not followed")
                continue
            item = group[name]
            if isinstance(item, h5py.Dataset):
                yield ".".join((*above, name)), item.name or path, item
            elif (
                isinstance(item, h5py.Group)
                and len(above) < _LEVELS
                and h5py.h5o.get_info(item.id).addr not in visited
            ):
                yield from _datasets(pipe, item, skip, above=(*above, name), visited=visited)
            elif isinstance(item, h5py.Group):
                pipe.say(
                    note=f"{path} is nested too deep, or was read under another name; what is in "
                    "it is left out"
                )
        except _DAMAGE as error:
            pipe.say(note=f"{path} cannot be opened: {short(error)}")


def _tensor(dataset: Any) -> dict[str, Any]:
    """Returns what is needed before a dataset's elements are read; reads no elements."""
    import h5py
    from h5py import h5d

    description: dict[str, Any] = {
        "shape": dataset.shape,
        **{name: _attribute(dataset, name, max_bytes) for name, max_bytes in _ATTRIBUTES.items()},
    }
    stored = dataset.dtype
    description |= {
        "type": stored.name if stored.isbuiltin == 2 else stored.str,
        "words": str(stored)[:200],
        "itemsize": stored.itemsize,
    }
    description["kind"] = (
        "S"
        if h5py.check_string_dtype(stored) is not None
        else "O"
        if stored.hasobject or stored.subdtype is not None
        else "V"
        if stored.names is not None
        else stored.kind
    )
    if dataset.shape is None:
        return description
    plan = dataset.id.get_create_plist()
    layout = plan.get_layout()
    description["layout"] = {
        h5d.CONTIGUOUS: "contiguous",
        h5d.CHUNKED: "chunked",
        h5d.COMPACT: "compact",
    }.get(layout, "virtual")
    description["external"] = _text(plan.get_external(0)[0]) if plan.get_external_count() else ""
    filters = [plan.get_filter(i) for i in range(plan.get_nfilters())]
    description["filters"] = [(code, _text(name)) for code, _, _, name in filters]
    description["chunks"] = dataset.chunks
    description["storage"] = dataset.id.get_storage_size()
    description["at"] = dataset.id.get_offset()
    description["plain"] = _is_plain(dataset)
    # of an element in the file; numpy may have to take a wider one
    description["width"] = dataset.id.get_type().get_size()
    if not description["storage"] and dataset.size and description["kind"] in "biufcV":
        description["fill"] = _fill(dataset, plan)
    return description


def _is_plain(dataset: Any) -> bool:
    """Whether numpy interprets the bytes in the file as HDF5 does; HDF5 has other floats, and
    integers with padding.
    """
    from h5py import h5t

    try:
        is_same: bool = dataset.dtype.names is None and h5t.py_create(
            dataset.dtype, logical=True
        ).equal(dataset.id.get_type())
    except _DAMAGE:
        return False
    return is_same


def _fill(dataset: Any, plan: Any) -> str | None:
    """Returns the bytes, in hex, of an element that was never written; None when the file does not
    define them.
    """
    import numpy as np
    from h5py import h5d

    if plan.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED:
        return None
    value = np.zeros((), dataset.dtype)
    plan.get_fill_value(value)
    return value.tobytes().hex()


def _attribute(dataset: Any, name: str, max_bytes: int) -> str:
    """Returns a text attribute of one element, "" when it is absent or something else. Its size is
    checked before it is read.
    """
    from h5py import h5a, h5t

    try:
        if not h5a.exists(dataset.id, name.encode()):
            return ""
        attribute = h5a.open(dataset.id, name.encode())
        if (
            attribute.get_storage_size() > max_bytes
            or attribute.get_space().get_simple_extent_npoints() != 1
        ):
            return ""
        kind = attribute.get_type()
        if kind.get_class() != h5t.STRING or kind.get_size() > max_bytes:
            return ""
        value = dataset.attrs[name]
    except _DAMAGE:
        return ""
    value = value if isinstance(value, (str, bytes)) else value.item() if value.size == 1 else ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= max_bytes else ""


# ---- elements


def _read(pipe: Pipe, dataset: Any) -> None:
    """Sends the elements of a dataset in C order, decompressed a few rows of chunks at a time."""
    import numpy as np

    shape, size = dataset.shape, dataset.dtype.itemsize
    nbytes = dataset.size * size
    rows = 1
    if shape and shape[0]:
        chunk = dataset.chunks[0] if dataset.chunks else 1
        rows = chunk * max(1, _PIECE_BYTES // max(chunk * (nbytes // shape[0]), 1))
    piece = rows * (nbytes // shape[0]) if shape and shape[0] else nbytes
    unpacked = size
    for extent in dataset.chunks or ():
        unpacked *= extent
    _allow(_SPARE_BYTES + 2 * max(min(piece, nbytes), 0) + 3 * unpacked, nbytes / _READ_BYTES_PER_S)
    for start in range(0, shape[0], rows) if shape else (None,):
        part = dataset[()] if start is None else dataset[start : start + rows]
        pipe.send(b"D", np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


if __name__ == "__main__":
    main()
