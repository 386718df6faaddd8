"""FX dumps of torchair: npy files named after the nodes of the FX graph, which was run eagerly, in
the layouts of four ages.

    msit_fx_dump/worldsize1_global_rank0/graph_1/0/mm-aten.mm.default.INPUT.0.20251017071211190258.npy     steps from 0
    msit_fx_dump/data_dump/1/gm_20240125031118787351_dump/...                                              steps from 1
    data_dump/1/gm_20240125031118787351_dump/...                                                           steps from 1
    gm_20240125031118787351_dump/1/...                                                                     steps from 1

Steps of a run count from 0 here. The dump does not say in which order the nodes ran; what their
tensors hold does.
"""  # noqa: E501

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import npy_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.call_order import ordered
from whence.readers.assembly.named_tensors import natural
from whence.readers.encodings import numpy_file
from whence.readers.encodings.archive import File, ends
from whence.readers.source import Place
from whence.records import Run
from whence.records.marks import Mark, mark

LOOKS_LIKE = "a folder with npy files such as mm-aten.mm.default.INPUT.0.20251017071211190258.npy"
ORDER = 25

_FILE = re.compile(
    r"(?P<node>[^-]+)-(?P<target>.+)\.(?P<kind>INPUT|OUTPUT)\.(?P<place>\d{1,9}(?:\.\d{1,9})*)(?:\.(?P<time>\d{20}))?\.npy$"
)
_GM = re.compile(r"gm_(\d+)_dump$")
_GRAPH = re.compile(r"graph_(\d+)$")
_RANK = re.compile(r"worldsize\d+_global_rank(\d+)$")
_ABOVE = 4
_NUMBERS = frozenset({"int64", "float64", "bool"})  # what torch makes of numbers of Python


def sniff(place: Place) -> bool:
    """Whether some file name states node, operator and INPUT or OUTPUT."""
    return place.is_folder and any(
        _FILE.match(name.rpartition("/")[2]) for name in place.files if name.endswith(".npy")
    )


class _Where(NamedTuple):
    """The contents of folder names. graph: "graph_1" or the time of a gm folder, "" when no folder
    states it. step: as written. base: number of the first step.
    """

    rank: int
    graph: str
    step: int
    base: int


class _File(NamedTuple):
    where: _Where
    name: str
    node: str
    target: str
    kind: str
    place: tuple[int, ...]
    time: str


def open_run(place: Place) -> Run:
    """Reads names and headers of all files now, elements on request; a few kilobytes of each where
    the order has to be inferred.
    """
    building = Building(place.path, "fx")
    above = place.path.absolute().parts[-_ABOVE:]
    files: list[_File] = []
    for name in place.files:
        folder, _, last = name.rpartition("/")
        match = _FILE.match(last)
        if match is None:
            continue
        where = _where((*above, *filter(None, folder.split("/"))))
        digits = tuple(int(k) for k in match["place"].split("."))
        files.append(
            _File(
                where,
                name,
                match["node"],
                match["target"],
                match["kind"],
                digits,
                match["time"] or "",
            )
        )
    if not files:
        raise UnreadableRun("no file in it is named after a node of an FX graph")
    roots = _roots({f.where: set() for f in files}, files)
    steps = {f.where.step for f in files}
    nodes: dict[tuple[int, int, str], dict[str, list[_File]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for file in files:
        # A dump that has a step 0 counts from 0, whatever its age.
        step = file.where.step - (file.where.base if 0 not in steps else 0)
        nodes[max(step, 0), file.where.rank, roots[file.where]][file.node].append(file)
    orders: dict[frozenset[str], list[str]] = {}
    for (step, rank, root), found_nodes in sorted(nodes.items(), key=lambda item: item[0]):
        names = frozenset(found_nodes)
        if names not in orders:
            orders[names] = _order(place, found_nodes)
        for node in orders[names]:
            _call(place, building, found_nodes[node], step, rank, root)
    return building.run()


def _call(
    place: Place, building: Building, files: list[_File], step: int, rank: int, root: str
) -> None:
    slots: dict[str, dict[str, int]] = {"input": {}, "output": {}}
    arguments: dict[str, Any] = {}
    for file in sorted(files, key=lambda f: f.place):
        slot = ".".join(map(str, file.place))
        argument = _argument(place, file) if file.kind == "INPUT" else None
        if argument is not None:
            arguments[f"input.{slot}"] = argument
        if not isinstance(argument, str):
            slots[file.kind.lower()][slot] = npy_tensors.add(building, place, file.name)
    building.call(
        files[0].node,
        op_type=files[0].target,
        inputs=slots["input"],
        outputs=slots["output"],
        arguments=arguments,
        root=root,
        step=step,
        rank=rank,
        notes=(mark(Mark.STORED_WIDER),),  # bfloat16 is written as float32
    )


def _argument(place: Place, file: _File) -> Any:
    """Returns the value of an argument that is not a tensor; None for a tensor.

    A Python number is saved as an array without axes, exactly like a tensor without axes, and is
    compared like one. Other arrays are text.
    """
    path = place.inside(file.name)
    try:
        header = npy_tensors.header(path)
        if header.word is None:
            return (
                f"not a tensor: {header.dtype}"
                if header.dtype.lstrip("<>|=")[:1] in ("S", "U")
                else None
            )
        if header.shape or header.dtype not in _NUMBERS:
            return None
        return _array(place, file.name).item()
    except (UnreadableRun, ElementsMissing, OSError):
        return None


def _array(place: Place, name: str) -> Array:
    path = place.inside(name)
    file = File(path, name)
    return numpy_file.array(npy_tensors.header(path), file.part(0, file.size), name)


def _where(parts: tuple[str, ...]) -> _Where:
    rank = next((int(m[1]) for p in reversed(parts) if (m := _RANK.match(p))), 0)
    last, parent = (parts[-1] if parts else ""), (parts[-2] if len(parts) > 1 else "")
    if _GM.match(last):
        return _Where(rank, last, int(parent), 1) if _counts(parent) else _Where(rank, last, 0, 0)
    if _counts(last):
        if _GM.match(parent):
            return _Where(rank, parent, int(last), 1)
        if _GRAPH.match(parent):
            return _Where(rank, parent, int(last), 0)
        return _Where(rank, "", int(last), 1 if parent == "data_dump" else 0)
    return _Where(rank, last if _GRAPH.match(last) else "", 0, 0)


def _counts(part: str) -> bool:
    return part.isdecimal() and len(part) < 10


def _roots(nodes: dict[_Where, set[str]], files: Iterable[_File]) -> dict[_Where, str]:
    """Returns folder -> name of its graph. Older dumps name graphs by times, and one graph may have
    another time in every step: folders of different steps that hold the same nodes are one graph.
    """
    for file in files:
        nodes[file.where].add(file.node)
    out: dict[_Where, str] = {}
    graphs: list[tuple[int, frozenset[str], set[int], str]] = []
    for where in sorted(nodes):
        if not _GM.match(where.graph):
            out[where] = where.graph or "model"
            continue
        names = frozenset(nodes[where])
        graph = next(
            (
                k
                for k in graphs
                if k[0] == where.rank
                and (k[3] == where.graph or (k[1] == names and where.step not in k[2]))
            ),
            None,
        )
        if graph is None:
            graph = (where.rank, names, set(), where.graph)
            graphs.append(graph)
        graph[2].add(where.step)
        number = [k for k in graphs if k[0] == where.rank].index(graph) + 1
        out[where] = f"graph_{number}"
    return out


def _order(place: Place, nodes: dict[str, list[_File]]) -> list[str]:
    """Returns the nodes in execution order: by the times of the files; where these are equal, by
    the content of the tensors.
    """
    first = sorted(nodes, key=lambda node: (min(f.time for f in nodes[node]), natural(node)))
    times = [min(f.time for f in nodes[node]) for node in first]
    if len(set(times)) == len(times):
        return first
    contents: dict[str, dict[str, list[Hashable]]] = {
        "INPUT": defaultdict(list),
        "OUTPUT": defaultdict(list),
    }
    for node, files in nodes.items():
        for file in files:
            content = ends(partial(_array, place, file.name))
            if content is not None:
                contents[file.kind][node].append(content)
    return ordered(first, contents["INPUT"], contents["OUTPUT"])
