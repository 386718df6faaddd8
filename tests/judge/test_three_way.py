"""Three-way figures against scipy and numpy, and what they make of a verdict."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.stats import ks_2samp

from whence import judge
from whence.judge.limits import LIMITS
from whence.judge.three_way import ThreeWay
from whence.results import Verdict

RNG = np.random.default_rng(0)
U = 2.0**-8


def cut(error):
    """|error| with 8 significant bits, rounded down."""
    return (np.abs(error).astype(np.float32).view(np.uint32) >> 16 << 16).view(np.float32)


@pytest.mark.parametrize("shape", [(5000,), (3, 700, 600), (1,)])
@pytest.mark.parametrize(
    ("low", "high"),
    [(np.float32, np.float64), (ml_dtypes.bfloat16, np.float32), (np.float16, np.float64)],
)
def test_ratio_and_overlap(shape, low, high):
    h = RNG.standard_normal(shape).astype(high)
    g = h.astype(low)
    t = (h * (1 + 3 * float(ml_dtypes.finfo(low).eps) * RNG.standard_normal(shape))).astype(low)
    got = judge.three_way(g, t, h)
    wide = h.astype(np.float64)
    e_g, e_t = g.astype(np.float64) - wide, t.astype(np.float64) - wide
    rms = [np.sqrt(np.mean(e**2)) for e in (e_g, e_t)]
    assert got.ratio == pytest.approx(rms[1] / rms[0], rel=1e-9)
    assert got.reference == pytest.approx(np.linalg.norm(e_g.ravel()), rel=1e-9)
    assert got.third == pytest.approx(np.linalg.norm(wide.ravel()), rel=1e-9)
    exact = 1 - ks_2samp(cut(e_g.ravel()), cut(e_t.ravel())).statistic
    assert got.overlap == pytest.approx(exact, abs=1e-12)
    if h.size > 1:
        assert got.overlap == pytest.approx(
            1 - ks_2samp(np.abs(e_g.ravel()), np.abs(e_t.ravel())).statistic, abs=0.02
        )


def test_equal_runs_overlap_wholly_and_a_gross_one_not_at_all():
    h = RNG.standard_normal(4000)
    g = h.astype(np.float32)
    assert judge.three_way(g, g, h).overlap == 1.0
    assert judge.three_way(g, g, h).ratio == 1.0
    assert judge.three_way(g, g + 1, h).overlap == 0.0


def test_an_exact_reference():
    h = np.arange(1.0, 9.0)
    g = h.astype(np.float32)
    assert judge.three_way(g, g.copy(), h).ratio == 1.0
    off = judge.three_way(g, g * np.float32(1 + 1e-6), h)
    assert off.ratio == math.inf
    assert off.beyond == pytest.approx(1e-6 / 2**-25, rel=0.2)


def test_complex():
    h = RNG.standard_normal(50) + 1j * RNG.standard_normal(50)
    g, t = h.astype(np.complex64), (h * 1.001).astype(np.complex64)
    got = judge.three_way(g, t, h)
    assert got.ratio == pytest.approx(np.linalg.norm(t - h) / np.linalg.norm(g - h), rel=1e-9)


def test_masks_are_left_out_and_other_infinities_say_nothing():
    h = RNG.standard_normal(40)
    h[0], h[1] = -np.inf, np.finfo(np.float64).min
    g = np.clip(h, np.finfo(np.float32).min, None).astype(np.float32)
    g[0] = -np.inf
    t = g.copy()
    t[2:] *= np.float32(1.0001)
    got = judge.three_way(g, t, h)
    assert got.third == pytest.approx(np.linalg.norm(h[2:]))
    t[5] = np.nan
    assert judge.three_way(g, t, h) is None


@pytest.mark.parametrize(
    ("g", "t", "h"),
    [
        (np.ones(3, np.float32), np.ones(3, np.float32), np.ones(4)),
        (np.ones(3, np.int64), np.ones(3, np.int64), np.ones(3, np.int64)),
        (np.ones(0, np.float32), np.ones(0, np.float32), np.ones(0)),
        (np.full(3, np.nan, np.float32), np.full(3, np.nan, np.float32), np.full(3, np.nan)),
    ],
)
def test_what_cannot_be_told(g, t, h):
    assert judge.three_way(g, t, h) is None


def test_another_precision_of_the_target_is_no_yardstick():
    h = RNG.standard_normal(40)
    assert judge.three_way(h.astype(np.float32), h.astype(np.float16), h).u == 0.0
    assert judge.three_way(h.astype(np.float32), h.astype(np.float32), h).u == 2.0**-24


def three(reference, target, u=U, count=1000):
    return ThreeWay(reference, target, 1.0, 0.5, u, count)


def judged(name, out, into=(), evidence="two dumps", u=U, count=1000):
    inputs = None if into is None else [three(0.01, 0.01 * i) for i in into]
    outputs = [three(0.01, 0.01 * out, u, count)]
    verdict = Verdict(0, name, evidence=evidence, sentence="before")
    return judge.judge_third(verdict, inputs, outputs)


@pytest.mark.parametrize(
    ("name", "out", "into", "after", "evidence"),
    [
        ("introduced", 2.9, (), "noise", "three-way"),
        ("undetermined", 1.0, (1.0,), "noise", "three-way"),
        ("introduced", 8.0, (4.0,), "inherited", "three-way"),
        ("inherited", 0.8, (1.1,), "inherited", "three-way"),
        ("inherited", 5.1, (0.5,), "introduced", "three-way"),
        ("inherited", 3.1, (1.2,), "introduced", "three-way"),
        ("introduced", 4.0, (), "introduced", "three-way"),
        ("inherited", 4.0, (2.5,), "undetermined", "three-way"),
        ("introduced", 4.0, (2.5,), "introduced", "two dumps"),
        ("introduced", 2.0, None, "noise", "three-way"),
        ("inherited", 50.0, None, "undetermined", "three-way"),
        ("param-diff", 1.0, (), "param-diff", "two dumps"),
        ("nondeterministic", 1.0, (), "nondeterministic", "two dumps"),
    ],
)
def test_judged(name, out, into, after, evidence):
    got = judged(name, out, into)
    assert (got.verdict, got.evidence) == (after, evidence)
    assert got.numbers["third_ratio"] == pytest.approx(out)
    assert got.numbers["third_target_err"] == pytest.approx(0.01 * out)
    assert got.confidence == ("likely" if after == "introduced" and evidence == "three-way" else "")


@pytest.mark.parametrize(
    ("count", "after"), [(1000, "introduced"), (16, "introduced"), (4, "noise")]
)
def test_of_few_elements_chance_alone_makes_more(count, after):
    assert judged("noise", 4.0, count=count).verdict == after


def test_a_reference_that_is_far_off_is_no_yardstick():
    far = [ThreeWay(0.6, 0.6, 1.0, 0.5, U, 1000)]
    assert (
        judge.judge_third(Verdict(0, "introduced", evidence="two dumps"), [], far).verdict
        == "introduced"
    )
    near = [ThreeWay(0.4, 0.4, 1.0, 0.5, U, 1000)]
    assert (
        judge.judge_third(Verdict(0, "introduced", evidence="two dumps"), [], near).verdict
        == "noise"
    )


def test_replay_is_the_stronger_evidence():
    assert judged("introduced", 1.0, evidence="replay").verdict == "introduced"


def test_another_precision_only_gives_the_numbers():
    got = judged("introduced", 1.0, u=0.0)
    assert (got.verdict, got.numbers["third_ratio"]) == ("introduced", 1.0)


def test_a_reference_that_is_exact_by_luck_is_taken_to_round():
    got = judge.judge_third(Verdict(0, "introduced", evidence="two dumps"), [], [three(0.0, U)])
    assert (got.verdict, got.numbers["third_ratio"]) == ("noise", None)
    assert LIMITS.third == 3.0
