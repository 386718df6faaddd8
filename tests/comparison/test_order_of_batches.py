"""Two trainings that take the same batches in another order were given other inputs: no step of one
is paired across an update of the other. One that lies within the other is found there.
"""

import pytest

import whence

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

pytestmark = pytest.mark.torch
CHANCE = torch.Generator().manual_seed(1)
BATCHES = [torch.randn(6, 8, generator=CHANCE) for _ in range(4)]
LABELS = [batch**2 for batch in BATCHES]


def trained(folder, order, start=()):
    """Steps on the batches of `order`, after those of `start`, which are not captured."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(number):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(BATCHES[number]), LABELS[number]).backward()
        optimizer.step()

    for number in start:
        step(number)
    with whence.capture(net, folder):
        for number in order:
            step(number)
    return folder


@pytest.mark.parametrize("order", [(1, 0), (1, 2, 3, 0), (2, 1, 0)])
def test_another_order_is_no_fault(order, tmp_path):
    reference = trained(tmp_path / "reference", sorted(order))
    result = whence.compare(reference, trained(tmp_path / "target", order))
    assert (result.status, list(result.findings)) == ("undecided", [])
    assert "inputs of the model differ" in result.headline


def test_a_training_that_goes_on_from_a_checkpoint_is_compared_with_these_steps(tmp_path):
    reference = trained(tmp_path / "reference", range(4))
    result = whence.compare(reference, trained(tmp_path / "target", (2, 3), start=(0, 1)))
    assert not result.findings
    assert any("steps of" in note and "are moved by 2" in note for note in result.plan.notes)
