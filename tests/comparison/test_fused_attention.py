"""Attention of an ONNX graph written out against one fused node: what the reference alone shows is
right where the whole graph is, and the node is named where it takes the mask otherwise.
"""

import numpy as np
import pytest

import whence
from whence.results import Status

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
from onnx_attention import FEED, fused, written_out  # noqa: E402


def captured(place, model, mask):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    engine = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with whence.capture(engine, place):
        engine.run(None, {"x": FEED, "mask": mask})
    return place


def compared(tmp_path, mask, target):
    sides = {"reference": written_out(), "target": target}
    return whence.compare(*(captured(tmp_path / n, m, mask) for n, m in sides.items()))


PADDED = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_what_a_right_graph_holds_is_covered(tmp_path):
    result = compared(tmp_path, PADDED, fused())
    assert result.status == Status.SAME, result.headline
    assert result.coverage.covered > 5


def test_a_mask_taken_as_lengths_is_the_fault(tmp_path):
    result = compared(tmp_path, PADDED[:, ::-1].copy(), fused())
    assert result.status == Status.DIFFERENT
    assert result.findings[0].name == "heads"


@pytest.mark.parametrize("weight", ["wq", "wo"])
def test_a_weight_that_is_off_is_never_covered(weight, tmp_path):
    result = compared(tmp_path, PADDED, fused(weight))
    assert result.status == Status.DIFFERENT, result.headline
