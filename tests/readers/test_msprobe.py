"""msprobe dumps: every level and kind of them, the planted epsilon, shifted counters, folders of
steps and ranks, its own table.
"""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import whence
from readers.hostile import survives, variants
from whence.api import open_run
from whence.cli import execute
from whence.errors import ElementsMissing, UnreadableRun

DATA = Path(__file__).parent.parent / "data" / "msprobe"
RNG = np.random.default_rng(8)


def leaf(array, **more):
    array = np.asarray(array)
    wide = array.astype(np.float64)
    figures = (
        {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": np.linalg.norm(wide)}
        if array.size
        else {}
    )
    return {
        "type": "torch.Tensor",
        "dtype": f"torch.{array.dtype}",
        "shape": list(array.shape),
        "requires_grad": False,
        **{k: float(v) for k, v in figures.items()},
        **more,
    }


class Dump:
    """Writes an L1 dump of numpy arrays, counters running over the whole step."""

    def __init__(self, folder, *, tensors=True, noise=0.0):
        self.folder, self.tensors, self.noise, self.counts, self.data = (
            folder,
            tensors,
            noise,
            {},
            {},
        )
        self.draw = np.random.default_rng(1)
        (folder / "dump_tensor_data").mkdir(parents=True)

    def op(self, kind, name, inputs, made):
        n = self.counts.get(name, 0)
        self.counts[name] = n + 1
        key = f"{kind}.{name}.{n}.forward"
        made = (made * (1 + self.noise * self.draw.uniform(-1, 1, made.shape))).astype(np.float32)
        given = [self._leaf(key, f"input.{i}", x) for i, x in enumerate(inputs)]
        self.data[key] = {
            "input_args": given,
            "input_kwargs": {},
            "output": [self._leaf(key, "output.0", made)],
        }
        return made

    def _leaf(self, key, slot, value):
        if not isinstance(value, np.ndarray):
            return {"type": type(value).__name__, "value": value}
        if not self.tensors:
            return leaf(value)
        np.save(self.folder / "dump_tensor_data" / f"{key}.{slot}.npy", value)
        return leaf(value, data_name=f"{key}.{slot}.npy")

    def close(self):
        text = {
            "task": "tensor",
            "level": "L1",
            "framework": "pytorch",
            "dump_data_dir": None,
            "data": self.data,
        }
        (self.folder / "dump.json").write_text(json.dumps(text))
        return self.folder


def model(folder, *, eps=None, gelu=None, weight=None, extra=None, noise=4e-8, tensors=True):
    """Four blocks of norm, linear, silu, linear. eps, gelu, weight, extra: the block that has
    another one, or a norm more.
    """
    rng, dump = np.random.default_rng(0), Dump(folder, tensors=tensors, noise=noise)
    x = rng.standard_normal((24, 16)).astype(np.float32)

    def norm(x, w, small):
        squared = dump.op("Tensor", "pow", [x, 2.0], x * x)
        mean = dump.op("Tensor", "mean", [squared, -1], squared.mean(-1, keepdims=True))
        added = dump.op("Tensor", "__add__", [mean, small], mean + np.float32(small))
        root = dump.op("Torch", "rsqrt", [added], 1 / np.sqrt(added))
        return dump.op(
            "Tensor",
            "__mul__",
            [w, (y := dump.op("Tensor", "__mul__", [x, root], x * root))],
            w * y,
        )

    for block in range(4):
        w = (1 + 0.1 * rng.standard_normal(16)).astype(np.float32)
        up, down = (
            rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)
            for shape in ((32, 16), (16, 32))
        )
        h = norm(x, w, 1e-2 if eps == block else 1e-6)
        if extra == block:
            h = norm(h, w, 1e-6)
        h = dump.op("Functional", "linear", [h, up], h @ up.T)
        one = gelu == block
        h = dump.op(
            "Functional",
            "gelu" if one else "silu",
            [h],
            h / (1 + np.exp(-(1.702 if one else 1.0) * h)),
        )
        if weight == block:
            down = down.copy()
            down[3] *= 1.5
        h = dump.op("Functional", "linear", [h, down], h @ down.T)
        x = dump.op("Tensor", "__add__", [x, h], x + h)
    return dump.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return model(tmp_path_factory.mktemp("msprobe") / "reference", noise=0.0)


def test_calls_come_with_inputs_parameters_arguments_and_lines():
    run = open_run(DATA / "reference")
    calls = sorted((c for c in run.calls if c.parent >= 0), key=lambda c: c.order)
    assert len(calls) == 47
    linear = [c for c in calls if c.op_type == "linear"]
    assert [(c.scope, c.occurrence) for c in linear] == [("Functional.linear", i) for i in range(8)]
    assert [r.slot for r in linear[3].refs] == ["input.0", "param.weight", "output.0"]
    added = next(c for c in calls if c.scope == "Tensor.__add__")
    assert (added.op_type, added.source, added.arguments) == (
        "add",
        "/src/model.py:14",
        {"input.1": 1e-06},
    )


def test_elements_are_those_of_torch():
    torch = pytest.importorskip("torch")
    run = open_run(DATA / "reference")
    names = {p.name for p in (DATA / "reference" / "dump_tensor_data").iterdir()}
    for record in run.records:
        if record.file:
            expected = (
                torch.load(DATA / "reference" / record.file, weights_only=True).detach().numpy()
            )
            np.testing.assert_array_equal(run.array(record.id), expected)
            names.discard(Path(record.file).name)
    assert not names


def test_the_norm_with_another_epsilon_is_named_from_the_command_line(capsys, tmp_path):
    assert (
        execute(
            ["compare", str(DATA / "reference"), str(DATA / "eps"), "-o", str(tmp_path / "cmp")]
        )
        == 1
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAULT              Tensor.__add__   add #4")
    assert any("argument 1 is 1e-06 in the reference, 0.01 in the target" in x for x in lines)
    assert lines[1].split() == ["called", "at", "/src/model.py:14"]


@pytest.mark.parametrize(
    ("name", "calls"), [("L1_md5", 165), ("L1_xor", 165), ("mix_structure", 283), ("debug_save", 2)]
)
def test_other_kinds_open_with_everything_in_them(name, calls):
    run = open_run(DATA / name)
    assert sum(c.scope != "" for c in run.calls) == calls
    index = json.loads(
        (DATA / name / ("debug.json" if name == "debug_save" else "dump.json")).read_text()
    )

    def tensors(tree):
        if isinstance(tree, dict) and "shape" in tree:
            return 1
        return (
            sum(map(tensors, tree.values() if isinstance(tree, dict) else tree))
            if isinstance(tree, (dict, list))
            else 0
        )

    assert len(run.records) == tensors(index["data"])


def test_digests_tell_equal_from_different(tmp_path):
    assert whence.compare(DATA / "L1_md5", DATA / "L1_md5").status == "same"
    shutil.copytree(DATA / "L1_md5", tmp_path / "other")
    data = json.loads((tmp_path / "other" / "dump.json").read_text())
    changed = data["data"]["Functional.silu.0.forward"]["output"][0]
    changed.update(md5="00000000", Max=changed["Max"] * 1.5)
    (tmp_path / "other" / "dump.json").write_text(json.dumps(data))
    result = whence.compare(DATA / "L1_md5", tmp_path / "other")
    assert (result.status, result.evidence, result.findings[0].name) == (
        "different",
        "statistics",
        "Functional.silu",
    )


def test_a_dump_of_structure_only_is_never_the_same():
    result = whence.compare(DATA / "mix_structure", DATA / "mix_structure")
    assert (result.status, result.coverage.measured) == ("undecided", 0)
    run = open_run(DATA / "mix_structure")
    q = next(c for c in run.calls if c.scope == "layers.0.self_attn.q_proj")
    assert run.calls[q.parent].scope == "layers.0.self_attn"
    inside = [c for c in run.calls if c.parent == q.id]
    assert [(c.scope, c.op_type) for c in inside] == [
        ("layers.0.self_attn.q_proj.Functional.linear", "linear")
    ]


def test_saved_points_are_labels_and_their_gradients_are_of_the_backward_pass():
    calls = [c for c in open_run(DATA / "debug_save").calls if c.scope]
    assert [(c.scope, c.kind, c.phase, [r.slot for r in c.refs]) for c in calls] == [
        ("mid", "label", "forward", ["output.a", "output.b.0"]),
        ("mid", "label", "backward", ["output.a"]),
    ]
    assert calls[0].arguments == {"b.1": 3, "b.2": "s"}


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("block", range(4))
def test_a_replaced_operator_is_named_although_counters_behind_it_are_shifted(
    reference, tmp_path, block, tensors
):
    base = reference if tensors else model(tmp_path / "statistics", noise=0.0, tensors=False)
    result = whence.compare(base, model(tmp_path / "gelu", gelu=block, tensors=tensors))
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].occurrence) == ("Functional.silu", block)


@pytest.mark.parametrize("block", range(4))
def test_an_operator_more_leaves_only_itself_without_a_partner(reference, tmp_path, block):
    result = whence.compare(reference, model(tmp_path / "extra", extra=block))
    target = open_run(tmp_path / "extra")
    left = sorted((target.calls[i] for i in result.plan.unmatched_target), key=lambda c: c.order)
    assert [c.op_type for c in left] == ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    assert not result.plan.unmatched_reference
    first = [c.order for c in left]
    assert first == list(range(first[0], first[0] + 6)), "they stand together"
    assert result.findings[0].name == "Functional.linear", "the first that reads what it made"


@pytest.mark.parametrize("fault", ["eps", "weight"])
@pytest.mark.parametrize("block", range(4))
def test_faults_are_named_and_rounding_is_not(reference, tmp_path, fault, block):
    result = whence.compare(reference, model(tmp_path / "target", **{fault: block}))
    finding = result.findings[0]
    expected = (
        ("Tensor.__add__", 2 * block, "introduced")
        if fault == "eps"
        else ("Functional.linear", 2 * block + 1, "param-diff")
    )
    assert (finding.name, finding.occurrence, finding.verdict) == expected
    assert whence.compare(reference, model(tmp_path / "clean")).status == "same"


def attention(folder, *, scale=True, fused=False, tensors=True, noise=4e-8):
    """Two blocks of attention written out, or as one call; scale: without it a multiplication is
    missing in the second block.
    """
    rng, dump = np.random.default_rng(4), Dump(folder, tensors=tensors, noise=noise)
    x = rng.standard_normal((2, 12, 8)).astype(np.float32)
    mask = np.triu(np.ones((12, 12), bool), 1)
    for block in range(2):
        q, k, v = (
            dump.op("Functional", "linear", [x, w], x @ w.T)
            for w in rng.standard_normal((3, 8, 8)).astype(np.float32)
        )
        scores = q @ k.swapaxes(1, 2)
        masked = np.where(mask, -1e4, scores * (0.35 if scale or block == 0 else 1.0)).astype(
            np.float32
        )
        weights = np.exp(masked - masked.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
        if fused:
            x = dump.op("Functional", "scaled_dot_product_attention", [q, k, v], weights @ v)
            continue
        scores = dump.op("Tensor", "__matmul__", [q, k.swapaxes(1, 2)], scores)
        if scale or block == 0:
            scores = dump.op("Tensor", "__mul__", [scores, 0.35], scores * np.float32(0.35))
        masked = dump.op("Tensor", "masked_fill", [scores, mask, -1e4], masked)
        weights = dump.op("Functional", "softmax", [masked], weights)
        x = dump.op("Tensor", "__matmul__", [weights, v], weights @ v)
    w = rng.standard_normal((8, 8)).astype(np.float32)
    dump.op("Functional", "linear", [x, w], x @ w.T)
    return dump.close()


@pytest.mark.parametrize("tensors", [True, False])
def test_an_operator_that_the_target_lacks_is_named_and_softmax_behind_the_mask_is_not(
    tmp_path, tensors
):
    result = whence.compare(
        attention(tmp_path / "a", tensors=tensors),
        attention(tmp_path / "b", scale=False, tensors=tensors),
    )
    (finding,) = result.findings
    assert (finding.name, finding.op_type, finding.occurrence, finding.slot if tensors else "") == (
        "Tensor.__mul__",
        "mul",
        1,
        "masked_fill:input.0" if tensors else "",
    )
    assert finding.sentence.startswith("the target has no such call")


@pytest.mark.parametrize("tensors", [True, False])
def test_attention_as_one_call_faces_the_last_of_many_tensor_by_tensor(tmp_path, tensors):
    result = whence.compare(
        attention(tmp_path / "a", tensors=tensors),
        attention(tmp_path / "b", fused=True, tensors=tensors),
    )
    assert not result.findings
    faced = {
        (s.reference_slot, s.target_slot)
        for p in result.plan.pairs
        for s in p.slots
        if s.target_slot == "input.2"
    }
    assert faced == {("input.1", "input.2")}, "v faces v, not k"


def test_gradients_are_held_against_what_the_forward_pass_kept(tmp_path):
    def dump(folder, slope):
        rng, out = np.random.default_rng(5), Dump(folder)
        x, w, g = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (8, 8), (6, 8))
        )
        h = out.op("Functional", "linear", [x, w], x @ w.T)
        a = out.op(
            "Functional", "leaky_relu", [h, slope], np.where(h > 0, h, h * np.float32(slope))
        )
        out.op("Tensor", "pow", [a, 2.0], a * a)
        out.data["Tensor.pow.0.backward"] = {
            "input": [out._leaf("Tensor.pow.0.backward", "input.0", g)],
            "output": [out._leaf("Tensor.pow.0.backward", "output.0", 2 * a * g)],
        }
        key = "Module.fc.Linear.parameters_grad"
        out.data[key] = {"weight": [out._leaf(key, "weight", (2 * a * g).T @ x)]}
        return out.close()

    result = whence.compare(dump(tmp_path / "a", 0.01), dump(tmp_path / "b", 0.2))
    assert [f.name for f in result.findings] == ["Functional.leaky_relu"]


def test_a_parameter_of_a_module_and_of_the_operator_in_it_is_one_finding(tmp_path):
    def dump(folder, weight):
        w, out = weight.astype(np.float32), Dump(folder)
        x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
        y = out.op("Functional", "linear", [x, w], x @ w.T)
        name = "Module.fc.Linear.forward.0"
        out.data[name] = {
            "input_args": [out._leaf(name, "input.0", x)],
            "input_kwargs": {},
            "parameters": {"weight": out._leaf(name, "weight", w)},
            "output": [out._leaf(name, "output.0", y)],
        }
        folder.joinpath("construct.json").write_text(
            json.dumps({"Functional.linear.0.forward": name, name: None})
        )
        return out.close()

    w = np.random.default_rng(6).standard_normal((8, 8))
    result = whence.compare(dump(tmp_path / "a", w), dump(tmp_path / "b", np.roll(w, 1, 0)))
    assert [(f.name, f.verdict) for f in result.findings] == [("fc", "param-diff")]


def test_tensors_against_statistics_and_statistics_against_each_other(reference, tmp_path):
    figures = model(tmp_path / "figures", noise=0.0, tensors=False)
    for result in (
        whence.compare(reference, figures),
        whence.compare(figures, model(tmp_path / "clean", tensors=False)),
    ):
        assert (result.status, result.evidence, result.findings) == ("same", "statistics", ())
    for k, fault in enumerate(("eps", "weight")):
        for base in (reference, figures):
            result = whence.compare(
                base, model(tmp_path / f"{fault}{base.name}", tensors=False, **{fault: 2})
            )
            assert (result.findings[0].name, result.findings[0].occurrence) == [
                ("Tensor.__add__", 4),
                ("Functional.linear", 5),
            ][k]


def test_steps_ranks_and_processes(tmp_path):
    for step in (2, 10):
        for rank in (0, 3):
            shutil.copytree(DATA / "L1_md5", tmp_path / "ranks" / f"step{step}" / f"rank{rank}")
        shutil.copytree(DATA / "L1_md5", tmp_path / "process" / f"step{step}" / "proc4711")
    assert {(s.step, s.rank) for s in open_run(tmp_path / "ranks").steps} == {
        (2, 0),
        (2, 3),
        (10, 0),
        (10, 3),
    }
    assert {(s.step, s.rank) for s in open_run(tmp_path / "process").steps} == {(2, 0), (10, 0)}
    assert len(open_run(tmp_path / "process" / "step2").calls) == len(
        open_run(DATA / "L1_md5").calls
    )
    (tmp_path / "ranks" / "step2" / "rank3" / "dump.json").write_text(
        '{"task": "statistics", "data": {"Torch.o'
    )
    run = open_run(tmp_path / "ranks")
    assert {(s.step, s.rank) for s in run.steps} == {(2, 0), (10, 0), (10, 3)}
    assert any(
        "step2/rank3/dump.json is damaged or was not written to its end" in n.text
        for n in run.notes
    )


def test_modules_hold_what_construct_json_says_and_statistics_are_taken_over(tmp_path):
    a = RNG.standard_normal((4, 8)).astype(np.float32)
    odd = {
        **leaf(a),
        "Max": float("nan"),
        "Min": float("nan"),
        "Mean": float("nan"),
        "Norm": float("nan"),
    }
    data = {
        "Functional.linear.0.forward": {
            "input_args": [leaf(a)],
            "input_kwargs": {"bias": None},
            "output": [leaf(a)],
        },
        "Module.layers.0.fc.Linear.forward.0": {
            "input_args": [leaf(a)],
            "input_kwargs": {},
            "parameters": {"weight": leaf(a)},
            "output": [leaf(a)],
        },
        "Module.layers.0.Block.forward.0": {
            "input_args": [leaf(a)],
            "input_kwargs": {"mask": leaf(a > 0)},
            "output": [odd],
        },
        "Module.layers.0.Block.backward.0": {
            "input": [leaf(a)],
            "output": [leaf(a.astype(np.float64), Mean=None, Norm=None)],
        },
        "Module.layers.0.fc.Linear.parameters_grad.0": {"weight": [leaf(a)]},
    }
    block, linear = "Module.layers.0.Block.forward.0", "Module.layers.0.fc.Linear.forward.0"
    made = {"Functional.linear.0.forward": linear, linear: [block, 0], block: None}
    (tmp_path / "dump.json").write_text(
        json.dumps({"task": "statistics", "level": "mix", "dump_data_dir": None, "data": data})
    )
    (tmp_path / "construct.json").write_text(json.dumps(made))
    run = open_run(tmp_path)
    calls = sorted((c for c in run.calls if c.scope), key=lambda c: c.order)
    assert [(c.scope, c.phase) for c in calls] == [
        ("layers.0", "forward"),
        ("layers.0.fc", "forward"),
        ("layers.0.fc.Functional.linear", "forward"),
        ("layers.0", "backward"),
        ("layers.0.fc.parameters_grad", "backward"),
    ]
    assert [r.slot for r in calls[0].refs] == ["input.0", "input.mask", "output.0"]
    figures = run.records[calls[1].refs[0].record].statistics
    wide = a.astype(np.float64)
    assert figures.std == pytest.approx(wide.std(), rel=1e-9)
    assert (figures.count, figures.norm) == (32, pytest.approx(math.sqrt((wide**2).sum())))
    assert run.records[calls[0].slots("output")[0].record].statistics.nan == 1
    assert run.records[calls[3].slots("output")[0].record].statistics.norm is None


def test_what_does_not_lie_in_the_dump_is_not_read(tmp_path):
    np.save(tmp_path / "secret.npy", np.ones(3, np.float32))
    dump = tmp_path / "dump"
    (dump / "dump_tensor_data").mkdir(parents=True)
    names = ["../../secret.npy", str(tmp_path / "secret.npy"), "gone.npy", "x\0y.npy"]
    leaves = [leaf(np.ones(3, np.float32), data_name=name) for name in names]
    (dump / "dump.json").write_text(
        json.dumps(
            {
                "data": {
                    "Torch.add.0.forward": {"input_args": [], "input_kwargs": {}, "output": leaves}
                }
            }
        )
    )
    run = open_run(dump)
    for record, words in zip(
        run.records, ("outside", "not there", "not there", "outside"), strict=True
    ):
        with pytest.raises(ElementsMissing, match=words):
            run.array(record.id)


def test_its_own_table_is_reproduced(tmp_path):
    whence.compare(DATA / "reference", DATA / "eps", output=tmp_path / "cmp", view="msprobe")
    with (tmp_path / "cmp" / "msprobe.csv").open() as file:
        ours = {row["NPU Name"]: row for row in csv.DictReader(file)}
    with (DATA / "L1_tensor_eps_bug.csv").open() as file:
        theirs = [row for row in csv.DictReader(file) if row["Cosine"] != "unsupported"]
    assert len(theirs) == len(ours) == 127
    assert list(theirs[0]) == list(next(iter(ours.values())))[: len(theirs[0])]
    for row in theirs:
        mine = ours[row["NPU Name"]]
        for column in (
            "Bench Name",
            "NPU Dtype",
            "Bench Tensor Shape",
            "Result",
            "Err_message",
            "Data_name",
        ):
            assert mine[column] == row[column], (row["NPU Name"], column)
        for column in (
            "Cosine",
            "EucDist",
            "MaxAbsErr",
            "MaxRelativeErr",
            "One Thousandth Err Ratio",
            "Five Thousandths Err Ratio",
        ):
            assert float(mine[column]) == pytest.approx(float(row[column]), rel=1e-6, abs=1e-12), (
                row["NPU Name"],
                column,
            )


@pytest.mark.shared
def test_a_dump_of_two_steps_of_the_vendor_opens(shared):
    run = open_run(shared / "samples" / "ascend" / "msprobe_quick_start")
    assert {s.step for s in run.steps} == {0, 1}
    assert next(c for c in run.calls if c.scope == "layer1.0.conv1.Functional.conv2d").slots(
        "param"
    )


def test_a_broken_index_says_where_and_what_to_do(tmp_path):
    (tmp_path / "dump.json").write_text('{"task": "statistics", "data": {"Torch.outer.0.forw')
    with pytest.raises(
        UnreadableRun,
        match=r"dump.json is damaged or was not written to its end .*dump again, and call stop\(\)",
    ):
        open_run(tmp_path)


def test_damaged_dumps_are_refused_or_lose_tensors(tmp_path):
    sample = tmp_path / "sample"
    keep = ("dump.json", "stack.json", "construct.json", "Torch.outer.0.forward.output.0.pt")
    shutil.copytree(
        DATA / "reference",
        sample,
        ignore=lambda folder, names: [n for n in names if n.endswith(".pt") and n not in keep],
    )
    index = json.loads((sample / "dump.json").read_text())
    index["data"] = dict(list(index["data"].items())[:4])
    (sample / "dump.json").write_text(json.dumps(index))
    (tmp_path / "work").mkdir()
    for what, path in variants(sample, tmp_path / "work", among=lambda name: name.endswith(keep)):
        survives(what, path, "msprobe")


def test_a_folder_of_tensors_is_followed_once_however_many_are_read(reference, monkeypatch):
    run, resolved = open_run(reference), []
    resolve = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path: resolved.append(path) or resolve(path))
    for record in run.records:
        run.array(record.id)
    assert len(run.records) == 100
    assert len(resolved) <= 2


def test_a_link_among_tensors_that_leads_outside_is_not_followed(tmp_path):
    dump = model(tmp_path / "dump", noise=0.0)
    tensors = sorted((dump / "dump_tensor_data").iterdir())
    tensors[1].rename(tmp_path / "elsewhere.npy")
    tensors[1].symlink_to(tmp_path / "elsewhere.npy")
    run = open_run(dump)
    files = {record.file: record.id for record in run.records}
    run.array(files[f"dump_tensor_data/{tensors[0].name}"])
    with pytest.raises(ElementsMissing, match="is outside"):
        run.array(files[f"dump_tensor_data/{tensors[1].name}"])
