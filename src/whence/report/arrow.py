"""The tables of a comparison as Arrow batches and as a Parquet file. Rows are written as they are
read, so that a million rows need little memory. pyarrow is imported only here, when needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from whence import extras
from whence.errors import StoreFailed, UsageError
from whence.report.own_files import MARK
from whence.results import Comparison, Finding, LayerCost, Row, Token, Verdict

Columns = tuple[tuple[str, str], ...]
_BATCH = 8192


class Table(NamedTuple):
    """A table: what one row stands for, its columns as (name, type) (computing them may require
    reading every row), and its rows as tuples.
    """

    about: str
    columns: Callable[[], Columns]
    rows: Callable[[], Iterator[tuple[Any, ...]]]


_KINDS: dict[Any, str] = {
    int: "int64",
    float: "float64",
    bool: "bool",
    tuple[int, ...]: "list",
    tuple[str, ...]: "strings",
    dict[str, float | None]: "map",
}
_KINDS |= {kind | None: name for kind, name in _KINDS.items()}


def _columns(struct: type, *names: str) -> Columns:
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return tuple((name, _KINDS.get(types[name], "string")) for name in names)


_ROW = _columns(
    Row, "pair", "name", "op_type", "step", "rank", "occurrence", "verdict", "rule",
    "reference_slot", "target_slot", "reference_dtype", "target_dtype", "reference_shape",
    "target_shape", "reference_record", "target_record",
)  # fmt: skip
_VERDICT = _columns(
    Verdict, "pair", "verdict", "evidence", "confidence", "score", "cause", "stretch", "slot",
    "where", "operator", "side", "source", "reason", "sentence", "numbers",
)  # fmt: skip
_OF_CALL = _columns(
    Row, "name", "op_type", "step", "rank", "occurrence",
)  # fmt: skip
_FINDING = _columns(
    Finding, "name", "op_type", "cause", "verdict", "confidence", "evidence", "step", "rank",
    "occurrence", "pair", "root", "slot", "operator", "side", "phase", "source", "sentence", "also",
    "worst_index", "worst_reference", "worst_target", "numbers",
)  # fmt: skip
_TOKEN = _columns(
    Token, "prompt", "index", "step", "row", "target_step", "target_row", "reference", "target",
    "verdict", "score", "why", "numbers",
)  # fmt: skip
_LAYER = _columns(LayerCost, *LayerCost.__struct_fields__)
_SUMMARY = _columns(
    Comparison, "status", "evidence", "headline", "reference", "target", "unmatched",
    "incomparable",
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
        "layers": plain("a quantised layer, and what it costs", _LAYER, result.layer_costs),
        "summary": plain("the answer", _SUMMARY, [result]),
    }


def named(result: Comparison, table: str) -> Table:
    """One of the tables. Raises UsageError, listing the available ones."""
    known = tables(result)
    if table not in known:
        raise UsageError(f"table {table!r}: there are {', '.join(known)}")
    return known[table]


def reader(table: Table) -> Any:
    """A `pyarrow.RecordBatchReader` over a table, which makes batches as they are read. Raises
    MissingDependency.
    """
    arrow = extras.needed("pyarrow", "a table of a comparison")
    kinds = table.columns()
    schema = arrow.schema([(name, _type(arrow, kind)) for name, kind in kinds])

    def batches() -> Iterator[Any]:
        left = table.rows()
        while rows := list(islice(left, _BATCH)):
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
    """Write a table as a Parquet file, batch by batch, and return its number of rows. Raises
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
    if kind == "map":
        return arrow.map_(arrow.string(), arrow.float64())
    of = {"list": "int64", "strings": "string"}.get(kind)
    if of is not None:
        return arrow.list_(getattr(arrow, of)())
    return getattr(arrow, {"bool": "bool_"}.get(kind, kind))()


def _cells(kind: str, cells: Iterable[Any]) -> list[Any]:
    if kind == "map":
        return [list(cell.items()) for cell in cells]
    if kind == "string":  # names come from runs and may contain half of a surrogate pair
        return [None if c is None else c.encode("utf-8", "replace").decode() for c in cells]
    return list(cells)


def _of_fields(columns: Columns, items: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    names = [name for name, _ in columns]
    for item in items:
        yield tuple([getattr(item, name) for name in names])


class _Pairs:
    """The table "pairs", with a column for every figure that occurs in any row."""

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
        """Columns: fields of the pair, its figures, and the index of the largest error."""
        taken = {name for name, _ in _ROW}
        figures = [name if name not in taken else f"figure_{name}" for name in self._metrics]
        return (
            *_ROW,
            *(("identical", "bool"), ("tier", "string"), ("why", "string")),
            *((name, "float64") for name in figures),
            ("max_abs_index", "list"),
        )

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yields one row for each pair."""
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
