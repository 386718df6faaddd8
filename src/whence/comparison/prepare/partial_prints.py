"""Cuts a full tensor to the elements that a truncated print of the other run shows."""

from __future__ import annotations

import msgspec
import numpy as np

from whence.dtypes import Array
from whence.readers import ForeignRun
from whence.records import Key, Over, Record, Run
from whence.store import StoredRun


def alike(reference: Run, target: Run) -> tuple[Run, Run]:
    """Both runs, with tensors of one key cut to the same elements if one is a printed summary and
    their full shapes agree.

    A summary shows both ends of long axes (`Record.whole`). The runs themselves are returned if
    nothing has to be cut.
    """
    dumps = [run for run in (reference, target) if not isinstance(run, StoredRun)]
    if not any(r.whole for run in dumps for r in run.records):
        return reference, target
    others = _by_key(target)
    cut: tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]] = ({}, {})
    for key, number in _by_key(reference).items():
        if key not in others:
            continue
        reference_record, target_record = reference.records[number], target.records[others[key]]
        if reference_record.shape != target_record.shape and (
            reference_record.whole or reference_record.shape
        ) == (target_record.whole or target_record.shape):
            shape = tuple(
                min(pair) for pair in zip(reference_record.shape, target_record.shape, strict=True)
            )
            for table, record in zip(cut, (reference_record, target_record), strict=True):
                if record.shape != shape and not record.why:
                    table[record.id] = shape
    return _cut(reference, cut[0]), _cut(target, cut[1])


def _by_key(run: Run) -> dict[Key, int]:
    return {call.key(ref.slot): ref.record for call in run.calls for ref in call.refs}


def _cut(run: Run, table: dict[int, tuple[int, ...]]) -> Run:
    if not table:
        return run
    out = _Cut(run, table)
    return ForeignRun(out, run.reader) if isinstance(run, ForeignRun) else out


class _Cut(Over):
    """A run in which some tensors are cut to the ends of their axes."""

    def __init__(self, base: Run, table: dict[int, tuple[int, ...]]) -> None:
        def shown(record: Record) -> Record:
            if record.id not in table:
                return record
            whole = record.whole or record.shape
            return msgspec.structs.replace(
                record,
                shape=table[record.id],
                whole=whole,
                hash="",
                statistics=None,
                sketch=None,
                stride=(),
            )

        super().__init__(base, None, [shown(record) for record in base.records])
        self._table = table

    def array(self, record: int) -> Array:
        """Elements of a record. Raises ElementsMissing."""
        array = self.base.array(record)
        for axis, extent in enumerate(self._table.get(record, array.shape)):
            if extent < array.shape[axis]:
                edge = extent // 2
                array = np.take(
                    array,
                    [*range(edge), *range(array.shape[axis] - (extent - edge), array.shape[axis])],
                    axis,
                )
        return array
