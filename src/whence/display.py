"""How results and runs show themselves where they are looked at: in a notebook, at a prompt, as a
data frame, by name.
"""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int, apart: str = ", ") -> str:
    """Names in a sentence: "a, b and 3 more"."""
    more = len(names) - most
    return apart.join(names[:most]) + (f" and {more:,} more".replace(",", " ") if more > 0 else "")


class Described:
    """Mix-in of what says at a prompt what it is, in one to ten lines, where a struct would list
    its fields. The words are `report.prompt`'s, looked up when they are asked for.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        from whence.report import prompt

        return prompt.text(self)


class Displayed(Described):
    """Mix-in of what has a rich display in a notebook beside it, by `report.notebook`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """For a notebook; every string in it is escaped."""
        from whence.report import notebook

        return notebook.html(self)

    def _repr_markdown_(self) -> str:
        """For what shows Markdown only; every string in it is escaped."""
        from whence.report import notebook

        return notebook.markdown(self)
