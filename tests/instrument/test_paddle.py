"""Paddle captured live: predictors and layers, under `whence run` and in code. Oracles: Paddle's
own hooks, numpy, plain runs.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import warm
import whence
from whence.errors import UsageError
from whence.store import open_run

if importlib.util.find_spec("paddle") is None:
    pytest.skip(
        "paddlepaddle is not installed: pip install paddlepaddle==3.3.1", allow_module_level=True
    )
pytestmark = pytest.mark.paddle

HERE = Path(__file__).parent
PLAIN = {"disable_mkldnn": []}
CONFIGS = {
    "model": [
        {},
        PLAIN,
        {"switch_ir_optim": [False]},
        {"enable_new_executor": [], "enable_memory_optim": []},
    ],
    "loop": [{}, PLAIN],
    "legacy": [
        {},
        PLAIN,
        {"switch_ir_optim": [False]},
        {"switch_ir_optim": [False], "enable_new_executor": []},
        {"enable_memory_optim": []},
    ],
}


def python(text, *words, cwd, whence_run=(), **environment):
    """Run a program, under `whence run` when its words are given."""
    file = cwd / "program.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport paddle_models as pm\n"
        + textwrap.dedent(text)
    )
    before = [warm.PADDLE, "-m", "whence", "run", *whence_run, "--"] if whence_run else []
    return subprocess.run(
        [*before, warm.PADDLE, str(file), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the programs, and beside each of PIR one with another scale in its second
    attention.
    """
    folder = tmp_path_factory.mktemp("models")
    for kind, flags in (("pir", {}), ("legacy", {"FLAGS_enable_pir_api": "0"})):
        done = subprocess.run(
            [warm.PADDLE, str(HERE / "paddle_models.py"), kind, str(folder)],
            env={**os.environ, **flags},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    text = (folder / "model.json").read_text()
    found = list(re.finditer(r"0\.3535533\d*", text))
    assert len(found) == 2
    (folder / "model_fault.json").write_text(
        f"{text[: found[1].start()]}0.355{text[found[1].end() :]}"
    )
    (folder / "model_fault.pdiparams").write_bytes((folder / "model.pdiparams").read_bytes())
    return folder


RUNS = """
import json
folder, name, settings, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
made = pm.predictor(folder, name, settings)
for _ in range(steps):
    print(pm.once(made, pm.fed(name)))
"""


def captured(models, tmp_path, name, settings, run, *options, steps=2):
    done = python(
        RUNS,
        str(models),
        name,
        json.dumps(settings),
        str(steps),
        cwd=tmp_path,
        whence_run=("-o", str(tmp_path / run), *options),
    )
    assert done.returncode == 0, done.stderr
    return open_run(tmp_path / run), done


def outputs(run, step=0):
    """Name -> array of what operators wrote in a step, of every name the last."""
    found = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.kind == "operator" and call.step == step:
            names = [
                call.scope,
                *(n.removeprefix("writes ") for n in call.notes if n.startswith("writes ")),
            ]
            found.update(zip(names, (r.record for r in call.slots("output"))))
    return {name: run.array(record) for name, record in found.items()}


# ---- predictors


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(n, s, marks=[pytest.mark.slow] if i else [])
        for n in CONFIGS
        for i, s in enumerate(CONFIGS[n])
    ],
    ids=lambda v: v if isinstance(v, str) else "+".join(v) or "default",
)
def test_results_are_bitwise_those_of_a_plain_run_and_every_output_is_there(
    models, tmp_path, name, settings
):
    run, done = captured(models, tmp_path, name, settings, "run")
    plain = python(RUNS, str(models), name, json.dumps(settings), "2", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert done.stdout.splitlines()[-2:] == plain.stdout.splitlines()[-2:]
    assert run.ended == "" and {s.step for s in run.steps} == {0, 1}
    roots = [c for c in run.calls if c.parent == -1]
    assert [c.root for c in roots] == ["model", "model"]
    digests = [
        __import__("hashlib").md5(run.array(r.record).tobytes()).hexdigest()
        for r in roots[0].slots("output")
    ]
    assert str(digests) == plain.stdout.splitlines()[-1]
    assert all(c.slots("output") for c in run.calls), "an operator without what it wrote"
    assert not [n for n in run.notes if n.kind in ("error", "hook-error")]


HOOKED = """
import json, numpy as np, paddle
folder, name, settings, out = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
made = pm.predictor(folder, name, settings)
found, order = {}, []
def hook(op, tensor_name, tensor):
    short = tensor_name[tensor_name.find("inner_var_"):].replace("inner_var_", "inner_var.") if "inner_var_" in tensor_name else tensor_name
    value = tensor.numpy().copy()
    if value.size:
        found[short] = value
made.register_output_hook(hook)
pm.once(made, pm.fed(name))
np.savez(out, **found)
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("model", PLAIN),
        pytest.param("loop", PLAIN, marks=pytest.mark.slow),
        ("legacy", {"switch_ir_optim": [False]}),
    ],
    ids=str,
)
def test_every_tensor_is_the_one_that_a_hook_of_paddle_sees(models, tmp_path, name, settings):
    run, _ = captured(models, tmp_path, name, settings, "run", steps=1)
    done = python(
        HOOKED, str(models), name, json.dumps(settings), str(tmp_path / "seen.npz"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    seen, ours = dict(np.load(tmp_path / "seen.npz")), outputs(run)
    seen = {
        n: a for n, a in seen.items() if "batch_norm2d" not in n
    }  # parameters that were not changed
    assert seen.keys() <= ours.keys()
    for key, array in seen.items():
        assert ours[key].dtype == array.dtype and ours[key].tobytes() == array.tobytes(), key


def test_onednn_blocks_are_brought_into_the_order_of_the_shape(models, tmp_path):
    """20 channels fill no whole block: what a hook hands out is neither in order nor all of it."""
    fast, _ = captured(models, tmp_path, "loop", {}, "fast", steps=1)
    plain, _ = captured(models, tmp_path, "loop", PLAIN, "plain", steps=1)
    fused = next(c for c in fast.calls if "conv" in c.op_type)
    relu = next(c for c in sorted(plain.calls, key=lambda c: c.order) if c.op_type == "relu")
    ours, theirs = (
        run.array(call.slots("output")[0].record) for run, call in ((fast, fused), (plain, relu))
    )
    assert ours.shape == theirs.shape == (2, 20, 8, 8)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_static_mode_and_blocks(models, tmp_path):
    text = "import paddle\npaddle.enable_static()\n" + RUNS
    done = python(text, str(models), "loop", "{}", "2", cwd=tmp_path, whence_run=("-o", "run"))
    assert done.returncode == 0 and "stopped" not in done.stderr, done.stderr
    assert len(open_run(tmp_path / "run").calls) > 20


def test_data_flow_follows_lists_loops_and_branches(models, tmp_path):
    run, _ = captured(models, tmp_path, "model", PLAIN, "run", steps=1)
    made = {r.record: c for c in run.calls if c.parent != -1 for r in c.slots("output")}
    calls = [c for c in sorted(run.calls, key=lambda c: c.order) if c.parent != -1]
    split = next(c for c in calls if c.op_type == "split_with_num")
    assert len(split.slots("output")) == 3
    for reference, part in zip(
        split.slots("output"), np.split(run.array(split.slots("input")[0].record), 3, -1)
    ):
        np.testing.assert_array_equal(run.array(reference.record), part)
    concat = next(c for c in calls if c.op_type == "concat")
    assert [made[r.record].op_type for r in concat.slots("input")] == ["slice", "slice"]
    parts = [run.array(r.record) for r in concat.slots("input")]
    np.testing.assert_array_equal(
        np.concatenate(parts, 1), run.array(concat.slots("output")[0].record)
    )
    scores = next(c for c in calls if c.op_type == "matmul" and c.arguments.get("transpose_y"))
    q, k = (run.array(r.record).astype(np.float64) for r in scores.slots("input"))
    np.testing.assert_allclose(
        run.array(scores.slots("output")[0].record), q @ k.swapaxes(-1, -2), atol=1e-5
    )
    assert scores.source == "Block.Attention"
    fed = {r.record for c in run.calls if c.parent == -1 for r in c.slots("input")}
    hidden = [
        r for c in calls for r in c.slots("input") if r.record not in made and r.record not in fed
    ]
    assert not hidden, "inputs that nobody made"

    run, _ = captured(models, tmp_path, "loop", PLAIN, "loop", steps=1)
    loop = next(c for c in run.calls if c.op_type == "while")
    inside = sorted((c for c in run.calls if c.parent == loop.id), key=lambda c: c.order)
    assert [c.occurrence for c in inside if c.op_type == "matmul"] == [0, 1, 2]
    relus = [c for c in inside if c.op_type == "relu"]
    assert relus[-1].slots("output")[0].record in {r.record for r in loop.slots("output")}
    matmuls = [c for c in inside if c.op_type == "matmul"]
    assert [c.slots("input")[0].record for c in matmuls[1:]] == [
        c.slots("output")[0].record for c in relus[:-1]
    ]
    assert next(c for c in run.calls if c.op_type == "if").slots("output")


def test_two_processes_pair_wholly_and_a_changed_attribute_is_named(models, tmp_path):
    one, _ = captured(models, tmp_path, "model", PLAIN, "one")
    captured(models, tmp_path, "model", PLAIN, "two")
    result = whence.compare(tmp_path / "one", tmp_path / "two")
    assert result.status == "same" and result.unmatched == 0 and set(result.counts) == {"identical"}
    assert result.coverage.paired == len(one.calls)
    captured(models, tmp_path, "model_fault", PLAIN, "fault")
    result = whence.compare(tmp_path / "one", tmp_path / "fault")
    scales = [
        c
        for c in one.calls
        if c.op_type == "scale" and abs(c.arguments.get("input.1", 0) - 0.3536) < 1e-3
    ]
    scale = sorted((c for c in scales if c.step == 0), key=lambda c: c.order)[1]
    assert result.status == "different" and result.unmatched == 0
    assert {f.name for f in result.findings} == {scale.scope}
    captured(models, tmp_path, "model", {}, "fused")
    captured(models, tmp_path, "model_fault", {}, "fused_fault")
    result = whence.compare(tmp_path / "fused", tmp_path / "fused_fault")
    assert [f.op_type for f in result.findings] == ["fused_matmul"] and "0.355" in result.findings[
        0
    ].sentence


BIG = """
import paddle
paddle.seed(0)
layer = paddle.nn.Linear(256, 128)
spec = [paddle.static.InputSpec([None, 256], "float32", name="x")]
paddle.jit.save(paddle.jit.to_static(layer, input_spec=spec, full_graph=True), "big")
made = pm.predictor(".", "big", {"disable_mkldnn": []})
print(pm.once(made, [__import__("numpy").ones((1, 256), "float32")]))
"""


def test_weights_are_referenced_in_the_users_file(tmp_path):
    done = python(BIG, cwd=tmp_path, whence_run=("-o", "run"))
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    weight = next(
        r.record
        for c in run.calls
        if c.op_type == "matmul" and c.root == "model"
        for r in c.slots("param")
    )
    elements = run.records[weight].elements
    assert elements is not None and elements.file == str((tmp_path / "big.pdiparams").resolve())
    raw = (tmp_path / "big.pdiparams").read_bytes()[
        elements.offset : elements.offset + elements.nbytes
    ]
    assert run.array(weight).tobytes() == raw and run.array(weight).shape == (256, 128)


def test_a_changed_weight_is_named(models, tmp_path):
    big = tmp_path / "models"
    big.mkdir()
    for name in ("legacy.pdmodel", "legacy.pdiparams"):
        (big / name).write_bytes((models / name).read_bytes())
    settings = {"switch_ir_optim": [False]}
    captured(big, tmp_path, "legacy", settings, "one")
    data = bytearray((big / "legacy.pdiparams").read_bytes())
    weight = next(c for c in open_run(tmp_path / "one").calls if c.op_type == "matmul_v2").slots(
        "param"
    )[0]
    raw = open_run(tmp_path / "one").array(weight.record).tobytes()
    at = bytes(data).index(raw)
    data[at : at + 4] = np.float32(3.0).tobytes()
    (big / "legacy.pdiparams").write_bytes(bytes(data))
    captured(big, tmp_path, "legacy", settings, "two")
    result = whence.compare(tmp_path / "one", tmp_path / "two")
    assert [(f.name, f.cause) for f in result.findings] == [("matmul_v2_0.tmp_0", "parameter")]


def test_a_file_of_weights_that_is_not_there_is_said(models, tmp_path):
    lonely = tmp_path / "models"
    lonely.mkdir()
    (lonely / "model.json").write_bytes((models / "model.json").read_bytes())
    run, told = captured(lonely, tmp_path, "model", PLAIN, "run", steps=1)
    assert (
        "model.pdiparams does not exist: Paddle then runs the program with arbitrary memory"
        in told.stderr
    )
    assert any("model.pdiparams does not exist" in n.text for n in run.notes if n.kind == "error")


def test_legacy_passes_are_rounding(models, tmp_path):
    captured(models, tmp_path, "legacy", {}, "fused")
    captured(models, tmp_path, "legacy", PLAIN, "plain")
    assert whence.compare(tmp_path / "fused", tmp_path / "plain").status == "same"


def test_a_live_run_faces_a_log_of_the_same_program(models, tmp_path):
    text = "import paddle\npaddle.set_printoptions(threshold=10**9)\n" + RUNS.replace(
        "for _ in",
        "made.register_output_hook(lambda op, name, tensor: print(op, name, tensor))\nfor _ in",
    )
    captured(models, tmp_path, "legacy", {"switch_ir_optim": [False]}, "live")
    done = python(
        text, str(models), "legacy", json.dumps({"switch_ir_optim": [False]}), "2", cwd=tmp_path
    )
    (tmp_path / "run.log").write_text(done.stdout)
    result = whence.compare(tmp_path / "live", tmp_path / "run.log")
    assert result.status == "same", result.headline
    assert result.coverage.paired >= result.coverage.calls - 2


def test_the_program_after_passes_is_in_the_run_and_the_weights_are_not(models, tmp_path):
    run, _ = captured(models, tmp_path, "model", {}, "run", steps=1)
    saved = sorted(p.name for p in (tmp_path / "run" / "paddle").rglob("*") if p.is_file())
    assert saved == ["program.json"]
    settings = json.loads(next(n.text for n in run.notes if n.kind == "settings"))
    assert (
        settings["onednn"] is True
        and settings["pir"] is True
        and (tmp_path / "run" / settings["program"]).is_file()
    )
    assert any(
        "fused" in c.op_type for c in whence.open_run(tmp_path / "run" / settings["program"]).calls
    )


def test_what_the_user_saves_stays_where_the_user_wants_it(models, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    settings = {"enable_save_optim_model": [True], "set_optim_cache_dir": [str(mine)]}
    run, _ = captured(models, tmp_path, "model", settings, "run", steps=1)
    assert {p.name for p in mine.iterdir()} == {"_optimized.json", "_optimized.pdiparams"}
    assert not (tmp_path / "run" / "paddle").exists()
    assert any(c.arguments for c in run.calls)


MANY = """
import paddle, threading
from paddle.inference import Config, PredictorPool
first = pm.predictor(sys.argv[1], "legacy", {})
second = pm.predictor(sys.argv[1], "model", {})
clone = first.clone()
config = Config(sys.argv[1] + "/model.json", sys.argv[1] + "/model.pdiparams")
config.disable_glog_info()
pool = PredictorPool(config, 2)
made = [(first, "legacy"), (second, "model"), (clone, "legacy"), (pool.retrieve(1), "model")]
out = {}
def work(k):
    out[k] = [pm.once(made[k][0], pm.fed(made[k][1])) for _ in range(3)]
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
tensors = [paddle.to_tensor(a) for a in pm.fed("model")]
print(sorted(out.items()), float(second.run(tensors)[0].sum()))
"""


def test_several_predictors_clones_pools_threads_and_lists_of_tensors(models, tmp_path):
    done = python(MANY, str(models), cwd=tmp_path, whence_run=("-o", "run"))
    plain = python(MANY, str(models), cwd=tmp_path)
    assert done.returncode == 0 and "stopped" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    run = open_run(tmp_path / "run")
    steps = {}
    for call in run.calls:
        if call.parent == -1:
            steps[call.root] = max(steps.get(call.root, -1), call.step)
    assert steps == {"model": 2, "model#1": 3, "model#2": 2, "model#3": 2} or sorted(
        steps.values()
    ) == [2, 2, 2, 3]
    per = {
        root: sorted(c.scope for c in run.calls if c.root == root and c.step == 0) for root in steps
    }
    assert per["model"] == per["model#2"]
    own = {c.id: c for c in run.calls}
    assert all(c.parent == -1 or own[c.parent].root == c.root for c in run.calls)


LISTS = """
made = pm.predictor(sys.argv[1], "lstm", {"disable_mkldnn": []})
for predictor in (made, made.clone()):
    pm.once(predictor, pm.fed("lstm"))
"""


def test_weights_in_lists_are_taken_of_a_predictor_and_its_clone(models, tmp_path):
    done = python(LISTS, str(models), cwd=tmp_path, whence_run=("-o", str(tmp_path / "run")))
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    calls = [c for c in run.calls if c.op_type == "rnn"]
    assert sorted(c.root for c in calls) == ["model", "model#1"]
    assert len({tuple(r.record for r in c.slots("param")) for c in calls}) == 1
    weights = whence.open_run(str(models / "lstm.pdiparams"))
    held = {
        f"{c.scope}.{r.slot[6:]}": weights.array(r.record)
        for c in weights.calls
        for r in c.slots("param")
    }
    for ref in calls[0].slots("param"):
        np.testing.assert_array_equal(run.array(ref.record), held[ref.slot[6:]])
    assert len(calls[0].slots("param")) == 4


def test_an_import_by_name_before_the_capture_begins_is_seen_too(models, tmp_path):
    text = """
    import whence
    from paddle.inference import create_predictor
    made = pm.predictor(sys.argv[1], "legacy", {})
    with whence.capture(made, "run"):
        print(pm.once(made, pm.fed("legacy")))
    print(pm.once(made, pm.fed("legacy")))
    """
    done = python(text, str(models), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == lines[-2]
    run = open_run(tmp_path / "run")
    assert {c.step for c in run.calls} == {0} and len(run.calls) == 10


# ---- options


def test_selection_budget_statistics_callbacks_and_live_lines(models, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(op, name, tensor):\n    return {'first': float(tensor.numpy().reshape(-1)[0])}\n"
    )
    plain = {"switch_ir_optim": [False]}
    run, done = captured(
        models,
        tmp_path,
        "legacy",
        plain,
        "a",
        "--include",
        "scale_1.*",
        "--steps",
        "1:3",
        "--print",
        "--on-record",
        "mine:f",
        steps=4,
    )
    taken = [c for c in run.calls if c.refs]
    assert {(c.scope, c.step) for c in taken if c.parent != -1} == {
        ("scale_1.tmp_0", 1),
        ("scale_1.tmp_0", 2),
    }
    scale = next(c for c in taken if c.scope == "scale_1.tmp_0")
    out = scale.slots("output")[0]
    assert run.records[out.record].columns["first"] == float(run.array(out.record).reshape(-1)[0])
    np.testing.assert_allclose(
        run.array(out.record), run.array(scale.slots("input")[0].record) * 1.5, rtol=1e-6
    )
    assert (
        "scale_1.tmp_0:output.0  float32 [2, 4, 8]  min" in done.stderr
        and "relu_0" not in done.stderr
    )
    run, _ = captured(models, tmp_path, "legacy", plain, "b", "--keep", "stats")
    assert all(r.statistics is not None and r.elements is None for r in run.records)
    run, _ = captured(models, tmp_path, "legacy", plain, "c", "--max-bytes", "1000", steps=3)
    assert any(n.kind == "budget" for n in run.notes) and any(
        r.elements is None for r in run.records
    )
    run, _ = captured(models, tmp_path, "legacy", plain, "d", "--slots", "output")
    assert not any(c.slots("input") for c in run.calls) and any(
        c.slots("output") for c in run.calls
    )
    run, _ = captured(
        models, tmp_path, "model", PLAIN, "e", "--include", "Block.Attention", steps=1
    )
    assert {c.source for c in run.calls if c.refs and c.parent != -1} == {"Block.Attention"}


def test_a_patch_puts_the_reference_into_the_live_predictor(models, tmp_path):
    captured(models, tmp_path, "model", PLAIN, "one")
    captured(models, tmp_path, "model_fault", PLAIN, "fault")
    culprit = whence.compare(tmp_path / "one", tmp_path / "fault").findings[0].name
    run, _ = captured(
        models,
        tmp_path,
        "model_fault",
        PLAIN,
        "patched",
        "--patch",
        culprit,
        "--patch-from",
        str(tmp_path / "one"),
    )
    assert [n.text for n in run.notes if n.kind == "patch"] == [f"{culprit}: 2 calls patched"]
    ours, theirs = (  # the numbers of variables may differ: another constant more
        [
            (c.op_type, *(r.array(o.record).tobytes() for o in c.slots("output")))
            for c in sorted(r.calls, key=lambda c: c.order)
        ]
        for r in (run, open_run(tmp_path / "one"))
    )
    assert ours == theirs


def test_what_fails_in_a_hook_of_ours_ends_the_capture_and_not_the_program(models, tmp_path):
    text = """
    import importlib
    runs = importlib.import_module("whence.instrument.paddle.predictor")
    made = pm.predictor(sys.argv[1], "legacy", {})
    real, count = runs.look, [0]
    def fails(tensor):
        count[0] += 1
        if count[0] == 5:
            raise RuntimeError("planted")
        return real(tensor)
    runs.look = fails
    for _ in range(3):
        print(pm.once(made, pm.fed("legacy")))
    """
    done = python(text, str(models), cwd=tmp_path, whence_run=("-o", "run"))
    plain = python(text, str(models), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == plain.stdout.splitlines()[-3:]
    assert (
        "capture stopped, the program goes on: whence failed: RuntimeError: planted" in done.stderr
    )
    assert any("planted" in n.text for n in open_run(tmp_path / "run").notes)


def test_an_interrupt_inside_a_hook_is_an_interrupt_in_the_program(models, tmp_path):
    (tmp_path / "mine.py").write_text("def f(op, name, tensor):\n    raise KeyboardInterrupt\n")
    text = RUNS.replace(
        "for _ in",
        "try:\n    pm.once(made, pm.fed(name))\nexcept KeyboardInterrupt:\n    "
        "print('interrupted')\nfor _ in",
    )
    done = python(
        text,
        str(models),
        "legacy",
        "{}",
        "0",
        cwd=tmp_path,
        whence_run=("-o", "run", "--on-record", "mine:f"),
    )
    assert done.stdout.splitlines()[-1] == "interrupted", done.stderr


def test_what_only_torch_models_have_is_refused(models, tmp_path):
    text = """
    import whence
    made = pm.predictor(sys.argv[1], "legacy", {})
    for options in ({"logits": True, "logits_module": "head"}, {"inject": "scale@x"}):
        try:
            with whence.capture(made, "run", **options):
                pass
        except whence.errors.UsageError as error:
            print(error)
    """
    done = python(text, str(models), cwd=tmp_path)
    assert (
        "logits_module names a module inside a torch model" in done.stdout
        and "inject plants faults in torch models only" in done.stdout
    )
    assert not (tmp_path / "run").exists()
    assert issubclass(UsageError, Exception)


LOGITS = """
import paddle, whence
made = pm.predictor(sys.argv[1], "model", {})
with whence.capture(made, "predictor", logits=True):
    pm.once(made, pm.fed("model"))
layer = pm.layers()["model"]()
layer.eval()
with whence.capture(layer, "layer", logits=True):
    layer(paddle.to_tensor(pm.fed("model")[0]))
"""


def test_level_logits_takes_what_goes_in_and_comes_out(models, tmp_path):
    done = python(LOGITS, str(models), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("predictor", "layer"):
        run = open_run(tmp_path / name)
        (call,) = run.calls
        kinds = [ref.slot.partition(".")[0] for ref in call.refs]
        assert kinds == ["input", "output"]
        assert run.records[call.slots("output")[0].record].shape == (2, 5, 64)
        np.testing.assert_array_equal(run.array(call.slots("input")[0].record), pm_ids())
    assert not (tmp_path / "predictor" / "paddle").exists()


def pm_ids():
    return np.arange(10).reshape(2, 5)


# ---- layers

LAYERS = """
import numpy as np, paddle
paddle.seed(0)
kinds = pm.layers()
model = kinds["model"]()
model.eval()
ids = paddle.to_tensor(pm.fed("model")[0])
print(float(model(ids=ids).sum()), float(model(ids).sum()))
loop = kinds["loop"]()
optimizer = paddle.optimizer.SGD(0.01, parameters=loop.parameters())
for _ in range(2):
    y = loop(paddle.ones([2, 8, 8]), n=paddle.to_tensor([2]))[0]
    y.sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    print(float(y.sum()))
half = paddle.nn.Sequential(paddle.nn.Flatten())
print(half(paddle.to_tensor(np.arange(6).reshape(2, 3)).astype("bfloat16")).dtype)
print(half(paddle.to_tensor(np.arange(6.0).reshape(2, 3)).astype("float8_e4m3fn")).dtype)
traced = paddle.jit.to_static(kinds["model"](), full_graph=len(sys.argv) > 1)
traced.eval()
print(float(traced(ids).sum()), float(traced(ids).sum()))
"""


@pytest.mark.parametrize("full", [True, False])
def test_layers_are_captured_bitwise_and_traced_ones_at_their_boundary(tmp_path, full):
    words = ["full"] if full else []
    done = python(LAYERS, *words, cwd=tmp_path, whence_run=("-o", "run"))
    plain = python(LAYERS, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    run = open_run(tmp_path / "run")
    own = {c.id: c for c in run.calls}
    first = {c.scope: c for c in run.calls if c.root == "Model" and c.step == 0}
    assert {r.slot for r in first[""].slots("input")} == {"input.ids"}
    assert own[first["blocks.1.attention.qkv"].parent].scope == "blocks.1.attention"
    assert first["blocks.0.attention"].arguments == {"input.scale": 0.35355338}
    linear = first["head"]
    records = {r.slot: r.record for r in linear.refs}
    x, w, b = (
        run.array(records[slot]).astype(np.float64)
        for slot in ("input.0", "param.weight", "param.bias")
    )
    np.testing.assert_allclose(run.array(linear.slots("output")[0].record), x @ w + b, atol=1e-5)
    assert (
        first[""].number,
        first["emb"].number,
        first["blocks.0"].number,
        first["blocks.0.n1"].number,
    ) == ("0", "1", "2", "2_1")
    up, down = first["blocks.0.up"], first["blocks.0.n2"]
    assert up.slots("input")[0].record == down.slots("output")[0].record
    norms = [c for c in sorted(run.calls, key=lambda c: c.order) if c.op_type == "BatchNorm2D"]
    assert [sorted(r.slot for r in c.slots("mutated")) for c in norms] == [
        ["mutated._mean", "mutated._variance"]
    ] * 2
    assert (
        norms[0].training and norms[1].slots("param")[0].record != norms[0].slots("param")[0].record
    )
    flat = [
        run.array(c.slots("output")[0].record)
        for c in sorted(run.calls, key=lambda c: c.order)
        if c.op_type == "Flatten"
    ]
    assert [str(a.dtype) for a in flat] == ["bfloat16", "float8_e4m3fn"]
    assert [a.astype(np.float32).reshape(-1).tolist() for a in flat] == [[0, 1, 2, 3, 4, 5]] * 2
    traced = [c for c in run.calls if c.root == "Model#1"]
    assert [c.scope for c in traced] == ["", ""] and all(
        "traced by to_static: inside not seen" in c.notes for c in traced
    )
    assert len(traced[0].slots("param")) == len(list(first[""].slots("param"))) + sum(
        len(c.slots("param")) for s, c in first.items() if s
    )


def test_a_layer_in_code_a_fault_in_it_and_a_patch(tmp_path):
    text = """
    import numpy as np, paddle, whence
    from whence.store import open_run
    paddle.seed(0)
    model = pm.layers()["model"]()
    model.eval()
    ids = paddle.to_tensor(pm.fed("model")[0])
    with whence.capture(model, "one"):
        before = model(ids).numpy()
    model.blocks[1].up.weight.set_value(model.blocks[1].up.weight * 1.01)
    with whence.capture(model, "two"):
        model(ids)
    with whence.capture(model, "three", patch="blocks.1.up", patch_from="one"):
        after = model(ids).numpy()
    print(before.tobytes() == after.tobytes(), model.__class__.__call__ is paddle.nn.Layer.__call__, paddle.nn.Layer.__call__.__module__)
    result = whence.compare("one", "two")
    print(result.status, [(f.name, f.cause) for f in result.findings])
    """
    done = python(text, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2] == "True True paddle.nn.layer.layers"
    assert done.stdout.splitlines()[-1] == "different [('blocks.1.up', 'parameter')]"


def test_paddle_is_captured_where_there_is_no_torch(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, NoTorch())
        import paddle, whence
        layer = paddle.nn.Linear(2, 2)
        with whence.capture(layer, "run"):
            layer(paddle.ones([1, 2]))
        """
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [call.op_type for call in open_run(tmp_path / "run").calls] == ["Linear"]
