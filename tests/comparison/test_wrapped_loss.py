"""The loss of a model inside of a wrapper is one computation with that of a model without, or behind
it: wrappers that hand on are left out, and what they compute behind the model is a part of the loss.
"""

import os
import subprocess
from pathlib import Path

import pytest

import warm

pytest.importorskip("torch")
import torch
from loss_trainings import (
    Around,
    Step,
    behind,
    half_detached,
    inside,
    smoothed,
    step,
    summed,
    trained,
    trained_on_images,
    without_auxiliary,
)
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import whence
from whence.report import answer

pytestmark = pytest.mark.torch


class Direct(nn.Module):
    """Runs the code of the model without calling it, as PEFT does."""

    def __init__(self, net):
        super().__init__()
        self.base = nn.Module()
        self.base.model = net

    def forward(self, *args):
        return self.base.model.forward(*args)


class Answering(nn.Module):
    """Returns what `answer` makes of what the model returned."""

    def __init__(self, net, answer):
        super().__init__()
        self.model, self.answer = net, answer

    def forward(self, *args):
        return self.answer(self.model(*args))


class Halved(torch.autograd.Function):
    """A tensor as it is, and half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


def criterion_step(**options):
    """A `Step` whose loss is a module beside the model."""

    def wrap(net):
        wrapper = Step(net)
        wrapper.criterion = nn.CrossEntropyLoss(**options)

        def loss(model, ids, labels):
            return wrapper.criterion(model(ids)["logits"].flatten(0, 1), labels.flatten())

        wrapper.loss = loss
        return wrapper

    return wrap


def training_step(net, ids, labels):
    """As Lightning calls a module: nobody calls the module itself."""
    return net.loss(net.model, ids, labels)


FORMS = {
    "plain": {},
    "around": {"wrap": Around},
    "twice": {"wrap": lambda net: Around(Around(net))},
    "DataParallel": {"wrap": DataParallel},
    "averaged": {"wrap": AveragedModel},
    "direct": {"wrap": Direct},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trainings by form and by whether the model has its loss inside or behind it, made once."""
    folder, made = tmp_path_factory.mktemp("wrapped"), {}

    def run(form, place):
        if (form, place) not in made:
            path = folder / f"{form}-{place.__name__}"
            made[form, place] = trained(path, "auxiliary", place, **FORMS[form])
        return made[form, place]

    return run


def compared(reference, target):
    result = whence.compare(reference, target)
    return result, answer.answer(result)


def is_same(reference, target):
    result, words = compared(reference, target)
    assert result.status == "same", words
    assert not result.findings
    assert not (result.plan.unmatched_reference or result.plan.unmatched_target)
    return result


@pytest.mark.parametrize(
    ("form", "place", "other", "other_place"),
    [
        ("around", inside, "around", behind),
        ("around", behind, "around", inside),
        ("around", inside, "plain", behind),
        ("plain", inside, "around", behind),
        ("plain", inside, "around", inside),
        ("around", behind, "plain", behind),
        ("plain", inside, "twice", behind),
        ("twice", inside, "around", behind),
        ("DataParallel", inside, "DataParallel", behind),
        ("averaged", inside, "plain", behind),
        ("direct", inside, "plain", behind),
        ("direct", behind, "direct", inside),
    ],
)
def test_a_wrapper_that_hands_on_is_left_out(form, place, other, other_place, runs):
    result = is_same(runs(form, place), runs(other, other_place))
    if place is not other_place:
        assert any("compared as one call" in note for note in result.plan.notes)
    for side, name in (("reference", form), ("target", other)):
        if name == "around":
            assert f"Around around Net in the {side} is left out" in result.plan.notes


@pytest.mark.parametrize("loss", [behind, inside])
@pytest.mark.parametrize("how", [step, training_step])
def test_a_module_that_computes_the_loss_of_its_model(loss, how, runs, tmp_path):
    training = trained(tmp_path / "t", "auxiliary", how, wrap=lambda net: Step(net, loss))
    for place in (inside, behind):
        is_same(runs("plain", place), training)
        is_same(training, runs("plain", place))
    wrong = trained(tmp_path / "w", "auxiliary", how, wrap=lambda net: Step(net, smoothed))
    result, _ = compared(training, wrong)
    assert result.findings[0].name in ("Step/loss", "Step")


def test_a_loss_that_is_a_module_beside_the_model(tmp_path):
    reference = trained(tmp_path / "r", "plain", inside)
    is_same(reference, trained(tmp_path / "t", "plain", step, wrap=criterion_step()))
    smooth = criterion_step(label_smoothing=0.01)
    result, _ = compared(reference, trained(tmp_path / "w", "plain", step, wrap=smooth))
    assert result.findings[0].name == "Net/loss"


@pytest.mark.parametrize(
    ("loss", "phase", "name"),
    [
        (smoothed, "forward", "/loss"),
        (summed, "forward", "/loss"),
        (without_auxiliary, "forward", "/loss"),
        (half_detached, "backward", ""),
    ],
)
def test_another_loss_is_named(loss, phase, name, runs, tmp_path):
    wrapped = trained(tmp_path / "w", "auxiliary", loss, wrap=Around)
    computed = trained(tmp_path / "c", "auxiliary", step, wrap=lambda net: Step(net, loss))
    plain = trained(tmp_path / "p", "auxiliary", loss)
    for reference, target, root, model in (
        (runs("plain", inside), wrapped, "Net", "Net"),
        (runs("around", inside), plain, "Around", "model"),
        (runs("plain", inside), computed, "Net", "Net"),
        (runs("around", inside), wrapped, "Around", "model"),
    ):
        result, words = compared(reference, target)
        first = result.findings[0]
        place = f"{root}{name}" if name else model
        assert (first.name, first.phase or "forward", first.step) == (place, phase, 0)
        assert first.confidence == "certain", words


def test_a_fault_of_the_model_inside_is_named_there(runs, tmp_path):
    def change(net):
        net.layer[1] = nn.GELU(approximate="tanh")

    wrapped = trained(tmp_path / "w", "auxiliary", behind, wrap=Around, change=change)
    result, _ = compared(runs("plain", inside), wrapped)
    assert [finding.name for finding in result.findings[:1]] == ["layer.1"]
    assert not any("loss" in finding.name for finding in result.findings)


def test_a_wrapper_that_changes_what_the_model_is_given_is_not_the_same(runs, tmp_path):
    class Shifted(Around):
        def forward(self, ids, *labels):
            return self.model((ids + 1) % 24, *labels)

    for place in (inside, behind):
        wrapped = trained(tmp_path / place.__name__, "auxiliary", place, wrap=Shifted)
        result, words = compared(runs("plain", inside), wrapped)
        assert result.status != "same", words
        assert "the inputs of the model differ" in words


def test_a_wrapper_that_changes_a_gradient_is_not_left_out(runs, tmp_path):
    def answer(out):
        return {**out, "logits": Halved.apply(out["logits"])}

    wrapped = trained(tmp_path / "w", "auxiliary", behind, wrap=lambda net: Answering(net, answer))
    result, words = compared(runs("plain", inside), wrapped)
    assert result.status != "same", words
    assert "Answering changes the gradient of its model" in words


def test_what_a_wrapper_returns_otherwise_is_not_hidden(runs, tmp_path):
    def other(out):
        return {**out, "gate": out["gate"].softmax(-1)}

    def more(out):
        return {**out, "chances": out["logits"].softmax(-1)}

    def trained_with(name, answer):
        path = tmp_path / name
        return trained(path, "plain", inside, wrap=lambda net: Answering(net, answer))

    plain = trained(tmp_path / "plain", "plain", behind)
    result, words = compared(plain, trained_with("other", other))
    assert result.status != "same", words
    assert "Answering returns another output.gate than its model" in words
    result, words = compared(trained_with("more", more), plain)
    assert result.status == "undecided", words
    assert "output.chances" in words


def test_a_model_that_shows_no_layers_is_said(runs, tmp_path):
    class Sealed(nn.Module):
        """Its layers are no modules."""

        def __init__(self, net):
            super().__init__()
            self.parameters_of = nn.ParameterList(net.parameters())
            self.code = [net]

        def forward(self, *args):
            with_parameters = dict(zip(dict(self.code[0].named_parameters()), self.parameters_of))
            return torch.func.functional_call(self.code[0], with_parameters, args)

    sealed = trained(tmp_path / "s", "auxiliary", behind, wrap=Sealed)
    result, words = compared(runs("plain", inside), sealed)
    assert not result.findings, words


def test_names_that_the_user_gives_are_those_of_the_runs(runs, tmp_path):
    chart = tmp_path / "map.yaml"
    chart.write_text("pairs:\n  - {reference: head, target: model.head}\n")
    result = whence.compare(runs("plain", inside), runs("around", inside), mapping=chart)
    heads = [p for p in result.plan.pairs if "map" in p.rule]
    assert heads
    result = whence.compare(runs("around", inside), runs("around", behind), match="exact")
    assert not any("is left out" in note for note in result.plan.notes)


@pytest.mark.parametrize("place", [inside, behind])
def test_a_validation_between_two_steps_is_compared_without_the_wrapper_too(place, tmp_path):
    def with_validation(net, ids, labels):
        net.eval()
        with torch.no_grad():
            net(ids)
        net.train()
        return place(net, ids, labels)

    paths = [
        trained(tmp_path / name, "auxiliary", with_validation, wrap=wrap)
        for name, wrap in (("plain", lambda net: net), ("around", Around))
    ]
    is_same(*paths)
    is_same(*reversed(paths))


def test_further_runs_are_brought_to_the_same_form(runs, tmp_path):
    again = trained(tmp_path / "again", "auxiliary", step, wrap=Step)
    target = trained(tmp_path / "t", "auxiliary", smoothed)
    reference = trained(tmp_path / "r", "auxiliary", step, wrap=Step)
    result = whence.compare(reference, target, again=[again])
    assert result.findings[0].name == "Step/loss"


def test_lora_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(net):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
        return peft.get_peft_model(net, config)

    reference = trained(tmp_path / "r", "capped", inside, wrap=adapted)
    is_same(reference, trained(tmp_path / "t", "capped", behind, wrap=adapted))
    result, _ = compared(reference, trained(tmp_path / "w", "capped", smoothed, wrap=adapted))
    assert result.findings[0].name == "PeftModel/loss"


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """A folder of trainings under DistributedDataParallel on two ranks."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("no gloo")
    folder = tmp_path_factory.mktemp("ranked")
    program = Path(__file__).with_name("loss_trainings.py")
    source = str(Path(whence.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [warm.TORCH, program, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_ranks_of_a_wrapped_model(ranked, runs):
    is_same(ranked / "ddp-inside", ranked / "ddp-behind")
    for place in (inside, behind):
        is_same(runs("plain", place), ranked / "ddp-behind")
        is_same(ranked / "ddp-inside", runs("plain", place))
    result, _ = compared(ranked / "ddp-inside", ranked / "ddp-summed")
    assert result.findings[0].name == "DistributedDataParallel/loss"
    result, _ = compared(runs("plain", inside), ranked / "ddp-summed")
    assert result.findings[0].name == "Net/loss"


@pytest.mark.slow
def test_gradients_that_are_rounding_alone_are_parts_on_ranks(ranked, tmp_path):
    plain = trained_on_images(tmp_path / "plain")
    is_same(plain, ranked / "ddp-images")
    is_same(ranked / "ddp-images", plain)


def test_one_rank_of_a_wrapped_model(runs, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        paths = [
            trained(tmp_path / p.__name__, "auxiliary", p, wrap=DistributedDataParallel)
            for p in (inside, behind)
        ]
    finally:
        torch.distributed.destroy_process_group()
    is_same(*paths)
    is_same(paths[0], runs("plain", behind))
    is_same(runs("plain", inside), paths[1])
