"""Files for viewers: SARIF, node data of Model Explorer, an annotated ONNX model, scalars of
TensorBoard. Each is taken apart again, by the real program where that is installed.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import inside
import whence
from handmade import net
from whence import api
from whence.errors import OutputExists, UnreadableRun, UsageError
from whence.report.model_explorer import model_explorer
from whence.report.node_errors import node_errors
from whence.report.sarif import sarif
from whence.workflows.viewers import tensorboard


def bad():
    return api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))


def at(source, root):
    """A comparison whose finding is at this place."""
    from msgspec.structs import replace

    result = bad()
    return sarif(replace(result, findings=(replace(result.findings[0], source=source),)), root)


# -- SARIF ------------------------------------------------------------------------------------------------------------


def required_by_the_standard(log):
    """What SARIF 2.1.0 asks of the parts that whence writes (sections 3.13 to 3.33)."""
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "whence"
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(rules) == len({*rules})
    for result in run["results"]:
        assert result["message"]["text"]
        assert result["level"] in ("error", "warning", "note", "none")
        assert result["ruleId"] in rules
        for location in result.get("locations", ()):
            if "physicalLocation" in location:
                assert location["physicalLocation"]["region"]["startLine"] >= 1
                assert "\\" not in location["physicalLocation"]["artifactLocation"]["uri"]
    return run["results"]


def test_a_finding_is_a_result_with_its_module(tmp_path):
    (result,) = required_by_the_standard(json.loads(sarif(bad())))
    assert result["level"] == "error"
    assert result["message"]["text"].startswith("fc1 (Linear) step 0, rank 0: introduced")
    assert result["locations"] == [
        {"logicalLocations": [{"fullyQualifiedName": "fc1", "kind": "module"}]}
    ]


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("{root}/my models/net.py:7", "my%20models/net.py"),
        ("serve.py:7", "serve.py"),
        ("/elsewhere/net.py:7", "file:///elsewhere/net.py"),
    ],
)
def test_a_finding_stands_at_its_line(tmp_path, source, uri):
    text = at(source.format(root=tmp_path), tmp_path)
    (result,) = required_by_the_standard(json.loads(text))
    physical = result["locations"][0]["physicalLocation"]
    assert physical == {"artifactLocation": {"uri": uri}, "region": {"startLine": 7}}


def test_answers_without_a_finding_are_results_too():
    (same,) = required_by_the_standard(json.loads(sarif(api.compare(net(), net()))))
    assert (same["ruleId"], same["level"]) == ("same", "note")
    undecided = api.compare(net(), net(drop=("fc1",)))
    last = required_by_the_standard(json.loads(sarif(undecided)))[-1]
    assert (last["ruleId"], last["level"]) == ("undecided", "warning")


def test_a_viewer_reads_it(tmp_path):
    sarif_file = pytest.importorskip("sarif.sarif_file", reason="pip install sarif-tools")
    (tmp_path / "whence.sarif").write_text(at("serve.py:7", tmp_path))
    read = sarif_file.SarifFile(str(tmp_path / "whence.sarif"), json.loads(at("serve.py:7", None)))
    (record,) = read.get_records()
    assert (record["Tool"], record["Severity"], record["Line"]) == ("whence", "error", 7)


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_a_node_has_its_worst_verdict_and_largest_error():
    nodes = node_errors(bad())
    assert nodes["fc1"].verdict == "introduced"
    assert nodes["fc1"].error == pytest.approx(0.5)
    assert nodes["fc2"].verdict == "inherited"


def test_node_data_of_model_explorer():
    # without the id of a graph, which the adapter chooses, it is that of the graph which is open
    data = json.loads(model_explorer(bad()))
    assert {*data} == {"results", "name"}
    nodes = data["results"]
    assert nodes["fc1"]["value"] == pytest.approx(0.5)
    assert nodes["fc1"]["bgColor"] != nodes["fc2"]["bgColor"]


def test_model_explorer_has_a_place_for_all_of_it():
    builder = pytest.importorskip(
        "model_explorer.node_data_builder", reason="pip install ai-edge-model-explorer"
    )
    data = json.loads(model_explorer(bad()))
    nodes = {key: builder.NodeDataResult(**node) for key, node in data.pop("results").items()}
    assert {"fc1", "fc2"} <= {*nodes}
    assert builder.GraphNodeData(results=nodes, **data).name


def test_what_was_not_measured_has_no_node_data():
    result = api.compare(net(), net(change=lambda n, v: np.full_like(v, np.nan) if n == "h" else v))
    values = json.loads(model_explorer(result))["results"]
    assert all(np.isfinite(node["value"]) for node in values.values())
    assert "fc1" not in values


@pytest.fixture
def onnx_case(tmp_path):
    """(onnx, path of a model whose nodes are named as the calls of a comparison, the comparison)"""
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    values = [make.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4]) for n in "xz"]
    nodes = [
        make.make_node("Relu", ["x"], ["/fc1_output_0"], name="first"),
        make.make_node("Relu", ["/fc1_output_0"], ["z"], name="second", doc_string="kept"),
    ]
    weight = make.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    graph = make.make_graph(nodes, "g", values[:1], values[1:], [weight])
    onnx.save(make.make_model(graph), tmp_path / "model.onnx")
    for name, by in (("ref", 1), ("tgt", 1.5)):
        with whence.recording(tmp_path / name) as run:
            run.add("fc0", np.ones(4, np.float32))
            run.add("fc1", np.arange(4, dtype=np.float32) * by)
    return onnx, tmp_path / "model.onnx", whence.compare(tmp_path / "ref", tmp_path / "tgt")


def test_a_copy_of_a_model_differs_in_its_metadata_alone(onnx_case, tmp_path):
    onnx, model, result = onnx_case
    assert api.annotate_onnx(result, model, tmp_path / "copy.onnx") == 1
    before, after = onnx.load(model), onnx.load(tmp_path / "copy.onnx")
    onnx.checker.check_model(after)
    first, second = after.graph.node
    assert {p.key: p.value for p in first.metadata_props} == {
        "whence.verdict": "introduced",
        "whence.rel_l2": "0.5",
    }
    assert not second.metadata_props
    del first.metadata_props[:], after.metadata_props[:]
    assert after == before


def test_a_copy_is_replaced_by_force_and_a_model_is_not(onnx_case, tmp_path):
    _, model, result = onnx_case
    copy = tmp_path / "copy.onnx"
    api.annotate_onnx(result, model, copy)
    with pytest.raises(OutputExists, match="--force replaces it"):
        api.annotate_onnx(result, model, copy)
    assert api.annotate_onnx(result, model, copy, force=True) == 1
    content = model.read_bytes()
    with pytest.raises(OutputExists, match="not written by whence"):
        api.annotate_onnx(result, copy, model, force=True)
    assert model.read_bytes() == content


def test_what_is_no_model_of_this_comparison_is_refused(onnx_case, tmp_path):
    _, model, _ = onnx_case
    with pytest.raises(UsageError, match="none of the 2 nodes"):
        api.annotate_onnx(bad_named("other"), model, tmp_path / "copy.onnx")
    (tmp_path / "cut.onnx").write_bytes(model.read_bytes()[:40])
    with pytest.raises(UnreadableRun, match=r"cut\.onnx"):
        api.annotate_onnx(bad(), tmp_path / "cut.onnx", tmp_path / "copy.onnx")
    with pytest.raises(UnreadableRun, match=r"nowhere\.onnx cannot be read"):
        api.annotate_onnx(bad(), tmp_path / "nowhere.onnx", tmp_path / "copy.onnx")
    assert not (tmp_path / "copy.onnx").exists()


def bad_named(name):
    made = [{name: np.arange(4, dtype=np.float32) * by} for by in (1, 1.5)]
    return whence.compare(*made)


def test_weights_beside_a_model_stay_findable(onnx_case, tmp_path):
    onnx, model, result = onnx_case
    split = tmp_path / "split" / "model.onnx"
    split.parent.mkdir()
    big = onnx.load(model)
    big.graph.initializer[0].raw_data = np.zeros(2048, np.float32).tobytes()
    big.graph.initializer[0].ClearField("float_data")
    big.graph.initializer[0].dims[:] = [2048]
    onnx.save(big, split, save_as_external_data=True, location="weights.bin")
    with pytest.raises(UsageError, match="write the copy beside it"):
        api.annotate_onnx(result, split, tmp_path / "copy.onnx")
    api.annotate_onnx(result, split, split.with_name("copy.onnx"))
    assert onnx.load(split.with_name("copy.onnx")).graph.initializer[0].raw_data


def test_node_data_by_the_values_of_a_model(onnx_case, tmp_path):
    _, model, result = onnx_case
    api.model_explorer_data(result, tmp_path / "data.json", model=model)
    data = json.loads((tmp_path / "data.json").read_text())
    assert [*data["results"]] == ["/fc1_output_0"]


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, B.4: 32 bytes of zeros have the CRC-32C 0x8a9136aa
    masked = struct.unpack("<I", tensorboard._checksum(bytes(32)))[0]
    crc = (masked - tensorboard._MASK) & 0xFFFFFFFF
    assert (crc >> 17 | crc << 15) & 0xFFFFFFFF == 0x8A9136AA


def test_scalars_are_the_errors_of_outputs_by_step(tmp_path):
    count = api.tensorboard(bad(), tmp_path / "tb")
    values = tensorboard.scalars(bad())
    assert count == len(values[0])
    assert values[0]["rel_l2/fc1", 0] == pytest.approx(0.5)
    (file,) = (tmp_path / "tb").iterdir()
    assert ".tfevents." in file.name
    data, tags = file.read_bytes(), 0
    while data:
        length = struct.unpack("<Q", data[:8])[0]
        assert data[8:12] == tensorboard._checksum(data[:8])
        assert data[12 + length : 16 + length] == tensorboard._checksum(data[12 : 12 + length])
        tags += b"rel_l2/" in data[12 : 12 + length]
        data = data[16 + length :]
    assert tags == count


def test_the_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match="choose another folder"):
        api.tensorboard(bad(), tmp_path)


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="pip install tensorboard",
    )
    api.tensorboard(bad(), tmp_path / "tb")
    read = accumulator.EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert "rel_l2/fc1" in read.Tags()["scalars"]
    assert [event.value for event in read.Scalars("rel_l2/fc1")] == [pytest.approx(0.5)]


# -- the command ------------------------------------------------------------------------------------------------------


def test_from_the_command_line(onnx_case, tmp_path):
    assert inside.whence(tmp_path, "compare", "ref", "tgt", "-o", "cmp").returncode == 1
    words = ("--onnx", "model.onnx", "--netron", "copy.onnx", "--model-explorer", "data.json")
    done = inside.whence(tmp_path, "report", "cmp", *words, "--tensorboard", "tb")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "written to copy.onnx: 1 node annotated",
        "written to data.json",
        "written to tb: 2 scalars",
    ]
    assert not (tmp_path / "cmp" / "report.html").exists()
    printed = inside.whence(tmp_path, "report", "cmp", "--format", "sarif").stdout
    required_by_the_standard(json.loads(printed))
    alone = inside.whence(tmp_path, "report", "cmp", "--netron", "other.onnx")
    assert alone.returncode == 3
    assert "give both" in alone.stderr
    assert not Path(tmp_path / "other.onnx").exists()
