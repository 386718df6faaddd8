"""Without programs, a sum of many products is held to the rounding of such a sum."""

import numpy as np
import pytest

from handmade import Builder
from whence import api

DRAW = np.random.default_rng(3)
N = 4096
X = np.float32(DRAW.standard_normal((16, N)))
WEIGHT = np.float32(DRAW.standard_normal((32, N)) / 64)


def in_order():
    """The products, added one by one in float32."""
    total = np.zeros((16, 32), np.float32)
    for x, weight in zip(X.T, WEIGHT.T, strict=True):
        total += x[:, None] * weight[None]
    return total


def run_of(result, weight=WEIGHT, kind="Linear"):
    builder = Builder()
    slots = {"input.0": X, "output.0": np.float32(result)}
    root = builder.call("", slots, op_type="Net")
    parameters = {"param.weight": weight} if weight is not None else {}
    builder.call("layer", slots | parameters, op_type=kind, parent=root)
    return builder.run()


EXACT = X.astype(np.float64) @ WEIGHT.T.astype(np.float64)


def test_a_loop_over_products_is_rounding():
    result = api.compare(run_of(EXACT), run_of(in_order()))
    assert result.status == "same"


def test_without_a_sum_the_same_error_is_a_fault():
    result = api.compare(run_of(EXACT, weight=None), run_of(in_order(), weight=None))
    assert result.status == "different"


@pytest.mark.parametrize("factor", [1 + 2e-5, 1 - 2e-5])
def test_a_small_scale_of_a_wide_sum_is_a_fault(factor):
    result = api.compare(run_of(EXACT), run_of(EXACT * factor))
    assert result.status == "different"
    assert result.findings[0].name in ("layer", "")
