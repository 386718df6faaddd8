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
from whence.records.slots import is_output

_NANO = b"\x5a\x5a\x5a\x5a"
_NANO_INPUTS, _NANO_OUTPUTS = 4, 5
_TENSORS = 4096  # of one operator
_OUTPUT, _INPUT, _BUFFER, _NAME, _WORKSPACE = 3, 4, 5, 6, 8
_OLD_WORKSPACE = 7  # the number of attributes today: told apart by what is in them


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
    """What one file holds. op_name: "" when not stated. time_us: when it was written, 0 when not
    stated. unread: what is in the file and is not read, in words.
    """

    op_name: str
    time_us: int
    tensors: tuple[DumpedTensor, ...]
    unread: tuple[str, ...]


def recognised(head: bytes, size: int) -> bool:
    """Do these first bytes start a dump file of this size?"""
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
    """The header of a dump file. Raises UnreadableRun saying what is wrong with it."""
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
    """The logical tensor, in place where it lies plain. Raises ElementsMissing when bytes are
    missing.
    """
    size = path.stat().st_size
    nbytes = max(min(tensor.nbytes, size - tensor.start), 0)
    data = bytes_of(path, tensor.start, nbytes)
    return tensor.layout.apply(dtypes.decoded(tensor.type, data, tensor.stored))


def _dump_data(header: bytes, start: int) -> DumpFile:
    name, time_us = "", 0
    described: dict[str, list[_Description]] = {
        "output": [],
        "input": [],
        "buffer": [],
        "workspace": [],
    }
    kinds = {_OUTPUT: "output", _INPUT: "input", _BUFFER: "buffer", _WORKSPACE: "workspace"}
    base = np.frombuffer(header, np.uint8).__array_interface__["data"][0]
    for number, kind, value in protobuf.fields(header):
        if number == 2 and kind == protobuf.VARINT:
            time_us = value
        elif kind != protobuf.BYTES:
            continue
        elif number == _NAME:
            name = protobuf.text(value)
        elif number in kinds or (number == _OLD_WORKSPACE and _is_workspace(value)):
            slot = kinds.get(number, "workspace")
            if len(described[slot]) >= _TENSORS:
                raise UnreadableRun(f"it says that one operator has more than {_TENSORS} {slot}s")
            described[slot].append(_tensor(slot, value, base))
    tensors: list[DumpedTensor] = []
    unread: list[str] = []
    place = start
    for slot in ("input", "output", "buffer", "workspace"):
        for k, description in enumerate(described[slot]):
            inside = description.inside is not None
            offset, nbytes = (
                (8 + description.inside[0], description.inside[1])
                if description.inside is not None
                else (place, description.nbytes)
            )
            place += 0 if inside else description.nbytes
            if slot in ("buffer", "workspace"):
                unread.append(f"{slot} {k} of {nbytes} bytes")
            else:
                tensors.append(_dumped_tensor(f"{slot}.{k}", description, offset, nbytes))
    return DumpFile(name, time_us, tuple(tensors), tuple(unread))


class _Description(NamedTuple):
    """What a header states of one tensor. inside: (offset in the header, bytes) when its elements
    are in the header itself.
    """

    type: dtypes.Type
    format: int
    shape: tuple[int, ...]
    original: tuple[int, ...]
    nbytes: int
    groups: int
    origin: str
    inside: tuple[int, int] | None


def _tensor(slot: str, message: Any, base: int) -> _Description:
    """OpOutput, OpInput, OpBuffer or Workspace: their field numbers agree except for the origin of
    an output, which moves later ones by one.
    """
    later = 1 if slot == "output" else 0
    plain = slot in ("buffer", "workspace")
    data_number, size_number = (2, 3) if plain else (4 + later, 5 + later)
    type_code = format_code = nbytes = groups = 0
    shape: tuple[int, ...] = ()
    original: tuple[int, ...] = ()
    origin = ""
    inside: tuple[int, int] | None = None
    for number, kind, value in protobuf.fields(message):
        if number == size_number and kind == protobuf.VARINT:
            nbytes = value
        elif number == data_number and kind == protobuf.BYTES:
            if len(value):
                inside = (
                    np.frombuffer(value, np.uint8).__array_interface__["data"][0] - base,
                    len(value),
                )
        elif plain:
            continue
        elif number == 1 and kind == protobuf.VARINT:
            type_code = value
        elif number == 2 and kind == protobuf.VARINT:
            format_code = value
        elif number == 3 and kind == protobuf.BYTES:
            shape = _shape(value)
        elif number == 6 + later and kind == protobuf.BYTES:
            original = _shape(value)
        elif number == 7 + later and kind == protobuf.VARINT:
            groups = protobuf.signed(value)
        elif later and number == 4 and kind == protobuf.BYTES:
            origin = next(
                (
                    protobuf.text(v)
                    for n, k, v in protobuf.fields(value)
                    if n == 1 and k == protobuf.BYTES
                ),
                "",
            )
    return _Description(
        dtypes.ge(type_code), format_code, shape, original, nbytes, groups, origin, inside
    )


def _shape(message: Any) -> tuple[int, ...]:
    out: list[int] = []
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind in (protobuf.VARINT, protobuf.BYTES):
            if len(value) > 10 * limits.RANK if kind == protobuf.BYTES else len(out) > limits.RANK:
                raise UnreadableRun(f"a tensor of more than {limits.RANK} dimensions")
            out += protobuf.packed(kind, value)
    return limits.extents(out, "a tensor")


def _is_workspace(message: Any) -> bool:
    """Field 7 is an attribute (name, value: both text) or, in one older schema, a workspace (type:
    a number).
    """
    try:
        return any(
            number in (1, 3) and kind == protobuf.VARINT
            for number, kind, _ in protobuf.fields(message)
        )
    except ValueError:
        return False


def _dumped_tensor(slot: str, description: _Description, start: int, nbytes: int) -> DumpedTensor:
    stored = description.shape
    if not stored and nbytes and description.type.bits:
        count = nbytes * 8 // description.type.bits  # no shape: a scalar, or what its bytes hold
        stored = () if count == 1 else (count,)
    layout = layouts.logical(
        description.format, stored, description.original, max(description.groups, 1)
    )
    return DumpedTensor(slot, description.type, stored, layout, start, nbytes, description.origin)


def _nano(header: bytes, start: int) -> DumpFile:
    tensors: list[tuple[str, tuple[int, ...], _Description]] = []
    for tag, value in _records(header, 8):
        if tag not in (_NANO_INPUTS, _NANO_OUTPUTS):
            continue
        slot = "input" if tag == _NANO_INPUTS else "output"
        (count,) = struct.unpack_from("<I", value)
        place = 4
        for k in range(min(count, _TENSORS)):
            code, layout = struct.unpack_from("<2I", value, place)
            # type, format, kind of address[, index, original type, original format], address,
            # offset, size, bytes of what follows
            fixed = 12 + (12 if slot == "output" else 0)
            _, _, nbytes, extra_bytes = struct.unpack_from("<3QI", value, place + fixed)
            place += fixed + 28
            shapes = {
                t: tuple(v[: len(v) // 8 * 8].cast("Q"))
                for t, v in _records(value[place : place + extra_bytes], 0)
                if t in (0, 1)
            }
            place += extra_bytes
            extents = {t: limits.extents(tuple(map(int, s)), "a tensor") for t, s in shapes.items()}
            description = _Description(
                dtypes.acl(code),
                layout,
                extents.get(0, ()),
                extents.get(1, ()),
                nbytes,
                1,
                "",
                None,
            )
            tensors.append((f"{slot}.{k}", (), description))
    tensors.sort(key=lambda t: is_output(t[0]))
    out, place = [], start
    for slot, _, description in tensors:
        out.append(_dumped_tensor(slot, description, place, description.nbytes))
        place += description.nbytes
    return DumpFile("", 0, tuple(out), ())


def _records(data: bytes | memoryview, place: int) -> Iterator[tuple[int, memoryview]]:
    """(tag, value) of a list of tag, length, value."""
    view = memoryview(data)
    while place + 8 <= len(view):
        tag, length = struct.unpack_from("<2I", view, place)
        place += 8
        if length > len(view) - place:
            raise ValueError(f"tag {tag} says it has {length} bytes, {len(view) - place} are left")
        yield tag, view[place : place + length]
        place += length


def missing(tensor: DumpedTensor, path: Path) -> str:
    """Why a tensor's elements cannot be read, "" when they can. Looks at the file's size only."""
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
