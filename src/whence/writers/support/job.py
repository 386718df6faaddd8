"""What every writer needs: it fetches elements, counts what was written, and notes what was not and
why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.records import Call, Ref, Run, Statistics
from whence.records.slots import slot_kind

Tell = Callable[[int, int, str], None]
"""Called now and then with (done, of, what)."""

# of elements without statistics; below, loading the compiled pass costs more than it saves
_KERNELS_FROM_BYTES = 50_000_000
_KINDS = ("param", "input", "output", "mutated")


def silent(count: int, of: int, name: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Written:
    """Result of writing a run. tensors, nbytes: of elements. left_out: why -> names of what the
    format does not hold. described: how many of these have their statistics there.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    described: int = 0
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)


def moved(result: Written, old: Path, new: Path) -> Written:
    """The result after `old` was renamed to `new`."""
    return replace(result, files=tuple(new / file.relative_to(old) for file in result.files))


class Writing:
    """The writing of one run: `array` and `figures` for each sight of a tensor, `done` for the
    result. of: how many sights there are.
    """

    def __init__(self, run: Run, tell: Tell = silent, of: int = 0) -> None:
        self.run, self.files = run, list[Path]()
        self._tell, self._of, self._requested = tell, of, 0
        self._tensors = self._nbytes = self._described = self._measured = 0
        self._left_out: dict[str, list[str]] = {}

    def array(self, record: int, name: str, *, exact: bool = True) -> Array | None:
        """The elements, C order and little endian, mapped if possible; None, noted under `name`,
        if there are none.

        exact: also None for numbers read from a print and for parts of a tensor, which the format
        cannot tell from the tensor.
        """
        self._requested += 1
        self._tell(self._requested, max(self._of, self._requested), name)
        description = self.run.records[record]
        if exact and not description.why and (description.quantum or description.whole):
            self.leave(
                "read from a print: the format would pass its rounded numbers, or those of them "
                "that were printed, for the tensor",
                name,
            )
            return None
        try:
            elements = self.run.array(record)
            want = dtypes.named(description.dtype).numpy
        except (ElementsMissing, KeyError) as error:
            self.leave(f"elements are missing ({error})", name)
            return None
        return np.asarray(elements, dtype=want, order="C")

    def figures(self, record: int, array: Array | None) -> Statistics | None:
        """Statistics of a record, taken from its elements where the run has none."""
        description = self.run.records[record]
        if description.statistics is not None or array is None:
            return description.statistics
        self._measured += array.nbytes
        kernels = True if self._measured > _KERNELS_FROM_BYTES else None
        return host.statistics(
            array.reshape(-1).view(np.uint8), description.dtype, kernels=kernels
        )[0]

    def wrote(self, array: Array) -> None:
        """Count a tensor whose elements were written."""
        self._tensors += 1
        self._nbytes += array.nbytes

    def described(self) -> None:
        """Count a tensor of which only statistics were written."""
        self._described += 1

    def leave(self, why: str, name: str) -> None:
        """Note what the format does not hold."""
        self._left_out.setdefault(why, []).append(name)

    def done(self) -> Written:
        """The outcome."""
        left_out = {why: tuple(names) for why, names in self._left_out.items()}
        return Written(tuple(self.files), self._tensors, self._nbytes, self._described, left_out)


def by_moment(calls: Iterable[Call]) -> dict[tuple[int, int], list[Call]]:
    """Calls by (rank, step), in the order in which they ended; ranks and steps sorted."""
    moments: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        moments.setdefault((call.rank, call.step), []).append(call)
    return dict(sorted(moments.items()))


def refs(call: Call) -> list[Ref]:
    """What a call read and wrote: parameters, inputs, outputs, what it changed, and the rest."""
    return sorted(
        call.refs,
        key=lambda ref: (
            _KINDS.index(kind) if (kind := slot_kind(ref.slot)) in _KINDS else len(_KINDS)
        ),
    )


def name(call: Call, slot: str = "") -> str:
    """A call, or one of its tensors, for people: "layers.0.mlp#1.output.0", the root by its
    name.
    """
    suffix = f"#{call.occurrence}" if call.occurrence else ""
    where = ".".join(part for part in (call.scope, call.op) if part) or call.root
    return f"{where}{suffix}{f'.{slot}' if slot else ''}"


_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]+")


def plain(name: str) -> str:
    """A name within an HDF5 group: without what would end it or lead into another group."""
    return text(name).replace("/", "%2F")


def text(name: str) -> str:
    """A name as UTF-8 holds it, and without what ends a text in C."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "%00")


def file_name(name: str, chars: int = 120) -> str:
    """A part of a file's name that is safe anywhere, for people: its last letters, digits and dots.
    Not unique, may be empty.
    """
    return _UNSAFE.sub("_", name)[-chars:].strip("._-")


def cell(text: str) -> str:
    """A name in a table: what a spreadsheet would take for a formula is quoted."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
