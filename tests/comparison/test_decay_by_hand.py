"""Weight decay that code before a step applies in the place of the optimiser."""

import pytest
import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch
X, Y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))


def trained(path, *, by_hand, decay=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0 if by_hand else decay)
    with whence.capture(model, path):
        for _ in range(2):
            nn.functional.mse_loss(model(X), Y).backward()
            if by_hand:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1 - 1e-2 * decay)
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_decay_by_hand_is_the_optimisers(tmp_path):
    reference = trained(tmp_path / "reference", by_hand=False)
    result = whence.compare(reference, trained(tmp_path / "target", by_hand=True))
    assert result.status == "same"
    assert result.findings == ()


@pytest.mark.parametrize("decay", [0.2, 0.1001, 0.0])
def test_another_decay_is_a_fault(decay, tmp_path):
    reference = trained(tmp_path / "reference", by_hand=False)
    result = whence.compare(reference, trained(tmp_path / "target", by_hand=True, decay=decay))
    assert result.status == "different"
    assert result.findings[0].phase == "optimizer"
