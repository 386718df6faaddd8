"""Printed tensors and figures in logs: what is printed here by torch and numpy, and texts as jax,
tensorflow and mindspore print them.
"""

import json

import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import WhenceError
from whence.readers import open_run
from whence.records import missing_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DRAW = np.random.default_rng(2)
ARRAY = DRAW.standard_normal((2, 3)).astype(np.float32)


def read(path, text):
    """(elements, record) by name."""
    path.write_text(text)
    run = open_run(path)
    refs = {(c.scope, c.step): c.slots("output")[0].record for c in run.calls if c.leaf}
    return {name: (record, run.records[record], run) for (name, _), record in refs.items()}


def held(entry):
    return entry[2].array(entry[0])


def test_prints_of_torch_keep_four_digits_and_their_dtype(tmp_path):
    x = torch.tensor(ARRAY)
    text = (
        f"layers.0: {x}\nlayers.1 {x.half()}\nlayers.2 = {x * 1e-6}\nids {torch.arange(3)}\n"
        f"mask {torch.tensor([True, False])}\nnamed in the line before:\n{x}\n"
        f"2026-11-28 10:00:00,123 INFO scalar {x[0, 0]!r}\n{torch.nn.Parameter(x)}\n"
    )
    values = read(tmp_path / "x.log", text)
    assert list(values) == [
        "layers.0", "layers.1", "layers.2", "ids", "mask", "named_in_the_line_before", "scalar",
        "tensor",
    ]  # fmt: skip
    np.testing.assert_allclose(held(values["layers.0"]), ARRAY, atol=5.1e-5)
    assert held(values["layers.1"]).dtype == np.float16
    assert values["layers.0"][1].quantum == pytest.approx(1e-4)
    np.testing.assert_allclose(held(values["layers.2"]), ARRAY * 1e-6, atol=5.1e-11)
    assert held(values["ids"]).dtype == np.int64 and held(values["mask"]).dtype == np.bool_
    assert held(values["scalar"]).shape == ()


def test_prints_of_numpy_are_as_exact_as_their_digits(tmp_path):
    text = f"a {ARRAY}\nb {ARRAY!r}\nc {ARRAY.astype(np.float64)!r}\n"
    values = read(tmp_path / "x.log", text)
    for name in "abc":
        np.testing.assert_allclose(held(values[name]), ARRAY, rtol=2e-7, atol=6e-9)
    assert values["b"][1].quantum < 1e-6 and held(values["b"]).dtype == np.float32
    with np.printoptions(precision=3):
        values = read(tmp_path / "y.log", f"a {ARRAY}\n")
    assert values["a"][1].quantum == pytest.approx(1e-3)


OTHERS = {
    "jax": "Array([[ 1.5  , -2.25 ],\n       [ 0.125,  4.   ]], dtype=bfloat16)",
    "tf": "tf.Tensor(\n[[ 1.5   -2.25 ]\n [ 0.125  4.   ]], shape=(2, 2), dtype=float32)",
    "tf_repr": "<tf.Tensor: shape=(2, 2), dtype=float32, numpy=\narray([[ 1.5  , -2.25 ],\n"
    "       [ 0.125,  4.   ]], dtype=float32)>",
    "ms": "[[ 1.5   -2.25 ]\n [ 0.125  4.   ]]",
    "ms_repr": "Tensor(shape=[2, 2], dtype=Float32, value=\n"
    "[[ 1.50000000e+00, -2.25000000e+00],\n [ 1.25000000e-01,  4.00000000e+00]])",
}


def test_what_other_libraries_print(tmp_path):
    text = "".join(f"after {name}: {printed}\n" for name, printed in OTHERS.items())
    values = read(tmp_path / "x.log", text)
    assert list(values) == [f"after_{name}" for name in OTHERS]
    for name, entry in values.items():
        np.testing.assert_array_equal(held(entry), [[1.5, -2.25], [0.125, 4]], name)
    assert held(values["after_jax"]).dtype.name == "bfloat16"


# As tensorflow 2.21 and mindspore 2.10 print these numbers.
POWERS = (
    "tf.Tensor(\n[[-3.3157203e+00  2.8511673e-02]\n [-2.4095178e-03 -6.1176640e-01]], "
    "shape=(2, 2), dtype=float32)",
    "[[-3.3157203e+00  2.8511673e-02]\n [-2.4095178e-03 -6.1176640e-01]]",
    "Tensor(shape=[2, 2], dtype=Float32, value=\n[[-3.31572032e+00,  2.85116732e-02],\n"
    " [-2.40951776e-03, -6.11766398e-01]])",
    "<tf.Variable 'Variable:0' shape=(2, 2) dtype=float32, numpy=\narray([[-3.3157203e+00,  "
    "2.8511673e-02],\n       [-2.4095178e-03, -6.1176640e-01]], dtype=float32)>",
)


def test_powers_of_ten_are_no_more_digits(tmp_path):
    text = "".join(f"print_{place} {printed}\n" for place, printed in enumerate(POWERS))
    values = read(tmp_path / "x.log", text)
    expected = np.array([[-3.3157203, 0.028511673], [-0.0024095178, -0.6117664]], np.float32)
    assert len(values) == len(POWERS)
    for entry in values.values():
        assert held(entry).dtype == np.float32 and entry[1].quantum == 0
        np.testing.assert_array_equal(held(entry), expected)


def test_a_print_that_leaves_elements_out_is_never_the_same(tmp_path):
    big = torch.tensor(DRAW.standard_normal((40, 50)))
    values = read(tmp_path / "x.log", f"a {big}\nb {big.shape} {big}\n")
    assert values["a"][1].whole == (-1,) and values["b"][1].whole == (40, 50)
    np.testing.assert_allclose(held(values["a"])[:3, :3], big[:3, :3], atol=5.1e-5)
    assert whence.compare(tmp_path / "x.log", tmp_path / "x.log").status == "undecided"
    (tmp_path / "y.log").write_text(f"a {big}\nb {big.shape} {-big}\n")
    assert whence.compare(tmp_path / "x.log", tmp_path / "y.log").status != "same"


def states(sign):
    x, out = torch.tensor(np.random.default_rng(0).standard_normal((4, 8))), {}
    for layer in range(4):
        weight = torch.tensor(np.random.default_rng(layer).standard_normal((8, 8)))
        x = x + (sign if layer == 2 else 1) * torch.tanh(x @ weight)
        out[f"layers.{layer}"] = x.float()
    return out


def test_a_planted_fault_is_named_and_equal_prints_are_the_same(tmp_path):
    for name, sign in (("ref", 1), ("bad", -1)):
        lines = [f"{key}: {value}\n" for key, value in states(sign).items()]
        (tmp_path / f"{name}.log").write_text("".join(lines))
        (tmp_path / name).mkdir()
        for key, value in states(sign).items():
            (tmp_path / name / f"{key}.txt").write_text(str(value))
    assert whence.compare(tmp_path / "ref.log", tmp_path / "ref.log").status == "same"
    for ref, bad in (("ref.log", "bad.log"), ("ref", "bad")):
        result = whence.compare(tmp_path / ref, tmp_path / bad)
        assert (result.status, result.findings[0].name) == ("different", "layers.2")


def test_steps_that_a_log_counts_are_steps(tmp_path):
    text = "".join(f"--- step {k} ---\nfc {torch.tensor(ARRAY + k)}\n" for k in (3, 4))
    (tmp_path / "x.log").write_text(text)
    assert [c.step for c in open_run(tmp_path / "x.log").calls if c.scope] == [3, 4]


def test_lines_of_figures_show_faults_and_never_sameness(tmp_path):
    def line(name, x, digits=4):
        figures = {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max()}
        said = ", ".join(f"{key}={value:.{digits}f}" for key, value in figures.items())
        return f"{name} shape={tuple(x.shape)} {said}\n"

    for name, sign in (("ref", 1), ("bad", -1)):
        lines = [line(key, value) for key, value in states(sign).items()]
        (tmp_path / f"{name}.log").write_text("".join(["took 3 s\n", *lines]))
    run = open_run(tmp_path / "ref.log")
    figures = run.records[0].statistics
    assert (figures.count, figures.mean) == (
        32,
        pytest.approx(float(states(1)["layers.0"].mean()), abs=6e-5),
    )
    assert whence.compare(tmp_path / "ref.log", tmp_path / "ref.log").status == "undecided"
    result = whence.compare(tmp_path / "ref.log", tmp_path / "bad.log")
    assert (result.status, result.findings[0].name) == ("different", "layers.2")
    coarse = "fc mean=0.1 std=0.1 min=-0.3 max=0.4\n"
    (tmp_path / "a.log").write_text(coarse + "act mean=0.5 std=1.5 min=-3.5 max=3.5\n")
    (tmp_path / "b.log").write_text(
        coarse.replace("std=0.1", "std=0.2") + "act mean=0.5 std=1.5 min=-3.5 max=3.5\n"
    )
    assert whence.compare(tmp_path / "a.log", tmp_path / "b.log").status == "undecided"


def test_what_is_no_tensor_is_passed_over(tmp_path):
    text = (
        "[1/10] shape: [2, 3] torch.Size([2, 3])\nstep 3 time mean=1.5 std=0.5\nloss 0.5\n"
        f"epoch [12] lr [ok] fc {torch.tensor(ARRAY)}\n"
    )
    values = read(tmp_path / "x.log", text)
    assert list(values) == ["epoch_[12]_lr_[ok]_fc"]
    (tmp_path / "y.log").write_text(text[: text.index("epoch")])
    with pytest.raises(WhenceError):
        open_run(tmp_path / "y.log")


def test_a_log_beside_a_dump_is_told_and_not_read_as_part_of_it(tmp_path):
    np.save(tmp_path / "fc.npy", ARRAY)
    (tmp_path / "run.log").write_text(f"fc {torch.tensor(ARRAY)}\n")
    (lack,) = missing_of(open_run(tmp_path))
    assert lack.where == "run.log" and "a log with printed tensors" in lack.text


@pytest.mark.parametrize("cut", [5, 20, 30])
def test_a_print_that_breaks_off_never_passes(cut, tmp_path):
    whole = f"a {torch.tensor(ARRAY)}\nb {torch.tensor(ARRAY)}\n"
    (tmp_path / "x.log").write_text(whole)
    (tmp_path / "y.log").write_text(whole[:-cut])
    result = whence.compare(tmp_path / "x.log", tmp_path / "y.log", min_coverage=0.1)
    assert result.status == "undecided"
    assert any("breaks off" in lack.text for lack in result.missing)


def test_spoilt_logs_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "x.log"
    sample.write_text(f"a {torch.tensor(ARRAY)}\nfc: mean=0.1 std=0.9\n{OTHERS['ms_repr']}\n")
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path)
    hostile.survives("brackets", _text(tmp_path, "tensor([1.5]) " + "[" * 20_000))
    hostile.survives("numbers", _text(tmp_path, "tensor([1.5]) " + "[1" * 10_000))
    hostile.survives("words", _text(tmp_path, "tensor([1.5]) " + "tensor(" * 10_000 + "[1.5"))


def _text(folder, text):
    (folder / "big").mkdir(exist_ok=True)
    (folder / "big" / "z.log").write_text(text)
    return folder / "big" / "z.log"


def test_a_print_is_found_again_by_its_line(tmp_path):
    x = torch.tensor(ARRAY)
    text = f"starts\n\nlayers.0: {x}\nbetween\nlayers.1 = {x * 2}\nlayers.2 {x.tolist()}\n"
    lines = text.split("\n")
    for name, (_, record, _) in read(tmp_path / "x.log", text).items():
        file, row = record.file.split(",")
        assert file == "x.log" and lines[int(row) - 1].startswith(name)


def figures_of(x):
    x = x.double()
    values = {"mean": x.mean(), "std": x.std(), "max": x.max()}  # not all that there are
    return {key: value.item() for key, value in values.items()}


def as_table(path, tensors):
    rows = [
        f"{name},{'x'.join(map(str, x.shape))},{','.join(map(str, figures_of(x).values()))}"
        for name, x in tensors.items()
    ]
    path.with_suffix(".csv").write_text("\n".join(["layer,shape,mean,std,max", *rows]) + "\n")


def as_tree(path, tensors):
    tree = {
        name: {"shape": list(x.shape), **figures_of(x), "first": x.flatten()[:3].tolist()}
        for name, x in tensors.items()
    }
    path.with_suffix(".json").write_text(json.dumps(tree))


def as_rows(path, tensors):
    rows = [
        {"step": 0, "name": n, "shape": list(x.shape), **figures_of(x)} for n, x in tensors.items()
    ]
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("write", [as_table, as_tree, as_rows])
def test_tables_and_trees_of_statistics_name_a_fault(write, tmp_path):
    for name, sign in (("ref", 1), ("bad", -1)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "stats", states(sign))
    run = open_run(tmp_path / "ref")
    assert [c.scope for c in run.calls if c.leaf] == [f"layers.{n}" for n in range(4)]
    x = states(1)["layers.1"].double()
    record = run.records[1]
    assert (record.shape, record.statistics.min) == ((4, 8), None)
    assert record.statistics.std == pytest.approx(x.std().item(), rel=1e-12)
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert (result.status, result.findings[0].name) == ("different", "layers.2")
    assert whence.compare(tmp_path / "ref", tmp_path / "ref").status == "undecided"


def test_spoilt_tables_of_statistics_are_refused(tmp_path):
    as_table(tmp_path / "a", states(1))
    as_tree(tmp_path / "b", states(1))
    (tmp_path / "work").mkdir()
    for sample in (tmp_path / "a.csv", tmp_path / "b.json"):
        for what, path in hostile.variants(sample, tmp_path / "work"):
            hostile.survives(what, path)
    deep = '{"mean": 1, "std": 2, "x": ' + '{"a": ' * 5000 + "1" + "}" * 5001
    (tmp_path / "deep.json").write_text(deep)
    hostile.survives("deep", tmp_path / "deep.json")
