"""Prepares a foreign dump for comparison: computes statistics and hashes of its tensors, and finds
equal ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from whence import dtypes
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.readers import ForeignRun
from whence.records import (
    Call,
    Dumped,
    Lack,
    Looked,
    Missing,
    Over,
    Record,
    Ref,
    Run,
    children,
    missing_of,
)
from whence.records.slots import is_written

_PIECES = 100  # of the records, for each thread
_TELLING = 8  # elements from which on equal content is not a coincidence
_SHOWN_BYTES = 4 << 30


class MeasuredRun(Over):
    """A dump with the figures that a capture computes for every tensor (hash, statistics and
    sketch), and with the data flow inferred from equal content.

    A tensor that a call reads and that equals bit by bit an earlier output or input becomes the
    same record; so does a tensor that a call returns and that it received or its children computed.
    Where elements are missing, the dump's digest or equal statistics decide. Tensors of fewer than
    8 elements, or of one value, are equal by chance and stay separate.
    """

    def __init__(self, base: ForeignRun, threads: int | None = None) -> None:
        threads = threads or os.cpu_count() or 1
        at_once = 1 + len(base.records) // (_PIECES * threads)

        def described(start: int) -> list[Record]:
            piece = base.records[start : start + at_once]
            return [_described(base, record) for record in piece]

        with ThreadPoolExecutor(threads) as pool:
            pieces = pool.map(described, range(0, len(base.records), at_once))
            records = [record for piece in pieces for record in piece]
        super().__init__(base, _joined(base.calls, records), records)
        self._damaged = _damaged(base, records)

    @property
    def missing(self) -> Sequence[Missing]:
        """What the dump lacks, and the files of tensors that could not be read."""
        return tuple(dict.fromkeys((*missing_of(self.base), *self._damaged)))


def _damaged(base: Run, records: Sequence[Record]) -> list[Missing]:
    """Returns the files whose tensors exist according to the dump and cannot be read."""
    damaged: dict[str, Missing] = {}
    for before, after in zip(base.records, records, strict=True):
        if after.why and not before.why:
            named = before.elements.file if isinstance(before.elements, Dumped) else ""
            file = named.partition(",")[0] or Path(base.path).name
            text = f"a tensor of {file} cannot be read: {after.why}"
            damaged.setdefault(file, Missing(Lack.DAMAGED, file, text))
    return list(damaged.values())


def with_figures(run: Run) -> Run:
    """Returns the run as `MeasuredRun` when a reader opened it, else the run itself. Reads every
    tensor once.
    """
    return MeasuredRun(run) if isinstance(run, ForeignRun) else run


class ShownRun(Over):
    """A dump whose tensors get their figures when they are displayed."""

    def __init__(self, base: ForeignRun) -> None:
        self._reasons: dict[int, str] = {}
        super().__init__(base, None, Looked(len(base.records), functools.cache(self._looked_at)))

    def _looked_at(self, number: int) -> Record:
        record = self.base.records[number]
        described = _described(self.base, record)
        if described.why and not record.why:
            self._reasons[number] = described.why.removeprefix("cannot be read: ")
        return described

    @property
    def unreadable(self) -> list[str]:
        """Returns what could not be read so far: files and objects that the reader left out, then
        tensors.
        """
        left_out = [note.text for note in self.base.notes if note.kind == "error"]
        return list(dict.fromkeys((*left_out, *self._reasons.values())))


def described_when_shown(run: ForeignRun, *, every: bool) -> Run:
    """Returns a dump as `ShownRun`.

    every: all of its tensors will be displayed; figures are then computed only when that takes
    seconds (up to 4 GiB of elements).
    """
    if not every:
        return ShownRun(run)
    nbytes = sum(
        r.count * dtypes.named(r.dtype).itemsize
        for r in run.records
        if not r.why and r.dtype in dtypes.DTYPES
    )
    return run if nbytes > _SHOWN_BYTES else ShownRun(run)


def _described(run: Run, record: Record) -> Record:
    if record.why or (record.hash and record.statistics and record.sketch):
        return record
    try:
        array = run.array(record.id)
    except ElementsMissing as error:
        return msgspec.structs.replace(record, why=str(error))
    data = (
        np.ascontiguousarray(array, dtype=dtypes.named(record.dtype).numpy)
        .reshape(-1)
        .view(np.uint8)
    )
    statistics, sketch = host.statistics(data, record.dtype)
    return msgspec.structs.replace(
        record, hash=host.digest(data).hex(), statistics=statistics, sketch=sketch
    )


def _joined(calls: Iterable[Call], records: list[Record]) -> list[Call]:
    """Returns the calls, referring to one record where several hold the same tensor."""
    calls = list(calls)
    below = children(calls)
    merged: dict[int, int] = {}
    by_rank: dict[int, dict[Hashable, int]] = {}

    def take(
        refs: Iterable[Ref], among: Callable[[Hashable], int | None], contents: dict[Hashable, int]
    ) -> None:
        for ref in refs:
            content = _content(records[ref.record])
            if content is None or ref.record in merged:
                continue
            first = among(content)
            merged[ref.record] = ref.record if first is None else first
            contents[content] = merged[ref.record]

    todo = [(call, False) for call in reversed(below.get(-1, []))]
    while todo:
        number, inside_done = todo.pop()
        call = calls[number]
        contents = by_rank.setdefault(call.rank, {})
        if not inside_done:
            take((r for r in call.refs if not is_written(r.slot)), contents.get, contents)
            todo.append((number, True))
            todo += [(kid, False) for kid in reversed(below.get(number, []))]
            continue
        inputs = {_content(records[r.record]): merged.get(r.record) for r in call.slots("input")}
        take(
            (r for r in call.refs if is_written(r.slot)),
            (inputs if call.leaf else contents).get,
            contents,
        )

    def joined(ref: Ref) -> Ref:
        record = merged.get(ref.record, ref.record)
        return ref if record == ref.record else Ref(ref.slot, record, "content")

    def files(call: Call) -> dict[str, str]:
        repeats = (r for r in call.refs if merged.get(r.record, r.record) != r.record)
        return {r.slot: records[r.record].file for r in repeats if records[r.record].file}

    return [
        msgspec.structs.replace(call, refs=tuple(map(joined, call.refs)), files=files(call))
        for call in calls
    ]


def _content(record: Record) -> Hashable | None:
    """Returns a key that two records of one tensor share; None where equality could be chance."""
    figures = record.statistics
    if (
        record.whole
        or record.count < _TELLING
        or (figures is not None and figures.min == figures.max)
    ):
        return None
    if record.hash:
        return record.hash, record.dtype, record.shape
    return (
        None if figures is None else (msgspec.structs.astuple(figures), record.dtype, record.shape)
    )
