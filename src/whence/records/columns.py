"""Fields of all calls and tensors of a run as arrays: a run on disk has them in its index; for any
other they are collected from its calls and records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from whence.dtypes import DTYPES
from whence.records.run import Record, Run
from whence.records.storage import Dumped

Column = np.ndarray[Any, np.dtype[Any]]


class ProgramFields(msgspec.Struct):
    """The fields of a call that tell whether it has a program."""

    leaf: bool = False
    program: str = ""
    no_program: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays over all calls, over their references in the order of the calls, and over all records.

    names: the texts; scope, root, op, slot and dtype are indices into it. refs: number of
    references of each call. count: elements of each record. kept: whether they can be read, as far
    as the run knows.
    """

    names: Sequence[str]
    scope: Column
    root: Column
    op: Column
    rank: Column
    step: Column
    order: Column
    refs: Column
    slot: Column
    record: Column
    dtype: Column
    count: Column
    kept: Column

    def of_names(self, make: Callable[[str], Any]) -> Column:
        """Applies a function to each name; returns an array of the results."""
        return np.array([make(name) for name in self.names])

    def nbytes(self) -> Column:
        """The size in bytes of each record, 0 where its dtype is not known."""
        widths = self.of_names(lambda n: DTYPES[n].itemsize if n in DTYPES else 0)
        return np.where(self.count >= 0, self.count * widths[self.dtype], 0)


@runtime_checkable
class HasColumns(Protocol):
    """A run that has its columns available, and reads some fields of all calls at once."""

    def columns(self) -> Columns: ...
    def calls_as(self, form: Any) -> Any: ...
    def records_as(self, form: Any) -> Any: ...
    def parents(self) -> Column: ...


def columns_of(run: Run) -> Columns:
    """Returns the columns of a run. Reads all of its calls and records where it has
    none available.
    """
    return run.columns() if isinstance(run, HasColumns) else _taken(run)


def program_fields(run: Run) -> Any:
    """Yields every call as `ProgramFields`, or with these fields."""
    return run.calls_as(ProgramFields) if isinstance(run, HasColumns) else run.calls


def has_elements(record: Record) -> bool:
    """Whether the elements of a record can be read, as far as the run knows."""
    return record.elements is not None and not (isinstance(record.elements, Dumped) and record.why)


def _taken(run: Run) -> Columns:
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    calls = [
        (number(c.scope), number(c.root), number(c.op), c.rank, c.step, c.order, len(c.refs))
        for c in run.calls
    ]
    refs = [(number(r.slot), r.record) for c in run.calls for r in c.refs]
    records = [
        (number(r.dtype), -1 if min(r.shape, default=0) < 0 else r.count, has_elements(r))
        for r in run.records
    ]
    scope, root, op, rank, step, order, count = np.array(calls, np.int64).reshape(-1, 7).T
    slot, record = np.array(refs, np.int64).reshape(-1, 2).T
    dtype, elements, kept = np.array(records, np.int64).reshape(-1, 3).T
    return Columns(
        *(tuple(numbers), scope, root, op, rank, step, order, count),
        *(slot, record, dtype, elements, kept > 0),
    )
