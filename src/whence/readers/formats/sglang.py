"""sglang: tensors of its dumper, and of its forward hook (--debug-tensor-dump-output-folder).

Dumper: files NAME=VALUE___NAME=VALUE.pt with step, rank, dump_index and name in them, each
{"value": tensor, "meta": {...}}. Forward hook: folders TP0_PP0_Rank0_pid123 with Pass00000.pt, a
dict of outputs by module for every forward. Source: sglang 0.5.23, sglang/srt/debug_utils/dumper.py
and tensor_dump_forward_hook.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from whence.errors import UnreadableRun
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import torch_file
from whence.readers.encodings.pickle_values import TorchTensor, Unknown
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack, Run

LOOKS_LIKE = "a folder of step=..___rank=..___name=...pt, or of TP0_PP0_Rank0_pid1/Pass00000.pt"
ORDER = 25
_TAGS = re.compile(r"(?:^|/)((?:\w+=[^/]*?___)*(?:name=)[^/]*)\.pt$")
_PASS = re.compile(r"(?:^|/)TP\d+_PP\d+_Rank(\d+)_pid\d+/Pass(\d+)\.pt$")
_OWN_PASS = re.compile(r"Pass(\d+)\.pt")
_OWN_RANK = re.compile(r"TP\d+_PP\d+_Rank(\d+)_pid\d+")
_MODULE = re.compile(r"^non_intrusive__(?:(.*)\.)?(?:(inputs)\.(\w+)|(output))((?:\.\w+)*)$")
_LAYER = ("layer_id", "layer")
_USUAL = {"name", "step", "rank", "dump_index", "recompute_status", *_LAYER}


def sniff(place: Place) -> bool:
    if not place.is_folder:
        return False
    if any(_TAGS.search(name) and "dump_index=" in name for name in place.files[:50]):
        return True
    return any(map(_PASS.search, place.files[:50])) or _is_process(place)


def open_run(place: Place) -> Run:
    """Reads names and shapes now and memory-maps elements on request. A file that cannot be read
    loses only its own tensors.
    """
    building = Building(place.path, "sglang")
    passes = [
        name
        for name in place.files
        if _PASS.search(name) or (_is_process(place) and _OWN_PASS.fullmatch(name))
    ]
    if passes:
        items = [item for name in passes for item in _of_pass(building, place, name)]
        named_tensors.add_labels(building, sorted(items, key=lambda item: (item.step, item.rank)))
        return building.run()
    dumped = sorted(
        (item for name in place.files for item in _of_dumper(building, place, name)),
        key=lambda item: item[0],
    )
    weights = [item for _, item, kind in dumped if kind == "param"]
    others = [item for _, item, kind in dumped if kind != "param"]
    if weights:
        named_tensors.add_weights(building, weights)
    if others:
        named_tensors.add_labels(building, others)
    return building.run()


def _is_process(place: Place) -> bool:
    return bool(_OWN_RANK.fullmatch(place.path.resolve().name)) and any(
        map(_OWN_PASS.fullmatch, place.names)
    )


def _of_pass(building: Building, place: Place, name: str) -> Iterator[Named]:
    match = _PASS.search(name)
    if match is not None:
        rank, step = int(match[1]), int(match[2])
    else:
        process, number = _OWN_RANK.fullmatch(place.path.resolve().name), _OWN_PASS.fullmatch(name)
        rank, step = int(process[1]) if process else 0, int(number[1]) if number else 0
    tensors = _tensors(building, place, name)
    names = [inner for inner, _, _ in tensors]
    # The hook of the outer model writes the file before it adds its own output: that output, and
    # those of later modules, are the first in the next file.
    late = 0
    if step and names and any(inner.startswith(f"{names[0]}.") for inner in names):
        late = next(i for i, inner in enumerate(names) if inner.startswith(f"{names[0]}."))
    for i, (inner, tensor, _) in enumerate(tensors):
        yield named_tensors.of_torch(
            inner, tensor, ordered=True, step=step - (i < late), rank=rank, file=name
        )


def _of_dumper(
    building: Building, place: Place, name: str
) -> Iterator[tuple[tuple[int, int, int], Named, str]]:
    """Yields ((step, rank, index), tensor, "param", "grad" or "") of a file; nothing for a value
    that is not a tensor.
    """
    match = _TAGS.search(name)
    if match is None:
        return
    tags = dict(part.partition("=")[::2] for part in match[1].split("___"))
    try:
        step, rank, index = (int(tags.get(key, "0")) for key in ("step", "rank", "dump_index"))
    except ValueError:
        building.lacks(
            Lack.UNREAD, name, f"{name} is not read: its step, rank or dump_index is not a number"
        )
        return
    label, place_in_call = tags["name"], None
    kind = next((prefix for prefix in ("param", "grad") if label.startswith(f"{prefix}__")), "")
    label = label.removeprefix(f"{kind}__") if kind else label
    layer = next((tags[key] for key in _LAYER if key in tags), "")
    if module := _MODULE.match(label):
        slot = (module[3] or "") + (module[5] if module[3] else module[5].removeprefix("."))
        place_in_call = (module[1] or "", "input" if module[2] else "output", slot or "0")
    elif kind != "param":
        label = named_tensors.below(f"layers.{layer}" if layer else "", label)
        label += "".join(
            f".{key}={value}"
            for key, value in tags.items()
            if key not in _USUAL and not key.endswith("_rank")
        )
    if kind == "grad":
        label, place_in_call = f"{label}.grad", None
    for inner, tensor, dims in _tensors(building, place, name):
        if inner == "value" or inner.startswith("value."):
            yield (
                (step, rank, index),
                named_tensors.of_torch(
                    named_tensors.below(label, inner[6:]),
                    tensor,
                    ordered=True,
                    step=step,
                    rank=rank,
                    place_in_call=place_in_call,
                    arguments={"dims": dims} if dims else {},
                    file=name,
                ),
                kind,
            )


def _tensors(
    building: Building, place: Place, name: str
) -> list[tuple[str, TorchTensor | Unknown, str]]:
    """Returns (name, tensor, names of its axes if stated) of a file."""
    try:
        tree = torch_file.load(place.inside(name))
        meta = tree.get("meta") if isinstance(tree, dict) else None
        dims = meta.get("dims") if isinstance(meta, dict) else None
        return [
            (inner, tensor, dims if isinstance(dims, str) else "")
            for inner, tensor in torch_file.tensors(tree)
        ]
    except UnreadableRun as error:
        building.lacks(Lack.DAMAGED, name, not_read(name, error))
        return []
