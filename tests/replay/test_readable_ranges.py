"""Ranges in generated tests: six digits that a person reads, and never a value that was not in the
range.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from whence.replay.export.pytest_text import readable_range as _readable

pytestmark = pytest.mark.torch
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE)
def test_short_and_inside(a, b):
    low, high = min(a, b), max(a, b)
    least, most = _readable(low, high)
    assert low <= least <= most <= high
    if (least, most) != (low, high):
        assert all(
            len(f"{value!r}".lstrip("-").partition("e")[0].replace(".", "").strip("0")) <= 6
            for value in (least, most)
        )


def test_what_it_is_for():
    assert _readable(-3.2535555362701416, 2.75) == (-3.25355, 2.75)
    assert _readable(-0.99999999, 0.99999999) == (-0.999999, 0.999999)
    assert _readable(0.12345678, 0.12345679) == (0.12345678, 0.12345679), (
        "nothing of six digits lies between"
    )
    assert _readable(-math.inf, 65504.0) == (-math.inf, 65504.0)
