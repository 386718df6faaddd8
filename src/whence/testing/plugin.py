"""The pytest plugin: one fixture, nothing else. Loading it imports no framework and no stage of
whence.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from whence.results import Comparison


class Compare(Protocol):
    """As `whence.testing.assert_parity`, the folder being chosen."""

    def __call__(
        self, model_a: Any, model_b: Any, inputs: Any = None, **how: Any
    ) -> Comparison: ...


@pytest.fixture
def whence_compare(tmp_path: Path) -> Compare:
    """`whence_compare(model_a, model_b, inputs)`: fails the test unless both compute the same. Kept
    in `tmp_path`: whence, whence-2 ...
    """
    from whence.testing import assert_parity

    def compare(model_a: Any, model_b: Any, inputs: Any = None, **how: Any) -> Comparison:
        __tracebackhide__ = True
        count = len(list(tmp_path.glob("whence*")))
        folder = how.pop("folder", None) or tmp_path / (
            "whence" if not count else f"whence-{count + 1}"
        )
        return assert_parity(model_a, model_b, inputs, folder, **how)

    return compare
