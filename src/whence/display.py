"""How results and runs show themselves where they are looked at: in a notebook, at a prompt, as a data frame, by name."""

from __future__ import annotations

from typing import Any


class Displayed:
    """Mix-in of what a notebook shows. The words are `report.notebook`'s, looked up when they are asked for."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """For a notebook; every string in it is escaped."""
        from whence.report import notebook

        return notebook.html(self)

    def _repr_markdown_(self) -> str:
        """For what shows Markdown only; every string in it is escaped."""
        from whence.report import notebook

        return notebook.markdown(self)

    def __repr__(self) -> str:
        """One line: a whole comparison would be megabytes."""
        from whence.report import notebook

        return notebook.line(self)


class Framed(Displayed):
    """Mix-in of a comparison: its tables as data frames, its rows by name."""

    __slots__ = ()

    def to_pandas(self, table: str = "pairs") -> Any:
        """A `pandas.DataFrame`. table: "pairs" (a row per pair of tensors), "findings", or "tokens" (of what was generated).

        Figures are float64, NaN where there is none. Raises UsageError for another table, MissingDependency without pandas.
        """
        from whence.report import frames

        return frames.to_pandas(self, table)

    def to_polars(self, table: str = "pairs") -> Any:
        """As `to_pandas`, a `polars.DataFrame`; null where there is no figure."""
        from whence.report import frames

        return frames.to_polars(self, table)

    def __getitem__(self, name: str) -> Any:
        """The rows of a call of the reference, by its name. Raises KeyError with names that are near."""
        from whence.records import lookup

        return lookup.rows(self, name)

    def _ipython_key_completions_(self) -> list[str]:
        """Names of calls, those of findings first."""
        from whence.records import lookup

        return lookup.names_of(self)


class Named(Displayed):
    """Mix-in of a run: its calls and tensors by name."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        """`run["layers.0.mlp"]`: its calls, in order. `run["layers.0.mlp:output.0"]`: elements of the first call that kept them.

        Raises KeyError with names that are near, ElementsMissing.
        """
        from whence.records import lookup

        return lookup.of_run(self, name)

    def _ipython_key_completions_(self) -> list[str]:
        """Names of calls, and of their tensors."""
        from whence.records import lookup

        return lookup.names_in(self)
