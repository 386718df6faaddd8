"""A run of a quantised graph with the numbers that its codes stand for."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.records import Looked, Over, Record, Run
from whence.records.quantised import Grid, numbers

_HELD_BYTES = 256 << 20


class Decoded(NamedTuple):
    """A tensor to be made. source: record of codes, or of numbers whose axes alone change."""

    source: int
    grid: Grid
    is_coded: bool


class DecodedRun(Over):
    """A run with made tensors behind its own: numbers of codes, in the order of axes in which ONNX
    has them. Elements are made when they are asked for.
    """

    def __init__(self, base: Run, made: Sequence[Decoded]) -> None:
        self._first, self._made = len(base.records), made
        self._held: OrderedDict[int, Array] = OrderedDict()
        self._bytes = 0
        super().__init__(base, None, Looked(self._first + len(made), functools.cache(self._record)))

    def array(self, record: int) -> Array:
        """Elements of a record, read-only. Raises ElementsMissing."""
        if record < self._first:
            return self.base.array(record)
        if record not in self._held:
            made = self._made[record - self._first]
            array = decoded(self.base, made)
            array.flags.writeable = False
            self._held[record] = array
            self._bytes += array.nbytes
            while self._bytes > _HELD_BYTES and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
            return array
        self._held.move_to_end(record)
        return self._held[record]

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return (self.base, record) if record < self._first else None

    def _record(self, record: int) -> Record:
        if record < self._first:
            return self.base.records[record]
        made = self._made[record - self._first]
        source = self.base.records[made.source]
        try:
            array = self.array(record)
        except ElementsMissing as error:
            return Record(record, "float32", _shape(source.shape, made.grid), why=str(error))
        statistics, sketch = host.statistics(array.reshape(-1).view(np.uint8), "float32")
        return Record(record, "float32", array.shape, statistics=statistics, sketch=sketch)


def decoded(run: Run, made: Decoded) -> Array:
    """The numbers of a tensor of codes, float32. Raises ElementsMissing."""
    array = run.array(made.source)
    if made.is_coded:
        array = numbers(array, *made.grid.steps(run.array, array.ndim))
    if made.grid.channels_last and array.ndim > 2:
        array = np.moveaxis(array, -1, 1)
    return np.array(array, dtype=np.float32, order="C")


def _shape(shape: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
    return (shape[0], shape[-1], *shape[1:-1]) if grid.channels_last and len(shape) > 2 else shape
