"""Recorded codes beside their scales: integers and floats of 8 bits, with scales by tensor, row and
block.
"""

import ml_dtypes
import numpy as np
import pytest

import whence
from whence.cli import execute

RNG = np.random.default_rng(11)
ROWS, WIDTH, BLOCK = 48, 96, 32
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
DTYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8]
GRANULARITIES = ["tensor", "row", "block"]


def largest(x, per):
    if per == "tensor":
        return np.abs(x).max()
    if per == "row":
        return np.abs(x).max(1, keepdims=True)
    return np.abs(x).reshape(ROWS, -1, BLOCK).max(2)


def dump(dtype, per, *, values=X, made=np.asarray, factor=1.0, shown=X):
    """An input and its codes with their scales. made: what is done to the codes before they are
    rounded. factor: of the scales.
    """
    top = 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
    scale = (largest(values, per) * factor / top).astype(np.float32)
    whole = np.repeat(scale, BLOCK, axis=1) if per == "block" else scale
    wide = np.clip(made(values / whole), -top, top)
    codes = (np.rint(wide) if dtype == np.int8 else wide).astype(dtype)
    tensors = {"layer.x_q": codes, "layer.x_scale": np.asarray(scale)}
    return tensors if shown is None else {"x": shown, **tensors}


def compared(folder, reference, target):
    for side, tensors in (("a", reference), ("b", target)):
        whence.record(folder / side, tensors)
    return whence.compare(folder / "a", folder / "b")


def a_quarter(y):
    return np.where(np.arange(y.shape[1]) % 4 == 0, y * 1.3, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", GRANULARITIES)
@pytest.mark.parametrize("made", [a_quarter, lambda y: y * 1.3])
def test_codes_more_than_a_step_apart_behind_equal_inputs_are_a_fault(tmp_path, dtype, per, made):
    result = compared(tmp_path, dump(dtype, per), dump(dtype, per, made=made))
    assert result.status == "different"
    assert result.findings[0].name == "layer.x_q"


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_without_inputs_too(tmp_path, dtype):
    result = compared(
        tmp_path, dump(dtype, "row", shown=None), dump(dtype, "row", made=a_quarter, shown=None)
    )
    assert result.status != "same"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", GRANULARITIES)
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_another_scale_with_codes_to_match_is_no_fault(tmp_path, dtype, per, factor):
    """Values that are a rounding apart, where one lies near the middle of two codes."""
    near = X * (1 + 2.0**-22 * RNG.choice([-1, 1], X.shape)).astype(np.float32)
    target = dump(dtype, per, values=near, factor=factor, shown=near)
    assert compared(tmp_path, dump(dtype, per), target).status == "same"


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_scale_without_codes_to_match_is_no_same(tmp_path, dtype):
    target = dump(dtype, "row")
    target["layer.x_scale"] = target["layer.x_scale"] * np.float32(1.4)
    assert compared(tmp_path, dump(dtype, "row"), target).status != "same"


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_values_in_bfloat16_explain_codes_that_nothing_else_is_recorded_beside(tmp_path, dtype):
    values = X.astype(ml_dtypes.bfloat16).astype(np.float32)
    reference = dump(dtype, "tensor", shown=None)
    assert compared(
        tmp_path, reference, dump(dtype, "tensor", values=values, shown=None)
    ).status == ("same")


def test_codes_at_the_end_of_their_range_are_no_mask(tmp_path, capsys):
    for side, made in (("a", np.asarray), ("b", lambda y: y * 1.3)):
        whence.record(tmp_path / side, dump(DTYPES[0], "row", made=made))
    assert execute(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "counted as equal" not in capsys.readouterr().out
