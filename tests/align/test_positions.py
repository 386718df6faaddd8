"""Position ids of one axis and of several, in every order of axes, and the rows they tell apart."""

import itertools

import numpy as np
import pytest

from handmade import Builder
from whence.align.batches import align
from whence.align.batches.align import Axes, SeenTokens, axes
from whence.align.batches.batch import _position_slots, batches_of
from whence.align.batches.positions import Course, places_of, rows_of
from whence.align.batches.sequences import same_batches, sequences_of

RNG = np.random.default_rng(3)
TABLE = RNG.standard_normal((90, 4)).astype(np.float32)


def course(*parts, start=0):
    """(tokens, 3) as Qwen2-VL counts them: a number is so many words, a triple a picture or film of
    (time, height, width).
    """
    out, at = [], start
    for part in parts:
        grid = (
            np.indices(part).reshape(3, -1).T
            if isinstance(part, tuple)
            else np.arange(part)[:, None] + np.zeros(3, int)
        )
        out.append(grid + at)
        at = int(out[-1].max()) + 1
    return np.concatenate(out)


def test_every_order_of_axes_gives_the_same_places():
    batch, tokens = 2, 5
    plain = np.stack([np.arange(5), np.arange(5) + 7])
    three = np.stack([plain, plain + 1, plain * 2], 2)
    for form in (three, np.moveaxis(three, 2, 0), np.moveaxis(three, 2, 1)):
        np.testing.assert_array_equal(places_of(form, (batch, tokens)), three)
    np.testing.assert_array_equal(places_of(plain, (batch, tokens))[..., 0], plain)
    np.testing.assert_array_equal(
        places_of(plain[0], (batch, tokens))[..., 0], [plain[0], plain[0]]
    )
    np.testing.assert_array_equal(places_of(plain[:1], (batch, tokens))[1, :, 0], plain[0])
    np.testing.assert_array_equal(
        places_of(np.moveaxis(three[:1], 2, 0), (batch, tokens))[1], three[0]
    )


def test_the_plain_position_in_front_counts_alone():
    plain, three = np.arange(6)[None, None], np.moveaxis(course(2, (1, 2, 2))[None], 2, 0)
    np.testing.assert_array_equal(
        places_of(np.concatenate([plain, three]), (1, 6))[0, :, 0], np.arange(6)
    )


def test_a_flattened_batch_has_its_axes_in_front():
    np.testing.assert_array_equal(places_of(course(2, (1, 2, 2)).T, (6,))[0], course(2, (1, 2, 2)))


@pytest.mark.parametrize(
    "array",
    [
        np.array(3),
        np.zeros((2, 7), int),
        np.zeros((2, 5)),
        np.zeros((1, 2, 3, 5), int),
        np.zeros((4, 4), int),
    ],
)
def test_what_is_of_another_form_tells_nothing(array):
    assert places_of(array, (2, 5)) is None


PICTURES = [
    [course(4, (1, 2, 3), 5), course(2), course((1, 3, 3), 4)],
    [course((2, 2, 2), 1), course((1, 1, 4), 3)],
    [course(3, (3, 4, 4), (1, 2, 2), 6), course(1), course(1), course(9)],
    [
        course(1, start=8),
        course(1, start=30),
        course(1, start=5),
    ],  # each the next word of another request
    [course(5, (1, 2, 2))[:7], course(3, (2, 4, 4), 2)],  # a chunk that ends inside a picture
]


@pytest.mark.parametrize("rows", PICTURES)
def test_rows_with_pictures_are_told_apart(rows):
    ends = np.cumsum([0, *map(len, rows)]).tolist()
    places = [tuple(p) for p in np.concatenate(rows).tolist()]
    assert list(rows_of(places)) == list(itertools.pairwise(ends))


def test_time_may_leap_or_stay():
    """Seconds of a film times a rate: frames at times 0, 0, 25, as whole numbers."""
    grid = course((3, 2, 2))
    grid[:, 0] = np.repeat([0, 0, 25], 4)
    places = [tuple(p) for p in (*grid.tolist(), [26, 26, 26], [27, 27, 27])]
    assert list(rows_of(places)) == [(0, 14)]


def test_words_behind_a_picture_go_on_above_its_highest_number():
    row = Course((0, 0, 0))
    row.go([tuple(p) for p in course((1, 2, 5)).tolist()])
    assert row.follows((5, 5, 5))
    assert not row.follows((10, 10, 10)), "the number of its tokens"


def run(*steps):
    """A root that turns ids into rows of a table, and its positions into cosines, which lie behind
    the axis of positions.
    """
    made = Builder()
    for step, inputs in enumerate(steps):
        ids, places = np.asarray(inputs["input_ids"]), np.asarray(inputs["position_ids"])
        cos = np.cos(places[..., None] * np.array([1.0, 0.3], np.float32)).astype(np.float32)
        slots = {f"input.{name}": np.array(array) for name, array in inputs.items()}
        root = made.call("", {**slots, "output.0": TABLE[ids]}, op_type="Lm", root="Lm", step=step)
        made.call(
            "rotary_emb",
            {"input.1": places, "output.0": cos},
            op_type="Rotary",
            root="Lm",
            step=step,
            parent=root,
        )
    return made.run()


PLACES = (course(4, (1, 2, 3), 2), course(5), course(2, (1, 2, 2), 1))
ROWS = [(np.arange(len(p)) + 20 * n, p) for n, p in enumerate(PLACES, start=1)]


def alone():
    return run(*({"input_ids": ids[None], "position_ids": p.T[:, None]} for ids, p in ROWS))


def batched(rows=ROWS):
    """Left-padded rows; padding stands at 1."""
    width = max(len(ids) for ids, _ in rows)
    (ids, mask), places = np.zeros((2, len(rows), width), int), np.ones((3, len(rows), width), int)
    for b, (tokens, p) in enumerate(rows):
        (
            ids[b, width - len(tokens) :],
            mask[b, width - len(tokens) :],
            places[:, b, width - len(tokens) :],
        ) = tokens, 1, p.T
    return run({"input_ids": ids, "attention_mask": mask, "position_ids": places})


def cached():
    """Each prompt but for its last token, then that with a cache."""
    parts = [[(ids[:-1], p[:-1]), (ids[-1:], p[-1:])] for ids, p in ROWS]
    return run(
        *(
            {"input_ids": ids[None], "position_ids": p.T[:, None]}
            for both in parts
            for ids, p in both
        )
    )


def flat():
    """As engines hand it on: one axis of tokens, the axes of positions in front."""
    return run(
        {
            "input_ids": np.concatenate([i for i, _ in ROWS]),
            "position_ids": np.concatenate([p for _, p in ROWS]).T,
        }
    )


@pytest.mark.parametrize("made", [alone, batched, cached, flat])
def test_the_same_sequences_however_they_are_batched(made):
    own = made()
    assert sorted(a.tokens for a in sequences_of(batches_of(own, own.calls[::2]))) == sorted(
        tuple(ids.tolist()) for ids, _ in ROWS
    )


@pytest.mark.parametrize("made", [batched, cached, flat])
def test_each_row_faces_itself_with_its_positions_and_their_cosines(made):
    """Three rows and three axes of positions: the extents alone do not tell which axis is which."""
    faced = align.align_batches(alone(), made())
    assert not faced.parted
    for index, (ids, places) in enumerate(ROWS):
        expected = {"input.1": places, "output.0": np.cos(places[..., None] * np.array([1.0, 0.3]))}
        for own in (faced.reference, faced.target):
            root, rotary = [
                c
                for c in own.calls
                if (c.step, c.micro) == (own.calls[2 * index].step, own.calls[2 * index].micro)
            ][:2]
            scores = next(own.array(r.record) for r in root.refs if r.slot == "output.0")
            np.testing.assert_array_equal(scores.reshape(-1, 4), TABLE[ids])
            for slot, wanted in expected.items():
                found = next(own.array(r.record) for r in rotary.refs if r.slot == slot)
                np.testing.assert_allclose(
                    np.moveaxis(found.reshape(3, len(ids), -1), 0, 1),
                    wanted.reshape(len(ids), 3, -1),
                    rtol=1e-5,
                )


def test_batches_of_one_form_are_left_alone():
    one, two = batched(), batched()
    assert same_batches(batches_of(one, one.calls[:1]), batches_of(two, two.calls[:1]))


FRONTS = frozenset({3})


@pytest.mark.parametrize(
    "padded",
    [
        "",
        "attention_mask",
        "decoder_attention_mask",
    ],
)
def test_a_row_of_an_encoder_and_its_decoder_is_one_unit_with_its_padding(padded):
    encoder, decoder = np.array([[5, 6, 7, 8], [9, 8, 7, 6]]), np.array([[1, 2], [1, 3]])
    masks = {"attention_mask": np.ones((2, 4)), "decoder_attention_mask": np.ones((2, 2))}
    if padded:
        masks[padded][1, -1] = 0
    made = Builder()
    made.call(
        "",
        {"input.input_ids": encoder, "input.decoder_input_ids": decoder}
        | {f"input.{name}": mask.astype(np.int64) for name, mask in masks.items()},
    )
    run = made.run()
    real = [[decoder[0], encoder[0]], [decoder[1], encoder[1]]]
    if padded:
        half = ("decoder_attention_mask", "attention_mask").index(padded)
        real[1][half] = real[1][half][:-1]
    assert [row.tokens for row in batches_of(run, run.calls)[0].rows] == [
        (((tuple(d.tolist()), 0, 2), (tuple(e.tolist()), 0, 4)),) for d, e in real
    ]


@pytest.mark.parametrize(
    ("counted", "is_position"),
    [([0, 1, 2, 3, 4, 5], True), ([0, 0, 0, 1, 2, 3], True), ([4, 4, 5, 5, 6, 6], False)],
)
def test_an_integer_beside_the_tokens_is_a_position_if_it_mostly_counts_up(counted, is_position):
    """Steps of one: five of five, three of five, two of five."""
    made = Builder()
    ids, counted = (np.array([row]) for row in ([7, 3, 9, 1, 4, 8], counted))
    made.call("", {"input.input_ids": ids, "input.places": counted, "output.0": TABLE[:6]})
    run = made.run()
    assert ("places" in _position_slots(run, run.calls)) == is_position


@pytest.mark.parametrize(
    ("sights", "expected"),
    [
        ([((3, 2, 5), 2, 5, 5), ((3, 2, 1), 2, 1, 6)], Axes(1, 2)),
        ([((3, 3, 5, 8), 3, 5, 5), ((3, 3, 1, 8), 3, 1, 6)], Axes(1, 2)),
        ([((3, 1, 5), 2, 5, 5), ((3, 1, 1), 2, 1, 6)], Axes(None, 2)),
        ([((3, 9), None, 9, 9), ((3, 2), None, 2, 2)], Axes(None, 1)),
        ([((2, 3, 5, 8), 2, 5, 5), ((2, 3, 1, 8), 2, 1, 6)], Axes(0, 2)),
    ],
)
def test_an_axis_of_positions_lies_in_front(sights, expected):
    seen = [
        SeenTokens(shape, batch, width, total, fronts=FRONTS)
        for shape, batch, width, total in sights
    ]
    assert axes("input.position_ids", False, seen) == expected
