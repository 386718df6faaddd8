"""Polygraphy's JSON; tests/data/polygraphy was written by polygraphy 0.53.6."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import UnreadableRun
from whence.readers import open_run

DATA = Path(__file__).parents[1] / "data" / "polygraphy"


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def results(arrays, runner="trt-runner-N0-01/02/26-10:00:00"):
    encoded = {
        name: {
            "values": {"array": base64.b64encode(npy(a)).decode(), "polygraphy_class": "ndarray"},
            "polygraphy_class": "LazyArray",
        }
        for name, a in arrays.items()
    }
    return {
        "lst": [
            [
                runner,
                [
                    {
                        "outputs": encoded,
                        "runner_name": runner,
                        "polygraphy_class": "IterationResult",
                    }
                ],
            ]
        ],
        "polygraphy_class": "RunResults",
    }


def test_what_polygraphy_wrote_is_read_by_iteration():
    run = open_run(DATA / "ref.json")
    leaves = sorted((c for c in run.calls if c.leaf), key=lambda c: c.order)
    assert [(c.step, c.scope) for c in leaves] == [
        (s, n) for s in (0, 1) for n in ("h0", "h1", "logits")
    ]
    for step in (0, 1):
        h0 = np.random.default_rng(step).standard_normal((2, 8)).astype(np.float32)
        found = {c.scope: run.array(c.slots("output")[0].record) for c in leaves if c.step == step}
        assert found["h0"].tobytes() == h0.tobytes()
        assert found["logits"].tobytes() == h0[:, :3].astype(np.float16).tobytes()


def test_two_runners_face_each_other_though_their_names_bear_times():
    result = whence.compare(str(DATA / "ref.json"), str(DATA / "bad.json"))
    assert (result.status, result.findings[0].name, result.findings[0].step) == (
        "different",
        "h1",
        0,
    )
    assert whence.compare(str(DATA / "ref.json"), str(DATA / "ref.json")).status == "same"


def test_inputs_are_what_the_whole_was_given():
    run = open_run(DATA / "inputs.json")
    assert [(c.scope, [r.slot for r in c.refs]) for c in run.calls] == [("", ["input.x"])]
    assert run.array(0).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_folder_has_an_iteration_in_each_file(tmp_path):
    for i in range(2):
        (tmp_path / f"{i:010d}.json").write_text(
            json.dumps(results({"y": np.full(3, i, np.float32)}))
        )
    run = open_run(tmp_path)
    assert run.reader == "polygraphy"
    leaves = sorted((c for c in run.calls if c.leaf), key=lambda c: c.order)
    assert [(c.step, run.array(c.slots("output")[0].record).tolist()) for c in leaves] == [
        (0, [0.0] * 3),
        (1, [1.0] * 3),
    ]


def test_older_markers_and_latin_1_text_are_read(tmp_path):
    array = np.arange(3.0)
    mark = "polygraphy_serialized_json_type"
    old = {
        "lst": [
            [
                "r",
                [
                    {
                        "outputs": {
                            "y": {
                                "values": {
                                    "array": npy(array).decode("latin-1"),
                                    "__polygraphy_encoded_ndarray": mark,
                                },
                                "__polygraphy_encoded_LazyNumpyArray": mark,
                            }
                        },
                        "__polygraphy_encoded_IterationResult": mark,
                    }
                ],
            ]
        ],
        "__polygraphy_encoded_RunResults": mark,
    }
    (tmp_path / "old.json").write_text(json.dumps(old))
    run = open_run(tmp_path / "old.json")
    assert run.array(0).tolist() == array.tolist()


@pytest.mark.torch
def test_tensors_of_torch_are_read_without_it(tmp_path):
    torch = pytest.importorskip("torch")
    out, told = io.BytesIO(), results({"y": np.ones(1)})
    torch.save(torch.arange(3).bfloat16(), out)
    value = {"tensor": base64.b64encode(out.getvalue()).decode(), "polygraphy_class": "Tensor"}
    told["lst"][0][1][0]["outputs"]["y"]["values"] = value
    (tmp_path / "x.json").write_text(json.dumps(told))
    run = open_run(tmp_path / "x.json")
    assert (run.records[0].dtype, run.array(0).tolist()) == ("bfloat16", [0.0, 1.0, 2.0])


def test_a_text_that_is_no_array_costs_that_tensor(tmp_path):
    told = results({"x": np.ones(2), "y": np.ones(2)})
    told["lst"][0][1][0]["outputs"]["x"]["values"]["array"] = "!!!"
    (tmp_path / "x.json").write_text(json.dumps(told))
    run = open_run(tmp_path / "x.json")
    assert [bool(r.why) for r in run.records] == [True, False]
    assert whence.compare(str(tmp_path / "x.json"), str(tmp_path / "x.json")).status == "undecided"


def test_verdicts_of_a_comparison_are_no_tensors(tmp_path):
    (tmp_path / "x.json").write_text('{"lst": [], "polygraphy_class": "AccuracyResults"}')
    with pytest.raises(UnreadableRun, match="--save-outputs"):
        open_run(tmp_path / "x.json")


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    for what, path in hostile.variants(DATA / "ref.json", tmp_path):
        hostile.survives(what, path, "polygraphy")


def test_a_pickle_behind_a_tensor_is_not_executed(tmp_path):
    told = results({"y": np.ones(1)})
    evil = base64.b64encode(hostile.evil_pickle(tmp_path / "marker")).decode()
    for value in (
        {"tensor": evil, "polygraphy_class": "Tensor"},
        {"array": evil, "polygraphy_class": "ndarray"},
    ):
        told["lst"][0][1][0]["outputs"]["y"]["values"] = value
        (tmp_path / "x.json").write_text(json.dumps(told))
        hostile.survives("a pickle", tmp_path / "x.json")
    assert not (tmp_path / "marker").exists()
