"""Finds in the files of a library the tensors that labels wait for."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.errors import UnreadableRun
from whence.instrument.labels.labels import Waiting
from whence.instrument.labels.library import anywhere, decoded

if TYPE_CHECKING:
    from whence.readers.ascend.atb_file import Stored

_OLDER_S = 2.0  # file systems' clocks


class StoredTensor(NamedTuple):
    """A tensor in a file. why: there are no elements."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]
    why: str


@dataclass(slots=True)
class FoundLabel:
    """A label and what is known of its tensor."""

    name: str
    side: str
    label_id: str
    task: str
    number: int
    time_ns: int
    rank: int
    code: str
    source: StoredTensor | None = None
    why: str = ""
    late: bool = False


def resolved(
    waiting: list[Waiting], library: Mapping[str, Any] | None, since: float, wait_s: float
) -> list[FoundLabel]:
    until = time.monotonic() + wait_s
    while True:
        labels = _looked_up(waiting, library, since)
        if not any(label.late for label in labels) or time.monotonic() >= until:
            return labels
        time.sleep(0.1)


def _looked_up(
    waiting: list[Waiting], library: Mapping[str, Any] | None, since: float
) -> list[FoundLabel]:
    chosen_library = decoded(library) if library is not None else None
    out: list[FoundLabel] = []
    of_file: dict[tuple[Path, ...], list[FoundLabel]] = defaultdict(list)
    for label in waiting:
        found_label = FoundLabel(
            label.name,
            label.side,
            label.id,
            label.task,
            label.number,
            label.at,
            label.rank,
            label.source,
        )
        out.append(found_label)
        where = chosen_library or anywhere("", label.cwd)
        tried = where.places(label)
        files = next((m for pattern in tried if (m := _matches(pattern))), [])
        fresh = [file for file in files if file.stat().st_mtime >= since - _OLDER_S]
        if fresh:
            of_file[tuple(fresh)].append(found_label)
            continue
        found_label.late = True
        if files:
            found_label.why = f"{files[-1]} is older than this run"
        else:
            also = (
                f", nor at {len(tried) - 1} other places of {where.name or 'this name'}"
                if len(tried) > 1
                else ""
            )
            found_label.why = f"{label.file} never appeared (not at {tried[-1]}{also})"
    for files_, labels in of_file.items():
        _share(files_, labels)
    return out


def _matches(pattern: str) -> list[Path]:
    """Files that a pattern fits; numbers in their paths in the order of their values."""
    root = Path(pattern).anchor
    files = [p for p in Path(root).glob(pattern[len(root) :]) if p.is_file()]
    return sorted(
        files,
        key=lambda p: [
            (int(n), "") if n.isdigit() else (-1, n) for n in re.split(r"(\d+)", str(p))
        ],
    )


def _share(files: tuple[Path, ...], labels: list[FoundLabel]) -> None:
    """Give the tensors of these files to the labels that mean them, in order.

    A file is written again and again, or behind itself, or in a folder per token: one tensor for
    many labels is the last one's.
    """
    sources: list[StoredTensor] = []
    for file in files:
        try:
            sources += _sources(file)
        except (UnreadableRun, OSError, ValueError) as error:
            for label in labels:
                label.why, label.late = str(error), True
            return
    words = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    if len(sources) == 1 or (len(files) == 1 and len(sources) > len(labels)):
        for label in labels:
            label.why = f"written over: {words} holds what came last"
        pairs = list(zip(reversed(labels), reversed(sources)))
    elif len(sources) == len(labels):
        pairs = list(zip(labels, sources))
    else:
        pairs = []
        for label in labels:
            label.why = (
                f"{words} hold {len(sources)} tensors for {len(labels)} labels of that "
                "name: which is whose is not known"
            )
    for label, source in pairs:
        label.source, label.why, label.late = source, "", "cut short" in source.why


def _sources(file: Path) -> list[StoredTensor]:
    if file.suffix == ".npy":
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            return [
                StoredTensor(file, "", (), lambda: np.zeros(0), f"cut short or no array: {error}")
            ]
        from whence import dtypes

        name, why = str(array.dtype), ""
        try:
            name = dtypes.of(array).name
        except KeyError as error:
            why = str(error.args[0])
        return [StoredTensor(file, name, tuple(array.shape), lambda: array, why)]
    from whence.readers.ascend import atb_file

    return [stored_tensor(file, tensor) for tensor in atb_file.tensors(file)]


def stored_tensor(file: Path, tensor: Stored) -> StoredTensor:
    from whence.readers.ascend import atb_file

    if tensor.data:
        tensor = tensor._replace(
            why=f"refers to {tensor.data[:80]}, where the same elements were saved before"
        )
    return StoredTensor(
        file,
        tensor.type.dtype or tensor.type.name,
        tensor.shape,
        lambda: atb_file.elements(file, tensor),
        tensor.why,
    )
