"""The run-to-run spread against independent computations: elementwise, in the floor, in z, in
growth.
"""

import math

import numpy as np
import pytest
from scipy.stats import f as f_distribution

from whence import judge
from whence.judge import PairError, grow
from whence.judge.limits import LIMITS
from whence.results import Measured, Verdict

RNG = np.random.default_rng(0)
U = 2.0**-24


def test_elementwise_is_the_largest_distance_and_nan_explains_nothing():
    g = RNG.standard_normal((4, 5)).astype(np.float32)
    others = [
        g + np.float32(0.1) * RNG.standard_normal(g.shape).astype(np.float32) for _ in range(3)
    ]
    others[1][2, 3] = np.nan
    got = judge.elementwise(g, others)
    want = np.max(
        [np.nan_to_num(np.abs(o.astype(np.float64) - g.astype(np.float64))) for o in others], axis=0
    )
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.float64


def test_elementwise_of_complex_numbers_is_by_part():
    g = np.array([1 + 2j, 3 - 1j], np.complex64)
    got = judge.elementwise(g, [g + np.array([0.5, -2j]), g + np.array([1j, 0.25])])
    np.testing.assert_allclose(got, [0.5 + 1j, 0.25 + 2j])


def figures(y, r, s):
    return judge.local(y, r, r.astype(np.float32), spread=s)


def test_rho_and_z_with_the_spread_in_the_floor():
    r = RNG.standard_normal((40, 64))
    s = np.abs(RNG.standard_normal(r.shape)) * 1e-3
    s[7] *= 50
    y = (r + s * RNG.standard_normal(r.shape)).astype(np.float32)
    got = figures(y, r, s)
    e, f = y - r, r.astype(np.float32) - r
    assert got.rho == pytest.approx(np.linalg.norm(e) / np.linalg.norm(s), rel=1e-9)
    square = f**2 + s**2
    scale = np.maximum(
        np.sqrt(square.mean(1, keepdims=True)), np.sqrt(square.mean(0, keepdims=True))
    )
    scale = scale + U * abs(r) + 1e-3 * U * np.sqrt((r**2).mean()) + s
    off = np.minimum(abs(e), abs(y - r.astype(np.float32)))
    assert got.z == pytest.approx((off / scale).max(), rel=1e-9)
    assert got.spread_rel == pytest.approx(np.linalg.norm(s) / np.linalg.norm(r), rel=1e-9)
    assert got.score <= 1
    assert judge.local(y, r, r.astype(np.float32)).score > 1


@pytest.mark.parametrize(("scale", "flagged"), [(1 + 3e-4, False), (1.05, True)])
def test_a_structure_below_the_spread_is_no_evidence(scale, flagged):
    r = RNG.standard_normal((64, 64))
    s = np.full(r.shape, 1e-3)
    y = (r * scale).astype(np.float32)
    assert judge.local(y, r, r.astype(np.float32)).score > 1
    assert (figures(y, r, s).score > 1) == flagged


def test_a_steady_element_is_not_excused_by_an_unsteady_one():
    r = RNG.standard_normal((64, 64))
    s = np.zeros(r.shape)
    s[3, 4] = 1e-2
    y = r.astype(np.float32)
    y[3, 4] += 0.01
    assert figures(y, r, s).score <= 1
    y[20, 30] += 0.01
    assert figures(y, r, s).z_index == (20, 30)
    assert figures(y, r, s).score > 1


def test_integers_may_differ_in_about_as_many_places():
    r = np.arange(64.0)
    s = np.zeros(64)
    s[:3] = 1
    y = np.arange(64)
    y[-6:] += 1
    assert judge.local(y, r, r, spread=s).score == 0
    y[-7:] += 1
    assert judge.local(y, r, r, spread=s).score == math.inf


def test_no_spread_changes_nothing():
    r = RNG.standard_normal((40, 64))
    y = (r * (1 + 1e-6 * RNG.standard_normal(r.shape))).astype(np.float32)
    assert judge.local(y, r, r.astype(np.float32), spread=np.zeros(r.shape)) == judge.local(
        y, r, r.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("e_in", "e_out", "spread", "verdict"),
    [
        (0.0, 1e-3, 0.0, "introduced"),
        (0.0, 1e-3, 1e-3, "inherited"),
        (1e-3, 2e-3, 1e-3, "inherited"),
        (0.0, 4e-3, 1e-3, "amplified"),
        (0.0, 6e-3, 1e-3, "introduced"),
        (0.0, math.inf, 1e-3, "introduced"),
    ],
)
def test_growth_beyond_the_spread(e_in, e_out, spread, verdict):
    got = grow([PairError(e_in, u=U)], [PairError(e_out, u=U, spread=spread)], U)
    assert got.verdict == ("noise" if verdict == "inherited" and e_in == 0 else verdict)


def test_each_output_has_its_own_spread():
    outputs = [PairError(1e-3, u=U, spread=1e-3), PairError(1e-4, u=U)]
    assert grow([PairError(0.0, exact=True)], outputs, U).verdict == "introduced"


def test_the_limit_is_what_a_correct_run_rarely_exceeds():
    """Two runs that part from the reference alike: their squared norms over d elements are in the
    ratio F(d, d).
    """
    assert f_distribution.sf(LIMITS.spread**2, 16, 16) < 0.005
    assert f_distribution.sf(LIMITS.spread**2, 32, 32) < 1e-4


@pytest.mark.parametrize(
    ("verdict", "e_out", "after"),
    [
        ("noise", 1e-3, "nondeterministic"),
        ("inherited", 1e-3, "nondeterministic"),
        ("inherited", 1e-1, "inherited"),
        ("introduced", 1e-3, "introduced"),
        ("identical", 0.0, "identical"),
        ("undetermined", 1e-3, "undetermined"),
    ],
)
def test_explain(verdict, e_out, after):
    got = judge.explain(Verdict(0, verdict, numbers={"e_out": e_out}, sentence="so"), 1e-3)
    assert got.verdict == after
    assert ("1e-03" in got.sentence or "0.001" in got.sentence) == (after == "nondeterministic")


def test_what_the_repetition_scores_on_its_own_inputs_is_allowed():
    r = RNG.standard_normal((40, 64))
    w = r.astype(np.float32)
    target, again = (
        judge.local((r * (1 + 1e-5 * RNG.standard_normal(r.shape))).astype(np.float32), r, w)
        for _ in range(2)
    )
    assert target.score > 1
    flagged = Verdict(0, "introduced", confidence="certain", sentence="so", evidence="replay")
    assert judge.repeated(flagged, [(target, again)]).verdict == "nondeterministic"
    assert judge.repeated(flagged, [(target, judge.local(w, r, w))]) == flagged
    worse = judge.local((r * 1.01).astype(np.float32), r, w)
    assert judge.repeated(flagged, [(worse, again)]) == flagged
    broken = w.copy()
    broken[0, 0] = np.nan
    assert (
        judge.repeated(flagged, [(judge.local(broken, r, w), judge.local(broken, r, w))]) == flagged
    )


def test_flips_are_all_elements_where_nobody_counted():
    assert judge.flips(Measured("same", True), 5) == 0
    assert judge.flips(Measured("core", False, {"equal_count": 3.0}), 5) == 2
    assert judge.flips(Measured("none", False), 5) == 5
