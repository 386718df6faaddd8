"""Dumps of modules by msit: old and new layouts, weights, statistics, functions called in modules;
written with torch itself.
"""

import json
from pathlib import Path

import ascend_files as af
import hostile
import numpy as np
import pytest

import whence
from whence import cli
from whence.readers import open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
NEW = "msit_dump_20250101_000000/torch_tensors"
LAYERS = 12
W = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(LAYERS)]


def inputs(token):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 + token))


def save(base, token, module, what, value):
    (base / str(token) / module).mkdir(parents=True, exist_ok=True)
    torch.save(value, base / str(token) / module / f"{what}.pth")


def leaves(run):
    return [c for c in run.calls if c.leaf]


def node(name, kind, *children):
    return {"name": name, "type": kind, "children": list(children)}


def modules(dump: Path, fault: float = 1.0, weights: bool = True, tree: bool = True) -> Path:
    """Twelve layers of one Linear each, two tokens; a fault in layer 5 at token 1."""
    base = dump / NEW / "cpu_77"
    below = [
        node(f"root.layers.{i}", "Block", node(f"root.layers.{i}.fc", "Linear"))
        for i in range(LAYERS)
    ]
    base.mkdir(parents=True)
    if tree:
        (base / "model_tree.json").write_text(
            json.dumps({"name": "root", "type": "Model", "children": below})
        )
    for i in range(LAYERS if weights else 0):
        (base / "weights").mkdir(exist_ok=True)
        torch.save(torch.nn.Parameter(W[i]), base / f"weights/root.layers.{i}.fc.weight.pth")
    for token in range(2):
        x = inputs(token)
        save(base, token, "root", "input_0", x)
        for i in range(LAYERS):
            name = f"root.layers.{i}"
            save(base, token, name, "input_0", x)
            save(base, token, f"{name}.fc", "input_0", x)
            x = x @ W[i].T * (fault if (i, token) == (5, 1) else 1.0)
            save(base, token, f"{name}.fc", "output", x)
            save(base, token, name, "output", x)
        save(base, token, "root", "output", x)
    return dump


def operators(dump: Path, fault: float = 1.0) -> Path:
    """The same program as ATB would dump it."""
    for token in range(2):
        x = inputs(token)
        for i in range(LAYERS):
            at = dump / f"tensors/npu0_99/{token}/{i}_BlockLayer"
            for where in (at, at / "0_LinearOperation"):
                af.atb(where / "before/intensor0.bin", x.numpy())
            af.atb(at / "0_LinearOperation/before/intensor1.bin", W[i].numpy())
            x = x @ W[i].T * (fault if (i, token) == (5, 1) else 1.0)
            for where in (at, at / "0_LinearOperation"):
                af.atb(where / "after/outtensor0.bin", x.numpy())
    return dump


def test_modules_weights_and_tokens(tmp_path):
    run = open_run(modules(tmp_path))
    assert run.reader == "msit_torch"
    calls = sorted(run.calls, key=lambda c: c.order)
    names = ["", *(n for i in range(LAYERS) for n in (f"layers.{i}", f"layers.{i}.fc"))]
    assert [(c.step, c.scope) for c in calls] == [(t, n) for t in (0, 1) for n in names]
    assert {c.op_type for c in calls} == {"Model", "Block", "Linear"}
    fc = calls[2]
    assert [r.slot for r in fc.refs] == ["input.0", "param.weight", "output.0"]
    np.testing.assert_array_equal(run.array(fc.refs[1].record), W[0].numpy())
    np.testing.assert_array_equal(run.array(fc.refs[2].record), (inputs(0) @ W[0].T).numpy())


def test_without_a_tree_the_flow_says_the_order(tmp_path):
    base = tmp_path / "cuda0_12"
    x = torch.arange(16.0)
    for module, given, made in (
        ("root.b", x, x + 1),
        ("root.c", x + 1, x + 2),
        ("root.a", x + 2, x + 3),
    ):
        save(base, 0, module, "input_0", given)
        save(base, 0, module, "output", made)
    assert [c.scope for c in leaves(open_run(tmp_path))] == ["b", "c", "a"]


def test_logits_of_the_oldest_layout(tmp_path):
    for token in range(3):
        save(
            tmp_path / "npu0_5",
            token,
            "root.lm_head",
            "output",
            torch.full((2, 8), float(token)).to(torch.bfloat16),
        )
    run = open_run(tmp_path)
    assert [(c.step, c.scope, run.array(c.refs[0].record).dtype.name) for c in leaves(run)] == [
        (t, "lm_head", "bfloat16") for t in range(3)
    ]
    assert [c.step for c in leaves(open_run(tmp_path / "npu0_5"))] == [0, 1, 2]


def test_nested_outputs_functions_and_ranks(tmp_path):
    for rank in (1, 0):
        base = tmp_path / NEW / f"npu{rank}_{50 + rank}"
        base.mkdir(parents=True)
        tree = {
            "name": "root",
            "type": "M",
            "children": [{"name": "root.attn", "type": "Attention", "children": []}],
        }
        (base / "model_tree.json").write_text(json.dumps(tree))
        for k in (0, 10, 2):
            save(base, 0, "root.attn", f"output_1_{k}", torch.full((9,), float(k)))
        for k in range(2):
            save(base, 0, f"root.attn.softmax.{k}", "output", torch.full((9,), float(k)))
        save(base, 0, "root.attn.linear", "output", torch.zeros(9))
    run = open_run(tmp_path)
    calls = [c for c in sorted(run.calls, key=lambda c: c.order) if c.rank == 1 and c.scope]
    assert [(c.scope, c.op, c.occurrence, c.kind) for c in calls] == [
        ("attn", "", 0, "module"),
        ("attn", "linear", 0, "operator"),
        ("attn", "softmax", 0, "operator"),
        ("attn", "softmax", 1, "operator"),
    ]
    assert [r.slot for r in calls[0].refs] == ["output.1.0", "output.1.2", "output.1.10"]
    assert {c.rank for c in run.calls} == {0, 1}


def test_statistics_only(tmp_path):
    base = tmp_path / NEW / "npu0_5"
    base.mkdir(parents=True)
    rows = ["NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm"]
    rows += [
        f'root.fc,Linear,output,0,torch.float16,"torch.Size([2, 3])",{k}.5,-1,0.25,2'
        for k in range(2)
    ]
    (base / "statistics.csv").write_text("\n".join([*rows, "broken,row"]))
    run = open_run(tmp_path)
    assert [(c.step, c.scope) for c in leaves(run)] == [(0, "fc"), (1, "fc")]
    record = run.records[leaves(run)[1].refs[0].record]
    assert (record.dtype, record.shape, record.statistics.max, record.statistics.norm) == (
        "float16",
        (2, 3),
        1.5,
        2,
    )
    assert any("row 4 is not read" in n.text for n in run.notes)


def test_no_pickle_is_executed(tmp_path):
    path = tmp_path / "dump" / "npu0_5" / "0" / "root.fc" / "output.pth"
    path.parent.mkdir(parents=True)
    path.write_bytes(hostile.evil_pickle(tmp_path / "marker"))
    hostile.survives("a pickle", tmp_path / "dump", "msit_torch")
    assert not (tmp_path / "marker").exists()


# ---- comparisons, as a user makes them


@pytest.mark.parametrize("sides", ["torch torch", "atb atb", "torch atb", "atb torch"])
@pytest.mark.parametrize("fault", [1.01, 1.0])
def test_the_planted_fault_is_named_whoever_dumped_it(tmp_path, sides, fault):
    makers = {"torch": modules, "atb": operators}
    one, other = sides.split()
    reference, target = makers[one](tmp_path / "golden"), makers[other](tmp_path / "mine", fault)
    found = whence.compare(reference, target)
    if fault == 1.0:
        assert (found.status, found.unmatched) == ("same", 0)
        return
    assert found.status == "different"
    first = found.findings[0]
    assert (first.name, first.step) == (
        {"torch": "layers.5.fc", "atb": "BlockLayer.5.LinearOperation.0"}[one],
        1,
    )


def test_on_the_command_line(tmp_path, capsys):
    sides = str(modules(tmp_path / "a")), str(operators(tmp_path / "b", 1.01))
    assert cli.execute(["compare", *sides, "-o", str(tmp_path / "cmp")]) == 1
    assert "layers.5.fc" in capsys.readouterr().out.splitlines()[0]


def test_hostile(tmp_path):
    dump = tmp_path / "sample" / NEW / "cpu_77"
    (dump).mkdir(parents=True)
    (dump / "model_tree.json").write_text(json.dumps({"name": "root", "type": "M", "children": []}))
    save(dump, 0, "root.fc", "output", torch.arange(6.0))
    header = "NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm"
    (dump / "statistics.csv").write_text(
        f'{header}\nroot.fc,L,output,0,torch.float16,"[2, 3]",1,1,1,1\n'
    )
    (tmp_path / "work").mkdir()
    for what, found in hostile.variants(tmp_path / "sample", tmp_path / "work"):
        hostile.survives(what, found)
