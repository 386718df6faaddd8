"""Reads files of torch.save: a tensor, a state_dict, nested dicts and lists of tensors; or a folder
tree of such files.

Read without torch, and nothing in them is executed: see `encodings.torch_file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.pickle_values import TorchTensor, Unknown
from whence.readers.source import Place
from whence.records import Run

LOOKS_LIKE = "a .pt or .pth file of torch.save, a pickle of arrays, or a folder of them"
ORDER = 82
LOOSE = True
_PICKLES = (".pkl", ".pickle", ".pckl", ".pk")


def sniff(place: Place) -> bool:
    if place.is_folder:  # checkpoints are often kept in both formats
        names = [name for name in place.files if _is_ours(name)]
        return any(not name.endswith(".bin") for name in names) or (
            bool(names) and not any(n.endswith(".safetensors") for n in place.files)
        )
    return torch_file.recognised(place.head) or (
        _is_ours(place.path.name) and torch_file.is_pickle(place.head)
    )


def open_run(place: Place) -> Run:
    """Reads names, shapes and dtypes now and memory-maps elements on request."""
    building = Building(place.path, "torch")
    named_tensors.add(building, named_tensors.of_files(building, place, _is_ours, _items))
    return building.run()


def _is_ours(name: str) -> bool:
    name = name.lower()
    return name.endswith((".pt", ".pth", ".ckpt", *_PICKLES)) or (
        name.endswith(".bin") and "pytorch_model" in name
    )


def _items(building: Building, file: File) -> Iterator[Named]:
    """Returns the tensors of a file."""
    tree = torch_file.load(Path(file.name))
    # fields of an object keep the order of its class
    is_object = isinstance(tree, Unknown)
    results = _results(tree)
    for inner, tensor in (_fields if is_object else list)(torch_file.tensors(tree)):
        is_ordered = bool(inner) and not is_object and id(tensor) not in results
        yield named_tensors.of_torch(inner, tensor, ordered=is_ordered)


def _results(tree: Any) -> set[int]:
    """Returns the tensors beside one container that holds most others ({"logits": ..., "taps":
    {...}}): their position does not tell when they were computed.
    """
    parts = _parts(tree)
    single = {id(part) for part in parts if isinstance(part, TorchTensor)}
    most = max((sum(isinstance(p, TorchTensor) for p in _parts(c)) for c in parts), default=0)
    return single if most > max(len(single), len(parts) - 1) else set()


def _parts(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []


def _fields(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the tensors of an object without their numbered duplicates: an object is pickled with
    its fields in several forms, only some of which have names.
    """
    by_tensor: dict[object, dict[str, Any]] = {}
    for name, tensor in tensors:
        is_read = isinstance(tensor, TorchTensor)
        key = (tensor.storage.key, tensor.offset, tensor.shape) if is_read else id(tensor)
        by_tensor.setdefault(key, {})[name] = tensor
    return [
        (name, tensor)
        for names in by_tensor.values()
        for name, tensor in names.items()
        if not name.replace(".", "").isdecimal() or all(n[:1].isdecimal() for n in names)
    ]
