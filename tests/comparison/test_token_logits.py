"""`-cl token`: the one tensor of each token in two dumps, whatever their names, layouts and
depth.
"""

import csv

import numpy as np
import pytest

from whence.errors import UsageError
from whence.workflows.msit_report import cmp_report
from whence.writers.support import encodings

VOCABULARY = 40


def logits(seed, tokens, batch=1, positions=1):
    return (
        np.random.default_rng(seed)
        .standard_normal((tokens, batch, positions, VOCABULARY))
        .astype(np.float32)
    )


def torch_dump(folder, steps, name="root.lm_head"):
    for token, array in enumerate(steps):
        place = folder / "cpu0_123" / str(token) / name
        place.mkdir(parents=True)
        encodings.write_torch(place / "output.pth", array)
    return str(folder / "cpu0_123")


def library_dump(folder, steps, operation="30_LmHeadOperation", tokens=None):
    code = {"float32": 0, "float16": 1}
    for token, array in zip(tokens or range(len(steps)), steps):
        place = folder / "ait_dump" / "tensors" / "0_77" / str(token) / operation / "after"
        place.mkdir(parents=True)
        data, dims = array.tobytes(), ",".join(map(str, array.shape))
        head = f"$Version=1.0\n$Object.Count=1\n$Object.Length={len(data)}\nformat=2\ndtype={code[array.dtype.name]}\ndims={dims}\n"
        (place / "outtensor0.bin").write_bytes(
            f"{head}$Object.data=0,{len(data)}\n$End=1\n".encode() + data
        )
    return str(folder / "ait_dump" / "tensors" / "0_77")


def compared(tmp_path, golden, mine, level="token"):
    result, path = cmp_report(golden, mine, level=level, tool="ait", output=str(tmp_path / "out"))
    return result, list(csv.DictReader(path.read_text().splitlines()))


def noisy(array, seed=9, size=1e-6):
    return (array + size * np.random.default_rng(seed).standard_normal(array.shape)).astype(
        np.float32
    )


@pytest.mark.parametrize("level", ["token", "logits"])
@pytest.mark.parametrize(
    "deep", ["30_LmHeadOperation", "0_LlamaModel/30_ParallelLmHead/2_LinearOperation"]
)
def test_a_torch_dump_against_the_last_layer_of_a_library(tmp_path, level, deep):
    golden = logits(0, 5)
    mine = noisy(golden[:, :, -1])
    mine[3] *= 1.02
    result, rows = compared(
        tmp_path, torch_dump(tmp_path, golden), library_dump(tmp_path, mine, deep), level
    )
    assert (result.status, result.findings[0].step, result.coverage.measured) == ("different", 3, 5)
    assert [row["token_id"] for row in rows] == list("01234")
    assert [row["whence_verdict"] for row in rows] == ["noise", "noise", "noise", "off", "noise"]
    assert all(
        row["golden_data_path"].endswith("output.pth")
        and row["my_data_path"].endswith("outtensor0.bin")
        for row in rows
    )
    for row, one, other in zip(rows, golden[:, :, -1], mine, strict=True):
        a, b = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
        assert float(row["cosine_similarity"]) == pytest.approx(
            a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-9
        )
        assert float(row["relative_euclidean_distance"]) == pytest.approx(
            np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-3
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda x: x,
            lambda x: x[:, :, -1],
        ),  # (batch, positions, vocabulary) against (batch, vocabulary)
        (lambda x: x, lambda x: x[:, :, -1:]),
        (lambda x: x[:, :, -1:], lambda x: x),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_layouts_of_one_batch_are_the_same(tmp_path, one, other, batch):
    made = logits(1, 4, batch, 6)
    result, rows = compared(
        tmp_path, torch_dump(tmp_path, one(made)), library_dump(tmp_path, other(made), "5_Head")
    )
    assert (result.status, result.coverage.measured, len(rows)) == ("same", 4 * batch, 4)
    assert {row["whence_verdict"] for row in rows} == {"identical"}


def test_positions_without_an_axis_for_the_batch(tmp_path):
    """The prompt has seven positions, each later token one: it is one row of the batch, and its
    last position counts.
    """
    made = [logits(2, 1, 1, 7)[0], *logits(3, 3)[:, :1]]
    result, _ = compared(
        tmp_path, torch_dump(tmp_path, made), library_dump(tmp_path, [step[0] for step in made])
    )
    assert (result.status, result.coverage.measured) == ("same", 4)


def test_what_cannot_be_compared_is_no_pass(tmp_path):
    golden = logits(4, 5)
    result, rows = compared(
        tmp_path,
        torch_dump(tmp_path, golden),
        library_dump(tmp_path, golden[1:, :, -1], tokens=[1, 2, 3, 7]),
    )
    assert result.status == "undecided"
    assert [
        (row["token_id"], row["cmp_fail_reason"]) for row in rows if row["cmp_fail_reason"]
    ] == [
        ("0", "only the reference has it"),
        ("4", "only the reference has it"),
        ("7", "only the target has it"),
    ]
    batches = compared(
        tmp_path / "b",
        torch_dump(tmp_path / "b", logits(5, 2, 2)),
        library_dump(tmp_path / "b", logits(5, 2, 3)),
    )
    assert batches[0].status == "undecided"
    assert batches[1][0]["cmp_fail_reason"] == "2 rows against 3"


@pytest.mark.parametrize("off", [[3], [2, 4]])
def test_one_token_off_and_the_others_bit_equal(tmp_path, off):
    golden = logits(6, 6)
    mine = golden[:, :, -1].copy()
    mine[off] *= 1.03
    result, rows = compared(tmp_path, torch_dump(tmp_path, golden), library_dump(tmp_path, mine))
    assert (result.status, result.findings[0].step) == ("different", off[0])
    assert [row["whence_verdict"] for row in rows] == [
        "off" if n in off else "identical" for n in range(6)
    ]


@pytest.mark.parametrize("off", [0, 1])
def test_an_early_token_by_one_factor_off_in_16_bits(tmp_path, off):
    golden = logits(11, 6).astype(np.float16)
    mine = golden[:, :, -1].copy()
    mine[off] *= np.float16(1.03)
    result, _ = compared(tmp_path, torch_dump(tmp_path, golden), library_dump(tmp_path, mine))
    assert (result.status, result.findings[0].step) == ("different", off)


def test_two_trees_of_files_whose_texts_part_are_judged_as_logits(tmp_path):
    golden = logits(12, 8).astype(np.float16)
    golden[3, 0, 0, :2] = 9.0, 9.008
    mine = noisy(golden, size=4e-3).astype(np.float16)
    mine[3, 0, 0, :2] = 9.008, 9.0
    mine[4:] = logits(13, 4)  # of another text
    result, _ = compared(
        tmp_path, torch_dump(tmp_path / "a", golden), torch_dump(tmp_path / "b", mine)
    )
    assert (result.status, result.findings, result.coverage.measured) == ("undecided", (), 4)


def test_precision_that_no_dump_tells(tmp_path):
    """0.6 % at every token alike: a 16-bit model rounds so, a float32 model does not."""
    golden = logits(6, 6)
    mine = noisy(golden[:, :, -1], size=6e-3)
    result, _ = compared(tmp_path, torch_dump(tmp_path, golden), library_dump(tmp_path, mine))
    assert result.status == "undecided"
    assert "at 6 of 6 tokens by more than float32 rounds" in result.headline
    assert "do not say in which the models computed" in result.headline
    half = compared(
        tmp_path / "h",
        torch_dump(tmp_path / "h", golden),
        library_dump(tmp_path / "h", mine.astype(np.float16)),
    )
    assert half[0].status == "same"
    shuffled = noisy(logits(7, 6)[:, :, -1], size=6e-3)
    assert (
        compared(
            tmp_path / "s",
            torch_dump(tmp_path / "s", golden),
            library_dump(tmp_path / "s", shuffled),
        )[0].status
        == "different"
    )


def test_texts_part_at_a_token_that_rounding_explains(tmp_path):
    golden = logits(8, 6)
    golden[2, 0, 0, :2] = 9.0, 9.0 + 2e-6
    mine = noisy(golden[:, :, -1])
    mine[2, 0, :2] = 9.0 + 2e-6, 9.0
    on = compared(tmp_path, torch_dump(tmp_path, golden), library_dump(tmp_path, mine))[0]
    assert (on.status, on.coverage.measured) == (
        "same",
        6,
    )  # what follows is alike: both were given the same token
    mine[3:] = logits(10, 3)[:, :, -1]
    parted = compared(
        tmp_path / "p", torch_dump(tmp_path / "p", golden), library_dump(tmp_path / "p", mine)
    )[0]
    assert (parted.status, parted.coverage.measured) == (
        "undecided",
        3,
    )  # two texts: the rest says nothing


def test_no_output_at_all_is_an_error(tmp_path):
    (tmp_path / "empty" / "cpu_1" / "0" / "root.a").mkdir(parents=True)
    encodings.write_torch(
        tmp_path / "empty" / "cpu_1" / "0" / "root.a" / "input_0.pth", np.ones((2, 3), np.float32)
    )
    with pytest.raises(UsageError, match="holds no output of any token"):
        cmp_report(
            str(tmp_path / "empty"), library_dump(tmp_path, logits(0, 1)[:, 0]), level="token"
        )


def test_a_tensor_of_another_width_is_no_vocabulary(tmp_path):
    """The last layer of a model whose head is a function returns states, not logits."""
    steps = logits(0, 4)
    result, rows = compared(
        tmp_path, torch_dump(tmp_path, steps), library_dump(tmp_path, steps[..., :8].copy())
    )
    assert result.status == "undecided"
    assert "40 entries against 8" in " ".join((result.headline, *result.notes))
    assert all(row["cmp_fail_reason"] for row in rows)


def test_a_head_that_the_model_scales_behind_it(tmp_path):
    steps = logits(0, 4)
    result, _ = compared(
        tmp_path,
        torch_dump(tmp_path, steps * np.float32(0.125), "root"),
        library_dump(tmp_path, steps),
    )
    assert result.status == "undecided"
    assert "a factor of 0.125" in result.headline
