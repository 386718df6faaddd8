"""`whence run` on programs that use the real torch: what they compute stays, what they called is in
the run.
"""

import json
import re
import subprocess
import textwrap

import pytest

import warm
from inside import or_outside as whence
from whence.store import open_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

MODEL = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    with torch.no_grad():
        for i in range(3):
            print(model(torch.full((2, 4), float(i))).tolist(), torch.rand(1).item())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "infer.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def test_a_model_is_captured_and_computes_the_same(tmp_path, script):
    text = script.read_text().replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
    script.write_text(text)
    bare = subprocess.run([warm.TORCH, script], capture_output=True, text=True, check=True)
    done = whence(tmp_path, "run", "-o", "ref", "--", warm.TORCH, "infer.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert re.search(r"captured 3 steps, 12 calls, .* in ref$", done.stderr.strip())
    run = open_run(tmp_path / "ref")
    assert run.ended == ""
    assert {call.scope for call in run.calls} == {"", "0", "1", "2"}
    assert "torch" in run.info.versions
    tree = whence(tmp_path, "show", "ref", "--tree")
    assert [line.split()[:2] for line in tree.stdout.splitlines()[1:5]] == [
        ["0", "Sequential"],
        ["1", "0"],
        ["2", "1"],
        ["3", "2"],
    ]
    one = whence(tmp_path, "show", "ref", "3:output.0", "--step", "1")
    assert "float32 [2, 2]" in one.stdout


@pytest.mark.slow
def test_seed_and_deterministic(tmp_path, script):
    text = (
        script.read_text() + "print(torch.are_deterministic_algorithms_enabled(), "
        "torch.backends.cudnn.deterministic)\n"
    )
    script.write_text(text)
    outputs = []
    for name in ("one", "two"):
        done = whence(
            tmp_path,
            "run",
            "-o",
            name,
            "--seed",
            "5",
            "--deterministic",
            "--",
            warm.TORCH,
            "infer.py",
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].endswith("True True\n")


def test_selection_from_the_command_line(tmp_path, script):
    done = whence(
        tmp_path,
        "run",
        "-o",
        "some",
        "--ids",
        "2,3",
        "--steps",
        "1:2",
        "--keep",
        "stats",
        "--",
        warm.TORCH,
        "infer.py",
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(whence(tmp_path, "show", "some", "--format", "json").stdout)
    captured = {(call["scope"], call["step"]) for call in shown["calls"] if call["refs"]}
    assert captured == {("1", 1), ("2", 1)}
    assert shown["info"]["options"] == {"ids": ["2", "3"], "steps": [[1, 2, 1]], "keep": "stats"}
    assert all(kind["kept_bytes"] == 0 for kind in shown["bytes"].values())


def test_a_selection_that_matches_nothing(tmp_path, script):
    done = whence(
        tmp_path, "run", "-o", "none", "--include", "layers.*", "--", warm.TORCH, "infer.py"
    )
    assert done.returncode == 3
    assert "nothing was captured" in done.stderr
    assert "include" in done.stderr.splitlines()[-1]


def test_torch_imported_but_no_module_called(tmp_path):
    done = whence(
        tmp_path,
        "run",
        "-o",
        "none",
        "--",
        warm.TORCH,
        "-c",
        "import torch; print(torch.ones(2).sum().item())",
    )
    assert (done.returncode, done.stdout) == (3, "2.0\n")
    assert "no module was called" in done.stderr


@pytest.mark.slow
def test_torchrun_ranks(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            with torch.no_grad():
                torch.nn.Linear(3, 3).eval()(torch.ones(1, 3))
            dist.destroy_process_group()
        """)
    )
    command = [
        warm.TORCH,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    done = whence(tmp_path, "run", "-o", "all", "--", *command)
    assert done.returncode == 0, done.stderr
    assert {call.rank for call in open_run(tmp_path / "all").calls} == {0, 1}
    done = whence(tmp_path, "run", "-o", "one", "--ranks", "1", "--", *command)
    assert done.returncode == 0, done.stderr
    assert {call.rank for call in open_run(tmp_path / "one").calls} == {1}


TWO_MODELS = """
    import sys
    import torch
    from torch import nn

    class Encoder(nn.Sequential):
        pass

    torch.manual_seed(0)
    encoder = Encoder(nn.Linear(16, 16), nn.GELU(sys.argv[1]))
    decoder = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    with torch.no_grad():
        decoder(encoder(torch.randn(3, 16)))
"""


def test_says_of_which_model_a_module_is(tmp_path):
    """Where a program calls several models on their own, a path within one says too little."""
    (tmp_path / "infer.py").write_text(textwrap.dedent(TWO_MODELS))
    for run, form in (("ref", "none"), ("new", "tanh")):
        done = whence(tmp_path, "run", "-o", run, "--", warm.TORCH, "infer.py", form)
        assert done.returncode == 0, done.stderr
    compared = whence(tmp_path, "compare", "ref", "new")
    assert re.search(r"^FAULT +1 .*, of Encoder$", compared.stdout, re.MULTILINE)
