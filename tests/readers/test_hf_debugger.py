"""The model debugger of transformers; tests/data/hf_debugger was written by transformers 5.23.

A model of two blocks and a ReLU that is called twice; layers.1.norm has another epsilon in the bad
ones. Each once with tensors printed into the tree and once with tensors in files.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import whence
from readers import hostile
from whence.readers import open_run
from whence.readers.encodings import printed_text

DATA = Path(__file__).parents[1] / "data" / "hf_debugger"


def by_name(run):
    return {(c.scope, c.occurrence): c for c in run.calls}


def test_modules_have_inputs_and_leaves_outputs():
    run = open_run(DATA / "ref_files")
    calls = by_name(run)
    assert set(calls) == {
        ("", 0),
        ("embed", 0),
        ("layers.0", 0),
        ("layers.0.norm", 0),
        ("layers.0.fc", 0),
        ("act", 0),
        ("layers.1", 0),
        ("layers.1.norm", 0),
        ("layers.1.fc", 0),
        ("act", 1),
        ("head", 0),
    }
    assert calls["layers.1.norm", 0].parent == calls["layers.1", 0].id
    x, y = (run.array(r.record) for r in calls["layers.0.norm", 0].refs)
    assert np.allclose(
        y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5), atol=1e-5
    )


def test_what_a_second_call_has_written_over_is_lost_and_said():
    run = open_run(DATA / "ref_files")
    calls = by_name(run)
    first, second = (calls["act", i].slots("output")[0].record for i in (0, 1))
    assert "written over" in run.records[first].why
    assert not run.records[second].why
    assert run.array(second).min() == 0.0


def test_prints_are_the_tensors_to_their_last_digit():
    printed, kept = open_run(DATA / "ref_text"), open_run(DATA / "ref_files")
    mine, theirs = by_name(printed), by_name(kept)
    compared = 0
    for key, call in mine.items():
        for ref, other in zip(call.refs, theirs[key].refs, strict=bool(call.scope)):
            record = printed.records[ref.record]
            if kept.records[other.record].why or record.whole:
                continue
            a, b = printed.array(ref.record), kept.array(other.record)
            assert a.shape == b.shape
            if a.dtype.kind == "f":
                assert 0 < record.quantum < 1e-2
                assert np.abs(a - b).max() <= record.quantum / 2 * 1.01
                assert np.abs(a - b).max() > 0
            else:
                assert np.array_equal(a, b)
            compared += 1
    assert compared > 10


def test_a_print_that_leaves_elements_out_says_so():
    run = open_run(DATA / "ref_text")
    record = run.records[by_name(run)["head", 0].slots("output")[0].record]
    assert (record.shape, record.whole) == ((6, 6), (30, 40))


@pytest.mark.parametrize("form", ["text", "files"])
def test_the_module_that_is_wrong_is_named_first(form):
    result = whence.compare(str(DATA / f"ref_{form}"), str(DATA / f"bad_{form}"))
    assert (result.status, result.findings[0].name) == ("different", "layers.1.norm")
    assert result.evidence == ("text" if form == "text" else "two dumps")


@pytest.mark.torch
def test_a_capture_faces_prints_and_nothing_is_replayed_on_their_digits(tmp_path):
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + self.fc(self.norm(x))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = (
                torch.nn.Embedding(32, 8),
                torch.nn.ModuleList(Block() for _ in range(2)),
            )
            self.act, self.head = torch.nn.ReLU(), torch.nn.Linear(8, 40)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = self.act(layer(x))
            return self.head(x)

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad(), whence.capture(model, str(tmp_path / "run")):
        model(torch.arange(30))
    result = whence.compare(str(tmp_path / "run"), str(DATA / "bad_text"))
    assert (result.status, result.findings[0].name) == ("different", "layers.1.norm")
    result = whence.compare(str(tmp_path / "run"), str(DATA / "ref_files"))
    assert not result.findings
    names = [f.name for f in whence.compare(str(tmp_path / "run"), str(DATA / "ref_text")).findings]
    assert set(names) <= {"head"}  # its print leaves elements out


def test_the_summary_has_statistics():
    name = "Net_debug_tree_SUMMARY.json"
    run = open_run(DATA / "ref_text" / name)
    exact, calls = open_run(DATA / "ref_files"), by_name(run)
    record = run.records[calls["layers.0.fc", 0].slots("output")[0].record]
    values = exact.array(by_name(exact)["layers.0.fc", 0].slots("output")[0].record).astype(
        np.float64
    )
    figures = record.statistics
    assert record.why == "the summary keeps statistics only"
    for found, want in (
        (figures.min, values.min()),
        (figures.max, values.max()),
        (figures.std, values.std()),
        (figures.norm, np.linalg.norm(values)),
    ):
        assert found == pytest.approx(want, rel=1e-3)
    result = whence.compare(str(DATA / "ref_text" / name), str(DATA / "bad_text" / name))
    assert result.findings[0].name == "layers.1.norm"


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0), (2, 1, 3), (40, 50)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_prints_of_torch(shape, dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(getattr(torch, dtype))
    printed = next(printed_text.prints(str(tensor) + "\n"))
    values = printed.values(dtype)
    want = tensor.float().numpy()
    if tensor.numel() > 1000:
        rows, columns = ([0, 1, 2, -3, -2, -1] for _ in range(2))
        want = want[np.ix_(rows, columns)]
        assert printed.whole
    if 0 not in shape:
        assert values.array.shape == want.shape
        assert np.abs(values.array.astype(np.float32) - want).max() <= max(
            values.step, 0.3 if dtype == "bfloat16" else 0.0
        )


@pytest.mark.parametrize(
    "text", ["tensor([[1, 2], [3]])", "tensor(" + "[" * 1000, "tensor([1, 2", "]"]
)
def test_prints_that_are_none_are_refused(text):
    with pytest.raises((StopIteration, ValueError)):
        next(printed_text.prints(f"{text}\n")).values()


def test_names_that_lead_outside_are_not_followed(tmp_path):
    for escape in hostile.ESCAPES:
        tensor = {"shape": "torch.Size([2])", "dtype": "torch.float32", "value": escape}
        tree = {"module_path": "Net", "inputs": {"args": [tensor]}, "children": []}
        (tmp_path / "Net_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))
        run = hostile.survives(escape, tmp_path)
        assert run is None or run.records[0].why


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    for name in ("Net_debug_tree_FULL_TENSORS.json", "Net.head_outputs.safetensors"):
        shutil.copy(DATA / "ref_files" / name, sample)
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path, "hf_debugger")
    (tmp_path / "text").mkdir()
    for what, path in hostile.variants(
        DATA / "ref_text" / "Net_debug_tree_FULL_TENSORS.json", tmp_path / "text"
    ):
        hostile.survives(what, path, "hf_debugger")


def summary(folder, *, norm=None):
    """A SUMMARY file of a model with an embedding and a block, whose own outputs the tool leaves
    out. norm: what the block's norm makes.
    """
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(2, 6)), draw.normal(size=(2, 6))

    def told(a):
        if a.dtype.kind == "i":
            return {"shape": "torch.Size([2])", "dtype": "torch.int64"}
        figures = {"min": a.min(), "max": a.max(), "mean": a.mean(), "std": a.std(ddof=1)}
        return {
            "shape": "torch.Size([2, 6])",
            "dtype": "torch.float32",
            **{k: f"tensor({v:.4f})" for k, v in figures.items()},
        }

    def call(path, given, made, kids=()):
        return {
            "module_path": path,
            "inputs": {"args": [told(given)], "kwargs": {}},
            "outputs": made and [told(m) for m in made],
            "children": list(kids),
        }

    ids = np.arange(2)
    y = y if norm is None else norm(y)
    z = 2.0 * (x + y)
    block = call("Net.body.block", x, None, [call("Net.body.block.norm", x, [y])])
    body = call("Net.body", x, None, [block, call("Net.body.head", x + y, [z])])
    tree = call("Net", ids, [z], [call("Net.embed", ids, [x]), body])
    folder.mkdir()
    (folder / "Net_debug_tree_SUMMARY.json").write_text(json.dumps(tree))
    return folder


def test_token_ids_without_figures_are_not_known_to_differ(tmp_path):
    same = whence.compare(summary(tmp_path / "a"), summary(tmp_path / "b"))
    assert not same.inputs_differ
    assert same.status == "same"
    assert any("not known whether both runs were given the same" in note for note in same.notes)


def test_what_a_block_without_outputs_spoilt_comes_in_from_it(tmp_path):
    found = whence.compare(summary(tmp_path / "a"), summary(tmp_path / "b", norm=lambda y: 1.5 * y))
    assert [f.name for f in found.findings] == ["body.block.norm"]
