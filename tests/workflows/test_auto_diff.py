"""Two models on one input in one call."""

import copy

import msgspec
import numpy as np
import pytest

import whence
from whence.errors import OutputExists, UsageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)
    ).eval()


def test_the_same_and_another(model, capsys):
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    same = whence.auto_diff(model, copy.deepcopy(model), x)
    assert same
    assert capsys.readouterr().out.startswith("SAME")
    other = copy.deepcopy(model)
    other[1].approximate = "tanh"
    found = whence.auto_diff(model, other, torch.from_numpy(x))
    assert not found
    assert (found.status, found.findings[0].name) == ("different", "1")
    assert "FAULT" in capsys.readouterr().out


def test_inputs_by_name_by_place_and_for_each(model, tmp_path):
    x = torch.ones(2, 8)
    for inputs in ({"input": x}, (x,), ({"input": x}, {"input": x.clone()}), ((x,), [x])):
        assert whence.auto_diff(model, copy.deepcopy(model), inputs)
    made = whence.auto_diff(
        model,
        copy.deepcopy(model),
        x,
        output=tmp_path / "out",
        capture={"keep": "stats"},
        strict=True,
    )
    assert made
    assert whence.load_comparison(tmp_path / "out").status == "same"
    assert whence.open_run(str(tmp_path / "out" / "reference")).calls
    with pytest.raises(OutputExists):
        whence.auto_diff(model, model, x, output=tmp_path / "out")


def test_undecided_is_not_true(model):
    found = whence.auto_diff(model, model, torch.ones(2, 8))
    assert found
    assert not msgspec.structs.replace(found, status="undecided")


def test_other_things_are_refused(model):
    with pytest.raises(UsageError, match="not a function"):
        whence.auto_diff(lambda x: x, model, torch.ones(2, 8))


@pytest.mark.paddle
def test_torch_against_paddle(model):
    paddle = pytest.importorskip("paddle")

    class Same(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.a, self.b = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 8)
            for mine, theirs in ((self.a, model[0]), (self.b, model[2])):
                mine.weight.set_value(theirs.weight.detach().numpy().T)
                mine.bias.set_value(theirs.bias.detach().numpy())

        def forward(self, input):  # noqa: A002 - as torch's Sequential calls it
            return self.b(paddle.nn.functional.gelu(self.a(input)))

    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    assert whence.auto_diff(Same(), Same(), {"input": x})
    found = whence.auto_diff(Same(), model, {"input": x})
    assert not found.findings
