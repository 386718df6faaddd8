"""GE dumps of Ascend graph mode: one file for every operator run, `Type.name.task.stream.time`, as
CANN and torchair write them.

    [worldsize1_global_rank0/]20251010083826/0/graph_1_0/1/0/MatMulV2.MatMul.45.6.1706596912161951
                              time / device / graph / model / token

Also the nano variant, files with numbers for names (`mapping.csv`), files converted to npy,
statistics as csv, and a single file. The graph texts beside the dump say which operators of the
original program each one stands for (`Call.origins`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whence.errors import UnreadableRun
from whence.readers.ascend import ge_file
from whence.readers.ascend.ge_graphs import Origins, Texts, is_graph
from whence.readers.assembly import npy_tensors
from whence.readers.assembly.builder import Building
from whence.readers.source import Place
from whence.records import Lack, Run
from whence.records.slots import split_slot

LOOKS_LIKE = "a folder with GE dumps such as MatMulV2.MatMul.45.6.1706596912161951, or one of them"
ORDER = 30

_TIME = re.compile(r"\d{16}$")
_NUMBERED = re.compile(r"\d{16}$|\d{32}$")
_FOLDER = re.compile(r"\d{14}$")
_GRAPH = re.compile(r"graph_(\d+)(?:_\d+)?$")
_RANK = re.compile(r"worldsize\d+_global_rank(\d+)$")
_CONVERTED = re.compile(r"(.+)\.(input|output)\.(\d+)\.npy$")
_ABOVE = 7  # folders above a dump where its rank, its graph and the texts may be
_TRIED = 20  # files looked into before a folder is said to be none
_MAPPING_BYTES = 64 << 20


class Name(NamedTuple):
    """The parts of a dump file's name. time: as a number that orders files."""

    op_type: str
    op_name: str
    task: int
    time: int


def named(name: str) -> Name | None:
    """Parses a file's name; returns None for any other name.

    The name of the operator may contain dots; more fields may follow the time; the oldest writers
    omit the stream.
    """
    fields = name.split(".")
    time_index = next(
        (i for i in range(len(fields) - 1, 2, -1) if _TIME.match(fields[i])), len(fields) - 1
    )
    leading = fields[:time_index]
    if (
        not fields[time_index].isdecimal()
        or len(leading) < 3
        or not leading[-1].isdecimal()
        or not leading[0]
    ):
        return None
    stream = len(leading) > 3 and leading[-2].isdecimal()
    if len(fields[time_index]) < 9 or (len(fields[time_index]) != 16 and not stream):
        return None
    task = leading[-2] if stream else leading[-1]
    return Name(
        leading[0],
        ".".join(leading[1 : -2 if stream else -1]),
        int(task[:18]),
        int(fields[time_index][:18]),
    )


def sniff(place: Place) -> bool:
    """Whether names have the form of operators with times and the files begin like dumps; or one
    such file.
    """
    if not place.is_folder:
        fits = named(place.path.name) is not None or _NUMBERED.match(place.path.name) is not None
        return fits and ge_file.recognised(place.head, place.size)
    tried = 0
    for name in place.files:
        last = name.rpartition("/")[2]
        converted = _CONVERTED.match(last)
        if converted and named(converted[1]) is not None:
            return True
        if named(last) is None and not _NUMBERED.match(last):
            continue
        path = place.inside(name)
        with path.open("rb") as file:
            if ge_file.recognised(file.read(64), path.stat().st_size):
                return True
        tried += 1
        if tried >= _TRIED:
            return False
    return False


class _Where(NamedTuple):
    """The position of a file in a dump. graph: -1 when no folder states it."""

    rank: int
    root: str
    graph: int
    step: int


class _OperatorRun(NamedTuple):
    """One execution of an operator: its file, or the npy files it was converted to
    (slot -> name).
    """

    where: _Where
    name: Name
    file: str
    converted: dict[str, str]


def open_run(place: Place) -> Run:
    """Reads the headers of all files now, elements on request."""
    building = Building(place.path, "ge")
    runs = sorted(
        _operator_runs(place, building),
        key=lambda f: (f.where.step, f.where.rank, f.name.time, f.name.task, f.file),
    )
    texts = Texts(_texts(place))
    for name, problem in texts.wrong:
        building.lacks(Lack.DAMAGED, name, problem)
    origins: dict[tuple[int, int], Origins] = {}
    for run in runs:
        key = run.where.graph, run.where.rank
        if key not in origins:
            origins[key] = texts.origins(*key)
        _call(place, building, run, origins[key])
    return building.run()


def _call(place: Place, building: Building, run: _OperatorRun, origins: Origins) -> None:
    slots: dict[str, dict[str, int]] = {"input": {}, "output": {}}
    stated: tuple[str, ...] = ()
    name = run.name.op_name
    if run.converted:
        for slot, file in sorted(run.converted.items(), key=lambda s: int(s[0].partition(".")[2])):
            kind, k = split_slot(slot)
            slots[kind][k] = npy_tensors.add(building, place, file)
    else:
        try:
            dumped = ge_file.read(place.inside(run.file))
        except (UnreadableRun, OSError) as error:
            building.lacks(Lack.DAMAGED, run.file, f"{run.file}: {error}")
            return
        name = dumped.op_name or name
        stated = tuple(t.origin for t in dumped.tensors if t.origin)
        for tensor in dumped.tensors:
            kind, k = split_slot(tensor.slot)
            slots[kind][k] = _tensor(place, building, run, tensor)
        if dumped.unread:
            building.note(
                "not-read", f"{run.file}: {', '.join(dumped.unread)}", name, run.where.step
            )
    building.call(
        name,
        op_type=run.name.op_type,
        inputs=slots["input"],
        outputs=slots["output"],
        root=run.where.root,
        step=run.where.step,
        rank=run.where.rank,
        origins=origins.of(name, run.name.op_type, stated),
    )


def _tensor(
    place: Place, building: Building, run: _OperatorRun, tensor: ge_file.DumpedTensor
) -> int:
    path = place.inside(run.file)
    if tensor.layout.why:
        building.note(
            "layout",
            f"{run.file}: {tensor.slot}: {tensor.layout.why}",
            run.name.op_name,
            run.where.step,
        )
    kind, k = split_slot(tensor.slot)
    why = ge_file.missing(tensor, path)
    return building.tensor(
        tensor.type.dtype or tensor.type.name,
        tensor.shape,
        None if why else lambda: ge_file.elements(path, tensor),
        why=why,
        device="npu",
        file=f"{run.file},{kind}s,{k}",
    )


def _operator_runs(place: Place, building: Building) -> Iterator[_OperatorRun]:
    if not place.is_folder:
        file_name = named(place.path.name) or Name("", place.path.name, 0, 0)
        yield _OperatorRun(_Where(0, "model", -1, 0), file_name, place.path.name, {})
        return
    above = place.path.absolute().parts[-_ABOVE:]
    mapped: dict[str, dict[str, str]] = {}
    converted: dict[tuple[str, str], dict[str, str]] = {}
    name: Name | None
    for file in place.files:
        folder, _, last = file.rpartition("/")
        npy = _CONVERTED.match(last)
        if npy and named(npy[1]):
            converted.setdefault((folder, npy[1]), {})[f"{npy[2]}.{int(npy[3])}"] = file
            continue
        name = named(last)
        if name is None and _NUMBERED.match(last):
            if folder not in mapped:
                mapped[folder] = _mapping(place, folder, building)
            name = named(mapped[folder].get(last, ""))
            if name is None:
                building.note(
                    "error",
                    f"{file} is in no mapping.csv beside it, so its operator is unknown",
                )
                name = Name("", last, 0, int(last[:16]))
        if name is not None:
            yield _OperatorRun(_where((*above, *filter(None, folder.split("/")))), name, file, {})
    for (folder, base), files in converted.items():
        name = named(base)
        assert name is not None
        yield _OperatorRun(_where((*above, *filter(None, folder.split("/")))), name, "", files)


def _where(parts: tuple[str, ...]) -> _Where:
    """Parses the folders above a file. Where none states the rank, it is the device number."""
    rank = next((int(m[1]) for p in reversed(parts) if (m := _RANK.match(p))), -1)
    date_index = next((i for i in range(len(parts) - 1, -1, -1) if _FOLDER.match(parts[i])), -1)
    inner = parts[date_index + 1 :] if date_index >= 0 else ()
    graph = next((m for p in reversed(parts) if (m := _GRAPH.match(p))), None)
    if rank < 0:
        rank = int(inner[0]) if len(inner) > 1 and inner[0].isdecimal() and len(inner[0]) < 6 else 0
    step = (
        int(parts[-1])
        if parts
        and parts[-1].isdecimal()
        and len(parts[-1]) < 10
        and (date_index < 0 or len(inner) > 1)
        else 0
    )
    return _Where(
        rank, f"graph_{graph[1]}" if graph else "model", int(graph[1]) if graph else -1, step
    )


def _mapping(place: Place, folder: str, building: Building) -> dict[str, str]:
    """Returns number -> name for files whose names are too long and that CANN therefore numbers."""
    path = place.inside(f"{folder}/mapping.csv" if folder else "mapping.csv")
    if not path.is_file() or path.stat().st_size > _MAPPING_BYTES:
        return {}
    with path.open(newline="", encoding="utf-8", errors="backslashreplace") as file:
        try:
            return {row[0].strip(): row[1].strip() for row in csv.reader(file) if len(row) > 1}
        except csv.Error as error:
            building.lacks(Lack.DAMAGED, path.name, f"{path.name}: {error}")
            return {}


def _texts(place: Place) -> Iterator[Path]:
    """Returns the graph texts in the dump; where there are none, those in the folders above, to
    which torchair writes them.
    """
    graphs = [file for file in place.files if is_graph(file.rpartition("/")[2])]
    inside = [place.inside(file) for file in graphs]
    for file in graphs:
        place.leave(file)
    yield from inside
    if any(path.suffix != ".json" for path in inside):
        return
    start = place.path.absolute() if place.is_folder else place.path.absolute().parent
    for folder in start.parents[: _ABOVE - 1]:
        texts = sorted(folder.glob("dynamo_*_graph_*.txt"))
        if texts:
            yield from texts
            return
