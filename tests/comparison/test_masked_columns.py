"""Padding of one input of several, as of an encoder before a decoder, is cut off."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


class Attention(nn.Module):
    def __init__(self, mask_is_read=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.mask_is_read = mask_is_read

    def forward(self, x, memory, mask=None):
        scores = self.q(x) @ self.k(memory).mT
        if mask is not None and self.mask_is_read:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return scores.softmax(-1) @ self.v(memory)


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.encode, self.cross = Attention(), Attention()
        self.experts = nn.Linear(8, 8)

    def forward(
        self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None
    ):
        x = self.embed(input_ids)
        x = x + self.encode(x, x, attention_mask)
        x = self.experts(x.flatten(0, 1)).view(x.shape)  # tokens of all rows in one axis
        y = self.embed(decoder_input_ids)
        return (y + self.cross(y, x, attention_mask)).cumsum(1)


IDS = torch.arange(10).view(2, 5), torch.arange(6).view(2, 3) + 10


def captured(path, front=0, behind=0, change=None):
    torch.manual_seed(0)
    model = Translation()
    if change:
        change(model)
    ids, decoder = IDS
    inputs = {"input_ids": ids, "decoder_input_ids": decoder}
    if front or behind:
        inputs["input_ids"] = nn.functional.pad(ids, (front, behind))
        inputs["attention_mask"] = nn.functional.pad(torch.ones_like(ids), (front, behind))
    with torch.no_grad(), whence.capture(model, path):
        model(**inputs)
    return path


@pytest.mark.parametrize(("front", "behind"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("is_padded", ["reference", "target"])
def test_an_encoder_that_was_given_padding_is_the_same(tmp_path, front, behind, is_padded):
    plain = captured(tmp_path / "plain")
    padded = captured(tmp_path / "padded", front, behind)
    result = whence.compare(*((plain, padded) if is_padded == "target" else (padded, plain)))
    assert result.status == "same"


def test_a_mask_that_is_not_read_is_named(tmp_path):
    def change(model):
        model.cross.mask_is_read = False

    plain, padded = captured(tmp_path / "plain"), captured(tmp_path / "padded", 0, 3, change)
    result = whence.compare(plain, padded)
    assert result.status == "different" and result.findings[0].name == "cross"


def test_columns_that_the_mask_shows_are_no_padding(tmp_path):
    plain = captured(tmp_path / "plain")
    longer = tmp_path / "longer"
    torch.manual_seed(0)
    model = Translation()
    ids = nn.functional.pad(IDS[0], (0, 2), value=3)
    with torch.no_grad(), whence.capture(model, longer):
        model(ids, IDS[1], torch.ones_like(ids))
    assert whence.compare(plain, longer).status != "same"


class Scores(nn.Module):
    def __init__(self, offset=0):
        super().__init__()
        self.embed, self.head, self.offset = nn.Embedding(32, 8), nn.Linear(8, 32), offset

    def forward(self, input_ids, keep=0, last=False, one=False):
        x = self.embed(input_ids).cumsum(1)
        place = x.shape[1] - 1 - self.offset
        if one:
            return self.head(x[:, place])
        if last:
            return self.head(x[:, place : place + 1])
        return self.head(x[:, -keep - self.offset : x.shape[1] - self.offset] if keep else x)


@pytest.mark.parametrize(
    ("options", "offset", "status"),
    [
        ({"keep": 1}, 0, "same"),
        ({"keep": 2}, 0, "same"),
        ({"keep": 2}, 1, "different"),  # other tokens than the last
        ({"last": True}, 0, "same"),
        ({"last": True}, 1, "undecided"),  # no argument says which
        ({"one": True}, 0, "same"),
        ({"one": True}, 1, "undecided"),
    ],
)
@pytest.mark.parametrize("is_asked", ["reference", "target"])
def test_scores_of_the_last_tokens_alone(tmp_path, is_asked, options, offset, status):
    for name in ("reference", "target"):
        torch.manual_seed(0)
        model, asked = Scores(offset), options if name == is_asked else {}
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(IDS[0], **asked)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == status


@pytest.mark.parametrize("one", ["last", "one"])
def test_a_wrong_layer_before_the_last_tokens_is_named(tmp_path, one):
    for name in ("reference", "target"):
        torch.manual_seed(0)
        model = Scores()
        if name == "target":
            model.head.weight.data[3] *= 1.1
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(IDS[0], **({one: True} if name == "target" else {}))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "different" and result.findings[0].name == "head"
