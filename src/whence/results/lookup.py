"""The modules of a comparison by name, its tables as data frames: a mix-in that offers them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whence.display import Displayed
from whence.records.lookup import unknown
from whence.results.module import ModuleResult, module_result


def names_of(result: Any) -> list[str]:
    """Names of the calls of a comparison, those of findings first."""
    names: Iterable[str] = (*(f.name for f in result.findings), *(row.name for row in result.rows))
    present = {row.name for row in result.rows}
    return [name for name in dict.fromkeys(names) if name in present]


def _absent(result: Any, name: str) -> str:
    """Why there is no such name, with names that are near."""
    for side, names in result.without_partner.items():
        if name in names:
            return (
                f"{name!r} has more than one possible partner, and was not compared"
                if side == "ambiguous"
                else f"{name!r} is in the {side} alone, and was not compared"
            )
    return unknown(name, names_of(result))


class Framed(Displayed):
    """Mix-in of a comparison: its tables as data frames, its modules by name."""

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

    def to_arrow(self, table: str = "pairs") -> Any:
        """A `pyarrow.Table`. table: one of those that `whence query CMP --tables` lists. Raises
        UsageError for another table, MissingDependency without pyarrow.
        """
        from whence.report import arrow

        return arrow.to_arrow(self, table)

    def to_parquet(self, path: str, table: str = "pairs") -> int:
        """Write a table as a Parquet file, batch by batch, and return how many rows it has. Raises
        as `to_arrow` does, and StoreFailed.
        """
        from whence.report import arrow

        return arrow.write_parquet(self, path, table)

    def __getitem__(self, name: str) -> ModuleResult:
        """What it says of a module of the reference, by its name: verdict, evidence, calls and
        tensors. Raises KeyError with names that are near.
        """
        whole: Any = self
        module = module_result(name, whole.rows, whole.verdicts, whole.findings)
        if module is None:
            raise KeyError(_absent(whole, name))
        return module

    def _ipython_key_completions_(self) -> list[str]:
        """Names of calls, those of findings first."""
        return names_of(self)
