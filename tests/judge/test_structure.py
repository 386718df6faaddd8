"""Structure tests: silent on rounding, loud on what has a pattern; each statistic against its
definition.
"""

import math

import numpy as np
import pytest

from whence import judge
from whence.judge import ReplayError, sentences
from whence.judge.error_structure import Structure, structure
from whence.judge.limits import LIMITS

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


@pytest.mark.parametrize(
    ("how", "part", "words"),
    [
        (lambda r: r * (1 + SMALL / 60), "slope", "scale"),
        (
            lambda r: r * (1 + SMALL / 30 * np.sign(np.arange(ROWS) % 2 - 0.5))[:, None],
            "row",
            "row",
        ),
        (
            lambda r: r * (1 + SMALL / 30 * np.sign(np.arange(LAST) % 2 - 0.5))[None],
            "channel",
            "channels",
        ),
    ],
)
def test_coherent_scales_below_the_rounding_are_gated_by_their_effect(how, part, words):
    """Effects below 3e-6 are bias of kernels, however significant."""
    local = planted(how)
    assert local.parts()[part] == 0.0


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda r: r * (1 + SMALL), "slope"),
        (lambda r: r * (1 + SMALL * np.sign(np.arange(ROWS) % 2 - 0.5))[:, None], "row"),
        (lambda r: r * (1 + SMALL * np.sign(np.arange(LAST) % 2 - 0.5))[None], "channel"),
        (lambda r: r + SMALL * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None], "shift"),
        (lambda r: r + SMALL * np.sqrt((r**2).mean()) * (r > 0.5), "value"),
    ],
)
def test_each_pattern_is_seen_by_its_own_statistic(how, part):
    local = planted(how)
    assert local.parts()[part] > 1, local.parts()
    assert local.structured


def test_definitions():
    rng = np.random.default_rng(3)
    d, r = rng.standard_normal((ROWS, LAST)) * 1e-6, rng.standard_normal((ROWS, LAST))
    s = structure(d.ravel(), r.ravel(), LAST)
    p = d * r
    z_rows, z_columns = (abs(p.sum()) / math.sqrt((p.sum(a) ** 2).sum()) for a in (1, 0))
    assert s.slope_z == pytest.approx(min(z_rows, z_columns))
    assert s.slope == pytest.approx(p.sum() / (r * r).sum())
    z = p.sum(1) / np.sqrt((p * p).sum(1))
    assert s.row == pytest.approx(math.sqrt((z**2).mean()))
    spread = d.std(0, ddof=1) / math.sqrt(ROWS) + 0.25 * math.sqrt((d**2).mean()) / math.sqrt(ROWS)
    assert s.shift == pytest.approx((abs(d.mean(0)) / spread).max())
    assert s.changed == d.size


@pytest.mark.parametrize("shape", [(4, 8), (1, 4096), (4096, 1), (300,)])
def test_too_little_for_statistics(shape):
    d = np.full(shape, 1e-3)
    s = structure(d.ravel(), np.ones(d.size), shape[-1])
    assert s.row == s.channel == s.shift == 0.0


def weak(slope, seed):
    r, w, _ = make(seed, rows=20)
    rng = np.random.default_rng(seed + 1000)
    y = (r * (1 + slope + 1e-5 * rng.standard_normal(r.shape))).astype(np.float32)
    return judge.local(y, r, w)


def test_weak_evidence_of_siblings_is_pooled():
    members = [("norm", weak(5e-6, seed)) for seed in range(12)]
    # No one is significant by itself (an effect of half its noise), together they are.
    found = judge.pool(members)
    assert set(found) == {"norm"}
    assert found["norm"].slope == pytest.approx(5e-6, rel=0.3)
    assert "12 outputs" in found["norm"].sentence


def test_noise_is_not_pooled_into_a_fault():
    for seed in range(20):
        members = [("norm", weak(0.0, 100 * seed + i)) for i in range(12)]
        assert judge.pool(members) == {}


def test_an_only_child_has_nothing_to_pool_with():
    assert judge.pool([("norm", weak(1e-4, 0))]) == {}


def test_limits_are_the_documented_ones():
    assert (
        LIMITS.row,
        LIMITS.channel,
        LIMITS.shift,
        LIMITS.value,
        LIMITS.slope,
        LIMITS.pooled,
    ) == (2.3, 3.0, 5.0, 6.0, 4.5, 4.5)


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
    assert (local.parts()["shift"] > 1, local.structure.shift_at) == (True, 7)
    alone = carried(0, effect=0.02, memory=0.0)
    # The error is 1 / sqrt(1 - a^2) larger, and (1 + a) / (1 - a) as many rows would be needed.
    assert local.structure.shift < alone.structure.shift / 2


def test_rounding_without_memory_keeps_its_significance():
    assert (
        planted(
            lambda r: r + SMALL * np.sqrt((r**2).mean()) * (np.arange(LAST) == 7)[None]
        ).structure.shift
        > LIMITS.shift
    )


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
        (Structure(shift=90.0, shift_effect=0.1, shift_at=5), "channel 5 shifted"),
        (Structure(row=90.0, row_effect=0.1), "every row has a scale of its own, 10 % off"),
        (
            Structure(channel=90.0, channel_effect=0.1),
            "channels have scales of their own, 10 % off",
        ),
        (Structure(slope=-0.1, slope_z=90.0, changed=9000), "coherent -10 % scale"),
        (Structure(row=90.0, row_effect=0.1, value=90.0, value_effect=0.1), "10 % off"),
        (Structure(), "this operator's own rounding"),
    ],
)
def test_what_an_error_follows_is_said(found, words):
    """What follows rows or channels follows the value too, and is said once."""
    assert sentences.of_local(ReplayError(9.0, rho=0.5, structure=found)).endswith(words)
