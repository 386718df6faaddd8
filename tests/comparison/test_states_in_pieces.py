"""A prompt in pieces, taken up with a cache that holds states and no tokens."""

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402

pytestmark = pytest.mark.torch
IDS = torch.tensor([[3, 10, 17, 4, 11, 18, 5, 12]])


class Scan(torch.nn.Module):
    """A running sum of what came in, from a state on."""

    def forward(self, x, state):
        sums = x.cumsum(1) + state[:, None]
        return sums, sums[:, -1]


class Network(torch.nn.Module):
    """The states of two layers have other extents, so none of them is a number of tokens."""

    def __init__(self, *, restarts=False):
        super().__init__()
        self.restarts, self.tokens = restarts, torch.nn.Embedding(20, 6)
        self.places, self.wide = torch.nn.Embedding(16, 6), torch.nn.Linear(6, 10)
        self.first, self.second = Scan(), Scan()
        self.head = torch.nn.Linear(10, 20)

    def forward(self, input_ids, past_key_values=None):
        shape = input_ids.shape
        past, first, second = past_key_values or (0, torch.zeros(1, 6), torch.zeros(1, 10))
        start = 0 if self.restarts else past
        places = torch.arange(start, start + shape[1])
        x, first = self.first(self.tokens(input_ids) + self.places(places), first)
        y, second = self.second(self.wide(x).tanh(), second)
        return self.head(y), {"past_key_values": (past + shape[1], first, second)}


def captured(path, pieces, *, restarts=False):
    torch.manual_seed(0)
    model, cache = Network(restarts=restarts).eval(), None
    with torch.no_grad(), whence.capture(model, path):
        for piece in IDS.split(pieces, 1):
            cache = model(piece, past_key_values=cache)[1]["past_key_values"]
    return path


@pytest.mark.parametrize("pieces", [4, [3, 5]])
def test_a_state_is_taken_up(pieces, tmp_path):
    whole = captured(tmp_path / "whole", 8)
    assert whence.compare(whole, captured(tmp_path / "pieces", pieces)).status == "same"


def test_positions_that_restart_are_a_fault(tmp_path):
    whole = captured(tmp_path / "whole", 8)
    result = whence.compare(whole, captured(tmp_path / "pieces", 4, restarts=True))
    assert result.status == "different"
    assert result.findings[0].slot == "places:input.0"
    assert str(result.findings[0].cause) != "kernel"
