"""Tensors in an index of msprobe: leaves of arguments, statistics, digests, files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits, numpy_file, torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.pickle_values import TorchTensor
from whence.readers.source import Place
from whence.records import Statistics

_DEPTH = 64  # of lists and dicts in one argument


def loader(place: Place, file: str) -> Callable[[], Array]:
    """Loads the tensor of a file in the dump. Raises ElementsMissing when called."""

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
    file = File(path, path.name)
    header = numpy_file.header(file.head(numpy_file.HEAD_BYTES), path.name)
    return numpy_file.array(header, file.part(0, file.size), path.name)


def _torch(path: Path) -> Array:
    tensors = list(torch_file.tensors(torch_file.load(path)))
    if len(tensors) != 1 or not isinstance(tensors[0][1], TorchTensor):
        raise ElementsMissing(f"{path.name} holds {len(tensors)} tensors that can be read, not one")
    return tensors[0][1].array()


def leaves(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(slot, leaf) of a tree of arguments, nested lists and dicts: "0.1" or "mask". A leaf is a
    dict with "type", or null.
    """
    if isinstance(tree, dict) and not isinstance(tree.get("type"), str):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        if tree is not None or prefix:
            yield prefix, tree
        return
    if depth >= _DEPTH:
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf describes a tensor."""
    return isinstance(leaf, dict) and "shape" in leaf and "dtype" in leaf


def scalar(leaf: Any) -> Any:
    """A scalar argument as a value."""
    return leaf["value"] if isinstance(leaf, dict) and "value" in leaf else leaf


def figures_of(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two sights of one tensor, or of views of it, have in common."""
    shape = leaf.get("shape")
    count = math.prod(n for n in shape if isinstance(n, int)) if isinstance(shape, list) else -1
    return (
        str(leaf.get("dtype")),
        count,
        str(leaf.get("Max")),
        str(leaf.get("Min")),
        str(leaf.get("md5")) if "Max" not in leaf else "",
    )


def digest_of(value: Any) -> str:
    """A digest with its kind in front, "" for none."""
    if not isinstance(value, str) or not value:
        return ""
    text = value[:64].lower()
    return (
        f"xor:{text}" if text.startswith("0x") else f"{'crc32' if len(text) == 8 else 'md5'}:{text}"
    )


def statistics_of(leaf: Mapping[str, Any], shape: tuple[int, ...]) -> Statistics | None:
    """Figures of a tensor as msprobe took them, in the dtype of the tensor; std follows from norm
    and mean.

    What is not finite is counted once: the dump does not say how often. Where the mean is most of
    the norm, std would be what rounding left of it, and is not given.
    """
    high, low, mean, norm = (_float(leaf.get(key)) for key in ("Max", "Min", "Mean", "Norm"))
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
