"""What rounding at no depth makes, in numpy: patterns, sizes, and what stays open."""

import math

import numpy as np
import pytest

from whence import dtypes
from whence.judge import (
    LIMITS,
    Elsewhere,
    PairError,
    Sight,
    grow,
    judge_region,
    judge_unseen,
    sight,
)

U32, BF16 = 2.0**-24, 2.0**-8
RNG = np.random.default_rng(11)


def noisy(array, size):
    return (array + RNG.normal(size=array.shape) * size * np.sqrt((array * array).mean())).astype(
        np.float32
    )


def seen(change, u=U32, noise=1e-7, shape=(24, 32)):
    reference = RNG.normal(size=shape).astype(np.float32)
    return sight(reference, noisy(change(reference.astype(np.float64)), noise), u, LIMITS.within(u))


def patched(x, where, value):
    out = x.copy()
    out[where] = value
    return out


@pytest.mark.parametrize("u", [U32, BF16])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 1.25 * x, "multiplied by 1.25"),
        (lambda x: -x, "multiplied by -1"),
        (lambda x: x + 0.4, "0.4 is added"),
        (lambda x: patched(x, (slice(None), 5), 2.0), "channel 5 of 32 is far off"),
        (lambda x: np.roll(x, 1, -1), "channels"),
        (lambda x: x[:, ::-1], "channels"),
        (lambda x: np.roll(x, 1, 0), "24 rows (0, 1, 2, 3, ...) of 24 stand"),
        (lambda x: x[:, [1, 0, *range(2, 32)]], "2 channels (0, 1) of 32 stand"),
    ],
)
def test_one_mistake_is_a_pattern(change, words, u):
    assert words in seen(change, u, noise=u).pattern


@pytest.mark.parametrize("size", [1e-6, 1e-4, 0.02, 0.3])
@pytest.mark.parametrize("shape", [(24, 32), (4, 6, 16), (2, 3, 8, 8), (300,), (9, 7)])
def test_noise_of_any_size_is_none(size, shape):
    for u in (U32, BF16):
        assert seen(lambda x: x, u, noise=size, shape=shape).pattern == ""


def test_rows_are_a_pattern_only_where_near_ties_route_none():
    def routed(x):
        return patched(x, 3, RNG.normal(size=x.shape[-1]))

    def exchanged(x):
        return x[[1, 0, *range(2, len(x))]]

    assert "row 3 of 24 is far off" in seen(routed).pattern
    assert "2 rows (0, 1) of 24 stand" in seen(exchanged).pattern
    assert seen(routed, BF16, noise=BF16).pattern == seen(exchanged, BF16, noise=BF16).pattern == ""


def test_what_is_nearly_one_number_has_no_factor():
    assert (
        sight(
            np.full((8, 16), 0.5, np.float32), np.full((8, 16), 0.51, np.float32), U32, 6e-6
        ).pattern
        == ""
    )


@pytest.mark.parametrize(("one", "two"), [((3, 4), (4, 3)), ((0,), (0,))])
def test_nothing_is_seen_of_other_shapes(one, two):
    assert sight(np.ones(one, np.float32), np.ones(two, np.float32), U32, 6e-6) is None


def judged(e_in, e_out, u=U32, before=(), look=None, evidence="two dumps"):
    inputs = [PairError(e_in, u=u), *before]
    growth = grow(inputs, [PairError(e_out, evidence, u=u)], u)
    return judge_unseen(judge_region(0, -1, growth), growth, u, inputs, lambda: look)


@pytest.mark.parametrize(
    ("e_in", "e_out", "u", "verdict"),
    [
        (0.0, 1e-7, U32, "noise"),
        (0.0, 5e-6, U32, "noise"),  # forty times what one operator may
        (0.0, 1e-4, U32, "undetermined"),
        (0.0, 0.04, U32, "undetermined"),  # as 16 bits inside
        (0.0, 0.1, U32, "introduced"),
        (0.0, 0.02, BF16, "noise"),
        (0.0, 0.1, BF16, "undetermined"),
        (
            0.01,
            0.03,
            BF16,
            "undetermined",
        ),  # by small steps, and still more than rounding usually grows to
        (0.0, 0.5, BF16, "introduced"),
        (0.3, 0.6, BF16, "inherited"),
        (0.0, math.inf, U32, "introduced"),
    ],
)
def test_sizes(e_in, e_out, u, verdict):
    assert judged(e_in, e_out, u).verdict == verdict


def test_float32_that_was_seen_to_be_float32_leaves_less_room():
    agreeing = [PairError(3e-7, u=U32)]
    assert judged(3e-7, 0.02, before=agreeing).verdict == "introduced"
    assert judged(3e-7, 0.02).verdict == "undetermined"
    assert judged(3e-7, 1e-3, before=agreeing).verdict == "undetermined"


@pytest.mark.parametrize(
    "before", [PairError(0.0, exact=True), PairError(0.0, u=BF16), PairError(1e-3, u=U32)]
)
def test_what_is_not_float32_that_agrees_says_nothing_of_float32(before):
    """Integers, 16 bits, and float32 that does not agree."""
    assert judged(3e-7, 0.02, before=[before] * 3).verdict == "undetermined"


def test_one_channel_is_far_off_where_all_others_are_equal():
    """Nothing is left for rounding to explain, and none is allowed."""
    reference = np.arange(1.0, 257.0).reshape(16, 16).astype(np.float32)
    target = patched(reference, (slice(None), 3), 7.0)
    assert sight(reference, target, 0.0, 0.0).pattern == "channel 3 of 16 is far off"


def test_a_pattern_decides_and_few_wrong_rows_are_not_a_large_error():
    assert judged(0.0, 1e-3, look=Sight(1e-3, "channel 1 of 8 is far off")).verdict == "introduced"
    assert judged(0.0, 0.4, look=Sight(1e-4)).verdict == "undetermined"


def test_statistics_do_not_show_the_order_of_elements():
    open_ = judged(0.0, 1e-7, evidence="statistics")
    assert open_.verdict == "undetermined"
    assert "record the elements" in open_.sentence
    assert judged(0.0, 0.5, evidence="statistics").verdict == "introduced"


def test_integers_may_be_chosen_by_scores_that_are_nearly_equal():
    growth = grow([PairError(0.0, exact=True)], [PairError(1.0)], 0.0)
    verdict = judge_unseen(
        judge_region(0, -1, growth), growth, 0.0, [PairError(0.0, exact=True)], lambda: None
    )
    assert verdict.verdict == "undetermined"
    assert "scores" in verdict.sentence


def test_bfloat16_elements_are_seen():
    reference = RNG.normal(size=(16, 16)).astype(dtypes.named("bfloat16").numpy)
    target = (reference.astype(np.float32) * 1.5).astype(reference.dtype)
    assert "multiplied by 1.5" in sight(reference, target, BF16, LIMITS.within(BF16)).pattern


def after(e_out, before, layer_before=None, look=None, evidence="two dumps", equal_before=0):
    growth = grow(before, [PairError(e_out, evidence, u=U32)], U32)
    return judge_unseen(
        judge_region(0, -1, growth),
        growth,
        U32,
        before or None,
        lambda: look,
        elsewhere=Elsewhere(layer_before=layer_before, equal_before=equal_before),
    ).verdict


def test_what_the_layer_before_does_without_is_no_rounding():
    """As many operators of the same kind lie behind the same tensor of each layer."""
    equal = [PairError(0.0, u=U32)]
    assert after(2e-4, equal) == "undetermined"
    assert after(2e-4, equal, layer_before=0.0) == "introduced"
    assert after(2e-4, equal, layer_before=1e-5) == "undetermined"
    assert after(2e-4, [PairError(1e-4, u=U32)], layer_before=0.0) != "introduced"
    assert after(3e-6, equal, layer_before=0.0) == "noise"
    assert after(2e-4, equal, layer_before=0.0, look=Sight(0.0)) == "undetermined"  # few rows


def test_tensors_that_are_equal_to_the_bit_leave_less_room_than_those_that_agree():
    equal, near = PairError(0.0, u=U32), PairError(1e-7, u=U32)
    assert after(2e-3, [equal] * 4) == "introduced"
    assert after(2e-3, [equal] * 3) == "undetermined"
    assert after(2e-3, [*[equal] * 4, near]) == "undetermined"
    assert after(2e-3, [PairError(0.0, u=BF16)] * 4) == "undetermined"


def test_a_pattern_needs_no_inputs_and_a_size_does():
    moved = Sight(1e-3, "everything is multiplied by 1.01")
    assert after(1e-2, [], look=moved) == "introduced"
    assert after(1e-2, []) == "undetermined"


def test_statistics_that_moved_before_prove_nothing_of_later_ones():
    equal, moved = (PairError(e, "statistics", u=U32) for e in (0.0, 3e-3))
    assert after(2e-3, [equal] * 4, evidence="statistics") == "introduced"
    assert after(0.3, [equal, moved], evidence="statistics") == "undetermined"
    assert after(0.3, [equal], evidence="statistics") == "introduced"
    coarse = PairError(0.0, "statistics", u=U32, coarse=1e-3)  # of three digits
    assert after(2e-3, [coarse] * 4, evidence="statistics") != "introduced"


def test_a_size_beyond_all_rounding_needs_no_inputs():
    assert after(0.06, []) == "introduced"
    assert after(0.04, []) == "undetermined"
    assert after(0.06, [], look=Sight(0.01)) == "undetermined"  # few rows
    assert after(0.8, []) == "undetermined"  # other inputs, perhaps


def test_equal_tensors_that_were_not_read_leave_less_room_as_well():
    equal = [PairError(0.0, u=U32)]
    assert after(2e-3, equal, equal_before=4) == "introduced"
    assert after(2e-3, equal, equal_before=3) == "undetermined"
    assert after(2e-3, [PairError(1e-7, u=U32)], equal_before=9) == "undetermined"


@pytest.mark.parametrize("shape", [(4, 10), (4, 6, 12), (4, 8, 3, 3)])
def test_a_factor_in_front_of_a_bias_is_a_pattern(shape):
    bias = RNG.normal(size=shape[-1] if len(shape) < 4 else (shape[1], 1, 1))
    product = RNG.normal(size=shape)
    pair = [(factor * product + bias).astype(np.float32) for factor in (1.0, 1.003)]
    pattern = sight(*pair, U32, LIMITS.within(U32)).pattern
    assert pattern == "everything is multiplied by 1.003, but for a bias"
    wide = noisy((product + bias).astype(np.float64), 1e-3)  # as large, and no factor
    assert not sight(pair[0], wide, U32, LIMITS.within(U32)).pattern
    assert not sight(*pair, BF16, LIMITS.within(BF16)).pattern
