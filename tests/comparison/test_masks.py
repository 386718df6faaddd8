"""A mask in another form is the same mask: True and False, 0 and the smallest number."""

import ml_dtypes
import numpy as np
import pytest

from whence.comparison.prepare.masks import hide_the_same, in_form_of

LOOK = np.tril(np.ones((5, 5), bool))[None, None]  # (batch, head, query, key)
FORMS = {
    "bool": LOOK,
    "look away": ~LOOK,
    "float32": np.where(LOOK, 0, np.finfo(np.float32).min).astype(np.float32),
    "bfloat16": np.where(LOOK, 0, float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)).astype(
        ml_dtypes.bfloat16
    ),
    "infinite": np.where(LOOK, 0, -np.inf).astype(np.float16),
    "ones": LOOK.astype(np.float32),
    "int64": LOOK.astype(np.int64),
}


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_any_form_is_read_in_any_other(one, other):
    got = in_form_of(FORMS[one], FORMS[other])
    assert got.dtype == FORMS[one].dtype
    np.testing.assert_array_equal(got, FORMS[one])


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_another_mask_stays_another_mask(one, other):
    wrong = FORMS[other].copy()
    wrong[..., 2, 3] = wrong[..., 0, 0]  # looks one further
    expected = FORMS[one].copy()
    expected[..., 2, 3] = expected[..., 0, 0]
    np.testing.assert_array_equal(in_form_of(FORMS[one], wrong), expected)


def test_a_mask_that_blocks_nothing():
    np.testing.assert_array_equal(
        in_form_of(np.zeros((2, 3), np.float32), np.ones((2, 3), bool)), np.zeros((2, 3))
    )
    np.testing.assert_array_equal(
        in_form_of(np.ones((2, 3), bool), np.zeros((2, 3), np.float32)), np.ones((2, 3), bool)
    )


@pytest.mark.parametrize(
    "numbers", [np.linspace(-1, 1, 25), np.full(25, 0.5), np.array([np.nan] * 25), np.arange(25)]
)
def test_numbers_are_no_mask(numbers):
    numbers = numbers.astype(np.float32).reshape(LOOK.shape)
    assert in_form_of(LOOK, numbers) is None
    assert in_form_of(numbers, LOOK) is None


KEYS = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])  # (batch, keys), padded on the left
CAUSAL = np.tril(np.ones((5, 5), bool))
BY_QUERY = KEYS.astype(bool)[:, None, None, :] & CAUSAL  # (batch, head, query, key)


def with_room(mask, room=3):
    return np.pad(mask, [(0, 0)] * 3 + [(0, room)])


@pytest.mark.parametrize("form", [KEYS, KEYS.astype(bool), BY_QUERY])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_other_shapes_may_say_the_same(form, additive):
    wide = with_room(BY_QUERY)
    if additive:
        wide = np.where(wide, 0, np.finfo(np.float32).min).astype(np.float32)
    assert hide_the_same(form, wide) and hide_the_same(wide, form)


def test_a_decode_step_says_the_same_with_room_behind_its_keys():
    one = with_room(BY_QUERY[:, :, -1:])
    assert hide_the_same(KEYS, one)
    assert not hide_the_same(KEYS[::-1], one)


def test_masks_of_other_shapes_that_say_something_else():
    ahead = with_room(KEYS.astype(bool)[:, None, None, :] & np.tril(np.ones((5, 5), bool), 1))
    looks_in_room = with_room(BY_QUERY)
    looks_in_room[..., -1] = True
    for wrong in (ahead, looks_in_room, with_room(BY_QUERY)[:1], with_room(CAUSAL[None, None])):
        assert not hide_the_same(KEYS, wrong)
    assert not hide_the_same(np.full((2, 5), 7), with_room(BY_QUERY))  # is not a mask
