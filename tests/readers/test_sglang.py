"""sglang's dumper and forward hook; tests/data/sglang was written by the dumper.py and
tensor_dump_forward_hook.py of sglang 0.5.23.

A model of two blocks, layers.1.norm of which has another epsilon in dumper_bad. Names of files are
those of the tool.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import whence
from readers import hostile
from whence.readers import open_run

DATA = Path(__file__).parents[1] / "data" / "sglang"


def test_modules_have_their_inputs_and_outputs_and_nest():
    run = open_run(DATA / "dumper_ref")
    assert run.reader == "sglang"
    calls = {c.scope: c for c in run.calls}
    assert {
        "",
        "model",
        "model.embed_tokens",
        "model.layers.0.norm",
        "model.layers.1",
        "lm_head",
        "probs",
    } <= set(calls)
    assert [r.slot for r in calls["model.layers.0.norm"].refs] == ["input.0", "output.0"]
    assert calls["model.layers.0.norm"].parent == calls["model.layers.0"].id
    assert calls["probs"].arguments == {"dims": "t v"}
    (x,), (y,) = (
        calls["model.layers.0.norm"].slots("input"),
        calls["model.layers.0.norm"].slots("output"),
    )
    x, y = run.array(x.record), run.array(y.record)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    assert np.allclose(y, want, atol=1e-5)


def test_the_module_that_is_wrong_is_named():
    result = whence.compare(str(DATA / "dumper_ref"), str(DATA / "dumper_bad"))
    assert (result.status, [f.name for f in result.findings]) == (
        "different",
        ["model.layers.1.norm"],
    )
    assert whence.compare(str(DATA / "dumper_ref"), str(DATA / "dumper_ref")).status == "same"


def test_what_the_hook_writes_a_file_too_late_belongs_to_the_forward_before():
    run = open_run(DATA / "hook_ref")
    by_step = {
        step: [
            c.scope for c in sorted(run.calls, key=lambda c: c.order) if c.leaf and c.step == step
        ]
        for step in (0, 1)
    }
    assert by_step[0] == [
        "model.embed_tokens",
        "model.layers.0.norm",
        "model.layers.0.fc",
        "model.layers.1.norm",
        "model.layers.1.fc",
        "model.norm",
        "model",
        "lm_head",
    ]
    assert by_step[1] == by_step[0][:-2]
    found = {(c.step, c.scope): run.array(c.slots("output")[0].record) for c in run.calls if c.leaf}
    assert np.array_equal(found[0, "model"], found[0, "model.norm"])


@pytest.mark.torch
def test_points_of_layers_weights_and_gradients(tmp_path):
    torch = pytest.importorskip("torch")

    def dump(index, name, value, **tags):
        tags = {
            "step": 0,
            "rank": 1,
            "dump_index": index,
            "name": name,
            "recompute_status": "disabled",
            **tags,
        }
        file = "___".join(f"{key}={part}" for key, part in tags.items()) + ".pt"
        torch.save({"value": value, "meta": {**tags, "world_rank": 1}}, tmp_path / file)

    dump(1, "param__model.norm.weight", torch.ones(4))
    dump(10, "hidden", torch.ones(2), layer_id=1)
    dump(9, "hidden", torch.zeros(2), layer_id=0)
    dump(11, "grad__hidden", torch.full((2,), 3.0), layer_id=0)
    dump(12, "meta_only", "a text")
    run = open_run(tmp_path)
    ordered = [c for c in sorted(run.calls, key=lambda c: c.order) if c.refs and c.scope]
    assert [(c.scope, c.rank, [r.slot for r in c.refs]) for c in ordered] == [
        ("model.norm", 1, ["param.weight"]),
        ("layers.0.hidden", 1, ["output.0"]),
        ("layers.1.hidden", 1, ["output.0"]),
        ("layers.0.hidden.grad", 1, ["output.0"]),
    ]


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    for path in sorted((DATA / "dumper_ref").iterdir())[:3]:
        shutil.copy(path, sample)
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(
        sample, tmp_path / "work", among=lambda name: "dump_index=1_" in name
    ):
        hostile.survives(what, path, "sglang")


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    shutil.copytree(DATA / "dumper_ref", tmp_path / "d")
    first = min((tmp_path / "d").iterdir())
    first.write_bytes(b"PK\x03\x04")
    notes = [n.text for n in open_run(tmp_path / "d").notes if n.kind == "error"]
    assert len(notes) == 1
    assert first.name in notes[0]
