"""What counts as equal without equal bits is said to be so: bitwise means bits."""

import numpy as np
import pytest

import whence
from whence.report import answer

LOWEST = float(np.finfo(np.float32).min)
NUMBERS = np.linspace(-2, 2, 36, dtype="f4").reshape(6, 6)
HIDDEN = np.triu(np.ones((6, 6), bool), 1)


def folders(tmp_path, reference, target):
    for side, array in (("reference", reference), ("target", target)):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "scores.npy", array)
        np.save(tmp_path / side / "other.npy", NUMBERS)
    return tmp_path / "reference", tmp_path / "target"


def filled(fill, at=HIDDEN):
    return np.where(at, np.float32(fill), NUMBERS).astype("f4")


MIXED = np.where(
    np.eye(6, dtype=bool), np.float32(-np.inf), filled(LOWEST, HIDDEN | np.eye(6, dtype=bool))
)
PAIRS = {
    "infinite": (MIXED, filled(LOWEST, HIDDEN | np.eye(6, dtype=bool)), 6),
    "nearly lowest": (filled(0.95 * LOWEST), filled(LOWEST), 15),
    "float16": (filled(LOWEST), filled(-65000).astype("f2"), 15),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("turned", [False, True])
def test_another_filling_is_the_same_mask_and_not_the_same_bits(tmp_path, case, turned):
    *sides, elements = PAIRS[case]
    result = whence.compare(*folders(tmp_path, *(sides[::-1] if turned else sides)))
    assert result.status == "same"
    (alike,) = result.alike
    assert alike.elements == elements and "e+38" in alike.words
    text = answer.answer(result)
    assert "bitwise" not in text and "bit by bit" not in text
    assert f"but for {elements} elements of" in text and "counted as equal" in text


def test_the_lowest_number_of_each_dtype_goes_without_saying(tmp_path):
    lowest = filled(LOWEST), filled(-65504).astype("f2")
    result = whence.compare(*folders(tmp_path, *lowest))
    assert result.status == "same" and not result.alike
    assert "bitwise" not in answer.answer(result)


def test_equal_bits_are_bitwise_identical_with_fillings_too(tmp_path):
    result = whence.compare(*folders(tmp_path, MIXED, MIXED.copy()))
    assert result.status == "same" and not result.alike
    assert "bitwise identical" in answer.answer(result)


def test_a_number_in_the_place_of_a_filling_is_not_the_same(tmp_path):
    wrong = filled(LOWEST)
    wrong[0, 1] = 1.0
    assert whence.compare(*folders(tmp_path, filled(LOWEST), wrong)).status != "same"


@pytest.mark.torch
def test_replayed_fillings_are_told(tmp_path):
    import torch

    class Mask(torch.nn.Module):
        fill = -np.inf

        def forward(self, x):
            return x.masked_fill(torch.tensor(HIDDEN), self.fill)

    model, x = Mask(), torch.tensor(NUMBERS)
    for side, fill in (("reference", -np.inf), ("target", LOWEST)):
        model.fill = fill
        with whence.capture(model, tmp_path / side):
            model(x)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "same" and [a.elements for a in result.alike] == [15]
    assert "-inf against -3.40282e+38" in answer.headline(result)


@pytest.mark.torch
def test_a_mask_in_another_form_is_not_bitwise_identical(tmp_path):
    import torch

    class Hide(torch.nn.Module):
        def forward(self, x, mask):
            mask = mask if mask.dtype == torch.bool else mask == 0
            return torch.where(mask, x, 0.0)

    look = torch.tensor(~HIDDEN)
    additive = torch.where(look, 0.0, LOWEST)
    for side, mask in (("reference", look), ("target", additive)):
        model = Hide()
        with whence.capture(model, tmp_path / side):
            model(torch.tensor(NUMBERS), mask=mask)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "same" and result.alike, result.counts
    assert "bitwise identical" not in answer.answer(result)
