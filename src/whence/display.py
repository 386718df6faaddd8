"""How results and runs show themselves where they are looked at: in a notebook, at a prompt, as a
data frame, by name.
"""

from __future__ import annotations


class Displayed:
    """Mix-in of what a notebook shows. The words are `report.notebook`'s, looked up when they are
    asked for.
    """

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
