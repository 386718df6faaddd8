"""Polygraphy: outputs or inputs of its runners, as `polygraphy run --save-outputs` and
`--save-inputs` write them.

A JSON file with all iterations, or a folder with one file for each. Arrays are .npy or torch.save
files in base64; the older markers and the older encoding of bytes as latin-1 text are read too.
Source: polygraphy 0.53.6, polygraphy/json/serde.py, comparator/struct.py.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly import sidecar
from whence.readers.assembly.builder import Building
from whence.readers.encodings import numpy_file, torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.json_file import tree_of
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place
from whence.records import Run

LOOKS_LIKE = "JSON with polygraphy_class in it, or a folder of 0000000000.json"
ORDER = 20
_MARKS = (b"polygraphy_class", b"__polygraphy_encoded_")
_ITERATION = re.compile(r"\d{10}\.json")
# creation time of a runner: never the same twice
_STAMP = re.compile(r"-N\d+-\d\d/\d\d/\d\d-\d\d:\d\d:\d\d$")
_HEAD_CHARS = 4 * (numpy_file.HEAD_BYTES // 3 + 1)


def sniff(place: Place) -> bool:
    if place.is_folder:
        first = next((name for name in place.names if _ITERATION.fullmatch(name)), None)
        return first is not None and sniff(place.within(first))
    if place.head.lstrip()[:1] not in (b"{", b"["):
        return False
    with place.path.open("rb") as file:  # a large array may stand before the first mark
        file.seek(max(0, place.size - 4096))
        ends = place.head + b" " + file.read()
    return any(mark in ends for mark in _MARKS)


def open_run(place: Place) -> Run:
    """Returns outputs as labels by runner and iteration; inputs become inputs of the whole model.
    Raises UnreadableRun when the file is neither.
    """
    building = Building(place.path, "polygraphy")
    if place.is_folder:
        names = [name for name in place.names if _ITERATION.fullmatch(name)]
        loaded = [(name, _loaded(place.within(name))) for name in names]
    else:
        loaded = [(place.path.name, _loaded(place))]
    iterations = [item for name, data in loaded for item in _iterations(data, name)]
    runners = list(dict.fromkeys(runner for runner, *_ in iterations))
    steps = dict.fromkeys(runners, 0)
    for runner, tensors, is_input, marks in iterations:
        step, steps[runner] = steps[runner], steps[runner] + 1
        root = "model" if len(runners) == 1 else runner
        records = {name: _record(building, name, value) for name, value in tensors.items()}
        cards = sidecar.CardedCalls()
        for name, record in records.items():
            cards.add(marks.get(name), record)
        if records and cards.count == len(records):
            cards.build(building)
            continue
        if is_input:
            building.call("", kind="module", root=root, step=step, inputs=records)
            continue
        for name, record in records.items():
            building.call(name, kind="label", root=root, step=step, outputs=[record])
    return building.run()


def _loaded(place: Place) -> Any:
    return tree_of(place.path, str(place.path), "save it again")


def _iterations(
    data: Any, name: str
) -> Iterator[tuple[str, Mapping[str, Any], bool, Mapping[str, Any]]]:
    """Returns (runner, {tensor: encoded}, whether they are inputs, marks written by whence) for
    each iteration in a file.
    """
    kind = _kind(data)
    if kind == "RunResults" or (
        isinstance(data, dict) and "lst" in data and not kind.startswith("Accuracy")
    ):
        runners = data["lst"]
        if isinstance(runners, str):  # as TensorRT 7 wrote it
            raise UnreadableRun(
                f"{name} is of a Polygraphy that packed all results into one text; save them "
                "again with a newer one"
            )
        for runner, iterations in runners:
            for iteration in iterations:
                marks = iteration.get("whence") if isinstance(iteration, dict) else None
                yield (
                    _STAMP.sub("", str(runner)),
                    _tensors(iteration, name),
                    False,
                    marks if isinstance(marks, dict) else {},
                )
    elif kind.startswith("Accuracy"):
        raise UnreadableRun(
            f"{name} holds the verdicts of a comparison, no tensors; give what --save-outputs wrote"
        )
    elif kind == "IterationResult":
        yield _STAMP.sub("", str(data.get("runner_name", ""))), _tensors(data, name), False, {}
    elif isinstance(data, list):
        for tensors in data:
            yield "", _mapping(tensors, name), True, {}
    else:
        yield "", _mapping(data, name), True, {}


def _tensors(iteration: Any, name: str) -> Mapping[str, Any]:
    return _mapping(
        iteration.get("outputs", iteration) if isinstance(iteration, dict) else iteration, name
    )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableRun(f"{name} holds no tensors by name where they are expected")
    return {key: item for key, item in value.items() if isinstance(item, dict)}


def _kind(value: Any) -> str:
    """Returns the class that a JSON object encodes, "" for none."""
    if not isinstance(value, dict):
        return ""
    name = value.get("polygraphy_class")
    if isinstance(name, str):
        return name
    return next(
        (
            key.removeprefix("__polygraphy_encoded_")
            for key in value
            if key.startswith("__polygraphy_encoded_")
        ),
        "",
    )


def _record(building: Building, name: str, value: Mapping[str, Any]) -> int:
    """Adds one tensor; reads only its header."""
    for _ in range(3):
        inner = value.get("values", value.get("arr"))
        if not isinstance(inner, dict):
            break
        value = inner
    text = next(
        (value[key] for key in ("array", "tensor", "arr") if isinstance(value.get(key), str)), None
    )
    if text is None:
        where = next((v for v in value.values() if isinstance(v, str) and v.endswith(".json")), "")
        why = (
            f"it was swapped out to {where}, which is gone"
            if where
            else "it holds neither an array nor a tensor"
        )
        return building.tensor("unknown", (), why=why)
    try:
        if "tensor" in value:
            return _torch_record(building, name, text)
        header = numpy_file.header(_bytes(text, _HEAD_CHARS)[: numpy_file.HEAD_BYTES], name)
    except (UnreadableRun, ElementsMissing) as error:
        return building.tensor("unknown", (), why=str(error))

    def load() -> Array:
        data = _bytes(text)
        return numpy_file.array(header, File(data).part(0, len(data)), name)

    return building.tensor(header.dtype, header.shape, None if header.why else load, why=header.why)


def _torch_record(building: Building, name: str, text: str) -> int:
    tensor = torch_file.load(_bytes(text), name)
    if not isinstance(tensor, TorchTensor):
        return building.tensor("unknown", (), why="it is not a tensor that can be read")
    return building.tensor(tensor.dtype, tensor.shape, tensor.array)


def _bytes(text: str, chars: int | None = None) -> bytes:
    """Decodes a text in base64, or in latin-1 as older versions wrote it; only its first characters
    if limited. Raises ElementsMissing.
    """
    part = text if chars is None else text[:chars]
    try:
        if part.startswith(("\x93", "PK\x03")):
            return part.encode("latin-1")
        return base64.b64decode(part, validate=True)
    except (binascii.Error, ValueError, UnicodeEncodeError) as error:
        raise ElementsMissing(f"its text is not base64: {error}") from error
