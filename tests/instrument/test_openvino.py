"""Models of OpenVINO captured in code and under `whence run`. Oracles: the model alone, ONNX Runtime
on the same file, numpy.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import whence
from whence.errors import UsageError
from whence.instrument.framework import owner_of
from whence.instrument.openvino import models
from whence.instrument.openvino.models import names_in
from whence.records.marks import Mark, mark_value
from whence.store import open_run
from whence.workflows.capture import setup

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ov = pytest.importorskip("openvino")
zoo = importlib.import_module("onnx_models")

READABLE = tuple(name for name in zoo.MODELS if name != "texts_and_sequences")
# Where the processor multiplies in bfloat16, OpenVINO does unless told otherwise.
STEADY = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
CORE = ov.Core()


@pytest.fixture
def place(tmp_path):
    return tmp_path


def saved(place, name):
    """(file of a model, its inputs)."""
    made, feeds = zoo.MODELS[name]()
    path = place / f"{name}.onnx"
    onnx.save(made, path)
    return str(path), feeds


def compiled(path, config=None):
    return CORE.compile_model(path, "CPU", STEADY | (config or {}))


def everything(folder, **how):
    """Listens to all of OpenVINO, as under `whence run`. (listener, session)."""
    from whence import store
    from whence.instrument.options import make

    chosen = make(**how)
    store.create(str(folder), setup.process_info(chosen))
    session = setup.open_session(str(folder), chosen, None)
    listener = setup.listener_of("openvino", session, None, str(folder))
    listener.install()
    return listener, session


class Captured:
    """A block in which all of OpenVINO is listened to; the run behind it."""

    def __init__(self, folder, **how):
        self.folder, self.how = str(folder), how

    def __enter__(self):
        self.listener, self.session = everything(self.folder, **self.how)
        return self

    def __exit__(self, *error):
        self.listener.remove()
        self.session.close()

    @property
    def run(self):
        return open_run(self.folder)


def notes(run, kind):
    return [note.text for note in run.notes if note.kind == kind]


def operators(run, step=0):
    return {c.scope: c for c in run.calls if c.kind == "operator" and c.step == step}


def roots(run):
    return sorted((c for c in run.calls if c.parent == -1), key=lambda c: c.order)


def array(run, call, slot):
    return run.array(next(r.record for r in call.refs if r.slot == slot))


def values(results):
    return [np.array(results[k]) for k in range(len(results))]


def alike(a, b):
    """Equal bit for bit."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a, b)
    )


# ---- the program is not changed


@pytest.mark.parametrize("level", ["io", "modules"])
@pytest.mark.parametrize("name", READABLE)
def test_results_are_those_of_the_model_alone(place, name, level):
    path, feeds = saved(place, name)
    before = {k: v.copy() for k, v in feeds.items()}
    alone = values(compiled(path)(feeds))
    with Captured(place / "run", level=level) as captured:
        model = compiled(path)
        results = [values(model(feeds)) for _ in range(2)]
    run = captured.run
    assert all(alike(alone, result) for result in results)
    assert all((before[k] == feeds[k]).all() for k in feeds)
    assert len(roots(run)) == 2
    assert not notes(run, "error")
    if level == "modules":
        (effect,) = notes(run, "observer")
        assert effect == (
            "observer effect: none: the results are bit-equal to those of the model alone"
        )
        assert operators(run)
    else:
        assert not operators(run)


def test_methods_are_put_back(place):
    kinds = (ov.Core, ov.InferRequest, ov.AsyncInferQueue, *ov.InferRequest.__mro__)
    before = [dict(vars(kind)) for kind in kinds]
    with Captured(place / "run"):
        assert "__wrapped__" in vars(vars(ov.Core)["compile_model"])
    assert [dict(vars(kind)) for kind in kinds] == before


def test_an_error_of_the_program_is_recorded_and_raised(place):
    path, feeds = saved(place, "dense")
    with Captured(place / "run") as captured:
        model = compiled(path)
        with pytest.raises(RuntimeError):
            model({"x": np.ones((2, 3), "f4")})
        model(feeds)
    first, second = roots(captured.run)
    assert first.error.startswith("RuntimeError")
    assert not second.error


def test_a_failure_of_ours_ends_the_capture_only(place, monkeypatch, capsys):
    path, feeds = saved(place, "dense")

    def fail(*_):
        raise ValueError("planted")

    monkeypatch.setattr("whence.instrument.openvino.models.of_tensor", fail)
    alone = values(compiled(path)(feeds))
    with Captured(place / "run"):
        assert alike(alone, values(compiled(path)(feeds)))
    assert "capture stopped, the program goes on: whence failed: ValueError: planted" in (
        capsys.readouterr().err
    )


def test_a_model_that_is_gone_is_let_go(place):
    path, feeds = saved(place, "dense")
    with Captured(place / "run") as captured:
        for _ in range(3):
            model = compiled(path)
            request = model.create_infer_request()
            del model
            request.infer(feeds)
            del request
            gc.collect()
            assert not captured.listener._registry._watched
    assert {c.root for c in captured.run.calls} == {"model"}
    assert [c.step for c in roots(captured.run)] == [0, 1, 2]


# ---- what is recorded


@pytest.mark.parametrize("name", ["convolutions", "attention", "dense"])
def test_values_inside_are_those_of_onnx_runtime(place, name):
    path, feeds = saved(place, name)
    made = onnx.load(path)
    inner = [v for node in made.graph.node for v in node.output]
    for value in inner:
        if value not in {o.name for o in made.graph.output}:
            made.graph.output.append(onnx.ValueInfoProto(name=value))
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds)))
    with Captured(place / "run") as captured:
        compiled(path)(feeds)
    seen = 0
    for scope, call in operators(captured.run).items():
        names = [
            v for v in inner if scope in (v, v[1:].replace("/", ".").rpartition("_output_")[0])
        ]
        for value in names:
            found = array(captured.run, call, "output.0")
            np.testing.assert_allclose(found, expected[value], rtol=1e-4, atol=1e-5)
            seen += 1
    assert seen == len(operators(captured.run)) >= 1


def test_a_node_says_what_it_stands_for_and_how_it_ran(place):
    path, feeds = saved(place, "attention")
    with Captured(place / "run") as captured:
        compiled(path)(feeds)
    run = captured.run
    node = operators(run)["r"]
    assert node.origins == ("m", "a", "d", "e", "o", "q", "r")  # one product, with its GELU
    assert mark_value(node, Mark.EXECUTED_IN) == "float32"
    assert {"param.w", "param.c"} <= {r.slot for r in node.slots("param")}
    np.testing.assert_array_equal(
        array(run, node, "param.w"),
        next(
            onnx.numpy_helper.to_array(t)
            for t in onnx.load(path).graph.initializer
            if t.name == "w"
        ),
    )
    # the norm is one call, though the frontend makes three nodes of it
    norm = operators(run)["n"]
    assert norm.op_type == "MVN+Multiply+Add"
    assert norm.origins == ()
    assert norm.arguments["MVN.eps"] == pytest.approx(1e-5)


def test_a_node_inside_that_a_frontend_put_in_says_how_the_whole_rounded(place):
    path, feeds = saved(place, "recurrent")
    with Captured(place / "run"):
        model = compiled(CORE.read_model(path), {"INFERENCE_PRECISION_HINT": "bf16"})
        model(feeds)
    kinds = {
        str(op.get_rt_info()["layerType"].astype(str)): str(
            op.get_rt_info()["runtimePrecision"].astype(str)
        )
        for op in model.get_runtime_model().get_ops()
    }
    executed = "bfloat16" if "bf16" in (kinds.get("RNNSeq"), kinds.get("RNNCell")) else "float32"
    marks = [mark_value(c, Mark.EXECUTED_IN) for c in open_run(str(place / "run")).calls]
    assert executed in marks


def test_settings(place):
    path, feeds = saved(place, "dense")
    with Captured(place / "run") as captured:
        compiled(path, {"PERFORMANCE_HINT": "LATENCY"})(feeds)
    (text,) = notes(captured.run, "settings")
    facts = json.loads(text)
    assert facts["openvino"] == ov.__version__
    assert facts["model"] == "dense.onnx"
    assert facts["model_bytes"] == Path(path).stat().st_size
    assert len(facts["model_hash"]) == 32
    assert facts["device"] == "CPU"
    assert facts["config"] == {
        "INFERENCE_NUM_THREADS": "1",
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    assert facts["properties"]["INFERENCE_PRECISION_HINT"] == "f32"
    assert list(facts["inputs"]) == ["x"]
    assert list(facts["outputs"]) == ["y"]


def test_files_beside_the_model_are_hashed(place):
    path, feeds = saved(place, "dense")
    ov.save_model(CORE.read_model(path), str(place / "ir.xml"))
    with Captured(place / "run", level="io") as captured:
        compiled(str(place / "ir.xml"))(feeds)
    facts = json.loads(notes(captured.run, "settings")[0])
    assert facts["model"] == "ir.xml"
    assert list(facts["external_data"]) == ["ir.bin"]


def test_a_model_that_was_read_first_keeps_its_file(place):
    path, feeds = saved(place, "dense")
    with Captured(place / "run", level="io") as captured:
        model = CORE.read_model(path)
        ov.compile_model(model, "CPU")(feeds)
        CORE.compile_model(CORE.read_model(Path(path).read_bytes()), "CPU")(feeds)
    first, second = (json.loads(text) for text in notes(captured.run, "settings"))
    assert first["model"] == "dense.onnx"
    assert second["model"] == "(bytes)"
    assert first["model_hash"] == second["model_hash"]
    assert {c.root for c in captured.run.calls} == {"model", "model#1"}


def test_states_are_recorded_and_the_model_beside_has_them(place):
    from openvino import opset13 as ops

    data = ops.parameter([1, 4], np.float32, name="x")
    data.get_output_tensor(0).set_names({"x"})
    info = ov.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = (
        ov.PartialShape([1, 4]), ov.Type.f32, "total",
    )  # fmt: skip
    variable = ov.op.util.Variable(info)
    before = ops.read_value(ops.constant(np.zeros((1, 4), np.float32)), variable)
    total = ops.add(before, data)
    out = ops.multiply(total, ops.constant(np.float32(2)))
    out.get_output_tensor(0).set_names({"y"})
    model = ov.Model([ops.result(out)], [ops.assign(total, variable)], [data], "accumulates")
    feeds = [np.full((1, 4), k + 1, np.float32) for k in range(4)]

    def run(requests):
        results = []
        for k, x in enumerate(feeds):
            if k == 2:
                requests.reset_state()
            results.append(requests.infer({"x": x})["y"].copy())
        return results

    alone = run(CORE.compile_model(model, "CPU").create_infer_request())
    with whence.capture(model, str(place / "run")):
        request = CORE.compile_model(model, "CPU").create_infer_request()
        results = run(request)
    assert alike(alone, results)
    captured = open_run(str(place / "run"))
    assert [note for note in notes(captured, "observer") if "none" not in note] == []
    assert json.loads(notes(captured, "settings")[0])["variables"] == ["total"]
    steps = roots(captured)
    before = [array(captured, c, "input.state.total")[0, 0] for c in steps]
    after = [array(captured, c, "output.state.total")[0, 0] for c in steps]
    assert (before, after) == ([0, 1, 0, 3], [1, 3, 3, 7])


def test_control_flow_is_told(place):
    path, feeds = saved(place, "control")
    with Captured(place / "run") as captured:
        compiled(path)(feeds)
    found = operators(captured.run)
    assert "If: inside not seen" in found["y"].notes
    assert "Loop: inside not seen" in found["z"].notes


def test_several_outputs_of_one_node_are_of_one_operator_of_the_file(place):
    path, feeds = saved(place, "recurrent")
    with Captured(place / "run") as captured:
        compiled(path)(feeds)
    owners = {name: c.origins or (name,) for name, c in operators(captured.run).items()}
    assert owners["c2"] == owners["h2"] == ("s",)


def test_a_selection_shows_only_what_it_names(place):
    path, feeds = saved(place, "attention")
    with Captured(place / "run", include=("n",)) as captured:
        compiled(path)(feeds)
    shown = {c.scope for c in operators(captured.run).values() if c.refs}
    assert shown == {"n"}


def test_models_compiled_before_the_capture_show_their_ends(place, capsys):
    path, feeds = saved(place, "dense")
    model = compiled(path)
    with whence.capture(model, str(place / "run")):
        model(feeds)
        compiled(path)(feeds)  # another one
    run = open_run(str(place / "run"))
    assert len(run.calls) == 1
    assert "it was compiled before the capture began" in notes(run, "inside-not-seen")[0]
    assert "capture the program with `whence run`" in capsys.readouterr().err


# ---- requests and queues


def test_requests_that_end_later(place):
    path, _ = saved(place, "dense")
    feeds = [{"x": np.full((2, 64), k, np.float32)} for k in range(3)]
    alone = [values(compiled(path)(given)) for given in feeds]
    called = []
    with Captured(place / "run") as captured:
        model = compiled(path)
        waited = model.create_infer_request()
        waited.start_async(feeds[0])
        waited.wait()
        polled = model.create_infer_request()
        polled.start_async(feeds[1])
        while not polled.wait_for(10):
            pass
        answering = model.create_infer_request()
        answering.set_callback(called.append, "data")
        answering.start_async(feeds[2])
        answering.wait()
    assert called == ["data"]
    run = captured.run
    for call, given, expected in zip(roots(run), feeds, alone, strict=True):
        np.testing.assert_array_equal(array(run, call, "input.x"), given["x"])
        np.testing.assert_array_equal(array(run, call, "output.y"), expected[0])


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_queue(place, has_callback):
    path, _ = saved(place, "dense")
    feeds = [{"x": np.full((2, 64), k, np.float32)} for k in range(5)]
    alone = [values(compiled(path)(given))[0] for given in feeds]
    got = {}
    with Captured(place / "run") as captured:
        queue = ov.AsyncInferQueue(compiled(path), 2)
        if has_callback:
            queue.set_callback(
                lambda request, k: got.update({k: request.get_output_tensor().data.copy()})
            )
        for k, given in enumerate(feeds):
            queue.start_async(given, k)
        queue.wait_all()
    run = captured.run
    assert len(roots(run)) == 5
    for call in roots(run):
        k = int(array(run, call, "input.x")[0, 0])
        np.testing.assert_array_equal(array(run, call, "output.y"), alone[k])
    if has_callback:
        assert alike([got[k] for k in range(5)], alone)


def test_tensors_that_the_program_set(place):
    path, _ = saved(place, "dense")
    given = np.full((2, 64), 3, np.float32)
    with Captured(place / "run") as captured:
        request = compiled(path).create_infer_request()
        request.set_tensor("x", ov.Tensor(given))
        request.infer()
    (call,) = roots(captured.run)
    np.testing.assert_array_equal(array(captured.run, call, "input.x"), given)


# ---- the observer effect


def test_outputs_that_change_the_results_are_left_out(place, monkeypatch):
    """A model that is disturbed where the value n is shown."""
    path, feeds = saved(place, "attention")
    plain = models.ModelObserver.run

    def disturbed(self, request, given, shown):
        out = plain(self, request, given, shown)
        if "n" in shown:
            seen = out["y"][0][1]
            seen.array()[...] += np.float32(0.5)
        return out

    monkeypatch.setattr(models.ModelObserver, "run", disturbed)
    alone = values(compiled(path)(feeds))
    with Captured(place / "run") as captured:
        assert alike(alone, values(compiled(path)(feeds)))
    shown = {s for s, c in operators(captured.run).items() if c.slots("output")}
    assert shown == {"r", "y"}
    (effect,) = notes(captured.run, "observer")
    assert "adding all outputs changes the results in 192 elements, at most by 0.5" in effect
    assert notes(captured.run, "inside-not-seen") == ["not shown: n"]


def test_names_of_a_runtime_model_may_hold_commas():
    known = {"a", "b,c", "b", "d"}
    assert names_in("a,b,c,x,d", known) == ("a", "b,c", "d")
    assert names_in("", known) == ()


# ---- whole programs


def test_levels_and_options(place):
    path, _ = saved(place, "dense")
    assert owner_of(compiled(path)) == owner_of(CORE.read_model(path)) == "openvino"
    with (
        pytest.raises(UsageError, match="inject plants faults in a torch model"),
        whence.capture(compiled(path), str(place / "run"), inject="scale@x=2"),
    ):
        pass


def test_a_forked_child_leaves_the_files_of_its_parent_alone(place):
    path, feeds = saved(place, "dense")
    listener, session = everything(place / "run")
    model = compiled(path)
    model(feeds)
    listener.abandon()
    assert session.failed == "forked"
    model(feeds)
    assert "__wrapped__" not in vars(vars(ov.InferRequest)["infer"])


def test_a_program_under_whence_run(place):
    saved(place, "dense")
    program = place / "serve.py"
    program.write_text(
        textwrap.dedent(
            """
            import numpy as np
            import openvino
            model = openvino.compile_model("dense.onnx", "CPU")
            for step in range(2):
                model({"x": np.full((2, 64), step, "f4")})
            raise SystemExit(7)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "whence", "run", "-o", "run", "--", sys.executable, str(program)],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 7, done.stderr
    assert "captured 2 steps, 4 calls" in done.stderr
    run = open_run(str(place / "run"))
    assert {(c.root, c.step) for c in run.calls} == {("model", 0), ("model", 1)}
    assert run.info.versions["openvino"]


# ---- compared


def of_onnx_runtime(place, path, feeds):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with whence.capture(session, str(place / "ort")):
        session.run(None, feeds)
    return str(place / "ort")


def of_openvino(place, path, feeds, name="ov", **how):
    with Captured(place / name, **how):
        compiled(path)(feeds)
    return str(place / name)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["convolutions", "attention", "recurrent", "dense"])
def test_onnx_runtime_against_openvino_is_the_same(place, name):
    path, feeds = saved(place, name)
    result = whence.compare(of_onnx_runtime(place, path, feeds), of_openvino(place, path, feeds))
    assert result.status == "same"
    assert result.coverage.replayed >= 0.95 * result.coverage.paired
    assert result.unmatched == 0


def wrong(path, place, change):
    made = onnx.load(path)
    change(made.graph)
    del made.graph.value_info[:]
    onnx.save(made, place / "wrong.onnx")
    return str(place / "wrong.onnx")


def _epsilon(graph):
    node = next(n for n in graph.node if n.op_type == "LayerNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-2


def _activation(graph):
    next(n for n in graph.node if n.op_type == "Erf").op_type = "Tanh"


def _element(graph):
    tensor = next(t for t in graph.initializer if t.name == "w")
    changed = onnx.numpy_helper.to_array(tensor).copy()
    changed[1, 2] += 0.25
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, "w"))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("change", "member"), [(_epsilon, "n"), (_activation, "e"), (_element, "m")]
)
def test_a_wrong_node_is_named(place, change, member):
    path, feeds = saved(place, "attention")
    bad = wrong(path, place, change)
    result = whence.compare(of_onnx_runtime(place, path, feeds), of_openvino(place, bad, feeds))
    assert result.status == "different"
    first = result.findings[0]
    named = open_run(str(place / "ov"))
    suspects = {s: c.origins or (s,) for s, c in operators(named).items()}
    target = result.plan.pairs[first.pair].target
    assert member in first.name.split("+") or any(
        member in origins for s, origins in suspects.items() if s in first.name.split("+")
    )
    assert target >= 0
    assert len({f.pair for f in result.findings}) == 1


@pytest.mark.torch
def test_of_inputs_and_outputs_alone_nothing_is_localised(place):
    path, feeds = saved(place, "attention")
    bad = wrong(path, place, _element)
    runs = [of_openvino(place, p, feeds, name, level="io") for p, name in ((path, "a"), (bad, "b"))]
    result = whence.compare(*runs)
    assert result.status == "undecided"
    assert "nothing inside was recorded, so whence cannot localise it" in result.headline
    first = result.next[0]
    assert "-inside" in first.command
    assert "--level" not in first.command
    assert "--programs" not in first.command
    same = whence.compare(runs[0], of_openvino(place, path, feeds, "c", level="io"))
    assert same.status == "same"
