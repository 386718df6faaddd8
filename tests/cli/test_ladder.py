"""`whence ladder` from outside: exit codes, what it keeps, JSON, and programs that it can say
nothing of.
"""

import json
import textwrap

import pytest

import inside
import warm

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

SCRIPT = """
    import sys
    import torch

    torch.set_num_threads(1)
    if "unseeded" not in sys.argv:
        torch.manual_seed(0)
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(torch.relu(self.fc(x)))

    def own(graph, inputs):
        if "fails" in sys.argv:
            raise RuntimeError("no backend today")
        return lambda *args: [out * 1.01 if "wrong" in sys.argv else out for out in graph.forward(*args)]

    def halves(x):
        return torch.softmax(x, -1) / 2

    net = Net().eval()
    if "relu" in sys.argv:
        import torch._inductor.config as inductor
        inductor.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
    if "never" not in sys.argv:
        net = torch.compile(net, backend="inductor" if "relu" in sys.argv else own)
    with torch.no_grad():
        if "function" in sys.argv:
            torch.compile(halves, backend=own, fullgraph=True)(torch.randn(4, 16))
        else:
            net(torch.randn(4, 16))
    print("the program's own words")
"""


def whence(place, *words):
    return inside.or_outside(place, "ladder", *words)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "infer.py").write_text(textwrap.dedent(SCRIPT))
    return folder


def climb(place, name, *words, before=()):
    return whence(place, "-o", name, *before, "--", warm.TORCH, "infer.py", *words)


@pytest.mark.slow
def test_a_clean_program_and_what_is_kept(place):
    done = climb(place, "clean")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NO STAGE           ")
    assert "own words" not in done.stdout
    assert done.stdout.endswith("kept in clean\n")
    kept = {path.name for path in (place / "clean").iterdir()}
    assert kept == {
        "aot_eager",
        "aot_eager_decomp_partition",
        "cmp-aot_eager",
        "cmp-aot_eager_decomp_partition",
        "cmp-eager-again",
        "cmp-inductor",
        "eager",
        "eager-again",
        "inductor",
        "ladder.json",
    }
    run = json.loads((place / "clean" / "aot_eager" / "run.json").read_text())
    assert run["options"]["rung"] == "aot_eager"
    refused = climb(place, "clean", "never")
    assert refused.returncode == 3
    assert "already holds a ladder; --force replaces it" in refused.stderr
    replaced = climb(place, "clean", "never", before=["--force"])
    assert replaced.returncode == 2, replaced.stderr
    assert (
        "the program never compiles (torch.compile is never asked for anything)" in replaced.stdout
    )
    assert not (place / "clean" / "inductor").exists()


@pytest.mark.slow
def test_a_stage_is_named_for_a_compiled_function_without_a_module(place):
    done = climb(place, "wrong", "function", "wrong", before=["--format", "json"])
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["stages"]) == ("different", ["own"])
    rungs = {r["name"]: r for r in found["rungs"]}
    assert rungs["inductor"]["verdict"] == "outside"
    assert rungs["inductor"]["evidence"] == "replay"
    assert rungs["inductor"]["rel_l2"] == pytest.approx(0.01, rel=1e-2)
    assert rungs["inductor"]["backends"] == ["own"]
    assert rungs["aot_eager"]["graphs"] == 1
    assert "inductor_dynamic_off is outside the noise: halves: introduced here" in found["sentence"]


@pytest.mark.slow
def test_a_rung_that_fails(place):
    done = climb(place, "fails", "fails")
    assert done.returncode == 2, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("UNDECIDED          inductor does not compile or run: ")
    assert "RuntimeError: no backend today" in first


def test_a_program_that_draws_lots(place):
    done = climb(place, "unseeded", "unseeded")
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(
        "UNDECIDED          the eager program does not do the same twice: "
    )
    assert "--seed N" in done.stdout


def test_what_cannot_be_run(place):
    done = whence(place, "-o", "none")
    assert (
        done.returncode,
        "no command given:  whence ladder -o DIR -- python infer.py" in done.stderr,
    ) == (3, True)
    done = whence(place, "-o", "none", "--", warm.TORCH, "-c", "raise SystemExit(7)")
    assert done.returncode == 3
    assert "ended with exit code 7" in done.stderr
    assert not (place / "none" / "ladder.json").exists()


@pytest.mark.slow
def test_torchs_bisector_over_processes(place):
    done = climb(place, "relu", "relu", before=["--bisect-pass"])
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("STAGE inductor     aot_eager_decomp_partition is ")
    assert ", inductor_dynamic_off is outside the noise: Net: introduced here" in done.stdout
    assert "PASS               inductor / lowerings / " in done.stdout
    assert " / relu\n" in done.stdout
    assert not (place / "relu" / "bisect").exists()
