"""Integers of 16 bits that hold the bits of bfloat16 are compared as numbers; others stay what they
are.
"""

import ml_dtypes
import numpy as np
import pytest

import whence
from whence.comparison.prepare.bits_of_bfloat16 import is_cut_off_numbers, is_signed_numbers

RNG = np.random.default_rng(2)
SHAPE = (32, 64)
X = RNG.normal(size=SHAPE)
STORED = [np.int16, np.uint16]


def bits(values, stored=np.uint16):
    return np.asarray(values).astype(ml_dtypes.bfloat16).view(stored)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 3e4])
def test_numbers_of_both_signs_are_recognised(stored, scale):
    assert is_signed_numbers(bits(X * scale, stored))
    assert is_signed_numbers(bits(np.where(X > 0, X, 0.1 * X) * scale, stored))


def integers():
    sound = np.sin(np.arange(4096) / 20)
    yield "token ids", RNG.integers(0, 50257, 4096).astype(np.uint16)
    yield "token ids below 2^15", RNG.integers(0, 32000, 4096).astype(np.int16)
    yield "token ids of one stretch", RNG.integers(16000, 16500, 4096).astype(np.int16)
    yield "every number", np.arange(1 << 16).astype(np.uint16)
    yield "positions", np.arange(4096).astype(np.int16)
    for loudness in (30, 1000, 30000):
        yield f"sound {loudness}", (sound * loudness + RNG.normal(size=4096)).astype(np.int16)
        yield f"noise {loudness}", (RNG.normal(size=4096) * loudness / 4).astype(np.int16)
    yield "codes", np.clip(np.rint(RNG.normal(size=4096) * 40), -128, 127).astype(np.int16)
    yield "zero", np.zeros(4096, np.int16)
    yield "depths", RNG.integers(400, 9000, 4096).astype(np.uint16)
    yield "float16", RNG.normal(size=4096).astype(np.float16).view(np.uint16)
    yield "empty", np.zeros((0, 4), np.int16)


@pytest.mark.parametrize("array", [pytest.param(a, id=name) for name, a in integers()])
def test_integers_stay_integers(array):
    assert not is_signed_numbers(array)
    assert not is_cut_off_numbers(array)


def compared(folder, reference, target):
    for side, tensors in (("a", reference), ("b", target)):
        whence.record(folder / side, tensors)
    return whence.compare(folder / "a", folder / "b")


def network(stored=np.uint16, fault=1.0, ids=0):
    h = np.tanh(X * 1.5) * fault
    ids = (np.arange(400).reshape(4, 100) * 7 + ids).astype(np.uint16)
    return {
        "ids": ids,
        "x": bits(X, stored),
        "h": bits(h, stored),
        "out": bits(np.maximum(h, 0), stored),
    }


@pytest.mark.parametrize("stored", STORED)
def test_both_sides_are_compared_as_numbers(tmp_path, stored):
    near = network(stored)
    near["h"] = bits(np.tanh(X * 1.5) * (1 + 2.0**-10), stored)
    result = compared(tmp_path, network(stored), near)
    assert result.status == "same"
    assert any("hold bits of bfloat16" in note for note in result.plan.notes)


@pytest.mark.parametrize("stored", STORED)
def test_a_fault_is_found_in_them(tmp_path, stored):
    result = compared(tmp_path, network(stored), network(stored, fault=1.2))
    assert [f.name for f in result.findings] == ["h"]


def test_the_other_side_may_be_floating(tmp_path):
    target = {k: v if k == "ids" else v.view(ml_dtypes.bfloat16) for k, v in network().items()}
    result = compared(tmp_path, network(np.int16), target)
    assert result.status == "same"


def test_names_may_differ(tmp_path):
    target = {f"{k}'": v for k, v in network(fault=1 + 2.0**-10).items()}
    assert compared(tmp_path, network(), target).status == "same"


def test_one_side_alone_is_told_how_to_have_it_compared(tmp_path):
    target = network()
    target["h"] = RNG.integers(0, 9, SHAPE).astype(np.uint16)
    result = compared(tmp_path, network(), target)
    assert result.status != "same"
    assert any(
        "looks like bits of bfloat16 in 1 tensor (h first)" in note for note in result.plan.notes
    )


def test_other_indices_beside_them_are_no_same(tmp_path):
    assert compared(tmp_path, network(), network(ids=1)).status != "same"


def test_another_run_of_the_reference_is_read_the_same_way(tmp_path):
    for side, fault in (("a", 1.0), ("b", 1.2), ("c", 1.01)):
        whence.record(tmp_path / side, network(fault=fault))
    result = whence.compare(tmp_path / "a", tmp_path / "b", again=[tmp_path / "c"])
    assert [f.name for f in result.findings] == ["h"]


def test_what_is_too_small_to_tell_is_what_the_others_are(tmp_path):
    few = {"scores": bits([0.5, 0.25, 3.0]), "last": bits(np.abs(X) + 8)}
    moved = {"scores": bits([0.5, 0.251, 3.0]), "last": few["last"]}
    more = {"g": bits(X), "k": bits(X - 1), "v": bits(X / 3)}
    result = compared(tmp_path, network() | more | few, network() | more | moved)
    assert result.status == "same"  # the last bit of a number; of an integer, another token
    assert compared(tmp_path / "few", few, moved).status != "same"
