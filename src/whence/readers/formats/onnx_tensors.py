"""ONNX tensors: a TensorProto (input_0.pb), a test_data_set folder of them, a folder of others such
as ONNX Runtime dumps of its nodes (NAME.tensorproto), or the initializers of a model.

Pure Python, nothing of onnx is imported. Layouts: onnx/onnx.proto3;
test_data_set_N/{input,output}_K.pb as the ONNX model zoo and its backend tests have them;
onnxruntime/core/framework/debug_node_inputs_outputs_utils.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from whence.errors import UnreadableRun
from whence.frameworks.onnx_names import scope_of
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import onnx_tensor, protobuf
from whence.readers.encodings.archive import File
from whence.readers.encodings.onnx_tensor import OnnxTensor
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack, Run

LOOKS_LIKE = "ONNX tensors (.pb, .tensorproto), a test_data_set folder, or an .onnx model"
ORDER = 60
LOOSE = True
_SET = re.compile(
    r"(?:^|/)(?:test_data_set_(?P<set>\d{1,6})/)?(?P<kind>input|output)_(?P<slot>\d{1,6})\.pb$"
)
_SUFFIXES = (".pb", ".tensorproto")
_GRAPHS: protobuf.Schema = {7: ("graphs", protobuf.messages({5: ("initializers", protobuf.raw)}))}
_DATA_SET = re.compile(r"test_data_set_\d{1,6}")


def sniff(place: Place) -> bool:
    if place.is_folder:
        return _has_sets(place) or any(_is_loose(place, name) for name in place.files)
    if place.suffix == ".onnx":
        return True
    return place.suffix in _SUFFIXES and _is_tensor(place.head, place.size)


def _has_sets(place: Place) -> bool:
    return any(map(_SET.search, place.names)) or any(map(_DATA_SET.fullmatch, place.names))


def _is_loose(place: Place, name: str) -> bool:
    return place.shows(name, _SUFFIXES, sniff)


def open_run(place: Place) -> Run:
    """Returns a run. Each test data set is one call of the model and a step; other tensors are
    labels, initializers are parameters.
    """
    building = Building(place.path, "onnx")
    if place.is_folder and _has_sets(place):
        _data_sets(building, place)
    elif place.is_folder:
        is_ours, items = partial(_is_loose, place), partial(_items, place)
        named_tensors.add(building, named_tensors.of_files(building, place, is_ours, items))
    elif place.suffix == ".onnx":
        named_tensors.add_weights(
            building,
            [
                _named(place, t, t.name or f"initializer_{i}")
                for i, t in enumerate(_initializers(place))
            ],
        )
    else:
        tensor = _parsed(File(place.inside(place.path.name)))
        match = _SET.search(place.path.name)
        records = {"0": _named(place, tensor, "").record(building)}
        if match is not None and match["kind"] == "input":
            building.call("", kind="label", inputs=records)
        else:
            building.call("", kind="label", outputs=records)
    return building.run()


def _is_tensor(head: bytes, size: int) -> bool:
    """Whether these first bytes could start a TensorProto: its dimensions, then its type."""
    try:
        for number, _, _ in protobuf.fields(head):
            if number not in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16):
                return False
            if number == 2:
                return True
    except ValueError:  # cut off within the elements, or another thing
        return False
    return False


def _data_sets(building: Building, place: Place) -> None:
    chosen = [(match, name) for name in place.files if (match := _SET.search(name))]
    calls: dict[tuple[str, int], dict[str, dict[str, int]]] = {}
    for match, name in sorted(chosen, key=lambda item: named_tensors.natural(item[1])):
        try:
            record = _named(place, _parsed(File(place.inside(name))), name).record(building)
        except UnreadableRun as error:
            building.lacks(Lack.DAMAGED, name, not_read(name, error))
            continue
        slots = calls.setdefault(
            (str(PurePosixPath(name).parent), int(match["set"] or 0)), {"input": {}, "output": {}}
        )
        slots[match["kind"]][match["slot"]] = record
    for (_, step), slots in calls.items():
        building.call("", kind="label", step=step, inputs=slots["input"], outputs=slots["output"])


def _items(place: Place, building: Building, file: File) -> Iterator[Named]:
    """Yields the tensor of a file. In dumps of ONNX Runtime the tensor's own name counts, since its
    file name has lost all characters but letters.
    """
    tensor = _parsed(file)
    item = _named(place, tensor, "")
    if file.name.endswith(".tensorproto") and tensor.name:
        item = replace(item, name=scope_of(tensor.name), is_whole=True)
    yield item


def _named(place: Place, tensor: OnnxTensor, name: str) -> Named:
    why = tensor.why()
    return Named(
        name,
        tensor.dtype,
        tensor.shape,
        None if why else partial(tensor.array, place.inside),
        why,
        file=name if place.is_folder else "",
    )


def _parsed(file: File) -> OnnxTensor:
    try:
        return onnx_tensor.parse(_view(file))
    except (ValueError, UnreadableRun) as error:
        raise UnreadableRun(f"{file.name} is not an ONNX tensor: {error}") from error


def _initializers(place: Place) -> list[OnnxTensor]:
    """Returns the initializers of a model's main graph; those of nested graphs are not read. Raises
    UnreadableRun.
    """
    file = File(place.path)
    try:
        graphs = protobuf.read(_view(file), _GRAPHS)["graphs"]
        return [onnx_tensor.parse(value) for graph in graphs for value in graph["initializers"]]
    except ValueError as error:
        raise UnreadableRun(f"{file.name} is not an ONNX model: {error}") from error


def _view(file: File) -> Any:
    whole: Any = file.part(0, file.size)
    return memoryview(whole)
