"""Sessions of ONNX Runtime captured in code and under `whence run`. Oracles: the session alone,
onnx's own reference evaluator, numpy.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import whence
from whence import judge
from whence.errors import UsageError
from whence.instrument.engines.effect import Observer, Words, neutral_values
from whence.instrument.engines.values import of_array
from whence.instrument.framework import owner_of
from whence.instrument.onnxruntime import insides, native_sessions
from whence.records.marks import Mark, mark_value, mark_values
from whence.replay import stepwise
from whence.store import open_run

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
zoo = importlib.import_module("onnx_models")
importlib.import_module("onnx.reference")

HERE = Path(__file__).parent
collection = ort.capi.onnxruntime_inference_collection
LEVELS = ort.GraphOptimizationLevel
CPU = ["CPUExecutionProvider"]


def options(level="ORT_ENABLE_ALL"):
    out = ort.SessionOptions()
    out.intra_op_num_threads = 1
    out.graph_optimization_level = getattr(LEVELS, level)
    return out


def session_of(made, level="ORT_ENABLE_ALL"):
    model = made if isinstance(made, (str, os.PathLike)) else made.SerializeToString()
    return ort.InferenceSession(model, options(level), providers=CPU)


def captured(place, session, *feeds, **how):
    """(run, results of each step)."""
    path = str(place / f"run{len(list(place.iterdir()))}")
    with whence.capture(session, path, **how):
        results = [session.run(None, given) for given in feeds]
    return open_run(path), results


def notes(run, kind):
    return [note.text for note in run.notes if note.kind == kind]


def settings(run):
    return json.loads(notes(run, "settings")[0])


def operators(run, step=0):
    return {c.scope: c for c in run.calls if c.kind == "operator" and c.step == step}


def arrays(run, call, kind):
    return {r.slot: run.array(r.record) for r in call.slots(kind)}


def alike(a, b):
    """Equal bit for bit, in sequences and texts too."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- the program is not changed


@pytest.mark.parametrize("level", ["io", "modules"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_results_are_those_of_the_session_alone(tmp_path, name, level):
    made, feeds = zoo.MODELS[name]()
    before = {k: v.copy() for k, v in feeds.items()}
    alone = session_of(made).run(None, feeds)
    run, results = captured(tmp_path, session_of(made), feeds, feeds, level=level)
    texts = [isinstance(value, np.ndarray) and value.dtype == object for value in alone]
    for result in results:
        for one, other, is_text in zip(alone, result, texts, strict=True):
            assert (one == other).all() if is_text else alike(one, other)
    assert all((before[k] == feeds[k]).all() for k in feeds)
    assert len([c for c in run.calls if c.op_type == "InferenceSession"]) == 2
    assert not notes(run, "error")
    if level == "modules":
        (effect,) = notes(run, "observer")
        assert effect.startswith("observer effect: none")
        assert operators(run)


def test_the_program_gets_the_objects_that_its_session_returned(tmp_path, monkeypatch):
    made, feeds = zoo.attention()
    session, returned = session_of(made), []
    plain = collection.Session.run

    def run(self, *args, **kwargs):
        returned.append(plain(self, *args, **kwargs))
        return returned[-1]

    monkeypatch.setattr(collection.Session, "run", run)
    _, results = captured(tmp_path, session, feeds)
    assert results[0] is returned[0]
    assert collection.Session.run is run


def test_options_and_seeds_stay_as_they_are(tmp_path):
    made, feeds = zoo.attention()
    chosen = options("ORT_ENABLE_EXTENDED")
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "1")
    session = ort.InferenceSession(made.SerializeToString(), chosen, providers=CPU)

    def state():
        return [
            getattr(o, name)
            for o in (chosen, session.get_session_options())
            for name in dir(o)
            if not name.startswith("_") and not callable(getattr(o, name))
        ] + [chosen.get_session_config_entry("session.intra_op.allow_spinning")]

    drawn, before = np.random.get_state()[1].copy(), state()
    native = session._sess
    captured(tmp_path, session, feeds)
    assert state() == before
    assert session._sess is native
    assert (np.random.get_state()[1] == drawn).all()


def test_methods_are_put_back(tmp_path):
    before = {
        (kind, name): value
        for kind in (collection.Session, collection.InferenceSession, collection.IOBinding)
        for name, value in vars(kind).items()
    }
    made, feeds = zoo.dense()
    captured(tmp_path, session_of(made), feeds)
    for (kind, name), value in before.items():
        assert vars(kind)[name] is value


def test_a_session_is_not_kept_alive(tmp_path):
    made, feeds = zoo.dense()
    other = session_of(made)
    with whence.capture(session_of(made), str(tmp_path / "run")) as _:
        pass
    listener, session = everything(tmp_path / "all")
    try:
        mine = session_of(made)
        mine.run(None, feeds)
        ref = weakref.ref(mine)
        del mine
        gc.collect()
        assert ref() is None
        session_of(made).run(None, feeds)  # the same model again goes on under the same root
    finally:
        listener.remove()
        session.close()
    run = open_run(str(tmp_path / "all"))
    assert {(c.root, c.step) for c in run.calls} == {("model", 0), ("model", 1)}
    assert other is not None


# ---- what a run holds


@pytest.mark.parametrize(
    "name", ["convolutions", "attention", "recurrent", "control", "accumulating", "dense"]
)
def test_values_inside_are_those_of_the_reference_evaluator(tmp_path, name):
    made, feeds = zoo.MODELS[name]()
    inside = [v for node in made.graph.node for v in node.output if v]
    run, _ = captured(tmp_path, session_of(made, "ORT_DISABLE_ALL"), feeds)
    shown = onnx.ModelProto()
    shown.CopyFrom(made)
    known = {output.name for output in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=v) for v in inside if v not in known)
    names = [output.name for output in shown.graph.output]
    expected = dict(
        zip(names, onnx.reference.ReferenceEvaluator(shown).run(None, feeds), strict=True)
    )
    compared = 0
    for call in operators(run).values():
        node = next(n for n in made.graph.node if scope(n.output[0]) == call.scope)
        assert call.op_type == node.op_type
        assert mark_value(call, Mark.OPSET) == str(zoo.OPSET)
        for place, value in enumerate(node.output):
            if value:
                found = arrays(run, call, "output")[f"output.{place}"]
                np.testing.assert_allclose(found, expected[value], rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared == len(inside)


def scope(value):
    return value.removesuffix("_output_0").removeprefix("/").replace("/", ".")


def test_a_node_says_what_it_takes(tmp_path):
    made, feeds = zoo.recurrent()
    run, _ = captured(tmp_path, session_of(made, "ORT_DISABLE_ALL"), feeds)
    lstm = operators(run)["s"]
    # the fifth input is absent
    assert [r.slot for r in lstm.slots("input")] == ["input.0", "input.5", "input.6"]
    assert mark_values(lstm, Mark.TAKES) == ["w as 1", "r as 2", "b as 3"]
    assert (arrays(run, lstm, "param")["param.r"] == zoo.drawn(1, 32, 8)).all()
    # the runtime states defaults where it saves a graph
    assert lstm.arguments == {
        "hidden_size": 8, "direction": "forward", "input_forget": 0, "layout": 0,
    }  # fmt: skip
    assert [r.slot for r in lstm.slots("output")] == ["output.0", "output.1", "output.2"]


def test_states_are_known_again(tmp_path):
    made, feeds = zoo.recurrent()
    session = session_of(made)
    path = str(tmp_path / "run")
    with whence.capture(session, path):
        states = feeds["h"], feeds["c"]
        for step in range(3):
            given = {"x": zoo.drawn(5, 2, 4, seed=step), "h": states[0], "c": states[1]}
            _, *states = session.run(None, given)
    run = open_run(path)
    roots = sorted((c for c in run.calls if c.scope == ""), key=lambda c: c.step)
    slots = [{r.slot: r for r in call.refs} for call in roots]
    for earlier, later in itertools.pairwise(slots):
        assert later["input.h"].record == earlier["output.h2"].record
        assert later["input.h"].edge == "content"
        assert later["input.c"].record == earlier["output.c2"].record
    # two inputs that hold zeros are two tensors
    assert slots[0]["input.h"].record != slots[0]["input.c"].record


def test_results_are_tensors_of_their_own(tmp_path):
    """A state of zeros makes the result equal to the input; still it is what the node made."""
    made, feeds = zoo.accumulating()
    run, _ = captured(tmp_path, session_of(made), feeds | {"state": np.zeros((4, 8), "f4")})
    (root,) = [c for c in run.calls if c.scope == ""]
    slots = {r.slot: r.record for r in root.refs}
    assert slots["output.next"] != slots["input.x"]


def test_fused_nodes_say_what_they_stand_for(tmp_path):
    made, feeds = zoo.attention()
    run, _ = captured(tmp_path, session_of(made), feeds)
    fused = next(c for c in operators(run).values() if c.op_type.endswith("Gelu"))
    assert fused.origins in (("a", "d", "e", "o", "q", "r"), ("d", "e", "o", "q", "r"))
    assert fused.scope == "r"
    # a product and a sum may have become one, between two changes of shape
    others = {c.origins for c in operators(run).values() if c.scope != "r"}
    assert others <= {(), ("m", "a")}


def test_a_node_says_which_line_wrote_it(tmp_path):
    """Also one that the runtime fused, which has lost what the exporter left."""
    made, feeds = zoo.attention()
    trace = 'File "{}", line {}, in forward\n    x\n'
    for line, node in enumerate(made.graph.node, 1):
        entry = node.metadata_props.add()
        entry.key = "pkg.torch.onnx.stack_trace"
        entry.value = trace.format("model.py", line) + trace.format("a/torch/nn/functional.py", 9)
    made.graph.node[0].ClearField("metadata_props")
    made.graph.node[0].doc_string = "/home/me/model.py(77): forward\n/other.py(1): call"
    run, _ = captured(tmp_path, session_of(made), feeds)
    sources = {name: call.source for name, call in operators(run).items()}
    assert sources["n"] == "/home/me/model.py:77"
    assert sources["r"] == "model.py:8"
    assert sources["y"] == "model.py:9"


def test_blocks_of_channels_are_shown_as_their_shape_says(tmp_path):
    """20 channels fill no whole block; the kernels that use blocks are those of x86 and ARM64."""
    made, feeds = zoo.convolutions()
    plain, _ = captured(tmp_path, session_of(made, "ORT_DISABLE_ALL"), feeds)
    fused, _ = captured(tmp_path, session_of(made), feeds)
    expected, found = operators(plain), operators(fused)
    compared = 0
    for name, call in found.items():
        if name not in expected:
            assert "Reorder" in name
            continue
        (a,), (b,) = (
            arrays(r, c, "output").values() for r, c in ((plain, expected[name]), (fused, call))
        )
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        compared += 1
    assert compared >= 5
    weights = {"a.Relu": "w1", "b.Relu": "w2", "d.Conv": "w3"}
    held = {i.name: onnx.numpy_helper.to_array(i) for i in made.graph.initializer}
    for name, weight in weights.items():
        shown = arrays(fused, found[name], "param")
        assert any(
            w.shape == held[weight].shape and (w == held[weight]).all() for w in shown.values()
        )
    assert found["b.Relu"].origins[-1] == "b.Relu"


def test_weights_are_referred_to_in_the_users_file(tmp_path):
    made, feeds = zoo.dense()
    file = tmp_path / "models" / "dense.onnx"
    file.parent.mkdir()
    onnx.save(made, file)
    run, _ = captured(tmp_path, session_of(str(file)), feeds, feeds)
    weight = {r.record for c in run.calls for r in c.slots("param")}
    assert len(weight) == 1
    record = run.records[weight.pop()]
    assert record.elements.file == str(file)
    assert (run.array(record.id) == zoo.drawn(64, 64)).all()
    facts = settings(run)
    assert facts["model"] == "dense.onnx"
    assert facts["optimization"] == "ORT_ENABLE_ALL"
    assert facts["inputs"] == {"x": "tensor(float) [2, 64]"}
    assert facts["opset"] == {"ai.onnx": zoo.OPSET}
    assert facts["producer"] == "tests 1"
    assert list(facts["providers"]) == CPU


def test_weights_beside_the_model(tmp_path):
    made, feeds = zoo.dense()
    file = tmp_path / "models" / "dense.onnx"
    file.parent.mkdir()
    onnx.save(made, file, save_as_external_data=True, location="dense.bin", size_threshold=0)
    run, _ = captured(tmp_path, session_of(str(file)), feeds)
    (ref,) = operators(run)["m"].slots("param")
    assert Path(run.records[ref.record].elements.file).name == "dense.bin"
    assert (run.array(ref.record) == zoo.drawn(64, 64)).all()
    assert set(settings(run)["external_data"]) == {"dense.bin"}
    assert not list(Path(run.path).glob(".onnx*"))


def test_control_flow_texts_and_sequences_are_told(tmp_path):
    made, feeds = zoo.control()
    run, _ = captured(tmp_path, session_of(made), feeds)
    branch = operators(run)["y"]
    assert mark_value(branch, Mark.HIDDEN) == "If: "
    assert {"input.outer.x", "input.outer.a"} <= {r.slot for r in branch.refs}
    made, feeds = zoo.texts_and_sequences()
    run, _ = captured(tmp_path, session_of(made), feeds)
    (root,) = [c for c in run.calls if c.scope == ""]
    slots = {r.slot: run.records[r.record] for r in root.refs}
    assert slots["input.s"].why == slots["output.t"].why == "it holds texts"
    assert slots["output.q.1"].shape == (2,)


def test_what_draws_random_numbers_is_not_run_beside(tmp_path, capsys):
    made, feeds = zoo.drawing()
    run, _ = captured(tmp_path, session_of(made), feeds)
    assert len(run.calls) == 1
    (text,) = notes(run, "inside-not-seen")
    assert "RandomNormalLike draws random numbers" in text
    assert text in capsys.readouterr().err


def test_a_selection_shows_only_what_it_names(tmp_path):
    made, feeds = zoo.attention()
    run, _ = captured(tmp_path, session_of(made), feeds, feeds, include=["n"], steps="1:")
    taken = {(c.scope, c.step) for c in run.calls if c.refs}
    assert taken == {("n", 1)}


def test_what_is_made_of_constants_is_a_parameter(tmp_path):
    """As where the runtime folded it: two optimisation levels then hold the same."""
    made, feeds = zoo.dense()
    made.graph.node[0].input[1] = "turned"
    made.graph.node.insert(0, onnx.helper.make_node("Transpose", ["w"], ["turned"]))
    runs = {
        level: captured(tmp_path, session_of(made, level), feeds)[0]
        for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")
    }
    for run in runs.values():
        assert set(operators(run)) == {"m", "y"}
        (weight,) = arrays(run, operators(run)["m"], "param").values()
        assert (weight == zoo.drawn(64, 64).T).all()
    (note,) = notes(runs["ORT_DISABLE_ALL"], "constants")
    assert note.startswith("1 node")
    result = whence.compare(*(run.path for run in runs.values()))
    assert result.status == "same"


# ---- other ways to run a session


def test_bound_values(tmp_path):
    made, feeds = zoo.accumulating()
    session, path = session_of(made), str(tmp_path / "run")
    state = ort.OrtValue.ortvalue_from_numpy(np.zeros((4, 8), "f4"))
    buffer = np.ascontiguousarray(feeds["x"] * 2)
    total = np.zeros((4, 8), "f4")
    with whence.capture(session, path):
        binding = session.io_binding()
        binding.bind_ortvalue_input("state", state)
        binding.bind_ortvalue_output("next", state)  # it is written where it is read
        binding.bind_output("y")
        for bind in (
            lambda: binding.bind_cpu_input("x", feeds["x"]),
            lambda: binding.bind_input("x", "cpu", 0, np.float32, (4, 8), buffer.ctypes.data),
        ):
            bind()
            session.run_with_iobinding(binding)
    total = feeds["x"] + buffer
    assert (state.numpy() == total).all()
    run = open_run(path)
    roots = sorted((c for c in run.calls if c.scope == ""), key=lambda c: c.step)
    assert (arrays(run, roots[0], "input")["input.state"] == 0).all()
    assert (arrays(run, roots[1], "input")["input.state"] == feeds["x"]).all()
    assert (arrays(run, roots[1], "input")["input.x"] == buffer).all()
    assert (arrays(run, roots[1], "output")["output.next"] == total).all()
    assert notes(run, "observer") == [
        "observer effect: none: the results are bit-equal to those of the session alone"
    ]


def test_a_binding_of_before_is_read_too(tmp_path):
    made, feeds = zoo.accumulating()
    session, path = session_of(made), str(tmp_path / "run")
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("next")
    with whence.capture(session, path, level="io"):
        session.run_with_iobinding(binding)
    (root,) = open_run(path).calls
    run = open_run(path)
    assert (arrays(run, root, "input")["input.x"] == feeds["x"]).all()


def test_values_of_the_runtime(tmp_path):
    made, feeds = zoo.dense()
    session, path = session_of(made), str(tmp_path / "run")
    given = ort.OrtValue.ortvalue_from_numpy(feeds["x"])
    with whence.capture(session, path):
        (once,) = session.run_with_ort_values(None, {"x": given})
        session.run_with_ort_values(["y"], {"x": once})
        names = ["x"], ["y"]
        fetched = ort.capi._pybind_state.OrtValueVector()
        session.run_with_ortvaluevector(
            ort.RunOptions(), names[0], vector([given]), names[1], fetched, [cpu_device()]
        )
    run = open_run(path)
    roots = sorted((c for c in run.calls if c.scope == ""), key=lambda c: c.step)
    assert len(roots) == 3
    assert roots[1].slots("input")[0].record == roots[0].slots("output")[0].record
    assert (arrays(run, roots[2], "output")["output.y"] == once.numpy()).all()


def vector(values):
    out = ort.capi._pybind_state.OrtValueVector()
    for value in values:
        out.push_back(value._ortvalue)
    return out


def cpu_device():
    return ort.OrtDevice.make("cpu", 0)._get_c_device()


def test_a_run_that_ends_later(tmp_path):
    made, feeds = zoo.dense()
    chosen = options()
    chosen.intra_op_num_threads = 2
    session = ort.InferenceSession(made.SerializeToString(), chosen, providers=CPU)
    expected = session.run(None, feeds)
    path, ended, results = str(tmp_path / "run"), threading.Event(), []

    def callback(values, data, error):
        results.append((values, data, error))
        ended.set()

    with whence.capture(session, path):
        session.run_async(None, feeds, callback, "mine")
        assert ended.wait(60)
        while not open_or_none(path):
            pass
    assert alike(results[0][0][0], expected[0])
    assert results[0][1:] == ("mine", "")
    run = open_run(path)
    assert (
        arrays(run, next(c for c in run.calls if c.scope == ""), "output")["output.y"]
        == expected[0]
    ).all()


def open_or_none(path):
    with contextlib.suppress(whence.errors.WhenceError):
        return [c for c in open_run(path).calls if c.scope == ""]
    return None


def test_an_error_of_the_program_is_recorded_and_raised(tmp_path):
    made, feeds = zoo.dense()
    session, path = session_of(made), str(tmp_path / "run")
    with whence.capture(session, path):
        with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument):
            session.run(None, {"x": zoo.drawn(3, 3)})
        with pytest.raises(ValueError, match="Required inputs"):
            session.run(None, {})
        session.run(None, feeds)
    calls = [c for c in open_run(path).calls if c.scope == ""]
    assert [bool(c.error) for c in sorted(calls, key=lambda c: c.step)] == [True, True, False]


# ---- the observer effect


class Disturbed:
    """A session beside, of which each of these added outputs changes the results."""

    def __init__(self, native, harmful, model):
        self.native, self.harmful, self.model = native, harmful, model

    def run_with_ort_values(self, feeds, names, run_options):
        out = list(self.native.run_with_ort_values(feeds, names, run_options))
        if self.harmful & set(names):
            changed = out[0].numpy() + np.float32(0.5)
            out[0] = ort.OrtValue.ortvalue_from_numpy(changed)
        return out


@pytest.mark.parametrize("harmful", [{"e"}, {"n", "o"}, {"n", "m", "a", "d", "e", "o", "q", "r"}])
def test_outputs_that_change_the_results_are_left_out(tmp_path, monkeypatch, harmful):
    made, feeds = zoo.attention()
    plain = native_sessions.observing
    monkeypatch.setattr(
        native_sessions, "observing", lambda s, g: Disturbed(plain(s, g), harmful, g)
    )
    run, results = captured(tmp_path, session_of(made, "ORT_DISABLE_ALL"), feeds, feeds)
    assert alike(results[0][0], session_of(made, "ORT_DISABLE_ALL").run(None, feeds)[0])
    shown = {c.scope for c in operators(run).values() if c.slots("output")}
    assert shown == {"n", "m", "a", "d", "e", "o", "q", "r", "y"} - harmful
    (effect,) = notes(run, "observer")
    assert "adding all outputs changes the results in 192 elements, at most by 0.5" in effect
    (unseen,) = notes(run, "inside-not-seen")
    assert set(unseen.removeprefix("not shown: ").split(", ")) == harmful


def test_a_saved_graph_that_computes_something_else_is_told(tmp_path, monkeypatch):
    made, feeds = zoo.attention()
    plain = native_sessions.observing
    monkeypatch.setattr(native_sessions, "observing", lambda s, g: Disturbed(plain(s, g), {"y"}, g))
    run, _ = captured(tmp_path, session_of(made), feeds, feeds)
    first, later = notes(run, "observer")
    assert "the optimised graph as ONNX Runtime saves it computes something else" in first
    assert "the results of 1 further step differ" in later


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_the_largest_neutral_set_is_found(count):
    values = [f"v{i}" for i in range(count)]
    harmful = set(values[:: max(3, count // 3)])
    asked = []

    def is_neutral(some):
        asked.append(some)
        return not harmful & set(some)

    assert neutral_values(values, is_neutral, 1000) == [v for v in values if v not in harmful]
    few = neutral_values(values, lambda some: not harmful & set(some), 3)
    assert not harmful & set(few)


def test_values_that_fail_together_are_left_out_and_the_rest_is_shown():
    """As where a node in blocks of channels cannot be brought into plain order."""
    result = of_array(np.ones(3, np.float32))

    class Shows(Observer):
        WORDS = Words("the session alone", "another graph")

        def make(self, values):
            return list(values)

        def run(self, model, step, values):
            if "broken" in values:
                raise RuntimeError("ReorderOutput: channels")
            return {name: [(name, result)] for name in ("y", *values)}

        def recorded(self):
            pass

    shown, effect = Shows(["a", "broken", "b"]).results(None, {"y": result})
    assert list(shown) == ["y", "a", "b"]
    assert effect is not None and effect.unseen == ("broken",)
    assert "fails (RuntimeError: ReorderOutput: channels); 2 values can be shown" in effect.text


# ---- failures, levels, whole programs


def test_a_failure_of_ours_ends_the_capture_only(tmp_path, monkeypatch, capsys):
    made, feeds = zoo.dense()
    expected = session_of(made).run(None, feeds)

    def fail(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr(insides.SessionObserver, "results", fail)
    run, results = captured(tmp_path, session_of(made), feeds, feeds)
    assert alike(results[1][0], expected[0])
    assert len([c for c in run.calls if c.scope == ""]) == 2
    assert "cannot be run: KeyError: 'ours'" in capsys.readouterr().err
    monkeypatch.setattr("whence.instrument.onnxruntime.watched.seen_values", fail)
    path = str(tmp_path / "failed")
    session = session_of(made)
    with whence.capture(session, path):
        assert alike(session.run(None, feeds)[0], expected[0])
    assert (
        "capture stopped, the program goes on: whence failed: KeyError" in capsys.readouterr().err
    )


def test_a_graph_that_cannot_be_saved_leaves_inputs_and_outputs(tmp_path, monkeypatch, capsys):
    made, feeds = zoo.dense()

    def fail(*_):
        raise RuntimeError("compiled nodes")

    monkeypatch.setattr(native_sessions, "save_optimized", fail)
    run, _ = captured(tmp_path, session_of(made), feeds)
    assert [c.op_type for c in run.calls] == ["InferenceSession"]
    assert "only inputs and outputs are recorded" in capsys.readouterr().err
    assert not list(Path(run.path).glob(".onnx*"))


def test_levels(tmp_path):
    made, feeds = zoo.dense()
    for level, inside in (("io", 0), ("logits", 0), ("op", 2), ("modules", 2)):
        run, _ = captured(tmp_path, session_of(made), feeds, level=level)
        assert len(run.calls) == 1 + inside
    with pytest.raises(UsageError, match="only listened to: leave inject out"):
        captured(tmp_path, session_of(made), feeds, inject="scale@m")
    with pytest.raises(UsageError, match="include chooses calls inside a model"):
        captured(tmp_path, session_of(made), feeds, level="io", include="m")
    assert owner_of(session_of(made)) == "onnxruntime"


def test_a_torch_model_has_no_level_io(tmp_path):
    torch = pytest.importorskip("torch")
    with (
        pytest.raises(
            UsageError, match="level io is for programs of onnxruntime and openvino, not of torch"
        ),
        whence.capture(torch.nn.Linear(2, 2), str(tmp_path / "run"), level="io"),
    ):
        pass


def everything(path):
    """A listener for every session of this process."""
    from whence import store
    from whence.instrument.options import make
    from whence.workflows.capture import setup

    chosen = make()
    store.create(str(path), setup.process_info(chosen))
    session = setup.open_session(str(path), chosen, None)
    listener = setup.listener_of("onnxruntime", session, None, str(path))
    listener.install()
    return listener, session


def test_a_forked_child_leaves_the_files_of_its_parent_alone(tmp_path):
    made, feeds = zoo.dense()
    listener, session = everything(tmp_path / "run")
    mine = session_of(made)
    mine.run(None, feeds)
    listener.abandon()
    assert session.failed == "forked"
    mine.run(None, feeds)
    assert not vars(collection.Session)["run"].__dict__.get("__wrapped__")


def test_a_program_under_whence_run(tmp_path):
    """Two sessions, a change of folder, an error that ends it."""
    for name in ("dense", "accumulating"):
        made, _ = zoo.MODELS[name]()
        onnx.save(made, tmp_path / f"{name}.onnx")
    (tmp_path / "other").mkdir()
    program = tmp_path / "serve.py"
    program.write_text(
        textwrap.dedent(
            """
            import os
            import numpy as np
            from onnxruntime import InferenceSession
            first = InferenceSession("dense.onnx", providers=["CPUExecutionProvider"])
            second = InferenceSession("accumulating.onnx", providers=["CPUExecutionProvider"])
            os.chdir("other")
            for step in range(2):
                y = first.run(["y"], {"x": np.full((2, 64), step, "f4")})[0]
                state = np.ascontiguousarray(y[:, :16].reshape(4, 8))
                second.run(None, {"x": np.ones((4, 8), "f4"), "state": state})
            raise SystemExit(7)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "whence", "run", "-o", "run", "--", sys.executable, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 7, done.stderr
    assert "captured 4 steps, 12 calls" in done.stderr
    run = open_run(str(tmp_path / "run"))
    assert {(c.root, c.step) for c in run.calls} == {
        ("model", 0), ("model", 1), ("model#1", 0), ("model#1", 1),
    }  # fmt: skip
    weight = next(run.records[r.record] for c in run.calls for r in c.slots("param"))
    assert weight.elements.file == str(tmp_path / "dense.onnx")
    assert run.info.versions["onnxruntime"] == ort.__version__


# ---- compared


def named(tmp_path, reference, target, feeds, levels=("ORT_ENABLE_ALL", "ORT_ENABLE_ALL")):
    runs = [
        captured(tmp_path, session_of(made, level), feeds)[0].path
        for made, level in zip((reference, target), levels, strict=True)
    ]
    return whence.compare(*runs)


@pytest.mark.parametrize("name", ["convolutions", "attention"])
def test_two_optimisation_levels_differ_by_rounding(tmp_path, name):
    made, feeds = zoo.MODELS[name]()
    result = named(tmp_path, made, made, feeds, ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"))
    assert not result.findings
    assert any(
        "optimization ORT_DISABLE_ALL against ORT_ENABLE_ALL" in e for e in result.environment
    )


def test_an_attribute_that_differs_is_named(tmp_path):
    made, feeds = zoo.attention()
    other = onnx.ModelProto()
    other.CopyFrom(made)
    norm = next(n for n in other.graph.node if n.op_type == "LayerNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 0.1
    result = named(tmp_path, made, other, feeds)
    assert result.findings[0].name == "n"
    assert "epsilon" in result.findings[0].sentence


def test_an_element_of_a_blocked_weight_that_differs_is_named(tmp_path):
    made, feeds = zoo.convolutions()
    other = onnx.ModelProto()
    other.CopyFrom(made)
    weight = next(i for i in other.graph.initializer if i.name == "w2")
    changed = onnx.numpy_helper.to_array(weight).copy()
    changed[7, 3, 1, 1] += 1
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, "w2"))
    result = named(tmp_path, made, other, feeds)
    assert result.findings[0].name == "b.Relu"
    assert "[7, 3, 1, 1]" in result.findings[0].sentence


def test_blocks_before_a_convolution_whose_weight_is_a_constant_are_shown(tmp_path):
    """As Paddle exports weights; a sum between the blocks hides how many channels they have."""
    weights = [zoo.drawn(16, 3, 3, 3), zoo.drawn(32, 16, 1, 1)]
    nodes = [
        *(onnx.helper.make_node("Constant", [], [f"w{k}"], value=zoo.constant(w, f"w{k}"))
          for k, w in enumerate(weights)),
        onnx.helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4),
        onnx.helper.make_node("Mul", ["factor", "a"], ["m"]),
        onnx.helper.make_node("Conv", ["m", "w1"], ["b"]),
        onnx.helper.make_node("Erf", ["b"], ["y"]),
    ]  # fmt: skip
    made = zoo.model(
        nodes,
        [zoo.value("x", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [zoo.value("y", onnx.TensorProto.FLOAT, None)],
        [zoo.constant(np.float32([1.5]), "factor")],
    )
    feeds = {"x": zoo.drawn(1, 3, 8, 8)}
    fused, _ = captured(tmp_path, session_of(made), feeds)
    assert not any("nothing says how many channels" in note.text for note in fused.notes)
    result = named(tmp_path, made, made, feeds, ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"))
    assert result.status == "same"
    assert result.coverage.replayed == result.coverage.calls


def test_a_node_that_runs_in_float32_for_float16_has_the_users_name(tmp_path):
    half = [zoo.constant(zoo.drawn(*s).astype("f2"), f"w{k}") for k, s in enumerate([(8, 8)] * 2)]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w0"], ["a"]),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("MatMul", ["b", "w1"], ["y"]),
    ]
    made = zoo.model(
        nodes,
        [zoo.value("x", onnx.TensorProto.FLOAT16, [4, 8])],
        [zoo.value("y", onnx.TensorProto.FLOAT16, [4, 8])],
        half,
    )
    run, _ = captured(tmp_path, session_of(made), {"x": zoo.drawn(4, 8).astype("f2")})
    assert {"a", "b"} <= set(operators(run))


def test_a_logistic_function_near_zero_rounds_as_kernels_do(tmp_path):
    """The runtime's is a rounding of 1 off, however small the result is: single elements of a row
    that is 0 elsewhere. A scale of a ten-thousandth is none.
    """
    x = -15.5 - zoo.drawn(40, 96).astype("f4") ** 2 * 2000
    nodes = [onnx.helper.make_node("Sigmoid", ["x"], ["y"])]
    extents = [zoo.value(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    _, (results,) = captured(
        tmp_path, session_of(zoo.model(nodes, extents[:1], extents[1:])), {"x": x}
    )
    wide = 1 / (1 + np.exp(-x.astype("f8")))
    (written,) = stepwise.sigmoid({"self": torch.from_numpy(x)})
    assert judge.local(results[0], wide, wide.astype("f4")).score > 1
    assert judge.local(results[0], wide, written.numpy(), written_out=True).score <= 1
    (written,) = stepwise.sigmoid({"self": torch.from_numpy(x + 17)})
    wide = 1 / (1 + np.exp(-x.astype("f8") - 17))
    wrong = (wide * 1.0001).astype("f4")
    assert judge.local(wrong, wide, written.numpy(), written_out=True).score > 1
