"""Compiled graphs: what their code computes is captured, nothing it computes changes, and nothing
of ours stays behind.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from live_torch import bits, insides, process, random_states, seeded, slots, tensor
from torch import nn

import warm
import whence
from whence.comparison.replays.self_check import check
from whence.errors import CaptureError, UsageError
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled import inductor_taps as inductor
from whence.instrument.torch.compiled import observer_effect as effect
from whence.replay.validation import load
from whence.store import open_run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # of torch's own compilers, on themselves
]


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):  # (batch, time, width)
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k = (torch.cat((-y[..., 4:], y[..., :4]), -1) for y in (q, k))  # as rotary embeddings do
        x = x + self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Net(), Net()

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(y)


def made(kind=Net, dtype=torch.float32):
    seeded()
    return kind().eval().to(dtype)


def uninstrumented(model, *inputs, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, **options)(*inputs)


def graph_run(model, path, *inputs, steps=1, **options):
    """(what the last call returned, the run)."""
    torch._dynamo.reset()
    with torch.no_grad(), whence.compile(model, path, **options) as compiled:
        for _ in range(steps):
            out = compiled(*inputs)
    run = open_run(path)
    assert run.ended == ""
    assert [n for n in run.notes if n.kind == "error" or "could not" in n.text] == []
    return out, run


def of_kind(run, kind):
    return sorted((c for c in run.calls if c.kind == kind), key=lambda c: c.order)


def values(run):
    """(phase, step, scope, node, occurrence) -> the float64 value that was captured."""
    return {
        (c.phase, c.step, c.scope, c.op, c.occurrence): tensor(run, c, "output.0").double().numpy()
        for c in of_kind(run, "operator")
        if tensor(run, c, "output.0").is_floating_point()
    }


def text_of(run, name):
    return [
        f.read_text()
        for f in sorted(Path(run.path).glob(f"dynamo_{name}_graph_*_rank_0_pid_*_ts_*.txt"))
    ]


TOKENS = torch.arange(12).reshape(2, 6)
LINE = re.compile(
    r'^\s+(\w+): "(f32|bf16)\[[^"]*" = (?:torch\.ops\.(\w+)\.(\w+)\.\w+\(|(\w+)\[\d+\])',
    re.MULTILINE,
)
VIEWS = {
    "permute",
    "view",
    "reshape",
    "expand",
    "split",
    "select",
    "slice",
    "unsqueeze",
    "squeeze",
    "t",
    "transpose",
    "alias",
}


# ---- exact


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["fp32", "bf16"],
)
def test_exact_gives_the_bits_of_an_uninstrumented_compile_and_names_what_kernels_leave(
    tmp_path, dtype
):
    model = made(Model, dtype)
    bare = uninstrumented(model, TOKENS)
    before = insides(model), process()
    out, run = graph_run(model, tmp_path / "run", TOKENS, steps=2, graph_buffers=True)
    assert bits(out) == bits(bare)
    assert (insides(model), process()) == before
    buffers = of_kind(run, "operator")
    named = [c for c in buffers if not c.notes]
    assert len(named) >= 0.8 * len(buffers) > 0
    # A Linear is a matrix product, and what it computes is what the eager module computes.
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, __, out, name=name: seen.__setitem__(name, out.detach())
            )
    with torch.no_grad():
        model(TOKENS)
    for name, eager in seen.items():
        (call,) = [
            c
            for c in named
            if c.scope == name and c.step == 1 and c.op_type in ("addmm", "mm", "bmm")
        ]
        assert call.source.startswith(__file__ + ":")
        assert call.op in call.origins
        assert call.arguments["kernel"].startswith("extern_kernels.")
        assert call.arguments["overload"] == f"aten.{call.op_type}.default"
        assert call.phase == "forward" and call.leaf and call.no_program
        found = tensor(run, call, "output.0")
        close = {"rtol": 0, "atol": 2e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(found.reshape(eager.shape), eager, **close)


def test_a_buffer_holds_the_value_of_the_node_it_is_named_after(tmp_path):
    """Oracle: the graph node by node, in torch's own operators."""
    model = made(Model)
    _, exact = graph_run(model, tmp_path / "exact", TOKENS)
    _, eager = graph_run(model, tmp_path / "fx", TOKENS, mode="fx")
    reference, found = values(eager), values(exact)
    assert len(found) > 20
    assert {k[3].partition("_")[0] for k in found} >= {"cat", "addmm", "neg"}
    for key, value in found.items():
        np.testing.assert_allclose(
            value.reshape(reference[key].shape),
            reference[key],
            rtol=1e-5,
            atol=1e-5,
            err_msg=str(key),
        )


def test_a_graph_is_a_call_with_its_parameters_its_program_and_its_texts(tmp_path):
    model = made(Breaks)
    x = torch.randn(3, 6)
    out, run = graph_run(model, tmp_path / "run", x, steps=2)
    graphs = of_kind(run, "graph")
    assert [(c.op, c.step, c.occurrence, c.phase) for c in graphs] == [
        (i, s, 0, "forward") for s in (0, 1) for i in ("0/0", "1/0")
    ]
    first, second = graphs[:2]
    assert run.calls[first.parent].parent == -1 and run.calls[first.parent].kind == "module"
    assert {s for s in slots(first) if s.startswith("param.")} == {
        f"param.a.{n}.{p}" for n in ("fc1", "fc2") for p in ("weight", "bias")
    }
    assert torch.equal(tensor(run, second, "output.0"), out)
    assert torch.equal(tensor(run, second, "param.b.fc1.bias"), model.b.fc1.bias.detach())
    assert first.arguments["mode"] == "exact"
    scopes = {c.scope for c in of_kind(run, "operator") if c.parent == second.id}
    assert {"b.fc1", "b.fc2"} <= scopes and not any(s.startswith("a") for s in scopes)
    assert len(text_of(run, "original")) == len(text_of(run, "optimized")) == 2
    assert f"dynamo_optimized_graph_{first.arguments['graph']}_" in " ".join(
        p.name for p in Path(run.path).iterdir()
    )
    assert "torch.ops.aten.addmm.default" in text_of(run, "optimized")[0]
    assert re.search(r"# cpp_fused_\w+: .*mul", text_of(run, "optimized")[0])
    program = run.programs[first.program]
    assert len(program.names) == len(program.scopes) == len(program.operations)
    assert [o.name for o, n in zip(program.operations, program.names) if n == "addmm"] == [
        "aten.addmm.default"
    ]


def test_the_program_of_a_graph_reproduces_the_graph_run_node_by_node(tmp_path):
    model = made(Model)
    _, run = graph_run(model, tmp_path / "run", TOKENS, mode="fx")
    (graph,) = of_kind(run, "graph")
    arrays = {r.slot: run.array(r.record) for r in graph.refs}
    loaded = load(run.programs[graph.program])
    inputs = {s: a for s, a in arrays.items() if s.startswith("input.")}
    params = {s: a for s, a in arrays.items() if s.startswith("param.")}
    outputs = {s: a for s, a in arrays.items() if s.startswith("output.")}
    assert check(loaded, inputs, params, outputs) == ""
    assert outputs


def test_the_kernel_of_a_buffer_is_told_with_the_nodes_between_what_it_reads_and_what_it_leaves(
    tmp_path,
):
    _, run = graph_run(made(), tmp_path / "run", torch.randn(3, 6))
    operators = of_kind(run, "operator")
    gelu = next(c for c in operators if "gelu" in c.arguments["kernel"])
    assert "erf" in gelu.origins and "addmm" not in gelu.origins
    before = next(c for c in operators if c.op == "addmm")
    assert gelu.refs[0].record == before.refs[-1].record
    assert gelu.refs[0].slot == "input.0" and gelu.refs[-1].slot == "output.0"


def test_one_graph_that_serves_two_modules_names_the_one_it_serves(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Net(), Net()])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    seeded()
    model = Two().eval()
    for part in model.parts:
        part.compile(dynamic=False)
    torch._dynamo.reset()
    with torch.no_grad(), whence.capture(model, tmp_path / "run", level="graph"):
        model(torch.randn(3, 6))
    run = open_run(tmp_path / "run")
    graphs = of_kind(run, "graph")
    assert [run.calls[g.parent].scope for g in graphs] == ["parts.0", "parts.1"]
    assert graphs[0].op == graphs[1].op
    for place, graph in enumerate(graphs):
        inside = {c.scope for c in run.calls if c.parent == graph.id}
        assert (
            {f"parts.{place}.fc1", f"parts.{place}.fc2"}
            <= inside
            <= {f"parts.{place}{s}" for s in ("", ".fc1", ".fc2")}
        )
        assert f"param.parts.{place}.fc1.weight" in slots(graph)


def test_dynamic_shapes_have_a_graph_for_each_recompile_and_a_program_for_each_size(tmp_path):
    model = made()
    torch._dynamo.reset()
    with torch.no_grad(), whence.compile(model, tmp_path / "run") as compiled:
        for rows in (3, 4, 5):
            compiled(torch.randn(rows, 6))
    run = open_run(tmp_path / "run")
    graphs = of_kind(run, "graph")
    assert [g.op for g in graphs] == ["0/0", "0/1", "0/1"]
    assert len({g.program for g in graphs}) == 3
    assert [[v for k, v in g.arguments.items() if k.startswith("input.")] for g in graphs] == [
        [],
        [4],
        [5],
    ]
    for rows, graph in zip((3, 4, 5), graphs):
        assert {run.records[r.record].shape[0] for r in graph.refs if r.slot == "output.0"} == {
            rows
        }
        assert any(
            c.op.startswith("addmm") and tensor(run, c, "output.0").shape == (rows, 8)
            for c in run.calls
            if c.parent == graph.id
        )


def test_values_that_no_node_has_are_left_out_and_counted(tmp_path):
    _, few = graph_run(made(Model), tmp_path / "few", TOKENS)
    _, every = graph_run(made(Model), tmp_path / "every", TOKENS, graph_buffers=True)
    unnamed = [c for c in of_kind(every, "operator") if c.notes]
    assert unnamed and all(c.scope == "" and c.op.startswith("buf") for c in unnamed)
    assert len(of_kind(few, "operator")) == len(of_kind(every, "operator")) - len(unnamed)
    assert any(
        f"{len(unnamed)} not kept: no node of the graph is its value" in n.text for n in few.notes
    )


# ---- deep, and node by node


def test_deep_takes_every_node_that_has_a_value(tmp_path):
    """What there is to take is read from the text of the graph."""
    _, run = graph_run(made(Model), tmp_path / "run", TOKENS, mode="deep", graph_anyway=True)
    (text,) = text_of(run, "optimized")
    picked = {name: m for name, _, _, _, m in LINE.findall(text) if m}
    wanted = {name for name, _, space, op, _ in LINE.findall(text) if space and op not in VIEWS}
    wanted |= {
        name
        for name, source in picked.items()
        if source not in VIEWS and not source.startswith("split")
    }
    found = {c.op for c in of_kind(run, "operator")}
    assert len(wanted) > 30
    assert len(wanted & found) >= 0.95 * len(wanted)
    (graph,) = of_kind(run, "graph")
    assert graph.arguments["mode"] == "deep"
    reference = values(graph_run(made(Model), tmp_path / "fx", TOKENS, mode="fx")[1])
    assert set(values(run)) == set(reference)
    for key, value in values(run).items():
        np.testing.assert_allclose(value, reference[key], rtol=1e-5, atol=1e-5, err_msg=str(key))


@pytest.mark.slow
def test_deep_falls_back_where_it_changes_the_result(tmp_path):
    """In 16 bits a fused kernel goes on in 32; a tap has every value rounded."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(64)

        def forward(self, x):
            return self.norm(nn.functional.gelu(self.norm(x) + x.sin())).softmax(-1)

    x = torch.randn(4, 16, 64).bfloat16()
    model = made(Chain, torch.bfloat16)
    bare = uninstrumented(model, x)
    out, run = graph_run(model, tmp_path / "run", x, mode="deep")
    (graph,) = of_kind(run, "graph")
    assert graph.arguments["mode"] == "exact"
    assert bits(out) == bits(bare)
    told = [n.text for n in run.notes if n.kind == "observer"]
    assert any("mode deep changes the result" in t and "ulp" in t for t in told) and any(
        "observer effect: none" in t for t in told
    )
    other, anyway = graph_run(model, tmp_path / "anyway", x, mode="deep", graph_anyway=True)
    assert of_kind(anyway, "graph")[0].arguments["mode"] == "deep"
    assert not torch.equal(other, bare)
    assert any(re.search(r"observer effect: \d+ ulp", n.text) for n in anyway.notes)


def test_node_by_node_every_node_has_a_program_that_reproduces_it(tmp_path):
    _, run = graph_run(made(Model), tmp_path / "run", TOKENS, mode="fx")
    checked = 0
    for call in of_kind(run, "operator"):
        assert call.origins == (call.op,)
        if not call.program:
            continue
        arrays = {r.slot: run.array(r.record) for r in call.refs}
        strides = {
            r.slot: run.records[r.record].stride for r in call.refs if run.records[r.record].stride
        }
        given = {s: a for s, a in arrays.items() if s.startswith("input.")}
        assert (
            check(
                load(run.programs[call.program]),
                given,
                {},
                {"output.0": arrays["output.0"]},
                strides,
            )
            == ""
        ), call.op
        checked += 1
    assert checked == len(of_kind(run, "operator")) > 30


def test_both_sides_have_the_same_names(tmp_path):
    model = made(Breaks)
    x = torch.randn(3, 6)
    _, fx = graph_run(model, tmp_path / "fx", x, mode="fx", steps=2)
    _, exact = graph_run(model, tmp_path / "exact", x, steps=2)
    keys = {(c.kind, *c.key()[1:]) for c in fx.calls}
    assert {(c.kind, *c.key()[1:]) for c in exact.calls} <= keys


@pytest.mark.slow
def test_code_in_cpp_alone_is_tapped(tmp_path):
    model, x = made(), torch.randn(3, 6)
    bare = uninstrumented(model, x, options={"cpp_wrapper": True})
    out, run = graph_run(model, tmp_path / "run", x, options={"cpp_wrapper": True})
    assert bits(out) == bits(bare)
    assert of_kind(run, "graph")[0].arguments["mode"] == "deep"
    assert {c.scope for c in of_kind(run, "operator")} == {"", "fc1", "fc2"}


# ---- training, autocast, randomness


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.fc(x)).relu())


def trained(model, compiled):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        compiled(torch.ones(4, 6) * torch.arange(4.0)[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(dict(model.state_dict())), random_states()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "deep"])
def test_a_training_step_is_captured_with_its_backward_and_changes_nothing(tmp_path, mode):
    seeded()
    model = Trained()
    torch._dynamo.reset()
    bare = trained(model, torch.compile(model))
    seeded()
    model = Trained()
    torch._dynamo.reset()
    with whence.compile(model, tmp_path / "run", mode=mode) as compiled:
        assert trained(model, compiled) == bare
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    graphs = of_kind(run, "graph")
    assert [(g.phase, g.step, g.op) for g in graphs] == [
        (p, s, "0/0") for s in (0, 1) for p in ("forward", "backward")
    ]
    backward = graphs[1]
    region = run.calls[backward.parent]
    assert (region.kind, region.op_type, region.phase, region.step) == (
        "region",
        "backward",
        "backward",
        0,
    )
    assert {"fc", "norm"} <= {c.scope for c in run.calls if c.parent == backward.id}
    assert "mutated.norm.running_mean" in slots(graphs[0])
    assert graphs[0].no_program.startswith("draws random numbers")
    assert [n.text for n in run.notes if n.kind == "observer" and "none" not in n.text] == []


@pytest.mark.slow
def test_a_buffer_that_one_kernel_clears_and_another_adds_to_is_taken_when_it_is_whole(tmp_path):
    """The gradient of an embedding."""
    found = {}
    for mode in ("fx", "exact"):
        seeded()
        torch._dynamo.reset()
        with whence.compile(Model(), tmp_path / mode, mode=mode) as compiled:
            compiled(TOKENS).square().mean().backward()
        found[mode] = values(open_run(tmp_path / mode))
    (key,) = [k for k in found["exact"] if "put" in k[3] or "scatter" in k[3]]
    assert np.abs(found["fx"][key]).max() > 1e-3
    np.testing.assert_allclose(found["exact"][key], found["fx"][key], rtol=1e-4, atol=1e-7)


def test_under_autocast_the_dtypes_are_those_of_the_compiled_graph(tmp_path):
    model, x = made(), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        bare = uninstrumented(model, x)
        out, run = graph_run(model, tmp_path / "run", x)
    assert bits(out) == bits(bare)
    assert {
        tensor(run, c, "output.0").dtype for c in of_kind(run, "operator") if c.op_type == "addmm"
    } == {torch.bfloat16}


# ---- several models, errors, ends


def test_two_models_go_into_two_runs(tmp_path):
    a, b, x = made(), made(Breaks), torch.randn(3, 6)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        whence.compile(a, tmp_path / "a") as one,
        whence.compile(b, tmp_path / "b") as two,
    ):
        one(x), two(x), one(x)
    first, second = open_run(tmp_path / "a"), open_run(tmp_path / "b")
    assert [g.op for g in of_kind(first, "graph")] == ["0/0", "0/0"]
    assert [g.op for g in of_kind(second, "graph")] == ["0/0", "1/0"]
    assert not any(c.scope.startswith(("a", "b")) for c in first.calls)


@torch.library.custom_op("whence_tests::stop", mutates_args=())
def stop(x: torch.Tensor, how: str) -> torch.Tensor:
    if x.sum() > 0:
        raise KeyboardInterrupt if how == "interrupt" else RuntimeError("stopped")
    return x.clone()


@stop.register_fake
def _(x, how):
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("how", "kind"), [("interrupt", KeyboardInterrupt), ("error", RuntimeError)]
)
def test_what_leaves_a_graph_leaves_it_with_the_run_whole(tmp_path, how, kind):
    class Stops(Net):
        def forward(self, x):
            return torch.ops.whence_tests.stop(self.fc1(x).abs() * x.sum(), how)

    seeded()
    model = Stops().eval()
    torch._dynamo.reset()
    with torch.no_grad(), whence.compile(model, tmp_path / "run") as compiled:
        with pytest.raises(kind):
            compiled(torch.ones(3, 6))
        out = compiled(-torch.ones(3, 6))
    assert out.shape == (3, 8)
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    failed, whole = of_kind(run, "graph")
    assert failed.error.startswith(kind.__name__) and not failed.slots("output")
    assert whole.error == "" and torch.equal(tensor(run, whole, "output.0"), out)
    assert any("not measured: it runs whence_tests" in n.text for n in run.notes)


def test_after_close_the_module_goes_on_and_nothing_of_ours_is_there(tmp_path):
    from torch._inductor import codegen, compile_fx, config, graph, scheduler
    from torch._inductor.utils import run_and_get_code

    def places():
        cpp = codegen.cpp.CppScheduling
        return (
            graph.GraphLowering.run,
            graph.GraphLowering.save_output_code,
            cpp.flush,
            cpp.define_kernel,
            cpp.codegen_template,
            scheduler.Scheduler.codegen_extern_call,
            compile_fx.compile_fx,
            compile_fx.compile_fx_inner,
            torch._TorchCompileInductorWrapper.__call__,
            config.fx_graph_cache,
            config.post_grad_custom_post_pass,
            config.trace.provenance_tracking_level,
            torch._functorch.config.enable_autograd_cache,
            process(),
        )

    model, x = made(), torch.randn(3, 6)
    inductor.check("exact")
    before = places()
    torch._dynamo.reset()
    with torch.no_grad(), whence.compile(model, tmp_path / "run", mode="deep") as compiled:
        out = compiled(x)
        assert places()[:-1] == before[:-1]
    size = sum(f.stat().st_size for f in (tmp_path / "run").rglob("*"))
    with torch.no_grad():
        assert torch.equal(compiled(x), out)
        compiled(torch.randn(5, 6))
        compiled.close()
        torch._dynamo.reset()
        again, (code,) = run_and_get_code(torch.compile(model), x)
    assert places() == before
    assert "whence" not in code
    assert torch.equal(again, out)
    assert sum(f.stat().st_size for f in (tmp_path / "run").rglob("*")) == size


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 6)
    def forward(self, x):
        return self.fc(x).tanh()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), Part()
        self.b.compile(dynamic=False)
    def forward(self, x):
        return self.b(self.a(x).relu())
with torch.no_grad():
    print(Net()(torch.ones(3, 6)).sum().item().hex())
    print(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(3)).sum().item().hex())
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"], file=sys.stderr)
"""


@pytest.mark.slow
def test_a_program_is_captured_without_an_edit_and_its_caches_stay_clean(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    python = [warm.TORCH, str(tmp_path / "script.py")]

    def bare():
        done = subprocess.run(python, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr.splitlines()[-1]

    command = [
        warm.TORCH,
        "-m",
        "whence",
        "run",
        "--level",
        "graph",
        "--no-bare",
        "-o",
        str(tmp_path / "run"),
        "--",
        *python,
    ]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    after, hits = bare()
    assert hits == "0"  # what was captured left nothing in the caches
    again_out, hits = bare()
    assert (again_out, hits != "0") == (after, True)
    assert first.stdout == after
    again = subprocess.run(
        [*command[:4], "--force", *command[4:]], capture_output=True, text=True
    )  # on warm caches
    assert again.returncode == 0, again.stderr
    assert again.stdout == after
    again_out, hits = bare()
    assert (again_out, hits != "0") == (after, True)
    run = open_run(tmp_path / "run")
    (graph,) = of_kind(run, "graph")
    assert run.calls[graph.parent].scope == "b"
    assert {c.scope for c in of_kind(run, "operator")} == {"b", "b.fc"}
    assert any(c.scope == "a" and c.kind == "module" for c in run.calls)
    assert any("backend aot_eager" in n.text for n in run.notes if n.kind == "inside-not-seen")


BACKEND = """
import sys, torch
from torch._inductor.compile_fx import compile_fx
torch.set_num_threads(1)
torch.manual_seed(0)
class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
    def forward(self, x):
        return self.norm(x + torch.nn.functional.gelu(self.fc(x)))
def backend(gm, inputs):
    norms = [n for n in gm.graph.nodes if n.target is torch.nn.functional.layer_norm]
    if "--bug" in sys.argv:
        norms[1].args = (*norms[1].args[:4], 1e-2)
        gm.recompile()
    if "--eager" in sys.argv:
        return gm.forward
    if "--late" in sys.argv:
        from torch._inductor import compile_fx as module
        return module.compile_fx(gm, inputs)
    return compile_fx(gm, inputs)
model = torch.compile(torch.nn.Sequential(Part(), Part(), Part()).eval(), backend=backend)
with torch.no_grad():
    print(model(torch.randn(4, 16)).sum().item().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [["--late"], [], ["--eager"]])
def test_a_backend_of_ones_own_is_captured_and_its_pass_found(tmp_path, way):
    """It hands its graph to inductor, or has Python run it."""
    (tmp_path / "script.py").write_text(BACKEND)
    python = [warm.TORCH, str(tmp_path / "script.py"), *way]
    for name, how, args in (("ref", ["--graph-mode", "fx"], []), ("tgt", [], ["--bug"])):
        command = [
            warm.TORCH,
            "-m",
            "whence",
            "run",
            "--level",
            "graph",
            *how,
            "-o",
            str(tmp_path / name),
            "--",
            *python,
            *args,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if args:
            assert (
                done.stdout
                == subprocess.run(
                    [*python, *args], capture_output=True, text=True, check=True
                ).stdout
            )
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert (result.status, [(f.name, f.cause) for f in result.findings]) == (
        "different",
        [("1.norm", "semantic")],
    )


@pytest.mark.slow
def test_a_graph_that_python_runs_keeps_its_own_gradients(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        BACKEND[: BACKEND.index("with torch.no_grad")]
        + """
model(torch.randn(4, 16)).square().sum().backward()
print([p.grad.sum().item().hex() for p in model.parameters()])
"""
    )
    python = [warm.TORCH, str(script), "--eager"]
    command = [
        warm.TORCH,
        "-m",
        "whence",
        "run",
        "--level",
        "graph",
        "-o",
        str(tmp_path / "run"),
        "--",
        *python,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == subprocess.run(python, capture_output=True, text=True, check=True).stdout
    assert any(
        "gradients would come from another graph" in n.text
        for n in open_run(tmp_path / "run").notes
    )


# ---- refusals


def test_a_torch_without_the_places_is_refused_in_one_sentence(tmp_path, monkeypatch):
    from torch._inductor.codegen.cpp import CppScheduling

    monkeypatch.delattr(CppScheduling, "flush")
    with pytest.raises(
        CaptureError,
        match=r"mode exact: it has no torch\._inductor\.codegen\.cpp\.CppScheduling\.flush; "
        r"mode='deep'",
    ):
        whence.compile(made(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "max-autotune"}, "graph_mode: 'max-autotune' is not one of exact, deep, fx"),
        ({"backend": "eager"}, "takes no other backend"),
        ({"fullgrpah": True}, "unknown capture option 'fullgrpah'"),
        ({"graph_anyway": True}, "graph_anyway keeps mode deep"),
        ({"level": "op"}, "takes no level"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        whence.compile(made(), tmp_path / "run", **options)


def test_graph_options_need_the_level(tmp_path):
    with (
        pytest.raises(UsageError, match="graph_mode says how compiled graphs are captured"),
        whence.capture(made(), tmp_path, graph_mode="fx"),
    ):
        pass


# ---- parts


def test_differences_are_counted_in_steps_of_the_dtype():
    a = torch.tensor([1.0, -1.0, 0.0])
    b = torch.from_numpy(np.nextafter(a.numpy(), np.float32(9)))
    assert effect.difference([a], [a.clone()]) == ""
    assert effect.difference([a, a], [a, b]) == "1 ulp in 1 of 2 tensors"
    assert effect.difference([a.bfloat16()], [(a * 1.01).bfloat16()]) == "1 ulp in 1 of 1 tensors"
    assert effect.difference([torch.tensor([0.0])], [torch.tensor([-0.0])]) != ""
    nan = torch.tensor([float("nan")])
    assert effect.difference([nan], [nan.clone()]) == ""
    assert effect.difference([a], [a[:2]]).startswith("(2,)")
    assert effect.difference([a], []) == "0 tensors instead of 1"


def test_running_beside_the_program_changes_nothing_of_it():
    gm = torch.fx.symbolic_trace(lambda x: x)
    x, base = torch.zeros(3), torch.zeros(6)
    view = base[::2]

    def code(given):
        given[0].add_(torch.rand(3))
        given[1].add_(1)
        return [given[2] * 2]

    before = random_states()
    out = effect.silently(gm, code, [x, view, base], (), (0,))
    assert random_states() == before
    assert x.sum() == 0 and base.sum() == 0
    assert out[0].tolist() == [2, 0, 2, 0, 2, 0]  # the clones share memory as the inputs do
    assert out[1].sum() > 0


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("L['self']", ("", "self")),
        ("L['self'].fc", ("fc", "self")),
        ("L['self']._modules['blocks']._modules['0'].norm", ("blocks.0.norm", "self")),
        ("L['self'].layers[3].mlp", ("layers.3.mlp", "self")),
        ("G['model']._modules['fc']._parameters['weight']", ("fc.weight", "model")),
        ("L['self']._buffers['mean']", ("mean", "self")),
        ("L['fn'].__self__._modules['layers']._modules['0']", ("layers.0", "fn")),
        ("L['fn'].__closure__[0].cell_contents.fc", ("fc", "fn")),
    ],
)
def test_module_paths(text, path):
    assert nodes.module_path(text) == path
