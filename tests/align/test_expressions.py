import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whence.align import dims
from whence.align.dims import Unfit, parse

X = np.arange(2 * 3 * 12, dtype=np.float32).reshape(2, 3, 12)
Q, K, V = (np.arange(n * 4, dtype=np.float32).reshape(4, n) + n for n in (6, 2, 2))

CASES = [
    ("x", {"x": [X]}, X),
    ("x[..., 0:4]", {"x": [X]}, X[..., 0:4]),
    ("x[1, :, ::2]", {"x": [X]}, X[1, :, ::2]),
    ("x[-1:, ...]", {"x": [X]}, X[-1:]),
    ("x.T", {"x": [X]}, X.T),
    ("b t d -> 1 (b t) d", {"x": [X]}, X.reshape(1, 6, 12)),
    ("b t (h d) -> b h t d, h=3", {"x": [X]}, X.reshape(2, 3, 3, 4).transpose(0, 2, 1, 3)),
    (
        "rearrange(x, 'b t (h r two) -> b t (h two r)', h=2, two=2)",
        {"x": [X]},
        X.reshape(2, 3, 2, 3, 2).swapaxes(-1, -2).reshape(2, 3, 12),
    ),
    ("take(x, [2, 0, 1], axis=1)", {"x": [X]}, X[:, [2, 0, 1]]),
    ("cat(q, k, v, axis=-1)", {"q": [Q], "k": [K], "v": [V]}, np.concatenate([Q, K, V], -1)),
    ("cat(*ranks, axis=0)", {"ranks": [Q, Q + 1]}, np.concatenate([Q, Q + 1])),
    (
        "cat(a[:, 0:2], a.T[0:4, 1:2], axis=1)",
        {"a": [Q]},
        np.concatenate([Q[:, :2], Q.T[:4, 1:2]], 1),
    ),
    ("a + b", {"a": [Q], "b": [Q * 2]}, Q * 3),
    ("(a + b)[0]", {"a": [Q], "b": [Q * 2]}, Q[0] * 3),
    ("sum(*ranks)", {"ranks": [Q, Q, Q]}, Q * 3),
    ("pad(x, axis=1, to=5)", {"x": [X]}, np.pad(X, ((0, 0), (0, 2), (0, 0)))),
    (
        "pad(x, axis=-1, to=13, value='lowest')",
        {"x": [X]},
        np.pad(X, ((0, 0), (0, 0), (0, 1)), constant_values=np.finfo(np.float32).min),
    ),
]


@pytest.mark.parametrize(("text", "bound", "expected"), CASES, ids=[c[0] for c in CASES])
def test_what_an_expression_makes_and_that_it_knows_the_shape_before(text, bound, expected):
    node = parse(text)
    assert (
        node.shape({name: [a.shape for a in arrays] for name, arrays in bound.items()})
        == expected.shape
    )
    made = node.apply(bound)
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(made, expected)
    again = parse(str(node))
    assert again == node


def test_partial_sums_are_rounded_once():
    import ml_dtypes

    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(1000).astype(ml_dtypes.bfloat16) for _ in range(4)]
    made = parse("sum(*ranks)").apply({"ranks": parts})
    np.testing.assert_array_equal(
        made, np.sum([p.astype(np.float64) for p in parts], axis=0).astype(ml_dtypes.bfloat16)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x[", "is not an expression"),
        ("import os", "is not an expression"),
        ("__import__('os')", "not known"),
        ("x.shape", "not understood"),
        ("x - y", "not understood"),
        ("open(x)", "not known"),
        ("cat()", "not with these arguments"),
        ("cat(a, b, dim=1)", "dim is not an argument"),
        ("cat(a, b, axis=1.5)", "not a whole number"),
        ("take(x, 3)", "list of indices"),
        ("a b -> a", "every axis must occur once"),
        ("a (b -> a b", "bracket is not closed"),
        ("a b -> b a, c", "is not a length"),
        ("x['a']", "whole number"),
        ("pad(x)", "to="),
    ],
)
def test_what_is_no_expression_is_said(text, words):
    with pytest.raises(Unfit, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "words"),
    [
        ("x[0, 0, 0, 0]", {"x": [(2, 3)]}, "takes 4 axes"),
        ("x[5]", {"x": [(2, 3)]}, "index 5 of an axis of 2"),
        ("y", {"x": [(2, 3)]}, "'y' is not bound; there is x"),
        ("ranks", {"ranks": [(2,), (2,)]}, r"write \*ranks"),
        ("cat(a, b, axis=0)", {"a": [(2, 3)], "b": [(2, 4)]}, "do not fit together"),
        ("a + b", {"a": [(2, 3)], "b": [(3, 2)]}, "are not one"),
        ("(h d) -> h d", {"x": [(6,)]}, "lengths of h and d are not known"),
        ("(h d) -> h d, h=4", {"x": [(6,)]}, "an axis of 6 is not h 4"),
        ("a b -> b a", {"x": [(6,)]}, "is for 2 axes"),
        ("take(x, [7], axis=0)", {"x": [(6,)]}, "indices up to 7"),
        ("pad(x, axis=0, to=3)", {"x": [(6,)]}, "longer than 3"),
    ],
)
def test_what_does_not_fit_is_said_before_any_data(text, shapes, words):
    with pytest.raises(Unfit, match=words):
        parse(text).shape(shapes)


def test_one_expression_within_another():
    assert (
        dims.substituted("x[..., 0:4]", {"x": "cat(a, b, axis=-1)"})
        == "cat(a, b, axis=-1)[..., 0:4]"
    )
    assert dims.substituted("x[0]", {"x": "a + b"}) == "(a + b)[0]"


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_no_text_does_more_than_being_refused(text):
    with contextlib.suppress(Unfit):
        parse(text)
