"""MindStudio-Probe (msprobe) dumps: dump.json with tensors, statistics or digests of every call;
debug.json with points that were saved.

`<dump>/[step<N>/][rank<R> | proc<PID>/]{dump.json, stack.json, construct.json, dump_tensor_data/}`.
A call of an API is named `Functional.linear.3.forward` with a counter over the whole step, one of a
module `Module.layers.0.mlp.MLP.forward.0`; construct.json says which module made it, stack.json
where. Layout as written by 26.2.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import call_order, sidecar
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits, torch_file
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place
from whence.records import Call, Run, Statistics
from whence.records import sidecar as whence_cards

LOOKS_LIKE = "a folder with dump.json or debug.json, also below step*/ and rank*/ or proc*/"
ORDER = 20

_STEP, _RANK = re.compile(r"step(\d{1,9})"), re.compile(r"(rank|proc)(\d{0,9})")
_INDEX = ("dump.json", "debug.json")
_API = re.compile(r"(?P<kind>[^.]+)\.(?P<name>.+)\.(?P<n>\d+)\.(?P<phase>forward|backward)")
_MODULE = re.compile(
    r"(?:Module|Cell)\.(?P<path>.+)\.(?P<cls>[^.]+)\.(?P<phase>forward|backward|parameters_grad)(?:\.(?P<n>\d+))?"
)
_DEBUG = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<n>\d+)\.debug")
_FRAME = re.compile(r"File (.+), line (\d+), in ")
_DEPTH = 64  # of lists and dicts in one argument
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


def sniff(place: Place) -> bool:
    if not place.is_folder:
        return place.path.name in _INDEX and b'"data' in place.head
    return any(True for _ in _folders(place))


def open_run(place: Place) -> Run:
    """The index now (names, shapes, statistics), elements when asked."""
    building = Building(place.path, "msprobe")
    found = [_Dump("", place.path.name, 0, 0)] if not place.is_folder else list(_folders(place))
    for dump in found:
        try:
            _add(building, place, dump)
        except UnreadableRun as error:
            if len(found) == 1:
                raise
            building.note("error", f"{error}; this part is left out")
    return building.run()


class _Dump(NamedTuple):
    """One index file: the folder it lies in (with a slash at the end, or ""), its name, and whose
    it is.
    """

    folder: str
    file: str
    step: int
    rank: int


def _folders(place: Place) -> Iterator[_Dump]:
    """The dumps in a folder: its own, of its ranks, of its steps and their ranks."""
    here = _indexes(place, "", 0, 0)
    if here:
        yield from here
        return
    steps = sorted(
        (int(found[1]), name)
        for name in place.names
        if (found := _STEP.fullmatch(name)) and (place.path / name).is_dir()
    )
    for step, name in steps:
        yield from _indexes(place.within(name), f"{name}/", step, 0) or _ranks(
            place.within(name), f"{name}/", step
        )
    if not steps:
        yield from _ranks(place, "", 0)


def _ranks(place: Place, folder: str, step: int) -> Iterator[_Dump]:
    names = [name for name in place.names if _RANK.fullmatch(name) and (place.path / name).is_dir()]
    # A process id says nothing about which rank it was; several are taken in their order.
    numbers = sorted((int(_RANK.fullmatch(name)[2] or 0), name) for name in names)  # type: ignore[index]
    for i, (number, name) in enumerate(numbers):
        yield from _indexes(
            place.within(name), f"{folder}{name}/", step, number if name.startswith("rank") else i
        )


def _indexes(place: Place, folder: str, step: int, rank: int) -> list[_Dump]:
    return [_Dump(folder, name, step, rank) for name in _INDEX if name in place.names]


def _json(place: Place, name: str, *, needed: bool = True) -> dict[str, Any]:
    """A JSON object out of the dump (NaN and Infinity as they are written there). Raises
    UnreadableRun; {} when it may be absent.
    """
    path = place.inside(name) if place.is_folder else place.path.parent / name
    if not needed and not path.is_file():
        return {}
    try:
        if path.stat().st_size > limits.JSON_BYTES:
            raise UnreadableRun(
                f"{name} has {path.stat().st_size} bytes, more than {limits.JSON_BYTES}; dump "
                "fewer steps or calls"
            )
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UnreadableRun(f"cannot read {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableRun(
            f"{name} is damaged or was not written to its end ({str(error)[:120]}); dump again, "
            "and call stop()"
        ) from error
    if not isinstance(data, dict):
        raise UnreadableRun(f"{name} holds a {type(data).__name__}, not an object of calls")
    return data


def _add(building: Building, place: Place, dump: _Dump) -> None:
    """All calls of one index file, in the order in which they began."""
    index = _json(place, f"{dump.folder}{dump.file}")
    data = index.get("data")
    if not isinstance(data, dict):
        raise UnreadableRun(f"{dump.folder}{dump.file} has no object 'data' of calls")
    if dump.file == "debug.json":
        reading = _Reading(building, place, dump, {}, {})
        for name, tree in data.items():
            reading.point(name, tree)
        return
    made = _json_or_note(building, place, f"{dump.folder}construct.json")
    names = [name for name, tree in data.items() if isinstance(tree, dict)] or list(made)
    for name, tree in data.items():
        if not isinstance(tree, dict):
            building.note(
                "error", f"{dump.folder}dump.json: {name[:200]} is no call; it is left out"
            )
    place_of = {name: i for i, name in enumerate(names)}
    parent = [_above(made, name, place_of) for name in names]
    reading = _Reading(
        building,
        place,
        dump,
        made,
        _sources(_json_or_note(building, place, f"{dump.folder}stack.json")),
    )
    if reading.again(index.get("whence"), data):
        return
    handles: dict[int, int] = {}
    for at in call_order.begun(parent):
        handles[at] = reading.call(names[at], data.get(names[at], {}), handles.get(parent[at], -1))


def _json_or_note(building: Building, place: Place, name: str) -> dict[str, Any]:
    try:
        return _json(place, name, needed=False)
    except UnreadableRun as error:
        building.note("error", str(error))
        return {}


def _above(made: Mapping[str, Any], name: str, place_of: Mapping[str, int]) -> int:
    """The place of the nearest call above one that was dumped, -1 when there is none."""
    seen = {name}
    while True:
        above = made.get(name)
        above = above[0] if isinstance(above, list) and above else above
        if not isinstance(above, str) or above in seen:
            return -1
        if above in place_of:
            return place_of[above]
        seen.add(above)
        name = above


def _sources(stacks: Mapping[str, Any]) -> dict[str, str]:
    """Where each call was made: the innermost frame outside of installed packages, as
    "file:line".
    """
    out: dict[str, str] = {}
    for key, value in stacks.items():
        grouped = (
            isinstance(value, list)
            and len(value) == 2
            and isinstance(value[0], list)
            and isinstance(value[1], list)
        )
        calls, frames = value if grouped else ([key], value)
        if not isinstance(frames, list):
            continue
        places = [
            found.groups()
            for frame in frames
            if isinstance(frame, str) and (found := _FRAME.match(frame))
        ]
        own = next(
            (p for p in places if "site-packages" not in p[0] and "dist-packages" not in p[0]), None
        )
        if own is not None:
            out.update((call, f"{own[0]}:{own[1]}") for call in calls if isinstance(call, str))
    return out


class _Reading:
    """Adds the calls of one index file to a run."""

    def __init__(
        self,
        building: Building,
        place: Place,
        dump: _Dump,
        made: Mapping[str, Any],
        sources: Mapping[str, str],
    ) -> None:
        self.building, self.place, self.dump, self.made, self.sources = (
            building,
            place,
            dump,
            made,
            sources,
        )
        self._written: set[tuple[Any, ...]] = set()  # figures of what calls returned so far
        self._said_xor = False

    def call(self, name: str, tree: Mapping[str, Any], parent: int) -> int:
        """Add one call by its name in dump.json. parent: handle of the module that made it, -1 for
        none that is known.
        """
        module, api = _MODULE.fullmatch(name), _API.fullmatch(name)
        micro = self.made.get(name)
        given: dict[str, Any] = {
            "step": self.dump.step,
            "rank": self.dump.rank,
            "parent": parent,
            "source": self.sources.get(name, ""),
            "micro": micro[1]
            if isinstance(micro, list) and len(micro) > 1 and isinstance(micro[1], int)
            else 0,
        }
        if module is not None and module["phase"] == "parameters_grad":
            grads = self.tensors(tree)
            return self.building.call(
                f"{module['path']}.parameters_grad",
                op_type="parameters_grad",
                phase="backward",
                outputs=grads,
                **given,
            )
        if module is not None:
            inputs, outputs, params, arguments = self.sides(tree, "")
            return self.building.call(
                module["path"],
                op_type=module["cls"],
                kind="module",
                phase=module["phase"],
                inputs=inputs,
                outputs=outputs,
                params=params,
                arguments=arguments,
                **given,
            )
        if api is None:
            self.building.note(
                "error",
                f"{self.dump.folder}dump.json: the name {name[:200]!r} is not known; it is read "
                "as an operator",
            )
        kind, op, phase = (
            (api["kind"], api["name"], api["phase"]) if api is not None else ("", name, "forward")
        )
        plain = op.strip("_") if op.startswith("__") else op
        inputs, outputs, params, arguments = self.sides(tree, plain)
        above = self.scope_above(name)
        scope = ".".join(part for part in (above, kind, op) if part)
        return self.building.call(
            scope,
            op_type=plain,
            phase=phase,
            inputs=inputs,
            outputs=outputs,
            params=params,
            arguments=arguments,
            **given,
        )

    def again(self, told: Any, data: Mapping[str, Any]) -> bool:
        """Add the calls as the cards tell that whence wrote into dump.json; False, and nothing is
        added, when they are not those in it.
        """
        cards = told.get("calls") if isinstance(told, dict) else None
        if not isinstance(cards, dict) or set(cards) != set(data):
            return False
        found: list[tuple[Call, list[tuple[str, Mapping[str, Any]]]]] = []
        for name, tree in data.items():
            mark = cards[name] if isinstance(cards[name], dict) else {}
            call, slots = whence_cards.read(mark.get("card")), mark.get("slots")
            tensors = [leaf for _, leaf in _leaves(tree, "") if _is_tensor(leaf)]
            if (
                call is None
                or not isinstance(slots, list)
                or len(slots) != len(tensors)
                or not all(isinstance(s, str) for s in slots)
            ):
                return False
            found.append(
                (
                    msgspec.structs.replace(call, rank=self.dump.rank, step=self.dump.step),
                    list(zip(slots, tensors)),
                )
            )
        tensors_of = {
            call.id: [(slot, self.tensor(leaf)) for slot, leaf in tensors]
            for call, tensors in found
        }
        sidecar.add(self.building, [call for call, _ in found], tensors_of)
        return True

    def point(self, name: str, tree: Any) -> None:
        """Add what was saved with `save`: a point that has outputs only."""
        found = _DEBUG.fullmatch(name)
        scope, phase = (
            (found["name"], "backward" if found["grad"] else "forward")
            if found is not None
            else (name, "forward")
        )
        tensors, scalars = (
            self.tensors(tree),
            {key: value for key, value in _leaves(tree, "") if not _is_tensor(value)},
        )
        self.building.call(
            scope,
            step=self.dump.step,
            rank=self.dump.rank,
            phase=phase,
            kind="label",
            outputs=tensors,
            arguments={
                key or "0": _plain(value) for key, value in scalars.items() if value is not None
            },
        )

    def scope_above(self, name: str) -> str:
        """Path of the module that made a call, as construct.json says it."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            above = self.made.get(name)
            above = above[0] if isinstance(above, list) and above else above
            if not isinstance(above, str):
                return ""
            found = _MODULE.fullmatch(above)
            if found is not None:
                return found["path"]
            name = above
        return ""

    def sides(
        self, tree: Mapping[str, Any], op: str
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, Any]]:
        """(inputs, outputs, parameters, arguments that are no tensors) of a call."""
        read = [
            *_leaves(tree.get("input_args", tree.get("input")), ""),
            *_leaves(tree.get("input_kwargs"), ""),
        ]
        returned = [leaf for _, leaf in _leaves(tree.get("output"), "") if _is_tensor(leaf)]
        graph = any(leaf.get("requires_grad") for leaf in returned)
        inputs: dict[str, int] = {}
        params = self.tensors(tree.get("parameters", {}))
        arguments: dict[str, Any] = {}
        for slot, leaf in read:
            if _is_tensor(leaf):
                weight = self.weight(op, slot, leaf, graph) if "input_args" in tree else ""
                (params if weight else inputs)[weight or slot] = self.tensor(leaf)
            elif leaf is not None:
                arguments[f"input.{slot}"] = _plain(leaf)
        outputs = self.tensors(tree.get("output"))
        self._written.update(map(_figures, returned))
        return inputs, outputs, params, arguments

    def weight(self, op: str, slot: str, leaf: Mapping[str, Any], graph: bool) -> str:
        """The name of the parameter that an argument of an API is, "" when it is none.

        By the signature; else what wants a gradient although the result does not (no graph is
        built), or, in a graph, a vector that nothing made.
        """
        if not op:
            return ""
        known = _WEIGHTS.get(op, {})
        if slot in known or slot in known.values():
            return known.get(slot, slot)
        if leaf.get("requires_grad") is not True:
            return ""
        shape = leaf.get("shape")
        is_vector = isinstance(shape, list) and len(shape) == 1
        return slot if not graph or (is_vector and _figures(leaf) not in self._written) else ""

    def tensors(self, tree: Any) -> dict[str, int]:
        """Records of all tensors in a tree, by their places in it."""
        return {
            slot or "0": self.tensor(leaf) for slot, leaf in _leaves(tree, "") if _is_tensor(leaf)
        }

    def tensor(self, leaf: Mapping[str, Any]) -> int:
        """The record of one tensor: elements where they were saved, and whatever else is known of
        it.
        """
        dtype = str(leaf.get("dtype", "")).removeprefix("torch.").removeprefix("mindspore.")[:64]
        dtype = dtype.lower() if dtype[:1].isupper() else dtype  # mindspore's Float32
        try:
            shape = limits.extents(leaf.get("shape"), "a tensor")
        except UnreadableRun as error:
            return self.building.tensor(dtype, (), why=str(error))
        statistics, digest, name = (
            _statistics(leaf, shape),
            _digest(leaf.get("md5")),
            leaf.get("data_name"),
        )
        if digest.startswith("xor:") and not self._said_xor:
            self._said_xor = True
            self.building.note(
                "error",
                f"{self.dump.folder}dump.json has XORs of 64-bit words for digests: tensors with "
                "elements exchanged look equal",
            )
        if not isinstance(name, str) or name in ("", "-1"):
            why = (
                "only "
                f"{'statistics' if statistics else 'a digest' if digest else 'shape and dtype'} "
                "of it were dumped"
            )
            return self.building.tensor(
                dtype,
                shape,
                why=why.replace("digest of it were", "digest of it was"),
                statistics=statistics,
                digest=digest,
            )
        file = f"{self.dump.folder}dump_tensor_data/{name}"
        load = _loading(self.place, file)
        return self.building.tensor(
            dtype, shape, load, statistics=statistics, digest=digest, file=file
        )


def _loading(place: Place, file: str) -> Callable[[], Array]:
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
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _torch(path: Path) -> Array:
    found = list(torch_file.tensors(torch_file.load(path)))
    if len(found) != 1 or not isinstance(found[0][1], TorchTensor):
        raise ElementsMissing(f"{path.name} holds {len(found)} tensors that can be read, not one")
    return found[0][1].array()


def _leaves(tree: Any, at: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(place, leaf) of a tree of arguments: lists and dicts as they are nested, "0.1" or "mask"; a
    leaf is a dict with "type", or null.
    """
    if isinstance(tree, dict) and not isinstance(tree.get("type"), str):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        if tree is not None or at:
            yield at, tree
        return
    if depth >= _DEPTH:
        return
    for key, value in items:
        yield from _leaves(value, f"{at}.{key}" if at else str(key), depth + 1)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "shape" in leaf and "dtype" in leaf


def _plain(leaf: Any) -> Any:
    """A scalar argument as a value."""
    return leaf["value"] if isinstance(leaf, dict) and "value" in leaf else leaf


def _figures(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tensors share that are one, or views of one."""
    shape = leaf.get("shape")
    count = math.prod(n for n in shape if isinstance(n, int)) if isinstance(shape, list) else -1
    return (
        str(leaf.get("dtype")),
        count,
        str(leaf.get("Max")),
        str(leaf.get("Min")),
        str(leaf.get("md5")) if "Max" not in leaf else "",
    )


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not value:
        return ""
    text = value[:64].lower()
    return (
        f"xor:{text}" if text.startswith("0x") else f"{'crc32' if len(text) == 8 else 'md5'}:{text}"
    )


def _statistics(leaf: Mapping[str, Any], shape: tuple[int, ...]) -> Statistics | None:
    """Figures of a tensor as msprobe took them, in the dtype of the tensor; std follows from norm
    and mean.

    What is not finite is counted once: the dump does not say how often. Where the mean is most of
    the norm, std would be what rounding left of it, and is not given.
    """
    found = [_float(leaf.get(key)) for key in ("Max", "Min", "Mean", "Norm")]
    high, low, mean, norm = found
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
