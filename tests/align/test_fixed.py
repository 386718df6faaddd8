"""Rows of a fixed length without a mask: the padding is found from the ids, or it is said that it
cannot be.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.align.batches import prompts
from whence.align.batches.batch import Batch
from whence.records import Call

LENGTH = 16


def fed(ids, step=0, **how):
    rows = tuple((tuple(map(int, row)), 0, ()) for row in ids)
    call = Call(
        id=step,
        rank=0,
        root="model",
        step=step,
        phase="forward",
        scope="",
        op="",
        op_type="Net",
        occurrence=0,
        order=step,
    )
    return Batch(call, (len(ids), len(ids[0])), rows, None, False, **how)


def written(texts, token, *, behind):
    out = np.full((len(texts), LENGTH), token)
    for row, text in enumerate(texts):
        out[row, slice(0, len(text)) if behind else slice(LENGTH - len(text), None)] = text
    return out


def loop(texts, new, token, *, behind):
    """What a greedy loop gives the model, step by step, and the texts then. new: tokens of each
    row.
    """
    calls, real = [], []
    for k in range(len(new[0]) + 1):
        now = [text + more[:k] for text, more in zip(texts, new, strict=True)]
        calls.append(written(now, token, behind=behind))
        real.append([tuple(text) for text in now])
    return calls, real


def found(calls, known=()):
    out, why = prompts.unpadded(None, [fed(ids, k) for k, ids in enumerate(calls)], known)
    return (
        [[row[0] for row in one.rows] for one in out],
        [[row[1] for row in one.rows] for one in out],
        why,
    )


@pytest.mark.parametrize(("token", "behind"), list(itertools.product([0, 7], [True, False])))
def test_tokens_that_grow(token, behind):
    first, real = loop(
        [[5, 3, 8], [4, 4, 9, 2, 6]], [[11, 12, 13], [14, 15, 16]], token, behind=behind
    )
    second, more = loop([[9, 9], [1, 2, 3, 5]], [[21], [22]], token, behind=behind)
    rows, starts, why = found([*first, *second])
    assert (rows, why) == ([*real, *more], "")
    assert starts == [
        [0 if behind else LENGTH - len(text) for text in texts] for texts in (*real, *more)
    ]


def test_a_token_that_looks_like_padding_is_real_where_the_text_goes_on():
    calls, real = loop([[5, 3, 8], [4, 4, 9]], [[11, 0, 0, 12], [1, 2, 3, 4]], 0, behind=True)
    assert found(calls)[0] == real


def test_a_row_that_has_ended_stays_as_it_is():
    texts = [[[5, 3], [4, 4, 9]], [[5, 3, 1], [4, 4, 9, 2]], [[5, 3, 1], [4, 4, 9, 2, 6]]]
    rows, _, why = found([written(t, 0, behind=True) for t in texts])
    assert (rows, why) == ([[tuple(t) for t in step] for step in texts], "")


def test_settings_name_the_padding_of_single_calls():
    calls = [written([[5, 3, 8]], 2, behind=True), written([[6, 1, 9, 4]], 2, behind=True)]
    assert found(calls, [2])[0] == [[(5, 3, 8)], [(6, 1, 9, 4)]]


def test_it_is_said_where_nothing_tells():
    rows, _, why = found([written([[5, 3, 8]], 2, behind=True)])
    assert "ends in 13 times 2" in why
    assert "is not known" in why
    assert rows == [[(5, 3, 8, *[2] * 13)]]


@pytest.mark.parametrize(
    "calls",
    [
        [np.arange(32).reshape(2, 16), np.arange(32, 64).reshape(2, 16)],
        [
            np.array([[1, 2, 2]]),
            np.array([[1, 2, 2, 2]]),
            np.array([[1, 2, 2, 2, 2]]),
        ],  # a text that gets longer, given whole
        [np.array([[1, 2, 2, 2, 2]]), np.array([[2]])],  # goes on with a cache
        [np.array([[1, 2, 3, 4, 5]]), np.array([[1, 2, 3, 4, 9]])],  # choices behind one question
    ],
)
def test_other_calls_are_left_alone(calls):
    rows, _, why = found(calls)
    assert (rows, why) == ([[tuple(map(int, row)) for row in ids] for ids in calls], "")


def test_rows_with_a_mask_are_left_alone():
    one = fed(written([[5, 3, 8]], 0, behind=True), padding_from="mask")
    assert prompts.unpadded(None, [one]) == ([one], "")


@given(st.data())
def test_any_loop(data):
    token, behind = data.draw(st.integers(0, 20)), data.draw(st.booleans())
    ids = st.integers(0, 20).filter(lambda n: n != token)
    texts = data.draw(st.lists(st.lists(ids, min_size=2, max_size=5), min_size=1, max_size=3))
    steps = data.draw(st.integers(1, 6))
    new = [data.draw(st.lists(ids, min_size=steps, max_size=steps)) for _ in texts]
    calls, real = loop(texts, new, token, behind=behind)
    assert found(calls)[0] == real
