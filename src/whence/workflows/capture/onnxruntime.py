"""Readers' functions that the capture of ONNX Runtime uses: models, elements of their tensors, and
the place of initialisers in the user's file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import WhenceError
from whence.readers.encodings import onnx_model
from whence.readers.encodings.onnx_tensor import OnnxTensor
from whence.records import External
from whence.store.shards import map_file

if TYPE_CHECKING:
    from whence.instrument.onnxruntime.insides import Reading


def reading() -> Reading:
    """The readers' functions for ONNX files."""
    from whence.instrument.onnxruntime.insides import Reading

    return Reading(_model, _elements, _weights)


def _model(source: str | bytes) -> Any:
    """The model from a file, which is memory-mapped, or from bytes. Raises OSError, ValueError."""
    if isinstance(source, bytes):
        return onnx_model.parse(source)
    if os.path.getsize(source) == 0:  # noqa: PTH202
        raise ValueError("it is empty")
    return onnx_model.parse(map_file(source).data)


def _elements(tensor: OnnxTensor, folder: str) -> Any:
    """The elements of a tensor, or a text that says why there are none. External files are looked
    for in the model's own folder only.
    """
    if why := tensor.why():
        return why
    try:
        return tensor.array(lambda name: _inside(folder, name))
    except (WhenceError, OSError, ValueError) as error:
        return str(error)


def _inside(folder: str, name: str) -> Path:
    base = Path(folder).resolve()
    path = (base / name).resolve()
    if not path.is_relative_to(base):
        raise ValueError(f"its elements are said to lie outside of the model's folder: {name[:80]}")
    return path


class _Weights:
    """Initialisers of a model by size, with the place of each: in the model file or in an external
    file.
    """

    def __init__(self, model: Any, path: str) -> None:
        self._places: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        self._files: dict[str, Any] = {}
        try:
            data = map_file(path)
        except (OSError, ValueError):
            return
        start, end = _address(data), _address(data) + data.size
        self._files[str(Path(path).resolve())] = data
        folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
        # parsed from this memory map, so that addresses are offsets in the file
        for tensor in onnx_model.parse(data.data).graph.initializers.values():
            if tensor.stored != tensor.dtype:  # less than a byte: not as it lies in the file
                continue
            if tensor.external:
                self._beside(tensor, folder)
            elif tensor.raw is not None and len(tensor.raw):
                address = _address(np.frombuffer(tensor.raw, np.uint8))
                if start <= address < end:
                    key = tensor.dtype, len(tensor.raw)
                    self._places[key].append((next(iter(self._files)), address - start))

    def _beside(self, tensor: OnnxTensor, folder: str) -> None:
        try:
            file = str(_inside(folder, tensor.external.get("location", "")))
            offset = int(tensor.external.get("offset", "0"))
            length = int(tensor.external.get("length", "0"))
            if file not in self._files:
                self._files[file] = map_file(file)
        except (OSError, ValueError):
            return
        if 0 <= offset <= offset + length <= self._files[file].size:
            self._places[tensor.dtype, length].append((file, offset))

    def find(self, digest: bytes, dtype: str, seen: Any) -> External | None:
        """The place of these bytes, None when they are not found."""
        from whence.frameworks import host

        for file, offset in self._places.get((dtype, seen.nbytes), ()):
            if host.digest(self._files[file][offset : offset + seen.nbytes]) == digest:
                return External(file, offset, seen.nbytes)
        return None


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _weights(model: Any, path: str) -> Any:
    return _Weights(model, path).find
