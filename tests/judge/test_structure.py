"""Structure tests: silent on rounding, loud on what has a pattern; each statistic against its
definition.
"""

import math

import ml_dtypes
import numpy as np
import pytest

from whence import judge
from whence.dtypes import unit_roundoff
from whence.judge import ReplayError, noise_model, verdict
from whence.judge.error_structure import Basis, Structure, structure, value_ranges

ROWS, LAST = 64, 96


def make(seed=0, dtype=np.float32, rows=ROWS):
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((rows, LAST)) * np.exp(0.2 * rng.standard_normal((1, LAST)))
    w = r.astype(dtype)
    # Another correct kernel: its own rounding, here of a value computed with a little other noise.
    y = (r * (1 + 2.0**-24 * rng.uniform(-1, 1, r.shape))).astype(dtype)
    return r, w, y


@pytest.mark.parametrize("seed", range(30))
def test_silent_on_rounding(seed):
    r, w, y = make(seed)
    local = judge.local(y, r, w)
    assert local.score <= 1, local.parts()


def planted(how, seed=1):
    r, w, _ = make(seed)
    y = (
        how(r.copy()) * (1 + 2.0**-24 * np.random.default_rng(seed).uniform(-1, 1, r.shape))
    ).astype(np.float32)
    return judge.local(y, r, w)


SMALL = 8e-6  # a third of rho's limit: only structure can see it
BF16 = unit_roundoff("bfloat16")


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda r: r * (1 + SMALL / 6), "slope"),
        (lambda r: r * (1 + SMALL / 30 * np.sign(np.arange(ROWS) % 2 - 0.5))[:, None], "row"),
        (
            lambda r: r + SMALL / 6 * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None],
            "channel",
        ),
    ],
)
def test_patterns_below_the_bias_of_kernels_are_no_evidence(how, part):
    """Effects below 3e-6 are bias of kernels, however significant."""
    local = planted(how)
    assert local.parts()[part] == 0.0


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda r: r * (1 + SMALL), "slope"),
        (lambda r: r * (1 + SMALL * np.sign(np.arange(ROWS) % 2 - 0.5))[:, None], "row"),
        (lambda r: r + SMALL * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None], "channel"),
        (lambda r: r + SMALL * np.sqrt((r**2).mean()) * (r > 0.5), "value"),
    ],
)
def test_each_pattern_is_seen_by_its_own_statistic(how, part):
    local = planted(how)
    assert local.parts()[part] > 1, local.parts()


def in_bfloat16(seed, how=lambda r: r, rows=ROWS):
    """A correct kernel, and what a fault makes of its result before the one rounding."""
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((rows, LAST)) * np.exp(rng.standard_normal((1, LAST)))
    carried = r * (1 + 2.0**-20 * rng.standard_normal(r.shape))
    w, y = carried.astype(ml_dtypes.bfloat16), how(carried.copy()).astype(ml_dtypes.bfloat16)
    return judge.local(y, r.astype(np.float32), w, outputs=1000)


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda r: r * (1 + BF16 / 3), "slope"),
        (lambda r: r + BF16 * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None], "channel"),
        (lambda r: r + BF16 / 4 * np.where(abs(r) > np.median(abs(r)), 1, -1), "value"),
    ],
)
def test_faults_below_one_rounding_are_seen_at_16_bits(how, part):
    for seed in range(5):
        local = in_bfloat16(seed, how)
        assert local.rho < 1.5
        assert local.parts()[part] > 1, local.parts()
        assert local.chance() < 1e-3
        assert in_bfloat16(seed).score <= 1


def test_definitions():
    rng = np.random.default_rng(3)
    d, r = rng.standard_normal((ROWS, LAST)) * 1e-6, rng.standard_normal((ROWS, LAST))
    s = 1e-6 * (1 + rng.random((ROWS, LAST)))
    got = structure(d.ravel(), Basis(r.ravel(), s.ravel(), LAST))
    q, x = d / s, r / s
    slope = (q * x).sum() / (x * x).sum()
    rest = q * x - slope * x * x
    errors = [
        math.sqrt((rest.sum(a) ** 2).sum() * n / (n - 1)) / (x * x).sum()
        for a, n in ((0, LAST), (1, ROWS))
    ]
    assert got.slope == pytest.approx(slope)
    scores = [
        noise_model.normal_score(slope / e, n - 1)
        for e, n in zip(errors, (LAST, ROWS), strict=True)
    ]
    weaker = scores.index(min(scores))
    assert got.slope_error == pytest.approx(errors[weaker])
    assert got.clusters == (LAST, ROWS)[weaker]
    z = (q * x).sum(1) / np.sqrt((q * q * x * x).sum(1))
    assert got.row == pytest.approx(math.sqrt((z**2).mean()))
    own = q.var(0, ddof=1)
    t = abs(q.mean(0)) / np.sqrt(np.maximum(own, (own + (q * q).mean()) / 2) / ROWS)
    assert (got.channel, got.channel_at) == (pytest.approx(t.max()), t.argmax())
    assert got.channel_rms == pytest.approx(math.sqrt((t**2).mean()))
    assert got.changed == d.size
    ranges = value_ranges(r.ravel())
    counts = np.bincount(ranges)
    common, scores, effects = (q * q).mean(), [], []
    for place, n in enumerate(counts):
        inside = q.ravel()[ranges == place]
        own = inside.var(ddof=1)
        scores.append(abs(inside.mean()) / math.sqrt(max(own, (own + common) / 2) / n))
        effects.append(abs(d.ravel()[ranges == place].mean()) / math.sqrt((r * r).mean()))
    assert got.value == pytest.approx(max(scores) / max(1, got.row))
    assert got.value_effect == pytest.approx(effects[int(np.argmax(scores))])


@pytest.mark.parametrize("order", [1, -1])
def test_ranges_of_values_hold_about_as_many_elements_each(order):
    r = np.sort(np.random.default_rng(0).standard_normal(50_000))[::order]
    ranges = value_ranges(r)
    low, high = (np.array([f(r[ranges == k]) for k in range(24)]) for f in (np.min, np.max))
    assert (high[:-1] < low[1:]).all()
    counts = np.bincount(ranges, minlength=24)
    assert 0.7 * r.size / 24 < counts.min() <= counts.max() < 1.4 * r.size / 24


def test_equal_values_share_a_range_and_empty_ranges_show_nothing():
    rng = np.random.default_rng(0)
    r = np.where(rng.random(9600) < 0.5, 0.0, np.round(rng.standard_normal(9600), 1))
    ranges = value_ranges(r)
    assert all(np.unique(ranges[r == v]).size == 1 for v in np.unique(r))
    assert (np.bincount(ranges, minlength=24) == 0).any()
    d = 1e-6 * rng.standard_normal(9600)
    assert structure(d, Basis(r + 1e-9, np.full(9600, 1e-6), 96)).value < 4.5
    assert structure(d + 1e-6 * (r > 0.9), Basis(r, np.full(9600, 1e-6), 96)).value > 4.5


def test_the_scale_is_the_weighted_regression_and_its_error_is_honest():
    """Over many draws the scale is off by its standard error: numpy's own least squares agrees, and
    the share of draws beyond two errors is that of the normal distribution.
    """
    rng = np.random.default_rng(4)
    scores = []
    for _ in range(400):
        s = np.exp(rng.standard_normal((1, 40))) * np.ones((60, 1))
        x = rng.standard_normal((60, 40))
        shared = 0.5 * rng.standard_normal((60, 1)) * x  # rows have scales of their own
        d = s * (shared + rng.standard_normal((60, 40)))
        got = structure(d.ravel(), Basis((x * s).ravel(), s.ravel(), 40))
        theirs = np.linalg.lstsq(x.reshape(-1, 1), (d / s).ravel(), rcond=None)[0][0]
        assert got.slope == pytest.approx(theirs)
        scores.append(got.slope / got.slope_error)
    assert np.std(scores) == pytest.approx(1.0, abs=0.12)
    assert np.mean(np.abs(scores) > 2) == pytest.approx(0.046, abs=0.035)


@pytest.mark.parametrize("shape", [(4, 8), (1, 4096), (4096, 1), (300,)])
def test_too_little_for_statistics(shape):
    d = np.full(shape, 1e-3)
    s = structure(d.ravel(), Basis(np.ones(d.size), np.ones(d.size), shape[-1]))
    assert s.row == s.channel == s.slope == 0.0


def test_two_rows_that_share_a_scale_are_no_scale_of_everything():
    """A norm of one token of each of two sequences: every row has a scale of its own."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 128))
    d = x * np.array([[0.9], [1.1]]) + 0.01 * rng.standard_normal(x.shape)
    got = structure(d.ravel(), Basis(x.ravel(), np.ones(x.size), 128))
    assert got.clusters == 2
    assert noise_model.normal_score(got.slope / got.slope_error, 1) < 4


def carried(seed, effect=0.0, u=2.0**-11, rows=240, memory=0.9):
    """An output whose rounding is carried from row to row, as a recurrence does; one channel of the
    target shifted by `effect`.
    """
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((rows, LAST))

    def noise():
        out = np.zeros((rows, LAST))
        for t in range(rows):
            out[t] = memory * out[t - 1] + u * rng.standard_normal(LAST)
        return out

    w, y = r + noise(), r + noise()
    y[:, 7] += effect
    return judge.local(y.astype(np.float16), r.astype(np.float32), w.astype(np.float16))


@pytest.mark.parametrize("seed", range(20))
def test_rounding_that_is_carried_from_row_to_row_is_no_structure(seed):
    local = carried(seed)
    assert local.score <= 1, local.parts()


def test_rounding_alike_from_row_to_row_is_worth_fewer_rows():
    """Variance inflation by the mean of the AR(1) process: (1 + a) / (1 - a), of a sum; here of the
    shift test of a fault.
    """
    local = carried(0, effect=0.02)
    assert (local.parts()["channel"] > 1, local.structure.channel_at) == (True, 7)
    alone = carried(0, effect=0.02, memory=0.0)
    # The error is 1 / sqrt(1 - a^2) larger, and (1 + a) / (1 - a) as many rows would be needed.
    assert local.structure.channel < alone.structure.channel / 2


def test_rounding_without_memory_keeps_its_significance():
    def shift_one_channel(r):
        return r + SMALL * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None]

    assert planted(shift_one_channel).parts()["channel"] > 1


def scaled(seed, effect, *, written_out=False):
    """16-bit outputs whose rows each have a scale from rounding inside, other in the target; and
    one of `effect` from a fault.
    """
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((64, LAST))

    def rounded():
        return (r * (1 + 2e-3 * rng.standard_normal((64, 1)))).astype(np.float16)

    y = (rounded() * (1 + effect * rng.standard_normal((64, 1)))).astype(np.float16)
    return judge.local(y, r.astype(np.float32), rounded(), written_out=written_out)


@pytest.mark.parametrize("seed", range(10))
def test_scales_of_rows_count_beyond_those_of_the_programs_own_rounding(seed):
    assert scaled(seed, 0.0).parts()["row"] <= 1
    assert scaled(seed, 2e-2).parts()["row"] > 1
    # Written out step by step a program rounds more often than it does; its patterns excuse
    # nothing.
    assert scaled(seed, 0.0, written_out=True).parts()["row"] > 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Structure(value=90.0, value_effect=0.1), "the error follows the value"),
        (
            Structure(channel=90.0, channel_effect=0.1, channel_at=5, channels=9, rows=50),
            "channel 5 shifted by 10 %",
        ),
        (Structure(row=90.0, row_effect=0.1), "every row has a scale of its own, 10 % off"),
        (Structure(slope=-0.1, slope_error=0.001, clusters=50), "coherent -10 % scale"),
        (Structure(row=90.0, row_effect=0.1, value=90.0, value_effect=0.1), "10 % off"),
        (Structure(), "this operator's own rounding"),
    ],
)
def test_what_an_error_follows_is_said(found, words):
    """What follows rows or channels follows the value too, and is said once."""
    assert verdict.of_local(ReplayError(9.0, rho=0.5, structure=found)).endswith(words)
