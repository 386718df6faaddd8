"""Judges failing comparisons of a test by running the test in other ways of rounding.

`torch.testing.assert_close` and the comparisons of `numpy.testing` are recorded as they compare.
The outcome of the test stays; its report gets a section that says whether rounding explains the
failure.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Comparisons:
    """The comparisons of one run of a test, in order: (actual, expected).

    failed: index of the first that failed, -1 for none. is_passed: let every comparison pass.
    """

    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    failed: int = -1
    is_passed: bool = False

    def note(self, actual: Any, expected: Any) -> None:
        """Record a comparison that is about to be made."""
        self.pairs.append((_kept(actual), _kept(expected)))

    def fails(self) -> None:
        """Mark the comparison that was recorded last as failed."""
        if self.failed < 0:
            self.failed = len(self.pairs) - 1


def _kept(value: Any) -> Any:
    """A copy that the rest of the test cannot change."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    return np.array(value) if isinstance(value, np.ndarray) else value


@contextlib.contextmanager
def watched(comparisons: Comparisons) -> Iterator[None]:
    """Record comparisons inside the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch(comparisons))
        stack.enter_context(_numpy(comparisons))
        yield


@contextlib.contextmanager
def _torch(comparisons: Comparisons) -> Iterator[None]:
    place = sys.modules.get("torch.testing._comparison")
    compare = getattr(place, "not_close_error_metas", None)
    if compare is None:
        yield
        return

    def noted(actual: Any, expected: Any, **how: Any) -> Any:
        comparisons.note(actual, expected)
        if comparisons.is_passed:
            return []
        metas = compare(actual, expected, **how)
        if metas:
            comparisons.fails()
        return metas

    with _replaced(place, "not_close_error_metas", noted):
        yield


@contextlib.contextmanager
def _numpy(comparisons: Comparisons) -> Iterator[None]:
    place = sys.modules.get("numpy.testing._private.utils")
    compare = getattr(place, "assert_array_compare", None)
    if compare is None:
        yield
        return

    def noted(comparison: Any, x: Any, y: Any, *args: Any, **how: Any) -> None:
        comparisons.note(x, y)
        if comparisons.is_passed:
            return
        try:
            compare(comparison, x, y, *args, **how)
        except AssertionError:
            comparisons.fails()
            raise

    with _replaced(place, "assert_array_compare", noted):
        yield


@contextlib.contextmanager
def _replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, function)
    try:
        yield
    finally:
        setattr(place, name, before)


def judged(test: Callable[..., Any], inputs: Mapping[str, Any], seen: Comparisons) -> str:
    """The meaning of a failed comparison, as text. inputs: of the test."""
    from whence.api import accept_comparison
    from whence.report.accept import accepted_text

    number = seen.failed
    actual, expected = seen.pairs[number]

    def program(**arguments: Any) -> dict[str, Any]:
        again = Comparisons(is_passed=True)
        with watched(again):
            test(**arguments)
        there = again.pairs[number]
        return {"actual": there[0], "expected": there[1]}

    try:
        answer = accept_comparison(expected, actual, program, inputs)
    except Exception as error:  # noqa: BLE001 - whatever a test raises that is run again
        return f"CANNOT TELL        run again, the test raises {type(error).__name__}: {error}\n"
    return accepted_text(answer)


def generators() -> Any:
    """States of the random number generators; `restore` resets them to these."""
    from whence.api import generators_now

    return generators_now()
