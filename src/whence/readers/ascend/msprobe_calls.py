"""Calls of an msprobe index: what their names say, and which of their tensors are parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from whence.errors import UnreadableRun
from whence.readers.ascend.msprobe_tensors import (
    digest_of,
    figures_of,
    is_tensor,
    leaves,
    loader,
    scalar,
    statistics_of,
)
from whence.readers.assembly import sidecar
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits
from whence.readers.source import Place
from whence.records import Call
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
    """One index file: the folder it lies in (with a slash at the end, or ""), its name, and the
    step and rank it is of.
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
        """Add one call by its name in dump.json. parent: handle of the module that made it, -1 for
        none that is known.
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
        """Add the calls as described by the cards that whence wrote into dump.json. Returns False,
        having added nothing, when they are not the calls of `data`.
        """
        cards = section.get("calls") if isinstance(section, dict) else None
        if not isinstance(cards, dict) or set(cards) != set(data):
            return False
        described: list[tuple[Call, list[tuple[str, Mapping[str, Any]]]]] = []
        for name, tree in data.items():
            entry = cards[name] if isinstance(cards[name], dict) else {}
            call, slots = whence_cards.read(entry.get("card")), entry.get("slots")
            tensors = [leaf for _, leaf in leaves(tree) if is_tensor(leaf)]
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
        """Add what was saved with `save`: a point that has outputs only."""
        point = _DEBUG.fullmatch(name)
        self.building.call(
            point["name"] if point is not None else name,
            step=self.file.step,
            rank=self.file.rank,
            phase="backward" if point is not None and point["grad"] else "forward",
            kind="label",
            outputs=self._tensors(tree),
            arguments={
                slot or "0": scalar(leaf)
                for slot, leaf in leaves(tree)
                if leaf is not None and not is_tensor(leaf)
            },
        )

    def _module_path(self, name: str) -> str:
        """Path of the module that made a call, as construct.json says it."""
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
        """Inputs, outputs, parameters, and arguments that are no tensors, of a call."""
        arguments = [
            *leaves(tree.get("input_args", tree.get("input"))),
            *leaves(tree.get("input_kwargs")),
        ]
        returned = [leaf for _, leaf in leaves(tree.get("output")) if is_tensor(leaf)]
        has_graph = any(leaf.get("requires_grad") for leaf in returned)
        inputs: dict[str, int] = {}
        params = self._tensors(tree.get("parameters", {}))
        scalars: dict[str, Any] = {}
        for slot, leaf in arguments:
            if is_tensor(leaf):
                weight = self._weight(op, slot, leaf, has_graph) if "input_args" in tree else ""
                (params if weight else inputs)[weight or slot] = self._tensor(leaf)
            elif leaf is not None:
                scalars[f"input.{slot}"] = scalar(leaf)
        outputs = self._tensors(tree.get("output"))
        self._returned.update(map(figures_of, returned))
        return {"inputs": inputs, "outputs": outputs, "params": params, "arguments": scalars}

    def _weight(self, op: str, slot: str, leaf: Mapping[str, Any], has_graph: bool) -> str:
        """The name of the parameter that an argument of an API is, "" when it is none.

        By the signature; else what wants a gradient although the result does not (no graph is
        built), or, in a graph, a vector that no call returned.
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
        is_weight = not has_graph or (is_vector and figures_of(leaf) not in self._returned)
        return slot if is_weight else ""

    def _tensors(self, tree: Any) -> dict[str, int]:
        """Records of all tensors in a tree, by slot."""
        return {slot or "0": self._tensor(leaf) for slot, leaf in leaves(tree) if is_tensor(leaf)}

    def _tensor(self, leaf: Mapping[str, Any]) -> int:
        """The record of one tensor: elements where they were saved, statistics and digest."""
        dtype = str(leaf.get("dtype", "")).removeprefix("torch.").removeprefix("mindspore.")[:64]
        dtype = dtype.lower() if dtype[:1].isupper() else dtype  # mindspore's Float32
        try:
            shape = limits.extents(leaf.get("shape"), "a tensor")
        except UnreadableRun as error:
            return self.building.tensor(dtype, (), why=str(error))
        statistics, digest = statistics_of(leaf, shape), digest_of(leaf.get("md5"))
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
            load = loader(self.place, path)
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
    """Name of the call that made a call, as construct.json says it; None when it does not."""
    entry = construct.get(name)
    parent = entry[0] if isinstance(entry, list) and entry else entry
    return parent if isinstance(parent, str) else None
