"""`whence repro`: the script of a finding shows the operator at fault, alone and without whence."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402
import whence.errors  # noqa: E402
from whence import cli  # noqa: E402

pytestmark = pytest.mark.torch


class Mlp(torch.nn.Module):
    def __init__(self, eps=1e-5, scale=1.0):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, eps=eps)
        self.up = torch.nn.Linear(16, 24)
        self.down = torch.nn.Linear(24, 16)
        self.scale = scale

    def forward(self, x):
        y = self.down(torch.log1p(torch.relu(self.up(self.norm(x)))))
        return x + (y if self.scale == 1.0 else y * self.scale)


class Net(torch.nn.Module):
    def __init__(self, **changed):
        super().__init__()
        self.first, self.second = Mlp(), Mlp(**changed)

    def forward(self, x):
        return self.second(self.first(x))


def captured(
    path, around=contextlib.nullcontext, prepare=lambda net: net, level="module", **changed
):
    torch.manual_seed(0)
    net = prepare(Net(**changed).eval())
    x = torch.randn(12, 16)
    with (
        torch.no_grad(),
        around(),
        whence.capture(net, path, **({} if level == "module" else {"level": level})),
    ):
        net(x)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("reference") / "run")


def compared(tmp_path, reference, target):
    result = whence.compare(reference, target, output=tmp_path / "cmp")
    assert result.status == "different"
    return tmp_path / "cmp"


def ran(script, *words, **environment):
    """Exit code and stdout of a command on the script, in a folder of its own where whence cannot
    be imported.
    """
    apart = script.parent.parent / "apart"
    shutil.copytree(script.parent, apart, dirs_exist_ok=True)
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    (apart / "whence.py").write_text("raise ImportError('the script must not need whence')")
    done = subprocess.run(
        [sys.executable, *words, str(apart / script.name)],
        cwd=apart.parent,
        capture_output=True,
        text=True,
        env=bare | environment,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@contextlib.contextmanager
def injected():
    import torch._inductor.config as config

    with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        yield


def in_place(net):
    net.second = torch.compile(net.second)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [torch.compile, in_place], ids=["whole model", "one module"])
def test_a_compiled_target_is_drilled_down_to_the_operator(tmp_path, reference, prepare):
    target = captured(tmp_path / "tgt", injected, prepare)
    made = whence.repro(compared(tmp_path, reference, target), tmp_path / "repro")
    assert made.operators == ("aten.relu.default",)
    assert (made.how, made.default, made.holds) == ("compiled", "target", True)
    text = Path(made.path).read_text()
    assert "'cpp.inject_relu_bug_TESTING_ONLY': 'accuracy'" in text
    assert text.count("aten.") == 1


def test_the_capture_notes_how_code_was_compiled(tmp_path):
    from torch._inductor import config

    def prepare(net):
        net.second = torch.compile(net.second, dynamic=False, options={"epilogue_fusion": False})
        net.first.compile(backend="aot_eager", fullgraph=True)
        return net

    with config.patch({"max_fusion_size": 7}):
        run = whence.open_run(str(captured(tmp_path / "run", injected, prepare)))
    told = {note.scope: json.loads(note.text) for note in run.notes if note.kind == "compiled"}
    assert told["second"]["backend"] == "inductor"
    assert told["second"]["options"] == {"epilogue_fusion": False}
    assert told["second"]["dynamic"] is False
    assert told["second"]["inductor"] == {
        "cpp.inject_relu_bug_TESTING_ONLY": "accuracy",
        "max_fusion_size": 7,
    }
    assert (told["first"]["backend"], told["first"]["fullgraph"]) == ("aot_eager", True)


@pytest.mark.slow
def test_another_argument(tmp_path, reference):
    cmp = compared(tmp_path, reference, captured(tmp_path / "tgt", eps=1e-2))
    made = whence.repro(cmp, tmp_path / "repro")
    assert made.operators == ("aten.native_layer_norm.default",)
    assert (made.how, made.holds) == ("semantic", True)
    assert made.notes == (
        "aten.native_layer_norm.default: eps is 1e-05 in the reference, 0.01 in the target",
    )
    script = Path(made.path)
    assert made.notes[0] in ran(script)[1]
    assert ran(script)[0] == 1
    assert ran(script, "-m", "pytest", "-q")[0] == 1
    assert ran(script, "-m", "pytest", "-q", SIDE="reference")[0] == 0
    assert "import whence" not in script.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["module", "op"])
def test_other_weights(tmp_path, level):
    def worse(net):
        with torch.no_grad():
            net.second.up.weight[3] *= 1.5
        return net

    first, second = (
        captured(tmp_path / "ref", level=level),
        captured(tmp_path / "tgt", prepare=worse, level=level),
    )
    made = whence.repro(compared(tmp_path, first, second), tmp_path / "repro")
    assert made.operators == ("aten.t.default", "aten.addmm.default")
    assert (made.how, made.holds) == ("parameter", True)
    assert "def target(target_weight, bias, mat1, **_)" in Path(made.path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["module", "op"])
def test_an_operator_that_only_one_side_runs(tmp_path, level):
    first, second = (
        captured(tmp_path / "ref", level=level),
        captured(tmp_path / "tgt", scale=1.05, level=level),
    )
    made = whence.repro(compared(tmp_path, first, second), tmp_path / "repro")
    assert made.operators == ("aten.mul.Tensor",)
    assert (made.how, made.holds) == ("semantic", True)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_parameter_that_only_the_reference_has_is_run_in_the_targets_dtype(
    tmp_path, dtype, other
):
    def run(name, dtype, has_bias):
        torch.manual_seed(0)
        net = Net().eval()
        torch.nn.init.normal_(net.second.up.bias)
        if not has_bias:
            net.second.up.bias = None
        with torch.no_grad(), whence.capture(net := net.to(dtype), tmp_path / name):
            net(torch.randn(12, 16).to(dtype))
        return tmp_path / name

    first, second = (
        run("ref", getattr(torch, dtype), True),
        run("tgt", getattr(torch, other), False),
    )
    made = whence.repro(compared(tmp_path, first, second), tmp_path / "repro")
    assert made.operators == ("aten.mm.default",)
    assert (made.how, made.holds) == ("semantic", True), made.seen
    assert "fails as the target runs it; passes as the reference does" in made.sentence


class Off(torch.utils._python_dispatch.TorchDispatchMode):
    """A device whose relu is a little off."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 1.01 if func is torch.ops.aten.addmm.default and out.shape[-1] == 24 else out


@pytest.mark.slow
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_kernel_that_this_machine_has_not_is_judged_by_what_was_recorded(tmp_path, level):
    first, second = (
        captured(tmp_path / "ref", level=level),
        captured(tmp_path / "tgt", Off, level=level),
    )
    made = whence.repro(compared(tmp_path, first, second), tmp_path / "repro")
    assert (made.how, made.default, made.holds) == ("recorded", "recorded", True)
    assert made.operators[-1] == "aten.addmm.default"
    assert made.sentence.startswith(
        "what was recorded fails; run on this machine as the target was it passes"
    )
    code, said = ran(Path(made.path))
    assert code == 1
    assert said.splitlines()[-1] == "FAIL (recorded)"


def test_what_does_not_fail_again_is_said_with_exit_2(tmp_path, reference, monkeypatch, capsys):
    from whence.replay.export import script as torch_script

    cmp = compared(tmp_path, reference, captured(tmp_path / "tgt", eps=1e-2))
    script = torch_script.script

    def harmless(case):
        text, tensors = script(case)
        return text.replace(", 0.01)", ", 1e-05)"), tensors

    monkeypatch.setattr(torch_script, "script", harmless)
    assert cli.execute(["repro", str(cmp), "-o", str(tmp_path / "repro")]) == 2
    said = capsys.readouterr().out
    assert said.startswith("NOT REPRODUCED")
    assert "passes as the target runs it; passes as the reference does" in said


def test_without_a_program_it_says_why_and_what_to_do(tmp_path, capsys):
    import numpy as np

    for name, scale in (("a", 1.0), ("b", 1.1)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.linspace(1, 2, 300, dtype=np.float32))
        np.save(
            tmp_path / name / "y.npy", np.linspace(3, 4, 300, dtype=np.float32) * np.float32(scale)
        )
    result = whence.compare(tmp_path / "a", tmp_path / "b", output=tmp_path / "cmp")
    assert cli.execute(["repro", str(tmp_path / "cmp"), "-o", str(tmp_path / "repro")]) == 3
    said = capsys.readouterr().err
    assert (
        ("cannot be run again" in said and "whence run" in said and "--model" in said)
        if result.findings
        else "nothing to" in said
    )
    assert not (tmp_path / "repro").exists()


def test_a_device_that_is_not_here(tmp_path, monkeypatch, capsys):
    """The recorded output stands for it; the script runs there as the target did."""
    from whence.workflows.repro import repro

    first, second = captured(tmp_path / "ref"), captured(tmp_path / "tgt", Off)
    cmp = compared(tmp_path, first, second)
    way_of = repro.way_of

    def elsewhere(run, call, notes):
        way = way_of(run, call, notes)
        return repro.replace(way, device="xpu:7") if Path(run.path) == Path(second) else way

    monkeypatch.setattr(repro, "way_of", elsewhere)
    made = whence.repro(cmp, tmp_path / "repro")
    assert (made.default, made.holds) == ("recorded", True)
    assert made.sentence.startswith(
        "what was recorded fails; the target ran on xpu:7, which this machine has not; passes"
    )
    assert "tensor.to('xpu:7')" in Path(made.path).read_text()


@pytest.mark.slow
def test_a_model_stands_in_for_a_program_that_was_not_recorded(tmp_path):
    def without(path, **changed):
        torch.manual_seed(0)
        net = Net(**changed).eval()
        with torch.no_grad(), whence.capture(net, path, programs=False):
            net(torch.randn(12, 16))
        return path

    def model():
        torch.manual_seed(0)
        return Net().eval()

    first, second = without(tmp_path / "ref"), without(tmp_path / "tgt", eps=1e-2)
    cmp = compared(tmp_path, first, second)
    with pytest.raises(
        whence.errors.ReplayRefused, match=r"programs were not recorded[\s\S]*whence repro --model"
    ):
        whence.repro(cmp, tmp_path / "repro")
    made = whence.repro(cmp, tmp_path / "repro", model=model)
    assert made.operators == ("aten.native_layer_norm.default",)
    assert (made.how, made.holds) == ("recorded", True)
    assert (
        "the target's own operators are not known (programs were not recorded); the reference's "
        "are run" in made.notes
    )


def test_what_is_asked_for_must_be_there(tmp_path, reference, capsys):
    cmp = compared(tmp_path, reference, captured(tmp_path / "tgt", eps=1e-2))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert cli.execute(["repro", str(cmp), "-o", str(tmp_path / "full")]) == 3
    assert "already holds files" in capsys.readouterr().err
    assert cli.execute(["repro", str(cmp), "-o", str(tmp_path / "x"), "--finding", "99"]) == 3
    assert "there is no finding 99" in capsys.readouterr().err
    whence.compare(reference, reference, output=tmp_path / "same")
    assert cli.execute(["repro", str(tmp_path / "same"), "-o", str(tmp_path / "x")]) == 3
    assert "names no operator at fault" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "tgt")
    assert cli.execute(["repro", str(cmp), "-o", str(tmp_path / "x")]) == 3
    assert "is not there" in capsys.readouterr().err


def test_no_run_writes_only(tmp_path, reference, capsys):
    cmp = compared(tmp_path, reference, captured(tmp_path / "tgt", eps=1e-2))
    assert (
        cli.execute(
            ["repro", str(cmp), "-o", str(tmp_path / "repro"), "--no-run", "--format", "json"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["holds"], told["seen"]) == (None, {})
    assert sorted(p.name for p in (tmp_path / "repro").iterdir()) == [
        "repro.py",
        "repro.safetensors",
    ]
