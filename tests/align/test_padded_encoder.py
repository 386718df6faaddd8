"""Rows of an encoder with a decoder, padded, in another order and beside other rows."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(32, 16)
        self.encoder = nn.Linear(16, 16)
        self.query, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        memory = self.encoder(self.table(input_ids)).tanh()
        scores = self.query(self.table(decoder_input_ids)) @ memory.mT
        scores = scores.masked_fill(attention_mask[:, None] == 0, -1e9)
        return self.head(scores.softmax(-1) @ memory)


@pytest.mark.parametrize("rows", [[1, 0, 2], [2, 1, 0, 1, 2], [2, 2, 0, 1]], ids=str)
@pytest.mark.parametrize("fault", [False, True])
def test_padded_rows_are_found_wherever_they_are(tmp_path, rows, fault):
    generator = torch.Generator().manual_seed(4)
    ids, answer = (torch.randint(32, (3, n), generator=generator) for n in (7, 5))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
    for name, order in (("reference", [0, 1, 2]), ("target", rows)):
        model = Translator().eval()
        if fault and name == "target":
            model.query.bias.data[3] += 0.05
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(ids[order], mask[order], answer[order])
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    if fault:
        assert result.findings[0].name == "query"
    else:
        assert result.status == "same"
