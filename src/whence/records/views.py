"""Runs that wrap other runs: in memory, with replaced parts, or with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records.collective import Collective
from whence.records.lookup import Named
from whence.records.missing import Missing, files_of, missing_of
from whence.records.program import Program
from whence.records.run import Call, Note, Record, Run, RunInfo, Step, collectives_of

T = TypeVar("T")


class MemoryRun(Named):
    """A Run held in memory: hand-made ones in tests, small foreign dumps, results of an engine.

    arrays: elements by record id; a record without an entry has none (`Record.why` states why).
    Raises ValueError when ids are not positions or a call refers to a record that does not exist.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        records: Sequence[Record],
        arrays: Mapping[int, Array],
        *,
        path: str = "<memory>",
        info: RunInfo | None = None,
        programs: Mapping[str, Program] | None = None,
        notes: Sequence[Note] = (),
        steps: Sequence[Step] = (),
        collectives: Sequence[Collective] = (),
        ended: str = "",
        missing: Sequence[Missing] | None = None,
    ) -> None:
        for i, call in enumerate(calls):
            if call.id != i:
                raise ValueError(f"call at position {i} has id {call.id}")
            for ref in call.refs:
                if not 0 <= ref.record < len(records):
                    raise ValueError(
                        f"call {call.module_name!r} refers to record {ref.record} of {len(records)}"
                    )
        for i, record in enumerate(records):
            if record.id != i:
                raise ValueError(f"record at position {i} has id {record.id}")
        self.path, self.info, self.ended = path, info or RunInfo(), ended
        self.calls, self.records = tuple(calls), tuple(records)
        self.programs, self.notes, self.steps = dict(programs or {}), tuple(notes), tuple(steps)
        self.collectives, self.missing = tuple(collectives), missing
        self._arrays = dict(arrays)

    def array(self, record: int) -> Array:
        try:
            elements = self._arrays[record]
        except KeyError:
            raise ElementsMissing(
                self.records[record].why or f"record {record}: elements were not kept"
            ) from None
        view = elements.view()
        view.flags.writeable = False
        return view


class Over(Named):
    """A Run that wraps another one, `base`: everything that is not replaced comes from `base`,
    elements included.
    """

    def __init__(
        self,
        base: Run,
        calls: Sequence[Call] | None = None,
        records: Sequence[Record] | None = None,
    ) -> None:
        self.base = base
        self.path, self.info, self.ended = base.path, base.info, base.ended
        self.programs, self.notes, self.steps = base.programs, base.notes, base.steps
        self.collectives = collectives_of(base)
        self.calls: Sequence[Call] = base.calls if calls is None else calls
        self.records: Sequence[Record] = base.records if records is None else records

    @property
    def missing(self) -> Sequence[Missing]:
        """What the other run lacks, recomputed on each access: reading elements may reveal more."""
        return missing_of(self.base)

    @property
    def files(self) -> Mapping[str, bool]:
        """Returns the files that the other run was read from."""
        return files_of(self.base)

    def array(self, record: int) -> Array:
        return self.base.array(record)

    def below(self, record: int) -> tuple[Run, int] | None:
        """Returns (the run, the number of its record) whose elements a record has unchanged; None
        where this run computes them.
        """
        return (self.base, record) if type(self).array is Over.array else None


class Looked(Sequence[T]):
    """A sequence whose items are looked up by position, from 0 to `length`, and not kept.

    every: returns all of them in turn, where that is faster.
    """

    def __init__(
        self,
        length: int,
        one: Callable[[int], T],
        every: Callable[[], Iterator[T]] | None = None,
    ) -> None:
        self._length, self._item, self._every = length, one, every

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"{index} of {self._length}")
        return self._item(index % self._length)

    def __iter__(self) -> Iterator[T]:
        return self._every() if self._every is not None else map(self._item, range(self._length))


class ForeignRun(Over):
    """A run that a reader opened. reader: its name."""

    def __init__(self, base: Run, reader: str) -> None:
        super().__init__(base)
        self.reader = reader


class CachedRun(Over):
    """A run whose calls and records are read once and kept, since they are accessed many times."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, list(run.calls), list(run.records))
