"""Pairs of which only recorded tensors exist: numpy networks in several precisions, with and
without faults; codes; statistics.
"""

import json

import ml_dtypes
import numpy as np
import pytest

import whence
from whence import store
from whence.cli import execute

LAYERS, WIDTH, ROWS = 10, 32, 24
RNG = np.random.default_rng(3)
WEIGHTS = [RNG.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in range(LAYERS)]
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)


def network(dtype=np.float32, *, blocked=False, fault=None, at=LAYERS - 1):
    """Inputs, every layer, the output. blocked: sums in another order. fault: done to the result of
    layer `at`.
    """
    x = X.astype(dtype)
    tensors = {"x": X}
    for i, weight in enumerate(WEIGHTS):
        w = weight.astype(np.float32).astype(dtype).astype(np.float32)
        y = x.astype(np.float32)
        product = (
            sum(y[:, k : k + 4] @ w[k : k + 4] for k in range(0, WIDTH, 4)) if blocked else y @ w
        )
        x = (y + np.tanh(product)).astype(dtype)
        if fault is not None and i == at:
            x = fault(x.astype(np.float32)).astype(dtype)
        tensors[f"layer {i}"] = x
    tensors["result"] = x
    return tensors


def chosen(tensors, how):
    names = (
        ["x", *(f"layer {i}" for i in range(1, LAYERS, 3)), "result"]
        if how == "third"
        else ["x", "result"]
    )
    return {name: tensors[name] for name in names}


BF16 = ml_dtypes.bfloat16
BENIGN = [
    (np.float32, np.float32, True),
    (np.float32, BF16, False),
    (np.float32, np.float16, True),
    (BF16, BF16, True),
    (np.float16, np.float16, True),
    (np.float64, np.float32, False),
]


@pytest.mark.parametrize("how", ["io", "third"])
@pytest.mark.parametrize(("one", "two", "blocked"), BENIGN)
def test_rounding_in_a_whole_network_is_no_fault(tmp_path, one, two, blocked, how):
    whence.record(tmp_path / "a", chosen(network(one), how))
    whence.record(tmp_path / "b", chosen(network(two, blocked=blocked), how))
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert (result.status, result.findings) == ("same", ())


def channel(x):
    out = x.copy()
    out[:, 3] += 2
    return out


FAULTS = {
    "factor": (lambda x: x * np.float32(1.3), "different"),
    "constant": (lambda x: x + np.float32(0.4), "different"),
    "channel": (channel, "different"),
    "moved": (lambda x: np.roll(x, 1, 0), "different"),
    "order": (lambda x: x[:, ::-1], "different"),
    "not a number": (lambda x: np.where(x == x.max(), np.nan, x), "different"),
    "without shape": (lambda x: x * (1 + 0.1 * np.sin(1000 * x)), "undecided"),
}


@pytest.mark.parametrize("how", ["io", "third"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_clear_fault_is_never_the_same(tmp_path, name, dtype, how):
    fault, expected = FAULTS[name]
    whence.record(tmp_path / "a", chosen(network(np.float32), how))
    whence.record(tmp_path / "b", chosen(network(dtype, fault=fault), how))
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    # In float32 throughout, seven parts in a hundred are too many for any rounding.
    assert result.status == (
        "different" if name == "without shape" and dtype is np.float32 else expected
    )
    if result.status == "undecided":
        assert "to decide it, capture both runs" in result.headline


def test_a_fault_early_on_is_not_lost_in_what_follows(tmp_path):
    whence.record(tmp_path / "a", chosen(network(), "io"))
    whence.record(tmp_path / "b", chosen(network(fault=lambda x: x * np.float32(1.01), at=0), "io"))
    assert whence.compare(tmp_path / "a", tmp_path / "b").status != "same"


def test_of_statistics_alone_nothing_is_the_same_but_equal_digests(tmp_path):
    for name, tensors in (
        ("a", network()),
        ("b", network(blocked=True)),
        ("c", network(fault=lambda x: x[::-1])),
        ("d", network()),
    ):
        whence.record(tmp_path / name, chosen(tensors, "io"))
        store.scrub(str(tmp_path / name), None, force=True)
    answers = {name: whence.compare(tmp_path / "a", tmp_path / name) for name in "bcd"}
    assert {name: r.status for name, r in answers.items()} == {
        "b": "undecided",
        "c": "undecided",
        "d": "same",
    }
    assert "record the elements" in answers["c"].headline


def test_tokens_that_part_are_open(tmp_path):
    ids = np.arange(12).reshape(2, 6)
    for side, tokens in (("a", [4, 9]), ("b", [4, 8])):
        whence.record(tmp_path / side, {"ids": ids, "tokens": np.array(tokens)})
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert (result.status, result.findings) == ("undecided", ())
    assert "scores" in result.headline


def quantised(x, scale, rounding=np.rint, zero=0, dtype=np.int8):
    ends = np.iinfo(dtype)
    return np.clip(rounding(x / np.float32(scale)) + zero, ends.min, ends.max).astype(dtype)


@pytest.mark.parametrize(("zero", "dtype"), [(0, np.int8), (128, np.uint8)])
def test_codes_at_both_ends_of_their_range_are_compared(tmp_path, zero, dtype):
    how = {"zero": zero, "dtype": dtype}
    right = quantised(X, 0.01, **how)
    ends = np.iinfo(dtype)
    assert {int(right.min()), int(right.max())} == {ends.min, ends.max}
    step = right.astype(np.int64)
    step[0, 0] += 1 if step[0, 0] < ends.max else -1
    for side, codes in (
        ("a", right),
        ("b", step.astype(dtype)),
        ("c", quantised(X, 0.02, **how)),
        ("d", quantised(-X, 0.01, **how)),
    ):
        whence.record(tmp_path / side, {"x": X, "codes": codes})
    statuses = {side: whence.compare(tmp_path / "a", tmp_path / side).status for side in "abcd"}
    assert (statuses["a"], statuses["b"]) == ("same", "same")
    assert statuses["c"] != "same"
    assert statuses["d"] == "different"
    for side in "bcd":
        assert whence.compare(tmp_path / "a", tmp_path / side).incomparable == 0


def test_pixels_are_no_mask(tmp_path):
    image = RNG.integers(0, 256, (2, 3, 8, 8)).astype(np.uint8)
    image[0, 0, 0, :2] = 0, 255
    other = image.copy()
    other[0, 1] = 7
    for side, pixels in (("a", image), ("b", other)):
        whence.record(tmp_path / side, {"image": pixels, "result": X})
    assert whence.compare(tmp_path / "a", tmp_path / "b").status == "undecided"


def test_on_the_command_line(tmp_path, capsys):
    whence.record(tmp_path / "a", chosen(network(), "io"))
    whence.record(tmp_path / "b", chosen(network(fault=FAULTS["factor"][0]), "io"))
    assert (
        execute(
            [
                "compare",
                str(tmp_path / "a"),
                str(tmp_path / "b"),
                "--format",
                "json",
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    finding = json.loads(capsys.readouterr().out)["findings"][0]
    assert (
        "everything is multiplied by 1.3, which rounding at no depth makes" in finding["sentence"]
    )
