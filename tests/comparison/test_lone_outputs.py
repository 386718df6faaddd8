"""Dumps of one module of a model, its last one: nothing tells how many operators lie before it."""

import numpy as np
import pytest

import whence
from whence.writers.support import encodings

STEPS, WORDS = 8, 128


def dump(folder, change=lambda step, logits: logits):
    """A dump of the logits of 8 steps, float32 (2, 1, 128), each after `change`."""
    draw = np.random.default_rng(1)
    for step in range(STEPS):
        logits = draw.standard_normal((2, 1, WORDS)).astype(np.float32)
        place = folder / "cpu_123" / str(step) / "root.out_proj"
        place.mkdir(parents=True)
        encodings.write_torch(place / "output.pth", change(step, logits).astype(np.float32))
    return folder / "cpu_123"


def off(size, steps):
    """Moves the elements of these steps by `size`, each its own way, and by 1e-6 in all."""
    draw = np.random.default_rng(2)

    def change(step, logits):
        moved = size if step in steps else 1e-6
        return logits * (1 + moved * draw.uniform(-1, 1, logits.shape))

    return change


def compared(tmp_path, change):
    return whence.compare(dump(tmp_path / "a"), dump(tmp_path / "b", change))


def test_rounding_of_unseen_operators_is_no_fault(tmp_path):
    assert compared(tmp_path, off(0, ())).status == "same"


@pytest.mark.parametrize(("size", "steps"), [(0.03, (3,)), (1e-3, (2, 5, 6))])
def test_steps_that_stand_out_are_at_fault(tmp_path, size, steps):
    result = compared(tmp_path, off(size, steps))
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].step) == ("out_proj", steps[0])
    assert "other steps, later ones among them" in result.findings[0].sentence


@pytest.mark.parametrize("steps", [range(STEPS), (6, 7), (7,)])
def test_what_stays_off_may_have_been_given_something_else(tmp_path, steps):
    assert compared(tmp_path, off(1e-3, steps)).status == "undecided"
