"""Dumps of PyTorch modules by `msit llm dump` (formerly ait): a folder for every module, in it its
inputs and outputs as .pth files.

    msit_dump_20250101_000000/torch_tensors/npu0_1234/model_tree.json
    .../npu0_1234/0/root.model.layers.0.mlp/input_0.pth, output.pth        token / module [. function [. how often]]
    .../npu0_1234/weights/root.lm_head.weight.pth
    .../npu0_1234/statistics.csv

Older ones lie in `{cuda0|cpu}_{process}/{token}` alone, and may hold the logits only. Files are
read without torch, and not unpickled.
"""  # noqa: E501

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from whence import dtypes
from whence.errors import UnreadableRun
from whence.readers.ascend.process_folders import PROCESS, ranks
from whence.readers.assembly.builder import Building
from whence.readers.assembly.call_order import ordered
from whence.readers.assembly.named_tensors import natural
from whence.readers.encodings import limits, torch_file
from whence.readers.encodings.archive import ends
from whence.readers.encodings.json_file import tree_of
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place
from whence.records import Lack, Run, Statistics
from whence.records.slots import is_input, split_slot

LOOKS_LIKE = "a folder with tensors of modules such as 0/root.model.layers.0/output.pth"
ORDER = 30

_FILE = re.compile(r"(?:^|/)(root(?:\.[^/]+)?)/(input|output)((?:_\d{1,6})*)\.pth$")
_WEIGHT = re.compile(r"(?:^|/)weights/(root\.[^/]+)\.pth$")
_HEADER = [
    "NodeName", "NodeType", "InputOutput", "Index", "DataType", "Shape", "Max", "Min", "Mean",
    "L2Norm",
]  # fmt: skip
_TREE_DEPTH = 200


def sniff(place: Place) -> bool:
    """Whether there is a tensor of a module called root..., or the statistics of such modules."""
    if not place.is_folder:
        return False
    for name in place.files:
        if name.endswith(".pth") and (_FILE.search(name) or _WEIGHT.search(name)):
            return True
        if name.rpartition("/")[2] == "statistics.csv":
            with place.inside(name).open("rb") as file:
                if file.readline(4096).decode("utf-8", "replace").strip().split(",") == _HEADER:
                    return True
    return False


class _Tensor(NamedTuple):
    """A tensor of a module. slot: "input.0". file: that holds it; or the contents of a row of
    statistics: (dtype, shape, figures).
    """

    slot: str
    file: str
    row: tuple[str, tuple[int, ...], Statistics | None] | None = None


_Moment = tuple[str, int]  # process, token
_Held = dict[_Moment, dict[str, list[_Tensor]]]


def open_run(place: Place) -> Run:
    """Reads the structure of each file now, elements on request."""
    building = Building(place.path, "msit_torch")
    tensors: _Held = defaultdict(lambda: defaultdict(list))
    weights: dict[str, dict[str, str]] = defaultdict(dict)
    trees: dict[str, dict[str, str]] = {}
    for name in place.files:
        folders = (place.path.absolute().name, *name.split("/"))
        match, weight = _FILE.search(name), _WEIGHT.search(name)
        if weight:
            weights[_process(folders[:-2])][weight[1]] = name
        elif match:
            # "output" of a module that returns one tensor is its place 0
            slot = f"{match[2]}.{match[3][1:].replace('_', '.') or '0'}"
            tensors[_moment(folders[:-2])][match[1]].append(_Tensor(slot, name))
        elif folders[-1] == "model_tree.json":
            trees[_process(folders[:-1])] = _tree(place.inside(name), building)
        elif folders[-1] == "statistics.csv":
            _statistics(place, name, folders, tensors, building)
    for process in weights:
        if not any(p == process for p, _ in tensors):
            tensors[process, 0] = defaultdict(list)
    rank_of = ranks([process for process, _ in tensors])
    orders: dict[tuple[str, frozenset[str]], list[str]] = {}
    for (process, token), modules in sorted(
        tensors.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        tree = trees.get(process, {})
        step = _Step(
            place, building, modules, tree, weights.get(process, {}), token, rank_of[process]
        )
        key = process, frozenset(step.names)
        if key not in orders:
            orders[key] = step.order()
        step.add(orders[key])
    return building.run()


class _Step:
    """The modules of one token of one process."""

    def __init__(
        self,
        place: Place,
        building: Building,
        modules: Mapping[str, list[_Tensor]],
        tree: Mapping[str, str],
        weights: Mapping[str, str],
        token: int,
        rank: int,
    ) -> None:
        self.place, self.building, self.modules, self.tree = place, building, modules, tree
        self.token, self.rank = token, rank
        self.params: dict[str, dict[str, str]] = defaultdict(dict)
        for name, file in weights.items():
            module, _, last = name.rpartition(".")
            self.params[module][last] = file
        self.names = {*modules, *self.params} if token == 0 or not modules else {*modules}
        self._order = {name: k for k, name in enumerate(tree)}
        self._weights: dict[str, int] = {}

    def order(self) -> list[str]:
        """Returns all names, each before its parts; siblings in the order of the tree, and after
        the producers of their inputs.
        """
        parts: dict[str, list[str]] = defaultdict(list)
        for name in sorted(
            self.names, key=lambda n: (self._order.get(n, len(self._order)), natural(n))
        ):
            parts[self._above(name)].append(name)
        out: list[str] = []
        todo = list(reversed(self._siblings(parts[""])))
        while todo:
            name = todo.pop()
            out.append(name)
            todo += reversed(self._siblings(parts.get(name, [])))
        return out

    def _above(self, name: str) -> str:
        """Returns the nearest enclosing module in the dump, "" when there is none."""
        above = name.rpartition(".")[0]
        while above and above not in self.names:
            above = above.rpartition(".")[0]
        return above

    def _siblings(self, names: list[str]) -> list[str]:
        if len(names) < 2:
            return names
        reads: dict[str, list[Hashable]] = defaultdict(list)
        makes: dict[str, list[Hashable]] = defaultdict(list)
        for name in names:
            for tensor in self.modules.get(name, ()):
                content = _look(self.place, tensor)
                if content is not None:
                    (reads if is_input(tensor.slot) else makes)[name].append(content)
        return ordered(names, reads, makes)

    def add(self, order: Iterable[str]) -> None:
        handles: dict[str, int] = {}
        for name in order:
            module, function = self._parts(name)
            slots: dict[str, dict[str, int]] = {"input": {}, "output": {}}
            for tensor in sorted(self.modules.get(name, ()), key=lambda t: natural(t.slot)):
                for slot, record in self._records(tensor):
                    kind, place = split_slot(slot)
                    slots[kind][place] = record
            params = {last: self._weight(file) for last, file in self.params.get(name, {}).items()}
            scope = module.removeprefix("root").removeprefix(".")
            handles[name] = self.building.call(
                scope,
                op=function,
                op_type=function or self.tree.get(module, ""),
                inputs=slots["input"],
                outputs=slots["output"],
                params=params,
                kind="operator" if function else "module",
                step=self.token,
                rank=self.rank,
                parent=handles.get(self._above(name), -1),
            )

    def _parts(self, name: str) -> tuple[str, str]:
        """Returns (module, function called in it): the longest module of the tree that the name
        begins with.
        """
        if not self.tree or name in self.tree:
            return name, ""
        module = name.rpartition(".")[0]
        while module and module not in self.tree:
            module = module.rpartition(".")[0]
        if not module:
            return name, ""
        function = name[len(module) + 1 :]
        head, _, last = function.rpartition(".")
        return module, head if head and last.isdecimal() else function

    def _records(self, tensor: _Tensor) -> list[tuple[str, int]]:
        if tensor.row is not None:
            dtype, shape, figures = tensor.row
            why = "the dump holds its statistics only"
            return [
                (
                    tensor.slot,
                    self.building.tensor(
                        dtype, shape, why=why, statistics=figures, file=tensor.file
                    ),
                )
            ]
        return [
            (tensor.slot + inner, record)
            for inner, record in _tensors(self.place, self.building, tensor.file)
        ]

    def _weight(self, file: str) -> int:
        """Returns the record of a weight, one for all steps."""
        if file not in self._weights:
            self._weights[file] = _tensors(self.place, self.building, file)[0][1]
        return self._weights[file]


def _tensors(place: Place, building: Building, name: str) -> list[tuple[str, int]]:
    """Returns the tensors of a file with the suffix of their slots: "" for the only one."""
    path = place.inside(name)
    try:
        parts = [
            (inner, part) for inner, part in torch_file.tensors(torch_file.load(path, path.name))
        ]
    except (UnreadableRun, OSError) as error:
        return [("", building.tensor("float32", (), why=str(error), file=name))]
    out: list[tuple[str, int]] = []
    for inner, part in parts:
        slot = f".{inner}" if inner and len(parts) > 1 else ""
        if isinstance(part, TorchTensor):
            out.append((slot, building.tensor(part.dtype, part.shape, part.array, file=name)))
        else:
            out.append(
                (
                    slot,
                    building.tensor(
                        "float32",
                        (),
                        why=f"{path.name} holds a {part.name}, not a tensor that is read",
                        file=name,
                    ),
                )
            )
    return out or [
        ("", building.tensor("float32", (), why=f"{path.name} holds no tensor", file=name))
    ]


def _process(folders: tuple[str, ...]) -> str:
    return next((f for f in reversed(folders) if PROCESS.match(f)), "")


def _moment(folders: tuple[str, ...]) -> _Moment:
    last = folders[-1] if folders else ""
    return _process(folders), int(last) if last.isdecimal() and len(last) < 10 else 0


def _tree(path: Path, building: Building) -> dict[str, str]:
    """Returns modules with their classes, in the order of construction, which is mostly the order
    of execution.
    """
    remedy = "classes and the order of modules are not known from it"
    try:
        top = tree_of(path, path.name, remedy)
    except UnreadableRun as error:
        building.lacks(Lack.DAMAGED, path.name, str(error))
        return {}
    out: dict[str, str] = {}
    todo = [(top, 0)]
    while todo:
        node, depth = todo.pop()
        if not isinstance(node, dict) or depth > _TREE_DEPTH:
            continue
        out.setdefault(str(node.get("name", "")), str(node.get("type", "")))
        below = node.get("children")
        todo += [(kid, depth + 1) for kid in reversed(below)] if isinstance(below, list) else []
    return out


def _statistics(
    place: Place, name: str, folders: tuple[str, ...], tensors: _Held, building: Building
) -> None:
    """Returns rows of statistics; a tensor that occurs again belongs to the next token."""
    process, first = _moment(folders[:-1])
    repeats: dict[tuple[str, str], int] = defaultdict(int)
    with place.inside(name).open(newline="", encoding="utf-8", errors="backslashreplace") as file:
        rows = csv.reader(file)
        if next(rows, None) != _HEADER:
            building.lacks(
                Lack.DAMAGED, name, f"{name} is not read: its columns are not those of msit"
            )
            return
        for number, row in enumerate(rows, 2):
            try:
                node, _, kind, index, dtype, shape, *figures = row
                if kind.lower() not in ("input", "output") or not node.startswith("root"):
                    raise ValueError(f"{kind} of {node}")
                slot = f"{kind.lower()}.{index.replace('_', '.') or '0'}"
                extents = limits.extents(
                    [int(n) for n in re.findall(r"\d{1,18}", shape)], f"row {number}"
                )
                high, low, mean, norm = (float(f) for f in figures)
            except (ValueError, UnreadableRun) as error:
                building.lacks(Lack.DAMAGED, name, f"{name}: row {number} is not read: {error}")
                continue
            plain = dtype.removeprefix("torch.")
            step = first + repeats[node, slot]
            repeats[node, slot] += 1
            if any(t.slot == slot for t in tensors[process, step][node]):
                continue  # the tensor itself is there
            described = (
                plain if plain in dtypes.DTYPES else "float32",
                extents,
                Statistics(limits.count(extents), low, high, mean, None, norm, 0, 0, 0),
            )
            tensors[process, step][node].append(_Tensor(slot, name, described))


def _look(place: Place, tensor: _Tensor) -> Hashable | None:
    """Returns a key that is equal for tensors with equal content."""
    if tensor.row is not None:
        figures = tensor.row[2]
        return (tensor.row[:2], figures and (figures.min, figures.max, figures.mean, figures.norm))

    def load() -> Any:
        return torch_file.load(place.inside(tensor.file), tensor.file).array()

    return ends(load)
