import ml_dtypes
import numpy as np
import pytest

from whence import judge

RNG = np.random.default_rng(1)
W = RNG.standard_normal((12, 12)).astype(np.float32)


def test_a_checkpoint_rounded_to_the_targets_precision_is_equal_in_both_directions():
    low = W.astype(ml_dtypes.bfloat16)
    assert judge.parameters(W, low).equal
    assert judge.parameters(low, W).equal
    assert judge.parameters(low, low.astype(np.float32)).equal


def test_one_bit_is_a_difference():
    other = W.copy()
    other.view(np.uint32)[4, 5] ^= 1
    found = judge.parameters(W, other)
    assert (found.equal, found.index) == (False, (4, 5))
    assert "1 of 144" in found.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.T, "transposed"),
        (lambda w: w * np.float32(1.01), "scaled by 1.01"),
        (lambda w: -w, "sign flipped"),
        (lambda w: w[::-1], "back to front along axis 0"),
        (lambda w: w * 0, "all zero"),
        (lambda w: np.where(np.arange(12)[:, None] == 3, -w, w), "sign flipped in row 3 of 12"),
        (
            lambda w: np.where(np.arange(12)[:, None] == 3, 2 * w, w),
            "12 of 144 elements differ, in row 3",
        ),
        (
            lambda w: np.concatenate([w[8:], w[:4], w[4:8]]),
            "3 blocks of 4 rows in another order: 2, 0, 1",
        ),
        (
            lambda w: w.reshape(6, 2, 12)[[1, 0, 2, 3, 5, 4]].reshape(12, 12),
            "6 blocks of 2 rows in another order: 1, 0, 2, 3, 5, 4",
        ),
        (
            lambda w: w[:, [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]],
            "4 blocks of 3 columns in another order: 0, 2, 1, 3",
        ),
        (
            lambda w: w.reshape(2, 2, 3, 12).swapaxes(1, 2).reshape(12, 12),
            "rows interleaved, halves as pairs, in 2 blocks of 6",
        ),
        (
            lambda w: w.reshape(2, 3, 2, 12).swapaxes(1, 2).reshape(12, 12),
            "rows de-interleaved, pairs as halves, in 2 blocks of 6",
        ),
        (lambda w: w[:, [1, 0, *range(2, 12)]], "columns in another order (2 of 12 moved)"),
        (lambda w: w.astype(ml_dtypes.bfloat16), "rounded to bfloat16"),
        (lambda w: w.astype(np.float16), "rounded to float16"),
        (lambda w: w.astype(ml_dtypes.float8_e4m3fn), "rounded to float8_e4m3fn"),
    ],
)
def test_what_happened_is_said(change, words):
    assert words in judge.parameters(W, np.ascontiguousarray(change(W)).astype(np.float32)).sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.swapaxes(2, 3), "axes 2 and 3 swapped"),
        (lambda w: w.swapaxes(0, 1), "axes 0 and 1 swapped"),
        (lambda w: np.flip(w, (2, 3)), "back to front along axes 2 and 3"),
        (lambda w: np.flip(w, 3), "back to front along axis 3"),
    ],
)
def test_a_kernel_that_was_turned_is_said_to_be(change, words):
    kernel = np.random.default_rng(1).standard_normal((4, 4, 3, 3)).astype(np.float32)
    assert words in judge.parameters(kernel, np.ascontiguousarray(change(kernel))).sentence


def test_other_shapes_and_kinds_are_not_comparable_rather_than_different():
    assert not judge.parameters(W, W[:4]).comparable
    assert not judge.parameters(W, np.zeros((12, 12), np.int8)).comparable


def test_a_transposed_rectangle_is_recognised_by_its_shape():
    assert "transposed" in judge.parameters(W[:4], np.ascontiguousarray(W[:4].T)).sentence


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_shapes(shape):
    w = np.asarray(RNG.standard_normal(shape), dtype=np.float32)
    assert judge.parameters(w, w.copy()).equal
    if w.size:
        assert not judge.parameters(w, w + 1).equal


def test_nan_payloads_and_signed_zeros_are_bits():
    a = np.array([0.0, np.nan], np.float32)
    b = np.array([-0.0, np.nan], np.float32)
    assert judge.parameters(a, a.copy()).equal
    assert "different bits" in judge.parameters(a, b).sentence


def test_two_roundings_of_one_number_are_equal_where_neither_dtype_holds_the_other():
    w = (RNG.standard_normal(4096) * np.logspace(-7, 3, 4096)).astype(np.float32)
    half, brain = w.astype(np.float16), w.astype(ml_dtypes.bfloat16)
    assert (half.astype(ml_dtypes.bfloat16) != brain).any()  # rounded twice
    assert judge.parameters(half, brain).equal
    assert judge.parameters(brain, half).equal
    other = brain.copy()
    other.view(np.uint16)[2000] += 1
    assert not judge.parameters(half, other).equal


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_something_in_place_of_zeros_has_no_scale(dtype):
    zeros = np.zeros((3, 4), dtype)
    other = np.arange(12).reshape(3, 4).astype(dtype)
    found = judge.parameters(zeros, other)
    assert (found.equal, found.comparable) == (False, True)
    assert "scale" not in found.numbers
    assert not found.sentence.startswith("scaled")
    assert judge.parameters(other, zeros).sentence.startswith("all zero in the target")


@pytest.mark.parametrize("types", [("int32", "int64"), ("int64", "uint8"), ("bool", "int8")])
def test_whole_numbers_of_another_width_are_equal_by_their_values(types):
    reference, target = (np.array([[0, 1], [1, 0]], t) for t in types)
    assert judge.parameters(reference, target).equal
    changed = target.copy()
    changed[1, 1] = 1
    assert not judge.parameters(reference, changed).equal


def shifted(table, steps):
    """Each element that many last digits further from zero."""
    return (table.view(np.int32) + steps.astype(np.int32)).view(np.float32)


def test_tables_computed_twice_differ_by_rounding():
    """A table of sines from float64 and from float32, and last digits up and down by chance."""
    places = np.arange(1, 513)[:, None] / 10000 ** (np.arange(64) / 64)
    exact = np.sin(places).astype(np.float32)
    computed = np.sin(places.astype(np.float32)).astype(np.float32)
    assert not judge.parameters(exact, computed).equal
    assert not judge.parameters(exact, computed).is_rounding  # the angle was rounded: far more
    steps = RNG.integers(-1, 2, exact.shape)
    assert judge.parameters(exact, shifted(exact, steps)).is_rounding
    low = (exact.astype(ml_dtypes.bfloat16), shifted(exact, steps).astype(ml_dtypes.bfloat16))
    assert judge.parameters(*low).is_rounding or judge.parameters(*low).equal


def test_the_last_digit_is_that_of_the_dtype():
    w = RNG.standard_normal((64, 64))
    assert not judge.parameters(w, w + 1e-8 * RNG.choice([-1.0, 1.0], w.shape)).is_rounding
    near = np.nextafter(w, w + RNG.choice([-1.0, 1.0], w.shape))
    assert judge.parameters(w, near).is_rounding


def test_digits_cut_off_are_no_rounding():
    w = RNG.standard_normal((64, 64)).astype(np.float32)
    cut = shifted(w, -RNG.integers(0, 2, w.shape))
    assert not judge.parameters(w, cut).is_rounding
    assert not judge.parameters(w, w * np.float32(1 + 1e-5)).is_rounding
    dropped = w.copy()
    dropped[3, 4] = 0
    assert not judge.parameters(w, dropped).is_rounding
    low = w.astype(ml_dtypes.bfloat16)
    truncated = (w.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(ml_dtypes.bfloat16)
    assert not judge.parameters(low, truncated).is_rounding


def drawn_elsewhere(weights, roundings=40.0):
    """Four elements of ten moved by up to so many roundings of the whole, as torch.randn does."""
    rng = np.random.default_rng(2)
    moved = rng.uniform(-1, 1, weights.shape) * (rng.random(weights.shape) < 0.4)
    size = float(np.sqrt(np.mean(weights.astype(np.float64) ** 2)))
    return (weights + moved * roundings * 2.0**-24 * size).astype(weights.dtype)


def test_weights_drawn_from_one_seed_on_two_processors_differ_by_rounding():
    w = RNG.standard_normal((64, 64)).astype(np.float32)
    assert judge.parameters(w, drawn_elsewhere(w)).is_rounding
    low = (w.astype(ml_dtypes.bfloat16), drawn_elsewhere(w).astype(ml_dtypes.bfloat16))
    assert judge.parameters(*low).is_rounding
    assert not judge.parameters(w, drawn_elsewhere(w, 1000)).is_rounding


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * np.float32(1 + 2e-6),
        lambda w: w + np.float32(2e-6),
        lambda w: np.where(np.arange(w.size).reshape(w.shape) == 70, w + np.float32(2e-6), w),
    ],
    ids=["a factor", "a constant", "one element"],
)
def test_small_changes_that_no_kernel_makes_are_differences(change):
    w = RNG.standard_normal((64, 64)).astype(np.float32)
    assert not judge.parameters(w, change(w)).is_rounding


def test_last_digits_that_moved_one_way_are_told_apart():
    w = 1 + RNG.random(64).astype(np.float32)
    moved = shifted(w, np.arange(64) % 2)
    difference = judge.parameters(w, moved)
    assert (difference.is_rounding, difference.is_last_digit) == (False, True)
    assert not judge.parameters(w, shifted(w, 3 * (np.arange(64) % 2))).is_last_digit
    zeros = np.zeros(64, np.float32)
    assert judge.parameters(zeros, np.nextafter(zeros, np.float32(1))).is_last_digit
    low = w.astype(ml_dtypes.bfloat16)
    cut = (w.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(ml_dtypes.bfloat16)
    assert not judge.parameters(low, cut).is_last_digit
