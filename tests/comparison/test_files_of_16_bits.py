"""A graph whose file has its weights in 16 bits, and whose runtime widens them, against the same in
float32: precision, and still a fault where a weight or a node is another one.
"""

import numpy as np
import pytest
from test_onnx_nodes import Graph

import whence

pytestmark = pytest.mark.torch
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((4, 24)).astype(np.float32)
FIRST = RANDOM.standard_normal((24, 32)).astype(np.float32) / 5
SECOND = RANDOM.standard_normal((32, 8)).astype(np.float32) / 5
SCALE = np.float32(0.17677669)


def product(x, weight):
    return (x.astype(np.float64) @ weight).astype(np.float32)


def in_16_bits(array):
    return array.astype(np.float16).astype(np.float32)


def run(first=FIRST, second=SECOND, *, scale=SCALE, cast=False, factor=1.0):
    """x @ first -> times scale -> relu -> @ second, of which `factor` is a fault of the product."""
    graph = Graph()
    a = product(X, first)
    b = (a * scale).astype(np.float32)
    c = np.maximum(b, 0)
    y = (product(c, second) * factor).astype(np.float32)
    returned = y.copy() if cast else y
    graph.call("", {"input.x": X, "output.y": returned}, op_type="InferenceSession", leaf=False)
    graph.node("first", "MatMul", [("", X), ("weight", first)], [a])
    graph.node("scaled", "Mul", [("", a), ("scale", np.asarray(scale))], [b])
    graph.node("relu", "Relu", [("", b)], [c])
    graph.node("made" if cast else "y", "MatMul", [("", c), ("weight", second)], [y])
    if cast:
        graph.node("y", "Cast", [("", y)], [returned], to=1)
    return graph.run()


HALF = {"first": in_16_bits(FIRST), "second": in_16_bits(SECOND), "scale": in_16_bits(SCALE)}


@pytest.mark.parametrize("cast", [False, True], ids=["plain", "a cast in front of the output"])
def test_a_file_of_16_bits_differs_in_precision_alone(cast):
    result = whence.compare(run(), run(**HALF, cast=cast))
    assert result.status == "same", result.findings
    assert any("hold numbers of float16" in note for note in result.notes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"second": SECOND},
        {"second": in_16_bits(SECOND) * np.where(np.arange(8) == 3, np.float32(1.0625), 1)},
        {"factor": 1.02},
    ],
    ids=["one weight alone in 16 bits", "a column of a weight", "a node"],
)
def test_what_is_more_than_the_file_s_precision_is_a_fault(wrong):
    result = whence.compare(run(), run(**{**HALF, **wrong}))
    assert result.status == "different"


def test_most_weights_tell_in_what_a_file_is():
    """A scale that is written in the code stays as it is."""
    result = whence.compare(run(), run(**{**HALF, "scale": SCALE}))
    assert result.status == "same", result.findings
