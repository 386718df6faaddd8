"""Models that scale or cap their logits: what their head returned against what they returned."""

from __future__ import annotations

import numpy as np
import pytest

import whence
from whence.records.logits import LAST_LAYER, maker_of

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

FORMS = {
    "as it is": lambda logits: logits,
    "scaled": lambda logits: logits * 0.0625,
    "capped": lambda logits: 1.5 * torch.tanh(logits / 1.5),
}


class Small(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = torch.nn.Embedding(60, 16), torch.nn.Linear(16, 16)
        self.lm_head, self.form = torch.nn.Linear(16, 60), FORMS[form]

    def forward(self, input_ids):
        return self.form(self.lm_head(torch.relu(self.body(self.embed(input_ids).cumsum(1)))))


class Tied(Small):
    """Its last module returns no logits: a function makes them."""

    def __init__(self) -> None:
        super().__init__("as it is")
        del self.lm_head

    def forward(self, input_ids):
        hidden = torch.relu(self.body(self.embed(input_ids).cumsum(1)))
        return torch.nn.functional.linear(hidden, self.embed.weight)


def captured(path, net, scale=1.0, **options):
    """Four tokens behind a prompt."""
    with torch.no_grad():
        net.body.weight[:8] *= scale
        ids = torch.tensor([[5, 17, 41, 33]])
        with whence.capture(net, path, level="logits", **options):
            for _ in range(4):
                following = net(ids)[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, following], 1)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_the_last_module_is_captured_alike_whatever_the_model_makes_of_it(tmp_path, form):
    run = whence.open_run(captured(tmp_path / "run", Small(form), logits_module=LAST_LAYER))
    assert maker_of(run) == "lm_head"
    net = Small(form)
    given, made = (run.calls[0].slots(kind)[0].record for kind in ("input", "output"))
    wanted = net.lm_head(torch.relu(net.body(net.embed(torch.tensor(run.array(given))).cumsum(1))))
    np.testing.assert_array_equal(run.array(made)[0, -1], wanted[0, -1].detach().numpy())


def test_a_last_module_that_returns_no_logits_is_left_alone(tmp_path):
    run = whence.open_run(captured(tmp_path / "run", Tied(), logits_module=LAST_LAYER))
    assert maker_of(run) == ""
    assert run.records[run.calls[0].slots("output")[0].record].shape[-1] == 60


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize(
    ("form", "words"),
    [("scaled", "a factor of 0.0625"), ("capped", "1.5 * tanh(logits / 1.5)")],
)
def test_what_lies_between_two_tensors_is_no_fault_and_no_pass(tmp_path, form, words, inside):
    options = [{}, {}]
    options[inside] = {"logits_module": "lm_head"}
    paths = [captured(tmp_path / str(side), Small(form), **options[side]) for side in (0, 1)]
    result = whence.compare(*paths)
    assert result.status == "undecided"
    assert words in result.headline
    assert "not the same tensor" in result.headline


@pytest.mark.parametrize("form", FORMS)
def test_a_fault_is_one_whatever_lies_between(tmp_path, form):
    module = captured(tmp_path / "module", Small(form), logits_module="lm_head")
    model = captured(tmp_path / "model", Small(form), scale=2.0)
    result = whence.compare(module, model)
    assert result.status == "different"
    assert any("lm_head returned" in note for note in result.notes)


def test_a_model_that_returns_what_its_head_does_is_the_same(tmp_path):
    module = captured(tmp_path / "module", Small("as it is"), logits_module="lm_head")
    assert whence.compare(module, captured(tmp_path / "model", Small("as it is"))).status == "same"


def test_a_factor_between_what_two_models_returned_is_a_fault(tmp_path):
    one = captured(tmp_path / "one", Small("scaled"))
    assert (
        whence.compare(one, captured(tmp_path / "other", Small("as it is"))).status == "different"
    )
