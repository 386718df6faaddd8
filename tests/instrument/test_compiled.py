"""Compiled, scripted, traced and exported models: the same graphs and results with a capture around
them, the boundary recorded.
"""

import contextlib

import pytest
import torch
from live_torch import bits, call, captured, process, seeded, slots, tensor
from torch import nn

import whence
from whence.instrument.torch.compiled.listener import python_graph
from whence.instrument.torch.compiled.stages import _Rounding
from whence.store import open_run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # of torch's own compilers, on themselves
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Breaks(Net):
    def forward(self, x):
        y = self.act(self.fc1(x))
        torch._dynamo.graph_break()
        return x + self.fc2(y)


class BreaksInALoop(nn.Module):
    """Dynamo gives up on a frame that breaks inside a loop: it runs eagerly, and what it calls is
    compiled frame by frame.
    """

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Breaks(), Breaks()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x.relu()


class Recurrent(nn.Module):
    """Dynamo does not trace an LSTM: compiled code breaks off and calls the module, with dynamo
    waiting for the next frame.
    """

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 6)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x[None])
        return x + self.fc(hidden[-1])


class Outer(nn.Module):
    """Eager code around a compiled child, and a leaf whose helper calls compiled code."""

    def __init__(self, child):
        super().__init__()
        self.before, self.child, self.after, self.helped = (
            nn.Linear(6, 6),
            child,
            nn.Linear(6, 6),
            Helped(),
        )

    def forward(self, x):
        return self.helped(self.after(self.child(self.before(x))))


class Helped(nn.Module):
    def forward(self, x):
        return helper(x)


def helper(x):
    return FUNCTIONS["scale"](x) if "scale" in FUNCTIONS else x * 3


FUNCTIONS: dict = {}


@pytest.fixture(autouse=True)
def fresh():
    seeded()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    FUNCTIONS.clear()
    yield
    torch._dynamo.reset()


def counted():
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return graphs, breaks, counters["frames"]["total"], dict(counters["inline_call"])


def both(make, use, path):
    """(bits and counters without, the same with a capture, the run)."""
    shown = []
    for around in (lambda m: contextlib.nullcontext(), lambda m: whence.capture(m, path)):
        seeded()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make()
        before = process()
        with around(model), torch.no_grad():
            out = [bits(use(model, torch.randn(3, 6))) for _ in range(2)]
        assert process() == before
        shown.append((out, counted()))
    run = open_run(path)
    assert run.ended == ""
    assert [n for n in run.notes if n.kind == "error"] == []
    return *shown, run


@pytest.mark.parametrize("kind", [Net, Breaks, BreaksInALoop])
@pytest.mark.parametrize("how", ["compile", "method"])
def test_a_compiled_model(kind, how, tmp_path):
    def make():
        model = kind().eval()
        if how == "method":
            model.compile(backend="eager", fullgraph=kind is Net)
            return model
        return torch.compile(model, backend="eager", fullgraph=kind is Net)

    bare, with_capture, run = both(make, lambda m, x: m(x), tmp_path / "run")
    assert with_capture == bare
    root = call(run, "")
    assert root.notes == ("compiled: inside not seen",)
    assert {"input.0", "output.0"} <= set(slots(root))
    assert [c.step for c in run.calls if c.parent == -1] == [0, 1]
    assert root.program == ""


def test_what_dynamo_does_not_trace_runs_unseen(tmp_path):
    bare, with_capture, run = both(
        lambda: torch.compile(Recurrent().eval(), backend="eager"),
        lambda m, x: m(x),
        tmp_path / "run",
    )
    assert with_capture[0] == bare[0]
    assert [(c.scope, c.step, c.notes) for c in run.calls] == [
        ("", step, ("compiled: inside not seen",)) for step in (0, 1)
    ]
    assert {"input.0", "output.0"} <= set(slots(call(run, "")))


@pytest.mark.slow
def test_inductor(tmp_path):
    bare, with_capture, run = both(
        lambda: torch.compile(Net().eval(), backend="inductor", fullgraph=True),
        lambda m, x: m(x),
        tmp_path / "run",
    )
    assert with_capture == bare
    assert call(run, "").notes == ("compiled: inside not seen",)


def test_a_compiled_child(tmp_path):
    def make():
        return Outer(torch.compile(Net(), backend="eager", fullgraph=True)).eval()

    bare, with_capture, run = both(make, lambda m, x: m(x), tmp_path / "run")
    assert with_capture == bare
    child = call(run, "child")
    assert child.notes == ("compiled: inside not seen",)
    assert {"input.0", "output.0"} <= set(slots(child))
    assert call(run, "before").program


def test_a_compiled_function_that_calls_modules(tmp_path):
    def make():
        model = Net().eval()
        model.step = torch.compile(
            lambda x: model.fc2(model.act(model.fc1(x))), backend="eager", fullgraph=True
        )
        return model

    bare, with_capture, run = both(make, lambda m, x: (m.step(x), m.fc1(x)), tmp_path / "run")
    assert with_capture == bare
    assert {c.scope for c in run.calls} == {"fc1"}


def test_compiled_code_is_never_put_under_a_mode(tmp_path):
    """A leaf whose helper calls compiled code: a dispatch mode around it would make it run eagerly,
    unseen.
    """

    def make():
        FUNCTIONS["scale"] = torch.compile(
            lambda x: x.mul(3).sin(), backend="eager", fullgraph=True
        )
        return Outer(nn.Identity()).eval()

    bare, with_capture, run = both(make, lambda m, x: m(x), tmp_path / "run")
    assert with_capture == bare
    assert bare[1][0] == 1
    helped = call(run, "helped")
    assert helped.program == ""
    assert call(run, "before").program


def test_compiled_before_the_capture_is_not_compiled_again(tmp_path):
    model = torch.compile(Outer(nn.Identity()).eval(), backend="eager", fullgraph=True)
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = bits(model(x))
        before = counted()
        with whence.capture(model, tmp_path / "run"):
            assert bits(model(x)) == expected
        assert bits(model(x)) == expected
    assert counted() == before


def test_compiled_during_the_capture_and_called_after(tmp_path):
    model = torch.compile(Net().eval(), backend="eager", fullgraph=True)
    x = torch.randn(3, 6)
    with torch.no_grad():
        with whence.capture(model, tmp_path / "run"):
            expected = bits(model(x))
        before = counted()
        assert bits(model(x)) == expected
    assert counted() == before
    from torch._dynamo import utils

    assert utils.unpatched_nn_module_call is nn.Module.__call__


def test_training_a_compiled_model(tmp_path):
    def use(model, x):
        with torch.enable_grad():
            model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    bare, with_capture, _ = both(
        lambda: torch.compile(Net(), backend="aot_eager", fullgraph=True), use, tmp_path / "run"
    )
    assert with_capture == bare


@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted(how, tmp_path):
    x = torch.randn(3, 6)

    def make():
        inner = Net().eval()
        return Outer(
            torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.ones(3, 6))
        ).eval()

    seeded()
    model = make()
    with torch.no_grad():
        expected = bits(model(x))
        run = captured(
            model, tmp_path / "run", lambda m: [bits(m(x)) == expected or pytest.fail("changed")]
        )
    assert call(run, "child").notes == ("scripted: inside not seen",)
    assert torch.equal(
        tensor(run, call(run, "child"), "input.0"), tensor(run, call(run, "before"), "output.0")
    )
    alone = captured(model.child, tmp_path / "alone", lambda m: m(x))
    assert "output.0" in slots(call(alone, ""))


def test_scripted_modules_that_train_do_not_end_the_capture(tmp_path):
    """Their parameters and buffers are in no dict."""
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).train()
    alone = torch.jit.script(nn.Linear(6, 6)).train()
    with torch.no_grad():
        for module in (model, alone):
            run = captured(module, tmp_path / str(id(module)), lambda m: m(torch.randn(3, 6)))
            assert "output.0" in slots(call(run, ""))
            assert not [note for note in run.notes if note.kind == "error"]


def test_tracers_work_while_a_capture_is_installed(tmp_path):
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = Net().eval(), torch.randn(3, 6)
    expected = bits(model(x).detach())

    def code():
        return (
            make_fx(model)(x).code,
            make_fx(lambda p, v: torch.func.functional_call(model, p, (v,)), tracing_mode="fake")(
                dict(model.named_parameters()), x
            ).code,
            torch.export.export(model, (x,)).graph_module.code,
            torch.fx.symbolic_trace(model).code,
            str(torch.jit.trace(model, x).graph).count("aten::"),
            str(torch.jit.script(model).graph).count("call_method") + 1,
        )

    bare = code()
    with whence.capture(model, tmp_path / "run"):
        assert code() == bare
        exported = torch.export.export(model, (x,)).module()
        assert bits(exported(x).detach()) == expected
        assert bits(torch.fx.symbolic_trace(model)(x).detach()) == expected
        assert bits(model(x).detach()) == expected
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    assert [n for n in run.notes if n.kind == "error"] == []
    assert call(run, "", at=-1).error == ""


def test_the_graph_that_a_backend_returned_is_known_by_what_runs_it():
    graph = torch.fx.symbolic_trace(Net())
    for runs in (graph, graph.forward):
        assert python_graph(runs) is graph
    for other in (graph.eval, graph.print_readable, Net(), Net().forward, len, lambda x: x):
        assert python_graph(other) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_are_rounded_once_more_and_by_no_more(dtype):
    x = torch.linspace(-4, 4, 1000).to(dtype)
    before = torch.get_rng_state()
    (moved, *_), kept = _Rounding()(None, (), ([x, 3], x))
    assert torch.equal(torch.get_rng_state(), before), "it draws nothing of the program's"
    for got in (moved, kept):
        assert got.dtype == dtype and not torch.equal(got, x)
        error = (got.double() - x.double()).abs()
        assert (error <= 1.01 * torch.finfo(dtype).eps * x.double().abs()).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool])
def test_results_that_have_no_roundoff_to_speak_of_stay(dtype):
    x = torch.ones(50).to(dtype)
    assert _Rounding()(None, (), x) is x
