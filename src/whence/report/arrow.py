"""The tables of a comparison as batches of Arrow, and as a Parquet file: written as they are read,
so that a million rows need little memory. pyarrow is imported when it is asked for.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from whence import extras
from whence.errors import StoreFailed, UsageError
from whence.report.own_files import MARK

if TYPE_CHECKING:
    from whence.results import Comparison, Row

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]
_BATCH = 8192


class Table(NamedTuple):
    """A table: what a row of it is, its columns as (name, type), which may take reading all of it,
    and its rows in turn as tuples.
    """

    about: str
    columns: Callable[[], Columns]
    rows: Callable[[], Iterator[tuple[Any, ...]]]


_ROW = (
    ("pair", "int64"), ("name", "string"), ("op_type", "string"), ("step", "int64"),
    ("rank", "int64"), ("occurrence", "int64"), ("verdict", "string"), ("rule", "string"),
    ("reference_slot", "string"), ("target_slot", "string"), ("reference_dtype", "string"),
    ("target_dtype", "string"), ("reference_shape", "list"), ("target_shape", "list"),
    ("reference_record", "int64"), ("target_record", "int64"),
)  # fmt: skip
_VERDICT = (
    ("pair", "int64"), ("verdict", "string"), ("evidence", "string"), ("confidence", "string"),
    ("score", "float64"), ("cause", "string"), ("stretch", "int64"), ("slot", "string"),
    ("where", "string"), ("operator", "string"), ("side", "string"), ("source", "string"),
    ("reason", "string"), ("sentence", "string"), ("numbers", "map"),
)  # fmt: skip
_OF_CALL = (
    ("name", "string"), ("op_type", "string"), ("step", "int64"), ("rank", "int64"),
    ("occurrence", "int64"),
)  # fmt: skip
_FINDING = (
    ("name", "string"), ("op_type", "string"), ("cause", "string"), ("verdict", "string"),
    ("confidence", "string"), ("evidence", "string"), ("step", "int64"), ("rank", "int64"),
    ("occurrence", "int64"), ("pair", "int64"), ("root", "string"), ("slot", "string"),
    ("operator", "string"), ("side", "string"), ("phase", "string"), ("source", "string"),
    ("sentence", "string"), ("also", "strings"), ("worst_index", "list"),
    ("worst_reference", "float64"), ("worst_target", "float64"), ("numbers", "map"),
)  # fmt: skip
_TOKEN = (
    ("prompt", "int64"), ("index", "int64"), ("step", "int64"), ("row", "int64"),
    ("target_step", "int64"), ("target_row", "int64"), ("reference", "int64"), ("target", "int64"),
    ("verdict", "string"), ("score", "float64"), ("why", "string"), ("numbers", "map"),
)  # fmt: skip
_SUMMARY = (
    ("status", "string"), ("evidence", "string"), ("headline", "string"), ("reference", "string"),
    ("target", "string"), ("unmatched", "int64"), ("incomparable", "int64"),
)  # fmt: skip


def tables(result: Comparison) -> dict[str, Table]:
    """The tables of a comparison by name."""
    generation = result.generation
    pairs = _Pairs(result)

    def plain(about: str, columns: Columns, items: Iterable[Any]) -> Table:
        return Table(about, lambda: columns, lambda: _of_fields(columns, items))

    return {
        "pairs": Table(
            "a pair of tensors, with everything that was measured", pairs.columns, pairs.rows
        ),
        "calls": Table(
            "what was judged of a pair of calls, or of the code between two calls in it",
            lambda: (*_VERDICT[:1], *_OF_CALL, *_VERDICT[1:]),
            lambda: _calls(result),
        ),
        "findings": plain("an operator at fault", _FINDING, result.findings),
        "unpaired": Table(
            "the name of a call without a partner",
            lambda: (("side", "string"), ("name", "string")),
            lambda: ((side, n) for side, names in result.without_partner.items() for n in names),
        ),
        "notes": Table(
            "what else was seen",
            lambda: (("note", "string"),),
            lambda: ((note,) for note in result.notes),
        ),
        "tokens": plain(
            "a token that both runs chose",
            _TOKEN,
            generation.tokens if generation is not None else (),
        ),
        "summary": plain("the answer", _SUMMARY, [result]),
    }


def named(result: Comparison, table: str) -> Table:
    """One of the tables. Raises UsageError with those that there are."""
    known = tables(result)
    if table not in known:
        raise UsageError(f"table {table!r}: there are {', '.join(known)}")
    return known[table]


def reader(table: Table) -> Any:
    """A `pyarrow.RecordBatchReader` of a table, whose batches are made as they are read. Raises
    MissingDependency.
    """
    arrow = extras.needed("pyarrow", "a table of a comparison")
    kinds = table.columns()
    schema = arrow.schema([(name, _type(arrow, kind)) for name, kind in kinds])

    def batches() -> Iterator[Any]:
        for rows in _batches(table.rows()):
            columns = zip(*rows, strict=True)
            arrays = [
                arrow.array(_cells(kind, cells), _type(arrow, kind))
                for (_, kind), cells in zip(kinds, columns, strict=True)
            ]
            yield arrow.record_batch(arrays, schema=schema)

    return arrow.RecordBatchReader.from_batches(schema, batches())


def to_arrow(result: Any, table: str) -> Any:
    """A `pyarrow.Table`. Raises UsageError, MissingDependency."""
    return reader(named(result, table)).read_all()


def write_parquet(result: Any, path: str | Path, table: str) -> int:
    """Write a table as a Parquet file, batch by batch, and return how many rows it has. Raises
    UsageError, MissingDependency, StoreFailed.
    """
    parquet = extras.needed("pyarrow.parquet", "a Parquet file")
    source, file = reader(named(result, table)), Path(path)
    fresh = file.with_name(f".{file.name}.unfinished")
    rows = 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        schema = source.schema.with_metadata({"origin": MARK})
        with parquet.ParquetWriter(str(fresh), schema, compression="zstd") as writer:
            for batch in source:
                writer.write_batch(batch)
                rows += batch.num_rows
        fresh.replace(file)
    except OSError as error:
        raise StoreFailed(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        fresh.unlink(missing_ok=True)
    return rows


def _type(arrow: ModuleType, kind: str) -> Any:
    if kind == "list":
        return arrow.list_(arrow.int64())
    if kind == "strings":
        return arrow.list_(arrow.string())
    if kind == "map":
        return arrow.map_(arrow.string(), arrow.float64())
    return getattr(arrow, {"bool": "bool_"}.get(kind, kind))()


def _cells(kind: str, cells: Iterable[Any]) -> list[Any]:
    if kind == "map":
        return [list(cell.items()) for cell in cells]
    if kind == "string":  # names come from runs, and a run may hold half of a pair of surrogates
        return [None if c is None else c.encode("utf-8", "replace").decode() for c in cells]
    return list(cells)


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


def _of_fields(columns: Columns, items: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    names = [name for name, _ in columns]
    for item in items:
        yield tuple([getattr(item, name) for name in names])


class _Pairs:
    """The table "pairs", with a column for every figure that any of its rows has."""

    def __init__(self, result: Comparison) -> None:
        self._result = result

    @functools.cached_property
    def _metrics(self) -> tuple[str, ...]:
        names: dict[str, object] = {}
        for row in self._result.rows:
            if not row.measured.values.keys() <= names.keys():
                names |= row.measured.values
        return tuple(names)

    def columns(self) -> Columns:
        """Fields of the pair, what was measured, and where the largest error is."""
        taken = {name for name, _ in _ROW}
        figures = [name if name not in taken else f"figure_{name}" for name in self._metrics]
        return (
            *_ROW,
            *(("identical", "bool"), ("tier", "string"), ("why", "string")),
            *((name, "float64") for name in figures),
            ("max_abs_index", "list"),
        )

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """A row of each pair."""
        metrics = self._metrics
        fields: Callable[[Row], tuple[Any, ...]] = operator.attrgetter(*(name for name, _ in _ROW))
        for row in self._result.rows:
            measured = row.measured
            why = measured.why or "; ".join(f"{k}: {v}" for k, v in measured.whys.items())
            figures = tuple([measured.values.get(metric) for metric in metrics])
            known = (measured.identical, measured.tier, why)
            yield fields(row) + known + figures + (measured.max_abs_index,)


def _calls(result: Comparison) -> Iterator[tuple[Any, ...]]:
    known: dict[int, tuple[Any, ...]] = {}
    for row in result.rows:
        if row.pair not in known:
            known[row.pair] = tuple([getattr(row, name) for name, _ in _OF_CALL])
    nothing = (None,) * len(_OF_CALL)
    fields = [name for name, _ in _VERDICT[1:]]
    for verdict in result.verdicts:
        yield (
            verdict.pair,
            *known.get(verdict.pair, nothing),
            *[getattr(verdict, name) for name in fields],
        )
