"""SQL queries on the tables of a comparison, answered by DuckDB, which has no access to anything
else.

Rows and verdicts of a saved comparison are read from its file on access, so that a million pairs
need little memory.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from whence import extras
from whence.errors import UnreadableRun, UsageError
from whence.results import Comparison, Row, Verdict
from whence.results.sequence import MadeOnDemand
from whence.workflows.saved import AnyComparison, AnyPath

if TYPE_CHECKING:
    from whence.report.arrow import Table

_BATCH = 2048
QUERY_SECONDS = 60.0
"""Time limit of a statement."""
_ALONE = (
    "SET enable_external_access = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET lock_configuration = true",
)
"""Settings applied before DuckDB sees a user's statement: no file, network, extension or variable
of this program, and no change of these settings.
"""


class Answer(msgspec.Struct, frozen=True):
    """A result: names of its columns, and its rows in batches."""

    columns: tuple[str, ...]
    batches: Iterator[list[tuple[Any, ...]]]


def comparison_tables(
    comparison: AnyComparison,
) -> dict[str, tuple[str, tuple[tuple[str, str], ...]]]:
    """The tables of a comparison: what a row of each is, and its columns as (name, type). Raises
    UnreadableRun.
    """
    return {name: (table.about, table.columns()) for name, table in _tables(comparison).items()}


def to_parquet(
    comparison: AnyComparison,
    path: AnyPath,
    *,
    table: str = "pairs",
) -> int:
    """Write a table of a comparison as a Parquet file, and return how many rows it has.

    comparison: a folder that `compare` wrote, or what it returned. table: one of
    `comparison_tables`. Raises UnreadableRun, UsageError, MissingDependency, StoreFailed.
    """
    from whence.report.arrow import write_parquet
    from whence.store import refuse_url

    refuse_url(path, "a Parquet file is written to this machine")
    return write_parquet(_opened(comparison), os.fspath(path), table)


@contextmanager
def query(
    comparison: AnyComparison, sql: str, *, seconds: float = QUERY_SECONDS
) -> Iterator[Answer]:
    """Ask the tables of a comparison in SQL (DuckDB's dialect); the rows come in batches while the
    context lasts.

    seconds: after which the statement ends, its rows included. The tables lie in a database of
    their own, in a temporary folder; a statement has 1 GB of memory and 4 GB of that folder. It
    reads and writes no other file, loads no extension, and sees no variable. Raises UnreadableRun,
    UsageError (in DuckDB's words), MissingDependency.
    """
    duckdb: Any = extras.needed("duckdb", "whence query")
    from whence.report.arrow import reader

    known = _tables(comparison)
    with tempfile.TemporaryDirectory(prefix="whence-query-") as folder:
        connection = duckdb.connect(str(Path(folder) / "tables.duckdb"))
        limit: threading.Timer | None = None
        try:
            connection.execute("SET memory_limit = '1GB'")
            connection.execute("SET max_temp_directory_size = '4GB'")
            for name in _asked_for(sql, known):
                source = reader(known[name])
                connection.register("source", source)
                connection.execute(f'CREATE TABLE "{name}" AS SELECT * FROM source')
                connection.unregister("source")
            for setting in _ALONE:
                connection.execute(setting)
            limit = threading.Timer(seconds, connection.interrupt)
            limit.daemon = True
            limit.start()
            try:
                cursor = connection.execute(sql)
            except duckdb.InterruptException as error:
                raise UsageError(_too_long(seconds)) from error
            except duckdb.Error as error:
                raise UsageError(
                    f"{str(error).strip()}\n  --tables lists the tables and their columns"
                ) from error
            columns = tuple(column[0] for column in cursor.description or ())
            yield Answer(columns, _rows(cursor, duckdb, seconds) if columns else iter(()))
        finally:
            if limit is not None:
                limit.cancel()
            connection.close()


def _rows(cursor: Any, duckdb: Any, seconds: float) -> Iterator[list[tuple[Any, ...]]]:
    try:
        while rows := cursor.fetchmany(_BATCH):
            yield rows
    except duckdb.InterruptException as error:
        raise UsageError(_too_long(seconds)) from error
    except duckdb.Error as error:
        raise UsageError(str(error).strip()) from error


def _too_long(seconds: float) -> str:
    return (
        f"the statement was ended after {seconds:g} seconds; ask for less (LIMIT, WHERE), or write "
        "the table as Parquet and ask that"
    )


def _asked_for(sql: str, known: dict[str, Table]) -> list[str]:
    """The tables whose names occur in a statement; a name that is used otherwise only
    costs time.
    """
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    return [name for name in known if name in words]


def _tables(comparison: AnyComparison) -> dict[str, Table]:
    from whence.report.arrow import tables

    return tables(_opened(comparison))


def _opened(comparison: AnyComparison) -> Comparison:

    return comparison if isinstance(comparison, Comparison) else without_plan(comparison)


T = TypeVar("T")
# Every item of both lists begins with this field, and no object inside of one does. In a text a
# quotation mark is escaped, so that these bytes are never a part of one.
_FIRST = b'{"pair":'
_NEXT = b"}," + _FIRST
_ROWS, _VERDICTS, _BEHIND = b',"rows":[', b'],"verdicts":[', b'],"headline":'
_PLAN = b',"plan":{"pairs":['


def without_plan(path: AnyPath) -> Comparison:
    """A saved comparison for use in tables: its plan is empty, and rows and verdicts are decoded on
    each access.

    Raises UnreadableRun.
    """
    from whence.store import is_url
    from whence.workflows.saved import load_comparison

    if is_url(os.fspath(path)):
        from whence.workflows.saved_at_url import report_here

        with report_here(os.fspath(path)) as copy:  # its pages outlast its name
            return _of_file(copy, os.fspath(path))
    place = Path(path)
    try:
        return _of_file(place / "report.json" if place.is_dir() else place, os.fspath(path))
    except OSError:
        return load_comparison(place)  # says what is there instead


def _of_file(file: Path, path: str) -> Comparison:
    """The same as `without_plan`, from a file.

    path: as the user named it. Raises UnreadableRun, and OSError when the file cannot be opened.
    """
    from whence.workflows.saved import decoded_report, not_readable

    if not file.stat().st_size:
        return decoded_report(file, path)  # says so
    with file.open("rb") as opened:
        text = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    plan = text.find(_PLAN)
    rows = text.find(_ROWS, plan + len(_PLAN))
    verdicts = text.find(_VERDICTS, rows)
    behind = text.find(_BEHIND, verdicts + len(_VERDICTS))
    if min(plan, rows, verdicts, behind) < 0:
        return decoded_report(file, path)  # written by hand, or by another whence
    rest = text[:plan] + b',"plan":{"pairs":[]}' + _ROWS + _VERDICTS + text[behind:]
    try:
        result = msgspec.json.decode(rest, type=Comparison)
        return msgspec.structs.replace(
            result,
            rows=_items(text, rows + len(_ROWS), verdicts, Row),
            verdicts=_items(text, verdicts + len(_VERDICTS), behind, Verdict),
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableRun(not_readable(path, error)) from error


def _items(text: mmap.mmap, start: int, stop: int, form: type[T]) -> MadeOnDemand[T]:
    """The items of the JSON list between two positions of the text, decoded on access."""
    starts = [start] if stop > start else []
    at = text.find(_NEXT, start, stop)
    while at >= 0:
        starts.append(at + 2)
        at = text.find(_NEXT, at + 2, stop)
    places = np.array([*starts, stop + 1], np.int64)
    decoder: Any = msgspec.json.Decoder(list[form])  # type: ignore[valid-type]

    def made(first: int, last: int) -> Iterator[T]:
        yield from decoder.decode(b"[" + text[int(places[first]) : int(places[last]) - 1] + b"]")

    return MadeOnDemand(len(starts), made)
