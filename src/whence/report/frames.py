"""A Comparison as columns, and as a data frame of pandas or polars, which are imported only when
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from whence.results import Comparison

TABLES = ("pairs", "findings", "tokens")
_FIGURES = "measured"


def columns(result: Comparison, table: str) -> dict[str, list[Any]]:
    """Columns of a table, of equal length; None where a cell is empty. Raises UsageError for an
    unknown table.
    """
    if table == "pairs":
        return _pairs(result)
    if table == "findings":
        from whence.results import Finding

        return _structs(Finding, result.findings)
    if table == "tokens":
        from whence.results import Token

        if result.generation is None:
            raise UsageError(
                "this comparison has no tokens: nothing was generated, or no logits were captured"
            )
        return _structs(Token, result.generation.tokens)
    raise UsageError(f"table {table!r}: {', '.join(TABLES)}")


def to_pandas(result: Any, table: str) -> Any:
    """A pandas.DataFrame of `columns`."""
    values = columns(result, table)
    try:
        import pandas
    except ImportError as error:
        raise _missing("pandas", error) from error
    figures = set(_figures(result)) if table == "pairs" else set()
    series = {
        k: pandas.Series(v, dtype="float64" if k in figures else None) for k, v in values.items()
    }
    return pandas.DataFrame(series)


def to_polars(result: Any, table: str) -> Any:
    """A polars.DataFrame of `columns`."""
    values = columns(result, table)
    try:
        import polars
    except ImportError as error:
        raise _missing("polars", error) from error
    figures = set(_figures(result)) if table == "pairs" else set()
    return polars.DataFrame(
        [
            polars.Series(k, v, dtype=polars.Float64 if k in figures else None, strict=False)
            for k, v in values.items()
        ]
    )


def _missing(package: str, error: ImportError) -> MissingDependency:
    return MissingDependency(
        f"to_{package} needs {package}, which cannot be imported ({error}):  pip install {package}"
    )


def _figures(result: Comparison) -> list[str]:
    """Names of figures, in the order of first occurrence."""
    return list(dict.fromkeys(name for row in result.rows for name in row.measured.values))


def _pairs(result: Comparison) -> dict[str, list[Any]]:
    from whence.results import Row

    out = _structs(Row, result.rows, without=(_FIGURES,))
    out["identical"] = [row.measured.identical for row in result.rows]
    out["why"] = [
        row.measured.why or "; ".join(f"{k}: {v}" for k, v in row.measured.whys.items())
        for row in result.rows
    ]
    out.update(
        {name: [row.measured.values.get(name) for row in result.rows] for name in _figures(result)}
    )
    out["max_abs_index"] = [
        None if (index := row.measured.max_abs_index) is None else list(index)
        for row in result.rows
    ]
    return out


def _structs(
    kind: type[msgspec.Struct], items: Iterable[Any], without: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Columns of structs; a table of numbers inside a struct is expanded to columns of its own."""
    items = list(items)
    out: dict[str, list[Any]] = {}
    for field in kind.__struct_fields__:
        cells = [getattr(item, field) for item in items]
        if field in without:
            continue
        if any(isinstance(cell, dict) for cell in cells):
            for key in dict.fromkeys(key for cell in cells for key in cell):
                out[key if key not in kind.__struct_fields__ else f"{field}.{key}"] = [
                    cell.get(key) for cell in cells
                ]
        elif field != "numbers":
            out[field] = [list(cell) if isinstance(cell, tuple) else cell for cell in cells]
    return out
