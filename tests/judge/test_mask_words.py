"""What the difference of two masks is called."""

import numpy as np
import pytest

from whence.judge.mask_words import mask_words

CAUSAL = np.tril(np.ones((6, 6), bool))
LEFT = np.array([0, 0, 1, 1, 1, 1], bool)
EYE = np.eye(6, dtype=bool)
NEXT = np.tril(np.ones((6, 6), bool), 1)
LETS = "the target's mask lets "


@pytest.mark.parametrize("looks_away", [False, True])
@pytest.mark.parametrize(
    ("reference", "target", "words"),
    [
        (CAUSAL, NEXT, LETS + "each position see the next one"),
        (CAUSAL, CAUSAL | True, LETS + "each position see up to 5 later ones"),
        (CAUSAL, CAUSAL | (np.arange(6) == 3), LETS + "some positions see up to 3 later ones"),
        (NEXT, CAUSAL, "the target's mask hides later positions"),
        (CAUSAL & LEFT | EYE, CAUSAL, LETS + "padding be seen (keys 0, 1 of row 0)"),
        (CAUSAL | True, CAUSAL & True, "the target's mask hides later positions"),
        (CAUSAL, CAUSAL & LEFT | EYE, "the target's mask hides keys 0, 1 from all"),
        (CAUSAL, np.triu(CAUSAL, -2), "the target's mask hides earlier positions"),
        (
            CAUSAL & LEFT | EYE,
            NEXT,
            LETS + "each position see the next one and lets padding be seen (keys 0, 1 of row 0)",
        ),
        (
            np.broadcast_to(LEFT, (6, 6)) | EYE,
            np.ones((6, 6), bool),
            LETS + "padding be seen (keys 0, 1 of row 0)",
        ),
    ],
)
def test_words_of_a_difference(reference, target, words, looks_away):
    reference, target = reference[None], target[None]  # a row of a batch
    said = mask_words(reference ^ looks_away, target ^ looks_away)
    if words.startswith(LETS + "each position see the next one and"):
        assert "padding" in said and "see the next one" in said
    else:
        assert said == words
    assert mask_words(reference, reference) == ""


def test_rows_of_a_batch_and_keys_before_the_queries():
    """Heads and rows come before; a cache holds keys that are before all queries."""
    mask = np.stack([CAUSAL, CAUSAL & LEFT | EYE])[:, None]
    assert mask_words(mask, np.stack([CAUSAL, CAUSAL])[:, None]).endswith(
        "padding be seen (keys 0, 1 of row 1)"
    )
    cached = np.concatenate([np.ones((6, 4), bool), CAUSAL], 1)
    wide = np.concatenate([np.ones((6, 4), bool), NEXT], 1)
    assert mask_words(cached[None], wide[None]) == LETS + "each position see the next one"


@pytest.mark.parametrize("looks_away", [False, True])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_window_that_one_side_lacks_is_told_the_right_way_round(looks_away, more):
    """Also where keys that no query sees were added at the end."""
    queries, keys = np.arange(8)[:, None], np.arange(8 + more)[None]
    causal = keys <= queries
    window = causal & (keys > queries - 4)
    reference, target = (mask[None, None] ^ looks_away for mask in (window, causal))
    assert mask_words(reference, target) == LETS + "earlier positions be seen"
    assert mask_words(target, reference) == "the target's mask hides earlier positions"


def test_right_padding_is_padding_and_the_last_key_alone_is_not_known():
    right = CAUSAL & LEFT[::-1] | EYE
    assert "padding be seen (key 4 of row 0)" in mask_words(right[None], CAUSAL[None])


@pytest.mark.parametrize("looks_away", [False, True])
@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("four", [False, True])
def test_a_mask_of_rows_and_keys(looks_away, rows, four):
    """(row, key), also of as many rows as keys, and (row, 1, 1, key)."""
    padded = np.stack([LEFT] + [np.ones(6, bool)] * (rows - 1)) ^ looks_away
    full = np.ones((rows, 6), bool) ^ looks_away
    padded, full = (x[:, None, None] if four else x for x in (padded, full))
    assert mask_words(padded, full) == LETS + "padding be seen (keys 0, 1 of row 0)"
    assert mask_words(full, padded) == "the target's mask takes for padding (keys 0, 1 of row 0)"


def test_a_matrix_of_queries_and_keys_alone_is_known_by_its_triangle():
    assert mask_words(CAUSAL, NEXT) == LETS + "each position see the next one"
    assert mask_words(CAUSAL | True, CAUSAL) == "the target's mask hides later positions"


def test_what_is_not_known_has_no_words():
    assert mask_words(LEFT, ~LEFT) == mask_words(CAUSAL, CAUSAL[:5]) == ""
    # no row without padding says which value looks
    assert mask_words(np.stack([LEFT, LEFT]), np.stack([LEFT[::-1], LEFT])) == ""
    assert mask_words(np.ones((2, 6, 3), bool), np.zeros((2, 6, 3), bool)) == ""
