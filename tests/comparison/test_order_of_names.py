"""First differences in dumps whose order is known from names alone, and in part."""

import os
from pathlib import Path
from typing import Any

import numpy as np

import whence

NAMES = (
    "conv1", *(f"layers.{n}.{part}" for n in range(4) for part in ("mixer", "gelu", "lift")), "readout"
)  # fmt: skip


def dump(folder: Path, fault: str = "") -> Path:
    """A chain of tanh of products, in the order of `NAMES`, with a fault in one of them."""
    chance = np.random.default_rng(0)
    weights = {name: chance.normal(size=(12, 12)) / 3 for name in NAMES}
    x = chance.normal(size=(8, 12))
    for name in NAMES:
        x = np.tanh(x @ weights[name])
        if name == fault:
            x = np.roll(x, 1, -1)
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{name}.npy", x.astype(np.float32))
        os.utime(folder / f"{name}.npy", (1_700_000_000, 1_700_000_000))
    return folder


def answer(tmp_path: Path, fault: str) -> Any:
    return whence.compare(dump(tmp_path / "ref"), dump(tmp_path / "bad", fault))


def test_what_no_role_places_is_behind_layers_whose_first_is_equal(tmp_path: Path) -> None:
    result = answer(tmp_path, "layers.2.lift")
    assert (result.status, result.findings[0].name) == ("different", "layers.2.lift")


def test_a_difference_in_the_first_layer_leaves_open_what_is_in_front(tmp_path: Path) -> None:
    result = answer(tmp_path, "layers.0.mixer")
    assert "readout" in f"{result.headline} {[f.sentence for f in result.findings]}"


def test_a_fault_behind_all_layers_is_named(tmp_path: Path) -> None:
    result = answer(tmp_path, "readout")
    assert (result.status, result.findings[0].name) == ("different", "readout")


def test_the_first_tensor_may_be_far_off_without_inputs(tmp_path: Path) -> None:
    for side, fault in (("ref", ""), ("bad", "conv1")):
        (dump(tmp_path / side, fault) / "readout.npy").unlink()
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert (result.status, result.findings[0].name) == ("different", "conv1")
    assert "here, or in what it was computed from" in result.findings[0].sentence
