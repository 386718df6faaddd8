"""Which dtype recorded numbers were rounded to: told by the bits they use, and by nothing else."""

import ml_dtypes
import numpy as np
import pytest

from whence.comparison.prepare.stored_precision import as_computed, held
from whence.workflows.capture.arrays import in_memory

NARROW = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def normal(n=300, seed=0):
    return np.random.default_rng(seed).standard_normal(n)


@pytest.mark.parametrize("stored", [np.float64, np.float32])
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("shape", [(300,), (3, 100), (20, 3, 5)])
def test_numbers_that_were_rounded_tell_to_what(stored, name, shape):
    rounded = normal().astype(NARROW[name]).astype(stored).reshape(shape)
    assert held(rounded) == name
    rounded.reshape(-1)[7] = stored(1) + np.finfo(stored).eps  # one element that is no such number
    assert held(rounded) == np.dtype(stored).name


@pytest.mark.parametrize("name", NARROW)
def test_infinities_nan_and_zeros_beside_them_change_nothing(name):
    rounded = np.maximum(normal(), 0).astype(NARROW[name]).astype(np.float64)
    rounded[:3] = np.nan, np.inf, -np.inf
    assert held(rounded) == name


def test_float16_may_hold_bfloat16():
    assert held(normal().astype(ml_dtypes.bfloat16).astype(np.float16)) == "bfloat16"
    assert held(normal().astype(np.float16)) == "float16"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(50),
        np.ones(50),
        np.arange(-500.0, 500.0),
        np.float64(3.0).reshape(()),
        np.zeros(0),
        np.full(9, np.nan),
        np.arange(256) / 256,
        np.arange(2048) / 2048,
        2.0 ** -np.arange(20.0),
        np.eye(7) / 2,
        np.array([0.75, -1.5]),
        np.float64(2**40 + 1) * np.arange(1, 5),
    ],
)
def test_what_few_bits_hold_tells_nothing(array):
    assert held(np.asarray(array, np.float64)) is None


@pytest.mark.parametrize(
    "array", [np.float64(1) / 3, np.arange(1, 90) / 7, normal(), np.float64(1e-300) * normal(9)]
)
def test_numbers_of_float64_stay_such(array):
    assert held(np.asarray(array)) == "float64"


def test_one_number_of_float32_is_enough():
    assert held(np.asarray(np.float64(np.float32(0.7340112)))) == "float32"


@pytest.mark.parametrize(
    ("others", "kind"),
    [(["float32", "bfloat16"], "float32"), (["bfloat16"], "bfloat16"), (["float64"], "float64")],
)
def test_what_tells_nothing_goes_with_the_others(others, kind):
    told = {
        n: normal(seed=i).astype(NARROW.get(n, np.float64)).astype(np.float64)
        for i, n in enumerate(others)
    }
    quiet = {
        "zeros": np.zeros(4),
        "halves": np.array([0.5, 2.5]),
        "ids": np.arange(5.0),
        "odd": np.array([0.5, 2.0**-140]),
    }
    run = as_computed(in_memory({**told, **quiet}, "arrays"))
    kinds = {c.scope: run.records[c.refs[0].record].dtype for c in run.calls}
    # Whole numbers, zeros too, are exact in any dtype. float32 holds 2**-140, as bfloat16 does not;
    # nor does float16.
    assert kinds == {n: n for n in others} | {
        "zeros": "float64",
        "halves": kind,
        "ids": "float64",
        "odd": "float64" if kind == "float64" else "float32" if kind == "float32" else "float64",
    }
    for call in run.calls:
        array = run.array(call.refs[0].record)
        np.testing.assert_array_equal(array.astype(np.float64), {**told, **quiet}[call.scope])
        assert not array.flags.writeable
