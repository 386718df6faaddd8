"""The rows of a comparison by the name of a call, and the mix-in that offers them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whence.display import Displayed
from whence.records.lookup import _unknown


def rows(result: Any, name: str) -> tuple[Any, ...]:
    """The rows of a comparison whose call has this name."""
    matches = tuple(row for row in result.rows if row.name == name)
    if not matches:
        raise KeyError(_unknown(name, names_of(result)))
    return matches


def names_of(result: Any) -> list[str]:
    """Names of the calls of a comparison, those of findings first."""
    names: Iterable[str] = (*(f.name for f in result.findings), *(row.name for row in result.rows))
    present = {row.name for row in result.rows}
    return [name for name in dict.fromkeys(names) if name in present]


class Framed(Displayed):
    """Mix-in of a comparison: its tables as data frames, its rows by name."""

    __slots__ = ()

    def to_pandas(self, table: str = "pairs") -> Any:
        """A `pandas.DataFrame`. table: "pairs" (a row per pair of tensors), "findings", or "tokens"
        (of what was generated).

        Figures are float64, NaN where there is none. Raises UsageError for another table,
        MissingDependency without pandas.
        """
        from whence.report import frames

        return frames.to_pandas(self, table)

    def to_polars(self, table: str = "pairs") -> Any:
        """As `to_pandas`, a `polars.DataFrame`; null where there is no figure."""
        from whence.report import frames

        return frames.to_polars(self, table)

    def __getitem__(self, name: str) -> Any:
        """The rows of a call of the reference, by its name. Raises KeyError with names that are
        near.
        """

        return rows(self, name)

    def _ipython_key_completions_(self) -> list[str]:
        """Names of calls, those of findings first."""

        return names_of(self)
