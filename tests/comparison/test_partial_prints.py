"""A text that leaves elements out, against the tensor itself: not compared as if it were all, and
no fault of shape.
"""

import numpy as np
import pytest

import whence
from whence.readers import Building


def run(shown, *, whole=(), name="linear_0", wrong=0):
    building = Building("made", "test")
    numbers = np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)
    given, made = numbers[:, :8], numbers[: 20 - wrong, 8:]
    outputs = [building.array(made[:shown], whole=whole)]
    building.call(name, op_type="linear", inputs=[building.array(given)], outputs=outputs)
    return building.run()


@pytest.mark.parametrize(
    ("one", "two"),
    [({"shown": 6, "whole": (-1,)}, {"shown": 20}), ({"shown": 20}, {"shown": 6, "whole": (-1,)})],
)
def test_no_fault_of_shape(one, two):
    result = whence.compare(run(**one, name="fc_0"), run(**two, name="linear_7"))
    assert (result.status, result.findings) == ("undecided", ())


def test_a_shape_that_is_wrong_is_one():
    result = whence.compare(run(20), run(20, wrong=4))
    assert [f.verdict for f in result.findings] == ["structural"]
