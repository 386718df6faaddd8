"""Graphs without dumps: operators, attributes, shapes and data flow, and what two of them differ
in.
"""

import json

import pytest
from hostile import survives, variants

import whence
from whence.api import open_run
from whence.errors import UnreadableRun

TEXT = """graph {{
  name: "g"
  op {{ name: "y" type: "Softmax" input: "mm:0" input: "x:-1"
    attr {{ key: "axes" value {{ list {{ i: -1 val_type: VT_LIST_INT }} }} }}
    attr {{ key: "_session" value {{ s: "{session}" }} }}
    output_desc {{ dtype: DT_FLOAT16 shape {{ dim: 4 dim: 8 }} }} }}
  op {{ name: "x" type: "Data" output_desc {{ dtype: DT_FLOAT shape {{ dim: 4 dim: 6 }} }} }}
  op {{ name: "w" type: "Const" output_desc {{ dtype: DT_BF16 shape {{ dim: 6 dim: 8 }} }} }}
  op {{ name: "mm" type: "MatMulV2" input: "x:0" input: "w:0"
    attr {{ key: "transpose_x2" value {{ b: {transposed} }} }}
    output_desc {{ dtype: DT_FLOAT shape {{ dim: 4 dim: 8 }} }} }}
}}
"""


def text(path, transposed="false", session="1"):
    path.write_text(TEXT.format(transposed=transposed, session=session))
    return path


def test_a_graph_text_gives_operators_in_the_order_of_the_data(tmp_path):
    run = open_run(str(text(tmp_path / "ge_proto_00000001_Build.txt")))
    calls = [c for c in run.calls if c.scope]
    assert [(c.scope, c.op_type) for c in calls] == [
        ("x", "Data"),
        ("w", "Const"),
        ("mm", "MatMulV2"),
        ("y", "Softmax"),
    ]
    assert calls[2].arguments == {"transpose_x2": False}
    assert calls[3].arguments == {"axes": [-1]}
    assert [ref.record for ref in calls[3].slots("input")] == [
        ref.record for ref in calls[2].slots("output")
    ]  # control edges carry nothing
    made = [run.records[c.slots("output")[0].record] for c in calls]
    assert [(r.dtype, r.shape) for r in made] == [
        ("float32", (4, 6)),
        ("bfloat16", (6, 8)),
        ("float32", (4, 8)),
        ("float16", (4, 8)),
    ]


def test_two_builds_differ_in_what_the_operators_do_only(tmp_path):
    one = text(tmp_path / "ge_proto_1_Build.txt")
    again = text(tmp_path / "ge_proto_2_Build.txt", session="2")
    assert (equal := whence.compare(one, again)).status == "undecided"
    assert "the programs are equal" in equal.headline
    found = whence.compare(one, text(tmp_path / "ge_proto_3_Build.txt", transposed="true"))
    assert (found.status, [f.name for f in found.findings]) == ("different", ["mm"])
    assert "transpose_x2" in found.findings[0].sentence


def test_a_topology_and_a_tree_of_modules(tmp_path):
    node = {
        "opName": "Layer_0",
        "opType": "Layer",
        "inTensors": ["a"],
        "outTensors": ["b"],
        "param": {"eps": 1e-5},
    }
    (tmp_path / "model.json").write_text(json.dumps({"modelName": "M", "nodes": [node]}))
    child = {"name": "root.h.0.fc", "type": "Linear", "children": []}
    (tmp_path / "tree.json").write_text(
        json.dumps({"name": "root.h.0", "type": "Block", "children": [child]})
    )
    run = open_run(str(tmp_path))
    assert {(c.root, c.scope, c.op_type) for c in run.calls if c.op_type} == {
        ("model", "Layer_0", "Layer"),
        ("tree", "h.0", "Block"),
        ("tree", "h.0.fc", "Linear"),
    }
    assert next(c for c in run.calls if c.op_type == "Layer").arguments == {"eps": 1e-5}


@pytest.mark.shared
def test_graphs_of_real_builds(shared):
    om = open_run(str(shared / "samples/ascend/msit_om_json/model.json"))
    assert len([c for c in om.calls if c.op_type]) == 19
    transposed = next(
        c for c in om.calls if c.scope == "BatchMultiClassNMS_1203_Input0_TransposeBefore"
    )
    assert om.records[transposed.slots("output")[0].record].shape == (1, 80, 4, 1000)
    texts = open_run(str(shared / "samples/ascend/oam_ge_proto"))
    assert not [n for n in texts.notes if n.kind == "error"]
    assert {"Assign", "MatMul"} & {c.op_type for c in texts.calls}
    topology = open_run(str(shared / "samples/ascend/msit_atb_topology"))
    assert {"BloomLayer", "BloomAttention"} <= {c.op_type for c in topology.calls}


def test_what_is_no_graph_is_said(tmp_path):
    path = tmp_path / "ge_proto_1_Build.txt"
    path.write_text("graph { name: 1 op { ")
    with pytest.raises(UnreadableRun):
        open_run(str(path))


@pytest.mark.parametrize("name", ["ge_proto_1_Build.txt", "model.json"])
def test_damaged_graphs(tmp_path, name):
    sample = tmp_path / name
    if name.endswith(".json"):
        nodes = [
            {"opName": f"L_{i}", "opType": "Layer", "inTensors": ["a"], "outTensors": ["b"]}
            for i in range(3)
        ]
        sample.write_text(json.dumps({"modelName": "M", "nodes": nodes}))
    else:
        text(sample)
    (tmp_path / "work").mkdir()
    for what, dump in variants(sample, tmp_path / "work"):
        survives(what, dump)
        survives(what, dump, "ascend_graph")
