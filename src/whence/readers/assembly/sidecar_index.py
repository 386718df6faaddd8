"""Reads `whence.jsonl`, which whence writes next to tensors that have nothing but a name: their
calls and records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import sidecar
from whence.readers.assembly.builder import Building, Load
from whence.readers.encodings import limits
from whence.readers.encodings.json_file import refuse_zeros
from whence.readers.source import Place
from whence.records import Call, Dumped, Note, Program, Record, Run

NAME = "whence.jsonl"
Find = Callable[[str], Load]
"""Returns the loader of the elements at a place (`Dumped.file`); raises UnreadableRun or
ElementsMissing.
"""


class _About(msgspec.Struct, tag="dump", tag_field="t"):
    """The first line of the index."""

    version: int
    kind: str = ""
    ended: str = ""
    versions: dict[str, str] = {}
    settings: dict[str, object] = {}
    seed: int | None = None
    deterministic: bool = False


_decode = msgspec.json.Decoder(_About | Record | Call | Program | Note).decode


def open_run(place: Place, kind: str, find: Find) -> Run:
    """Returns the run that the index of a folder describes. Raises UnreadableRun when it is
    damaged.
    """
    about, *lines = _lines(place)
    if not isinstance(about, _About) or about.version != 1:
        raise UnreadableRun(
            f"{NAME} is not one that this version can read; update whence, or remove it to read "
            "the tensors by their names"
        )
    building = Building(place.path, kind, versions=about.versions, settings=about.settings)
    building.ended = about.ended
    building.info = msgspec.structs.replace(
        building.info, seed=about.seed, deterministic=about.deterministic
    )
    records = [line for line in lines if isinstance(line, Record)]
    for number, record in enumerate(records):
        if record.id != number:
            raise UnreadableRun(
                f"{NAME}: record {record.id} stands where {number} should; it is damaged"
            )
        _add(building, record, find)
    calls = [line for line in lines if isinstance(line, Call)]
    if any(not 0 <= ref.record < len(records) for call in calls for ref in call.refs):
        raise UnreadableRun(f"{NAME}: a call refers to a record that is not there; it is damaged")
    for line in lines:
        if isinstance(line, Program) and all(0 <= k < len(records) for k in line.constants):
            building.programs[line.id] = line
        elif isinstance(line, Note):
            building.note(line.kind, line.text, line.scope, line.step)
    sidecar.add(
        building, calls, {call.id: [(ref.slot, ref.record) for ref in call.refs] for call in calls}
    )
    return building.run()


def _lines(place: Place) -> list[object]:
    path = place.inside(NAME)
    try:
        if path.stat().st_size > limits.JSON_BYTES:
            raise UnreadableRun(
                f"{NAME} has {path.stat().st_size} bytes, more than {limits.JSON_BYTES}"
            )
        with path.open("rb") as file:
            refuse_zeros(file)
            file.seek(0)
            return [_decode(line) for line in file] or [None]
    except OSError as error:
        raise UnreadableRun(f"cannot read {NAME}: {error.strerror or error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableRun(
            f"{NAME} is damaged: {str(error)[:120]}; convert again, or remove it to read the "
            "tensors by their names"
        ) from error


def _add(building: Building, record: Record, find: Find) -> None:
    shape = limits.extents(record.shape, f"record {record.id}")
    options: dict[str, Any] = {
        "device": record.device,
        "columns": record.columns,
        "stride": record.stride,
        "quantum": record.quantum,
        "whole": record.whole,
    }
    if not isinstance(record.elements, Dumped):
        why = record.why or "it has no elements"
        building.tensor(record.dtype, shape, why=why, statistics=record.statistics, **options)
        return
    file = record.elements.file
    try:
        load = _as(find(file), record.dtype, shape)
    except (UnreadableRun, ElementsMissing) as error:
        building.tensor(record.dtype, shape, why=str(error), file=file.partition(",")[0], **options)
        return
    building.tensor(record.dtype, shape, load, file=file.partition(",")[0], **options)


def _as(load: Load, dtype: str, shape: tuple[int, ...]) -> Load:
    """Returns a loader that converts elements to the dtype of the record, where the file stores
    only their bits.
    """

    def loaded() -> Array:
        array, want = load(), dtypes.named(dtype)
        if array.dtype != want.numpy and array.nbytes == limits.count(shape) * want.itemsize:
            return (
                np.ascontiguousarray(array)
                .reshape(-1)
                .view(np.uint8)
                .view(want.numpy)
                .reshape(shape)
            )
        return array

    return loaded
