"""One model, run in variants: what holds, what is violated, and by which operator."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import inside
import warm
import whence
from whence.errors import UsageError
from whence.report.probe import probed_text
from whence.results import Held, Status
from whence.testing import (
    assert_batch_invariant,
    assert_causal,
    assert_padding_invariant,
    assert_repeatable,
)
from whence.workflows.probe.torch.judging import verdict

pytestmark = pytest.mark.torch

IDS = torch.tensor([[5, 9, 3, 7, 11, 2, 8, 4], [6, 3, 12, 9, 2, 10, 5, 13]])


class Attention(nn.Module):
    """One head. ahead: how many positions after its own one sees; None: all."""

    def __init__(self, ahead=0, sees_pads=False):
        super().__init__()
        self.qkv, self.ahead, self.sees_pads = nn.Linear(16, 48), ahead, sees_pads
        self.is_causal = ahead is not None

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool)
        if self.ahead is not None:
            seen = seen.tril(self.ahead)
        seen = seen.expand(x.shape[0], -1, -1)
        if mask is not None and not self.sees_pads:
            seen = seen & mask[:, None].bool()
        scores = scores.masked_fill(~seen, torch.finfo(x.dtype).min)
        return scores.softmax(-1) @ v


class Net(nn.Module):
    """Ids to logits through one attention and `extra`."""

    def __init__(self, extra=None, **attention):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(16, 16), nn.Embedding(64, 16)
        self.attention = Attention(**attention)
        self.extra = extra or nn.Identity()
        self.head = nn.Linear(16, 16)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids) + self.places(position_ids)
        return {"logits": self.head(self.extra(x + self.attention(x, attention_mask)))}


class Extra(nn.Module):
    """A function of the hidden states as a module."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def probed(model, *properties, **inputs):
    return whence.probe(model.eval(), {"input_ids": IDS, **inputs}, properties=properties)


def first(answer):
    return next(v.first for v in answer.variants if v.held == answer.held and v.first)


def test_a_decoder_without_a_fault_holds_everything():
    result = probed(Net())
    assert result.status == Status.SAME
    assert {a.property: a.held for a in result.answers}["causality"] == Held.EXACT
    assert "1 ulp" in result["causality"].power
    assert result["chunking"].held == Held.ABSENT
    assert "causality" in probed_text(result)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_mask_that_is_off_is_named_with_how_far_it_sees(ahead):
    answer = probed(Net(ahead=ahead), "causality")["causality"]
    assert answer.held == Held.VIOLATED
    assert f"up to {ahead} ahead" in answer.cause
    assert first(answer).operator == "aten._softmax"
    assert first(answer).scope == "attention"
    assert first(answer).line.startswith(__file__)


def test_an_encoder_is_not_at_fault_for_reading_both_ways():
    answer = probed(Net(ahead=None), "causality")["causality"]
    assert answer.held == Held.OBSERVED
    declared = whence.probe(Net(ahead=None), IDS, properties=["causality"], causal=True)
    assert declared["causality"].held == Held.VIOLATED
    assert probed(Net(ahead=None), "causality").status == Status.SAME


def test_a_model_that_takes_one_length_alone_is_asked_too():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1))
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = {"src": x, "mask": mask}
    held = whence.probe(net, inputs, properties=["causality"], causal=True)
    assert held["causality"].held in (Held.EXACT, Held.ROUNDING)
    inputs["mask"] = torch.zeros(6, 6)
    assert whence.probe(net, inputs, properties=["causality"], causal=True).status == "different"


def test_a_value_that_all_positions_share_is_named_where_it_is_used():
    pooled = Extra(lambda x: x + 0.1 * x.mean(1, keepdim=True))
    place = first(probed(Net(pooled), "causality")["causality"])
    assert (place.scope, place.after) == ("extra", "aten.mean.dim")


def test_pads_that_attention_sees_are_named_on_both_sides():
    mask = torch.ones_like(IDS)
    for ahead in (None, 0):
        answer = probed(Net(ahead=ahead, sees_pads=True), "padding", attention_mask=mask)["padding"]
        assert answer.held == Held.VIOLATED
        assert first(answer).operator == "aten._softmax"
        assert probed(Net(ahead=ahead), "padding", attention_mask=mask).status == Status.SAME


def test_positions_that_the_program_counts_over_its_padding_are_the_cause():
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    answer = probed(Net(), "padding", attention_mask=mask)["padding"]
    assert answer.held == Held.VIOLATED
    assert "position_ids" in answer.cause
    assert first(answer).scope == "places"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x: x + 1e-3 * x.roll(1, 0), "leak"),
        (lambda x: x * (1 + 0.01 * torch.arange(len(x))[:, None, None]), "place"),
        (lambda x: x if len(x) < 8 else x * 1.01, "number"),
    ],
)
def test_rows_that_reach_another_are_named(change, cause):
    answer = probed(Net(Extra(change)), "batch")["batch"]
    assert answer.held == Held.VIOLATED
    assert cause in answer.cause
    assert first(answer).scope == "extra"


class Split(nn.Linear):
    """Loses what 4 takes of the last digits, where there is more than one row."""

    def forward(self, x):
        y = super().forward(x)
        return y if len(x) == 1 else (y + 4.0) - 4.0


def test_an_operator_that_rounds_otherwise_in_a_batch_is_named():
    answer = probed(Net(Split(16, 16)), "batch")["batch"]
    assert answer.held == Held.ROUNDING
    assert first(answer).scope == "extra"
    assert max(v.ulp for v in answer.variants) < 100


def test_statistics_of_the_batch_are_the_cause():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        answer = whence.probe(net.train(), images, properties=["batch"])["batch"]
    assert answer.held == Held.VIOLATED
    assert "training mode" in answer.cause
    assert first(answer).operator == "aten.native_batch_norm"
    assert whence.probe(net.eval(), images, properties=["batch"]).status == Status.SAME


def test_a_model_is_left_as_it_was():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    whence.probe(net, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert net.training


def test_dropout_that_is_on_is_named():
    net = Net(nn.Dropout(0.1)).eval()
    net.extra.train()
    answer = whence.probe(net, IDS, properties=["repeat"])["repeat"]
    assert answer.held == Held.VIOLATED
    assert "dropout is on" in answer.cause
    assert first(answer).scope == "extra"


def test_random_numbers_that_are_no_dropout_are_no_fault():
    answer = probed(Net(Extra(lambda x: x + torch.rand_like(x))), "repeat")["repeat"]
    assert answer.held == Held.OBSERVED
    assert "rand" in first(answer).operator


def test_memory_that_nothing_wrote_is_named():
    def partly(x):
        out = torch.empty_like(x)
        out[:, 1:] = x[:, 1:]
        return x + 0.01 * out

    answer = probed(Net(Extra(partly)), "repeat")["repeat"]
    assert answer.held == Held.VIOLATED
    assert first(answer).operator == "aten.empty_like"


def test_what_a_call_leaves_for_the_next_is_named():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(16))

        def forward(self, x):
            out = x + 0.01 * self.kept
            self.kept.copy_(x[0, 0])
            return out

    answer = probed(Net(Keeps()), "repeat")["repeat"]
    assert answer.held == Held.VIOLATED
    assert "extra.kept" in answer.cause
    assert first(answer).scope == "extra"


def test_float64_tells_rounding_from_a_dependence():
    unit = 2.0**-24
    assert verdict(1e-6, 1e-15, unit)[0] == Held.ROUNDING
    assert verdict(1e-6, 9e-7, unit)[0] == Held.VIOLATED
    assert verdict(1e-2, 5e-4, 2.0**-9)[0] == Held.UNKNOWN
    assert verdict(1e-6, 1e-6, unit, "an operator in float32")[0] == Held.UNKNOWN


def test_assertions_of_a_test():
    net = Net().eval()
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    assert_causal(net, inputs)
    assert_padding_invariant(net, inputs)
    assert_repeatable(net, inputs)
    assert_batch_invariant(net, inputs)
    with pytest.raises(AssertionError, match=r"(?s)VIOLATED.*_softmax"):
        assert_causal(Net(ahead=1).eval(), inputs)


def test_ulps_are_counted_where_they_are_limited():
    net = Net(Split(16, 16)).eval()
    with pytest.raises(AssertionError, match="0 are allowed"):
        assert_batch_invariant(net, IDS, ulp=0)


def test_what_is_no_module_and_what_is_no_property_is_refused():
    with pytest.raises(UsageError, match="torch module"):
        whence.probe(SimpleNamespace(), IDS)
    with pytest.raises(UsageError, match="one of causality, padding"):
        probed(Net(), "balance")


PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(x + 0.1 * self.mix(x).mean(1, keepdim=True))
net = Net().eval()
print(net(torch.tensor([[3, 5, 7, 2, 9]])).double().sum().item().hex(), torch.rand(1).item().hex())
"""


def test_a_command_is_asked_and_computes_what_it_computes_without_us(tmp_path):
    bare = inside.program(tmp_path, PROGRAM)
    words = ["probe", "--only", "causality", "--causal", "--format", "json", "--"]
    asked = inside.or_outside(tmp_path, *words, warm.TORCH, "script.py")
    printed, _, answer = asked.stdout.partition("\n")
    assert printed == bare.stdout.strip()
    assert asked.returncode == 1
    answer = json.loads(answer)
    assert answer["model"] == "Net"
    assert answer["answers"][0]["variants"][0]["first"]["line"].endswith("script.py:11")


def test_an_input_that_is_not_contiguous_is_laid_out_so_too():
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    answer = whence.probe(net, torch.randn(4, 3).t(), properties=["repeat"])["repeat"]
    assert "from contiguous memory" in {v.name for v in answer.variants}
    assert answer.held in (Held.EXACT, Held.ROUNDING)
