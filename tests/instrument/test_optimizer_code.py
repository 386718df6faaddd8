"""Steps of optimisers that are not torch's own: recorded as they run, replayed, and not changed."""

import pytest
import torch
from torch import nn

import whence
from split_layers import run_in_parts

pytestmark = pytest.mark.torch


class Own(torch.optim.Optimizer):
    """Lion as its paper has it. Source: arXiv:2302.06675, algorithm 2."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                self.update(p, group, self.state[p])
        return loss

    def begin(self, group):
        """What is done once for all parameters."""

    def update(self, p, group, state):
        first, second = group["betas"]
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["decay"])
        p.add_(average.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
        average.lerp_(p.grad, 1 - second)


class ThroughData(Own):
    """Counts its steps in Python, and writes through `.data`, whose versions count apart."""

    def update(self, p, group, state):
        first, second = group["betas"]
        if not state:
            state.update(step=0, mean=torch.zeros_like(p.data), square=torch.zeros_like(p.data))
        state["step"] += 1
        state["mean"].mul_(first).add_(p.grad.data, alpha=1 - first)
        state["square"].mul_(second).addcmul_(p.grad.data, p.grad.data, value=1 - second)
        size = group["lr"] / (1 - first ** state["step"])
        root = state["square"].div(1 - second ** state["step"]).sqrt_().add_(1e-8)
        p.data.addcdiv_(state["mean"], root, value=-size)


class Factored(Own):
    """Keeps tensors in a list, asks a question of one, and views what it writes."""

    def update(self, p, group, state):
        rows = p.grad.reshape(p.shape[0], -1)
        factors = state.setdefault("factors", [torch.ones(p.shape[0]), torch.ones(rows.shape[1])])
        factors[0].lerp_(rows.square().mean(1), 0.5)
        factors[1].lerp_(rows.square().mean(0), 0.5)
        size = torch.linalg.vector_norm(p)
        scale = size if size > 1e-3 else torch.ones(())
        root = torch.outer(factors[0], factors[1]).div(factors[0].mean()).sqrt()
        p.view(-1).sub_((rows / root).reshape(-1) * scale, alpha=group["lr"] * 0.1)


class IntoBuffers(Own):
    """Counts steps for the group in a tensor, and writes results where it says."""

    def begin(self, group):
        group["count"] = group.get("count", torch.zeros((), dtype=torch.int32))
        group["count"].add_(1)

    def update(self, p, group, state):
        whole = torch.empty_like(p)
        torch.mul(p.grad, 1 / (1 + group["count"]), out=whole)
        if p.ndim == 2:
            square = torch.empty(p.shape[0], p.shape[0])
            torch.addmm(square, whole, whole.mT, beta=0, out=square)
            whole = square @ whole + whole
        p.sub_(whole, alpha=group["lr"])


class Sub(torch.optim.AdamW):
    """A class of the user's that is made of one of torch's."""


class OnLists(Sub):
    def __init__(self, params):
        super().__init__(params, lr=1e-2, foreach=True)


class Fused(Sub):
    def __init__(self, params):
        super().__init__(params, lr=1e-2, fused=True)


KINDS = (Own, ThroughData, Factored, IntoBuffers, Sub, OnLists, Fused)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


def train(kind, path=None, *, parts=False, closure=False, lower=False, **options):
    torch.set_num_threads(1)
    model = net()
    if parts:
        run_in_parts(model)
    optimizer = kind(model.parameters(), **options)
    draw = torch.Generator().manual_seed(3)

    def backward():
        optimizer.zero_grad()
        x, y = torch.randn(64, 16, generator=draw), torch.randn(64, 8, generator=draw)
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        return loss

    def run():
        for _ in range(3):
            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            assert torch._C._len_torch_dispatch_stack() == 0

    if path is None:
        run()
    else:
        with whence.capture(model, path):
            run()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [p.detach().clone() for p in model.parameters()] + state


def steps_of(path):
    run = whence.open_run(path)
    return [c for c in run.calls if c.phase == "optimizer" and c.op in ("weight", "bias")]


def reasons(path):
    return {call.no_program for call in steps_of(path)}


@pytest.mark.parametrize("closure", (False, True), ids=("plain", "closure"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_stays_bitwise_what_it_is_and_has_a_program(kind, closure, tmp_path):
    bare = train(kind, closure=closure)
    seen = train(kind, tmp_path / "run", closure=closure)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))
    assert reasons(tmp_path / "run") == {""}
    assert len(steps_of(tmp_path / "run")) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_other_rounding_is_silent_and_another_computation_is_named(kind, tmp_path):
    train(kind, tmp_path / "reference")
    train(kind, tmp_path / "rounded", parts=True)
    assert whence.compare(tmp_path / "reference", tmp_path / "rounded").status == "same"

    class Shrinking(kind):
        def step(self, closure=None):
            loss = super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][4].mul_(1 - 1e-3)
            return loss

    Shrinking.__name__ = kind.__name__
    train(Shrinking, tmp_path / "wrong", parts=True)
    result = whence.compare(tmp_path / "reference", tmp_path / "wrong")
    assert [(f.name, f.phase, f.evidence) for f in result.findings] == [
        ("3/weight", "optimizer", "replay")
    ]


class InHalf(Own):
    """Keeps its averages in 16 bits."""

    def update(self, p, group, state):
        kept = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.bfloat16))
        average = kept.float().lerp(p.grad, 0.1)
        p.sub_(average, alpha=group["lr"])
        kept.copy_(average)


def test_what_an_optimiser_keeps_in_16_bits_is_no_sign_of_autocast(tmp_path):
    train(InHalf, tmp_path / "reference")
    train(InHalf, tmp_path / "target", lower=True)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "same"


def test_settings_that_differ_are_told_by_their_names(tmp_path):
    train(Own, tmp_path / "reference")
    train(Own, tmp_path / "target", betas=(0.95, 0.99))
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert (first.name, first.phase) == ("0/weight", "optimizer")
    assert "betas is [0.9, 0.99] in the reference, [0.95, 0.99] in the target" in first.sentence


class BySettings(Own):
    """Takes its rate from a tensor that its group has."""

    def __init__(self, params, rate=1e-2):
        super().__init__(params)
        self.param_groups[0]["rate"] = torch.tensor(rate)

    def update(self, p, group, state):
        p.sub_(p.grad * group["rate"])


def test_tensors_among_the_settings_are_settings(tmp_path):
    train(BySettings, tmp_path / "reference")
    assert reasons(tmp_path / "reference") == {""}
    train(BySettings, tmp_path / "target", rate=0.011)
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert (first.name, first.phase) == ("0/weight", "optimizer")
    assert "argument rate is" in first.sentence


class Tuning(BySettings):
    """Computes its own rate, of all gradients."""

    def begin(self, group):
        norms = torch.stack([p.grad.norm() for p in group["params"]])
        group["rate"].mul_(1 + 0.1 * norms.norm())


def test_a_setting_that_the_step_computes_is_no_constant(tmp_path):
    train(Tuning, tmp_path / "reference")
    assert reasons(tmp_path / "reference") == {
        "Tuning computes a setting of its own, which rounding changes (group.0.rate)"
    }
    assert not any("rate" in call.arguments for call in steps_of(tmp_path / "reference"))
    train(Tuning, tmp_path / "target", parts=True)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status != "different"


class Measuring(Own):
    """Sizes its steps by numbers that it takes out of gradients."""

    def update(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"] / (1 + p.grad.norm().item()))


class OnceMeasuring(Own):
    """Takes one number in its first step, and uses it in all."""

    def begin(self, group):
        if "size" not in group:
            group["size"] = group["params"][0].grad.norm().item()

    def update(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"] / (1 + group["size"]))


@pytest.mark.parametrize("kind", (Measuring, OnceMeasuring))
def test_a_number_out_of_a_tensor_is_no_constant(kind, tmp_path):
    train(kind, tmp_path / "run")
    assert reasons(tmp_path / "run") == {
        f"{kind.__name__} takes numbers out of tensors, which rounding changes"
    }


class OfAll(Own):
    """Divides every gradient by the norm of all."""

    def begin(self, group):
        self.norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()

    def update(self, p, group, state):
        p.sub_(p.grad / self.norm, alpha=group["lr"])


class WithNoise(Own):
    def update(self, p, group, state):
        p.sub_(p.grad + torch.randn_like(p) * 1e-3, alpha=group["lr"])


@pytest.mark.parametrize(
    "kind, words",
    ((OfAll, "reads 5 tensors of other parameters"), (WithNoise, "draws random numbers")),
)
def test_a_step_that_cannot_be_replayed_says_why(kind, words, tmp_path):
    train(kind, tmp_path / "run")
    assert all(words in reason for reason in reasons(tmp_path / "run"))
    train(kind, tmp_path / "target", parts=True)
    assert whence.compare(tmp_path / "run", tmp_path / "target").status != "different"


class Unlisted(Own):
    """Uses an operator that is not replayed, where rounding makes a whole step."""

    def update(self, p, group, state):
        p.sub_(torch.special.bessel_j0(p.grad * 1e10).sign(), alpha=group["lr"])


def test_a_step_whose_program_is_refused_is_undecided_where_gradients_differ(tmp_path):
    train(Unlisted, tmp_path / "reference")
    train(Unlisted, tmp_path / "target", parts=True)
    assert all(call.program for call in steps_of(tmp_path / "reference"))
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "undecided"


def test_parameters_that_share_a_count_of_steps_have_programs(tmp_path):
    class Shared(Own):
        def begin(self, group):
            count = self.state[group["params"][0]].get("count", torch.zeros(()))
            for p in group["params"]:
                self.state[p]["count"] = count
            count.add_(1)

        def update(self, p, group, state):
            p.sub_(p.grad / state["count"], alpha=group["lr"])

    train(Shared, tmp_path / "run")
    assert reasons(tmp_path / "run") == {""}
    train(Shared, tmp_path / "again")
    assert whence.compare(tmp_path / "run", tmp_path / "again").status == "same"


def test_a_step_that_raises_leaves_nothing_on_the_thread(tmp_path):
    class Failing(Own):
        def update(self, p, group, state):
            super().update(p, group, state)
            raise FloatingPointError

    model = net()
    optimizer = Failing(model.parameters())
    with whence.capture(model, tmp_path / "run"):
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            with pytest.raises(FloatingPointError):
                optimizer.step()
        model(torch.ones(4, 16))
        assert torch._C._len_torch_dispatch_stack() <= 1  # what follows a model's return
    assert torch._C._len_torch_dispatch_stack() == 0
    assert {call.step for call in whence.open_run(tmp_path / "run").calls} == {0}


def test_an_optimiser_inside_of_another_is_recorded(tmp_path):
    class Lookahead(Own):
        def __init__(self, params, **options):
            params = list(params)
            super().__init__(params, **options)
            self.inner = Own(params)

        @torch.no_grad()
        def step(self, closure=None):
            before = [p.clone() for p in self.param_groups[0]["params"]]
            self.inner.step()
            for p, kept in zip(self.param_groups[0]["params"], before, strict=True):
                p.lerp_(kept, 0.5)

    bare, seen = train(Lookahead), train(Lookahead, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))
    assert {(c.op_type, c.no_program) for c in steps_of(tmp_path / "run")} == {("Own", "")}


def test_without_elements_no_step_is_listened_to(tmp_path):
    model = net()
    optimizer = Own(model.parameters())
    with whence.capture(model, tmp_path / "run", keep="stats"):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
    assert reasons(tmp_path / "run") == {"programs were not recorded"}
