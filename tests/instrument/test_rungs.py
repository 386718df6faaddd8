"""One rung of the ladder: `torch.compile` gets another backend, keeps the program's options, and is
torch's own again afterwards.
"""

import pytest
import torch
from live_torch import call, slots
from torch import nn

import whence
from whence.errors import UsageError
from whence.instrument.torch.compiled.stages import Compiled, Rung
from whence.store import open_run

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


class Seen:
    """Backends as torch would be asked for them."""

    def __init__(self):
        self.given = []

    def __call__(self, model, **given):
        self.given.append(given)
        return model


@pytest.fixture
def seen(monkeypatch):
    found = Seen()
    monkeypatch.setattr(torch, "compile", found)
    return found


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def record(found, slot):
    return next(ref.record for ref in found.refs if ref.slot == slot)


def climb(name, use):
    """What `use` compiled on a rung; torch is as before."""
    before = torch.compile, nn.Module.compile
    rung = Rung(name)
    rung.install()
    try:
        use()
    finally:
        found = rung.remove()
    assert (torch.compile, nn.Module.compile) == before
    return found


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


OPTIONS = {"guard_filter_fn": len, "max_autotune": True}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dynamo", {"backend": "eager", "mode": None, "options": {"guard_filter_fn": len}}),
        ("aot_eager", {"backend": "aot_eager", "mode": None, "options": {"guard_filter_fn": len}}),
        (
            "aot_eager_decomp_partition",
            {
                "backend": "aot_eager_decomp_partition",
                "mode": None,
                "options": {"guard_filter_fn": len},
            },
        ),
        ("inductor", {"options": OPTIONS}),
        ("inductor_caches_off", {"options": OPTIONS}),
        ("inductor_dynamic_off", {"options": OPTIONS, "dynamic": False}),
    ],
)
def test_the_backend_is_replaced_and_the_rest_kept(name, asked, seen):
    model = nn.Linear(2, 2)
    found = climb(name, lambda: torch.compile(model, dynamic=True, fullgraph=True, options=OPTIONS))
    assert seen.given == [{"dynamic": True, "fullgraph": True, **asked}]
    assert found == Compiled(name, 1, ("inductor",), 0, 0)


@pytest.mark.parametrize(
    ("name", "on"),
    [("inductor", True), ("inductor_caches_off", False), ("inductor_dynamic_off", False)],
)
def test_caches_of_whole_graphs_are_off_on_rungs_that_say_so(seen, name, on):
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor

    def settings():
        return inductor.fx_graph_cache, autograd.enable_autograd_cache

    met = []
    before = settings()
    with inductor.patch(fx_graph_cache=True), autograd.patch(enable_autograd_cache=True):
        climb(name, lambda: (torch.compile(nn.Linear(2, 2)), met.append(settings())))
    assert met == [(on, on)]
    assert settings() == before


def test_eager_compiles_nothing(seen):
    model = nn.Linear(2, 2)

    def use():
        assert torch.compile(model) is model
        assert torch.compile(mode="max-autotune", backend="aot_eager")(model) is model
        model.compile(fullgraph=True)
        assert model._compiled_call_impl is None

    assert climb("eager", use) == Compiled("eager", 3, ("inductor", "aot_eager"), 0, 0)
    assert seen.given == []


def test_random_numbers_are_drawn_as_eager_draws_them(seen):
    import torch._inductor.config as inductor

    assert not inductor.fallback_random
    climb(
        "inductor",
        lambda: (
            torch.compile(nn.Linear(2, 2)),
            pytest.fail("not set") if not inductor.fallback_random else None,
        ),
    )
    assert not inductor.fallback_random


def test_what_is_compiled_is_counted():
    def use():
        @torch.compile(dynamic=False)
        def function(x):
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        assert function(torch.ones(2)).tolist() == [4, 4]
        module = Doubled()
        module.compile()
        assert module(torch.ones(2)).tolist() == [2, 2]
        torch.compile(nn.Identity(), disable=True)

    assert climb("aot_eager", use) == Compiled("aot_eager", 2, ("inductor",), 3, 1)


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_compiled_function_is_seen_as_a_module(name, tmp_path):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return compiled["scaled"](self.fc(x), by=3.0)

    model, compiled = Outer(), {}

    def use():
        compiled["scaled"] = torch.compile(lambda x, *, by: torch.softmax(x * by, -1))
        with torch.no_grad(), whence.capture(model, tmp_path / "run"):
            model(torch.ones(2, 4))

    climb(name, use)
    run = open_run(tmp_path / "run")
    found = next(c for c in run.calls if c.scope.startswith("<"))
    assert {"input.0", "output.0"} <= set(slots(found))
    assert found.arguments["input.by"] == 3.0
    assert record(found, "input.0") == record(call(run, "fc"), "output.0")
    assert bool(found.program) == (name == "eager")


def test_a_graph_of_the_compiler_is_no_module_of_the_program(tmp_path):
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager")
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        model(torch.ones(2, 4))
    run = open_run(tmp_path / "run")
    assert [c.scope for c in run.calls] == [""]
    assert {"input.0", "output.0", "param._orig_mod.0.weight", "param._orig_mod.0.bias"} == set(
        slots(run.calls[0])
    )


def test_around_a_model_in_code_it_comes_too_late(tmp_path):
    with (
        pytest.raises(UsageError, match=r"whence\.ladder climbs in code"),
        whence.capture(nn.Linear(2, 2), tmp_path / "run", rung="eager"),
    ):
        pass
    with pytest.raises(UsageError, match=r"'aot_eagr' is not one of .*did you mean aot_eager"):
        whence.capture(nn.Linear(2, 2), tmp_path / "run", rung="aot_eagr").__enter__()
