"""The figures and verdicts of other tools, as they compute them, for people who must quote them;
whence rests nothing on them. Sources: docs/convert.md.

A view is two files of one name. `comparison/views/NAME.py` computes: `figures(reference, target)`
takes whole tensors of any dtype and returns the figures and why there are none; `decide(rows)`
fills `result` and `message` of each row as the tool would; MOVES_AGAINST_THEMSELVES says whether
the tool compares the input of an operator that only moves or casts elements with its output.
`report/views/NAME.py` has the columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from whence.comparison.views.formulas import Figures
from whence.dtypes import Array
from whence.results import ViewRow


class Tool(Protocol):
    """The module of one tool."""

    MOVES_AGAINST_THEMSELVES: bool

    def figures(self, reference: Array, target: Array) -> tuple[Figures, str]: ...
    def decide(self, rows: Sequence[ViewRow]) -> list[ViewRow]: ...


def tool(name: str) -> Tool:
    """The module of the tool of this name."""
    module: Tool = importlib.import_module(f"whence.comparison.views.{name}")
    return module
