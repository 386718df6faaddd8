"""The pytest plugin: two fixtures, and options for comparisons that fail. Loading it imports no
framework and no stage of whence.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from whence.results import Acceptance, Comparison


class Compare(Protocol):
    """The same as `whence.testing.assert_parity`, with a chosen folder."""

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


class Golden(Protocol):
    """The same as `whence.accept`, which must answer that the expectation holds or may be
    renewed.
    """

    def __call__(self, expected: Any, actual: Any = None, **how: Any) -> Acceptance: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("whence")
    group.addoption(
        "--whence-accept",
        action="store_true",
        help="say of comparisons of torch.testing and numpy.testing that fail whether rounding "
        "explains it, by running the test in other ways of rounding",
    )
    group.addoption(
        "--whence-write",
        action="store_true",
        help="renew the files of expected values that the fixture golden says may be renewed",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden("losses.json", program=train)`: fails the test unless the values are those expected,
    or differ by no more than rounding. Files are looked for beside the test.
    """
    from whence.testing import assert_accepted

    folder, write = request.path.parent, bool(request.config.getoption("whence_write"))

    def check(expected: Any, actual: Any = None, **how: Any) -> Acceptance:
        __tracebackhide__ = True
        if isinstance(expected, (str, Path)):
            expected = folder / expected
        return assert_accepted(expected, actual, write=write, **how)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Record the comparisons of a test, when the option for it is set."""
    if not pyfuncitem.config.getoption("whence_accept", False):
        return (yield)
    from whence.testing import caught

    start, seen = caught.generators(), caught.Comparisons()
    try:
        with caught.watched(seen):
            return (yield)
    except AssertionError:
        if seen.failed >= 0:
            start.restore()
            names = pyfuncitem._fixtureinfo.argnames
            inputs = {name: pyfuncitem.funcargs[name] for name in names}
            pyfuncitem.add_report_section(
                "call", "whence accept", caught.judged(pyfuncitem.obj, inputs, seen)
            )
        raise
