"""Arguments in which two operators differ are named as their schema names them."""

from __future__ import annotations

import pytest

from whence.comparison.replays.program_difference import differing_arguments
from whence.records import Operation

LAYER_NORM = "aten.native_layer_norm.default"
TENSOR = {"in": 0}


@pytest.mark.parametrize(
    ("name", "reference", "target", "words"),
    [
        (
            LAYER_NORM,
            ((TENSOR, [8], TENSOR, TENSOR, 1e-5), {}),
            ((TENSOR, [8], TENSOR, TENSOR, 0.01), {}),
            ["eps is 1e-05 in the reference, 0.01 in the target"],
        ),
        # An engine holds its numbers in float32.
        (
            LAYER_NORM,
            ((TENSOR, [8], TENSOR, TENSOR, 1e-5), {}),
            ((TENSOR, [8], TENSOR, TENSOR, 0.009999999776482582), {}),
            ["eps is 1e-05 in the reference, 0.01 in the target"],
        ),
        (
            LAYER_NORM,
            ((TENSOR, [8], TENSOR, TENSOR, 1e-5), {}),
            ((TENSOR, [8], TENSOR, TENSOR, 9.999999747378752e-06), {}),
            [],
        ),
        # What one side leaves to its default has that value.
        (
            "aten.gelu.default",
            ((TENSOR,), {}),
            ((TENSOR,), {"approximate": "tanh"}),
            ["approximate is none in the reference, tanh in the target"],
        ),
        ("aten.gelu.default", ((TENSOR,), {}), ((TENSOR,), {"approximate": "none"}), []),
        # Settings are compared, shapes follow the tensors.
        (
            "aten.convolution.default",
            ((TENSOR, TENSOR, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
            ((TENSOR, TENSOR, None, [1, 1], [2, 2], [2, 2], False, [0, 0], 4), {}),
            [
                "padding is [1, 1] in the reference, [2, 2] in the target",
                "dilation is [1, 1] in the reference, [2, 2] in the target",
                "groups is 1 in the reference, 4 in the target",
            ],
        ),
        ("aten.view.default", ((TENSOR, [2, 3]), {}), ((TENSOR, [3, 2]), {}), []),
        (
            "aten.masked_fill.Scalar",
            ((TENSOR, {"in": 1}, {"float": "-inf"}), {}),
            ((TENSOR, {"in": 1}, -10000.0), {}),
            ["value is -inf in the reference, -10000.0 in the target"],
        ),
        # No torch has these operators: places instead of names.
        (
            "pd_op.layer_norm",
            ((TENSOR, 1e-5), {}),
            ((TENSOR, 1e-3), {}),
            ["argument 1 is 1e-05 in the reference, 0.001 in the target"],
        ),
        (
            "aten.__class__.mro",
            ((TENSOR, 1), {"axis": 2}),
            ((TENSOR, 1), {}),
            ["axis is 2 in the reference, its default in the target"],
        ),
    ],
)
def test_arguments_are_named(name, reference, target, words):
    sides = [Operation(name, args=args, kwargs=kwargs) for args, kwargs in (reference, target)]
    assert differing_arguments(*sides) == words
