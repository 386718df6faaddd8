"""`whence.ladder`: the stage of compilation at fault is named, a clean model climbs in silence, and
what cannot be told is said.
"""

import copy
import itertools
import json
import random

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch._inductor.config as inductor
import torch._inductor.decomposition as decomposition
from torch import nn

import whence
from whence.errors import CaptureError, OutputExists, UsageError
from whence.report.ladder import rungs
from whence.results import Ladder
from whence.workflows.ladder.ladder import ladder_command

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
torch.set_num_threads(1)

NORM = torch.ops.aten.native_layer_norm.default
RIGHT = {
    "noise",
    "bit-equal",
}  # whether a decomposition rounds as the operator does is the processor's affair


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop, self.out = (
            nn.Linear(16, 32),
            nn.LayerNorm(32),
            nn.Dropout(0.3),
            nn.Linear(32, 4),
        )

    def forward(self, x):
        return self.out(self.norm(torch.log1p(torch.relu(self.fc(x)))))


GIVEN = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def net(kind=Net):
    torch.manual_seed(0)
    return kind().eval()


def plain(graph, inputs):
    """A backend that computes what it is given."""
    return graph.forward


def wrong(graph, inputs):
    """A backend with a fault: everything half a percent too large."""
    return lambda *args: [out * 1.005 for out in graph.forward(*args)]


def with_backend(backend, kind=Net):
    return lambda: torch.compile(net(kind), backend=backend)


def verdicts(result):
    return [(r.name, r.verdict) for r in result.rungs]


@pytest.fixture(autouse=True)
def quick():
    with inductor.patch(cpp_cache_precompile_headers=False):
        yield


@pytest.fixture
def decomposed(monkeypatch):
    """Put another decomposition of the layer norm in torch's table."""
    original = decomposition.decompositions[NORM]

    def change(fault):
        monkeypatch.setitem(
            decomposition.decompositions, NORM, lambda *args: fault(original, *args)
        )
        decomposition.fast_random_decomps.cache_clear()

    yield change
    decomposition.fast_random_decomps.cache_clear()


def test_a_clean_model(tmp_path):
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    result = whence.ladder(with_backend(plain), GIVEN, output=tmp_path / "kept")
    assert (result.status, result.stages, result.repeats) == ("same", (), True)
    decomp = result.rungs[2]
    assert verdicts(result) == [
        ("eager", "bit-equal"),
        ("aot_eager", "bit-equal"),
        ("aot_eager_decomp_partition", decomp.verdict),
        ("inductor", "bit-equal"),
    ]
    assert decomp.verdict in RIGHT
    assert decomp.evidence == "replay" or decomp.verdict == "bit-equal"
    assert 0 <= decomp.rel_l2 < 1e-6
    assert decomp.previous_rel_l2 == decomp.rel_l2
    assert (decomp.graphs, decomp.breaks, decomp.backends) == (1, 0, ("plain",))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"eager", "eager-again", "aot_eager", "cmp-inductor", "ladder.json"} <= kept
    assert set(whence.load_comparison(decomp.comparison).counts) <= {"noise", "identical"}
    again = Ladder(**json.loads((tmp_path / "kept" / "ladder.json").read_text()))
    assert (again.status, len(again.rungs)) == ("same", 4)
    text = rungs(result)
    assert text.startswith("NO STAGE           no rung is outside the noise\n")
    with pytest.raises(OutputExists, match="already holds a ladder; --force"):
        whence.ladder(with_backend(plain), GIVEN, output=tmp_path / "kept")


def writes(x):
    x.add_(1)
    return x * 2


def test_a_change_in_place_that_is_lost_is_a_fault():
    def forgets(graph, inputs):
        return lambda *args: graph.forward(*(a.clone() for a in args))

    result = whence.ladder(lambda: torch.compile(writes, backend=forgets), torch.ones(4))
    assert (result.status, result.stages) == ("different", ("forgets",))
    assert "does not change its input.0 in place" in result.sentence


def test_a_change_in_place_that_is_kept_is_none():
    kept = whence.ladder(lambda: torch.compile(writes, backend=plain), torch.ones(4))
    assert kept.status == "same"


def test_the_figures_are_those_of_the_tensors(tmp_path):
    """rel_l2 against numpy, on outputs taken by hand."""
    result = whence.ladder(with_backend(wrong), GIVEN)
    with torch.no_grad():
        expected = net()(GIVEN).double().numpy()
    made = expected.astype(np.float32) * np.float32(1.005)
    assert result.rungs[-1].rel_l2 == pytest.approx(
        np.linalg.norm(made - expected) / np.linalg.norm(expected), rel=1e-4
    )
    static, inductor = result.rungs[-2:]
    assert static.previous_rel_l2 == pytest.approx(0.005, rel=1e-2)
    assert inductor.previous_identical


def test_a_backend_of_the_programs_own_is_named():
    result = whence.ladder(with_backend(wrong), GIVEN)
    assert (result.status, result.stages) == ("different", ("wrong",))
    assert result.sentence.startswith(
        "aot_eager_decomp_partition is within the noise, inductor_dynamic_off is outside the "
        "noise: Net: "
        "introduced here"
    )
    assert rungs(result).startswith("STAGE wrong ")


def test_a_wrong_decomposition(decomposed):
    decomposed(
        lambda original, x, shape, weight, bias, eps: original(x, shape, weight, bias, eps + 0.1)
    )
    result = whence.ladder(with_backend(plain), GIVEN)
    assert (result.status, result.stages) == ("different", ("decomposition",))
    assert [v for _, v in verdicts(result)] == ["bit-equal", "bit-equal", "outside", "bit-equal"]
    assert result.sentence.endswith(
        "the program as it is (inductor) is bit-equal to eager all the same"
    )


def test_a_decomposition_that_fails_and_a_wrong_backend_behind_it(decomposed):
    def fails(*_):
        raise RuntimeError("no such norm")

    decomposed(fails)
    result = whence.ladder(with_backend(wrong), GIVEN)
    assert (result.status, result.stages) == ("different", ("decomposition", "wrong"))
    assert [v for _, v in verdicts(result)] == [
        "bit-equal",
        "bit-equal",
        "failed",
        "outside",
        "outside",
    ]
    assert "no such norm" in result.rungs[2].why
    assert "no such norm" in result.sentence
    result = whence.ladder(with_backend(plain), GIVEN)
    assert result.status == "same"
    assert "aot_eager_decomp_partition does not compile or run" in result.sentence


def test_a_backend_that_fails():
    def fails(graph, inputs):
        raise RuntimeError("no backend today")

    result = whence.ladder(with_backend(fails), GIVEN)
    assert (result.status, result.stages) == ("undecided", ())
    assert result.sentence.startswith("inductor does not compile or run")
    assert "no backend today" in result.sentence


class Asks(Net):
    def forward(self, x):
        return super().forward(x) * (1.01 if torch.compiler.is_compiling() else 1.0)


def test_code_that_asks_whether_it_is_compiled():
    result = whence.ladder(with_backend(plain, Asks), GIVEN)
    assert (result.status, result.stages) == ("different", ("dynamo",))
    assert [name for name, _ in verdicts(result)] == [
        "eager",
        "dynamo",
        "aot_eager",
        "aot_eager_decomp_partition",
        "inductor",
    ]
    assert (result.rungs[1].previous_identical, result.rungs[2].previous_identical) == (False, True)


class Scaled(Net):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_guard_that_was_switched_off():
    """The constant of the first call is compiled in, and nobody asks whether it changed."""

    def use(model):
        with torch.no_grad():
            model(GIVEN)
            getattr(model, "_orig_mod", model).scale = 2.0
            model(GIVEN)

    given = {
        "options": {"guard_filter_fn": lambda guards: [False for _ in guards]},
        "backend": plain,
    }
    result = whence.ladder(lambda: torch.compile(net(Scaled), **given), use)
    assert (result.status, result.stages) == ("different", ("dynamo",))
    assert [v for _, v in verdicts(result)][1:] == ["outside"] * 4
    del given["options"]
    result = whence.ladder(lambda: torch.compile(net(Scaled), **given), use)
    assert (result.status, result.rungs[1].graphs) == ("same", 2)


def test_an_aot_fault(monkeypatch):
    """Wrong between dynamo and the decompositions: AOTAutograd's own tracing."""
    from torch._functorch._aot_autograd import graph_compile

    original = graph_compile.aot_dispatch_base_graph

    def changed(*args, **kwargs):
        made = original(*args, **kwargs)
        graph = made[0].graph
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.neg.default
        made[0].recompile()
        return made

    monkeypatch.setattr(graph_compile, "aot_dispatch_base_graph", changed)
    result = whence.ladder(with_backend(plain), GIVEN)
    assert (result.status, result.stages) == ("different", ("aot_autograd",))
    assert verdicts(result)[1] == ("dynamo", "bit-equal")


def test_weights_drawn_anew_each_time():
    def make():
        model = net()
        model.fc.weight.data += torch.from_numpy(
            np.random.default_rng().normal(size=(32, 16)).astype(np.float32)
        )
        return model

    result = whence.ladder(make, GIVEN)
    assert (result.status, len(result.rungs), result.repeats) == ("undecided", 1, False)
    assert result.sentence.startswith("the eager program does not do the same twice: ")
    assert "seed=N" in result.sentence


class Unsteady(Net):
    """Rounds another way each time, as atomics do: never as the time before, and never much further
    off than that.
    """

    last_bits = itertools.cycle((1, 5, 2, 6, 3, 7, 4, 8))

    @torch._dynamo.disable
    def drawn(self):
        return 1 + next(self.last_bits) * 2.0**-23

    def forward(self, x):
        return super().forward(x) * self.drawn()


def test_an_eager_run_that_does_not_repeat_itself(monkeypatch):
    monkeypatch.setattr(Unsteady, "last_bits", itertools.cycle((1, 5, 2, 6, 3, 7, 4, 8)))
    result = whence.ladder(with_backend(torch._dynamo.disable(plain), Unsteady), GIVEN)
    assert not result.repeats
    assert result.status == "same"
    assert any("eager does not repeat itself" in note for note in result.notes)
    assert "run twice: not equal" in rungs(result)


class Deep(nn.Module):
    """Draws random numbers, so that nothing can be replayed; and rounding adds up."""

    def __init__(self):
        super().__init__()
        block = [nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(
            *(copy.deepcopy(part) for _ in range(6) for part in block), nn.Linear(16, 4)
        )

    def forward(self, x):
        return self.layers(x) * torch.bernoulli(torch.full((4,), 0.9))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(GIVEN).square().mean().backward()
        optimizer.step()


def two_bits_off(original, *args):
    """A layer norm whose elements are off by two in their last bit, to and fro, on every
    processor.
    """
    out, mean, rstd = original(*args)
    signs = 1 - 2 * (torch.arange(out.shape[-1]) % 2).to(out.dtype)
    return out * (1 + 2 * 2.0**-23 * signs), mean, rstd


@pytest.mark.parametrize("fault", [1.0, 1.0005])
def test_rounding_that_adds_up_where_nothing_can_be_replayed(fault, decomposed):
    decomposed(two_bits_off)

    def backend(graph, inputs):
        return lambda *args: (
            [out * fault for out in graph.forward(*args)] if fault != 1.0 else graph.forward(*args)
        )

    def make():
        torch.manual_seed(0)
        return torch.compile(Deep(), backend=backend)

    result = whence.ladder(make, trained)
    assert result.repeats
    decomp = next(r for r in result.rungs if r.name == "aot_eager_decomp_partition")
    assert decomp.verdict == "noise"  # not bit-equal, whatever the kernels
    # More than two dumps allow one operator; of a whole model it is within what rounding makes.
    assert decomp.rel_l2 > 5 * 2 * 2.0**-24
    # What one more rounding makes here is measured where the difference is larger than that.
    assert any("rounded once more" in note for note in result.notes) == (fault != 1.0)
    assert (result.status, result.stages) == (
        ("same", ()) if fault == 1.0 else ("different", ("backend",))
    )


def test_a_function():
    def scores(x, *, by=2.0):
        return torch.softmax(x * by, -1)

    result = whence.ladder(lambda: torch.compile(scores, backend=plain), {"x": GIVEN, "by": 3.0})
    assert result.status == "same"
    assert [(r.verdict in RIGHT, r.graphs) for r in result.rungs[1:]] == [(True, 1)] * 3
    assert [result.rungs[k].verdict for k in (1, 3)] == ["bit-equal", "bit-equal"]
    assert result.rungs[-1].backends == ("plain",)


def test_what_is_given_wrongly():
    with pytest.raises(
        UsageError, match=r"unknown option 'fulgraph'; torch\.compile takes dynamic, fullgraph"
    ):
        whence.ladder(net(), GIVEN, fulgraph=True)
    with pytest.raises(UsageError, match=r"a torch\.nn\.Module or a function, not a int"):
        whence.ladder(3, GIVEN)
    with pytest.raises(CaptureError, match="the model cannot be run as asked"):
        whence.ladder(net(), GIVEN[:, :3])
    with pytest.raises(CaptureError, match="cannot run nothing-of-that-name"):
        ladder_command(["nothing-of-that-name"])


# ---- with inductor itself


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relu", "log1p"])
def test_a_wrong_lowering(kind):
    with inductor.patch({f"cpp.inject_{kind}_bug_TESTING_ONLY": "accuracy"}):
        result = whence.ladder(net(), GIVEN, bisect_pass=True)
    assert (result.status, result.stages) == ("different", ("inductor",))
    found = result.compiler_pass
    assert (found.backend, found.subsystem, found.info) == ("inductor", "lowerings", kind)
    assert found.runs > 5
    assert f"PASS               inductor / lowerings / {found.number} / {kind}\n" in rungs(result)


class Louder(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __call__(self, graph):
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.rsqrt.default:
                with graph.inserting_after(node):
                    louder = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
                louder.meta = dict(node.meta)
                node.replace_all_uses_with(
                    louder, delete_user_cb=lambda user, own=louder: user is not own
                )

    def uuid(self):
        return None


@pytest.mark.slow
def test_a_wrong_pass_of_the_programs_own():
    result = whence.ladder(
        net(), GIVEN, bisect_pass=True, options={"post_grad_custom_post_pass": Louder()}
    )
    assert result.stages == ("inductor",)
    found = result.compiler_pass
    assert (found.subsystem, found.info) == ("post_grad_passes", "post_grad_custom_post_pass")


@pytest.mark.slow
def test_training_with_dropout():
    def use(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(GIVEN).square().mean().backward()
            optimizer.step()

    class Trained(Net):
        def forward(self, x):
            return self.out(self.drop(self.norm(torch.relu(self.fc(x)))))

    torch.manual_seed(0)
    model = Trained()
    result = whence.ladder(model, use)
    assert result.status == "same"
    assert {r.verdict for r in result.rungs[1:]} <= RIGHT
    assert all(p.grad is None for p in model.parameters())


def chain(x, y):
    a = torch.sin(x)
    b = torch.exp(y)
    c = torch.tanh(a - b)
    c.add_(1)
    return c, torch.cos(a) * b


def changing(names, change):
    """A backend that changes the node of the first name where a graph has nodes of all names."""

    def faulty(graph, inputs):
        nodes = {node.target if isinstance(node.target, str) else node.target.__name__: node
                 for node in graph.graph.nodes}  # fmt: skip
        if set(names) <= set(nodes):
            change(nodes[names[0]])
            graph.recompile()
        return graph.forward

    return faulty


def becomes(function):
    def change(node):
        node.target = function

    return change


def placed(names, change, program=chain):
    given = torch.linspace(0, 1, 6), torch.linspace(1, 2, 6)
    result = whence.ladder(lambda: torch.compile(program, backend=changing(names, change)), given)
    assert (result.status, result.stages) == ("different", ("faulty",))
    return result


def test_a_node_is_named_with_its_line(tmp_path):
    result = placed(["tanh"], becomes(torch.sigmoid))
    (node,) = result.place.operators
    file, _, number = node.source.rpartition(":")
    assert (node.name, node.operator, file) == ("c", "tanh", __file__)
    assert node.code == "c = torch.tanh(a - b)"
    assert chain.__code__.co_firstlineno + 3 == int(number)
    assert result.place.of == 7
    text = rungs(result)
    assert f"LINE               {node.source}, c = torch.tanh(a - b) (tanh)\n" in text
    assert f"1 operator of 7, {result.place.runs} runs with a part compiled" in text
    assert json.loads(msgspec.json.encode(result))["place"]["operators"][0]["name"] == "c"


def test_swapped_operands_are_named():
    def swap(node):
        node.args = node.args[::-1]

    assert [o.operator for o in placed(["sub"], swap).place.operators] == ["sub"]


def test_of_operators_that_are_wrong_together_the_others_are_left_out():
    place = placed(["cos", "sin"], becomes(torch.tan)).place
    assert [o.operator for o in place.operators] == ["sin", "cos"]


def writes_between(x, y):
    a = torch.sin(x)
    a.add_(y)
    return torch.cos(a)


def test_what_writes_in_place_stays_in_its_order():
    place = placed(["cos", "sin"], becomes(torch.tan), writes_between).place
    assert [o.operator for o in place.operators] == ["sin", "add_", "cos"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.mul(2)


def with_own_gradient(x):
    return torch.func.grad(lambda z: Doubled.apply(z).sum())(x)


def test_the_line_that_dynamo_left_out_is_named():
    result = whence.ladder(with_own_gradient, torch.arange(4.0))
    if result.status == "same":
        pytest.skip("this torch traces it right")
    assert result.stages == ("dynamo",)
    assert [o.code for o in result.place.operators] == ["return grad.mul(2)"]
