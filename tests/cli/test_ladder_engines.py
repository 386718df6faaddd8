"""`whence ladder` of programs that use ONNX Runtime: the first optimiser that changes what a
session returns is named, with the node. The faults are real: optimisers of the installed release
make them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import inside
import warm

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import onnxruntime
from onnxruntime_releases import FAULTS, differs, drawn, model

import whence
from whence.errors import CaptureError, OutputExists, UsageError
from whence.report.ladder import rungs
from whence.results import Pass, Rung, RungKind
from whence.workflows.ladder.of_levels import RULES, first_optimizer, with_rules
from whence.workflows.ladder.of_releases import version_in

LEVELS = ["off", "basic", "extended", "layout", "all"]
SERVE = """
import sys
import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
feeds = dict(np.load("inputs.npz"))
if "unseeded" in sys.argv:
    feeds = {n: np.random.default_rng().normal(size=v.shape).astype(v.dtype) for n, v in feeds.items()}
for _ in range(2):
    session.run(None, feeds)
if "torch" in sys.argv:
    import torch
    torch.compile(torch.nn.ReLU(), backend=lambda graph, inputs: graph.forward)(torch.ones(3))
"""


def clean():
    """A norm, a product with a bias and a GELU, which the runtime fuses, and rightly."""
    nodes = [
        ("LayerNormalization", ["x", "scale", "bias"], "n", {}),
        ("MatMul", ["n", "w"], "m", {}),
        ("Add", ["m", "b"], "a", {}),
        ("Div", ["a", "root"], "d", {}),
        ("Erf", ["d"], "e", {}),
        ("Add", ["e", "one"], "o", {}),
        ("Mul", ["a", "o"], "p", {}),
        ("Mul", ["p", "half"], "y", {}),
    ]
    weights = {
        "scale": 1 + drawn(16),
        "bias": drawn(1, 16)[0],
        "w": drawn(16, 24) / 4,
        "b": drawn(1, 24)[0],
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    return model(nodes, {"x": drawn(2, 4, 16)}, weights)


def coded(outlier):
    """A product of int8 codes with zero points of their own, which are written as uint8 where the
    processor multiplies these faster. outlier: of the weight that is a float.
    """
    nodes = [
        ("QuantizeLinear", ["x", "s", "z"], "q", {}),
        ("DequantizeLinear", ["q", "s", "z"], "d", {}),
        ("Relu", ["d"], "r", {}),
        ("QuantizeLinear", ["r", "s", "z"], "c", {}),
        ("DequantizeLinear", ["c", "s", "z"], "e", {}),
        ("Mul", ["e", "w"], "y", {}),
    ]
    weights = {"s": np.float32(0.05), "z": np.int8(5), "w": np.float32(outlier)}
    return model(nodes, {"x": drawn(4, 16)}, weights)


def gathered():
    """Two parts of one value, which the runtime takes apart in one node in another order."""
    nodes = [
        ("Relu", ["x"], "r", {}),
        ("Gather", ["r", "last"], "a", {"axis": 0}),
        ("Gather", ["r", "first"], "b", {"axis": 0}),
        ("Sub", ["a", "b"], "y", {}),
    ]
    return model(nodes, {"x": drawn(2, 16)}, {"last": np.int64(1), "first": np.int64(0)})


def written(folder, made):
    data, inputs = made
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(data)
    np.savez(folder / "inputs.npz", **inputs)
    (folder / "serve.py").write_text(SERVE)
    return folder


def climb(folder, *words, before=()):
    words = (*before, "--", warm.TORCH, "serve.py", *words)
    return inside.or_outside(folder, "ladder", "-o", "ladder", *words)


def is_made_here(made):
    """Does this release make the fault, as numpy sees it?"""
    data, inputs = made
    results = []
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, inputs)[0])
    return differs(*results)


@pytest.mark.parametrize("name", FAULTS)
def test_an_optimiser_that_changes_the_function_is_named(name):
    fault = FAULTS[name]
    made = fault.make()
    result = whence.ladder(*made)
    verdicts = {rung.name: rung.verdict for rung in result.rungs}
    if not is_made_here(made):  # a release before or after this one made it
        assert result.status != "different"
        return
    assert (result.status, result.stages, result.kind) == ("different", (fault.level,), "levels")
    below = LEVELS[1 : LEVELS.index(fault.level)]
    assert all(verdicts[level] in ("bit-equal", "noise") for level in below)
    assert result.compiler_pass.info == fault.optimizer
    assert result.compiler_pass.alone in ("bit-equal", "noise")
    assert result.compiler_pass.node
    text = rungs(result)
    assert text.startswith(f"LEVEL {fault.level}")
    assert f"OPTIMISER          {fault.optimizer}\n  node             " in text


def test_at_least_three_faults_are_made_by_this_release():
    assert sum(is_made_here(fault.make()) for fault in FAULTS.values()) >= 3


@pytest.mark.parametrize("make", [clean, gathered, lambda: coded(1.5)])
def test_a_clean_model_climbs_in_silence(make):
    result = whence.ladder(*make())
    assert (result.status, result.stages, result.compiler_pass) == ("same", (), None)
    assert [rung.name for rung in result.rungs] == LEVELS
    assert rungs(result).startswith("NO LEVEL           ")


def test_the_rungs_say_what_was_optimised():
    result = whence.ladder(*clean())
    nodes = {rung.name: rung.nodes for rung in result.rungs}
    assert nodes["off"] == 8 > nodes["all"]
    assert "MatMulAddFusion" in result.rungs[1].optimizers
    assert result.rungs[0].optimizers == ()


def test_a_command_and_what_is_kept(tmp_path):
    folder = written(tmp_path / "program", FAULTS["integer-division"].make())
    done = climb(folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("LEVEL basic        basic is outside the noise: ")
    assert "OPTIMISER          DivMulFusion\n  node             d+y (Div+Mul)\n" in done.stdout
    assert "  without it       basic is " in done.stdout
    kept = {path.name for path in (folder / "ladder").iterdir()}
    assert kept >= {*LEVELS, "off-again", "cmp-off-again", "cmp-all", "ladder.json"}
    assert not kept & {"eager", "bisect"}
    levels = json.loads((folder / "ladder" / "ladder.json").read_text())
    assert (levels["kind"], levels["compiler_pass"]["subsystem"]) == ("levels", "basic")
    run = whence.open_run(folder / "ladder" / "basic")
    settings = next(json.loads(n.text) for n in run.notes if n.kind == "settings")
    assert settings["optimization"] == "ORT_ENABLE_BASIC"
    assert len({c.step for c in run.calls}) == 2


@pytest.mark.slow
def test_what_a_program_uses_decides_and_can_be_chosen(tmp_path):
    folder = written(tmp_path / "program", FAULTS["integer-division"].make())
    both = climb(folder, "torch", before=["--format", "json"])
    assert both.returncode == 0, both.stderr
    found = json.loads(both.stdout)
    assert found.get("kind", "stages") == "stages"
    assert any("--of onnxruntime climbs their levels" in note for note in found["notes"])
    chosen = climb(folder, "torch", before=["--force", "--format", "json", "--of", "onnxruntime"])
    found = json.loads(chosen.stdout)
    assert (found["kind"], found["stages"]) == ("levels", ["basic"])
    none = inside.or_outside(
        folder, "ladder", "-o", "none", "--of", "onnxruntime", "--",
        warm.TORCH, "-c", "import torch, onnxruntime; torch.nn.ReLU()(torch.ones(2))",
    )  # fmt: skip
    assert none.returncode in (2, 3)
    assert "STAGE" not in none.stdout


def test_a_program_that_draws_its_inputs(tmp_path):
    folder = written(tmp_path / "program", FAULTS["two-scales"].make())
    done = climb(folder, "unseeded")
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("UNDECIDED          the off program does not do the same twice")


def test_one_rung_and_without_an_optimiser(tmp_path):
    folder = written(tmp_path / "program", FAULTS["integer-division"].make())

    def nodes(name, *words):
        done = inside.or_outside(folder, "run", "-o", name, *words, "--", warm.TORCH, "serve.py")
        assert done.returncode == 0, done.stderr
        run = whence.open_run(folder / name)
        return [c.op_type for c in run.calls if c.parent != -1 and c.step == 0]

    assert nodes("off", "--rung", "off") == ["Div", "Mul"]
    assert nodes("all", "--rung", "all") == ["Div"]
    assert nodes("without", "--disabled-optimizers", "DivMulFusion") == ["Div", "Mul"]
    assert nodes("own") == ["Div"]
    refused = inside.or_outside(
        folder, "run", "-o", "x", "--rung", "eager", "--disabled-optimizers", "A", "--", "python"
    )
    assert "disabled_optimizers are of ONNX Runtime" in refused.stderr
    with pytest.raises(UsageError, match="did you mean basic"):
        whence.capture(object(), tmp_path / "x", rung="basics").__enter__()


def test_files_that_were_optimised_before(tmp_path):
    data, inputs = FAULTS["integer-division"].make()
    for name, form in (("done.onnx", "ONNX"), ("done.ort", "ORT")):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / name)
        options.add_session_config_entry("session.save_model_format", form)
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        result = whence.ladder(tmp_path / name, inputs)
        assert result.status != "different"  # the fault is in the file
        assert any(name in note and "optimis" in note for note in result.notes), name
    assert whence.ladder(data, inputs).notes == ()


def test_a_session_is_made_again_as_it_was():
    data, inputs = FAULTS["two-scales"].make()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    result = whence.ladder(session, [inputs, inputs])
    assert result.stages == ("basic",)
    kept = session.get_session_options().graph_optimization_level
    assert kept == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with pytest.raises(UsageError, match="with its own options"):
        whence.ladder(session, inputs, providers=["CPUExecutionProvider"])


def test_what_cannot_be_climbed(tmp_path):
    data, inputs = clean()
    with pytest.raises(UsageError, match="inputs by name"):
        whence.ladder(data, [inputs["x"]])
    with pytest.raises(UsageError, match="no model file"):
        whence.ladder(tmp_path / "none.onnx", inputs)
    with pytest.raises(CaptureError, match="cannot be run on rung off"):
        whence.ladder(data, {"nonsense": inputs["x"]})
    whence.ladder(data, inputs, output=tmp_path / "kept")
    with pytest.raises(OutputExists):
        whence.ladder(data, inputs, output=tmp_path / "kept")


def test_rules_are_names_of_this_release():
    """Those of older releases apart, the library holds the name of each rule."""
    library = next(Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*"))
    held = library.read_bytes()
    missing = [name for name in RULES if name.encode() not in held]
    assert set(missing) <= {"ShapeToInitializer"}


def bisected(outside, optimizers=("A", "Level1_RuleBasedTransformer", "B", "C"), alone=True):
    """What the bisection names where a program is outside as `outside(names that are on)` says."""
    rung = Rung("basic", RungKind.OUTSIDE, optimizers=optimizers, node="last")
    names = with_rules(optimizers)

    def run_without(disabled):
        on = [name for name in names if name not in disabled]
        verdict = outside(on)
        return verdict, f"node with {len(on)}", ()

    return first_optimizer(rung, run_without, lambda line: None)


def verdict_where(test):
    return lambda on: RungKind.OUTSIDE if test(on) else RungKind.NOISE


@pytest.mark.parametrize("name", with_rules(["A", "Level1_RuleBasedTransformer", "B", "C"]))
def test_the_first_of_many_is_named(name):
    found = bisected(verdict_where(lambda on: name in on))
    assert (found.info, found.alone, found.broken) == (name, "noise", 0)
    assert found.runs <= 8


def test_of_two_the_first_is_named_and_the_second_is_said_to_be_there():
    found = bisected(verdict_where(lambda on: "A" in on or "C" in on))
    assert (found.info, found.alone) == ("A", "outside")
    ladder = whence.results.Ladder("p", "different", "s", ("basic",), (), True, found, (), "levels")
    assert "other optimisers change something too" in rungs(ladder)


def test_a_kernel_is_not_taken_for_an_optimiser():
    found = bisected(verdict_where(lambda on: True))
    assert found.info == ""
    assert "no optimiser by name: with all 27 optimisers off" in found.why
    assert isinstance(bisected(verdict_where(lambda on: True), ()), Pass)


def test_runs_that_fail_are_counted_and_never_named_without_a_word():
    found = bisected(lambda on: RungKind.FAILED if "B" in on else RungKind.NOISE)
    assert (found.info, found.broken > 0) == ("C", True) or "could not be run" in found.why


def release(folder, version):
    package = folder / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""Not run."""\n__version__ = "{version}"\nboom\n')
    return folder


def test_folders_of_releases(tmp_path):
    assert version_in(release(tmp_path / "a", "1.20.1")) == "1.20.1"
    with pytest.raises(UsageError, match="pip install --no-deps --target"):
        version_in(tmp_path / "nothing")
    release(tmp_path / "b", "1.20.1")
    folder = written(tmp_path / "program", clean())
    words = ["--release", tmp_path / "a", "--release", tmp_path / "b"]
    done = climb(folder, before=words)
    assert (done.returncode, "both hold onnxruntime 1.20.1" in done.stderr) == (3, True)
    done = climb(folder, before=["--release", tmp_path / "a", "--of", "torch"])
    assert (done.returncode, "releases are of ONNX Runtime" in done.stderr) == (3, True)


@pytest.mark.slow
def test_two_releases_side_by_side(tmp_path):
    """Two folders with the installed release, of which one's sessions say that they are newer and
    are spoiled: a double of a release, made of the real one.
    """
    real = Path(onnxruntime.__file__).parent
    for name, version, spoils in (("old", "9.0.1", ""), ("new", "9.0.2", SPOILS)):
        package = tmp_path / name / "onnxruntime"
        package.mkdir(parents=True)
        for path in real.iterdir():
            if path.name not in ("__init__.py", "__pycache__"):
                (package / path.name).symlink_to(path)
        text = (real / "__init__.py").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("__version__")]
        stated = [f'__version__ = "{version}"', spoils]
        (package / "__init__.py").write_text("\n".join([*lines, *stated]))
    folder = written(tmp_path / "program", clean())
    words = ["--release", tmp_path / "old", "--release", tmp_path / "new"]
    done = climb(folder, before=words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("RELEASE 9.0.2 ")
    assert "NODE               n (LayerNormalization)" in done.stdout
    kept = {path.name for path in (folder / "ladder").iterdir()}
    assert {"9.0.1", "9.0.1-again", "9.0.2", "cmp-9.0.2", "ladder.json"} <= kept
    done = climb(folder, before=["--force", "--release", tmp_path / "old"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed  bit-equal" in done.stdout


SPOILS = """
def _spoiled():
    import onnx
    from onnxruntime.capi import onnxruntime_inference_collection as collection

    made = collection.InferenceSession.__init__

    def makes(self, path, *args, **kwargs):
        model = onnx.load(path)
        for node in model.graph.node:
            if node.op_type == "LayerNormalization":
                node.attribute.append(onnx.helper.make_attribute("epsilon", 0.5))
        made(self, model.SerializeToString(), *args, **kwargs)

    collection.InferenceSession.__init__ = makes

_spoiled()
"""
