"""A model that returns another shape for the same inputs is no other layout of one result."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402
from whence.report import answer  # noqa: E402

pytestmark = pytest.mark.torch


class Head(torch.nn.Module):
    def __init__(self, returned=lambda y: y, read=lambda x: x):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.returned, self.read = torch.nn.Linear(8, 10), returned, read

    def forward(self, x):
        return self.returned(torch.relu(self.layer(self.read(x))))


def compared(tmp_path, models, inputs):
    for side, model, x in zip(("reference", "target"), models, inputs, strict=True):
        with whence.capture(model, tmp_path / side):
            model(x)
    return whence.compare(tmp_path / "reference", tmp_path / "target")


X = torch.tensor(np.random.default_rng(0).standard_normal((1, 8)), dtype=torch.float32)
CHANGES = {
    "lost": lambda y: y[0],
    "gained": lambda y: y[:, None],
    "flattened": lambda y: y.reshape(2, 5),
    "turned": lambda y: y.T.contiguous(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("turned", [False, True])
def test_another_shape_is_a_finding_at_the_model(tmp_path, change, turned):
    models = [Head(), Head(CHANGES[change])]
    result = compared(tmp_path, models[::-1] if turned else models, [X, X])
    assert result.status == "different"
    (finding,) = result.findings
    assert finding.verdict == "structural" and finding.slot == "output.0"
    assert "for inputs of the same shapes" in finding.sentence
    assert "[1, 10]" in finding.sentence
    assert "structural" in answer.headline(result)


@pytest.mark.parametrize("axis", [0, 1])
def test_more_elements_than_the_reference_returned_are_a_finding(tmp_path, axis):
    more = Head(lambda y: torch.cat([y, torch.full_like(y, -9.0)], axis))
    result = compared(tmp_path, [Head(), more], [X, X])
    assert result.status == "different"
    (finding,) = result.findings
    assert finding.verdict == "structural" and "for inputs of the same shapes" in finding.sentence


def test_logits_of_a_padded_vocabulary_may_be_longer(tmp_path):
    models = [Head(), Head()]
    padded = torch.nn.Linear(8, 20)
    with torch.no_grad():
        padded.weight[:10], padded.bias[:10] = models[0].layer.weight, models[0].layer.bias
        padded.weight[10:], padded.bias[10:] = 0, 0
    models[1].layer = padded
    assert compared(tmp_path, models, [X, X]).findings == ()


class Scores(torch.nn.Module):
    """Scores of all tokens, or of as many of the last as it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)

    def forward(self, input_ids, keep):
        return self.head(self.embed(input_ids).cumsum(1)[:, -keep:])


@pytest.mark.parametrize("keeps", [(1, 12), (12, 1)])
def test_scores_of_the_last_token_alone_are_those_of_all_tokens(tmp_path, keeps):
    tokens = torch.arange(24).reshape(2, 12)
    for side, keep in zip(("reference", "target"), keeps, strict=True):
        model = Scores()
        with whence.capture(model, tmp_path / side):
            model(tokens, keep=keep)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "same" and result.findings == ()


def test_a_wrong_layer_is_named_before_the_shape(tmp_path):
    models = [Head(), Head(CHANGES["lost"])]
    with torch.no_grad():
        models[1].layer.weight[2, 3] += 1
    result = compared(tmp_path, models, [X, X])
    assert result.findings[0].name == "layer"


def test_who_asks_in_other_axes_gets_other_axes_and_is_told(tmp_path):
    """Inputs lost the same axis: a convention of the caller."""
    result = compared(tmp_path, [Head(), Head()], [X, X[0]])
    assert result.status == "same"
    assert [a.words for a in result.alike] == [
        "returned as [10] in the target, [1, 10] in the reference"
    ]
    assert "bitwise identical" not in answer.answer(result)


def test_a_scalar_is_one_number_in_either_form(tmp_path):
    models = [Head(lambda y: y.sum()), Head(lambda y: y.sum()[None])]
    result = compared(tmp_path, models, [X, X])
    assert result.status == "same" and "returned as [1]" in result.alike[0].words


def test_one_shape_is_no_finding(tmp_path):
    result = compared(tmp_path, [Head(), Head(lambda y: y.T.contiguous().T)], [X, X])
    assert result.status == "same" and not result.alike
