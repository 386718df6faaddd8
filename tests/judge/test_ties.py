"""What counts as a tie: indices by the scores they point at, against pencil and paper."""

import math

import numpy as np
import pytest

from whence.judge import ties

U16 = 2.0**-8
SCORES = np.array([[4.0, 1.0, 4.0, 3.0, 0.0]])
QUIET = np.zeros_like(SCORES)


def follow(own, other, scores=SCORES, noise=QUIET, u=0.0, **options):
    return ties.follow(np.array(own), np.array(other), scores, noise, u, **options)


def test_equal_scores_may_be_taken_in_either_order():
    found = follow([[0, 2, 3]], [[2, 0, 3]])
    assert found.tied.tolist() == [True] and not found.wrong.any()
    assert found.indices.tolist() == [[2, 0, 3]]
    assert found.widest is not None and found.widest.gap == 0.0


def test_a_gap_beyond_rounding_is_told_with_what_rounding_explains():
    found = follow([[0, 2, 3]], [[0, 2, 1]], u=U16)
    assert found.wrong.tolist() == [True] and found.indices.tolist() == [[0, 2, 3]]
    assert found.worst == ties.Gap(
        row=0, rank=2, reference=3, target=1, gap=2.0, explained=U16 * 4.0
    )


def test_scores_a_rounding_apart_tie_and_two_roundings_do_not():
    one, two = 1.0 + 2 * U16, 1.0 + 6 * U16
    assert follow([[1]], [[0]], np.array([[1.0, one]]), np.zeros((1, 2)), U16).tied.all()
    assert follow([[1]], [[0]], np.array([[1.0, two]]), np.zeros((1, 2)), U16).wrong.all()


def test_measured_noise_closes_a_gap():
    scores, noise = np.array([[1.0, 1.5]]), np.full((1, 2), 0.1)
    assert follow([[1]], [[0]], scores, noise, U16).tied.all()
    assert follow([[1]], [[0]], scores, noise / 10, U16).wrong.all()


@pytest.mark.parametrize("other", [[[0, 0, 2]], [[0, 2, 5]], [[0, 2, -1]]])
def test_what_no_scores_explain(other):
    found = follow([[0, 2, 3]], other, noise=np.full((1, 5), 9.0))
    assert found.wrong.all() and found.worst is not None and math.isinf(found.worst.gap)


def test_order_counts_only_where_the_operator_promises_one():
    assert follow([[0, 2, 3]], [[3, 2, 0]]).wrong.all()
    assert follow([[0, 2, 3]], [[3, 2, 0]], ordered=False).tied.all()
    assert follow([[0, 2, 3]], [[3, 2, 1]], ordered=False).wrong.all()


def test_masked_scores_make_no_noise():
    wide = np.array([[1.0, 1.1, -10000.0, -np.inf]])
    working = np.array([[1.0, 1.1, -9984.0, -np.inf]])
    assert ties.noise_of(wide, working, np.array([[1]]), 1).max() < 1e-6


def test_infinities_and_nan_tie_with_themselves():
    a, b = np.array([-np.inf, np.nan, 1.0, np.inf]), np.array([-np.inf, np.nan, np.nan, 1.0])
    assert ties.distance(a, b).tolist() == [0.0, 0.0, math.inf, math.inf]


def test_alternatives_exchange_or_swap_what_ties():
    ways = ties.alternatives(
        np.array([[0, 3]]), np.array([[2.0, 1.0, 0.0, 1.0]]), np.zeros((1, 4)), 0.0, 4
    )
    assert [w.tolist() for w in ways] == [[[0, 1]]]
    ways = ties.alternatives(
        np.array([[0, 1]]), np.array([[2.0, 2.0, 0.0]]), np.zeros((1, 3)), 0.0, 4
    )
    assert [w.tolist() for w in ways] == [[[1, 0]]]


# ---- without the operator


def test_ranks_tell_what_was_asked_for():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((6, 9))
    other = scores + 0.3 * rng.standard_normal(scores.shape)
    for own, theirs in (
        (np.argsort(-scores, 1)[:, :3], np.argsort(-other, 1)[:, :3]),
        (np.argsort(scores, 1)[:, :1], np.argsort(other, 1)[:, :1]),
        (np.argsort(scores, 1)[:, 4:5], np.argsort(other, 1)[:, 4:5]),
    ):
        found = ties.by_rank(own, theirs, scores, other, 2.0**-24)
        assert found is not None and not found.wrong.any()
        assert found.tied.tolist() == (own != theirs).any(1).tolist()
        shifted = ties.by_rank(own, (theirs + 1) % 9, scores, other, 2.0**-24)
        assert (
            shifted is not None
            and shifted.wrong.all()
            and shifted.worst is not None
            and shifted.worst.gap > 0
        )


def test_numbers_that_are_no_choice_are_judged_by_no_scores():
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((8, 5))
    assert (
        ties.by_rank(
            rng.integers(0, 5, (8, 2)), rng.integers(0, 5, (8, 2)), scores, scores, 2.0**-24
        )
        is None
    )
    assert ties.by_rank(np.full((8, 1), 7), np.full((8, 1), 7), scores, scores, 2.0**-24) is None


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.0, "equal"), (0.25, "at most 0.25 apart, rounding explains 0.5")],
)
def test_what_is_said_of_a_choice_among_ties(gap, words):
    widest = ties.Gap(row=2, rank=0, reference=1, target=0, gap=gap, explained=0.5)
    choice = ties.Choice("topk", 7, tied=2, first=((2,), (0, 3)), widest=widest)
    assert choice.of_ties == (
        f"topk chooses differently in 2 of 7 rows ([2], [0, 3]), among scores that tie: {words}"
    )
    assert ties.Choice("topk", 7).of_ties == ""


def test_equal_scores_in_the_order_of_their_places():
    scores = np.array([[2.0, 1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    chosen = np.array([[4, 0, 2, 3, 1], [4, 3, 2, 1, 0]])
    assert ties.by_place(chosen, scores).tolist() == [[0, 2, 4, 1, 3], [4, 3, 2, 1, 0]]
    # Only those that stand side by side are put in order.
    assert ties.by_place(np.array([[4, 1, 0]]), scores[:1]).tolist() == [[4, 1, 0]]
