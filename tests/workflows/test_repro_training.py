"""`whence repro` of findings in training: a step of an optimiser, a backward pass."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402
import whence.errors  # noqa: E402
from whence import cli  # noqa: E402

pytestmark = pytest.mark.torch


class Squared(torch.autograd.Function):
    """The square, with a derivative of its own: 2 is right."""

    factor = 2

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * Squared.factor


class Square(torch.nn.Module):
    def forward(self, x):
        return Squared.apply(x)


class InPlace(torch.nn.Module):
    """Writes what it is given and what it made, and lets no gradient through its detached copy."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2.0)
        y = self.inner(x)
        y[:, :4].mul_(3.0)
        return Squared.apply(y) + x.detach()


class OwnStep(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.sub_(tensor.grad, alpha=group["lr"] * 1.1)


class MeasuredStep(OwnStep):
    """Takes numbers out of tensors, so it has no program."""

    @torch.no_grad()
    def step(self, closure=None):
        for tensor in self.param_groups[0]["params"]:
            tensor.sub_(tensor.grad, alpha=0.011 + 1e-3 * tensor.grad.norm().item())


def spoilt(optimizer):
    """The optimiser, with a state that is written behind its back."""

    def spoil(optimizer, *_):
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(1.1)

    optimizer.register_step_post_hook(spoil)
    return optimizer


def sgd(parameters, lr=0.01):
    return torch.optim.SGD(parameters, lr=lr)


def trained(path, optimizer=sgd, middle=torch.nn.Tanh, prepare=lambda net: None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), middle(), torch.nn.Linear(8, 4))
    prepare(net)
    made = optimizer(net.parameters())
    with whence.capture(net, path):
        for _ in range(2):
            torch.nn.functional.mse_loss(net(torch.randn(6, 8)), torch.randn(6, 4)).backward()
            made.step()
            made.zero_grad()
    return path


def reproduced(tmp_path, reference, target, *, run=False):
    compared = whence.compare(reference, target, output=tmp_path / "cmp")
    return whence.repro(compared, tmp_path / "repro", run=run)


def script(made):
    """The written script as a module."""
    spec = importlib.util.spec_from_file_location("written_repro", made.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optimizer(name, **settings):
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **settings)


@pytest.mark.parametrize(
    ("reference", "target", "differs"),
    [
        (
            optimizer("AdamW"),
            optimizer("AdamW", betas=(0.9, 0.9)),
            "torch.optim.AdamW: betas is [0.9, 0.999] in the reference, [0.9, 0.9] in the target",
        ),
        (
            optimizer("Adam"),
            optimizer("Adam", weight_decay=0.1),
            "torch.optim.Adam: weight_decay is 0 in the reference, 0.1 in the target",
        ),
        (
            optimizer("SGD", momentum=0.9),
            optimizer("SGD", momentum=0.9, nesterov=True),
            "torch.optim.SGD: nesterov is False in the reference, True in the target",
        ),
        (
            optimizer("RMSprop"),
            optimizer("RMSprop", alpha=0.9),
            "torch.optim.RMSprop: alpha is 0.99 in the reference, 0.9 in the target",
        ),
        (
            optimizer("AdamW", weight_decay=0.0),
            optimizer("RMSprop"),
            "torch.optim.RMSprop: optimiser is AdamW in the reference, RMSprop in the target",
        ),
    ],
    ids=["betas", "weight decay", "nesterov", "alpha", "class"],
)
def test_a_step_with_other_settings(tmp_path, capsys, reference, target, differs):
    made = reproduced(
        tmp_path, trained(tmp_path / "ref", reference), trained(tmp_path / "tgt", target)
    )
    assert (made.how, made.notes) == ("semantic", (differs,))
    assert made.operators == (differs.partition(":")[0],)
    written = script(made)
    assert written.check("reference")
    assert not written.check("target")
    assert f"what differs: {differs}" in capsys.readouterr().out


def test_a_later_step_has_the_state_of_the_step_before(tmp_path):
    def nesterov_later(parameters):
        made = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        made.register_step_post_hook(lambda *_: made.param_groups[0].update(nesterov=True))
        return made

    made = reproduced(
        tmp_path,
        trained(tmp_path / "ref", optimizer("SGD", momentum=0.9)),
        trained(tmp_path / "tgt", nesterov_later),
    )
    written = script(made)
    assert "momentum_buffer" in written.inputs()
    assert (written.check("reference"), written.check("target")) == (True, False)


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        (sgd, lambda parameters: MeasuredStep(parameters, lr=0.01)),
        (optimizer("AdamW"), lambda parameters: spoilt(optimizer("AdamW")(parameters))),
    ],
    ids=["numbers of its own", "state that is written"],
)
def test_a_step_that_cannot_be_replayed_is_judged_by_what_it_left(tmp_path, reference, target):
    made = reproduced(
        tmp_path, trained(tmp_path / "ref", reference), trained(tmp_path / "tgt", target)
    )
    assert (made.how, made.default) == ("recorded", "recorded")
    written = script(made)
    assert [written.check(side) for side in ("recorded", "target", "reference")] == [
        False,
        True,
        True,
    ]


class LongStep(OwnStep):
    factors = (1.0,) * 7

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for tensor in self.param_groups[0]["params"]:
            for factor in self.factors:
                tensor.mul_(factor)


class LongerStep(LongStep):
    factors = (*LongStep.factors, 0.999)


@pytest.mark.parametrize(
    ("reference", "target", "differs"),
    [
        (sgd, OwnStep, "the reference runs torch.optim.SGD; the target aten.sub_.Tensor"),
        (LongStep, LongerStep, "the reference runs nothing; the target aten.mul_.Tensor"),
    ],
    ids=["in place of torch's", "one operator more"],
)
def test_a_step_of_the_programs_own_code(tmp_path, reference, target, differs):
    made = reproduced(
        tmp_path,
        trained(tmp_path / "ref", lambda parameters: reference(parameters, lr=0.01)),
        trained(tmp_path / "tgt", lambda parameters: target(parameters, lr=0.01)),
    )
    assert (made.how, made.default) == ("semantic", "target")
    assert made.notes[0].startswith(differs)
    written = script(made)
    assert (written.check("reference"), written.check("target")) == (True, False)


@pytest.mark.parametrize("middle", [Square, InPlace])
def test_a_wrong_derivative_is_judged_by_what_was_recorded(tmp_path, monkeypatch, middle):
    reference = trained(tmp_path / "ref", middle=middle)
    monkeypatch.setattr(Squared, "factor", 1)
    made = reproduced(tmp_path, reference, trained(tmp_path / "tgt", middle=middle))
    assert (made.how, made.default) == ("recorded", "recorded")
    assert "aten.mul.Tensor" in made.operators
    assert made.operators[-1] == "torch.autograd.grad"
    written = script(made)
    assert [written.check(side) for side in ("recorded", "target", "reference")] == [
        False,
        True,
        True,
    ]


class Gated(torch.nn.Module):
    def __init__(self, detached=False):
        super().__init__()
        self.detached = detached

    def forward(self, x):
        gate = torch.sigmoid(x)
        return x * (gate.detach() if self.detached else gate)


def test_a_backward_pass_of_other_operators(tmp_path):
    made = reproduced(
        tmp_path,
        trained(tmp_path / "ref", middle=Gated),
        trained(tmp_path / "tgt", middle=lambda: Gated(detached=True)),
    )
    assert (made.how, made.notes) == (
        "semantic",
        ("the reference runs nothing; the target aten.detach.default",),
    )
    written = script(made)
    assert (written.check("reference"), written.check("target")) == (True, False)


@pytest.mark.slow
def test_the_script_of_a_step_runs_on_its_own(tmp_path):
    made = reproduced(
        tmp_path,
        trained(tmp_path / "ref", optimizer("AdamW")),
        trained(tmp_path / "tgt", optimizer("AdamW", eps=1e-2)),
        run=True,
    )
    assert made.holds, made.seen
    assert made.sentence == "fails as the target runs it; passes as the reference does"


def test_a_state_that_the_target_does_not_keep_is_refused_in_words(tmp_path):
    reference = trained(tmp_path / "ref", optimizer("AdamW", amsgrad=True))
    target = trained(tmp_path / "tgt", optimizer("AdamW"))
    with pytest.raises(whence.errors.ReplayRefused, match="keeps max_exp_avg_sq of") as refused:
        reproduced(tmp_path, reference, target)
    assert "--model" not in str(refused.value)


def test_generated_tests_leave_out_what_they_do_not_run(tmp_path, capsys):
    run = trained(tmp_path / "run")
    words = ["ops", "generate", str(run), "--level", "module", "-o", str(tmp_path / "tests")]
    assert cli.execute(words) == 0
    told = capsys.readouterr()
    for what in ("a backward pass", "a step of an optimiser"):
        assert (
            f"left out: {what}, which these tests do not run; whence repro" in told.err + told.out
        )


def test_a_gradient_that_is_only_handed_on_is_refused_in_words(tmp_path):
    def hooked(net):
        net[0].weight.register_hook(lambda gradient: gradient * 1.5)

    with pytest.raises(whence.errors.ReplayRefused, match=r"only hands on.*hook") as refused:
        reproduced(tmp_path, trained(tmp_path / "ref"), trained(tmp_path / "tgt", prepare=hooked))
    assert "--model" not in str(refused.value)
