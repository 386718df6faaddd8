"""ATB dumps (acltransformer of Ascend, `msit llm dump`): a folder for every operator, in it the
tensors before and after it ran.

    msit_dump_20250101_000000/tensors/npu0_1234/0/3_BloomLayer/0_LayerNormOperation/after/outtensor0.bin
                               process / token / operators, each with its place in the one around it
    msit_dump_.../layer|model/1234/*.json              which weights an operator reads, its settings (topology)

Older folders are called `ait_dump` and `atb_temp`, newer ones `atb_dump_data/data`. One tensor file
by itself is read too.
"""  # noqa: E501

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.ascend import atb_file, atb_topology
from whence.readers.ascend.process_folders import PROCESS, ranks
from whence.readers.assembly.builder import Building
from whence.readers.encodings.archive import bytes_of, ends
from whence.readers.source import Place
from whence.records import Run

LOOKS_LIKE = (
    "a folder with tensor files of ATB such as 0_LinearOperation/after/outtensor0.bin, "
    "or one of them"
)
ORDER = 30

_FILE = re.compile(r"(in|out)tensor(\d{1,9})(?:_.*)?\.bin$", re.IGNORECASE)
_OPERATION = re.compile(r"(\d{1,9})_([A-Za-z]\w*)$")
_LINK = re.compile(r"((?:\d{1,9}_)+)(in|out)tensor(\d{1,9})(?:_.*)?\.bin$", re.IGNORECASE)
_WEIGHT_NAME = re.compile(r"_(weight_\d+)$")
_TOPOLOGY = re.compile(r"(?:^|/)(?:model|layer)/(?:[^/]+/)?[^/]+\.json$")
_LINKS = 16  # from file to file
# Inputs that are weights, where no topology says so and they are the same in all tokens.
_WEIGHTS = {
    "LinearOperation": {1: "weight", 2: "bias"},
    "LinearParallelOperation": {1: "weight", 2: "bias"},
    "RmsNormOperation": {1: "weight"},
    "LayerNormOperation": {1: "weight", 2: "bias"},
    "GatherOperation": {0: "weight"},
}
_TRIED = 8


def sniff(place: Place) -> bool:
    """Whether there are tensor files in `before` or `after`, or one whose first lines are those of
    ATB.
    """
    if not place.is_folder:
        return place.suffix == ".bin" and atb_file.recognised(place.head)
    tried = 0
    for name in place.files:
        if not _FILE.match(name.rpartition("/")[2]):
            continue
        if _is_tensor(place.inside(name)):
            return True
        tried += 1
        if tried >= _TRIED:
            return False
    return False


def _is_tensor(path: Path) -> bool:
    with path.open("rb") as file:
        return atb_file.recognised(file.read(4096))


class _Where(NamedTuple):
    """One execution of an operator. path: (position, type) of it and of the operators that contain
    it; type "" and position 0 for folders of other names.
    """

    process: str
    token: str
    path: tuple[tuple[int, str], ...]


class _Tensor(NamedTuple):
    kind: str
    number: int
    when: str
    file: str


def open_run(place: Place) -> Run:
    """Reads the headers of all files now, elements on request."""
    building = Building(place.path, "atb")
    if not place.is_folder:
        number = _Files(place, building).record(place.path.name)
        building.call(place.path.stem, outputs=[number])
        return building.run()
    operators: dict[_Where, list[_Tensor]] = defaultdict(list)
    for name in place.files:
        *folders, last = name.split("/")
        match = _FILE.match(last)
        if match:
            when = folders[-1] if folders and folders[-1] in ("before", "after") else ""
            where = _where(tuple(folders[:-1] if when else folders))
            operators[where].append(_Tensor(match[1].lower(), int(match[2]), when, name))
        elif last.endswith(".bin") and _is_tensor(place.inside(name)):
            operators[
                _Where("", "0", ((-1, re.sub(r"\W", "_", name.removesuffix(".bin"))),))
            ].append(_Tensor("out", 0, "", name))
    models = _models(place)
    steps = _steps(operators, models, building)
    for where in operators.keys() - steps.keys():
        for tensor in operators[where]:
            place.leave(tensor.file)
    rank_of = ranks(where.process for where in operators)
    files = _Files(place, building, operators)
    for step, process in sorted({(steps[w], w.process) for w in operators if w in steps}):
        runs = [w for w in operators if w.process == process and steps.get(w) == step]
        _step(building, files, operators, runs, step, rank_of[process], models)
    return building.run()


def _step(
    building: Building,
    files: _Files,
    operators: dict[_Where, list[_Tensor]],
    runs: list[_Where],
    step: int,
    rank: int,
    models: list[atb_topology.Model],
) -> None:
    """Adds the operators of one token, each after the one that contains it."""
    handles: dict[tuple[tuple[int, str], ...], int] = {}
    for where in sorted(runs, key=lambda w: w.path):
        for depth in range(1, len(where.path)):
            if where.path[:depth] not in handles:
                handles[where.path[:depth]] = _call(
                    building, where.path[:depth], handles, step, rank, models
                )
        path = where.path
        if path not in handles:
            handles[path] = _call(building, path, handles, step, rank, models)
        node = _node(models, path)
        inputs: dict[str, int] = {}
        params: dict[str, int] = {}
        outputs: dict[str, int] = {}
        mutated: dict[str, int] = {}
        tensors = sorted(operators[where], key=lambda t: (t.kind, t.number, t.when != "before"))
        for tensor in tensors:
            weight = files.weight(where, tensor, node) if tensor.kind == "in" else ""
            slot, record = str(tensor.number), files.record(tensor.file)
            if tensor.kind == "out":
                # an output has no contents before the operator runs
                if slot not in outputs or tensor.when != "before":
                    outputs[slot] = record
            elif weight:
                params.setdefault(weight, record)
            elif slot not in inputs:
                inputs[slot] = record
            elif files.differ(inputs[slot], record):
                mutated[slot] = record
        building.fill(handles[path], inputs=inputs, outputs=outputs, params=params, mutated=mutated)


def _call(
    building: Building,
    path: tuple[tuple[int, str], ...],
    handles: dict[tuple[tuple[int, str], ...], int],
    step: int,
    rank: int,
    models: list[atb_topology.Model],
) -> int:
    node = _node(models, path)
    scope = ".".join(f"{kind}.{index}" if index >= 0 else kind for index, kind in path)
    return building.call(
        scope,
        op_type=path[-1][1] if path and path[-1][0] >= 0 else "",
        step=step,
        rank=rank,
        parent=handles.get(path[:-1], -1),
        arguments=node.param if node is not None else {},
        source=node.name if node is not None else "",
    )


def _node(
    models: list[atb_topology.Model], path: tuple[tuple[int, str], ...]
) -> atb_topology.Operation | None:
    return next((node for model in models if (node := model.at(path)) is not None), None)


def _where(folders: tuple[str, ...]) -> _Where:
    """Parses the folders above a tensor: the first that is not an operator is the token, and above
    it is the process.
    """
    end = len(folders)
    while end > 0 and _OPERATION.match(folders[end - 1]):
        end -= 1
    path = tuple((int(m[1]), m[2]) for f in folders[end:] if (m := _OPERATION.match(f)))
    if not path and folders:  # a folder of another name, as people make them by hand
        return _Where("", "0", ((-1, re.sub(r"\W", "_", folders[-1])),))
    token = (
        folders[end - 1]
        if end and (folders[end - 1].isdecimal() or folders[end - 1] == "start")
        else ""
    )
    process = (
        folders[end - 2] if token and end > 1 else folders[end - 1] if end and not token else ""
    )
    return _Where(process if PROCESS.match(process) else "", token[:9] or "0", path)


def _models(place: Place) -> list[atb_topology.Model]:
    """Returns topologies, in execution order."""
    paths = [place.inside(name) for name in place.files if _TOPOLOGY.search(f"/{name}")]
    models = [model for path in paths if (model := atb_topology.read(path)) is not None]
    return sorted(models, key=lambda m: (m.first, -len(m.nodes)))


def _steps(
    operators: dict[_Where, list[_Tensor]], models: list[atb_topology.Model], building: Building
) -> dict[_Where, int]:
    """Returns the step of every operator execution, from 0.

    Prefill and decoding build two graphs, and each counts its own runs: with two models, folder 0
    is the warm-up, the next ("start") holds tokens 0 and 1, and each further one holds one token.
    """
    tokens = {int(w.token) for w in operators if w.token.isdecimal()}
    named = any(w.token == "start" for w in operators)
    whole = [m for m in models if len(m.nodes) > 1 or len(models) == 2]
    heads = [(m.first, m.first + len(m.nodes)) for m in whole]
    are_separate = len(set(heads)) == 2 and len(heads) == 2 and (heads[0][1] <= heads[1][0])
    if not named and not (are_separate and _has_both(operators, heads)):
        return {w: int(w.token) if w.token.isdecimal() else 0 for w in operators}
    later = sorted(t for t in tokens if t > 0 or named)
    start = -1 if named else later[0] if later else 0
    out: dict[_Where, int] = {}
    for where in operators:
        if where.token == "start" or (not named and int(where.token) == start):
            second = are_separate and heads[1][0] <= where.path[0][0] < heads[1][1]
            out[where] = 1 if second else 0
        elif not named and int(where.token) < start:
            continue
        else:
            out[where] = (
                2 + later.index(int(where.token)) if named else int(where.token) - start + 1
            )
    if len(out) < len(operators):
        building.note(
            "budget", f"folder 0 of {building.path} is the warm-up of two graphs and is left out"
        )
    return out


def _has_both(operators: dict[_Where, list[_Tensor]], heads: list[tuple[int, int]]) -> bool:
    """Whether one folder holds operators of both graphs."""
    graphs: dict[str, set[int]] = defaultdict(set)
    for where in operators:
        for number, (low, high) in enumerate(heads):
            if where.path and low <= where.path[0][0] < high:
                graphs[where.token].add(number)
    return any(len(numbers) == 2 for numbers in graphs.values())


def _id(path: tuple[tuple[int, str], ...]) -> str:
    """Returns an operator's number, "3_1" for operator 1 inside operator 3."""
    return "_".join(str(index) for index, _ in path)


class _Files:
    """The tensor files of a dump as records; a file that refers to another has the same record."""

    def __init__(
        self, place: Place, building: Building, operators: dict[_Where, list[_Tensor]] | None = None
    ) -> None:
        self.place, self.building = place, building
        self._records: dict[str, int] = {}
        self._stored: dict[int, tuple[Path, atb_file.Stored]] = {}
        self._by_id: dict[tuple[str, str, str, str, int], str] = {}
        for where, tensors in (operators or {}).items():
            for t in sorted(tensors, key=lambda t: t.when == "after"):
                self._by_id[where.process, where.token, _id(where.path), t.kind, t.number] = t.file
        self._tokens = sorted({where.token for where in operators or {}})
        self._outputs: dict[tuple[str, str], set[Hashable]] = {}
        self._looks: dict[str, Hashable | None] = {}
        self._owner = {
            t.file: where for where, tensors in (operators or {}).items() for t in tensors
        }

    def record(self, name: str, depth: int = 0) -> int:
        """Returns the record of a file's tensor."""
        if name in self._records:
            return self._records[name]
        path = self.place.inside(name)
        try:
            stored = atb_file.read(path)
        except (UnreadableRun, OSError) as error:
            self._records[name] = self.building.tensor("float32", (), why=str(error), file=name)
            self.building.note("error", f"{name}: {error}")
            return self._records[name]
        if stored.records > 1:
            self.building.note(
                "twice",
                f"{name} holds {stored.records} records, one for every run into the same folder; "
                "the last is read",
            )
        if stored.layout.why:
            self.building.note("layout", f"{name}: {stored.layout.why}")
        target = self._linked(name, stored.data)
        why = stored.why
        if stored.data and (not target or target == name or depth >= _LINKS):
            why = f"it is said to be in {stored.data[:80]!r}, which is not in the dump"
        elif stored.data:
            self._records[name] = self.record(target, depth + 1)
            return self._records[name]
        number = self.building.tensor(
            stored.type.dtype or stored.type.name,
            stored.shape,
            None if why else lambda: atb_file.elements(path, stored),
            why=why,
            statistics=stored.statistics,
            device="npu",
            file=name,
        )
        self._records[name] = number
        self._stored[number] = path, stored
        return number

    def _linked(self, name: str, data: str) -> str:
        """Returns the file that a reference points to, "" when it does not exist."""
        match = _LINK.match(data)
        where = self._owner.get(name)
        if not match or where is None:
            return ""
        return self._by_id.get(
            (where.process, where.token, match[1].rstrip("_"), match[2].lower(), int(match[3])), ""
        )

    def weight(self, where: _Where, tensor: _Tensor, node: atb_topology.Operation | None) -> str:
        """Returns the name of the weight that an input is; "" for an input that is none."""
        usual = _WEIGHTS.get(where.path[-1][1], {}).get(tensor.number, "")
        if node is not None and tensor.number < len(node.inputs):
            match = _WEIGHT_NAME.search(node.inputs[tensor.number])
            return (usual or match[1]) if match else ""
        if not usual or self._look(tensor.file) in self._made(where):
            return ""
        contents = {
            self._look(file)
            for token in self._tokens
            if (
                file := self._by_id.get(
                    (where.process, token, _id(where.path), "in", tensor.number)
                )
            )
            is not None
        }
        return usual if len(contents) == 1 and None not in contents else ""

    def _made(self, where: _Where) -> set[Hashable]:
        """Returns content keys of the outputs of all operators of a token."""
        key = where.process, where.token
        if key not in self._outputs:
            files = [
                f
                for (p, t, _, kind, _), f in self._by_id.items()
                if (p, t) == key and kind == "out"
            ]
            self._outputs[key] = {self._look(f) for f in files}
        return self._outputs[key]

    def _look(self, name: str) -> Hashable | None:
        """Returns a key that is equal for files with equal tensors; None where there are no
        elements.
        """
        if name not in self._looks:
            entry = self._stored.get(self.record(name))
            self._looks[name] = None
            if entry is not None and not entry[1].why:
                path, stored = entry
                content = ends(partial(bytes_of, path, stored.start, stored.nbytes))
                self._looks[name] = (stored.type.name, stored.dims, content)
        return self._looks[name]

    def differ(self, first: int, second: int) -> bool:
        """Whether a tensor has other elements after the operator ran than before it."""
        if first == second or first not in self._stored or second not in self._stored:
            return False
        try:
            old, new = (atb_file.elements(*self._stored[k]) for k in (first, second))
        except ElementsMissing:
            return False
        return old.shape != new.shape or old.tobytes() != new.tobytes()
