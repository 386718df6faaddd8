"""Figures of one token's logits, against torch, scipy's definitions in numpy, and cases with a
known answer.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from whence.errors import UsageError
from whence.metrics.logits import of_token


def _pair(seed: int = 0, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(seed)
    x = made.normal(0, 3, n).astype(np.float32)
    return x, (x + made.normal(0, 0.3, n)).astype(np.float32)


def test_against_torch():
    torch = pytest.importorskip("torch")
    x, y = _pair()
    found = of_token(x, y)
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    kl = torch.nn.functional.kl_div(
        b.log_softmax(0), a.log_softmax(0), log_target=True, reduction="sum"
    )
    assert found.kl == pytest.approx(float(kl), rel=1e-9)
    assert found.cosine_similarity == pytest.approx(float(torch.cosine_similarity(a, b, 0)))
    best = a.topk(5).indices.tolist()
    assert (found.first, found.other) == (int(a.argmax()), int(b.argmax()))
    assert found.top5 == len(set(best) & set(b.topk(5).indices.tolist())) / 5
    assert found.margin == pytest.approx(float(a.topk(2).values[0] - a.topk(2).values[1]))
    assert found.rank == int((b > b[best[0]]).sum())


def test_what_neither_softmax_nor_argmax_sees_is_no_error():
    x, _ = _pair()
    found = of_token(x.astype(np.float64), x.astype(np.float64) + 7)
    assert (found.logit_err, found.kl) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert found.rel_l2 > 1
    assert found.agree


def test_the_error_is_measured_in_units_of_the_spread():
    made = np.random.default_rng(3)
    x = made.normal(0, 4, 50_000)
    found = of_token(x, x + made.normal(0, 0.02, x.size))
    assert found.rel_logit_err == pytest.approx(0.02 / 4, rel=0.02)
    assert found.logit_err == pytest.approx(0.02, rel=0.02)


def test_forbidden_tokens_are_left_out_and_other_infinities_count():
    x, y = _pair()
    plain = of_token(x[5:], y[5:])
    x[:5] = y[:5] = -np.inf
    found = of_token(x, y)
    assert (found.kl, found.logit_err, found.nonfinite) == (plain.kl, plain.logit_err, 0)
    y[7], x[9] = np.nan, np.inf
    assert of_token(x, y).nonfinite == 2
    nothing = of_token(np.full(3, np.nan), np.zeros(3))
    assert (nothing.nonfinite, math.isnan(nothing.rel_logit_err)) == (3, True)


def test_a_padded_vocabulary_is_compared_up_to_the_shorter():
    x, y = _pair()
    assert of_token(x, np.concatenate([y, np.full(8, 99, np.float32)])) == of_token(x, y)


def test_a_flip_has_the_gap_that_the_reference_puts_between_both():
    x, y = np.array([1.0, 0.9, -4.0]), np.array([1.0, 1.2, -4.0])
    found = of_token(x, y)
    assert (found.first, found.other, found.agree, found.rank) == (0, 1, False, 1)
    assert found.gap == pytest.approx(0.1)
    assert of_token(np.zeros(4), np.zeros(4)).rel_logit_err == 0
    assert of_token(np.zeros(4), np.arange(4.0)).rel_logit_err == math.inf


def test_more_than_one_axis_is_refused():
    with pytest.raises(UsageError, match="one axis"):
        of_token(np.zeros((1, 3)), np.zeros(3))
    with pytest.raises(UsageError, match="one axis"):
        of_token(np.zeros(0), np.zeros(0))
