"""One factor or constant between two tensors in 16 bits is told from rounding."""

import ml_dtypes
import numpy as np
import pytest

from whence.judge import OtherSteps, grow, judge_region, judge_stated, judge_unseen
from whence.judge.error_growth import PairError
from whence.judge.error_patterns import coherent, sight

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def truth(shape=(4, 32, 64), seed=0):
    drawn = np.random.default_rng(seed)
    return drawn.standard_normal(shape) @ drawn.standard_normal((shape[-1], shape[-1])) / 8


def heads(y):
    y = y.copy()
    y[..., :16] *= 1.1
    return y


def last_position(y):
    y = y.copy()
    y[:, -1] *= 0.8
    return y


def one_row(y):
    y = y.copy()
    y[0, 3] *= 0.9
    return y


def bias(y):
    y = y.copy()
    y[..., 5] += 0.1
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "words", "effect"),
    [
        (lambda y: y * 1.02, "everything is multiplied by 1.02", 0.02),
        (lambda y: y * 0.95, "everything is multiplied by 0.95", 0.05),
        (lambda y: -y, "everything is multiplied by -1", 2.0),
        (lambda y: y + 0.03, "everything is shifted by +0.03", 0.03),
        (heads, "channels 0 to 15 of 64 are multiplied by 1.1", 0.1),
        (last_position, "row 31 of 32 is multiplied by 0.8", 0.2),
        (one_row, "row 3 of 128 is multiplied by 0.9", 0.1),
        (bias, "channel 5 of 64 is shifted by +0.1", 0.1),
    ],
)
def test_one_number_is_no_rounding(kind, change, words, effect):
    y = truth()
    found = coherent(y.astype(KINDS[kind]), change(y).astype(KINDS[kind]))
    assert found is not None
    assert found.words.startswith(words)
    assert found.effect == pytest.approx(effect, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 1e-3, 4e-3, 0.02])
@pytest.mark.parametrize("shape", [(4, 32, 64), (1, 512), (64, 64)])
def test_rounding_of_any_size_has_no_number(kind, share, shape):
    for seed in range(8):
        y = truth((*shape[:-1], shape[-1]), seed)
        drawn = np.random.default_rng(100 + seed)
        moved = y * (1 + share * drawn.standard_normal(y.shape))
        scalars = 1 + U[kind] * drawn.uniform(-1, 1, (*y.shape[:-1], 1))
        for target in (moved, moved * scalars, moved * (1 + 2.0**-8)):
            assert coherent(y.astype(KINDS[kind]), target.astype(KINDS[kind])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_noise_on_top_hides_no_factor_that_is_most_of_the_difference(kind):
    y = truth()
    moved = y * (1 + 0.01 * np.random.default_rng(1).standard_normal(y.shape))
    found = coherent(y.astype(KINDS[kind]), (1.05 * moved).astype(KINDS[kind]))
    assert found is not None and found.words == "everything is multiplied by 1.05"
    assert coherent(y.astype(KINDS[kind]), (1.002 * moved).astype(KINDS[kind])) is None


def test_a_gate_of_each_row_and_a_few_numbers_are_no_evidence():
    y = truth((1, 64))
    bfloat16 = ml_dtypes.bfloat16
    assert coherent(y.astype(bfloat16), (y * 1.03).astype(bfloat16)) is None  # one row, one gate
    assert coherent(y.astype(bfloat16), (y * 1.05).astype(bfloat16)) is not None
    rows = np.ones((32, 1)) * truth((1, 64))
    gates = 1 + 0.03 * np.random.default_rng(2).standard_normal((32, 1))
    assert coherent(rows.astype(bfloat16), (rows * gates).astype(bfloat16)) is None
    repeated = np.tile([1.0, -2.0, 3.0], 100).reshape(10, 30)
    assert coherent(repeated.astype(bfloat16), (repeated * 1.1).astype(bfloat16)) is None


def test_other_kinds_have_none():
    y = truth()
    assert coherent(y.astype(np.float32), (y * 1.05).astype(np.float32)) is None
    assert coherent(y.astype(np.float32), (y * 1.05).astype(np.float16)) is not None
    assert coherent(np.arange(64), np.arange(64) * 2) is None
    assert coherent(y.astype(np.float16), y[:1].astype(np.float16)) is None
    nothing = np.zeros((4, 8), np.float16)
    assert coherent(nothing, nothing) is None
    holes = y.copy()
    holes[0, 0] = np.nan
    found = coherent(holes.astype(np.float16), (holes * 1.05).astype(np.float16))
    assert found is not None


def judged(kind, by, before, stated):
    """The verdict of a label off by a factor, behind one that is off by `before`."""
    y = truth()
    g, t = y.astype(KINDS[kind]), (y * by).astype(KINDS[kind])
    wide = g.astype(np.float64)
    error = float(np.linalg.norm(t.astype(np.float64) - wide) / np.linalg.norm(wide))
    u = U[kind]
    seen = [] if before is None else [PairError(before, exact=before == 0, u=u)]
    growth = grow(seen, [PairError(error, u=u, count=y.size, last=64)], u)
    verdict = judge_region(0, -1, growth)

    def look():
        return sight(g, t, u, 6 * u)

    if stated:
        return judge_stated(
            verdict, growth, u, look, first=before is None, in_other_steps=OtherSteps()
        )
    return judge_unseen(verdict, growth, u, seen, look)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("before", [None, 0.0, 1e-3])
def test_a_label_that_a_factor_explains_is_no_pass_whatever_its_size(kind, stated, before):
    verdict = judged(kind, 1.02, before, stated)
    assert (verdict.verdict, verdict.confidence) == ("introduced", "likely")
    # where growth tells, it is asked first
    by_growth = verdict.sentence.startswith("error grows")
    assert by_growth or "everything is multiplied by 1.02" in verdict.sentence


def test_what_came_in_explains_a_factor():
    assert judged("bfloat16", 1.02, 0.02, True).verdict == "inherited"


def test_a_pass_says_what_it_could_not_see():
    verdict = judged("bfloat16", 1.001, None, True)
    assert verdict.verdict == "noise"
    assert verdict.numbers["visible_scale"] == pytest.approx(3 * 2.0**-8, rel=0.3)
    assert verdict.numbers["visible_noise"] == pytest.approx(0.05)
    assert verdict.numbers["visible_element"] == pytest.approx(0.05 * (4 * 32 * 64) ** 0.5)
