"""Orders of axes: every one found is checked against numpy, and unlike tensors stay unlike."""

import numpy as np
import pytest

from whence.align.layout import axes
from whence.align.layout.distances import typical_distance

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 3, 8)).astype(np.float32)  # (batch, token, head, width)
T = X[:1]


def half_split(x):
    """What a converter does to rows of a head: halves (i, i + d/2) from neighbours (2i, 2i + 1)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).swapaxes(-1, -2).reshape(x.shape)


CASES = {
    "as it is": (X, X),
    "heads before tokens": (X, X.transpose(0, 2, 1, 3)),
    "all axes reversed": (X.T, X),
    "heads flattened": (X, X.reshape(2, 5, 24)),
    "heads split and moved": (X.reshape(2, 5, 24), X.transpose(0, 2, 1, 3)),
    "batch and tokens in one": (X.reshape(10, 3, 8), X),
    "an axis of one in front": (T, T[0]),
    "axes of one dropped, heads merged": (T, T.reshape(5, 24)),
    "width and tokens swapped": (T.reshape(5, 24).T.copy(), T.reshape(1, 5, 24)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_order_of_axes_is_found(name):
    array, wanted = CASES[name]
    found = axes.fit(array, wanted)
    assert found is not None
    assert found.close
    np.testing.assert_array_equal(found.node.apply({"x": [array]}), wanted)


def test_a_padded_axis_is_cut():
    padded = np.zeros((1, 3, 16, 8), np.float32)
    wanted = np.ascontiguousarray(T.transpose(0, 2, 1, 3))
    padded[:, :, :5] = wanted
    found = axes.fit(padded, wanted)
    np.testing.assert_array_equal(found.node.apply({"x": [padded]}), wanted)
    assert "0:5" in str(found.node)


def test_halves_of_heads_are_interleaved():
    x = RNG.standard_normal((1, 6, 4, 16)).astype(np.float32)
    wanted = half_split(x).reshape(1, 6, 64)
    found = axes.fit(x, wanted)
    assert found.close
    np.testing.assert_array_equal(found.node.apply({"x": [x]}), wanted)
    back = axes.fit(wanted, x)
    np.testing.assert_array_equal(back.node.apply({"x": [wanted]}), x)


def test_unlike_tensors_are_not_close():
    other = RNG.standard_normal(X.shape).astype(np.float32)
    assert not axes.fit(X, other).close
    assert axes.fit(X, X[:, :4]) is None or not axes.fit(X, X[:, :4] + 1).close
    assert axes.fit(np.ones((7,), np.float32), X) is None


def test_distance_passes_over_giants_and_lone_faults_but_not_over_turned_tokens():
    x = RNG.standard_normal((40, 64))
    giant = x.copy()
    giant[0, 0] = 1e5
    faulty = giant.copy()
    faulty[3, :] *= 2
    assert typical_distance(giant, giant * (1 + 1e-3)) == pytest.approx(1e-3, rel=0.01)
    assert typical_distance(giant, faulty) == 0.0
    turned = x.copy()
    turned[8:, ::2] *= -1
    assert typical_distance(x, turned) > 1


def test_integers_and_values_that_are_not_finite():
    ids = np.arange(12).reshape(3, 4)
    assert typical_distance(ids, ids) == 0.0
    assert typical_distance(ids, ids + 1) == 1.0
    mask = np.where(np.tril(np.ones((8, 8))), 0.0, -np.inf)
    assert typical_distance(mask, mask) == 0.0
    assert typical_distance(np.full(4, np.nan), np.ones(4)) == np.inf
    assert typical_distance(np.zeros(0), np.zeros(0)) == 0.0
