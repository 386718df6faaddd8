"""Reads files of torch.save: a tensor, a state_dict, nested dicts and lists of tensors; or a folder
tree of such files.

Read without torch, and nothing in them is executed: see `encodings.torch_file`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import limits, torch_file
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
    containers = _containers(tree)
    for inner, tensor in (_fields if is_object else list)(torch_file.tensors(tree)):
        container = containers.get(inner.partition(".")[0], "")
        yield named_tensors.of_torch(
            inner,
            tensor,
            ordered=bool(inner) and not is_object and container is not None,
            container=container or "",
        )


def _containers(tree: Any) -> dict[str, str | None]:
    """Returns key -> container of a tree with containers of several sizes, or with one and tensors
    beside it ({"logits": ..., "taps": {...}}), None for these tensors. A container says when it was
    opened, and not what was computed before it was closed.
    """
    sizes = {str(key): _size(part) for key, part in tree.items()} if isinstance(tree, dict) else {}
    ((_, most), *_) = Counter(sizes.values()).most_common(1) or [(0, 0)]
    is_largest = 2 * max(sizes.values(), default=0) > sum(sizes.values())
    if not is_largest and 2 * most > len(sizes):
        return {}
    return {
        key: (key if size > _OF_A_CALL else None)
        for key, size in sizes.items()
        if len(sizes) > 1 and max(sizes.values()) > _OF_A_CALL
    }


_OF_A_CALL = 6
"""Most tensors of a container that may be what one call was given and returned."""


def _size(node: Any, depth: int = 0) -> int:
    """Returns the number of tensors in a part of a tree, as far as it says more than few."""
    if isinstance(node, TorchTensor):
        return 1
    parts = node.values() if isinstance(node, dict) else node
    is_open = isinstance(node, (dict, list, tuple)) and depth < limits.RANK
    return sum(_size(part, depth + 1) for part in parts) if is_open else 0


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
