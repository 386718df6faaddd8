"""ExecuTorch: an ETDump (.etdp) with the debug buffer beside it, as an event tracer writes them:
what each instruction computed.

Layout: executorch 1.5.1, devtools/etdump/etdump_schema_flatcc.fbs, scalar_type.fbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from whence.errors import UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits
from whence.readers.encodings.archive import File
from whence.readers.encodings.flatbuffer import Flatbuffer, Table
from whence.readers.encodings.pickle_values import Storage, TorchTensor
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = "an ETDump of ExecuTorch (.etdp), with its debug buffer beside it"
ORDER = 15
_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 11: "bool", 15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn",
    25: "float8_e5m2fnuz", 26: "float8_e4m3fnuz", 27: "uint16", 28: "uint32", 29: "uint64",
}  # fmt: skip
_SCALARS = {3: ("q", "int64"), 4: ("f", "float32"), 5: ("d", "float64"), 6: ("?", "bool")}
"""Fields of a value that are tables of one number: field -> (struct format, dtype)."""
_KERNEL = "native_call_"


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(place.shows(name, (".etdp",), sniff) for name in place.names)
    return b"ED00" in (place.head[4:8], place.head[8:12])


def open_run(place: Place) -> Run:
    """Returns a run in which each execution of a method is a step, and each instruction, named by
    its kernel, a label with its result. Raises UnreadableRun.
    """
    building = Building(place.path, "etdump")
    names = [name for name in place.names if place.shows(name, (".etdp",), sniff)]
    buffer, why = _buffer(place)
    step = 0
    for name in names or [place.path.name]:
        try:
            for run in _runs(File(place.inside(name))):
                step += _add(building, run, step, buffer, why)
        except ValueError as error:
            if not place.is_folder:
                raise UnreadableRun(f"it is cut off or damaged: {error}") from error
            building.lacks(Lack.DAMAGED, name, f"{name} is cut off or damaged: {error}")
    return building.run()


def _buffer(place: Place) -> tuple[File | None, str]:
    """Returns the debug buffer beside a dump, or why there is none."""
    folder = place if place.is_folder else Place(place.path.parent)
    files = [name for name in folder.names if PurePosixPath(name).suffix == ".bin"]
    files = [name for name in files if "debug" in name.lower()] if len(files) > 1 else files
    if len(files) == 1:
        return File(place.inside(files[0])), ""
    return None, (
        f"{'several .bin' if files else 'no .bin'} beside the ETDump may be its debug buffer; "
        "write it there: write_etdump_result_to_file('x.etdp', 'debug.bin')"
    )


def _runs(file: File) -> Iterator[Table]:
    data: Any = file.part(0, file.size)
    whole = Flatbuffer(memoryview(data))
    start = 0 if bytes(whole.data[4:8]) == b"ED00" else 4  # the size may stand in front
    yield from whole.table(whole.behind(start)).tables(1)


def _add(building: Building, run: Table, step: int, buffer: File | None, why: str) -> bool:
    """Adds the calls of an execution; returns whether there are any."""
    events = [(event.table(0), event.table(2)) for event in run.tables(3)]
    kernels = {
        profiled.number(2, "i", -1): name.removeprefix(_KERNEL).partition(".")[0]
        for profiled, _ in events
        if profiled is not None and (name := profiled.text(0)).startswith(_KERNEL)
    }
    root, calls = -1, dict[tuple[int, str], int]()
    for _, event in events:
        value = event.table(2) if event is not None else None
        if event is None or value is None:
            continue
        if root < 0:
            root = building.call("", kind="module", step=step)
        outputs = _records(building, value, buffer, why)
        instruction = event.number(1, "i", -1)
        part = event.text(4) or str(event.number(3, "i", -1)).removeprefix("-1")
        kernel = kernels.get(instruction) or event.text(5) or f"instruction_{instruction}"
        returned = value.table(7)
        if returned is not None and returned.number(0, "?"):
            building.fill(root, outputs=outputs)
        elif (instruction, part) in calls:
            building.fill(calls[instruction, part], outputs=outputs)
        else:
            scope = f"{kernel}.{part}" if part else kernel
            calls[instruction, part] = building.call(
                scope, op_type=kernel, kind="label", step=step, parent=root, outputs=outputs
            )
    return root >= 0


def _records(building: Building, value: Table, buffer: File | None, why: str) -> list[int]:
    """Adds the tensors of a value; a number becomes a tensor without axes."""
    lists = value.table(2)
    tensors = [] if lists is None else [*lists.tables(0)]
    if (tensor := value.table(1)) is not None:
        tensors.append(tensor)
    numbers = [
        building.array(np.array(number.number(0, kind), dtype))
        for field, (kind, dtype) in _SCALARS.items()
        if (number := value.table(field)) is not None
    ]
    return numbers + [_record(building, tensor, buffer, why) for tensor in tensors]


def _record(building: Building, tensor: Table, buffer: File | None, why: str) -> int:
    code, offset = tensor.number(0, "b"), tensor.number(3, "q")
    shape, stride = (limits.extents(tensor.numbers(n, "q"), "a tensor") for n in (1, 2))
    dtype = _DTYPES.get(code, f"ScalarType {code}")
    if buffer is None or len(shape) != len(stride):
        return building.tensor(dtype, shape, why=why or f"its strides are {stride}")
    storage = Storage(buffer.name, dtype, lambda: buffer.part(offset, max(buffer.size - offset, 0)))
    held = TorchTensor(dtype, shape, stride, 0, storage)
    return building.tensor(
        dtype, shape, held.array, stride=() if held.is_contiguous else stride,
        file=PurePosixPath(buffer.name).name,
    )  # fmt: skip
