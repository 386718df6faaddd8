"""Tables that each side computes (sines of positions, inverse frequencies) differ in the last
digit between processors: rounding, and told; a table that is cut off is a fault.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch


class Rotary(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x):
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies
        return x * torch.cat((angles.cos(), angles.sin()), -1)


def captured(model, path):
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), whence.capture(model, str(path)):
        model(x)
    return str(path)


def models(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Rotary(), nn.Linear(64, 64)).eval()
    target = copy.deepcopy(model)
    table = target[1].frequencies
    table.copy_(change(table))
    return model, target


def last_digits(table):
    steps = torch.arange(table.numel()) % 3 - 1
    return (table.view(torch.int32) + steps.to(torch.int32)).view(torch.float32)


def test_last_digits_of_a_table_are_rounding_and_are_told(tmp_path):
    model, target = models(last_digits)
    result = whence.compare(
        captured(model, tmp_path / "reference"), captured(target, tmp_path / "target")
    )
    assert result.status == "same", result.headline
    (note,) = [n for n in result.notes if "frequencies" in n]
    assert "last digits differ" in note


@pytest.mark.parametrize(
    "change",
    [lambda t: t * (1 - 2e-7), lambda t: t.bfloat16().float(), lambda t: 1.0001 * t],
    ids=["all smaller", "stored in bfloat16", "another base"],
)
def test_other_differences_of_a_table_are_faults(change, tmp_path):
    model, target = models(change)
    result = whence.compare(
        captured(model, tmp_path / "reference"), captured(target, tmp_path / "target")
    )
    assert [f.name for f in result.findings] == ["1"]
    assert result.findings[0].verdict == "param-diff"
