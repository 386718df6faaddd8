"""The gradient of a tensor that the code writes in place, as `loss *= n` in a training loop does."""

import pytest
import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.linear(x), y)


def trained(path, divisor):
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, path):
        for _ in range(2):
            loss = model(torch.randn(16, 8), torch.randint(0, 4, (16,)))
            loss *= 3
            (loss / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_loss_that_is_scaled_in_place_is_replayed(tmp_path):
    result = whence.compare(trained(tmp_path / "a", 2.0), trained(tmp_path / "b", 5.0))
    first = result.findings[0]
    assert first.name.endswith("loss") and first.confidence == "certain"
    refused = [v.sentence for v in result.verdicts if "no replay" in v.sentence]
    assert refused == []
