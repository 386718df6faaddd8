"""Files of torch.save: a tensor, a state_dict, nested dicts and lists of tensors; or a folder tree
of such files.

Read without torch, and nothing in them is executed: see `encodings.torch_file`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import torch_file
from whence.readers.encodings.archive import File
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
    """Lazy: names, shapes and dtypes now, elements memory-mapped when asked for."""
    building = Building(place.path, "torch")
    named_tensors.add(building, named_tensors.of_files(building, place, _is_ours, _items))
    return building.run()


def _is_ours(name: str) -> bool:
    name = name.lower()
    return name.endswith((".pt", ".pth", ".ckpt", *_PICKLES)) or (
        name.endswith(".bin") and "pytorch_model" in name
    )


def _items(building: Building, file: File, name: str) -> Iterator[Named]:
    """The tensors of a file. name: of its only one, what the names of those in a container begin
    with.
    """
    for inner, tensor in torch_file.tensors(torch_file.load(Path(file.name))):
        yield named_tensors.of_torch(named_tensors.below(name, inner), tensor, ordered=bool(inner))
