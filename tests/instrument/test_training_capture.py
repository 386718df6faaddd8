"""A captured training run: gradients, losses, sums and steps are torch's own, each can be replayed,
and the program computes what it computes without a capture.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import whence
from whence.replay.validation import load
from whence.store import open_run

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """Two layers, a norm, a sum around them, a module called twice, and an input used twice."""

    def __init__(self, recompute=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.twice = nn.Linear(6, 6, bias=False)
        self.recompute = recompute

    def body(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        inner = self.body(x) if self.recompute is None else self.again(x)
        return self.twice(self.twice(x + inner)) * x

    def again(self, x):
        return checkpoint(self.body, x, use_reentrant=self.recompute)


class Net(nn.Module):
    """Token ids through blocks to logits by the embedding's own weight."""

    def __init__(self, recompute=None):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.blocks = nn.ModuleList([Block(recompute) for _ in range(2)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.randint(1, 11, (4, 3, 5), generator=torch.Generator().manual_seed(1))


def net(**options):
    torch.manual_seed(0)
    return Net(**options).train()


def train(model, steps=2, optimizer=torch.optim.AdamW, **options):
    options.setdefault("lr", 1e-2)
    opt = optimizer(model.parameters(), **options)
    for step in range(steps):
        for micro in range(2):
            ids = IDS[2 * step + micro]
            logits = model(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()


def captured(folder, model, use, **options):
    with whence.capture(model, str(folder), **options):
        use(model)
    return open_run(folder)


def arrays(run, call):
    return {ref.slot: run.array(ref.record) for ref in call.refs}


def of_phase(run, phase):
    return [c for c in run.calls if c.phase == phase and c.kind == "module"]


def replayed(run, call):
    """(slot, what the call's program makes of its own inputs, what was recorded)."""
    program = run.programs[call.program]
    seen = arrays(run, call)
    results = load(program, [run.array(k) for k in program.constants]).run(
        {slot: seen[slot] for slot in program.inputs if slot in seen},
        {slot: seen[slot] for slot in program.params},
    )
    return [(slot, array, seen[slot]) for slot, array in results.items()]


def test_every_call_of_a_training_step_can_be_replayed(tmp_path):
    run = captured(tmp_path / "run", net(), train)
    calls = [c for c in run.calls if c.leaf]
    assert {c.phase for c in calls} == {"forward", "backward", "optimizer"}
    assert {c.no_program for c in calls} == {""}
    for call in calls:
        for slot, actual, expected in replayed(run, call):
            scale = np.abs(expected.astype(np.float64)).max()
            # Autograd adds what arrives at a tensor in an order that a replay may not have.
            error = np.abs(actual.astype(np.float64) - expected).max()
            assert error <= 4 * np.finfo(np.float32).eps * scale, (call.scope, call.op, slot)


def test_gradients_are_those_of_torch(tmp_path):
    model = net()

    def once(model):
        model(IDS[0]).square().sum().backward()

    run = captured(tmp_path / "run", model, once)
    sums = {
        f"{c.scope}.{c.op.removeprefix('sum of ').removesuffix('.grad')}": arrays(run, c)
        for c in run.calls
        if c.op.startswith("sum of")
    }
    sent = {
        f"{c.scope}.{slot.removeprefix('output.grad.param.')}": array
        for c in of_phase(run, "backward")
        for slot, array in arrays(run, c).items()
        if slot.startswith("output.grad.param.")
    }
    assert set(sums) == {name for name, _ in model.named_parameters()}
    # two calls of one module, and the two ends of the model that share a weight
    several = {"embed.weight", "blocks.0.twice.weight", "blocks.1.twice.weight"}
    for name, parameter in model.named_parameters():
        assert np.array_equal(sums[name]["output.grad"], parameter.grad.numpy()), name
        assert np.array_equal(sent[name], parameter.grad.numpy()) == (name not in several), name


def test_gradients_of_inputs_are_what_a_module_sends(tmp_path):
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x = torch.randn(5, 3, requires_grad=True)

    def once(layer):
        (layer(x) * 2 + x.sum()).sum().backward()

    run = captured(tmp_path / "run", layer, once)
    linear = next(c for c in of_phase(run, "backward") if c.scope == "0")
    (expected,) = torch.autograd.grad((layer(x) * 2).sum(), x)
    assert np.allclose(arrays(run, linear)["output.grad.input.0"], expected.numpy(), atol=0)


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_training_computes_the_same_bits(recompute, foreach, tmp_path):
    alone, watched = net(recompute=recompute), net(recompute=recompute)
    torch.manual_seed(7)
    train(alone, foreach=foreach)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    run = captured(tmp_path / "run", watched, lambda model: train(model, foreach=foreach))
    assert torch.equal(torch.get_rng_state(), state)
    assert not [n for n in run.notes if n.kind == "error"]
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_users_hooks_and_gradients_are_left_as_they_are(tmp_path):
    seen = []

    def twice(out):
        out.register_hook(lambda gradient: 2 * gradient)

    def use(model):
        seen.clear()
        model.blocks[0].register_full_backward_hook(lambda m, i, o: seen.append(o[0].sum().item()))
        model.embed.register_forward_hook(lambda m, i, o: twice(o))
        loss = model(IDS[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        (grad,) = torch.autograd.grad(model(IDS[1]).sum(), [model.embed.weight], create_graph=True)
        grad.square().sum().backward()

    alone, watched = net(), net()
    use(alone)
    heard = list(seen)
    captured(tmp_path / "run", watched, use)
    assert seen == heard
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_nothing_is_kept_alive_and_every_function_is_put_back(tmp_path):
    before = torch.autograd.backward, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_
    gone = []

    def use(model):
        out = model(IDS[0])
        gone.append(weakref.ref(out))
        out.sum().backward()
        del out
        gc.collect()
        assert gone[0]() is None
        model(IDS[1])  # no backward pass comes
        gc.collect()

    captured(tmp_path / "run", net(), use)
    after = torch.autograd.backward, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_
    assert after == before


def test_a_second_pass_through_one_graph_is_a_second_occurrence(tmp_path):
    def use(layer):
        loss = layer(torch.ones(1, 3)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    run = captured(tmp_path / "run", nn.Linear(3, 3), use)
    own = [c.occurrence for c in of_phase(run, "backward") if c.op_type == "Linear"]
    assert own == [0, 1]


def test_what_is_detached_sends_nothing(tmp_path):
    class Cut(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                scale = x.abs().amax()
            return x / scale + x.detach() * x

    def use(cut):
        cut(torch.randn(4, requires_grad=True)).sum().backward()

    run = captured(tmp_path / "run", Cut(), use)
    (call,) = (c for c in of_phase(run, "backward") if c.op_type == "Cut")
    for _, actual, expected in replayed(run, call):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_steps_of_optimisers_are_replayed(optimizer, options, tmp_path):
    run = captured(tmp_path / "run", net(), lambda m: train(m, 2, optimizer, **options))
    steps = [c for c in of_phase(run, "optimizer") if c.op_type == optimizer.__name__]
    assert len(steps) == 2 * len(list(net().parameters()))
    assert all(key in steps[0].arguments for key in ("lr", *options))
    for call in steps:
        for slot, actual, expected in replayed(run, call):
            assert np.array_equal(actual, expected), slot


def train_by_halves(model):
    """Two optimisers, of every other parameter each, which step one behind the other."""
    parameters = list(model.parameters())
    halves = [torch.optim.AdamW(half, lr=1e-2) for half in (parameters[::2], parameters[1::2])]
    for ids in IDS[:2]:
        functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()


def test_a_second_optimiser_steps_in_the_step_of_the_first(tmp_path):
    run = captured(tmp_path / "run", net(), train_by_halves)
    steps = [c for c in of_phase(run, "optimizer") if c.op_type == "AdamW"]
    each = len(list(net().parameters()))
    assert [c.step for c in steps] == [0] * each + [1] * each
    together = captured(
        tmp_path / "together", net(), lambda model: train_in_closures(model, clip=None)
    )
    assert whence.compare(together, run).status == "same"


def train_in_closures(model, optimizer=torch.optim.AdamW, *, by_name=False, clip=0.5):
    """Steps that compute their gradients and clip them inside, as Lightning's do."""
    opt = optimizer(model.parameters(), lr=1e-2)
    for ids in IDS[:2]:

        def closure(ids=ids):
            opt.zero_grad()
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if by_name:
            opt.step(closure=closure)
        else:
            opt.step(closure)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_starts_from_the_gradients_that_the_closure_leaves(by_name, tmp_path):
    alone, watched = net(), net()
    train_in_closures(alone)
    run = captured(tmp_path / "run", watched, lambda m: train_in_closures(m, by_name=by_name))
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    steps = [c for c in of_phase(run, "optimizer") if c.op_type == "AdamW"]
    assert len(steps) == 2 * len(list(alone.parameters()))
    for call in steps:
        for slot, actual, expected in replayed(run, call):
            assert np.array_equal(actual, expected), slot
    clipped = [c for c in of_phase(run, "optimizer") if c.op_type == "gradients"]
    assert len(clipped) == 2
    for call in clipped:
        for slot, actual, expected in replayed(run, call):
            assert np.array_equal(actual, expected), slot


def test_an_optimiser_that_computes_the_loss_several_times_is_recorded_and_not_replayed(tmp_path):
    alone, watched = net(), net()
    train_in_closures(alone, torch.optim.LBFGS)
    run = captured(tmp_path / "run", watched, lambda m: train_in_closures(m, torch.optim.LBFGS))
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    steps = [c for c in of_phase(run, "optimizer") if c.op_type == "LBFGS"]
    assert len(steps) == 2 * len(list(alone.parameters()))
    assert {c.no_program for c in steps} == {"LBFGS computes the loss several times in a step"}


def test_gradients_can_be_left_out(tmp_path):
    run = captured(tmp_path / "run", net(), train, gradients=False)
    assert {c.phase for c in run.calls} == {"forward"}
    assert not any(c.gradients for c in run.calls)


def test_code_between_models_that_is_no_loss_is_not_followed_for_ever(tmp_path):
    def use(model):
        out = model(IDS[0])
        for _ in range(2500):
            out = out + 0
        out.sum().backward()

    run = captured(tmp_path / "run", net(), use)
    (loss,) = (c for c in run.calls if c.op == "loss" and c.phase == "forward")
    assert loss.no_program == "runs more than 2000 operators"


def test_the_loss_is_recorded_with_statistics_alone(tmp_path):
    net = nn.Linear(4, 2)
    values = []
    with whence.capture(net, tmp_path / "run", keep="stats"):
        for _ in range(2):
            loss = net(torch.ones(3, 4)).square().mean() * 3
            loss.backward()
            values.append(loss.item())
    run = whence.open_run(str(tmp_path / "run"))
    losses = [c for c in run.calls if c.op == "loss" and c.phase == "forward"]
    figures = [run.records[c.slots("output")[0].record].statistics for c in losses]
    assert [f.mean for f in figures] == pytest.approx(values)
    assert {c.no_program for c in losses} == {"programs were not recorded"}


class Doubled(nn.Module):
    """A loss that is a module and calls one."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.MSELoss()

    def forward(self, out, wanted):
        return self.criterion(out, wanted) * 2


@pytest.mark.parametrize("criterion", [nn.MSELoss(), Doubled()])
def test_a_loss_that_is_a_module_beside_the_model_is_part_of_the_loss(criterion, tmp_path):
    wanted = torch.ones(3, 2)

    def use(model):
        (criterion(model(torch.ones(3, 4)), wanted) * 3).backward()

    run = captured(tmp_path / "run", nn.Linear(4, 2), use)
    losses = [c for c in run.calls if c.op == "loss"]
    assert [c.phase for c in losses] == ["forward", "backward"]
    for call in losses:
        for slot, actual, expected in replayed(run, call):
            assert np.allclose(actual, expected, rtol=1e-6, atol=0), (call.phase, slot)


def test_a_model_beside_the_one_captured_is_an_input_of_the_loss(tmp_path):
    teacher = nn.Linear(4, 2)

    def use(model):
        x = torch.ones(3, 4)
        loss = functional.mse_loss(model(x), teacher(x).detach())
        (loss * 3).backward()

    run = captured(tmp_path / "run", nn.Linear(4, 2), use)
    (loss,) = (c for c in run.calls if c.op == "loss" and c.phase == "forward")
    assert loss.program
    assert sorted(run.records[ref.record].shape for ref in loss.refs) == [(), (3, 2), (3, 2)]


class Embeddings(nn.Module):
    """Parameters of its own, whose sum a child hands on as it is."""

    def __init__(self):
        super().__init__()
        self.project, self.dropout = nn.Linear(6, 6), nn.Dropout(0.0)
        self.token, self.places = nn.Parameter(torch.ones(1, 1, 6)), nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.project(x)], 1)
        return self.dropout(x + self.places)


def test_gradients_pass_a_child_that_returns_what_it_was_given(tmp_path):
    torch.manual_seed(0)
    model = Embeddings().train()
    x = torch.randn(2, 5, 6)
    run = captured(tmp_path / "run", model, lambda m: m(x).square().sum().backward())
    own = [c for c in of_phase(run, "backward") if c.scope == ""]
    made = {r.slot for c in own for r in c.refs if r.slot.startswith("output.grad.")}
    assert {"output.grad.param.token", "output.grad.param.places"} <= made
    for call in own:
        assert call.no_program == ""
        for slot, actual, expected in replayed(run, call):
            assert np.allclose(actual, expected, rtol=1e-6), slot
