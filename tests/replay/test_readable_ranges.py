"""Ranges in generated tests: six digits that a person reads, and never a value that was not in the
range.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from whence.replay.export.pytest_text import readable_range as _readable  # noqa: E402
from whence.replay.export.pytest_text import tagged_source  # noqa: E402

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


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("float", "inf", math.inf),
        ("float", "-inf", -math.inf),
        ("complex", [0.5, {"float": "-inf"}], complex(0.5, -math.inf)),
        ("complex", [1, -2.25], complex(1, -2.25)),
        ("dtype", "bfloat16", torch.bfloat16),
        ("device", "cuda:3", torch.device("cpu")),
        ("layout", "torch.strided", torch.strided),
        ("memory_format", "channels_last", torch.channels_last),
    ],
)
def test_arguments_that_json_does_not_know_are_written_as_python(name, given, value):
    assert eval(tagged_source(name, given), {"torch": torch}) == value  # noqa: S307


@pytest.mark.parametrize(
    ("name", "given"), [("float", "1e9; x"), ("dtype", "int; x"), ("complex", [1]), ("other", 1)]
)
def test_no_other_text_is_written_into_a_test(name, given):
    assert tagged_source(name, given) == ""
