"""Raw bytes of tensors: their shape from a file beside them, their name, the other run, the user."""

import json

import ml_dtypes
import numpy as np
import pytest

import whence
from readers import hostile
from whence.cli import execute
from whence.errors import UnreadableRun, UsageError, WhenceError
from whence.readers import open_run
from whence.readers.encodings import raw_form
from whence.records import missing_of
from whence.workflows.reopen import runs_of

ARRAY = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
SAID = {"shape": [2, 3, 4], "dtype": "float32"}


def states(sign=1):
    x, out = np.random.default_rng(3).standard_normal((4, 8)), {}
    for layer in range(4):
        y = np.tanh(x @ np.random.default_rng(layer).standard_normal((8, 8)))
        x = x + (sign if layer == 2 else 1) * y
        out[f"layers.{layer}"] = x.astype(np.float32)
    return out


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ("x.json", json.dumps(SAID)),
        ("x.bin.json", json.dumps({"dims": [2, 3, 4], "type": "f32"})),
        ("x.shape", "2x3x4:float32\n"),
        ("x.txt", "(2, 3, 4) torch.float32\n"),
        ("shapes.json", json.dumps({"x": [2, 3, 4]})),
        ("shapes.json", json.dumps({"x": "2x3x4:float32", "y": "9:int8"})),
        ("manifest.json", json.dumps({"tensors": [{"file": "y.bin"}, {"file": "x.bin", **SAID}]})),
        ("meta.json", json.dumps([{"name": "x", "shape": [2, 3, 4], "dtype": "<f4"}])),
    ],
)
def test_a_file_beside_tells_the_shape(beside, text, tmp_path):
    ARRAY.tofile(tmp_path / "x.bin")
    (tmp_path / beside).write_text(text)
    for path in (tmp_path, tmp_path / "x.bin"):
        run = open_run(path)
        assert run.array(0).tobytes() == ARRAY.tobytes() and run.array(0).shape == (2, 3, 4)
        assert run.records[0].dtype == "float32" and not missing_of(run)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.int8, ml_dtypes.bfloat16])
def test_names_and_dtypes_are_bit_exact(dtype, tmp_path):
    array = (ARRAY * 10).astype(dtype)
    array.tofile(tmp_path / f"x_2x3x4_{np.dtype(dtype).name}.raw")
    run = open_run(tmp_path)
    assert run.array(0).dtype == dtype and run.array(0).tobytes() == array.tobytes()


def test_the_lines_of_llama_cpp_beside_its_logits_count_them(tmp_path):
    ARRAY.tofile(tmp_path / "llamacpp-m.bin")
    lines = [f"{i}: {v:.6f}\n" for i, v in enumerate(ARRAY.ravel())]
    (tmp_path / "llamacpp-m.txt").write_text("".join(lines))
    np.testing.assert_array_equal(open_run(tmp_path / "llamacpp-m.bin").array(0), ARRAY.ravel())


@pytest.fixture
def sides(tmp_path):
    """ref: .npy files; again and bad: raw bytes of the same names."""
    for name, sign in (("ref", 1), ("again", 1), ("bad", -1)):
        (tmp_path / name).mkdir()
        for key, array in states(sign).items():
            if name == "ref":
                np.save(tmp_path / name / f"{key}.npy", array)
            else:
                array.tofile(tmp_path / name / f"{key}.bin")
    np.savez(tmp_path / "ref.npz", **states())
    return tmp_path


@pytest.mark.parametrize("reference", ["ref", "ref.npz"])
def test_the_other_run_tells_the_shape(reference, sides):
    for pair in ((reference, "again"), ("again", reference)):
        assert whence.compare(*(sides / name for name in pair)).status == "same"
    result = whence.compare(sides / reference, sides / "bad", output=sides / "cmp")
    assert (result.status, result.findings[0].name) == ("different", "layers.2")
    assert "layers.2.bin=4x8:float32" in result.asked["shape"]
    runs = runs_of(whence.load_comparison(sides / "cmp"))
    assert [len(run.records) for run in runs] == [4, 4]
    one = whence.compare(sides / "ref" / "layers.2.npy", sides / "bad" / "layers.2.bin")
    assert one.status != "same"


def test_the_user_tells_the_shape(sides, capsys):
    pair = (sides / "again", sides / "bad")
    with pytest.raises(UnreadableRun, match=r"raw bytes: their shape is not known; give --shape"):
        whence.compare(*pair)
    result = whence.compare(*pair, shape=["layers.*=4x8:float32"])
    assert (result.status, result.findings[0].name) == ("different", "layers.2")
    assert execute(["compare", *map(str, pair), "--shape", "*=4x8:float32"]) == 1
    assert "layers.2" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(UsageError, match="2x12x64:float32"):
        whence.compare(*pair, shape=["x=many"])


def test_raw_bytes_that_do_not_fit_their_shape_never_pass(sides):
    path = sides / "again" / "layers.3.bin"
    path.write_bytes(path.read_bytes()[:-4])
    assert whence.compare(sides / "ref", sides / "again", min_coverage=0.1).status == "undecided"
    wrong = whence.compare(sides / "ref", sides / "again", shape=["*=4x8"], min_coverage=0.1)
    assert wrong.status == "undecided"
    assert any("needs 128 bytes" in lack.text for lack in wrong.missing)


def test_a_width_that_says_nothing_of_the_dtype_is_not_guessed():
    assert raw_form.like((4, 8), "float32", 64) is None  # float16 or bfloat16
    assert raw_form.like((4, 8), "int32", 256) is None
    assert raw_form.like((4, 8), "float32", 256) == raw_form.Form("float64", (4, 8))
    assert raw_form.of_value({"shape": "many"}, 8) is None
    assert raw_form.of_value([-1, 4], 8) is None


def test_spoilt_bytes_and_descriptions_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    ARRAY.tofile(sample / "x.bin")
    (sample / "x.json").write_text(json.dumps(SAID))
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path)
    huge = {"shape": [1 << 40, 1 << 20], "dtype": "float32"}
    (sample / "x.json").write_text(json.dumps(huge))
    with pytest.raises(WhenceError, match="needs"):
        open_run(sample)


def test_a_file_beside_names_what_is_called_by_a_number(tmp_path):
    for number, name in enumerate(("layers.10.fc", "layers.2.fc")):
        array = np.full((2, 3), number, np.float32)
        array.tofile(tmp_path / f"{number:04}.bin")
        form = {"name": name, "shape": [2, 3], "dtype": "float32"}
        (tmp_path / f"{number:04}.json").write_text(json.dumps(form))
    run = open_run(tmp_path)
    read = {call.scope: run.array(call.refs[0].record)[0, 0] for call in run.calls if call.scope}
    assert read == {"layers.10.fc": 0, "layers.2.fc": 1}
