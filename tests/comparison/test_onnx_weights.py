"""Weights of two ONNX files, one of which holds codes."""

import numpy as np
import pytest

from whence.comparison.onnx_files.graph import Weight
from whence.comparison.onnx_files.weights import State, compare


def _weight(values, step=None):
    return Weight("w", "float32", values.shape, lambda: values, step)


@pytest.mark.parametrize("steps_cut_off", [0.0, 0.9, 3.0, 1e6])
def test_codes_cut_off_at_the_end_of_their_range_are_told(steps_cut_off):
    step = np.full(4, 0.01, np.float32)
    exact = np.array([0.5, -1.28, 1.27, 0.2], np.float32)
    exact[2] += np.float32(steps_cut_off * 0.01)
    stored = np.clip(np.round(exact / step), -128, 127).astype(np.float32) * step
    found = compare(_weight(exact), _weight(stored, step))
    if steps_cut_off < 1:  # a zero point that was rounded does as much
        assert found.state in (State.CODES, State.EQUAL)
    else:
        assert found.state == State.DIFFERS
        assert "1 cut off at the end of the codes" in found.words
