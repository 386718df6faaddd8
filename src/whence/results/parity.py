"""The error of a check that two models compute the same."""

from __future__ import annotations

from whence.results.comparison import Comparison


class ParityError(AssertionError):
    """Two models do not compute the same, or it cannot be told whether they do. comparison: what
    was found.
    """

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


ParityError.__module__ = "whence.testing"  # where users import it from
