"""Batches in another order, in dumps that state no tokens: the samples are compared with themselves,
and the answer says so; an exchange of samples inside of a model stays a fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whence

RNG = np.random.default_rng(5)
ORDER = np.array([3, 0, 2, 1])
WEIGHTS = [RNG.normal(size=(12, 12)) / 4 for _ in range(5)]


def acts(samples: np.ndarray, scale: float = 1.0, at: int = -1) -> dict[str, np.ndarray]:
    """A residual network; the layer `at` is multiplied."""
    x, held = samples, {}
    for n, weight in enumerate(WEIGHTS):
        inner = np.tanh(x @ weight) * (scale if n == at else 1.0)
        x = x + inner
        held |= {f"layers.{n}.mlp": inner, f"layers.{n}": x}
    return {"embed": samples} | {k: v.astype(np.float32) for k, v in held.items()}


def dumped(folder: Path, held: dict[str, np.ndarray], name: str) -> Path:
    place = folder / name
    place.mkdir()
    for n, (key, array) in enumerate(held.items()):
        np.save(place / f"{n:03d}_{key}.npy", array.astype(np.float32))
    return place


@pytest.fixture
def samples() -> np.ndarray:
    return RNG.normal(size=(4, 6, 12)).astype(np.float32)


def test_samples_in_another_order_are_compared_with_themselves(
    tmp_path: Path, samples: np.ndarray
) -> None:
    result = whence.compare(
        dumped(tmp_path, acts(samples), "a"), dumped(tmp_path, acts(samples[ORDER]), "b")
    )
    assert result.status == "same"
    assert any("the batch in another order" in note for note in result.plan.notes)


def test_a_fault_beside_another_order_is_named(tmp_path: Path, samples: np.ndarray) -> None:
    result = whence.compare(
        dumped(tmp_path, acts(samples), "a"),
        dumped(tmp_path, acts(samples[ORDER], 1.2, at=2), "b"),
    )
    assert result.status == "different"
    assert result.findings[0].name == "layers.2.mlp"


def test_samples_exchanged_inside_are_a_fault(tmp_path: Path, samples: np.ndarray) -> None:
    right = acts(samples)
    names = list(right)
    wrong = {k: v[ORDER] if names.index(k) > 4 else v for k, v in right.items()}
    result = whence.compare(dumped(tmp_path, right, "a"), dumped(tmp_path, wrong, "b"))
    assert result.status == "different"
    assert result.findings[0].name == names[5]


def test_answers_alone_that_went_to_others_are_not_the_same(tmp_path: Path) -> None:
    logits = RNG.normal(size=(4, 50)).astype(np.float32)
    held = {"hidden": RNG.normal(size=(4, 12)).astype(np.float32), "logits": logits}
    moved = {k: v[ORDER] for k, v in held.items()}
    result = whence.compare(dumped(tmp_path, held, "a"), dumped(tmp_path, moved, "b"))
    assert result.status != "same"


def test_samples_on_the_second_axis_and_heads_inside_the_first(
    tmp_path: Path, samples: np.ndarray
) -> None:
    def held(x: np.ndarray) -> dict[str, np.ndarray]:
        time_major = {k: v.swapaxes(0, 1) for k, v in acts(x).items()}
        heads = x.reshape(4, 6, 2, 6).swapaxes(1, 2).reshape(8, 6, 6)
        return {**time_major, "heads": heads}

    result = whence.compare(
        dumped(tmp_path, held(samples), "a"), dumped(tmp_path, held(samples[ORDER]), "b")
    )
    assert result.status == "same"
