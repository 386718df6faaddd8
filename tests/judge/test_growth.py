"""What two dumps and statistics say by themselves."""

import math

import numpy as np
import pytest

from whence.judge import (
    OtherSteps,
    PairError,
    below_masks,
    between,
    error_of,
    grow,
    judge_stated,
)
from whence.judge.statistics_drift import Drift, drift
from whence.judge.verdict import judge_region
from whence.records import Record, Sketch, Statistics
from whence.results import Evidence, Measured

U = 2.0**-24
NOTHING = Measured("none", False)


@pytest.mark.parametrize(
    ("e_in", "e_out", "verdict"),
    [
        ([0.0], 1e-7, "noise"),
        ([1e-3], 1e-3, "inherited"),
        ([1e-3], 3e-3, "amplified"),
        ([1e-3], 6e-3, "introduced"),
        ([0.0], 1e-5, "introduced"),
        ([1.0], 1.4, "inherited"),
        ([math.inf], math.inf, "inherited"),
        ([0.0], math.inf, "introduced"),
    ],
)
def test_growth(e_in, e_out, verdict):
    assert grow([PairError(e, u=U) for e in e_in], [PairError(e_out, u=U)], U).verdict == verdict


def test_bitwise_equal_is_identical():
    assert grow([PairError(0.3)], [PairError(0.0, exact=True)], U).verdict == "identical"


def test_an_input_that_could_not_be_measured_makes_growth_undetermined():
    assert grow([PairError(None), PairError(0.0)], [PairError(1e-3)], U).verdict == "undetermined"
    assert grow([PairError(0.0)], [PairError(None)], U).verdict == "undetermined"


def test_two_dumps_are_never_certain():
    verdict = judge_region(0, 1, grow([PairError(0.0)], [PairError(1.0)], U))
    assert (verdict.verdict, verdict.confidence) == ("introduced", "likely")


def record(values, dtype="float32"):
    x = np.asarray(values, np.float64)
    statistics = Statistics(
        x.size, x.min(), x.max(), x.mean(), x.std(), float(np.linalg.norm(x)), 0, 0, 0
    )
    sketch = Sketch(0, float(np.abs(x).sum()), float((x**3).sum()), float((x**4).sum()))
    return Record(0, dtype, x.shape, statistics=statistics, sketch=sketch)


def test_drift_is_what_numpy_says():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=1000) + 0.3, rng.normal(size=1000) + 0.5
    found = drift(record(x), record(y))
    top, rms = np.abs(x).max(), np.sqrt((x**2).mean())
    assert found.extreme == pytest.approx(max(abs(x.min() - y.min()), abs(x.max() - y.max())) / top)
    assert found.mean == pytest.approx(abs(x.mean() - y.mean()) / rms)
    norms = [abs(f(x) - f(y)) / f(x) for f in (np.linalg.norm, np.std, lambda v: np.abs(v).sum())]
    assert found.moment == pytest.approx(max(norms))
    assert (np.abs(x) ** 3).sum() <= (x**4).sum() ** 0.75 * x.size**0.25
    assert found.higher == pytest.approx(
        max(
            abs((x**4).sum() - (y**4).sum()) / (4 * (x**4).sum()),
            abs((x**3).sum() - (y**3).sum()) / ((x**4).sum() ** 0.75 * 1000**0.25),
        )
    )


def test_nothing_but_zeros_has_no_relative_distance_to_something():
    zeros, ones = record(np.zeros(64)), record(np.ones(64))
    assert drift(zeros, zeros) == Drift(0.0, 0.0, 0.0, 0.0)
    assert drift(zeros, ones) == Drift(math.inf, math.inf, math.inf, math.inf)
    assert all(math.isfinite(v) for v in drift(ones, zeros))


@pytest.mark.parametrize("kind", ["mean", "scale", "outlier"])
def test_statistics_see_what_moves_them_further_than_rounding(kind):
    rng = np.random.default_rng(1)
    x = rng.normal(size=4096)
    noise = rng.uniform(-1, 1, 4096) * 2.0**-8 * x
    fault = {
        "mean": x + 0.1,
        "scale": 1.05 * x,
        "outlier": np.where(np.arange(4096) == 7, 40.0, x),
    }[kind]

    def judged(y):
        moved = drift(record(x), record(y, "bfloat16"))
        out = PairError(max(moved[:3]), "statistics", u=2.0**-8, drift=moved)
        return judge_region(0, -1, grow([PairError(0.0, exact=True)], [out], 2.0**-8))

    assert judged(x + noise).verdict in ("noise", "inherited")
    found = judged(fault + noise)
    assert (found.verdict, found.confidence, found.evidence) == (
        "introduced",
        "likely",
        "statistics",
    )
    assert {"mean": "mean", "scale": "norm", "outlier": "cubes"}[kind] in found.sentence


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "amplified"), (1.1, "introduced")])
def test_a_pass_says_how_large_a_fault_it_hides(factor, verdict):
    came_in = [PairError(1e-3, u=U)]

    def grown(error, **more):
        return grow(came_in, [PairError(error, u=U, count=4096, last=64, **more)], U)

    clean = grown(2e-3)
    noise = factor * clean.visible["noise"]
    # Any error adds to what is there as unrelated ones do.
    assert grown(math.hypot(2e-3, noise)).verdict == verdict
    channel = factor * clean.visible["channel"] / math.sqrt(64)
    assert channel == pytest.approx(noise)
    alone = factor * clean.visible["element"]
    size = math.hypot(2e-3, alone / math.sqrt(4096))
    holds_most = alone**2 > 0.5 * size**2 * 4096
    found = grown(size, lone=alone if holds_most else 0.0)
    assert (found.verdict == "introduced") == (factor > 1)
    # One that moves the norm is seen by that.
    still = Drift(0.0, 0.0, 0.0, 0.0)
    scale = factor * grown(2e-3, drift=still).visible["scale"]
    moved = grown(2e-3, drift=Drift(scale, scale, scale, 0.0))
    assert (moved.verdict == "introduced") == (factor > 1)


def test_statistics_promise_to_see_a_scale_alone():
    def grown(moment):
        drift = Drift(0.0, 0.0, moment, 0.0)
        out = PairError(moment, Evidence.STATISTICS, u=U, drift=drift, count=4096)
        return grow([PairError(0.0, exact=True)], [out], U)

    visible = grown(1e-8).visible
    assert visible.keys() == {"scale"}
    assert grown(0.9 * visible["scale"]).verdict != "introduced"
    assert grown(1.1 * visible["scale"]).verdict == "introduced"


def test_one_element_that_holds_the_error_is_seen_where_growth_is_small():
    alone = PairError(3 * U, u=U, lone=1.0)
    assert grow([PairError(0.0)], [PairError(3 * U, u=U)], U).verdict == "inherited"
    found = grow([PairError(0.0)], [alone], U)
    assert (found.verdict, found.moved) == ("introduced", "lone")
    assert "one element" in judge_region(0, -1, found).sentence
    # Where an input has such an element already, it was handed on.
    assert grow([PairError(3 * U, u=U, lone=1.0)], [alone], U).verdict != "introduced"


def test_figures_of_what_was_made_of_quite_other_inputs_prove_nothing():
    """A step that was given another token: its sums are those of another tensor."""
    u = 2.0**-11

    def found(e_in):
        one, two = (
            PairError(e_in, u=u, drift=Drift(0.0, 0.0, 0.0, 0.0)),
            PairError(e_in, u=u, drift=Drift(0.0, 0.0, 20.0, 0.0)),
        )
        return grow([one], [two], u).verdict

    assert (found(0.01), found(1.2)) == ("introduced", "inherited")


def test_integers_that_flip_prove_nothing_when_inputs_differ():
    flipped = PairError(1.0, u=0.0)
    assert grow([PairError(1e-4, u=U)], [flipped, PairError(1e-4, u=U)], U).verdict == "inherited"
    assert grow([PairError(1e-4, u=U)], [flipped], U).verdict == "undetermined"
    assert grow([PairError(0.0, exact=True)], [flipped], 0.0).verdict == "introduced"


def test_sentinels_of_each_sides_dtype_match():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 6)).astype(np.float32)
    y = x.astype(np.float16)
    x[0, :3], y[0, :3] = np.finfo(np.float32).min, np.finfo(np.float16).min
    expected = (
        np.linalg.norm(x[1:] - y[1:].astype(np.float64)) ** 2
        + np.linalg.norm(x[0, 3:] - y[0, 3:].astype(np.float64)) ** 2
    )
    size = np.linalg.norm(np.concatenate([x[1:].ravel(), x[0, 3:]]))
    assert between(x, y, U).value == pytest.approx(np.sqrt(expected) / size)
    y[0, 3] = np.finfo(np.float16).min
    assert between(x, y, U).value > 1
    mask = np.where(np.arange(6) < 3, np.finfo(np.float32).min, 0).astype(np.float32)
    half = np.where(mask < 0, np.finfo(np.float16).min, 0).astype(np.float16)
    infinite = np.where(mask < 0, np.float32(-np.inf), mask)
    for other in (half, infinite, np.where(mask < 0, 0.95 * mask, mask)):
        same = between(mask, other, U)
        assert same.value == 0.0 and not same.exact  # the same mask, in other bits
    assert between(mask, mask.copy(), U).exact


def test_figures_of_a_tensor_filled_up_by_the_smallest_number_say_nothing():
    """The filling of each side's dtype swamps every figure; another number does not."""
    scores = np.arange(6.0)
    half, single = (np.where(scores > 3, np.finfo(d).min, scores) for d in ("float16", "float32"))
    filled = error_of(NOTHING, record(single), record(half, "float16"), U)
    assert filled.value is None and "smallest number" in filled.why
    lone = error_of(NOTHING, record(single), record(scores, "float16"), U)
    assert lone.value is not None and lone.value > 0.5
    large = np.where(scores > 3, -1e4, scores)
    same = error_of(NOTHING, record(large), record(large, "float16"), U)
    assert same.value == 0.0


def test_what_a_mask_is_written_over_is_measured_without_it():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 8))
    wrong = scores * 1.5
    hidden = np.arange(8) > 4
    a, b = (np.where(hidden, -1e4, x).astype(np.float32) for x in (scores, wrong))
    seen = PairError(float(np.linalg.norm(a - b) / np.linalg.norm(a)), u=U)
    x, y = a[:, :5].astype(np.float64), b[:, :5].astype(np.float64)
    assert seen.value < 1e-3
    assert below_masks(a, b, seen).value == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x))
    elsewhere = np.where(np.arange(8) > 3, -1e4, wrong).astype(np.float32)
    assert below_masks(a, elsewhere, seen) is seen, "masks that differ are not a mask"
    assert below_masks(x, y, seen) is seen
    lone = scores.copy()
    lone[0, 0] = -1e4
    assert below_masks(lone, lone * 1.0001, seen) is seen, "one large number is none"


@pytest.mark.parametrize(
    ("error", "u", "first", "verdict", "words"),
    [
        (1e-5, U, True, "noise", "within 6e-05, which rounding in operators that nobody labelled"),
        (1e-5, U, False, "noise", "within 6e-05, which rounding in operators that nobody labelled"),
        (1e-3, U, True, "introduced", "more than 6e-05, and nothing before it is seen"),
        (1e-3, U, False, "introduced", "error grows"),
        (0.045, 2.0**-8, True, "noise", "within 0.05, which rounding"),
        (0.045, 2.0**-8, False, "introduced", "error grows"),
    ],
)
def test_what_unseen_operators_may_make_of_a_tensor_that_somebody_labelled(
    error, u, first, verdict, words
):
    """A thousand roundoffs of float32; at 16 bits a twentieth, of the first alone."""
    growth = grow([PairError(0.0, u=u)], [PairError(error, "two dumps", u=u)], u)
    judged = judge_stated(
        judge_region(0, 1, growth),
        growth,
        u,
        lambda: None,
        first=first,
        in_other_steps=OtherSteps(),
    )
    assert judged.verdict == verdict
    assert words in judged.sentence


@pytest.mark.parametrize(("nan", "inf"), [(1, 0), (0, 2)])
def test_another_number_of_nan_or_inf_in_the_figures_is_an_error_without_bound(nan, inf):
    def figures(**changes):
        common = {"nan": 0, "inf": 0, "zero": 0, "count": 4}
        statistics = Statistics(min=-1.0, max=1.0, mean=0.0, std=1.0, norm=2.0, **common | changes)
        return Record(0, "float32", (4,), statistics=statistics)

    unmeasured = Measured("none", False, why="elements were not kept")
    found = error_of(unmeasured, figures(), figures(nan=nan, inf=inf), 2.0**-24)
    assert (found.value, found.evidence) == (math.inf, Evidence.STATISTICS)
    same = error_of(unmeasured, figures(nan=nan, inf=inf), figures(nan=nan, inf=inf), 2.0**-24)
    assert same.value != math.inf
