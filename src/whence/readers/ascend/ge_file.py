"""One file of a GE dump: a header that describes tensors, then their bytes. Also the "nano" variant
of small chips.

Layout: uint64 length of the header; toolkit.dumpdata.DumpData in protobuf; payloads of all inputs,
outputs, buffers and workspaces without gaps. Nano: the header begins with 0x5A5A5A5A and is a list
of (tag, length, value).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.errors import UnreadableRun
from whence.readers.ascend import dtypes, layouts
from whence.readers.encodings import limits, protobuf
from whence.readers.encodings.archive import bytes_of
from whence.readers.encodings.protobuf import (
    Message,
    Schema,
    integers,
    messages,
    packed,
    raw,
    texts,
)

_NANO = b"\x5a\x5a\x5a\x5a"
_NANO_SLOTS = {4: "input", 5: "output"}
_TENSORS = 4096  # of one operator
_SHAPE = messages({1: ("extents", packed)})
_FORM: Schema = {1: ("type", integers), 2: ("format", integers), 3: ("shape", _SHAPE)}
_STORED = (("data", raw), ("size", integers), ("original", _SHAPE), ("groups", integers))
_INPUT: Schema = _FORM | dict(enumerate(_STORED, 4))
_OUTPUT: Schema = (
    _FORM | {4: ("origins", messages({1: ("name", texts)}))} | dict(enumerate(_STORED, 5))
)
_BUFFER: Schema = dict(enumerate(_STORED[:2], 2))
_DUMP: Schema = {
    3: ("output", messages(_OUTPUT)), 4: ("input", messages(_INPUT)),
    5: ("buffer", messages(_BUFFER)), 6: ("name", texts), 7: ("older", raw),
    8: ("workspace", messages(_BUFFER)),
}  # fmt: skip


class DumpedTensor(NamedTuple):
    """A tensor of a dump file.

    slot: "input.0" or "output.1". type: as stored. start: of its bytes in the file. nbytes: as the
    header states. origin: name of the original operator whose output it is, "" when not stated.
    """

    slot: str
    type: dtypes.Type
    stored: tuple[int, ...]
    layout: layouts.Layout
    start: int
    nbytes: int
    origin: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


class DumpFile(NamedTuple):
    """The content of one file. op_name: "" when not stated. unread: parts of the file that are not
    read, in words.
    """

    op_name: str
    tensors: tuple[DumpedTensor, ...]
    unread: tuple[str, ...]


def recognised(head: bytes, size: int) -> bool:
    """Whether these first bytes start a dump file of this size."""
    if len(head) < 12 or size <= 8:
        return False
    (length,) = struct.unpack_from("<Q", head)
    if not 0 < length <= size - 8:
        return False
    if head[8:12] == _NANO:
        return True
    try:
        # The first field of a message is its version, time or a tensor.
        number, kind = head[8] >> 3, head[8] & 7
        if (number, kind) not in {(1, 2), (2, 0), (3, 2), (4, 2), (6, 2)}:
            return False
        if kind == protobuf.BYTES:
            return protobuf.varint(head, 9)[0] <= int(length)
    except ValueError:
        return False
    return True


def read(path: Path) -> DumpFile:
    """Reads the header of a dump file. Raises UnreadableRun that says what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise UnreadableRun(f"{path.name} has {size} bytes, too few for a dump")
        (length,) = struct.unpack("<Q", head)
        if length > size - 8:
            raise UnreadableRun(
                f"{path.name} says its header has {length} bytes; {size - 8} are there"
            )
        header = file.read(length)
    try:
        return _nano(header, 8 + length) if header[:4] == _NANO else _dump_data(header, 8 + length)
    except (ValueError, struct.error, TypeError, IndexError) as error:
        raise UnreadableRun(f"{path.name}: its header is damaged: {error}") from error


def elements(path: Path, tensor: DumpedTensor) -> Array:
    """Returns the logical tensor, memory-mapped where it is stored as is. Raises ElementsMissing
    when bytes are missing.
    """
    size = path.stat().st_size
    nbytes = max(min(tensor.nbytes, size - tensor.start), 0)
    data = bytes_of(path, tensor.start, nbytes)
    return tensor.layout.apply(dtypes.decoded(tensor.type, data, tensor.stored))


def _dump_data(header: bytes, start: int) -> DumpFile:
    base = _address(header)
    fields = protobuf.read(header, _DUMP)
    # the number of attributes today: told apart by what is in them
    older = [protobuf.read(value, _BUFFER) for value in fields["older"] if _is_workspace(value)]
    fields["workspace"] = older + fields["workspace"]
    tensors: list[DumpedTensor] = []
    unread: list[str] = []
    place = start
    for slot in ("input", "output", "buffer", "workspace"):
        if len(fields[slot]) > _TENSORS:
            raise UnreadableRun(f"it says that one operator has more than {_TENSORS} {slot}s")
        for k, tensor in enumerate(fields[slot]):
            offset, nbytes = place, tensor.last("size", 0)
            if inside := tensor.last("data"):  # its elements are in the header itself
                offset, nbytes = 8 + _address(inside) - base, len(inside)
            else:
                place += nbytes
            if slot in ("buffer", "workspace"):
                unread.append(f"{slot} {k} of {nbytes} bytes")
            else:
                tensors.append(_described(f"{slot}.{k}", tensor, offset, nbytes))
    return DumpFile(fields.last("name"), tuple(tensors), tuple(unread))


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _described(slot: str, tensor: Message, start: int, nbytes: int) -> DumpedTensor:
    """Reads an OpInput or OpOutput."""
    shape, original = (
        limits.extents([n for form in tensor[name][-1:] for n in form["extents"]], "a tensor")
        for name in ("shape", "original")
    )
    kind, form, groups = (
        dtypes.ge(tensor.last("type", 0)),
        tensor.last("format", 0),
        tensor["groups"],
    )
    origin = "".join(each.last("name") for each in tensor.get("origins", ())[-1:])
    return _tensor(
        slot, kind, (form, max([1, *groups[-1:]])), (shape, original), (start, nbytes), origin
    )


def _is_workspace(message: Any) -> bool:
    """Whether field 7 is a workspace (type: a number), as in one older schema, not an attribute
    (name and value are text).
    """
    try:
        return any(
            number in (1, 3) and kind == protobuf.VARINT
            for number, kind, _ in protobuf.fields(message)
        )
    except ValueError:
        return False


def _tensor(
    slot: str,
    kind: dtypes.Type,
    form: tuple[int, int],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    at: tuple[int, int],
    origin: str = "",
) -> DumpedTensor:
    """form: format, groups. shapes: stored, original. at: start, bytes."""
    stored, original = shapes
    if not stored and at[1] and kind.bits:
        count = at[1] * 8 // kind.bits  # no shape: a scalar, or what its bytes hold
        stored = () if count == 1 else (count,)
    layout = layouts.logical(form[0], stored, original, form[1])
    return DumpedTensor(slot, kind, stored, layout, *at, origin)


def _nano(header: bytes, start: int) -> DumpFile:
    described: dict[str, list[Any]] = {"input": [], "output": []}
    for tag, value in _records(header, 8):
        if (slot := _NANO_SLOTS.get(tag)) is None:
            continue
        (count,) = struct.unpack_from("<I", value)
        place = 4
        for _ in range(min(count, _TENSORS)):
            code, form = struct.unpack_from("<2I", value, place)
            # type, format, kind of address[, index, original type, original format], address,
            # offset, size, bytes of what follows
            fixed = 24 if slot == "output" else 12
            _, _, nbytes, extra_bytes = struct.unpack_from("<3QI", value, place + fixed)
            place += fixed + 28
            extra = dict(_records(value[place : place + extra_bytes], 0))
            place += extra_bytes
            shapes = (
                limits.extents([*v[: len(v) // 8 * 8].cast("Q")], "a tensor")
                for v in (extra.get(t, memoryview(b"")) for t in (0, 1))
            )
            described[slot].append((dtypes.acl(code), (form, 1), tuple(shapes), nbytes))
    tensors, place = list[DumpedTensor](), start
    for slot, entries in described.items():
        for k, (kind, form, shapes, nbytes) in enumerate(entries):
            tensors.append(_tensor(f"{slot}.{k}", kind, form, shapes, (place, nbytes)))
            place += nbytes
    return DumpFile("", tuple(tensors), ())


def _records(data: bytes | memoryview, place: int) -> Iterator[tuple[int, memoryview]]:
    """Yields (tag, value) of a list of tag, length, value."""
    view = memoryview(data)
    while place + 8 <= len(view):
        tag, length = struct.unpack_from("<2I", view, place)
        place += 8
        if length > len(view) - place:
            raise ValueError(f"tag {tag} says it has {length} bytes, {len(view) - place} are left")
        yield tag, view[place : place + length]
        place += length


def missing(tensor: DumpedTensor, path: Path) -> str:
    """Returns why a tensor's elements cannot be read, "" when they can. Checks the file's size
    only.
    """
    if not tensor.type.dtype:
        return f"elements of {tensor.type.name} are not read"
    need = dtypes.nbytes(tensor.type, limits.count(tensor.stored))
    available = max(min(tensor.nbytes, path.stat().st_size - tensor.start), 0)
    if available < need:
        return (
            f"{path.name} has {available} of the {need} bytes of {tensor.slot}: the file was cut "
            "short"
        )
    return ""
