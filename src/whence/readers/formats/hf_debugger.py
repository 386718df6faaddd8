"""The model debugger of Hugging Face transformers: a tree of module calls, with tensors printed
into it or in safetensors files beside.

Files MODEL_debug_tree_FULL_TENSORS.json and MODEL_debug_tree_SUMMARY.json, as
`model_addition_debugger_context` writes them. Source: transformers 5.23, model_debugging_utils.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from whence import dtypes
from whence.errors import WhenceError
from whence.readers.assembly import safetensors_file
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits, printed_text
from whence.readers.encodings.archive import File
from whence.readers.encodings.json_file import leaves, object_of
from whence.readers.encodings.number_text import Digits, Values
from whence.readers.source import Place
from whence.records import Lack, Run, Statistics

LOOKS_LIKE = "MODEL_debug_tree_FULL_TENSORS.json of transformers, or the folder that has it"
ORDER = 15
_FULL, _SUMMARY = "_debug_tree_FULL_TENSORS.json", "_debug_tree_SUMMARY.json"
_SHAPE = re.compile(r"\[([\d, ]*)\]")
_STATISTICS = "the summary keeps statistics only"


def sniff(place: Place) -> bool:
    if place.is_folder:
        return any(name.endswith((_FULL, _SUMMARY)) for name in place.names)
    return place.path.name.endswith((_FULL, _SUMMARY)) or (
        place.suffix == ".json" and b'"module_path"' in place.head[:1000]
    )


def open_run(place: Place) -> Run:
    """Returns modules with their inputs; leaves also have outputs. Printed tensors are exact to
    half a unit of their last digit.
    """
    building = Building(place.path, "hf-debugger")
    if place.is_folder:
        names = [n for n in place.names if n.endswith(_FULL)] or [
            n for n in place.names if n.endswith(_SUMMARY)
        ]
    else:
        names = [place.path.name]
    for name in place.names:
        if name.endswith(_SUMMARY):  # says the same of the same tensors
            place.leave(name)
    for name in names:
        loaded = object_of(place.inside(name), name)
        root = PurePosixPath(str(loaded.get("module_path", "model")).split(" ")[0]).name
        tree = _Tree(building, place, loaded, root)
        tree.add()
        if tree.without_values and name.endswith(_FULL):
            text = f"{name} holds tensors without their values, as a summary does"
            building.lacks(Lack.DAMAGED, name, text)
    return building.run()


class _Tree:
    """Adds one tree of calls to a Building."""

    def __init__(self, building: Building, place: Place, tree: dict[str, Any], root: str) -> None:
        self.building, self.place, self.tree, self.root = building, place, tree, root
        self.without_values = 0
        # A module that runs twice overwrites its file, which then holds the last call.
        held = (item.get("value") for _, item in leaves(tree, _is_tensor) if _is_tensor(item))
        self.remaining = Counter(name for name in held if isinstance(name, str))

    def add(self) -> None:
        todo: list[tuple[Any, int]] = [(self.tree, -1)]
        while todo:
            node, parent = todo.pop()
            if not isinstance(node, dict):
                self.building.lacks(
                    Lack.DAMAGED,
                    self.place.path.name,
                    f"{type(node).__name__} is where a call is expected; it is not read",
                )
                continue
            path = str(node.get("module_path", "")).split(" ")[0]
            scope = "" if parent == -1 else path.removeprefix(f"{self.root}.")
            node_inputs = node.get("inputs") or {}
            args, kwargs = (
                (node_inputs.get("args", []), node_inputs.get("kwargs", {}))
                if isinstance(node_inputs, dict)
                else (node_inputs, {})
            )
            inputs = {
                **dict(self._records(args)),
                **(dict(self._records(kwargs)) if isinstance(kwargs, dict) else {}),
            }
            outputs = dict(self._records(node.get("outputs")))
            if parent == -1 and not outputs:
                outputs = self._of_root()
            call = self.building.call(
                scope, kind="module", parent=parent, inputs=inputs, outputs=outputs
            )
            kids = node.get("children") or []
            todo += [(kid, call) for kid in reversed(kids)] if isinstance(kids, list) else []

    def _of_root(self) -> dict[str, int]:
        """Returns the outputs of the whole model: the tree does not mention their file."""
        name = f"{self.root}_outputs.safetensors"
        if name not in self.place.names:
            return {}
        items = safetensors_file.tensors_of(self.building, File(self.place.inside(name)))
        return {
            str(slot): replace(item, file=name).record(self.building)
            for slot, item in enumerate(items)
        }

    def _records(self, value: Any) -> Iterator[tuple[str, int]]:
        """Yields (slot, record) of every tensor in inputs or outputs, which are nested lists and
        dicts.
        """
        for slot, tensor in leaves(value, _is_tensor):
            if _is_tensor(tensor):
                yield slot or "0", self._record(tensor)

    def _record(self, tensor: dict[str, Any]) -> int:
        dtype = str(tensor.get("dtype", "")).removeprefix("torch.")
        match = _SHAPE.search(str(tensor.get("shape", ""))[:1000])
        shape = tuple(int(n) for n in match[1].split(",") if n.strip()) if match else ()
        value, figures = tensor.get("value"), _figures(tensor, limits.count(shape))
        if isinstance(value, str):
            return self._beside(value, dtype, shape)
        if (
            isinstance(value, list)
            and all(isinstance(line, str) for line in value)
            and dtype in dtypes.DTYPES
        ):
            return self._printed("\n".join(value), dtype, shape, figures)
        self.without_values += 1
        statistics, quantum = figures
        return self.building.tensor(
            dtype, shape, why=_STATISTICS, statistics=statistics, quantum=quantum
        )

    def _printed(
        self,
        text: str,
        dtype: str,
        shape: tuple[int, ...],
        figures: tuple[Statistics | None, float],
    ) -> int:
        try:
            printed = next(printed_text.prints(f"{text}\n"))
            values = printed.values(dtype)
            if values.array.shape != shape and not printed.whole:
                raise ValueError(f"it shows {values.array.shape}, its shape is {shape}")
        except (StopIteration, ValueError, OverflowError) as error:
            why, (statistics, quantum) = f"its print cannot be read: {error}", figures
            return self.building.tensor(
                dtype, shape, why=why, statistics=statistics, quantum=quantum
            )
        array = values.array
        whole = {} if array.shape == shape else {"whole": shape}
        return self.building.array(array, quantum=values.step, **whole)

    def _beside(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        self.remaining[name] -= 1
        if self.remaining[name] > 0:
            return self.building.tensor(
                dtype, shape, why=f"a later call of this module has written over {name}"
            )
        try:
            path = self.place.inside(name)
            if not path.is_file():
                return self._lost(name, dtype, shape, "is not there")
            item = next(
                (
                    item
                    for item in safetensors_file.tensors_of(self.building, File(path))
                    if item.name == "data"
                ),
                None,
            )
        except WhenceError as error:
            return self._lost(name, dtype, shape, str(error))
        if item is None:
            return self._lost(name, dtype, shape, "holds no tensor called data")
        return replace(item, file=name.removeprefix("./")).record(self.building)

    def _lost(self, name: str, dtype: str, shape: tuple[int, ...], why: str) -> int:
        return self.building.tensor(dtype, shape, why=f"{name} {why}", file=name.removeprefix("./"))


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("shape"), str)
        and isinstance(value.get("dtype"), str)
    )


def _figures(tensor: dict[str, Any], count: int) -> tuple[Statistics | None, float]:
    """Returns (statistics printed beside a tensor, step of their last digit). torch divides by n -
    1, whence by n.
    """
    texts: dict[str, str] = {}
    for key in ("min", "max", "mean", "std"):
        text = re.search(r"tensor\(([-+.\deE]+|nan|[-+]?inf)", str(tensor.get(key, ""))[:100])
        if text is None:
            return None, 0.0
        texts[key] = text[1]
    values = {key: float(text) for key, text in texts.items()}
    quantum = Values.of([*texts.values()], (len(texts),), Digits.of([*texts.values()])).step
    if not count or not all(map(math.isfinite, values.values())):
        return None, 0.0
    std = values["std"] * math.sqrt((count - 1) / count)
    norm = math.sqrt(count * (values["mean"] ** 2 + std**2))
    return Statistics(
        count, values["min"], values["max"], values["mean"], std, norm, 0, 0, 0
    ), quantum
