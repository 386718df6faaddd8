"""Reads the calls of an msprobe index: parses their names and finds which of their tensors are
parameters.

The tensors of a call are leaves of its arguments, with statistics, digests and files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import sidecar
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits, numpy_file, torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.json_file import leaves
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place
from whence.records import Call, Statistics
from whence.records import sidecar as whence_cards

_API = re.compile(r"(?P<kind>[^.]+)\.(?P<name>.+)\.(?P<n>\d+)\.(?P<phase>forward|backward)")
_MODULE = re.compile(
    r"(?:Module|Cell)\.(?P<path>.+)\.(?P<cls>[^.]+)\.(?P<phase>forward|backward|parameters_grad)(?:\.(?P<n>\d+))?"
)
_DEBUG = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<n>\d+)\.debug")
# Which arguments of an API are parameters, by place and by keyword.
_WEIGHTS: dict[str, dict[str, str]] = {
    "linear": {"1": "weight", "2": "bias"},
    "embedding": {"1": "weight"},
    "embedding_bag": {"1": "weight"},
    "layer_norm": {"2": "weight", "3": "bias"},
    "rms_norm": {"2": "weight"},
    "group_norm": {"2": "weight", "3": "bias"},
    "batch_norm": {"3": "weight", "4": "bias"},
    "instance_norm": {"3": "weight", "4": "bias"},
    "prelu": {"1": "weight"},
    "bilinear": {"2": "weight", "3": "bias"},
    "npu_rms_norm": {"1": "weight"},
    "npu_linear": {"1": "weight", "2": "bias"},
    **{f"conv{t}{d}d": {"1": "weight", "2": "bias"} for t in ("", "_transpose") for d in (1, 2, 3)},
}


class IndexFile(NamedTuple):
    """One index file: its folder (with a slash at the end, or ""), its name, its step
    and its rank.
    """

    folder: str
    name: str
    step: int
    rank: int


class CallReader:
    """Adds the calls of one index file to a run.

    construct: content of construct.json. sources: "file:line" by name of a call.
    """

    def __init__(
        self,
        building: Building,
        place: Place,
        file: IndexFile,
        construct: Mapping[str, Any],
        sources: Mapping[str, str],
    ) -> None:
        self.building, self.place, self.file = building, place, file
        self.construct, self.sources = construct, sources
        self._returned: set[tuple[Any, ...]] = set()  # figures of what calls returned so far
        self._has_noted_xor = False

    def add_call(self, name: str, tree: Mapping[str, Any], parent: int) -> int:
        """Adds one call by its name in dump.json. parent: handle of the module call that contains
        it, -1 when none is known.
        """
        entry = self.construct.get(name)
        micro = entry[1] if isinstance(entry, list) and len(entry) > 1 else 0
        fields: dict[str, Any] = {
            "step": self.file.step,
            "rank": self.file.rank,
            "parent": parent,
            "source": self.sources.get(name, ""),
            "micro": micro if isinstance(micro, int) else 0,
        }
        module = _MODULE.fullmatch(name)
        if module is not None and module["phase"] == "parameters_grad":
            return self.building.call(
                f"{module['path']}.parameters_grad",
                op_type="parameters_grad",
                phase="backward",
                outputs=self._tensors(tree),
                **fields,
            )
        if module is not None:
            fields |= {"kind": "module", "op_type": module["cls"], "phase": module["phase"]}
            return self.building.call(module["path"], **fields, **self._slots(tree, ""))
        api = _API.fullmatch(name)
        if api is None:
            self.building.note(
                "error",
                f"{self.file.folder}dump.json: the name {name[:200]!r} is not known; it is read "
                "as an operator",
            )
        kind, op, phase = (
            (api["kind"], api["name"], api["phase"]) if api is not None else ("", name, "forward")
        )
        op_type = op.strip("_") if op.startswith("__") else op
        scope = ".".join(part for part in (self._module_path(name), kind, op) if part)
        fields |= {"op_type": op_type, "phase": phase}
        return self.building.call(scope, **fields, **self._slots(tree, op_type))

    def add_from_cards(self, section: Any, data: Mapping[str, Any]) -> bool:
        """Adds the calls described by the cards that whence wrote into dump.json. Returns False,
        and adds nothing, when they are not the calls of `data`.
        """
        cards = section.get("calls") if isinstance(section, dict) else None
        if not isinstance(cards, dict) or set(cards) != set(data):
            return False
        described: list[tuple[Call, list[tuple[str, Mapping[str, Any]]]]] = []
        for name, tree in data.items():
            entry = cards[name] if isinstance(cards[name], dict) else {}
            call, slots = whence_cards.read(entry.get("card")), entry.get("slots")
            tensors = [leaf for _, leaf in _leaves(tree) if _is_tensor(leaf)]
            if (
                call is None
                or not isinstance(slots, list)
                or len(slots) != len(tensors)
                or not all(isinstance(s, str) for s in slots)
            ):
                return False
            call = msgspec.structs.replace(call, rank=self.file.rank, step=self.file.step)
            described.append((call, list(zip(slots, tensors))))
        tensors_of = {
            call.id: [(slot, self._tensor(leaf)) for slot, leaf in tensors]
            for call, tensors in described
        }
        sidecar.add(self.building, [call for call, _ in described], tensors_of)
        return True

    def add_point(self, name: str, tree: Any) -> None:
        """Adds a point that was saved with `save`; it has outputs only."""
        point = _DEBUG.fullmatch(name)
        self.building.call(
            point["name"] if point is not None else name,
            step=self.file.step,
            rank=self.file.rank,
            phase="backward" if point is not None and point["grad"] else "forward",
            kind="label",
            outputs=self._tensors(tree),
            arguments={
                slot or "0": _scalar(leaf)
                for slot, leaf in _leaves(tree)
                if leaf is not None and not _is_tensor(leaf)
            },
        )

    def _module_path(self, name: str) -> str:
        """Returns the path of the module that contains a call, according to construct.json."""
        visited: set[str] = set()
        while name not in visited:
            visited.add(name)
            parent = parent_name(self.construct, name)
            if parent is None:
                return ""
            module = _MODULE.fullmatch(parent)
            if module is not None:
                return module["path"]
            name = parent
        return ""

    def _slots(self, tree: Mapping[str, Any], op: str) -> dict[str, Any]:
        """Returns inputs, outputs, parameters, and non-tensor arguments of a call."""
        arguments = [
            *_leaves(tree.get("input_args", tree.get("input"))),
            *_leaves(tree.get("input_kwargs")),
        ]
        returned = [leaf for _, leaf in _leaves(tree.get("output")) if _is_tensor(leaf)]
        has_graph = any(leaf.get("requires_grad") for leaf in returned)
        inputs: dict[str, int] = {}
        params = self._tensors(tree.get("parameters", {}))
        scalars: dict[str, Any] = {}
        for slot, leaf in arguments:
            if _is_tensor(leaf):
                weight = self._weight(op, slot, leaf, has_graph) if "input_args" in tree else ""
                (params if weight else inputs)[weight or slot] = self._tensor(leaf)
            elif leaf is not None:
                scalars[f"input.{slot}"] = _scalar(leaf)
        outputs = self._tensors(tree.get("output"))
        self._returned.update(map(_figures_of, returned))
        return {"inputs": inputs, "outputs": outputs, "params": params, "arguments": scalars}

    def _weight(self, op: str, slot: str, leaf: Mapping[str, Any], has_graph: bool) -> str:
        """Returns the name of the parameter that an argument of an API is, "" when it is none.

        The signature decides. Otherwise a parameter is a tensor that requires a gradient although
        the result does not (no graph is built) or, in a graph, a vector that no call returned.
        """
        if not op:
            return ""
        names = _WEIGHTS.get(op, {})
        if slot in names or slot in names.values():
            return names.get(slot, slot)
        if leaf.get("requires_grad") is not True:
            return ""
        shape = leaf.get("shape")
        is_vector = isinstance(shape, list) and len(shape) == 1
        is_weight = not has_graph or (is_vector and _figures_of(leaf) not in self._returned)
        return slot if is_weight else ""

    def _tensors(self, tree: Any) -> dict[str, int]:
        """Returns the records of all tensors in a tree, by slot."""
        return {slot or "0": self._tensor(leaf) for slot, leaf in _leaves(tree) if _is_tensor(leaf)}

    def _tensor(self, leaf: Mapping[str, Any]) -> int:
        """Returns the record of one tensor: its elements if they were saved, statistics
        and digest.
        """
        dtype = str(leaf.get("dtype", "")).removeprefix("torch.").removeprefix("mindspore.")[:64]
        dtype = dtype.lower() if dtype[:1].isupper() else dtype  # mindspore's Float32
        try:
            shape = limits.extents(leaf.get("shape"), "a tensor")
        except UnreadableRun as error:
            return self.building.tensor(dtype, (), why=str(error))
        statistics, digest = _statistics_of(leaf, shape), _digest_of(leaf.get("md5"))
        if digest.startswith("xor:") and not self._has_noted_xor:
            self._has_noted_xor = True
            self.building.note(
                "error",
                f"{self.file.folder}dump.json has XORs of 64-bit words for digests: tensors with "
                "elements exchanged look equal",
            )
        name = leaf.get("data_name")
        path, load, why = "", None, ""
        if isinstance(name, str) and name not in ("", "-1"):
            path = f"{self.file.folder}dump_tensor_data/{name}"
            load = _loader(self.place, path)
        else:
            figures = (
                "statistics of it were"
                if statistics
                else "a digest of it was"
                if digest
                else "shape and dtype of it were"
            )
            why = f"only {figures} dumped"
        return self.building.tensor(
            dtype, shape, load, why=why, statistics=statistics, digest=digest, file=path
        )


def parent_name(construct: Mapping[str, Any], name: str) -> str | None:
    """Returns the name of the call that contains a call, according to construct.json; None without
    one.
    """
    entry = construct.get(name)
    parent = entry[0] if isinstance(entry, list) and entry else entry
    return parent if isinstance(parent, str) else None


def _loader(place: Place, file: str) -> Callable[[], Array]:
    """Returns a function that loads the tensor of a file in the dump; it raises ElementsMissing
    when called.
    """

    def load() -> Array:
        try:
            path = place.inside(file)
        except UnreadableRun as error:
            raise ElementsMissing(str(error)) from error
        if not path.is_file():
            raise ElementsMissing(f"{file} is not there")
        return _numpy(path) if path.suffix == ".npy" else _torch(path)

    return load


def _numpy(path: Path) -> Array:
    file = File(path, path.name)
    header = numpy_file.header(file.head(numpy_file.HEAD_BYTES), path.name)
    return numpy_file.array(header, file.part(0, file.size), path.name)


def _torch(path: Path) -> Array:
    tensors = list(torch_file.tensors(torch_file.load(path)))
    if len(tensors) != 1 or not isinstance(tensors[0][1], TorchTensor):
        raise ElementsMissing(f"{path.name} holds {len(tensors)} tensors that can be read, not one")
    return tensors[0][1].array()


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields (slot, leaf) of a tree of arguments, nested lists and dicts: "0.1" or "mask". A leaf
    is a dict with "type", or null.
    """
    nodes = leaves(tree, lambda node: isinstance(node, dict) and isinstance(node.get("type"), str))
    return ((slot, leaf) for slot, leaf in nodes if slot or leaf is not None)


def _is_tensor(leaf: Any) -> bool:
    """Whether a leaf describes a tensor."""
    return isinstance(leaf, dict) and "shape" in leaf and "dtype" in leaf


def _scalar(leaf: Any) -> Any:
    """Returns a scalar argument as a value."""
    return leaf["value"] if isinstance(leaf, dict) and "value" in leaf else leaf


def _figures_of(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the figures that two records of one tensor, or of views of it, share."""
    shape = leaf.get("shape")
    count = math.prod(n for n in shape if isinstance(n, int)) if isinstance(shape, list) else -1
    return (
        str(leaf.get("dtype")),
        count,
        str(leaf.get("Max")),
        str(leaf.get("Min")),
        str(leaf.get("md5")) if "Max" not in leaf else "",
    )


def _digest_of(value: Any) -> str:
    """Returns a digest prefixed with its kind, "" for none."""
    if not isinstance(value, str) or not value:
        return ""
    text = value[:64].lower()
    return (
        f"xor:{text}" if text.startswith("0x") else f"{'crc32' if len(text) == 8 else 'md5'}:{text}"
    )


def _statistics_of(leaf: Mapping[str, Any], shape: tuple[int, ...]) -> Statistics | None:
    """Returns the statistics that msprobe computed in the dtype of the tensor; std follows from
    norm and mean.

    NaN and infinities count as one, since the dump does not state their number. Where the mean
    makes up most of the norm, cancellation leaves only rounding errors of std, so std is omitted.
    """
    high, low, mean, norm = (_float(leaf.get(key)) for key in ("Max", "Min", "Mean", "Norm"))
    if high is None or low is None:
        return None
    count = limits.count(shape)
    nan, inf = any(map(math.isnan, (high, low))), any(map(math.isinf, (high, low)))
    if nan or inf:
        return Statistics(count, None, None, None, None, None, int(nan), int(inf), 0)
    mean, norm = (x if x is not None and math.isfinite(x) else None for x in (mean, norm))
    std = None
    if mean is not None and norm is not None and count:
        square = norm * norm / count - mean * mean  # by ** an overflow would raise
        std = math.sqrt(square) if math.inf > square > 0.1 * norm * norm / count else None
    return Statistics(count, low, high, mean, std, norm, 0, 0, 0)


def _float(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf
