"""Coin flips against faults, on logits made by hand: noise of a known size, and faults put on top
of it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from whence.judge import token_flips
from whence.metrics.logits import LogitFigures, of_token

U32, U16 = 2.0**-24, 2.0**-8


def _figures(
    noise: list[float], seed: int = 0, vocabulary: int = 2000, close: float | None = None
) -> list[LogitFigures]:
    """A token for every entry: logits of spread 3, the target's off by that share of it. close: the
    gap of the two best ones.
    """
    made = np.random.default_rng(seed)
    out = []
    for share in noise:
        x = made.normal(0, 3, vocabulary)
        if close is not None:
            best = np.argsort(x)[-2:]
            x[best[0]] = x[best[1]] - close
        out.append(of_token(x, x + made.normal(0, 3 * share, vocabulary)))
    return out


@pytest.mark.parametrize(("share", "roundoff"), [(1e-6, U32), (0.02, U16), (0.004, 2.0**-11)])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_blamed_and_all_its_flips_are_explained(share, roundoff, seed):
    made = np.random.default_rng(seed)
    shares = share * np.exp(made.normal(0, 0.3, 300))
    said = token_flips.judged(_figures(list(shares), seed, close=2 * share), roundoff)
    assert [j.off for j in said] == [False] * 300
    flips = [j.flip for j in said if j.flip]
    assert len(flips) > 20
    assert set(flips) == {"explained"}


def test_a_flip_that_noise_does_not_close_is_not_explained():
    figures = _figures([0.01] * 40)
    x = np.random.default_rng(9).normal(0, 3, 2000)
    y = x + np.random.default_rng(10).normal(0, 0.03, 2000)
    first, second = np.argsort(x)[::-1][:2]
    y[second] = x[first] + 1.0
    wide = of_token(x, y)
    assert not wide.agree
    *_, last = token_flips.judged([*figures, wide], U16)
    assert (last.flip, last.off) == (
        "unexplained" if wide.gap > 6 * 0.03 * 1.2 else "explained",
        False,
    )
    x[second] = x[first] - 1.5
    *_, last = token_flips.judged([*figures, of_token(x, y)], U16)
    assert last.flip == "unexplained"
    assert last.score == pytest.approx(1.5 / (6 * last.noise), rel=1e-6)


def test_what_jumps_out_of_the_noise_is_off_and_never_joins_it():
    said = token_flips.judged(_figures([0.01] * 24 + [0.5] * 60 + [0.01] * 5), U16)
    assert [j.off for j in said] == [False] * 24 + [True] * 60 + [False] * 5
    assert said[50].noise == pytest.approx(0.03, rel=0.2)


def test_a_lasting_rise_is_seen_where_a_lone_one_is_not():
    lasting = token_flips.judged(_figures([0.015] * 24 + [0.08] * 30), U16)
    assert [j.off for j in lasting[:24]] == [False] * 24
    assert sum(j.off for j in lasting[24:]) >= 20
    lone = token_flips.judged(_figures([0.015] * 24 + [0.08] + [0.015] * 30), U16)
    assert not any(j.off for j in lone)


def test_without_a_measurement_rounding_of_the_dtype_is_the_limit():
    assert token_flips.judged(_figures([0.01]), U32)[0].off
    assert not token_flips.judged(_figures([0.01]), U16)[0].off
    assert not token_flips.judged(_figures([0.01]), 0.0)[0].off
    assert token_flips.judged(_figures([0.4]), U16)[0].off


def test_a_faulty_start_explains_no_flip_of_its_own():
    """All logits are off from the first token on: their own difference is no noise to explain flips
    with.
    """
    said = token_flips.judged(_figures([0.3] * 50, close=2.0), U32)
    assert all(j.off for j in said)
    assert {j.flip for j in said} <= {"", "unexplained"}


def test_equal_logits_among_noise_hide_and_blame_nothing():
    said = token_flips.judged(_figures([0.0] * 30 + [1e-6] * 10), U32)
    assert not any(j.off or j.flip for j in said)


@pytest.mark.parametrize("off", [[3], [4, 6, 7]])
@pytest.mark.parametrize(
    ("roundoff", "share"), [(0.0, 1e-3), (0.0, 0.03), (U32, 1e-3), (U16, 0.07)]
)
def test_where_the_others_are_bit_equal_nothing_hides_a_token(off, roundoff, share):
    shares = [share if n in off else 0.0 for n in range(8)]
    runs_of_others = [0.0] * 8 if not roundoff else ()
    said = token_flips.judged(_figures(shares), roundoff, runs_of_others)
    assert [n for n, j in enumerate(said) if j.off] == off


@pytest.mark.parametrize(("roundoff", "usual"), [(2.0**-11, 2e-4), (2.0**-11, 0.0), (U16, 2e-3)])
def test_one_factor_on_all_logits_is_no_rounding_of_16_bits(roundoff, usual):
    figures = _figures([usual] * 8)
    x = np.random.default_rng(3).normal(0, 3, 2000)
    error = np.random.default_rng(4).normal(0, 3 * usual, 2000)
    factor = of_token(x, 1.05 * x + error)
    share = 0.9 * factor.rel_logit_err
    apart = of_token(x, x + np.random.default_rng(5).normal(0, 3 * share, 2000))
    for token, off in ((factor, [4]), (apart, [])):
        said = token_flips.judged([*figures[:4], token, *figures[4:]], roundoff)
        assert [n for n, j in enumerate(said) if j.off] == off


def test_runs_of_the_reference_widen_what_is_noise():
    figures = _figures([0.005] * 10)
    assert all(j.off for j in token_flips.judged(figures, U32))
    assert not any(j.off for j in token_flips.judged(figures, U32, noise_errors=[0.004] * 10))


def test_nan_is_off():
    x = np.arange(5.0)
    y = x.copy()
    y[1] = np.nan
    [said] = token_flips.judged([of_token(x, y)], U16)
    assert (said.off, said.score) == (True, math.inf)


def test_what_rounding_makes_at_most():
    assert token_flips.most(U32) == pytest.approx(1000 * U32)
    assert (token_flips.most(U16), token_flips.most(2.0**-4), token_flips.most(0.0)) == (
        0.05,
        0.625,
        math.inf,
    )


def test_what_a_finding_reaches_measures_nothing_and_rounding_explains_none_of_its_flips():
    close = 0.02
    figures = _figures([0.01] * 40, close=close)
    assert {j.flip for j in token_flips.judged(figures, 0.0) if j.flip} == {"explained"}
    alone = token_flips.judged(figures, 0.0, faulty=[U32] * 40)
    assert {j.flip for j in alone if j.flip} == {"unexplained"}
    assert alone[20].noise == pytest.approx(1000 * U32 * figures[20].scale)
    measured = token_flips.judged(figures, 0.0, faulty=[0.0] * 20 + [U32] * 20)
    assert {j.flip for j in measured[:20] if j.flip} == {"explained"}
    assert {j.flip for j in measured[20:] if j.flip} == {"unexplained"}
    assert measured[30].noise == pytest.approx(0.03, rel=0.2)
