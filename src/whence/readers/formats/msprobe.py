"""MindStudio-Probe (msprobe) dumps: dump.json with tensors, statistics or digests of every call;
debug.json with points that were saved.

`<dump>/[step<N>/][rank<R> | proc<PID>/]{dump.json, stack.json, construct.json, dump_tensor_data/}`.
A call of an API is named `Functional.linear.3.forward` with a counter over the whole step, one of a
module `Module.layers.0.mlp.MLP.forward.0`; construct.json says which module made it, stack.json
where. Layout as written by 26.2.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from whence.errors import UnreadableRun
from whence.readers.ascend.msprobe_calls import CallReader, IndexFile, parent_name
from whence.readers.assembly import call_order
from whence.readers.assembly.builder import Building
from whence.readers.encodings.json_file import object_of
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = "a folder with dump.json or debug.json, also below step*/ and rank*/ or proc*/"
ORDER = 20

_STEP, _RANK = re.compile(r"step(\d{1,9})"), re.compile(r"(rank|proc)(\d{0,9})")
_INDEX = ("dump.json", "debug.json")
_FRAME = re.compile(r"File (.+), line (\d+), in ")


def sniff(place: Place) -> bool:
    if not place.is_folder:
        return place.path.name in _INDEX and b'"data' in place.head
    return any(True for _ in _index_files(place))


def open_run(place: Place) -> Run:
    """Reads the index (names, shapes, statistics) now, elements on request."""
    building = Building(place.path, "msprobe")
    files = list(_index_files(place)) if place.is_folder else [IndexFile("", place.path.name, 0, 0)]
    for file in files:
        try:
            _add(building, place, file)
        except UnreadableRun as error:
            if len(files) == 1:
                raise
            building.lacks(
                Lack.DAMAGED, f"{file.folder}{file.name}", f"{error}; this part is left out"
            )
    return building.run()


def _index_files(place: Place) -> Iterator[IndexFile]:
    """Returns the index files in a folder: its own, else those of its ranks, of its steps and their
    ranks.
    """
    direct = _direct(place, "", 0, 0)
    if direct:
        yield from direct
        return
    steps = sorted(
        (int(match[1]), name)
        for name in place.names
        if (match := _STEP.fullmatch(name)) and (place.path / name).is_dir()
    )
    for step, name in steps:
        yield from _direct(place.within(name), f"{name}/", step, 0) or _of_ranks(
            place.within(name), f"{name}/", step
        )
    if not steps:
        yield from _of_ranks(place, "", 0)


def _of_ranks(place: Place, folder: str, step: int) -> Iterator[IndexFile]:
    names = [name for name in place.names if _RANK.fullmatch(name) and (place.path / name).is_dir()]
    # A process id does not state the rank; several processes are numbered in their order.
    numbers = sorted((int(_RANK.fullmatch(name)[2] or 0), name) for name in names)  # type: ignore[index]
    for i, (number, name) in enumerate(numbers):
        yield from _direct(
            place.within(name), f"{folder}{name}/", step, number if name.startswith("rank") else i
        )


def _direct(place: Place, folder: str, step: int, rank: int) -> list[IndexFile]:
    return [IndexFile(folder, name, step, rank) for name in _INDEX if name in place.names]


def _json(place: Place, name: str, *, needed: bool = True) -> dict[str, Any]:
    """Returns a JSON object of the dump (NaN and Infinity unquoted, as msprobe writes them). Raises
    UnreadableRun; returns {} when the file may be absent.
    """
    path = place.inside(name) if place.is_folder else place.path.parent / name
    if not needed:
        place.leave(name)
        if not path.is_file():
            return {}
    return object_of(path, name, "dump again, and call stop()")


def _add(building: Building, place: Place, file: IndexFile) -> None:
    """Adds all calls of one index file, in the order in which they began."""
    index = _json(place, f"{file.folder}{file.name}")
    data = index.get("data")
    if not isinstance(data, dict):
        raise UnreadableRun(f"{file.folder}{file.name} has no object 'data' of calls")
    if file.name == "debug.json":
        reader = CallReader(building, place, file, {}, {})
        for name, tree in data.items():
            reader.add_point(name, tree)
        return
    construct = _json_or_note(building, place, f"{file.folder}construct.json")
    names = [name for name, tree in data.items() if isinstance(tree, dict)] or list(construct)
    for name, tree in data.items():
        if not isinstance(tree, dict):
            where = f"{file.folder}dump.json"
            building.lacks(
                Lack.DAMAGED, where, f"{where}: {name[:200]} is not a call; it is left out"
            )
    positions = {name: i for i, name in enumerate(names)}
    parents = [_nearest_parent(construct, name, positions) for name in names]
    sources = _sources(_json_or_note(building, place, f"{file.folder}stack.json"))
    reader = CallReader(building, place, file, construct, sources)
    if reader.add_from_cards(index.get("whence"), data):
        return
    handles: dict[int, int] = {}
    for i in call_order.begun(parents):
        handles[i] = reader.add_call(names[i], data.get(names[i], {}), handles.get(parents[i], -1))


def _json_or_note(building: Building, place: Place, name: str) -> dict[str, Any]:
    try:
        return _json(place, name, needed=False)
    except UnreadableRun as error:
        building.lacks(Lack.DAMAGED, name, str(error))
        return {}


def _nearest_parent(construct: Mapping[str, Any], name: str, positions: Mapping[str, int]) -> int:
    """Returns the position of the nearest enclosing call that was dumped, -1 when there is none."""
    visited = {name}
    while True:
        parent = parent_name(construct, name)
        if parent is None or parent in visited:
            return -1
        if parent in positions:
            return positions[parent]
        visited.add(parent)
        name = parent


def _sources(stacks: Mapping[str, Any]) -> dict[str, str]:
    """Returns where each call was made: the innermost frame outside of installed packages, as
    "file:line".
    """
    out: dict[str, str] = {}
    for key, value in stacks.items():
        is_shared = (
            isinstance(value, list)
            and len(value) == 2
            and isinstance(value[0], list)
            and isinstance(value[1], list)
        )
        calls, frames = value if is_shared else ([key], value)
        if not isinstance(frames, list):
            continue
        matches = (_FRAME.match(frame) for frame in frames if isinstance(frame, str))
        lines = (
            f"{match[1]}:{match[2]}"
            for match in matches
            if match and "site-packages" not in match[1] and "dist-packages" not in match[1]
        )
        if (line := next(lines, None)) is not None:
            out.update((call, line) for call in calls if isinstance(call, str))
    return out
