"""Numbers as text: .csv, np.savetxt, JSON lists, trtexec's outputs, llama.cpp's logits."""

import json

import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import WhenceError
from whence.readers import open_run
from whence.readers.encodings.number_text import Digits, Values
from whence.records import missing_of

DRAW = np.random.default_rng(11)
ARRAY = DRAW.standard_normal((3, 4)).astype(np.float32)


def elements(path):
    run = open_run(path)
    return {c.scope: run.array(c.slots("output")[0].record) for c in run.calls if c.leaf}


def only(path):
    ((array,), run) = elements(path).values(), open_run(path)
    return array, run.records[0].quantum


def steps(*texts, of=None):
    return Values.of(texts, (len(texts),), Digits.of(of or texts))


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_savetxt_is_bit_exact_and_rounded_text_keeps_its_step(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    between = "," if suffix == ".csv" else " "
    np.savetxt(path, ARRAY, delimiter=between, header="of a step")
    array, step = only(path)
    assert (array.dtype, array.tobytes(), step) == (np.float32, ARRAY.tobytes(), 0)
    np.savetxt(path, ARRAY.astype(np.float64) / 3, delimiter=between)
    assert only(path)[0].tobytes() == (ARRAY.astype(np.float64) / 3).tobytes()
    np.savetxt(path, ARRAY, delimiter=between, fmt="%.3f")
    array, step = only(path)
    assert step == pytest.approx(1e-3)
    assert np.abs(array - ARRAY).max() <= step / 2 * 1.001
    np.savetxt(path, np.arange(6).reshape(2, 3), delimiter=between, fmt="%d")
    assert only(path)[0].dtype == np.int64


def test_a_table_of_pandas_loses_its_frame(tmp_path):
    (tmp_path / "x.csv").write_text(",0,1\n0,0.5,1.5\n1,0.25,-2.5\n")  # DataFrame(array).to_csv()
    np.testing.assert_array_equal(only(tmp_path / "x.csv")[0], [[0.5, 1.5], [0.25, -2.5]])


def test_the_digits_of_one_writer_tell_how_much_a_text_keeps():
    assert steps("0.5", "1.25", "10.0").step == pytest.approx(0.01)
    assert steps("0.5", "1.25", "10.0", of=("0.1234567891234", "0.5")).step == 0
    assert steps("123.457", "0.00123457").step == pytest.approx(1e-3)  # six digits of each
    assert steps("1.0", "2.0", "0.0").step == 0
    assert steps("1.234e+02", "5.000e-01").step == pytest.approx(0.1)
    assert steps("nan", "-inf", "1.50").step == pytest.approx(0.01)
    assert steps("True", "False").array.dtype == np.bool_


def test_lists_of_json_are_bit_exact(tmp_path):
    tree = {"a": ARRAY.tolist(), "b": [float("nan"), float("-inf"), 0.1], "note": "text"}
    (tmp_path / "x.json").write_text(json.dumps(tree))
    read = elements(tmp_path / "x.json")
    assert list(read) == ["a", "b"] and read["a"].tobytes() == ARRAY.tobytes()
    np.testing.assert_array_equal(read["b"], [np.nan, -np.inf, 0.1])
    lines = [{"name": f"l.{i}", "values": (ARRAY * i).tolist()} for i in range(3)]
    (tmp_path / "y.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = elements(tmp_path / "y.jsonl")
    assert list(read) == ["l.0", "l.1", "l.2"]
    assert read["l.2"].tobytes() == (ARRAY * 2).tobytes()
    (tmp_path / "z.json").write_text("[[1, 2], [3, 4]]")
    np.testing.assert_array_equal(only(tmp_path / "z.json")[0], [[1, 2], [3, 4]])
    said = {"t": {"shape": [4, 3], "dtype": "float16", "data": ARRAY.ravel().tolist()}}
    (tmp_path / "w.json").write_text(json.dumps(said))
    assert (only(tmp_path / "w.json")[0] == ARRAY.reshape(4, 3).astype(np.float16)).all()


def trtexec(outputs):
    """As sampleReporting.cpp (exportJSONOutput) writes them: six digits, bare nan and inf."""
    text, sep = "[\n", "  "
    for name, array in outputs.items():
        values = ", ".join(f"{v:.6g}" for v in array.ravel())
        text += (
            f'{sep}{{ "name" : "{name}"\n  , "dimensions" : "{"x".join(map(str, array.shape))}"\n'
        )
        text += f'  , "values" : [ {values} ]\n  }}\n'
        sep = ", "
    return text + "]\n"


def test_outputs_of_trtexec_have_names_shapes_and_six_digits(tmp_path):
    odd = ARRAY.copy()
    odd[0, :3] = np.nan, np.inf, -np.inf
    (tmp_path / "x.json").write_text(trtexec({"scores": ARRAY * 100, "odd": odd}))
    read = elements(tmp_path / "x.json")
    assert {k: v.shape for k, v in read.items()} == {"scores": (3, 4), "odd": (3, 4)}
    np.testing.assert_allclose(read["scores"], ARRAY * 100, rtol=1e-5)
    np.testing.assert_array_equal(np.isnan(read["odd"]), np.isnan(odd))
    np.testing.assert_array_equal(np.isinf(read["odd"]), np.isinf(odd))
    assert open_run(tmp_path / "x.json").records[0].quantum >= 1e-4


def test_logits_of_the_model_conversion_of_llama_cpp(tmp_path):
    lines = [f"{i}: {v:.6f}\n" for i, v in enumerate(ARRAY.ravel())]
    (tmp_path / "llamacpp-m.txt").write_text("".join(lines))
    array, step = only(tmp_path / "llamacpp-m.txt")
    assert step == pytest.approx(1e-6)
    np.testing.assert_allclose(array, ARRAY.ravel(), atol=6e-7)
    (tmp_path / "llamacpp-m.txt").write_text("".join(lines[1:]))
    with pytest.raises(WhenceError, match="numbered from 0"):
        open_run(tmp_path / "llamacpp-m.txt")


def states(sign=1):
    x, out = DRAW.standard_normal((4, 8)), {}
    for layer in range(4):
        y = np.tanh(x @ np.random.default_rng(layer).standard_normal((8, 8)))
        x = x + (sign if layer == 2 else 1) * y
        out[f"layers.{layer}"] = x.astype(np.float32)
    return out


@pytest.mark.parametrize("kind", ["csv", "txt", "json"])
def test_a_planted_fault_is_named_and_equal_texts_are_the_same(kind, tmp_path):
    global DRAW
    for name, sign in (("ref", 1), ("again", 1), ("bad", -1)):
        DRAW = np.random.default_rng(3)
        (tmp_path / name).mkdir()
        if kind == "json":
            held = {k: v.tolist() for k, v in states(sign).items()}
            (tmp_path / name / "acts.json").write_text(json.dumps(held))
            continue
        for layer, array in states(sign).items():
            delimiter = "," if kind == "csv" else " "
            np.savetxt(tmp_path / name / f"{layer}.{kind}", array, delimiter=delimiter)
    assert whence.compare(tmp_path / "ref", tmp_path / "again").status == "same"
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert (result.status, result.findings[0].name) == ("different", "layers.2")


def test_settings_and_notes_are_no_tensors(tmp_path):
    np.save(tmp_path / "x.npy", ARRAY)
    for name, text in {
        "config.json": '{"betas": [0.9, 0.999], "short_factor": [1.0, 1.5]}',
        "notes.txt": "made on Friday\n1 2 3\n", "loss.txt": "0.5\n", "times.csv": "layer,ms\nfc,1.5\n",
        "requirements.txt": "torch==2.0\n", "object.json": '{"a": [1, 2, 3]}',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    run = open_run(tmp_path)
    assert len(run.records) == 1 and not missing_of(run)


@pytest.mark.parametrize("text", ["1.5 2.5\n3.5\n", "1.5 2.5\n3.5 4", "1.5 2.5\n3.5 x\n"])
def test_a_table_that_is_not_whole_is_refused(text, tmp_path):
    np.savetxt(tmp_path / "x.txt", ARRAY)
    (tmp_path / "x.txt").write_text("1.0 2.0\n" * 20_000 + text)
    with pytest.raises(WhenceError, match="not a whole text of numbers"):
        open_run(tmp_path / "x.txt")


def test_spoilt_texts_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    np.savetxt(sample / "a.txt", ARRAY)
    (sample / "b.json").write_text(trtexec({"x": ARRAY}))
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path)


@pytest.mark.parametrize("left", [0, 5, 40])
@pytest.mark.parametrize("side", ["ref", "bad"])
def test_a_table_that_is_cut_in_a_folder_never_passes(left, side, tmp_path):
    for name in ("ref", "bad"):
        (tmp_path / name).mkdir()
        for k in range(3):
            np.savetxt(tmp_path / name / f"layer{k}.txt", ARRAY * k)
        (tmp_path / name / "notes.txt").write_text("made on Friday\n")
    assert whence.compare(tmp_path / "ref", tmp_path / "bad").status == "same"
    file = tmp_path / side / "layer1.txt"
    file.write_bytes(file.read_bytes()[:left])
    assert whence.compare(tmp_path / "ref", tmp_path / "bad", min_coverage=0.1).status != "same"


def test_a_link_that_leads_out_of_a_folder_is_not_followed(tmp_path):
    (tmp_path / "in").mkdir()
    np.savetxt(tmp_path / "in" / "a.txt", ARRAY)
    np.savetxt(tmp_path / "out.txt", ARRAY)
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "out.txt")
    np.save(tmp_path / "in" / "c.npy", ARRAY)
    run = open_run(tmp_path / "in")
    assert len(run.records) == 2 and [lack.where for lack in missing_of(run)] == ["b.txt"]


def test_rows_of_a_name_and_a_list_of_numbers_are_tensors(tmp_path):
    path = tmp_path / "acts.csv"
    flat = " ".join(map(repr, ARRAY.ravel().tolist()))
    path.write_text(
        f'layer,type,shape,values\nfc.1,Linear,"(3, 4)",{flat}\nb,X,"(2,)","[1.5, 2.5]"\n'
    )
    read = elements(path)
    assert list(read) == ["fc.1", "b"]
    assert (read["fc.1"].shape, read["fc.1"].tobytes()) == (ARRAY.shape, ARRAY.tobytes())
    assert read["b"].tolist() == [1.5, 2.5]
    text = path.read_text()
    for spoilt in (text[:-4], text + "mean,0.5\n"):
        path.write_text(spoilt)
        with pytest.raises(WhenceError):
            open_run(path)
    path.write_text("name,mean,std\nfc.1,0.1,0.2\n")  # figures, no elements
    (figures,) = open_run(path).records
    assert figures.why and figures.statistics.std == 0.2
