"""The batch on another axis than the first: it is the axis that follows the batch of both runs."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


class Tower(nn.Module):
    """Patches first and rows second, as in CLIP's towers; relative places with the rows third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table, self.patch = nn.Embedding(32, 16), nn.Linear(8, 16)
        self.norm, self.mix, self.places = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(1, 4)
        self.head = nn.Linear(20, 32)

    def forward(self, input_ids, pixels):
        text = self.table(input_ids)
        seen = self.mix(self.norm(self.patch(pixels).transpose(0, 1))).tanh().mean(0)
        apart = (input_ids.T[:, None] - input_ids.T[None]).float()[..., None] / 32
        places = self.places(apart).mean(0).transpose(0, 1)
        return self.head(torch.cat([text + seen[:, None], places], -1))


@pytest.mark.parametrize("rows", [[1, 0, 0, 1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("at_fault", ["", "mix", "places"])
def test_rows_on_any_axis_are_paired(tmp_path, rows, at_fault):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(32, (2, 7), generator=generator)
    pixels = torch.randn(2, 5, 8, generator=generator)
    for name, order in (("reference", [0, 1]), ("target", rows)):
        model = Tower().eval()
        if at_fault and name == "target":
            getattr(model, at_fault).bias.data[2] += 0.05
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(ids[order], pixels[order])
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    if at_fault:
        assert result.findings[0].name == at_fault
    else:
        assert result.status == "same"
