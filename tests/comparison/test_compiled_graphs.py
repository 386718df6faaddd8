"""Compiled graphs compared: clean ones are silent, faults of the compiler are found at their node,
roundings left out are not a fault.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402
from handmade import bfloat16, record  # noqa: E402
from whence.comparison.options import CompareOptions  # noqa: E402
from whence.comparison.pipeline import compare_runs  # noqa: E402
from whence.records import Call, MemoryRun, Operation, Program, Ref  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 32),
            nn.ReLU(),
            nn.Linear(32, width),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(torch.log1p(self.blocks(x).sigmoid()))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().eval().to(dtype)


def tensor(dtype=torch.float32):
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def captured(path, mode, dtype=torch.float32, run=None, **options):
    """A run of the net, compiled ("exact", "fx") or not ("eager"), with torch as fresh as a test
    can have it.
    """
    run = run or (lambda model: model(tensor(dtype)))
    torch._dynamo.reset()
    model = net(dtype)
    with torch.no_grad():
        if mode == "eager":
            with whence.capture(model, path):
                run(model)
        else:
            with whence.compile(model, path, mode=mode, **options) as compiled:
                run(compiled)
    return path


def pre_grad_fault(graph):
    """What c10 of the cases plants: another epsilon in one layer norm, before inductor sees it."""
    found = [n for n in graph.nodes if n.target is nn.functional.layer_norm]
    found[1].update_arg(4, 1e-1) if len(found[1].args) > 4 else found[1].update_kwarg("eps", 1e-1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from torch._inductor import config

    folder = tmp_path_factory.mktemp("graphs")
    made = {mode: captured(folder / mode, mode) for mode in ("eager", "fx", "exact")}
    made |= {
        f"{mode}16": captured(folder / f"{mode}16", mode, torch.bfloat16)
        for mode in ("eager", "fx", "exact")
    }
    with config.patch("cpp.inject_relu_bug_TESTING_ONLY", "accuracy"):
        made["relu"] = captured(folder / "relu", "exact")
    with config.patch("cpp.inject_log1p_bug_TESTING_ONLY", "accuracy"):
        made["log1p"] = captured(folder / "log1p", "exact")
    made["pass"] = captured(
        folder / "pass", "exact", options={"pre_grad_custom_pass": pre_grad_fault}
    )
    return made


def compared(runs, reference, target):
    return whence.compare(runs[reference], runs[target])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "16"])
@pytest.mark.parametrize(
    "pair",
    [
        ("fx", "exact"),
        ("exact", "fx"),
        ("exact", "exact"),
        ("eager", "exact"),
        ("exact", "eager"),
        ("eager", "fx"),
        ("fx", "eager"),
    ],
)
def test_clean_pairs_are_silent(runs, pair, dtype):
    found = compared(runs, *(side + dtype for side in pair))
    assert (found.status, found.unmatched, found.incomparable) == ("same", 0, 0)
    assert found.coverage.share == 1
    if "exact" in pair and pair[0] != pair[1]:
        assert found.evidence.startswith("replay")


@pytest.mark.slow
def test_the_answer_says_what_the_capture_changed(runs):
    from whence.report.answer import answer

    text = answer(compared(runs, "exact", "exact16"))
    assert text.count("observer effect  reference: none in 1 graph") == 1
    assert text.count("observer effect  target: none in 1 graph") == 1
    assert text.count("observer") == 2


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["fx", "exact", "eager"])
def test_a_broken_kernel_is_named_with_its_node_from_one_run(runs, reference):
    found = compared(runs, reference, "relu")
    assert found.status == "different"
    (finding,) = found.findings
    assert finding.name == "blocks.0.act"
    assert finding.also == (
        "blocks.1.act",
    )  # downstream of the first, and judged on what it was given
    assert finding.evidence == "replay"
    assert "node relu, kernel cpp_fused_relu" in finding.sentence
    if reference != "eager":
        assert finding.cause == "kernel"
        assert finding.source.split("/")[-1].startswith("test_compiled_graphs.py:")


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["fx", "exact", "eager"])
def test_a_fault_of_a_pass_over_the_graph_is_named(runs, reference):
    (finding,) = compared(runs, reference, "pass").findings
    assert finding.name.startswith("blocks.1.norm")
    if reference == "fx":
        assert finding.cause == "semantic"
        assert "1e-05 in the reference, 0.1 in the target" in finding.sentence


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["fx", "exact", "eager"])
def test_a_broken_kernel_of_a_containers_own_code_is_named(runs, reference):
    """Fused with the norm behind it: what that kernel leaves is wrong."""
    (finding,) = compared(runs, reference, "log1p").findings
    assert "log1p" in finding.sentence
    assert "kernel cpp_fused" in finding.sentence


@pytest.mark.slow
def test_the_operators_of_the_reference_against_kernels(runs, tmp_path):
    torch.manual_seed(0)
    model = net()
    with torch.no_grad(), whence.capture(model, tmp_path / "op", level="op"):
        model(tensor())
    for target, status in (("exact", "same"), ("relu", "different")):
        found = whence.compare(tmp_path / "op", runs[target])
        assert found.status == status
        assert found.coverage.share <= 1
    assert found.findings[0].name == "blocks.0.act"


@pytest.mark.slow
def test_a_broken_reference_is_named_as_such(runs):
    for target in ("fx", "eager"):
        (finding,) = compared(runs, "relu", target).findings
        assert (finding.name, finding.side) == ("blocks.0.act", "reference")


@pytest.mark.slow
def test_shapes_that_change_and_a_step_of_training(tmp_path):
    def shapes(model):
        for n in (3, 5, 7):
            model(tensor()[:, :n] if n < 6 else tensor().repeat(1, 2, 1)[:, :n])

    def training(model):
        with torch.enable_grad():
            model(tensor()).square().mean().backward()

    for name, run in (("shapes", shapes), ("training", training)):
        made = {
            mode: captured(tmp_path / f"{name}-{mode}", mode, run=run) for mode in ("fx", "exact")
        }
        found = compared(made, "fx", "exact")
        assert (found.status, found.unmatched) == ("same", 0)
        judged = {c.phase for c in (whence.open_run(made["fx"]).calls) if c.kind == "operator"}
        assert judged == ({"forward"} if name == "shapes" else {"forward", "backward"})
        assert found.coverage.share == 1


# ---- by hand


def elided(kept, fault=0.0):
    """bf16 x, y: s = x + y; r = s * x. kept: s stays in float32 inside the kernel. Returns
    (reference, target).
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(64, 64)).astype(bfloat16) for _ in range(2))
    exact = x.astype(np.float32) + y.astype(np.float32)
    rounded = (exact.astype(bfloat16).astype(np.float32) * x.astype(np.float32)).astype(bfloat16)
    other = (exact * x.astype(np.float32) * (1 + fault)).astype(bfloat16) if kept else rounded
    operations = (
        Operation("aten.add.Tensor", ({"in": 0}, {"in": 1})),
        Operation("aten.mul.Tensor", ({"op": [0, 0]}, {"in": 0})),
    )
    program = Program(
        "p",
        operations,
        ("input.0", "input.1"),
        (("output.0", {"op": [1, 0]}),),
        base="bfloat16",
        input_dtypes=("bfloat16",) * 2,
        names=("add", "mul"),
        scopes=("", ""),
    )

    def run(result, mode, more):
        arrays = dict(enumerate((x, y, result)))
        refs = Ref("input.0", 0), Ref("input.1", 1), Ref("output.0", 2)
        calls = [
            Call(
                0,
                "",
                "Net",
                0,
                2,
                op="mul",
                op_type="mul",
                kind="operator",
                leaf=True,
                parent=1,
                refs=(Ref("output.0", 2),),
                **more,
            ),
            Call(
                1,
                "",
                "Net",
                0,
                1,
                op="0/0",
                op_type="graph",
                kind="graph",
                parent=2,
                program="p",
                arguments={"mode": mode},
                refs=refs,
            ),
            Call(2, "", "Net", 0, 0, op_type="Net", refs=refs),
        ]
        return MemoryRun(
            calls, [record(i, a) for i, a in arrays.items()], arrays, programs={"p": program}
        )

    return run(rounded, "fx", {}), run(
        other, "exact", {"arguments": {"kernel": "k"}, "origins": ("add", "mul")}
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_rounding_that_a_kernel_leaves_out_is_no_fault(kept):
    found = compare_runs(*elided(kept=kept), CompareOptions(threads=1))
    assert found.status == "same"


def test_a_fault_beside_it_is_found():
    found = compare_runs(*elided(kept=True, fault=0.04), CompareOptions(threads=1))
    (finding,) = found.findings
    assert "node mul, kernel k computes add, mul" in finding.sentence
